"""Trajectories to rows of the batch, what is told about them, and the rows of whatever an engine was asked for."""

import asyncio
import pickle
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.agentic.env.base import StepResult
from roll.algorithms.correction import replay_metrics
from roll.configs.env import CustomEnvConfig
from roll.data.batch import Batch
from roll.data.columns import ExpertArray, Records
from roll.data.kept_sets import KeptSets, kept_item
from roll.data.requests import Completion, GenerateRequest, SamplingParams
from roll.data.stored import Stored
from roll.rollout.admission import Admission
from roll.rollout.env_manager import TOOL_TURNS, EpisodeSpec, LengthLimits, Recorder, StepEnvManager, TrajEnvManager
from roll.rollout.metrics import kept_metrics, overlap_metrics, rollout_metrics
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import Collected, EpisodeEnd, RolloutGroup, Trajectory, Turn
from roll.rollout.workers import FlatGroups
from roll.utils.hashing import derive_seed
from tests.support.algorithms_batches import random_episodes, rows_of, to_batch
from tests.support.examples import examples
from tests.support.rollouts import RENDERER, batch_of, conversation, group_of, make_trajectory, make_turn, sampled


def test_rewards_by_name_are_of_every_row_of_the_episode():
    turns = [make_turn([1], [2], 0.5), make_turn([3], [4], 1.0)]
    one = replace(make_trajectory(turns, history=False), info={"math/score": 1, "math/format": 0.25, "solved": True})
    other = replace(make_trajectory(turns[:1], history=True, member=1), info={"math/score": -2.0, "note": "x"})
    groups = [group_of(one, other)]
    with pytest.raises(ValueError, match=r"gdpo_reward_keys: 'math/format' of an episode of A is None.*math/score"):
        groups_to_batch(groups, ["A"], ["math/score", "math/format"])
    assert groups_to_batch(groups, ["A"]).parts_BK is None
    batch = groups_to_batch([group_of(one)], ["A"], ["math/format", "math/score", "solved"])
    assert batch.parts_BK.tolist() == [[0.25, 1, 1]] * 2
    assert batch.select([1]).parts_BK.tolist() == [[0.25, 1, 1]]


def test_separate_turns_are_a_row_each():
    turns = [make_turn([1, 2], [3, 4], 0.5, key="s0"), make_turn([5], [6], 1.0, -0.25, key="s1")]
    episode = make_trajectory(turns, history=False, tag="B", group=7)
    batch = groups_to_batch([group_of(episode, number=7)], ["A", "B"])
    expected: dict[str, list[float]] = {
        "lengths_B": [4, 2],
        "tokens_T": [1, 2, 3, 4, 5, 6],
        "loss_mask_T": [0, 0, 1, 1, 0, 1],
        "turn_T": [0, 0, 0, 0, 1, 1],
        "rewards_T": [0, 0, 0, 0.5, 0, 0.75],
        "rollout_logprobs_T": [0, 0, -3 / 8, -4 / 8, 0, -6 / 8],
        "rollout_versions_T": [0, 0, 1003, 1004, 0, 1006],
        "group_B": [7, 7],
        "traj_B": [0, 0],
        "turn_B": [0, 1],
        "state_B": [derive_seed("s0"), derive_seed("s1")],
        "tag_B": [1, 1],
        "scores_B": [1.25, 1.25],
    }
    assert {name: getattr(batch, name).tolist() for name in expected} == expected


def test_a_conversation_is_one_row():
    turns = conversation([([1, 2], [3], 0.5), ([4], [5, 6], 0.0), ([7], [8], 2.0)])
    batch = batch_of(make_trajectory(turns))
    expected: dict[str, list[float]] = {
        "lengths_B": [8],
        "tokens_T": [1, 2, 3, 4, 5, 6, 7, 8],
        "loss_mask_T": [0, 0, 1, 0, 1, 1, 0, 1],
        "turn_T": [0, 0, 0, 1, 1, 1, 2, 2],
        "rewards_T": [0, 0, 0.5, 0, 0, 0, 0, 2.0],
        "state_B": [derive_seed("s")],
        "scores_B": [2.5],
    }
    assert {name: getattr(batch, name).tolist() for name in expected} == expected


WHOLE, CUT = make_turn([1], [2]), make_turn([1, 2], [3, 4], stops=False)
added = st.tuples(
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from([0.0, 0.5, -1.0]),
)
episodes = st.tuples(st.lists(added, min_size=1, max_size=4), st.booleans())


@given(st.lists(st.lists(episodes, max_size=3), min_size=1, max_size=3))
def test_rows_against_a_plain_loop(groups):
    made = []
    rows: list[tuple[int, int, list[int], list[bool], list[float]]] = []
    traj = 0
    for group_id, members in enumerate(groups):
        trajectories = []
        for member, (parts, history) in enumerate(members):
            turns = conversation(parts)
            trajectories.append(make_trajectory(turns, history=history, group=group_id, member=member))
            if not any(sampled for _, sampled, _ in parts):
                continue
            if history:
                # What follows the last sampled token was never part of a training sample.
                last = max(index for index, (_, sampled, _) in enumerate(parts) if sampled)
                tokens, mask, rewards = [], [], []
                for prompt, sampled, reward in parts[: last + 1]:
                    tokens += prompt + sampled
                    mask += [False] * len(prompt) + [True] * len(sampled)
                    rewards += [0.0] * (len(prompt) + len(sampled))
                    if sampled:
                        rewards[-1] = reward
                rows.append((group_id, traj, tokens, mask, rewards))
            else:
                for turn in turns:
                    prompt, sampled = turn.prompt_ids.tolist(), turn.completion.token_ids.tolist()
                    if sampled:
                        mask = [False] * len(prompt) + [True] * len(sampled)
                        rewards = [0.0] * (len(mask) - 1) + [turn.reward]
                        rows.append((group_id, traj, prompt + sampled, mask, rewards))
            traj += 1
        made.append(RolloutGroup(group_id, "A", tuple(trajectories)))
    if not rows:
        with pytest.raises(ValueError, match="no trajectory to train on"):
            groups_to_batch(made, ["A"])
        return
    assert _rows(groups_to_batch(made, ["A"])) == rows


def _rows(batch: Batch) -> list[tuple[int, int, list[int], list[bool], list[float]]]:
    columns = [
        [part.tolist() for part in column.split(batch.lengths_B.tolist())]
        for column in (batch.tokens_T, batch.loss_mask_T, batch.rewards_T)
    ]
    return list(zip(batch.group_B.tolist(), batch.traj_B.tolist(), *columns, strict=True))


@pytest.mark.parametrize(
    ("turns", "history", "end", "truncated"),
    [
        ([WHOLE, CUT], False, EpisodeEnd.TERMINATED, [False, True]),
        ([WHOLE, CUT], True, EpisodeEnd.TERMINATED, [True]),
        ([make_turn([1], [2], stops=False), make_turn([1, 2], [3])], True, EpisodeEnd.TERMINATED, [False]),
        ([WHOLE, WHOLE], False, EpisodeEnd.CONTEXT_FULL, [True, True]),
        ([WHOLE], True, EpisodeEnd.CONTEXT_FULL, [True]),
    ],
)
def test_rows_that_the_length_limit_cut_off_are_told(turns, history, end, truncated):
    assert batch_of(make_trajectory(turns, history=history, end=end)).truncated_B.tolist() == truncated


def test_the_greedy_score_stands_on_every_row_of_its_group():
    def trajectory(group: int, member: int, reward: float) -> Trajectory:
        turns = [make_turn([1], [2]), make_turn([1], [2], reward)]
        return make_trajectory(turns, history=False, group=group, member=member)

    first = group_of(trajectory(0, 0, 1.0), trajectory(0, 1, 0.0), baseline=trajectory(0, -1, 0.25))
    second = group_of(trajectory(1, 0, 1.0), number=1, baseline=trajectory(1, -1, -2.0))
    lost = group_of(trajectory(2, 0, 1.0), number=2)
    batch = groups_to_batch([first, lost, second], ["A"])
    assert batch.baseline_B.tolist() == [0.25] * 4 + [-2.0] * 2
    assert batch.group_B.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.traj_B.tolist() == [0, 0, 1, 1, 2, 2]
    assert groups_to_batch([lost], ["A"]).baseline_B is None
    metrics = rollout_metrics([first, lost, second], "rollout")
    assert metrics["rollout/no_baseline"] == 1.0
    assert metrics["rollout/baseline"] == pytest.approx((0.25 - 2.0) / 2)
    assert metrics["rollout/episodes"] == 4


def test_metrics_are_means_over_episodes_and_turns():
    won = make_trajectory([make_turn([1, 2], [3], 0.0), make_turn([1], [3, 4], 1.0)], history=False, tag="A")
    lost = make_trajectory([make_turn([1, 2, 3], [3], -1.0, -0.5)], history=False, tag="B")
    groups = [group_of(won, dropped=1, errors=("x", "y")), group_of(lost, number=1)]
    tags = {
        "A": {"episodes": 1, "success": 1.0, "reward": 1.0, "turns": 2.0, "cut_off": 0.0, "valid_rate": 1.0},
        "B": {"episodes": 1, "success": 0.0, "reward": -1.5, "turns": 1.0, "cut_off": 0.0, "valid_rate": 0.0},
    }
    expected = {f"rollout/{tag}/{name}": value for tag, figures in tags.items() for name, value in figures.items()}
    expected |= {
        "rollout/episodes": 2,
        "rollout/dropped": 1,
        "rollout/env_errors": 2,
        "rollout/success": 0.5,
        "rollout/reward": -0.25,
        "rollout/task_reward": 0.0,
        "rollout/penalty": -0.25,
        "rollout/turns": 1.5,
        "rollout/valid_rate": 2 / 3,
        "rollout/response_tokens": 4 / 3,
        "rollout/prompt_tokens": 2.0,
        "rollout/context_full": 0.0,
        "rollout/cut_off": 0.0,
        "rollout/repetition": 0.0,
    }
    assert rollout_metrics(groups, "rollout") == expected
    assert "rollout/A/success" not in rollout_metrics(groups[:1], "rollout")
    nothing = rollout_metrics([RolloutGroup(0, "A", (), dropped=2)], "val")
    assert nothing == {"val/episodes": 0, "val/dropped": 2, "val/env_errors": 0}


PLAIN = make_trajectory([make_turn([1], [2, 3])])


def experts(first: int, tokens: int) -> ExpertArray:
    """Two layers of one expert each, numbered on, the last token unknown."""
    told = np.arange(first, first + 2 * tokens, dtype=np.int16).reshape(tokens, 2)
    told[-1] = -1
    return told


def routed(turn: Turn, first: int) -> Turn:
    tokens = len(turn.prompt_ids) + len(turn.completion.token_ids)
    return replace(turn, completion=replace(turn.completion, experts=experts(first, tokens)))


def with_experts(member: int = 0, *, history: bool = True) -> Trajectory:
    """Two turns, the second with a prompt that begins with the first: rows of 4 and of 7 tokens."""
    turns = [routed(make_turn([1, 2], [3, 4]), 0), routed(make_turn([1, 2, 3, 4, 5], [6, 7]), 100)]
    return make_trajectory(turns, history=history, member=member)


def test_a_row_has_for_each_token_the_experts_that_were_known_first():
    batch = batch_of(with_experts())
    expected = [[0, 1], [2, 3], [4, 5], [106, 107], [108, 109], [110, 111], [-1, -1]]
    assert batch.experts_TE.tolist() == expected
    apart = batch_of(with_experts(history=False))
    assert apart.experts_TE[:4].tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1]]
    assert apart.experts_TE[4:].tolist() == [*([100 + 2 * n, 101 + 2 * n] for n in range(6)), [-1, -1]]


def test_rows_without_experts_are_left_to_the_routers():
    batch = batch_of(PLAIN, with_experts())
    assert batch.experts_TE[:3].tolist() == [[-1, -1]] * 3 and batch.experts_TE[3].tolist() == [0, 1]
    assert batch_of(PLAIN).experts_TE is None


def test_a_turn_that_tells_none_leaves_what_is_known_of_its_row():
    silent = make_turn([1, 2, 3, 4, 5], [6, 7])
    groups = [group_of(make_trajectory([routed(make_turn([1, 2], [3, 4]), 0), silent]))]
    expected = [[0, 1], [2, 3], [4, 5], *[[-1, -1]] * 4]
    for found in (groups, list(FlatGroups.of(groups))):
        assert groups_to_batch(found, ["A"]).experts_TE.tolist() == expected
    late = group_of(make_trajectory([make_turn([1, 2], [3, 4]), routed(silent, 100)]))
    told = groups_to_batch(list(FlatGroups.of([late])), ["A"]).experts_TE
    assert told[:2].tolist() == [[100, 101], [102, 103]] and len(told) == 7


def test_groups_arrive_with_the_experts_of_their_rows_each_token_once(tmp_path):
    groups = [
        group_of(with_experts(0), PLAIN, with_experts(2, history=False), baseline=with_experts(-1)),
        group_of(with_experts(0), number=1),
    ]
    sent = FlatGroups.of(groups)
    assert len(sent.block.arrays["experts_TE"]) == len(sent.block.arrays["tokens_T"]) == 3 * 7 + 3 + 4 + 7
    arrived = list(pickle.loads(pickle.dumps(sent)))
    Collected(arrived, []).save(tmp_path)
    for found in (arrived, Collected.load(tmp_path).groups):
        for group, other in zip(groups, found, strict=True):
            batch, same = (groups_to_batch([each], ["A"]) for each in (group, other))
            assert batch.experts_TE.tolist() == same.experts_TE.tolist()
            assert other.trajectories[0].turns[1].completion.experts.shape == (7, 2)
        assert found[0].trajectories[1].turns[0].completion.experts is None
        assert found[0].baseline.turns[0].completion.experts[:3].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_the_driver_says_where_experts_and_kept_sets_lie_and_reads_none():
    turns = [kept(turn, [9, 3], [4]) for turn in with_experts().turns]
    groups = [group_of(make_trajectory(turns), PLAIN, number=number) for number in range(2)]
    here, sent = groups_to_batch(groups, ["A"]), [*FlatGroups.of(groups)]
    assert kept_metrics(sent) == kept_metrics(groups)
    there = groups_to_batch(sent, ["A"])
    assert replay_metrics(there) == replay_metrics(here)
    assert replay_metrics(here) == {"router_replay/share": pytest.approx(6 / 8)}
    some = there.select([2, 1])
    pieces = [vars(item)["data"] for row in some.kept_I for item in row]
    assert len(pieces) == 2 and not any("value" in vars(part) for part in [vars(there)["experts_TE"], *pieces])
    assert {piece.block for piece in pieces} <= sent[1].blocks
    told = []
    for batch in (pickle.loads(pickle.dumps(some)).fetched(), here.select([2, 1])):
        told.append((batch.experts_TE.tolist(), [[item.data.tolist() for item in row] for row in batch.kept_I]))
    assert told[0] == told[1]


def kept(turn: Turn, *sets: list[int]) -> Turn:
    item = kept_item(len(turn.prompt_ids), [*map(np.array, sets)])
    return replace(turn, completion=replace(turn.completion, kept=(item,)))


@pytest.mark.parametrize("history", [True, False])
def test_kept_sets_stay_with_their_tokens(history, tmp_path):
    turns = [kept(make_turn([1, 2], [3, 4]), [9, 3], []), kept(make_turn([1, 2, 3, 4, 5], [6, 7]), [6], [7, 0])]
    groups = [group_of(make_trajectory(turns, history=history))]
    Collected(list(pickle.loads(pickle.dumps(FlatGroups.of(groups)))), []).save(tmp_path)
    groups = Collected.load(tmp_path).groups
    figures = {"rollout/kept_tokens": 5 / 3, "rollout/kept_overflow": 1 / 4, "rollout/kept_set_bytes": (6 + 7) / 4}
    assert kept_metrics(groups) == figures
    found = KeptSets.of(groups_to_batch(groups, ["A"]))
    told = [ids.tolist() for ids in found.ids.split(found.sizes_N.tolist())]
    first, second = [[], [], [3, 9], []], [[6], [0, 7]]
    assert told == [*first, [], *second] if history else told == [*first, *[[]] * 5, *second]


def test_completions_arrive_with_theirs():
    first, second = (turn.completion for turn in with_experts().turns)
    plain = make_turn([1], [2]).completion
    found = list(pickle.loads(pickle.dumps(Records.of(Completion, [first, plain, second]))))
    assert found[1].experts is None
    for sent, got in ((first, found[0]), (second, found[2])):
        np.testing.assert_array_equal(got.experts, sent.experts)
        assert got.experts.dtype == np.int16 and got.experts.base is None


@examples(60)
@given(seed=st.integers(0, 2**32 - 1), history=st.booleans())
def test_lags_are_those_of_the_oldest_token_of_each_group_and_of_all_tokens(seed, history):
    batch = to_batch(random_episodes(seed, empty_masks=False), history, seed)
    if not batch.loss_mask_T.any():
        return
    version, rng = 7, np.random.default_rng(seed)
    rows = rows_of(batch, batch.loss_mask_T)
    versions = [0] * batch.num_tokens
    for row in rows:  # weights come in the middle of rows
        for token, sampled_by in zip(row, sorted(rng.integers(4, version + 1, len(row))), strict=True):
            versions[token] = int(sampled_by)
    batch = batch.replace(rollout_versions_T=torch.tensor(versions))
    admission = Admission(4, ready={1, 2, 3}, running={5})

    metrics = overlap_metrics(batch, admission, version)

    groups: defaultdict[int, list[int]] = defaultdict(list)
    for row, group in zip(rows, batch.group_B.tolist(), strict=True):
        groups[group] += [version - versions[token] for token in row]
    oldest = [max(lags) for lags in groups.values() if lags]
    every = [lag for lags in groups.values() for lag in lags]
    expected = {
        "async/lag_mean": sum(oldest) / len(oldest),
        "async/lag_max": max(oldest),
        "async/token_lag": sum(every) / len(every),
        "async/mixed": sum(len({versions[token] for token in row}) > 1 for row in rows) / len(rows),
        "async/buffer_groups": 3,
        "async/running_groups": 1,
    }
    expected |= {f"async/lag_{lag}": every.count(lag) / len(every) for lag in range(max(every) + 1)}
    assert metrics == pytest.approx(expected)


# --- rows against the engine's own log, for a harness that does whatever it likes with its history


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
    (again,) = FlatGroups.of([sent])
    assert [turn.row for turn in again.trajectories[0].turns] == [turn.row for turn in trajectory.turns]
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
