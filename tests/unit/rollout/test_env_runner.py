"""An environment in threads, its own or shared, or in the event loop, and everything it may do and say wrong there."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import roll.agentic.env as envs
from roll.agentic.env.base import StepResult, TextEnv
from roll.agentic.env.sokoban import SokobanEnv
from roll.configs.env import CustomEnvConfig
from roll.data.requests import SamplingParams
from roll.extras.worlds.gym_adapter import GymnasiumEnv
from roll.pipeline.rollouts import write_trajectories
from roll.report.render import render_index, save_renders
from roll.rollout.call_threads import CallThreads
from roll.rollout.env_manager import LengthLimits
from roll.rollout.env_runner import MAX_TEXT, EnvRunner, OneAtATime, checked_reset, checked_step
from roll.rollout.env_worker import EnvironmentWorker, EnvWorkerContext, Probed
from roll.rollout.errors import EnvCrashError, EnvProtocolError, EnvTimeoutError
from roll.rollout.metrics import rollout_metrics
from roll.rollout.plans import GroupSpec
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import RolloutGroup
from roll.tracking.run import RunFolder, read_json_lines
from tests.support.examples import examples
from tests.support.processes import happens
from tests.support.rollouts import Engine
from tests.support.steps import usual_step


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
    assert happens(lambda: env.closed)


@pytest.mark.parametrize("options", [{}, {"own_thread": True}, {"instant": True}], ids=["shared", "own", "instant"])
@pytest.mark.parametrize("name", sorted(ERRORS))
async def test_whatever_a_step_raises_is_a_crash_that_says_so(name, options):
    with closing(EnvRunner(OddEnv, timeout=5, **options)) as runner:
        await runner.reset(0)
        with pytest.raises(EnvCrashError) as caught:
            await runner.step(name)
        assert (await runner.step("left"))[0] == "left"  # the thread lives on
    assert str(caught.value).startswith("environment step raised ") and caught.value.__cause__ is not None
    assert type(ERRORS[name]).__name__ in str(caught.value)


async def test_an_instant_environment_plays_in_the_callers_thread_and_lets_others_in_between():
    order: list[str] = []

    async def play(name: str) -> OddEnv:
        env = OddEnv()
        with closing(EnvRunner(lambda: env, timeout=5, instant=True)) as runner:
            await runner.reset(0)
            for _ in range(3):
                await runner.step("left")
                order.append(name)
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


async def test_a_failed_construction_is_named():
    def make() -> OddEnv:
        raise FileNotFoundError("levels.txt")

    with closing(EnvRunner(make, timeout=5)) as runner:
        for _ in range(2):  # the second call tries again
            with pytest.raises(EnvCrashError, match=r"environment reset raised FileNotFoundError: levels.txt"):
                await runner.reset(0)


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


def test_a_late_answer_to_a_loop_that_is_gone_harms_nobody(gate, monkeypatch):
    failures: list[threading.ExceptHookArgs] = []
    env = OddEnv(gate)

    async def play() -> EnvRunner:
        runner = EnvRunner(lambda: env, timeout=0.1)
        with pytest.raises(EnvTimeoutError):
            await runner.step("hang")
        return runner

    monkeypatch.setattr(threading, "excepthook", failures.append)
    asyncio.run(play()).close()
    gate.set()
    assert happens(lambda: env.closed)
    assert failures == []


async def test_cancelling_the_caller_is_no_failure_of_the_environment(gate):
    with closing(EnvRunner(lambda: OddEnv(gate), timeout=5)) as runner:
        hanging = asyncio.create_task(runner.step("hang"))
        await asyncio.sleep(0.05)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging


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
        with closing(runner), pytest.raises(EnvTimeoutError):
            await runner.step("hang")
    gate.set()
    with closing(EnvRunner(OddEnv, timeout=5, lock=lock, threads=threads)) as third:
        assert (await third.step("left"))[0] == "left"


@pytest.mark.parametrize("error", [OSError("the door is stuck"), SystemExit(3), asyncio.CancelledError()])
async def test_what_fails_while_an_instant_environment_is_closed_is_told_in_the_log(error, caplog):
    """It would take the place of the failure for which the environment is thrown away, and end the run."""

    class Stuck(OddEnv):
        def close(self) -> None:
            raise error

    with pytest.raises(EnvCrashError, match="by nought"), closing(EnvRunner(Stuck, 5, instant=True)) as runner:
        await runner.reset(7)
        await runner.step("crash")
    assert f"environment close raised {type(error).__name__}" in caplog.text


# --- answers that break the protocol: they cost their episode, never the run, its files or its pages


SURROGATE = "left \ud800 right"


class Silent(Exception):
    """Cannot be told."""

    def __str__(self) -> str:
        raise RecursionError("no words")


class Unspeakable:
    """Neither has a text."""

    def __repr__(self) -> str:
        raise Silent

    __str__ = __repr__


FINE: dict[str, Any] = {
    "observation": "a room",
    "reward": 0.25,
    "terminated": False,
    "truncated": False,
    "info": {"action": "go", "success": False, "state_key": "s"},
}


class Maze(TextEnv):
    """Says what it is told to say.

    Args:
        reset: what to return from ``reset`` in place of the observation and the info.
        step: what to return from ``step``, field by field, or as a whole.
        info: entries that replace those of the info.
        error: what ``step`` raises.
    """

    def __init__(self, reset: Any = None, step: Any = None, info: Any = None, error: Any = None) -> None:
        self.answers = reset, step, info, error

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return self.answers[0] if self.answers[0] is not None else ("start", {"state_key": "start"})

    def step(self, action: str) -> StepResult:
        _, step, info, error = self.answers
        if error is not None:
            raise error
        if isinstance(step, tuple):
            return step  # type: ignore[return-value]
        fields = FINE | {"info": FINE["info"] | (info or {})} | (step or {})
        return tuple(fields.values())  # type: ignore[return-value]


REPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "no text": ({"step": {"observation": None}}, "Maze.step returned observation None (NoneType), expected text"),
    "observation int": ({"step": {"observation": 7}}, "Maze.step returned observation 7 (int), expected text"),
    "observation bytes": ({"step": {"observation": b"ab"}}, "observation b'ab' (bytes), expected text"),
    "surrogates": ({"step": {"observation": SURROGATE}}, r"'left \ud800 right' (str), expected text without lone"),
    "too long": ({"step": {"observation": "x" * (MAX_TEXT + 1)}}, "observation of 4,000,001 bytes, expected at most"),
    "step of two": ({"step": ("one", 0.0)}, "Maze.step returned ('one', 0.0) (tuple), expected (observation, reward, "),
    "reset None": ({"reset": (None, {})}, "Maze.reset returned observation None (NoneType), expected text"),
    "reset alone": ({"reset": "start"}, "Maze.reset returned 'start' (str), expected (observation, info)"),
    "info None": ({"step": {"info": None}}, "Maze.step returned info None (NoneType), expected a dictionary"),
    "penalty None": ({"info": {"penalty": None}}, "info['penalty'] None (NoneType), expected a finite number"),
    "task reward text": ({"info": {"task_reward": "1"}}, "info['task_reward'] '1' (str), expected a finite number"),
    "task reward nan": ({"info": {"task_reward": float("nan")}}, "info['task_reward'] nan (float), expected a finite"),
    "reward inf": ({"step": {"reward": -np.inf}}, "Maze.step returned reward -inf (float), expected a finite number"),
    "reward array": ({"step": {"reward": np.zeros(2)}}, "reward array([0., 0.]) (ndarray), expected a finite number"),
    "terminated array": ({"step": {"terminated": np.array([True, False])}}, "(ndarray), expected True or False"),
    "truncated None": ({"step": {"truncated": None}}, "returned truncated None (NoneType), expected True or False"),
    "success text": ({"info": {"success": "yes"}}, "info['success'] 'yes' (str), expected True or False"),
    "action number": ({"info": {"action": 2}}, "info['action'] 2 (int), expected text"),
    "action surrogates": ({"info": {"action": SURROGATE}}, "info['action'] 'left"),
    "key": ({"info": {"state_key": Unspeakable()}}, "info['state_key']"),
    "silent": ({"error": Silent()}, "environment step raised Silent: (its message cannot be read: RecursionError)"),
    "surrogate error": ({"error": ValueError(SURROGATE)}, r"environment step raised ValueError: left \ud800 right"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path, "run")
    yield folder
    folder.close()


def maze(**env_config: Any) -> CustomEnvConfig:
    return CustomEnvConfig(env_type=f"{__name__}:Maze", max_steps=2, env_config=env_config, step_timeout=20)


def play(tokenizer_path: str, **env_config: Any) -> RolloutGroup:
    """A group of two, played by the worker of a real run."""
    limits = LengthLimits(prompt_length=200, sequence_length=400)
    worker = EnvironmentWorker("envs", 0, 1, {})
    worker.setup(EnvWorkerContext({"Maze": maze(**env_config)}, tokenizer_path, "native", SamplingParams(), limits, 1))
    worker.client = Engine("go")  # type: ignore[assignment]
    return asyncio.run(worker.run_group(GroupSpec(3, "Maze", env_seed=5, group_size=2)))


def write_everything(group: RolloutGroup, folder: RunFolder) -> None:
    """All that a run makes of an evaluation."""
    path = write_trajectories(folder, "eval", group.trajectories)
    assert len(read_json_lines(path)) == len(group.trajectories)
    pages = save_renders(group.trajectories, folder.renders, 1, 1)
    assert len(pages) == min(1, len(group.trajectories)) and render_index(folder.path).exists()
    assert all(np.isfinite(value) for value in rollout_metrics([group], "eval").values())


@pytest.mark.parametrize("name", sorted(REPORTED))
def test_a_broken_answer_is_counted_with_its_place(name, tokenizer_path, folder):
    faults, message = REPORTED[name]
    group = play(tokenizer_path, **faults)
    assert (len(group.trajectories), group.dropped, len(group.errors)) == (0, 2, 4), "each is tried once more"
    assert all(message in error and error.startswith("Maze group 3 member ") for error in group.errors)
    write_everything(group, folder)


def test_a_first_observation_that_does_not_fit_costs_its_episode_and_a_later_one_ends_it(tokenizer_path, folder):
    group = play(tokenizer_path, reset=("x" * 1_000_000, {}))
    assert (len(group.trajectories), group.dropped) == (0, 2)
    assert "Maze: the first prompt has 1000" in group.errors[0] and "prompt_length is 200" in group.errors[0]
    group = play(tokenizer_path, step={"observation": "y" * 1_000_000})
    assert rollout_metrics([group], "eval")["eval/context_full"] == 1.0
    write_everything(group, folder)
    assert sum(path.stat().st_size for path in folder.renders.iterdir()) < 400_000, "pages stay readable"


def test_what_numpy_calls_text_numbers_and_truth_is_taken_as_plain_values(tokenizer_path):
    step = {"observation": np.str_("b"), "reward": np.float32(0.5), "terminated": np.bool_(True), "truncated": 0}
    info = {"success": np.int64(1), "penalty": np.array(-0.25), "action": np.str_("go")}
    (first, _) = play(tokenizer_path, step=step, info=info).trajectories
    (turn,) = first.turns
    assert (type(first.final_observation), type(turn.action), type(turn.penalty)) == (str, str, float)
    assert (turn.task_reward, turn.penalty, first.success, first.end) == (0.75, -0.25, True, "terminated")


def test_other_entries_of_the_info_never_cost_an_episode_nor_pass_for_counts(tokenizer_path, folder):
    extras = {"note": SURROGATE, "log": "z" * 99_999, "huge": 10**5000, "low": -(10**5000), "odd": Unspeakable(), 5: 6}
    group = play(tokenizer_path, info=extras | {SURROGATE: 1, "nan": float("nan")})
    assert len(group.trajectories) == 2
    info = group.trajectories[0].info
    assert info["note"] == r"left \ud800 right" and len(info["log"]) < 20_000 and info["huge"] == float("inf")
    assert info["5"] == 6 and "odd" not in info
    write_everything(group, folder)
    own = {"tool_calls": 2, "agent_name": "Ada", "agent_steps": 3, "agent_lives": float("inf"), "tokens_compared": "no"}
    group = play(tokenizer_path, info=own)
    write_everything(group, folder)
    metrics = rollout_metrics([group], "eval")
    assert (metrics["eval/tool_calls"], metrics["eval/agent/steps"]) == (2.0, 3.0)
    assert not {"eval/failed_calls", "eval/agent/name", "eval/agent/lives", "eval/tokens/differ"} & metrics.keys()


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(alphabet=st.characters(), max_size=9),  # lone surrogates included
    st.binary(max_size=4),
    st.lists(st.integers(), max_size=3),
    st.sampled_from([np.zeros(2), np.array(True), np.float64("nan"), 10**400, object]),
)


@given(
    step=st.dictionaries(st.sampled_from(sorted(FINE)), ANYTHING, max_size=2),
    info=st.dictionaries(
        st.one_of(
            st.sampled_from(["action", "penalty", "success", "state_key"]),
            ANYTHING.filter(lambda key: getattr(key, "__hash__", None) is not None),
        ),
        ANYTHING,
        max_size=3,
    ),
)
@examples(200)
def test_an_answer_is_made_of_plain_values_or_refused_by_name(step, info):
    env = Maze(step=step, info=info)
    try:
        observation, reward, terminated, truncated, seen = checked_step(env, "go")
    except EnvProtocolError as error:
        assert str(error).startswith("Maze.step returned ") and str(error).encode()
        return
    assert observation.encode() is not None and abs(reward) <= 1e30
    assert type(terminated) is bool and type(truncated) is bool
    assert seen["action"] is None or seen["action"].encode() is not None


@given(answer=st.one_of(ANYTHING, st.tuples(ANYTHING, ANYTHING)))
@examples(100)
def test_a_first_answer_too(answer):
    try:
        observation, info = checked_reset(Maze(reset=answer), 0)
    except EnvProtocolError as error:
        assert str(error).startswith("Maze.reset returned ") and str(error).encode()
        return
    assert observation.encode() is not None and info["env_instruction"] == ""


@given(
    step=st.dictionaries(st.sampled_from(sorted(FINE)), ANYTHING, max_size=1), key=st.text(max_size=3), value=ANYTHING
)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_answered_the_group_is_counted_and_can_be_shown(step, key, value, tokenizer_path, folder):
    group = play(tokenizer_path, step=step, info={key: value})
    assert len(group.trajectories) + group.dropped == 2
    write_everything(group, folder)
    if group.trajectories:
        assert groups_to_batch([group], ["Maze"]).rewards_T.isfinite().all()


def test_a_probe_finds_environments_that_never_start_before_any_setup():
    """One reset of each tag, with the retries that an episode has too."""
    mazes = {"Fine": maze(), "Mute": maze(reset=(None, {})), "Missing": maze(no_such_key=1)}
    worker = EnvironmentWorker("envs", 0, 1, {})
    probed = asyncio.run(worker.probe(mazes, retries=1, seed=3))
    problems = [each.problem for each in probed if each.problem]
    assert [problem.split(":")[0] for problem in problems] == ["custom_envs.Mute", "custom_envs.Missing"]
    assert "Maze.reset returned observation None" in problems[0] and "no_such_key" in problems[1]
    assert asyncio.run(worker.probe({"Fine": mazes["Fine"]}, retries=0, seed=3)) == [Probed("Fine")]
