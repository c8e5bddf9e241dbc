"""Groups of episodes: kept by a run, taken for played ones, and sent by workers; always equal in every field."""

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll.agentic.env.base import StepResult, TextEnv
from roll.configs.env import CustomEnvConfig
from roll.data.columns import Item, expand
from roll.data.prompts import Prompt
from roll.data.requests import Completion, GenerateFn, GenerateRequest, SamplingParams
from roll.pipeline.rollouts import read_rollouts, write_rollouts
from roll.pipeline.session import RunFailedError
from roll.rewards.types import RewardResult, Sample
from roll.rollout.admission import Admission
from roll.rollout.env_manager import ENV_MANAGERS, EpisodeSpec, LengthLimits
from roll.rollout.env_runner import EnvRunner
from roll.rollout.plans import GroupSpec
from roll.rollout.prompt_worker import PromptEnv, PromptManager
from roll.rollout.schedule import Schedule, step_record
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.types import Collected, RolloutGroup, Trajectory
from roll.rollout.workers import FlatGroups, GroupWorker, Series
from tests.support.lines import read_lines, write_lines
from tests.support.rollouts import RENDERER, assert_equal, conversation, group_of, make_trajectory, make_turn, sampled

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
        ids, logprobs, versions = rng.integers(0, 50, size), rng.normal(size=size), np.sort(rng.integers(0, 4, size))
        stops = bool(rng.random() < 0.5)
        return sampled(ids, request.request_id, logprobs=logprobs, versions=versions, stops=stops)

    return generate


async def environment_episode(mode: str, generate: GenerateFn, spec: EpisodeSpec) -> Trajectory:
    config = CustomEnvConfig(env_type="odd", env_manager_cls=mode)
    runner = EnvRunner(OddEnv, timeout=5, instant=True)
    manager = ENV_MANAGERS.get(mode)(config, RENDERER, SamplingParams(), LIMITS)
    return await manager.run_episode(runner, generate, spec)


async def prompt_episode(generate: GenerateFn, spec: EpisodeSpec) -> Trajectory:
    async def score(sample: Sample) -> RewardResult:
        told = {"parts": {"format": 1 / 7}, "notes": {"why": TEXT}}
        return RewardResult(0.25, False, TEXT, **told, seeks_answer=spec.member > 0)

    prompt = Prompt("p1", "sums", ({"role": "user", "content": TEXT},), ground_truth={"value": 2})
    env = PromptEnv(prompt, score)
    manager = PromptManager(RENDERER, SamplingParams(), LIMITS)
    return await manager.run_episode(env, env.watch(generate), spec)


Play = Callable[[GenerateFn, EpisodeSpec], Awaitable[Trajectory]]
PLAYS: dict[str, Play] = {mode: partial(environment_episode, mode) for mode in ("step", "traj")}
PLAYS["prompt"] = prompt_episode


def group(play: Play, number: int, *, record: bool) -> RolloutGroup:
    generate = policy(np.random.default_rng(number))

    async def episode(member: int) -> Trajectory:
        return await play(generate, EpisodeSpec("A", number, member, 5, 2**63 + member, record=record))

    played = [asyncio.run(episode(member)) for member in (-1, 0, 1)]
    return RolloutGroup(number, "A", tuple(played[1:]), 2, (f"failed: {TEXT}",), played[0] if number % 2 else None)


@pytest.mark.parametrize("kind", PLAYS)
def test_a_saved_group_is_equal_in_every_field(kind, tmp_path):
    assert Collected.load(tmp_path / "resume") == Collected([], []), "where nothing was saved"
    groups = [group(PLAYS[kind], number, record=number == 2) for number in (1, 2, 7)]
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
    path = write_lines(tmp_path / "schedule.jsonl", [record])
    schedule = Schedule.read(path)
    assert schedule.limits == {(1, 2, 3)} and schedule.steps.keys() == {7}
    assert (schedule.steps[7].taken, schedule.steps[7].settled) == ({1}, {3})
    assert schedule.draws == {1: {0: (((2, 2), (3, 1)),), -1: (((0, 1),),)}, 3: {0: (((1, 1), (2, 1)),), 1: ((),)}}
    assert [schedule.num_tokens(version) for version in range(5)] == [1, 1, 3, 1, 0]
    assert (schedule.first_version, schedule.without({1}).first_version) == (0, 1)
    assert schedule.without({1, 3}).first_version is None
    write_lines(path, [{"step": 1}])
    with pytest.raises(ValueError, match=r"line 1 is not one of a schedule.jsonl \(KeyError\('groups'\)\)"):
        Schedule.read(path)


def numbered(number: int) -> RolloutGroup:
    turn = make_turn([0, 1], np.arange(3) + number, 1.0)
    return group_of(make_trajectory([turn], group=number), number=number)


def scheduler() -> RolloutScheduler:
    return RolloutScheduler(SimpleNamespace(num_slots=4), SimpleNamespace(world_size=0), lambda error: None, 1.0)


def test_kept_rollouts_are_taken_as_if_they_had_been_played(tmp_path):
    steps = {1: Collected([numbered(0), numbered(2)], [numbered(1)]), 2: Collected([numbered(3), numbered(4)], [])}
    for step, collected in steps.items():
        write_rollouts(str(tmp_path), step, collected)
    read = read_lines(tmp_path / "step-00001" / "episodes.jsonl")
    assert [(each["group_id"], each["trained"]) for each in read] == [(0, True), (2, True), (1, False)]

    admission, player = Admission(2), scheduler()
    for step, collected in steps.items():
        found = player.take_found(admission, step, read_rollouts(str(tmp_path), step))
        assert [each.group_id for each in found.groups] == [each.group_id for each in collected.groups]
        tokens = found.groups[0].trajectories[0].turns[0].completion.token_ids
        assert np.array_equal(tokens, np.arange(3) + found.groups[0].group_id)
        counts = player.commit(admission)
    assert counts == {"trained": 4, "settled": 1, "waiting": 0} and admission.next_draw == 5
    with pytest.raises(RunFailedError, match="no rollouts of step 3"):
        read_rollouts(str(tmp_path), 3)


@pytest.mark.parametrize("numbers", [[0], [0, 1, 2], [1, 2]])
def test_rollouts_of_other_batches_are_refused(numbers):
    with pytest.raises(ValueError, match=r"expected 2 from 0 on"):
        scheduler().take_found(Admission(2), 1, Collected([numbered(number) for number in numbers], []))


# --- workers: groups are started and fetched many at a time, the arrays of all turns arrive as four


FIRST, SECOND = Series("driver", 0), Series("driver", 1)


class Player(GroupWorker):
    """Plays groups when it is told to; those with odd numbers fail."""

    def __init__(self) -> None:
        super().__init__("envs", 0, 1, {})
        self.go = asyncio.Event()
        self.cancelled: list[int] = []

    async def run_group(self, spec: GroupSpec) -> RolloutGroup:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(spec.group_id)
            raise
        if spec.group_id % 2:
            raise KeyError(spec.group_id)
        return RolloutGroup(spec.group_id, spec.tag, ())


def specs(*numbers: int) -> list[GroupSpec]:
    return [GroupSpec(number, "A", 0, 1) for number in numbers]


async def fetched(player: Player, series: Series) -> tuple[list[int], list[int]]:
    finished, *_ = await player.finished_groups(series)
    return [group.group_id for group in finished.groups], finished.failed


async def test_what_has_finished_is_fetched_once_and_failures_are_raised_when_asked_for():
    player = Player()
    await player.start_groups(FIRST, specs(0, 1, 2))
    waiting = asyncio.create_task(fetched(player, FIRST))
    await asyncio.sleep(0)
    assert not waiting.done()
    player.go.set()
    assert await waiting == ([0, 2], [1])
    with pytest.raises(KeyError, match="1"):
        await player.failure(FIRST, 1)
    await player.start_groups(FIRST, specs(4))
    assert await fetched(player, FIRST) == ([4], [])


async def test_a_series_that_is_given_up_ends_and_what_arrives_late_for_it_is_not_played():
    player = Player()
    await player.start_groups(FIRST, specs(0, 2))
    waiting = asyncio.create_task(fetched(player, FIRST))
    await asyncio.sleep(0)
    await player.give_up(FIRST)
    assert await waiting == ([], []), "who still waits is told at once"
    assert player.cancelled == [0, 2]
    await player.start_groups(FIRST, specs(4))  # sent before, on the way for longer
    await player.start_groups(SECOND, specs(0))  # the same group again
    player.go.set()
    assert await fetched(player, FIRST) == ([], [])
    assert await fetched(player, SECOND) == ([0], [])


async def test_two_callers_do_not_meet():
    player, other = Player(), Series("another", 5)
    await player.start_groups(FIRST, specs(0))
    await player.start_groups(other, specs(0, 2))
    await player.give_up(other)
    player.go.set()
    assert await fetched(player, FIRST) == ([0], [])
    assert await fetched(player, Series("another", 6)) == ([], [])


def talk(member: int) -> Trajectory:
    parts = [([1, 2], [3, 4], 0.5), ([5], [], 0.0), ([6, 7, 8], [9], 1.0 + member)]
    return make_trajectory(conversation(parts), member=member)


def there_and_back(*groups: RolloutGroup) -> tuple[list[RolloutGroup], int]:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(FlatGroups.of(groups), protocol=5, buffer_callback=buffers.append)
    return list(pickle.loads(data, buffers=buffers)), len(buffers)


def test_groups_arrive_as_they_were_in_four_arrays():
    steps = make_trajectory([make_turn([1, 2], [3, 4], 0.5), make_turn([1, 2], [], 0.0, -0.1)], history=False)
    steps = replace(steps, info={"prompt_id": "p", "count": 3}, frames=(b"png", "text"))
    groups = [
        group_of(talk(0), steps, talk(1), number=7, dropped=2, errors=("fell",), baseline=talk(-1)),
        group_of(steps, number=8),
        group_of(number=9, dropped=4, errors=("lost",)),
        group_of(talk(0), make_trajectory([]), number=10),
    ]
    assert_equal(there_and_back(*groups), (groups, 4))
    assert there_and_back() == ([], 4)


def test_a_conversation_is_there_once_and_does_not_keep_other_groups():
    long = make_trajectory(conversation([([1] * 100, [2] * 100, 0.0)] * 20))
    (group, _), _ = there_and_back(group_of(long), group_of(long, number=1))
    assert len(expand(FlatGroups.of([group]).block.arrays["tokens_T"])) == 20 * 200
    assert group.trajectories[0].turns[0].prompt_ids.base is None


def test_what_is_no_conversation_though_it_should_be_one_arrives_too():
    turns = [make_turn([1, 2], [3]), make_turn([1, 2, 4, 5], [6]), make_turn([1], [2]), make_turn([1, 2, 3], [4])]
    group = group_of(make_trajectory(turns))
    assert_equal(there_and_back(group)[0], [group])


def test_pictures_lie_in_a_block_of_their_own_which_is_not_kept_for_those_that_are_known():
    cat, dog = (Item(np.full((4, 4, 3), shade, dtype=np.uint8)) for shade in (1, 2))
    turns = [replace(make_turn([1], [2]), items=items) for items in ((cat,), (dog, cat), ())]
    group = group_of(make_trajectory(turns, history=False))
    known: dict[str, Item] = {}
    (first,) = FlatGroups.of([group]).read(known)
    assert_equal([first], [group])
    flat = FlatGroups.of([group])
    (again,) = flat.read(known)
    assert [*again.items] == [cat, dog, cat] and all(item is known[item.hash] for item in again.items)
    assert len(again.blocks) == 2 and flat.pictures not in again.blocks
