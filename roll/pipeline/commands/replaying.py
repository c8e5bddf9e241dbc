"""``roll replay``: takes a step of a run again from its checkpoint, also with other settings.

Neither environments nor generators start: the training step is that of every run, and its rows come from disk, from
the kept rollouts or from the dataset. With the settings, the machine and the layout of the run, each figure is the
recorded one to the bit.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from roll.algorithms.losses import policy_needs
from roll.configs.offline import OfflineConfig
from roll.configs.problems import ConfigErrors, ConfigProblem
from roll.configs.resuming import Change, Record, compare
from roll.configs.rl import RLConfig
from roll.data.batch import Batch
from roll.distributed.cluster.cluster import Cluster
from roll.distributed.strategy.base import Metrics
from roll.models.tokenizer import policy_pictures
from roll.pipeline.cli import EXIT_OK, EXIT_USAGE, read_config, report
from roll.pipeline.commands.inspecting import configuration, schema_of
from roll.pipeline.launch import MODEL_WORKERS, launch
from roll.pipeline.loop import TrainingLoop
from roll.pipeline.programs import Program
from roll.pipeline.rl import RLPipeline, set_losses
from roll.pipeline.rollouts import read_rollouts
from roll.pipeline.start import RunContext
from roll.report.parting import MEASURED
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import Collected, kept_steps, step_folder
from roll.tracking.checkpointer import Checkpointer
from roll.tracking.run import read_json_lines
from roll.utils.registry import import_path

_WORKERS = {name: MODEL_WORKERS[name] for name in ("actor_train", "critic", "reference", "teacher")}
_PLAYED: tuple[str, ...] = ("custom_envs", "train_env_manager", "val_", "rewards", "validation", "rollout_workers")
_PLAYED += ("tools", "agent")
_PLAYED += ("user", "judge", "async_", "rollout_window", "partial_rollout", "max_filtered_batches", "replay_schedule")
"""Beginnings of keys that decide what is played and how it is judged."""

_NOBODY_ANSWERS: dict[str, Any] = {"validation": None, "actor_infer": None, "rewards": {}}
"""Keys of a run on a dataset, where only evaluations generate."""


@dataclass(frozen=True)
class Job:
    """What is replayed."""

    run: Path
    step: int
    rollouts: Path | None = None
    """The run's ``rollout_dump_dir``, where that has moved."""


def run(job: Job, words: Sequence[str], started: float) -> int:
    """Replays, and prints the figures beside the recorded ones.

    Args:
        words: changes to the configuration, ``key=value``.

    Returns:
        0; 1 where something failed, or a figure differs although nothing was changed; 2 for a wrong command line.
    """
    try:
        plan = _plan(job, words)
    except ConfigErrors as errors:
        sys.stderr.write(report(errors, str(job.run)))
        return EXIT_USAGE
    except ValueError as error:
        sys.stderr.write(f"roll replay: {error}\n")
        return EXIT_USAGE
    first, start = _begin(plan.checkpoint)
    if earlier := job.step - first:
        steps = "a step" if earlier == 1 else f"{earlier} steps"
        sys.stderr.write(f"step {job.step} is replayed {start} so {steps} before it will be taken again, too\n")
    if isinstance(plan.config, RLConfig):
        assert plan.rollouts is not None, "a run that samples has them"
        body = partial(_replay, rollouts=plan.rollouts, last=job.step)
        code = launch(plan.config, plan.program, body, _WORKERS, needs=policy_needs(plan.config), started=started)
    else:
        run_offline: Any = import_path(plan.program.run)
        code = run_offline(plan.config, started, take=partial(_take_again, last=job.step))
    if code != EXIT_OK:
        return code
    replayed = _by_step(Path(plan.config.output_dir) / plan.config.exp_name)
    text, differ = _table(job, plan, _by_step(job.run), replayed)
    sys.stdout.write(text)
    return 1 if differ and not plan.changes else EXIT_OK


@dataclass(frozen=True)
class _Plan:
    config: RLConfig | OfflineConfig
    program: Program
    rollouts: Path | None
    """``None``: the rows are those of the dataset."""
    checkpoint: Path | None
    changes: Sequence[Change]


def _plan(job: Job, words: Sequence[str]) -> _Plan:
    """What the replay needs.

    Raises:
        ConfigErrors: a wrong configuration, or a change that a replay cannot follow.
        ValueError: something on disk is missing, or an argument means nothing for this run.
    """
    values = configuration(job.run)
    schema = schema_of(values)
    if schema is None:
        raise ValueError(f"{job.run}: got a configuration of no pipeline, expected a run's")
    offline = issubclass(schema, OfflineConfig)
    if offline and job.rollouts is not None:
        raise ValueError(f"--rollouts {job.rollouts}: expected none, as {job.run} learns from a dataset")
    steps = [step for step in _by_step(job.run) if step > 0]
    if job.step not in steps:
        found = f"the steps {steps[0]} to {steps[-1]}" if steps else "no step"
        raise ValueError(f"--step {job.step}: {job.run} has recorded {found}")
    saved = (values.get("checkpoint_config") or {}).get("output_dir") or job.run / "checkpoints"
    checkpoint = Checkpointer(saved).before(job.step)
    fixed = {key: value for key, value in _fixed(job, checkpoint).items() if key in schema.model_fields}
    if offline:
        fixed |= _NOBODY_ANSWERS
    changed = {re.split("[.=]", word)[0] for word in words}
    taken = [key for key in fixed if key in changed]
    if taken:
        raise ValueError(f"{', '.join(taken)}: a replay sets this itself")
    fixed_words = [f"{key}={json.dumps(value)}" for key, value in fixed.items()]
    before, _ = read_config("config", job.run, fixed_words)
    config, program = read_config("config", job.run, [*fixed_words, *words])
    assert isinstance(before, RLConfig | OfflineConfig) and isinstance(config, RLConfig | OfflineConfig), "all are"
    changes = _changes(before, config)
    if getattr(config, "teacher_prompt", None) is not None:
        raise ValueError("teacher_prompt: its prompts are made of the data, which a replay does not read")
    rollouts = None if offline else _rollouts(job, values.get("rollout_dump_dir"), checkpoint)
    return _Plan(config, program, rollouts, checkpoint, changes)


def _rollouts(job: Job, of_run: str | None, checkpoint: Path | None) -> Path:
    """The folder with the rollouts of all steps that are taken.

    Args:
        of_run: the run's ``rollout_dump_dir``.

    Raises:
        ValueError: there is none, or rollouts of some steps are missing.
    """
    dumped = job.rollouts or of_run
    if dumped is None:
        raise ValueError(f"{job.run} has kept no rollouts; a run with rollout_dump_dir can be replayed")
    first, start = _begin(checkpoint)
    rollouts = Path(dumped).expanduser()
    needed = range(first, job.step + 1)
    if lack := [step for step in needed if not (step_folder(rollouts, step) / "rollouts.json").is_file()]:
        oldest = next(iter(kept_steps(rollouts)), 0)
        why = ""
        if max(lack) < oldest:
            begin = step_folder(rollouts, oldest).name
            why = f"; it begins with {begin}, as rollout_dump_gb bounds it: the oldest steps are deleted first"
        raise ValueError(
            f"step {job.step} is replayed {start} with the rollouts of each step from {first} on; those of "
            f"{', '.join(map(str, lack))} are not in {rollouts} (rollout_dump_dir; --rollouts DIR if it has moved){why}"
        )
    return rollouts


def _begin(checkpoint: Path | None) -> tuple[int, str]:
    """The first step that is taken, and the same in words."""
    if checkpoint is None:
        return 1, "from the first step on,"
    return Checkpointer.step_of(checkpoint) + 1, f"from {checkpoint.name}, the nearest before it,"


def _fixed(job: Job, checkpoint: Path | None) -> dict[str, Any]:
    """Keys that make a run's configuration that of its replay, which is written beside the run; of all pipelines."""
    run = job.run.resolve()
    return {
        "exp_name": f"{run.name}_replay_{job.step}",
        "output_dir": str(run.parent),
        "resume_from_checkpoint": False if checkpoint is None else str(checkpoint.resolve()),
        "resume_with_changes": True,
        **dict.fromkeys(("val_before_train", "val_after_train"), False),
        **dict.fromkeys(("save_steps", "logging_dir", "render_save_dir", "rollout_dump_dir", "rollout_replay_dir")),
        "replay_schedule": None,
        "eval_steps": 0,
        "track_with": [],
        "probe": "off",
    }


def _changes(before: RLConfig | OfflineConfig, after: RLConfig | OfflineConfig) -> list[Change]:
    """What the user has changed of what is learned.

    Raises:
        ConfigErrors: a change of what is played, which is given.
    """
    was, now = (Record.of(each, each.model_dump(mode="json"), {}) for each in (before, after))
    moved, told = compare(was, now, type(after))
    refused = [*moved, *(change for change in told if change.key.startswith(_PLAYED))]
    if refused:
        expected = "as recorded: a replay takes the episodes of the run, with their rewards"
        raise ConfigErrors([ConfigProblem(each.key, each.now, f"{each.was}, {expected}") for each in refused])
    return told


def _replay(config: RLConfig, run: RunContext, *, rollouts: Path, last: int) -> None:
    run.roles.pictures = _shows_pictures(config, rollouts, last)
    with run.set_up(config, None):
        set_losses(run.roles, config)
    _take_again(Replay(config, run, rollouts), last)


def _shows_pictures(config: RLConfig, rollouts: Path, last: int) -> bool:
    """Tells whether the run's models had their towers: some prompt that was kept has pictures."""
    if policy_pictures(config.pretrain, {}) is None:
        return False
    kept = (Collected.load(folder) for step, folder in kept_steps(rollouts).items() if step <= last)
    return any(True for step in kept for group in (*step.groups, *step.rejected) for _ in group.items)


def _take_again(loop: TrainingLoop, last: int) -> None:
    """Takes the steps up to ``last``, from the checkpoint of the session if there is one."""
    session = loop.session
    if (path := session.resume_path) is not None:
        with session.phase("resume"):
            loop.roles.load(path)
            loop.restore(path)
    session.summary["eval"] = {}  # the run's own
    session.display.start(last, done_steps=loop.done_steps, save_steps=None, evaluates_last=False)
    for step in range(loop.done_steps + 1, last + 1):
        Cluster.current_step = step
        loop.step(step)
        session.log_step(step, loop.unreported | session.timer.step_metrics())


class Replay(RLPipeline):
    """The training steps of a run, on the groups that it has kept."""

    def __init__(self, config: RLConfig, run: RunContext, rollouts: Path) -> None:
        super().__init__(config, run, None)
        self._folder = rollouts

    def rollout(self, step: int) -> tuple[Batch | None, Metrics]:
        """The recorded groups; their own metrics are not counted again."""
        collected, admission = read_rollouts(str(self._folder), step), self.taken.admission
        self.taken.look_at(step, collected)
        admission.open(step)
        admission.taken = tuple(group.group_id for group in collected.groups)
        if not collected.groups:
            return None, {}
        return groups_to_batch(collected.groups, self.config.tags, self.config.gdpo_reward_keys), {}

    def commit(self) -> None:
        self.taken.admission.commit()

    def evaluates(self, step: int) -> bool:
        """Some rows of each step are written token by token, as in a step with an evaluation."""
        return True

    def evaluate(self, name: str, step: int) -> Metrics:
        """Nothing: nobody answers."""
        return {}


def _by_step(folder: Path) -> dict[int, Mapping[str, Any]]:
    return {record["step"]: record for record in read_json_lines(folder / "metrics.jsonl")}


def _table(
    job: Job, plan: _Plan, recorded: Mapping[int, Mapping[str, Any]], replayed: Mapping[int, Mapping[str, Any]]
) -> tuple[str, int]:
    """The figures of the step beside the recorded ones, and how many of all replayed steps differ."""
    start = "the beginning" if plan.checkpoint is None else plan.checkpoint.name
    lines = [f"step {job.step} of {job.run}, replayed from {start}", *(f"changed: {each}" for each in plan.changes)]
    differ = 0
    for step, found in replayed.items():
        names = sorted(name for name in found.keys() & recorded[step].keys() if not _is_measured(name))
        others = [name for name in names if found[name] != recorded[step][name]]
        differ += len(others)
        if step < job.step:
            lines.append(f"step {step}, before it: {len(others)} of {len(names)} figures differ")
            continue
        rows = [(name, *_figures(recorded[step][name], found[name])) for name in names]
        widths = [max(map(len, column)) for column in zip(("", "recorded", "replayed"), *rows, strict=True)]
        lines += ["", f"{'':<{widths[0]}}  {'recorded':>{widths[1]}}  {'replayed':>{widths[2]}}"]
        lines += [
            f"{name:<{widths[0]}}  {left:>{widths[1]}}  {right:>{widths[2]}}{'  differs' * (name in others)}"
            for name, left, right in rows
        ]
        verdict = f"{len(others)} of {len(names)} differ" if others else f"all {len(names)} are equal to the bit"
        lines += ["", f"{verdict}; the replay is in {Path(plan.config.output_dir) / plan.config.exp_name}"]
    return "\n".join(lines) + "\n", differ


def _is_measured(name: str) -> bool:
    return name == "step" or name.startswith(MEASURED)


def _figures(left: float | None, right: float | None) -> tuple[str, str]:
    """Two figures as text, which differs where they do."""
    short = (f"{left:.6g}", f"{right:.6g}") if left is not None and right is not None else (str(left), str(right))
    return short if left == right or short[0] != short[1] else (repr(left), repr(right))
