"""Groups that a checkpoint keeps come back equal in every field, those of environments and those of prompts."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from roll.agentic.env.base import StepResult, TextEnv
from roll.configs.env import CustomEnvConfig
from roll.data.prompts import Prompt
from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, FinishReason, GenerateFn, GenerateRequest, SamplingParams
from roll.models.tiny import make_tokenizer
from roll.rewards.types import RewardResult, Sample
from roll.rollout.admission import Admission
from roll.rollout.env_manager import ENV_MANAGERS, EpisodeSpec, LengthLimits
from roll.rollout.env_runner import EnvRunner
from roll.rollout.prompt_worker import PromptEnv, PromptManager
from roll.rollout.schedule import Schedule, step_record
from roll.rollout.types import Collected, RolloutGroup, Trajectory

RENDERER = ChatRenderer(make_tokenizer())
LIMITS = LengthLimits(prompt_length=200, sequence_length=400)
TEXT = "Zug \x00 \u2028 🏗 \\u0041 '\"\n"


class OddEnv(TextEnv):
    """Two turns whose infos hold every kind of value that is kept, and a picture."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return f"{TEXT}{seed}", {"state_key": "start"}

    def step(self, action: str) -> StepResult:
        self.turn += 1
        extras = {
            "text": TEXT,
            "empty": "",
            "count": 2**80,
            "share": 0.1 + 0.2,
            "numpy": np.float64(1) / 3,
            "endless": float("inf"),
            "flag": True,
            "board": np.zeros(3),
        }
        pay = {"task_reward": 1 / 3, "penalty": -0.1, "action": None if self.turn == 1 else TEXT}
        return TEXT, 1 / 3 - 0.1, self.turn == 2, False, extras | pay | {"success": self.turn == 2}

    def render(self) -> Any:
        return np.full((4, 5, 3), self.turn, dtype=np.uint8)


def policy(rng: np.random.Generator) -> GenerateFn:
    async def generate(request: GenerateRequest) -> Completion:
        size = int(rng.integers(1, 6))
        return Completion(
            request.request_id,
            rng.integers(0, 50, size),
            rng.normal(size=size).astype(np.float32),
            FinishReason(rng.choice(["stop", "length"])),
            np.sort(rng.integers(0, 4, size)),
        )

    return generate


async def environment_episode(mode: str, generate: GenerateFn, spec: EpisodeSpec) -> Trajectory:
    config = CustomEnvConfig(env_type="odd", env_manager_cls=mode)
    runner = EnvRunner(OddEnv, timeout=5, instant=True)
    manager = ENV_MANAGERS.get(mode)(config, RENDERER, SamplingParams(), LIMITS)
    return await manager.run_episode(runner, generate, spec)


async def prompt_episode(generate: GenerateFn, spec: EpisodeSpec) -> Trajectory:
    async def score(sample: Sample) -> RewardResult:
        return RewardResult(
            0.25, False, TEXT, parts={"format": 1 / 7}, notes={"why": TEXT}, seeks_answer=spec.member > 0
        )

    prompt = Prompt("p1", "sums", ({"role": "user", "content": TEXT},), ground_truth={"value": 2})
    env = PromptEnv(prompt, score)
    manager = PromptManager(RENDERER, SamplingParams(), LIMITS)
    return await manager.run_episode(env, env.watch(generate), spec)


def group(
    play: Callable[[GenerateFn, EpisodeSpec], Awaitable[Trajectory]], number: int, *, record: bool
) -> RolloutGroup:
    generate = policy(np.random.default_rng(number))

    async def episode(member: int) -> Trajectory:
        return await play(generate, EpisodeSpec("A", number, member, 5, 2**63 + member, record=record))

    played = [asyncio.run(episode(member)) for member in (-1, 0, 1)]
    return RolloutGroup(number, "A", tuple(played[1:]), 2, (f"failed: {TEXT}",), played[0] if number % 2 else None)


def assert_equal(left: Any, right: Any, where: str = "") -> None:
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and np.array_equal(left, right), where
    elif is_dataclass(left):
        assert type(left) is type(right), where
        for entry in fields(left):
            assert_equal(getattr(left, entry.name), getattr(right, entry.name), f"{where}.{entry.name}")
    elif isinstance(left, tuple | list):
        assert type(left) is type(right) and len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_equal(one, other, f"{where}[{index}]")
    else:
        assert left == right and isinstance(left, type(right)), where


@pytest.mark.parametrize("kind", ["step", "traj", "prompt"])
def test_a_saved_group_is_equal_in_every_field(kind, tmp_path):
    def play(generate: GenerateFn, spec: EpisodeSpec) -> Awaitable[Trajectory]:
        return prompt_episode(generate, spec) if kind == "prompt" else environment_episode(kind, generate, spec)

    assert Collected.load(tmp_path / "resume") == Collected([], []), "where nothing was saved"
    groups = [group(play, number, record=number == 2) for number in (1, 2, 7)]
    assert any(trajectory.frames for trajectory in groups[1].trajectories) == (kind != "prompt")
    nothing = RolloutGroup(9, "A", (), dropped=3)
    finished = Collected(groups[:2], [groups[2], nothing])
    finished.save(tmp_path / "resume")
    loaded = Collected.load(tmp_path / "resume")
    assert_equal(finished, loaded)
    assert sorted(path.name for path in (tmp_path / "resume").iterdir()) == ["rollouts.json", "rollouts.safetensors"]
    loaded.save(tmp_path / "again")
    for path in (tmp_path / "resume").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_a_step_is_recorded_with_the_token_at_which_each_version_begins(tmp_path):
    played = group(prompt_episode, 1, record=False)
    turn = played.trajectories[0].turns[0]

    def sampled(*versions: int) -> Trajectory:
        completion = replace(turn.completion, versions=np.array(versions, dtype=np.int64))
        return replace(played.trajectories[0], turns=(replace(turn, completion=completion),))

    for versions, runs in {(): (), (0,): ((0, 1),), (2, 2, 3, 5, 5): ((2, 2), (3, 1), (5, 2))}.items():
        assert sampled(*versions).turns[0].completion.runs == runs
    taken = replace(played, trajectories=(sampled(2, 2, 3),), baseline=replace(sampled(0), member=-1))
    settled = RolloutGroup(3, "A", (sampled(1, 2), replace(sampled(), member=1)))
    record = step_record(Admission(1, 2, 3, step=7), Collected([taken], [settled]))
    path = tmp_path / "schedule.jsonl"
    path.write_text(json.dumps(record) + "\n")
    schedule = Schedule.read(path)
    assert schedule.limits == {(1, 2, 3)} and schedule.steps.keys() == {7}
    assert (schedule.steps[7].taken, schedule.steps[7].settled) == ({1}, {3})
    assert schedule.draws == {1: {0: (((2, 2), (3, 1)),), -1: (((0, 1),),)}, 3: {0: (((1, 1), (2, 1)),), 1: ((),)}}
    assert [schedule.num_tokens(version) for version in range(5)] == [1, 1, 3, 1, 0]
    assert (schedule.first_version, schedule.without({1}).first_version) == (0, 1)
    assert schedule.without({1, 3}).first_version is None
    path.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=r"line 1 is not one of a schedule.jsonl \(KeyError\('groups'\)\)"):
        Schedule.read(path)
