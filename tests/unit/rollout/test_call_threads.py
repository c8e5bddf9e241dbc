"""Threads that many environments share: few for quick calls, as many as block, and none for one that hangs."""

import asyncio
import threading
import time
from typing import Any

import pytest

from roll.rollout.call_threads import PATIENCE_S, QUICK_S, CallThreads, CallTimeoutError, Mailbox
from tests.support.processes import happens


def mailboxes(number: int, threads: CallThreads | None = None, **options: Any) -> list[Mailbox]:
    threads = threads or CallThreads()
    return [threads.mailbox(**options) for _ in range(number)]


def close(*boxes: Mailbox) -> None:
    for box in boxes:
        box.close(lambda: None)


async def test_quick_calls_of_many_environments_share_a_few_threads():
    boxes = mailboxes(500)
    idents = []
    for _ in range(4):
        idents += await asyncio.gather(*(box.run("step", threading.get_ident, 5) for box in boxes))
    close(*boxes)
    assert len(idents) == 2000 and threading.get_ident() not in idents
    assert len(set(idents)) < 10  # more than one where the machine is busy


async def test_calls_that_block_at_the_same_time_all_get_a_thread():
    barrier = threading.Barrier(64)

    boxes = mailboxes(64)
    for _ in range(3):  # each goes on when all of them are in it
        await asyncio.gather(*(box.run("step", lambda: barrier.wait(10), 20) for box in boxes))
    close(*boxes)


async def test_a_call_that_hangs_delays_no_other_and_its_thread_serves_nobody_else(gate):
    hung, *boxes = mailboxes(20)
    where: list[int] = []

    def hang() -> None:
        where.append(threading.get_ident())
        gate.wait(30)

    hanging = asyncio.create_task(hung.run("step", hang, 0.3))
    await asyncio.sleep(0)
    others: set[int] = set()
    while not hanging.done():
        others.update(await asyncio.gather(*(box.run("step", threading.get_ident, 5) for box in boxes)))
        await asyncio.sleep(0.01)
    with pytest.raises(CallTimeoutError):
        await hanging
    gate.set()  # from here on the thread could go on
    where.append(await hung.run("step", threading.get_ident, 5))
    for _ in range(20):
        others.update(await asyncio.gather(*(box.run("step", threading.get_ident, 5) for box in boxes)))
    close(hung, *boxes)
    assert len(others) > 0 and where[0] not in others
    assert where[1] == where[0], "calls of one environment stay in their order"


async def test_a_call_that_is_given_up_before_it_begins_never_does(gate):
    first, second = mailboxes(2)
    begun: list[str] = []

    busy = asyncio.create_task(first.run("step", lambda: gate.wait(5), 5))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(second.run("agent", lambda: begun.append("agent"), 5, ends_with_caller=True))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    second.close(lambda: begun.append("closed"))
    gate.set()
    await busy
    close(first)
    assert happens(lambda: begun != [])
    time.sleep(2 * PATIENCE_S)
    assert begun == ["closed"]


async def test_a_thread_that_was_given_up_is_ended_even_if_it_is_busy():
    before = threading.active_count()

    def busy() -> None:
        while True:
            pass

    (box,) = mailboxes(1)
    with pytest.raises(CallTimeoutError):
        await box.run("step", busy, 0.1)
    close(box)
    assert happens(lambda: threading.active_count() <= before)


async def test_an_environment_that_is_given_up_as_its_call_ends_is_closed_all_the_same():
    """What is raised in a thread comes at any time, also when the call is over by then."""
    closed: list[int] = []
    given_up: list[bool] = []
    threads, limit = CallThreads(), 1.5 * PATIENCE_S

    async def play(number: int) -> bool:
        box = threads.mailbox(own_thread=number % 2 == 0)
        try:
            await box.run("step", lambda: time.sleep(limit + (number % 20 - 10) / 10_000), limit)
        except CallTimeoutError:
            return True
        finally:
            box.close(lambda: closed.append(number))
        return False

    for first in range(0, 1000, 40):
        given_up += await asyncio.gather(*(play(first + number) for number in range(40)))
    assert any(given_up)
    assert happens(lambda: len(closed) == len(given_up))


@pytest.mark.parametrize("own_thread", [False, True])
async def test_calls_of_one_environment_run_in_their_order_one_at_a_time(own_thread, gate):
    order: list[str] = []

    (box,) = mailboxes(1, own_thread=own_thread)
    first = asyncio.create_task(box.run("step", lambda: (gate.wait(5), order.append("first")), 5))
    await asyncio.sleep(3 * PATIENCE_S)
    first.cancel()  # who asked for it does not wait for it any more
    second = asyncio.create_task(box.run("step", lambda: order.append("second"), 5))
    await asyncio.sleep(3 * PATIENCE_S)
    assert order == []
    box.close(lambda: order.append("closed"))
    gate.set()
    await second
    assert happens(lambda: order == ["first", "second", "closed"])


async def test_an_environment_with_its_own_thread_stays_in_it():
    threads = CallThreads()
    boxes = [*mailboxes(3, threads, own_thread=True), *mailboxes(1, threads)]
    rounds = [await asyncio.gather(*(box.run("step", threading.get_ident, 5) for box in boxes)) for _ in range(5)]
    close(*boxes)
    assert len(set(rounds[0])) == 4
    assert all(idents[:3] == rounds[0][:3] for idents in rounds)


@pytest.mark.parametrize("own_thread", [False, True])
def test_the_threads_end_with_the_last_environment(own_thread):
    before, threads = threading.active_count(), CallThreads()

    async def play() -> None:
        boxes = mailboxes(30, threads, own_thread=own_thread)
        await asyncio.gather(*(box.run("step", lambda: time.sleep(3 * PATIENCE_S), 5) for box in boxes))
        assert threading.active_count() > before + 3
        close(*boxes)

    asyncio.run(play())
    assert happens(lambda: threading.active_count() <= before)

    async def again() -> int:
        (box,) = mailboxes(1, threads, own_thread=own_thread)
        ident = await box.run("step", threading.get_ident, 5)
        close(box)
        return ident

    assert asyncio.run(again()) != threading.get_ident(), "another loop can go on with them"
    assert happens(lambda: threading.active_count() <= before)


async def test_an_environment_that_was_slow_twice_is_given_a_thread_at_once(gate):
    """Nobody looks for slow calls in between: the loop does not get to it."""
    slow, blocked = mailboxes(2)
    for _ in range(2):
        assert not slow.is_slow("step")
        await slow.run("step", lambda: time.sleep(2 * QUICK_S), 5)
    assert slow.is_slow("step") and not slow.is_slow("reset")
    order: list[str] = []
    waiting = asyncio.gather(
        blocked.run("step", lambda: (gate.wait(5), order.append("blocked")), 5),
        slow.run("step", lambda: (order.append("slow"), gate.set()), 5),
    )
    await asyncio.sleep(0)
    gate.wait(5)
    await waiting
    close(slow, blocked)
    assert order == ["slow", "blocked"]


async def test_calls_that_wait_for_a_moment_each_wait_side_by_side():
    """None of them is in its thread for so long that it is found there."""
    idents: set[int] = set()

    def wait() -> None:
        time.sleep(5 * QUICK_S)
        idents.add(threading.get_ident())

    boxes = mailboxes(400)
    await asyncio.gather(*(box.run("step", wait, 20) for box in boxes))
    close(*boxes)
    assert len(idents) > 10


def test_what_fails_while_an_environment_is_closed_is_told_in_the_log(caplog):
    def fail() -> None:
        raise OSError("the door is stuck")

    (box,) = mailboxes(1)
    box.close(fail)
    assert happens(lambda: "environment close raised OSError: the door is stuck" in caplog.text)
