"""Work side by side with its results in order, and time limits that waiting does not use up."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from roll.extras.sandbox.pool import Sandbox
from roll.utils.threads import in_order, time_limit, turn

LIMIT = 0.2


async def test_results_come_in_the_order_of_the_items_and_few_are_under_way():
    running, most, taken = 0, 0, 0
    gates = [asyncio.Event() for _ in range(20)]

    def items():
        nonlocal taken
        for number in range(20):
            taken += 1
            yield number

    async def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        # Within a window the later ones are done first.
        if number % 4 == 3 or number == 19:
            for gate in gates[: number + 1]:
                gate.set()
        await gates[number].wait()
        running -= 1
        return number * number

    seen = []
    async for item, result in in_order(items(), work, 4):
        assert taken <= item + 4
        seen.append((item, result))
    assert seen == [(number, number * number) for number in range(20)] and most == 4


async def test_what_is_under_way_is_cancelled_with_a_failure_and_with_the_caller():
    cancelled = []

    async def work(number: int) -> int:
        if number == 1:
            raise ArithmeticError("1")
        try:
            await asyncio.sleep(0 if number == 0 else 3600)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        return number

    with pytest.raises(ArithmeticError):
        async for _ in in_order(range(4), work, 4):
            pass
    assert cancelled == [2, 3]
    async with contextlib.aclosing(in_order([0, 2, 3], work, 3)) as results:
        assert await anext(results) == (0, 0)
    assert cancelled == [2, 3, 2, 3]


@contextlib.asynccontextmanager
async def taken(slots: asyncio.Semaphore, seconds: float) -> AsyncIterator[None]:
    """The only slot is somebody else's for so long."""
    holder = asyncio.create_task(work(slots, seconds))
    await asyncio.sleep(0)
    yield
    await holder


async def work(slots: asyncio.Semaphore, seconds: float) -> None:
    async with turn(slots):
        await asyncio.sleep(seconds)


async def test_a_wait_for_ones_turn_does_not_count():
    slots = asyncio.Semaphore(1)
    async with taken(slots, 2 * LIMIT), time_limit(LIMIT) as limit:
        await work(slots, 0)
        assert not limit.expired()


@pytest.mark.parametrize("before", [0.0, 0.8 * LIMIT])
async def test_work_before_and_after_the_wait_counts(before):
    waited = 2 * LIMIT - before
    slots, began = asyncio.Semaphore(1), time.monotonic()
    async with taken(slots, 2 * LIMIT):
        with pytest.raises(TimeoutError):
            async with time_limit(LIMIT):
                await asyncio.sleep(before)
                await work(slots, 60)
    assert (time.monotonic() - began) >= LIMIT + waited - 0.01


async def test_tasks_inside_wait_for_each_other():
    slots = asyncio.Semaphore(1)
    async with time_limit(3 * LIMIT):
        await asyncio.gather(*(work(slots, LIMIT) for _ in range(4)))


async def test_without_a_limit_and_after_its_end_there_is_nothing_to_stop():
    slots = asyncio.Semaphore(1)
    await work(slots, 0)
    async with taken(slots, LIMIT):
        async with time_limit(60):
            late = asyncio.create_task(work(slots, 0))
            await asyncio.sleep(0)
        await late
    async with taken(slots, LIMIT):
        with pytest.raises(TimeoutError):
            async with time_limit(LIMIT / 4):
                await asyncio.sleep(60)
    assert not slots.locked()


async def test_a_program_that_waits_for_a_sandbox_has_all_of_its_time():
    sandbox = Sandbox(allow_unsafe=True, max_parallel=1)
    first = asyncio.create_task(sandbox.run_program("import time; time.sleep(2.5)"))
    await asyncio.sleep(0)
    async with time_limit(2):
        result = await sandbox.run_program("print(17 * 3)")
    await first
    assert result.stdout == "51\n"
