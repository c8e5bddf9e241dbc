"""Rows of an episode against the engine's own log, for a harness that does whatever it likes with its history."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.agentic.env.base import StepResult
from roll.configs.env import CustomEnvConfig
from roll.data.requests import Completion, GenerateRequest, SamplingParams
from roll.data.stored import Stored
from roll.rollout.env_manager import TOOL_TURNS, EpisodeSpec, LengthLimits, Recorder, StepEnvManager, TrajEnvManager
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import Trajectory, Turn
from roll.rollout.workers import FlatGroups
from tests.support.examples import examples
from tests.support.rollouts import RENDERER, batch_of, group_of, make_trajectory, make_turn, sampled

EngineLog = list[tuple[list[int], Completion]]


@dataclass
class Engine:
    """Samples from three tokens, so that equal answers are common; log-probs and versions tell calls apart."""

    rng: np.random.Generator
    log: EngineLog = field(default_factory=list)

    def generate(self, prompt: list[int]) -> Completion:
        number, size = len(self.log), int(self.rng.integers(0, 4))
        first = number + int(self.rng.integers(3))  # an update may come in the middle
        ids, logprobs = self.rng.integers(3, size=size), -(np.arange(size, dtype=np.float32) / 10 + number + 1)
        versions = np.sort(first + self.rng.integers(2, size=size))
        completion = sampled(ids, str(number), logprobs=logprobs, versions=versions)
        self.log.append((prompt, completion))
        return completion


def next_prompt(rng: np.random.Generator, log: EngineLog) -> list[int]:
    """What a harness may send: a call goes on, is tried again, is cut, is compacted, or has nothing to do with any."""
    new = rng.integers(3, size=int(rng.integers(1, 4))).tolist()
    if not log:
        return new
    prompt, completion = log[int(rng.integers(len(log)))] if rng.random() < 0.5 else log[-1]
    whole = prompt + completion.token_ids.tolist()
    match rng.integers(6):
        case 0:
            return prompt
        case 1:
            return whole[: int(rng.integers(1, len(whole) + 1))] + new
        case 2:
            return prompt[:1] + new
        case 3:
            return new
        case _:
            return whole + new


def play(seed: int) -> tuple[Trajectory, EngineLog]:
    rng = np.random.default_rng(seed)
    engine, recorder = Engine(rng), Recorder()
    waiting: list[Turn] = []
    for _ in range(int(rng.integers(1, 12))):
        prompt = next_prompt(rng, engine.log)
        waiting.append(make_turn(prompt, engine.generate(prompt), float(rng.integers(3))))
        while waiting and rng.random() < 0.7:  # several calls may run at once and end in any order
            recorder.add(waiting.pop(int(rng.integers(len(waiting)))))
    for turn in waiting:
        recorder.add(turn)
    return make_trajectory(recorder.turns), engine.log


def assert_trained(trajectory: Trajectory, log: EngineLog) -> int:
    """Each call of the engine is in one row once, behind what it was given; returns how many rows there are."""
    answers = [(prompt, completion) for prompt, completion in log if len(completion.token_ids)]
    (sent,) = FlatGroups.of([group_of(trajectory)])
    if not answers:
        return 0
    batch = groups_to_batch([sent], ["A"])
    assert isinstance(vars(batch)["tokens_T"], Stored), "rows stay where they are"
    for name, column in vars(batch_of(trajectory)).items():
        assert torch.equal(getattr(batch, name), column) if isinstance(column, torch.Tensor) else column is None
    columns = (batch.tokens_T, batch.loss_mask_T, batch.rollout_logprobs_T, batch.rollout_versions_T)
    rows = [
        tuple(column[start : start + length].tolist() for column in columns)
        for start, length in zip(batch.offsets_B.tolist(), batch.lengths_B.tolist(), strict=True)
    ]
    for prompt, completion in answers:
        n, m = len(prompt), len(completion.token_ids)
        wanted = (completion.token_ids.tolist(), [True] * m, completion.logprobs.tolist(), completion.versions.tolist())
        found = [row for row in rows if row[0][:n] == prompt and tuple(part[n : n + m] for part in row) == wanted]
        assert len(found) == 1, (prompt, completion, rows)
    assert int(batch.loss_mask_T.sum()) == sum(len(completion.token_ids) for _, completion in answers)
    assert float(batch.rewards_T.sum()) == sum(t.reward for t in trajectory.turns if len(t.completion.token_ids))
    if batch.sample_weight_B is not None:
        assert float(batch.sample_weight_B.sum()) == pytest.approx(1.0)
    else:
        assert len(rows) == 1 or not trajectory.history
    assert [turn.row for turn in next(iter(FlatGroups.of([sent]))).trajectories[0].turns] == [
        turn.row for turn in trajectory.turns
    ]
    return len(rows)


@examples(300)
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_are_the_engines_own_log(seed):
    assert_trained(*play(seed))


@dataclass
class Game:
    """An environment that says, pays and ends by chance; now and then it answers as tools do."""

    rng: np.random.Generator
    tool_turns: int = 0

    def info(self) -> dict[str, Any]:
        calls = self.rng.random() < 0.3
        self.tool_turns += calls
        messages = [{"role": "tool", "content": str(self.rng.integers(9)), "name": "add"}]
        return {TOOL_TURNS: self.tool_turns} | ({"messages": messages} if calls else {})

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "begin", {}

    async def step(self, text: str) -> StepResult:
        ends, cut = (bool(self.rng.random() < 0.1) for _ in range(2))
        return "a" * int(self.rng.integers(4)), float(self.rng.integers(3)), ends, cut, self.info()

    async def render(self) -> None:
        return None


@examples(60)
@given(seed=st.integers(0, 2**32 - 1), manager_class=st.sampled_from([TrajEnvManager, StepEnvManager]))
def test_the_environment_loop_trains_on_the_engines_own_log_too(seed, manager_class):
    rng = np.random.default_rng(seed)
    engine = Engine(rng)

    async def generate(request: GenerateRequest) -> Completion:
        return engine.generate(request.prompt_ids.tolist())

    config = CustomEnvConfig(env_type="frozen_lake", max_steps=6)
    limits = LengthLimits(prompt_length=500, sequence_length=int(rng.integers(80, 400)))
    manager = manager_class(config, RENDERER, SamplingParams(), limits)
    spec = EpisodeSpec("A", 0, 0, env_seed=1, sampling_seed=2)
    trajectory = asyncio.run(manager.run_episode(Game(rng), generate, spec))
    assert [(turn.prompt_ids.tolist(), turn.completion) for turn in trajectory.turns] == engine.log
    rows = assert_trained(trajectory, engine.log)
    assert rows <= 1 if trajectory.history else rows <= len(engine.log)


def test_a_conversation_with_a_sub_agent_and_a_compaction_is_three_rows():
    recorder = Recorder()
    for prompt, answer in (
        ([1, 2], 3),
        ([8, 9], 7),  # a sub-agent
        ([1, 2, 3, 4], 5),
        ([8, 9, 7, 6], 7),  # goes on
        ([1, 2, 3, 4, 5, 4], 3),
        ([1, 0, 4], 5),  # the history was compacted
        ([1, 2], 3),  # tried again, with the same answer
    ):
        recorder.add(make_turn(prompt, [answer]))
    assert [turn.row for turn in recorder.turns] == [0, 1, 0, 1, 0, 2, 3]
