"""Work side by side, results in order."""

import asyncio
import contextlib

import pytest

from roll.utils.threads import in_order


def test_results_come_in_the_order_of_the_items_and_few_are_under_way():
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

    async def main() -> list[tuple[int, int]]:
        seen = []
        async for item, result in in_order(items(), work, 4):
            assert taken <= item + 4
            seen.append((item, result))
        return seen

    assert asyncio.run(main()) == [(number, number * number) for number in range(20)]
    assert most == 4


def test_what_is_under_way_is_cancelled_with_a_failure_and_with_the_caller():
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

    async def fails() -> None:
        async for _ in in_order(range(4), work, 4):
            pass

    async def leaves() -> None:
        async with contextlib.aclosing(in_order([0, 2, 3], work, 3)) as results:
            async for _ in results:
                return

    with pytest.raises(ArithmeticError):
        asyncio.run(fails())
    assert cancelled == [2, 3]
    asyncio.run(leaves())
    assert cancelled == [2, 3, 2, 3]
