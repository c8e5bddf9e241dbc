"""An environment in threads, its own or shared, or in the event loop, and everything it may do wrong there."""

import asyncio
import threading
import time
from typing import Any

import pytest

import roll.agentic.env as envs
from roll.agentic.env.base import StepResult, TextEnv
from roll.agentic.env.sokoban import SokobanEnv
from roll.extras.worlds.gym_adapter import GymnasiumEnv
from roll.rollout.call_threads import CallThreads
from roll.rollout.env_runner import EnvRunner, OneAtATime
from roll.rollout.errors import EnvCrashError, EnvProtocolError, EnvTimeoutError
from tests.support.steps import usual_step
from tests.unit.rollout.conftest import wait_until


class OddEnv(TextEnv):
    """Does what ``step`` is told; the gate holds ``hang`` until the test lets go."""

    env_instruction = "Be odd."

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate or threading.Event()
        self.threads = [threading.get_ident()]
        self.closed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.threads.append(threading.get_ident())
        return f"seed {seed}", {"state_key": str(seed)}

    def step(self, action: str) -> StepResult:
        self.threads.append(threading.get_ident())
        if action == "hang":
            self.gate.wait(30)
        if action == "short":
            return "one", 0.0  # type: ignore[return-value]
        if action in ERRORS:
            raise ERRORS[action]
        return usual_step(action, action, action, task_reward=1.0, penalty=-0.25, truncated=True)

    def close(self) -> None:
        self.closed = True


class SlowSokoban(SokobanEnv):
    """Another's code around an instant environment."""


class ThreadBound(GymnasiumEnv):
    """Another's code around an environment that is bound to its thread."""


ERRORS: dict[str, BaseException] = {
    "crash": ZeroDivisionError("by nought"),
    "own timeout": TimeoutError("the game server is slow"),
    "ctrl-c": KeyboardInterrupt(),
    "stop": StopIteration("no more levels"),
    "exit": SystemExit(3),
    "cancel": asyncio.CancelledError("not yours"),
    "generator": GeneratorExit(),
}


@pytest.mark.parametrize("own_thread", [False, True])
async def test_no_call_runs_in_the_callers_thread_and_all_in_one_where_it_matters(own_thread):
    """From the construction on, which happens once, at the first call."""
    built: list[OddEnv] = []

    def make() -> OddEnv:
        built.append(OddEnv())
        return built[-1]

    runner = EnvRunner(make, timeout=5, own_thread=own_thread)
    assert built == []
    assert await runner.reset(7) == ("seed 7", {"state_key": "7", "env_instruction": "Be odd."})
    *others, info = await runner.step("left")
    assert others == ["left", 0.75, False, True]
    assert (info["task_reward"], info["penalty"], info["success"]) == (1.0, -0.25, True)
    assert info["env_instruction"] == "Be odd."  # prompts of later turns are filled from the last info
    assert await runner.call("peek", lambda env: env.env_instruction) == "Be odd."
    runner.close()
    (env,) = built
    assert len(set(env.threads)) == 1 or not own_thread
    assert threading.get_ident() not in env.threads
    wait_until(lambda: env.closed)


@pytest.mark.parametrize("options", [{}, {"own_thread": True}, {"instant": True}], ids=["shared", "own", "instant"])
@pytest.mark.parametrize("name", sorted(ERRORS))
async def test_whatever_a_step_raises_is_a_crash_that_says_so(name, options):
    runner = EnvRunner(OddEnv, timeout=5, **options)
    await runner.reset(0)
    with pytest.raises(EnvCrashError) as caught:
        await runner.step(name)
    assert (await runner.step("left"))[0] == "left"  # the thread lives on
    runner.close()
    assert str(caught.value).startswith("environment step raised ") and caught.value.__cause__ is not None
    assert type(ERRORS[name]).__name__ in str(caught.value)


async def test_an_instant_environment_plays_in_the_callers_thread_and_lets_others_in_between():
    order: list[str] = []

    async def play(name: str) -> OddEnv:
        env = OddEnv()
        runner = EnvRunner(lambda: env, timeout=5, instant=True)
        await runner.reset(0)
        for _ in range(3):
            await runner.step("left")
            order.append(name)
        runner.close()
        return env

    for env in await asyncio.gather(play("a"), play("b")):
        assert set(env.threads) == {threading.get_ident()} and env.closed
    assert order == ["a", "b"] * 3


def test_a_class_says_that_it_is_instant_or_wants_a_thread_of_its_own():
    assert envs.is_instant("sokoban") and envs.is_instant("frozen_lake")
    assert not envs.is_instant("sokoban", {"dim_room": [10, 10], "num_boxes": 4, "max_steps": 20})
    assert not envs.is_instant("sokoban", {"num_boxes": "many"}), "it cannot even be made"
    assert not envs.is_instant("gymnasium") and not envs.is_instant(f"{__name__}:SlowSokoban")
    assert envs.wants_own_thread("gymnasium") and not envs.wants_own_thread("sokoban")
    assert envs.wants_own_thread(f"{__name__}:ThreadBound")


async def test_a_step_of_the_wrong_form_and_a_failed_construction_are_named():
    runner = EnvRunner(OddEnv, timeout=5)
    with pytest.raises(EnvProtocolError, match=r"OddEnv.step returned \('one', 0.0\) \(tuple\), expected \(obs"):
        await runner.step("short")
    runner.close()

    def make() -> OddEnv:
        raise FileNotFoundError("levels.txt")

    runner = EnvRunner(make, timeout=5)
    for _ in range(2):  # the second call tries again
        with pytest.raises(EnvCrashError, match=r"environment reset raised FileNotFoundError: levels.txt"):
            await runner.reset(0)
    runner.close()


@pytest.mark.parametrize("own_thread", [False, True])
async def test_a_hung_environment_is_given_up_and_delays_no_other(gate, own_thread):
    threads = CallThreads()
    hung = EnvRunner(lambda: OddEnv(gate), timeout=1.0, threads=threads, own_thread=own_thread)
    other = EnvRunner(OddEnv, timeout=5, threads=threads, own_thread=own_thread)
    await asyncio.gather(hung.reset(0), other.reset(0))
    hanging = asyncio.create_task(hung.step("hang"))
    started = time.monotonic()
    for _ in range(20):
        await other.step("left")
    spent = time.monotonic() - started
    assert not hanging.done()
    with pytest.raises(EnvTimeoutError, match=r"environment step took longer than step_timeout=1s"):
        await hanging
    hung.close()
    other.close()
    assert spent < 1.0


def test_a_late_answer_to_a_loop_that_is_gone_harms_nobody(gate):
    failures: list[threading.ExceptHookArgs] = []
    env = OddEnv(gate)

    async def play() -> EnvRunner:
        runner = EnvRunner(lambda: env, timeout=0.1)
        with pytest.raises(EnvTimeoutError):
            await runner.step("hang")
        return runner

    hook, threading.excepthook = threading.excepthook, failures.append
    try:
        runner = asyncio.run(play())
        runner.close()
        gate.set()
        wait_until(lambda: env.closed)
    finally:
        threading.excepthook = hook
    assert failures == []


async def test_cancelling_the_caller_is_no_failure_of_the_environment(gate):
    runner = EnvRunner(lambda: OddEnv(gate), timeout=5)
    hanging = asyncio.create_task(runner.step("hang"))
    await asyncio.sleep(0.05)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    runner.close()


@pytest.mark.parametrize("locked", [True, False])
async def test_with_a_lock_one_call_runs_at_a_time(locked):
    inside: list[TextEnv] = []
    counts: list[int] = []

    def job(env: TextEnv) -> None:
        inside.append(env)
        counts.append(len(inside))
        time.sleep(0.01)
        inside.remove(env)

    lock, threads = OneAtATime() if locked else None, CallThreads()
    runners = [EnvRunner(OddEnv, timeout=5, lock=lock, own_thread=True, threads=threads) for _ in range(6)]
    await asyncio.gather(*(runner.call("job", job) for runner in runners for _ in range(2)))
    for runner in runners:
        runner.close()
    assert (max(counts) == 1) == locked


async def test_the_wait_for_a_turn_is_no_part_of_the_time_limit():
    lock, threads = OneAtATime(), CallThreads()
    runners = [EnvRunner(OddEnv, timeout=1.0, lock=lock, threads=threads) for _ in range(6)]
    await asyncio.gather(*(runner.call("nap", lambda env: time.sleep(0.25)) for runner in runners))
    for runner in runners:
        runner.close()


async def test_a_hung_environment_keeps_others_out_as_long_as_it_is_inside(gate):
    lock, threads = OneAtATime(), CallThreads()
    hung = EnvRunner(lambda: OddEnv(gate), timeout=0.1, lock=lock, threads=threads)
    other = EnvRunner(OddEnv, timeout=0.1, lock=lock, threads=threads)
    for runner in (hung, other):
        with pytest.raises(EnvTimeoutError):
            await runner.step("hang")
        runner.close()
    gate.set()
    third = EnvRunner(OddEnv, timeout=5, lock=lock, threads=threads)
    assert (await third.step("left"))[0] == "left"
    third.close()


@pytest.mark.parametrize("error", [OSError("the door is stuck"), SystemExit(3), asyncio.CancelledError()])
async def test_what_fails_while_an_instant_environment_is_closed_is_told_in_the_log(error, caplog):
    """It would take the place of the failure for which the environment is thrown away, and end the run."""

    class Stuck(OddEnv):
        def close(self) -> None:
            raise error

    with pytest.raises(EnvCrashError, match="by nought"):
        runner = EnvRunner(Stuck, timeout=5, instant=True)
        try:
            await runner.reset(7)
            await runner.step("crash")
        finally:
            runner.close()
    assert f"environment close raised {type(error).__name__}" in caplog.text
