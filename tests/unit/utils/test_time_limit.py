"""Time limits that waiting does not use up."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from roll.extras.sandbox.pool import Sandbox
from roll.utils.threads import time_limit, turn

LIMIT = 0.2


@asynccontextmanager
async def taken(slots: asyncio.Semaphore, seconds: float) -> AsyncIterator[None]:
    """The only slot is somebody else's for so long."""

    async def hold() -> None:
        async with turn(slots):
            await asyncio.sleep(seconds)

    holder = asyncio.create_task(hold())
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
