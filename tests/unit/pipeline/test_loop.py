"""A run: what its start shows, when its loop evaluates and saves, what a step trains on, and how its session ends."""

import errno
import io
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from roll.algorithms.reductions import RunningStats
from roll.algorithms.selection import drop_masked_episodes
from roll.algorithms.shaping import Shaping
from roll.configs.agentic import AgenticConfig
from roll.configs.algorithm import AlgorithmConfig
from roll.configs.engines.card import kind_of
from roll.configs.loader import load_config
from roll.configs.pipeline import PipelineConfig, RunConfig
from roll.configs.problems import ConfigErrors
from roll.configs.rl import RLConfig
from roll.data.batch import Batch
from roll.distributed.cluster.cluster import Cluster, Worker
from roll.distributed.cluster.resources import plan_placement, pretend_nodes
from roll.distributed.strategy.base import Metrics
from roll.pipeline import launch
from roll.pipeline.cli import EXIT_STOPPED
from roll.pipeline.launch import EXPECTED_ERRORS
from roll.pipeline.loop import TrainingLoop
from roll.pipeline.programs import AGENTIC
from roll.pipeline.rl import RLPipeline
from roll.pipeline.rollouts import GroupRules, StepRollouts
from roll.pipeline.session import RunSession, StoppedByWatchError
from roll.preflight.choices import role_requests
from roll.rollout.admission import Admission
from roll.rollout.types import Collected, RolloutGroup
from roll.tracking.checkpointer import Checkpointer, CheckpointError, write_manifest
from roll.tracking.display import Display
from roll.utils.signals import SignalGuard
from tests.support.lines import read_lines
from tests.unit.tracking.test_tracking import RECORDER, Recorder


@pytest.fixture(autouse=True)
def no_step_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was before, when the run is over."""
    monkeypatch.setattr(Cluster, "current_step", None)


class Stop(Exception):
    """Ends a start or a step."""


class Counting(TrainingLoop):
    """A run without a model: its steps change nothing."""

    evaluated: list[tuple[str, int]]

    def step(self, step: int) -> None:
        with self.update(step):
            self.unreported = {"loss": float(step)}

    def evaluate(self, name: str, step: int) -> Metrics:
        self.evaluated.append((name, step))
        return {"eval/success": 0.5}


def make_batch(rows: int, **columns: torch.Tensor) -> Batch:
    """Rows of one token that counts."""
    return Batch(torch.ones(rows).long(), torch.zeros(rows).long(), torch.ones(rows).bool(), **columns)


class OtherConfig(PipelineConfig):
    """Configuration of another pipeline."""


def run(
    folder: Path, kind: type[PipelineConfig] = PipelineConfig, make: type[Counting] = Counting, **keys: Any
) -> Counting:
    """A run of five steps."""
    values = {"max_steps": 5, "eval_steps": 2, "save_steps": 3, "track_with": [], **keys}
    config = kind(output_dir=str(folder), exp_name="loop", **values)
    actor = SimpleNamespace(cluster=None)
    roles: Any = SimpleNamespace(clusters={}, workers={}, actor=actor, generator=None, evaluator=None)
    roles.sync_weights = roles.load = lambda _: None
    roles.save = lambda path: (path / "weights").touch()
    with SignalGuard() as signals, RunSession(config, time.time()) as session:
        loop = make(config, session, roles, signals)
        loop.evaluated = []
        loop.run()
    return loop


@pytest.mark.parametrize(
    ("keys", "evaluated", "saved"),
    [
        ({}, [("before", 0), ("step", 2), ("step", 4), ("after", 5)], [3, 5]),
        ({"val_after_train": False}, [("before", 0), ("step", 2), ("step", 4)], [3, 5]),
        ({"val_after_train": False, "eval_steps": 5}, [("before", 0), ("after", 5)], [3, 5]),
        ({"val_before_train": False, "val_after_train": False, "eval_steps": 0, "save_steps": None}, [], []),
    ],
)
def test_evaluations_and_checkpoints_are_those_that_were_asked_for(tmp_path, keys, evaluated, saved):
    loop = run(tmp_path, **keys)
    assert loop.evaluated == evaluated
    folders = tmp_path / "loop" / "checkpoints"
    assert sorted(path.name for path in folders.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in saved]
    assert loop.session.summary["steps"] == 5


def test_who_evaluates_a_checkpoint_in_its_run_loses_none_of_its_metrics(tmp_path):
    run(tmp_path)

    def lines() -> dict[int, dict[str, float]]:
        found = {record.pop("step"): record for record in read_lines(tmp_path / "loop" / "metrics.jsonl")}
        told = ("loss", "eval/success")
        return {step: {name: record[name] for name in told if name in record} for step, record in found.items()}

    trained = lines()
    assert list(trained) == [0, 1, 2, 3, 4, 5] and "eval/success" not in trained[3]
    for _ in range(2):
        loop = run(tmp_path, eval_only=True, resume_from_checkpoint=f"{tmp_path}/loop/checkpoints/checkpoint-3")
        assert loop.evaluated == [("after", 3)]
        assert lines() == trained | {3: trained[3] | {"eval/success": 0.5}}


def test_a_checkpoint_of_another_pipeline_is_evaluated_and_not_gone_on_from(tmp_path):
    run(tmp_path / "first")
    last = str(tmp_path / "first" / "loop" / "checkpoints" / "checkpoint-5")
    with pytest.raises(CheckpointError, match=r"a run with a PipelineConfig, expected a OtherConfig; .*/actor_train"):
        run(tmp_path / "second", OtherConfig, resume_from_checkpoint=last)
    judged = run(tmp_path / "second", OtherConfig, resume_from_checkpoint=last, eval_only=True)
    assert judged.evaluated == [("after", 5)]


def test_a_resumed_run_that_is_another_is_refused_or_says_what_has_changed(tmp_path):
    run(tmp_path, max_steps=3)
    resumed = {"resume_from_checkpoint": True, "max_steps": 4}
    with pytest.raises(ConfigErrors) as caught:
        run(tmp_path, seed=7, max_grad_norm=0.5, **resumed)
    assert [(problem.path, problem.got) for problem in caught.value.problems] == [("seed", 7)]
    assert "42" in str(caught.value) and "resume_with_changes" in str(caught.value)
    loop = run(tmp_path, seed=7, max_grad_norm=0.5, resume_with_changes=True, **resumed)
    changed = json.loads((tmp_path / "loop" / "summary.json").read_text())["changed"]
    assert changed == [{"key": "seed", "was": 42, "is": 7}, {"key": "max_grad_norm", "was": 1.0, "is": 0.5}]
    log = (loop.session.folder.logs / "roll.log").read_text()
    assert loop.done_steps == 4 and "max_grad_norm: was 1.0, is 0.5" in log
    # From here on the new seed is the run's.
    assert not run(tmp_path, seed=7, max_grad_norm=0.5, **{**resumed, "max_steps": 5}).session.changes


def test_a_checkpoint_without_a_record_is_resumed_with_one_warning(tmp_path):
    run(tmp_path, max_steps=3)
    checkpoint = tmp_path / "loop" / "checkpoints" / "checkpoint-3"
    state = json.loads((checkpoint / "pipeline_state.json").read_text())
    del state["run"]
    (checkpoint / "pipeline_state.json").write_text(json.dumps(state))
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, 3, time.time(), [])
    loop = run(tmp_path, seed=7, resume_from_checkpoint=True)
    log = (loop.session.folder.logs / "roll.log").read_text()
    assert log.count("WARNING") == 1 and "earlier version" in log and "changed" not in loop.session.summary


class Learning(Counting):
    """Looks learned in step 3 and every later one; its evaluation agrees from step ``agrees`` on."""

    agrees = 3

    def step(self, step: int) -> None:
        super().step(step)
        self.looks_learned = step >= 3

    def evaluate(self, name: str, step: int) -> Metrics:
        if name == "after":
            self.session.summary["eval"]["after"] = {"success": 0.5}
        return super().evaluate(name, step)

    def confirm(self, metrics: Metrics) -> str | None:
        assert metrics == {"eval/success": 0.5}
        return "learned: all" if self.done_steps >= self.agrees else None


@pytest.mark.parametrize(("agrees", "last"), [(3, 3), (4, 4), (9, 5)])
def test_a_run_ends_as_learned_where_its_evaluation_agrees(tmp_path, agrees, last, monkeypatch):
    monkeypatch.setattr(Learning, "agrees", agrees)
    loop = run(tmp_path, AgenticConfig, make=Learning, eval_steps=0, save_steps=99)
    assert loop.evaluated == [("before", 0), *(("after", step) for step in range(3, last + 1))]
    summary, checkpoints = loop.session.summary, tmp_path / "loop" / "checkpoints"
    learned = "learned: all" if agrees <= 5 else None
    assert (summary["status"], summary["steps"], summary.get("learned")) == ("completed", last, learned)
    assert summary["eval"]["after"] == {"success": 0.5}
    assert [path.name for path in checkpoints.iterdir()] == [f"checkpoint-{last}"]
    state = Checkpointer.load_state(checkpoints / f"checkpoint-{last}")
    assert state["learned"] == learned and state["looks_learned"]
    keys = {"output_dir": str(tmp_path), "exp_name": "loop", "max_steps": 5, "resume_from_checkpoint": True}
    for share, finished in ((0.9, True), (None, False)) if learned else ():
        assert RunSession(AgenticConfig(**keys, learned_share=share), time.time()).is_finished == finished


def test_a_run_that_is_stopped_while_it_asks_whether_all_is_learned_asks_again(tmp_path):
    class Stopped(Learning):
        def evaluate(self, name: str, step: int) -> Metrics:
            if step == 3:
                raise KeyboardInterrupt
            return super().evaluate(name, step)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, make=Stopped, eval_steps=0)
    loop = run(tmp_path, make=Learning, eval_steps=0, resume_from_checkpoint=True)
    assert loop.evaluated == [("after", 3)] and loop.session.summary["learned"] == "learned: all"
    assert loop.session.summary["steps"] == 3


class Playing(RLPipeline):
    """A step of RL without a model."""

    rollout = evaluate = None


def test_an_error_in_shaping_leaves_what_a_rescued_checkpoint_has_as_it_was():
    keys = {"reward_norm": "running", "reward_shift": True, "adv_estimator": "maxrl", "add_token_level_kl": True}
    config = RLConfig.model_validate({**keys, "target_kl": 0.1, "reference": {}})
    shaping = Shaping(config.parts)
    logprobs = {"old_logprobs_T": torch.zeros(2), "ref_logprobs_T": torch.zeros(2)}
    batch = make_batch(2, rewards_T=torch.tensor([0.0, 1.0]), group_B=torch.zeros(2).long(), **logprobs)
    before = shaping.kl_reward.state_dict()
    with pytest.raises(ValueError, match="maxrl"):  # a score below the mean
        shaping(batch)
    assert shaping.score_stats.state_dict() == RunningStats().state_dict()
    assert shaping.kl_reward.state_dict() == before
    state, shaping = shaping.state_dict(), Shaping(config.model_copy(update={"adv_estimator": "grpo"}).parts)
    shaping.load_state_dict(state)
    shaping(batch)
    assert shaping.score_stats.state_dict() == {"count": 2.0, "mean": 0.5, "squares": 0.5}
    assert shaping.kl_reward.coef < before["coef"], "the KL is below its target"


class Counter:
    """A trained role whose steps do what ``Trainer.train_step`` does: one without a loss token is skipped."""

    reads: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.trained: list[list[int]] = []

    def submit_train(self, batch: Batch, steps: list[torch.Tensor]) -> list[Metrics]:
        self.trained += [rows.tolist() for rows in steps]
        return [{"actor/skipped_steps": float(not batch.select(rows).loss_mask_T.any())} for rows in steps]

    def gather_train(self, refs: list[Metrics]) -> list[Metrics]:
        return refs


@pytest.mark.parametrize("mask_type", ["loss", "all"])
def test_an_optimizer_step_of_which_masks_leave_nothing_is_no_failed_one(mask_type):
    keys = {"adv_estimator": "gae", "critic": {}, "max_len_mask": True, "mask_type": mask_type}
    pipeline: Any = Playing.__new__(Playing)
    pipeline.config, pipeline.bad_steps = RLConfig.model_validate(keys), 0
    pipeline.roles, pipeline.parts = SimpleNamespace(actor=Counter(), critic=Counter()), pipeline.config.parts
    batch = make_batch(5, truncated_B=torch.arange(5) > 0, advantages_T=torch.ones(5), returns_T=torch.ones(5))
    batch, _ = drop_masked_episodes(batch, pipeline.parts.selection)
    metrics = pipeline.train(batch, list(torch.arange(5)[:, None]), step=1)
    assert pipeline.roles.actor.trained == [[0]]
    assert pipeline.roles.critic.trained == ([[0], [1], [2], [3], [4]] if mask_type == "loss" else [[0]])
    assert (pipeline.bad_steps, metrics["actor/skipped_steps"]) == (0, 0)


@pytest.mark.parametrize(("kept", "coef"), [(2, 0.1 * (1 + 0.2 * 2 / 10)), (0, 0.1)])
def test_episodes_that_are_taken_out_of_a_step_do_not_move_the_coefficient_of_the_kl(kept, coef):
    """Ziegler et al. 2019, section 2.2: a KL of ten times the target, over the sequences that were played."""
    keys = {"add_token_level_kl": True, "init_kl_coef": 0.1, "target_kl": 0.1, "kl_horizon": 10, "reference": {}}
    masks = {"max_len_mask": True, "mask_type": "all"}
    shaping = Shaping(RLConfig.model_validate({**keys, **masks, "adv_estimator": "reinforce"}).parts)
    columns = {"rewards_T": torch.zeros(7), "old_logprobs_T": torch.zeros(7), "ref_logprobs_T": -torch.ones(7)}
    shaping(make_batch(7, truncated_B=torch.arange(7) >= kept, **columns))
    assert shaping.kl_reward.coef == pytest.approx(coef)


def test_an_evaluation_reads_none_of_what_only_the_next_step_of_rl_depends_on():
    pipeline: Any = Playing.__new__(Playing)
    pipeline.config = PipelineConfig(eval_only=True)
    pipeline.session = SimpleNamespace(summary={})
    pipeline.load_state_dict({"step": 3, "unreported": {}, "bad_steps": 0, "rng": None, "eval": {}})
    assert pipeline.done_steps == 3


@pytest.mark.parametrize(
    ("keys", "scored"),
    [
        ({}, [0, 2]),
        ({"enable_old_logprobs_recompute": True}, [0, 1, 2, 3]),
        ({"pg_variant": "clip_cov"}, [0, 1, 2, 3]),
        ({"force_disable_old_logprobs_recompute": True}, []),
        ({"force_disable_old_logprobs_recompute": True, "pg_variant": "clip_cov"}, []),
        ({"train_infer_correction": {"bypass": True}}, []),
    ],
)
def test_rows_that_are_scored_before_the_update(keys, scored):
    pipeline: Any = SimpleNamespace(config=AlgorithmConfig.model_validate(keys))
    steps = [torch.tensor([1, 3]), torch.tensor([2, 0])]
    assert RLPipeline.rows_with_old_logprobs(pipeline, make_batch(4), steps).tolist() == scored


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ([], None),
        (["+train_env_manager.query_filter_config.type=std_filter", "+max_filtered_batches=3"], 3),
        (["is_use_additional_prompts=true", "+max_filtered_batches=1"], None),
    ],
)
def test_groups_are_counted_against_a_bound_only_where_some_may_be_turned_down(keys, most):
    """The bound holds for groups under way too: additional ones would not be started."""
    asked: dict[str, Any] = {}

    def take(admission: Admission, step: int, on_group: object, **options: Any) -> Collected:
        asked.update(options)
        raise Stop

    config = load_config(AgenticConfig, "small", Path(__file__).parents[2] / "integration" / "config", keys)
    session: Any = SimpleNamespace(summary={}, elapsed=float, display=SimpleNamespace(progress=None))
    rules: Any = SimpleNamespace(**dict.fromkeys(("check_groups", "wants", "all_wrong"), lambda groups: None))
    with pytest.raises(Stop):
        StepRollouts(config, session, rules).take(1, SimpleNamespace(take=take))
    assert asked["max_batches"] == most


@pytest.mark.parametrize(("taken", "sizes"), [(8, [8] * 4), (7, [9, 9, 10]), (4, [8, 8]), (3, [12]), (1, [4])])
def test_a_batch_that_fell_short_makes_fewer_optimizer_steps_and_not_smaller_ones(taken, sizes):
    config = SimpleNamespace(groups_per_step=8, optimizer_steps_per_epoch=4, ppo_epochs=2, seed=0)
    pipeline: Any = SimpleNamespace(config=config, taken=SimpleNamespace(admission=SimpleNamespace(taken=range(taken))))
    steps = RLPipeline.plan_training(pipeline, make_batch(4 * taken), 1)
    assert sorted(len(step) for step in steps) == sorted(2 * sizes)
    assert sorted(torch.cat(steps).tolist()) == sorted([*range(4 * taken)] * 2)


class Scored(GroupRules):
    """Whose groups are scored, with a best reward of 2 for the tag ``known``."""

    def __init__(self, config: RLConfig) -> None:
        self.config = config

    def best_reward(self, tag: str) -> float | None:
        return 2.0 if tag == "known" else None


def scored(tag: str, *scores: float) -> RolloutGroup:
    return RolloutGroup(0, tag, tuple(SimpleNamespace(score=each, success=each >= 1.5) for each in scores))


@pytest.mark.parametrize(
    ("groups", "share", "wrong"),
    [
        ([scored("known", 2.0, 1.0)], 0.75, False),
        ([scored("unknown", 2.0, 1.0)], 0.5, False),
        ([scored("known", 2.0, 2.0), scored("unknown", 0.0, 0.0)], 0.5, False),
        ([scored("known", 0.5, 0.5), scored("unknown", 0.2, 0.2)], 0.125, True),
        ([scored("unknown", 0.0)], 0.0, True),
    ],
)
def test_what_is_attained_is_a_share_of_the_best_reward_or_of_successes_where_that_is_not_known(groups, share, wrong):
    rules = Scored(RLConfig())
    assert rules.attained(groups) == pytest.approx(share)
    assert rules.all_wrong(groups) == wrong
    assert not rules.all_wrong([])


@pytest.mark.parametrize(
    ("kept", "rest", "doubted", "looks"),
    [
        ([], [scored("known", 2.0, 2.0)], 0, True),
        ([], [scored("known", 2.0, 1.5)], 0, False),
        ([scored("known", 2.0, 1.9)], [scored("known", 2.0, 2.0)], 0, True),
        ([scored("known", 2.0, 1.9)] * 2, [scored("known", 2.0, 2.0)], 0, False),
        ([], [scored("known", 2.0, 2.0)], 18, False),
        ([], [scored("known", 2.0, 2.0)], 10, True),
    ],
)
def test_a_step_looks_learned_that_is_short_and_near_the_best_reward_and_not_lately_doubted(
    kept, rest, doubted, looks, monkeypatch
):
    monkeypatch.setattr("roll.pipeline.rollouts.remarks_on", lambda *_, **__: [])
    monkeypatch.setattr("roll.pipeline.rollouts.sampled_tokens", lambda groups: 0)
    config = RLConfig(rollout_batch_size=2, eval_steps=10)
    session: Any = SimpleNamespace(display=SimpleNamespace(note=lambda text: None))
    rollouts = StepRollouts(config, session, Scored(config))
    rollouts.load_state_dict(rollouts.state_dict() | {"doubted": doubted})
    assert rollouts.look_at(20, Collected(kept, rest)) == looks
    if looks:
        assert rollouts.confirm(20, 0.89) is None and rollouts.state_dict()["doubted"] == 20
        assert str(rollouts.confirm(20, 0.9)).startswith("learned: ")
        assert rollouts.confirm(20, None) is None, "without an evaluation nobody agrees"


def session_in(folder: Path, **keys: Any) -> RunSession:
    return RunSession(RunConfig(output_dir=str(folder), exp_name="aside", **keys), time.time())


@pytest.mark.parametrize("status", ["completed", "failed"])
def test_what_is_done_aside_delays_nobody_and_is_there_when_the_session_ends(tmp_path, status):
    done: list[int] = []
    gate = threading.Event()

    def fail() -> None:
        raise OSError("no space left on device")

    def write(number: int) -> None:
        assert gate.wait(30)
        done.append(number)

    failing = pytest.raises(KeyError) if status == "failed" else nullcontext()
    with failing, session_in(tmp_path) as session:
        session.aside(lambda: write(1))
        session.aside(fail)
        session.aside(lambda: (time.sleep(0.1), write(2)))
        assert done == []
        gate.set()
        if status == "failed":
            raise KeyError("on purpose")
    assert done == [1, 2] and session.summary["status"] == status
    assert "no space left on device" in (session.folder.logs / "roll.log").read_text()


def test_trackers_are_told_of_every_evaluation_and_of_other_steps_now_and_then(tmp_path):
    listening = {"track_with": RECORDER, "logging_steps": 4, "max_steps": 9}
    with session_in(tmp_path, **listening) as session:
        for step in range(10):
            session.log_step(step, {"eval/success": 0.5} if step == 6 else {"actor/loss": 0.5})
    assert [step for _, step in Recorder.logged] == [0, 4, 6, 8, 9]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called, nothing can be written to its end."""

    def no_room(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    return lambda: monkeypatch.setattr(os, "fsync", no_room)


def test_a_run_that_a_full_disk_ends_says_why_and_lets_go_of_everything(tmp_path, monkeypatch, full_disk, capsys):
    handlers = list(logging.getLogger().handlers)
    listening = {"track_with": RECORDER}
    with pytest.raises(CheckpointError, match="is full"), session_in(tmp_path, **listening):
        full_disk()
        raise CheckpointError("checkpoint-3: the disk is full")
    assert Recorder.finished == 1 and logging.getLogger().handlers == handlers
    assert capsys.readouterr().out.splitlines()[-1].startswith("Failed. No evaluation")
    monkeypatch.undo()
    with session_in(tmp_path, **listening):
        pass  # nobody holds the folder


def test_a_run_that_ends_well_but_cannot_say_so_fails(tmp_path, full_disk):
    with pytest.raises(EXPECTED_ERRORS, match="No space left"), session_in(tmp_path):
        full_disk()


def test_what_failed_is_kept_whatever_its_words_are_and_the_page_names_the_runs_logs(tmp_path):
    logs = tmp_path / "logs"
    with pytest.raises(ValueError, match="no rows"), session_in(tmp_path, logging_dir=str(logs)) as session:
        raise ValueError("no rows in caf\udce9.jsonl")
    assert "no rows in caf\\udce9.jsonl" in (session.folder.logs / "traceback.txt").read_text()
    page = (session.renders / "index.html").read_text()
    assert "no rows" in page and str(logs / "roll.log") in page and str(logs / "traceback.txt") in page


# The start of a run, and the exit code of one that a watch stops


def test_the_table_of_roles_is_whole_on_a_terminal_of_80_columns_and_in_the_log_file(monkeypatch, tmp_path):
    def stop(plan: Any) -> None:
        raise Stop

    nodes = pretend_nodes(2, 1)
    monkeypatch.setattr(launch, "discover_nodes", lambda: nodes)
    monkeypatch.setattr(launch, "create_placement", stop)
    monkeypatch.setattr(out := io.StringIO(), "isatty", lambda: True)
    display = Display(stream=out)
    display.console = Console(file=out, width=80, force_terminal=True, color_system=None, highlight=False)
    config = load_config(AgenticConfig, "agentic_sokoban")
    session: Any = SimpleNamespace(display=display)
    monkeypatch.setattr(root := logging.getLogger("roll"), "level", logging.INFO)
    monkeypatch.setattr(root, "handlers", [display.log_handler(), logging.FileHandler(tmp_path / "roll.log")])
    with pytest.raises(Stop), launch.start_clusters(config, session, {}):
        pass
    table = plan_placement(role_requests(config), nodes).describe()
    assert [line.rstrip() for line in out.getvalue().splitlines()] == table
    assert (tmp_path / "roll.log").read_text().splitlines() == table


@pytest.mark.parametrize("dead", [[], ["gcs_server"]], ids=["alive", "dead"])
def test_ray_is_asked_to_end_workers_only_while_its_daemons_are_there(monkeypatch, dead):
    """Without its head each such call waits for a minute, after which Ray ends the process, and no reason is left."""
    calls: list[str] = []

    def part(name: str) -> Any:
        ends = dict.fromkeys(("shutdown", "remove"), lambda: calls.append(name))
        return SimpleNamespace(launch=lambda: None, wait_ready=lambda: None, **ends)

    monkeypatch.setattr(launch, "discover_nodes", lambda: pretend_nodes(1, 2))
    monkeypatch.setattr(launch, "create_placement", lambda plan: part("placement"))
    monkeypatch.setattr(launch, "_cluster", lambda config, name, *_: part(name))
    monkeypatch.setattr(launch, "dead_daemons", lambda: dead)
    config = load_config(AgenticConfig, "agentic_sokoban")
    session: Any = SimpleNamespace(display=Display(stream=io.StringIO()), phase=lambda name: nullcontext())
    session.folder = SimpleNamespace(logs=Path("logs"), profile=Path("profile"))
    workers = dict.fromkeys(map(kind_of, config.clusters), Worker)
    with pytest.raises(Stop), launch.start_clusters(config, session, workers):
        raise Stop
    assert calls == ([] if dead else [*config.clusters, "placement"])


def test_a_run_that_a_watch_stops_has_an_exit_code_and_a_status_of_its_own(monkeypatch, tmp_path):
    for name in ("start_of", "describe_template", "relax_gc", "keep_freed_memory", "Roles", "RunContext"):
        monkeypatch.setattr(launch, name, lambda *_: ())
    for name in ("ray_session", "start_clusters", "StallWatch"):
        monkeypatch.setattr(launch, name, lambda *_, **__: nullcontext({}))

    def stopped(*_: object) -> None:
        raise StoppedByWatchError("dead_groups")

    config: Any = AgenticConfig(output_dir=str(tmp_path), exp_name="run", track_with=[])
    assert launch.launch(config, AGENTIC, stopped, {}, needs=()) == EXIT_STOPPED == 3
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "stopped"
    assert not (tmp_path / "run" / "logs" / "traceback.txt").exists()
