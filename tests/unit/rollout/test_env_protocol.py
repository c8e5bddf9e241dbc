"""Environments that break the protocol cost their episode, never the run, its files or its pages."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll.agentic.env import TextEnv
from roll.agentic.env.base import StepResult
from roll.configs.env import CustomEnvConfig
from roll.data.requests import SamplingParams
from roll.pipeline.rollouts import write_trajectories
from roll.report.render import render_index, save_renders
from roll.rollout.env_manager import LengthLimits
from roll.rollout.env_runner import MAX_TEXT, checked_reset, checked_step
from roll.rollout.env_worker import EnvironmentWorker, EnvWorkerContext, Probed
from roll.rollout.errors import EnvProtocolError
from roll.rollout.metrics import rollout_metrics
from roll.rollout.plans import GroupSpec
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import RolloutGroup
from roll.tracking.run import RunFolder, read_json_lines
from tests.support.examples import examples
from tests.unit.rollout.conftest import Engine

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
        step: what to return from ``step``, field by field.
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
        fields = FINE | {"info": FINE["info"] | (info or {})} | (step or {})
        return tuple(fields.values())  # type: ignore[return-value]


REPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "no text": ({"step": {"observation": None}}, "Maze.step returned observation None (NoneType), expected text"),
    "observation int": ({"step": {"observation": 7}}, "Maze.step returned observation 7 (int), expected text"),
    "observation bytes": ({"step": {"observation": b"ab"}}, "observation b'ab' (bytes), expected text"),
    "surrogates": ({"step": {"observation": SURROGATE}}, r"'left \ud800 right' (str), expected text without lone"),
    "too long": ({"step": {"observation": "x" * (MAX_TEXT + 1)}}, "observation of 4,000,001 bytes, expected at most"),
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
    mazes = {
        "Fine": maze(),
        "Mute": maze(reset=(None, {})),
        "Missing": CustomEnvConfig(env_type=f"{__name__}:Maze", env_config={"no_such_key": 1}),
    }
    worker = EnvironmentWorker("envs", 0, 1, {})
    probed = asyncio.run(worker.probe(mazes, retries=1, seed=3))
    problems = [each.problem for each in probed if each.problem]
    assert [problem.split(":")[0] for problem in problems] == ["custom_envs.Mute", "custom_envs.Missing"]
    assert "Maze.reset returned observation None" in problems[0] and "no_such_key" in problems[1]
    assert asyncio.run(worker.probe({"Fine": mazes["Fine"]}, retries=0, seed=3)) == [Probed("Fine")]
