"""The groups that a run takes: what it tells of them, and the workers that play them."""

import asyncio
import json
import logging
import pickle
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from roll.configs.agentic import MANAGERS, AgenticConfig
from roll.configs.loader import load_config
from roll.data.requests import FinishReason
from roll.distributed.cluster.errors import WorkerDiedError
from roll.distributed.cluster.hangs import Whereabouts
from roll.pipeline import rollout_workers
from roll.pipeline.agentic import AgenticRolloutWorkers
from roll.pipeline.roles import RestartBudget
from roll.pipeline.rollout_workers import RolloutWorkers
from roll.pipeline.rollouts import (
    Remarks,
    StepRollouts,
    describe_failure,
    remarks_on,
    take,
    thin_out,
    training_lines,
    write_samples,
)
from roll.pipeline.session import RunFailedError
from roll.pipeline.start import Start
from roll.rewards.types import RewardError
from roll.rollout.admission import Admission
from roll.rollout.endpoint.errors import PortTakenError
from roll.rollout.env_worker import EnvironmentWorker
from roll.rollout.metrics import step_metrics
from roll.rollout.types import Collected, RolloutGroup
from roll.tracking.run import RunFolder
from roll.utils.signals import SignalGuard
from tests.support.lines import read_lines
from tests.support.rollouts import make_trajectory, told_turn

SESSION: Any = SimpleNamespace(display=SimpleNamespace(progress=lambda *_: None))


def group(number: int, errors: tuple[str, ...] = (), **info: int) -> RolloutGroup:
    return RolloutGroup(number, "t", (make_trajectory([told_turn()], tag="t", group=number, info=info),), errors=errors)


def gives(groups: list[RolloutGroup], rejected: list[RolloutGroup]) -> Any:
    """A scheduler that has these."""
    return SimpleNamespace(take=lambda *_, **options: Collected(groups, rejected))


def taken(caplog: pytest.LogCaptureFixture, *groups: RolloutGroup) -> str:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        take(SESSION, gives(list(groups), []), Admission(len(groups)), 1, "train on")
    return caplog.text


def test_failed_episodes_and_late_tools_are_told_and_nothing_where_all_went_well(caplog):
    late = group(0, tool_calls=3, call_timeouts=2)
    told = taken(caplog, late, group(1, ("broken: no disk",), tool_calls=4, call_timeouts=1), group(2))
    assert "broken: no disk" in told
    assert "3 of 7 tool calls took longer than their timeout" in told
    assert taken(caplog, group(0), group(1, tool_calls=2, call_timeouts=0)) == ""


def answers(number: int, *answers: tuple[float, int], limit: int = 4, dropped: int = 0) -> RolloutGroup:
    """A group of answers by score and length; those of ``limit`` tokens are cut, and a score of 1 is a success."""
    episodes = []
    for member, (score, length) in enumerate(answers):
        reason = FinishReason.LENGTH if length >= limit else FinishReason.STOP
        turn = told_turn(action="4" if score else None, reward=score, ids=[1] * length, finish_reason=reason)
        episodes.append(make_trajectory([turn], tag="t", group=number, member=member, success=score == 1))
    return RolloutGroup(number, "t", tuple(episodes), dropped=dropped)


RIGHT, WRONG = answers(1, (1, 2), (1, 3)), answers(2, (0, 4), (0, 4))
MIXED = answers(0, (1, 2), (0, 4))


def limit(tag: str) -> int:
    return 4


def test_metrics_of_a_step_are_those_of_the_rows_that_are_saved():
    half = answers(3, (0.5, 1), (0.5, 2), dropped=1)
    collected = Collected([MIXED], [RIGHT, WRONG, half])
    found = step_metrics(collected, filters=True)
    saved = [json.loads(line) for line in training_lines(collected.groups, collected.rejected).splitlines()]
    groups = [[row for row in saved if row["group_id"] == number] for number in range(4)]
    equal = [rows for rows in groups if len({row["score"] for row in rows}) == 1]
    turns = [turn for row in saved for turn in row["turns"]]
    trained = [row for row in saved if row["trained"]]
    expected = {
        "rollout/episodes": 8,
        "rollout/reward": fmean(row["score"] for row in saved),
        "rollout/success": fmean(row["success"] for row in saved),
        "rollout/response_tokens": fmean(turn["completion_tokens"] for turn in turns),
        "rollout/tokens": sum(turn["completion_tokens"] for turn in turns),
        "rollout/cut_off": fmean(turn["finish_reason"] == "length" for turn in turns),
        "rollout/no_spread": len(equal) / len(groups),
        "rollout/all_right": sum(all(row["success"] for row in rows) for rows in equal) / len(groups),
        "rollout/all_wrong": sum(not any(row["success"] for row in rows) for rows in equal) / len(groups),
        "rollout/filtered": len({row["group_id"] for row in saved if not row["trained"]}),
        "rollout/dropped": 1,
        "kept/groups": 1,
        "kept/episodes": 2,
        "kept/reward": fmean(row["score"] for row in trained),
        "kept/success": fmean(row["success"] for row in trained),
        "kept/response_tokens": fmean(turn["completion_tokens"] for row in trained for turn in row["turns"]),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert {name for name in found if name.startswith("kept/")} == {name for name in expected if "kept/" in name}
    assert not any(name.startswith("kept/") for name in step_metrics(Collected([MIXED], []), filters=False))


def remarked(collected: Collected, num_groups: int, *, compares: bool = False, **more: int) -> dict[str, str]:
    return dict(remarks_on(7, collected, num_groups, limit, compares=compares, **more))


def test_what_matters_of_a_step_is_remarked_in_a_line():
    assert remarked(Collected([answers(0, (1, 2), (0, 3))], []), 1, compares=True) == {}
    assert remarked(Collected([MIXED], []), 1) == {
        "cut": "step 7: 50% of the responses are cut at response_length 4 (rollout/cut_off): raise it, or ask for less"
    }
    told = remarked(Collected([MIXED], [RIGHT, WRONG]), 2)
    assert told["short"] == (
        "step 7 trains on 1 of 2 groups: 1 of 3 groups that were sampled passed the filter; "
        "67% have no spread (33% all right, 33% all wrong)"
    )
    assert remarked(Collected([], [RIGHT]), 2) == {
        "empty": "step 7 takes no optimizer step: none of 1 groups that were sampled passed the filter; 100% have no "
        "spread (100% all right, 0% all wrong)"
    }
    assert "50% all wrong" in remarked(Collected([MIXED, WRONG], []), 2, compares=True)["spread"]
    assert "spread" not in remarked(Collected([MIXED, WRONG], []), 2)
    by_sequence = Collected([answers(0, (1, 3), (0, 3), limit=3)], [])
    assert "100% of the responses are cut at sequence_length (" in remarked(by_sequence, 1)["cut"]


def test_ids_that_no_token_has_are_remarked():
    found = remarked(Collected([MIXED], []), 1, num_ids=1)  # all that is sampled there has the id 1
    assert "have ids that the tokenizer lacks (its last is 0)" in found["beyond"]
    assert "beyond" not in remarked(Collected([MIXED], []), 1, num_ids=2)


def test_a_remark_is_made_aloud_ever_more_rarely(caplog):
    remarks = Remarks()
    with caplog.at_level(logging.INFO):
        for step in range(1, 11):
            remarks.make("cut", str(step))
            remarks.make("spread", "once") if step == 9 else None
    aloud = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert aloud == ["1", "2", "4", "8", "once"]
    assert len(caplog.records) == 11, "the others are in the log file"


def test_a_failure_says_what_all_answers_have_in_common():
    groups = [answers(0, (0, 4), (0, 4), (0, 4)), answers(1, (0, 1), dropped=2)]
    assert describe_failure(groups, limit) == (
        "all 4 sampled responses scored 0; 75% were cut at response_length 4; in 100% there was no answer or action; "
        "2 more failed or could not be scored"
    )
    assert describe_failure([answers(0, (0.25, 1), (0.1, 1))], limit) == (
        "all 2 sampled responses were wrong, with scores from 0.1 to 0.25"
    )


def test_some_groups_of_each_step_are_kept_trained_ones_first(tmp_path):
    folder = RunFolder(tmp_path, "run")
    write_samples(folder, 3, Collected([MIXED], [RIGHT, WRONG]), 2)
    write_samples(folder, 4, Collected([MIXED, MIXED, MIXED], [WRONG]), 2)
    third, fourth = (read_lines(folder.trajectories / f"train-{step:05d}.jsonl") for step in (3, 4))
    assert [(row["group_id"], row["trained"]) for row in third] == [(0, True), (0, True), (1, False), (1, False)]
    assert [row["trained"] for row in fourth] == [True] * 4
    folder.truncate_samples(3)
    assert [path.name for path in folder.trajectories.iterdir()] == ["train-00003.jsonl"]


def test_of_older_steps_every_other_one_goes_where_all_are_too_large(tmp_path):
    sizes = []
    for step in range(1, 101):
        (tmp_path / f"train-{step:05d}.jsonl").write_text("x" * 100)
        thin_out(tmp_path, "train-*.jsonl", 1000)
        files = sorted(tmp_path.iterdir())
        sizes.append(sum(path.stat().st_size for path in files))
        assert files[-1].name == f"train-{step:05d}.jsonl"
    assert max(sizes) <= 1000
    kept = [int(path.stem[-5:]) for path in files]
    assert min(kept) <= 50, "the beginning of a run stays too"
    thin_out(tmp_path, "train-*.jsonl", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["train-00100.jsonl"]


def test_a_step_without_a_group_to_train_on_is_none_of_which_all_failed():
    assert take(SESSION, gives([], [RIGHT]), Admission(1), 1, "train on").rejected == [RIGHT]
    failed = RolloutGroup(0, "t", (), 2, ("no disk",))
    with pytest.raises(ValueError, match="no episode to train on: all 1 groups were dropped"):
        take(SESSION, gives([], [failed]), Admission(1), 1, "train on")


def test_answers_that_are_all_wrong_and_nothing_to_train_on_end_the_run_with_advice():
    plan = {"groups_per_step": 2, "groups_ahead": 0, "window": 1, "max_steps": 3, "overlaps": False}
    bounds = {"filters_groups": True, "max_filtered_batches": 3, "rollout_replay_dir": None}
    config: Any = SimpleNamespace(**plan, **bounds)
    rules: Any = SimpleNamespace(most_tokens=limit, filter_hint="loosen the filter")
    rules.check_groups = rules.wants = lambda groups: None
    session: Any = SimpleNamespace(summary={}, elapsed=float, display=SESSION.display)
    rules.all_wrong = lambda groups: groups == [WRONG, WRONG]
    advice = r"none of 2 groups is worth training on \(max_filtered_batches=3\): all 4 .* scored 0; .*; loosen the"
    with pytest.raises(RunFailedError, match=f"{advice} filter"):
        StepRollouts(config, session, rules).take(1, gives([], [WRONG, WRONG]))


class Workers:
    """A cluster of one, or the replicas of one."""

    world_size = 1

    def __init__(self, name: str) -> None:
        self.name = name
        self.restarts = [0]
        self.lives = True
        self.fails: Exception | None = None
        self.cluster = self
        self.place: Any = None

    def dead(self) -> dict[int, Any]:
        return {} if self.lives else {0: self.place}

    def restart(self, ranks: Any) -> None:
        self.restarts[0] += 1
        self.lives = True

    def call_rank(self, rank: int, method: str, *args: Any) -> None:
        assert method == "setup"

    def submit(self, method: str, *args: Any) -> None:
        assert method == "setup"

    def gather(self, refs: None, *, call: str) -> None:
        if self.fails is not None:
            raise pickle.loads(pickle.dumps(self.fails))


class Connected(RolloutWorkers):
    connections = 0

    def connect(self) -> None:
        self.connections += 1


def started(limit: int = 9) -> tuple[Connected, Workers, Workers, Workers]:
    """Roles of rollout workers, the generator and the evaluator."""
    players, generator, evaluator = (Workers(name) for name in ("rollout", "actor_infer", "val_infer"))
    models = SimpleNamespace(on_replaced=[], scorers=(), restarts=RestartBudget(limit))
    models.rollout_replicas, models.evaluation_replicas = generator, evaluator
    run: Any = SimpleNamespace(clusters={"rollout": players}, roles=models, signals=SignalGuard())
    config: Any = None
    return Connected(config, run, {"rollout": ()}), players, generator, evaluator


LOST = RuntimeError("lost")


def test_a_death_that_hits_an_evaluation_and_the_rollouts_beside_it_is_repaired_once_for_both(monkeypatch):
    monkeypatch.setattr(rollout_workers, "NODE_VERDICT_S", 0.0)
    roles, players, _, _ = started()
    players.lives = False
    roles.recover(LOST, evaluates=True)
    assert (players.restarts, roles.connections) == ([1], 1)
    roles.recover(LOST, evaluates=False)  # the rollouts hear of it when the next batch is taken
    assert (players.restarts, roles.connections) == ([1], 1)
    for evaluates in (True, False):
        with pytest.raises(RuntimeError, match="lost"):  # nobody has died since
            roles.recover(LOST, evaluates=evaluates)


@pytest.mark.parametrize("evaluates", [True, False])
def test_only_those_who_generate_for_the_lost_groups_are_brought_back(evaluates):
    """The trainer may have moved on since the others got their weights, and cannot send these any more."""
    roles, _, generator, evaluator = started()
    generator.lives = evaluator.lives = False
    roles.recover(LOST, evaluates=evaluates)
    assert (generator.restarts, evaluator.restarts) == (([0], [1]) if evaluates else ([1], [0]))


def test_the_dead_are_replaced_as_often_as_is_allowed():
    roles, players, generator, _ = started(limit=1)
    players.lives = generator.lives = False
    with pytest.raises(WorkerDiedError, match="max_worker_restarts=1 is used up"):
        roles.recover(LOST, evaluates=False)


def test_what_dies_with_a_node_counts_once(monkeypatch):
    monkeypatch.setattr("roll.pipeline.roles.lost_nodes", lambda: {"lost"})
    roles, players, generator, _ = started(limit=2)
    for workers in (players, generator):
        workers.lives, workers.place = False, Whereabouts(1, "lost")
    roles.recover(LOST, evaluates=False)
    players.lives, players.place = False, Whereabouts(2, "living")
    roles.recover(LOST, evaluates=False)
    players.lives = False
    with pytest.raises(WorkerDiedError, match="max_worker_restarts=2 is used up"):
        roles.recover(LOST, evaluates=False)


@pytest.mark.parametrize("error", [PortTakenError("agent.port: got 80"), RewardError("no word list")])
def test_what_a_worker_cannot_set_up_ends_the_run_in_its_words(error):
    roles, players, _, _ = started()
    players.fails = error
    roles.begin_setup()
    with pytest.raises(RunFailedError, match=str(error)):
        roles.wait_ready()


# The environment managers of a run, their workers in this process

CONFIGS = Path(__file__).parents[2] / "integration" / "config"


class Local:
    """Two workers that answer at once (what a ``Cluster`` does through Ray)."""

    world_size = 2

    def __init__(self) -> None:
        self.workers = [EnvironmentWorker("envs", rank, self.world_size, {}) for rank in range(self.world_size)]

    def submit(self, method: str, *args: Any) -> list[Any]:
        return [asyncio.run(getattr(worker, method)(*args)) for worker in self.workers]

    def gather(self, refs: list[Any], *, call: str) -> list[Any]:
        return refs


def roles(*overrides: str) -> AgenticRolloutWorkers:
    config = load_config(AgenticConfig, "small", CONFIGS, overrides)
    clusters = {name: Local() for name in MANAGERS}
    models, start = SimpleNamespace(on_replaced=[]), Start("/no/model")
    run: Any = SimpleNamespace(clusters=clusters, roles=models, start=start, signals=SignalGuard())
    return AgenticRolloutWorkers(config, run)


def test_every_environment_is_tried_before_anything_is_set_up():
    roles().probe()
    mute = roles("custom_envs.Counting.env_type=tests.support.faults:MuteEnv")
    with pytest.raises(RunFailedError) as caught:
        mute.probe()
    line = "custom_envs.Counting: MuteEnv.reset returned observation None (NoneType), expected text, or a list of parts"
    assert str(caught.value) == line, "told once, though each worker finds it"


def test_evaluations_alone_are_recorded_twice_as_many_as_are_shown():
    envs = roles("num_renders=3")
    recorded = [scheduler.plan.spec(5).record for scheduler in (envs.train, envs.val, envs.val_greedy)]
    assert recorded == [False, True, False]
    assert not envs.val.plan.spec(6).record
