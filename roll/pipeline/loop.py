"""The loop of every pipeline: steps, evaluation, reports, checkpoints, resuming, and a rescue when a run ends early.

A pipeline brings its step, which trains, and its evaluation.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from roll.configs.pipeline import PipelineConfig
from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.errors import ClusterError, RpcTimeoutError, WorkerDiedError
from roll.distributed.strategy.base import Metrics
from roll.pipeline.profiling import StepProfiler, Utilisation, record_timeline
from roll.pipeline.roles import Roles
from roll.pipeline.rollouts import Remarks
from roll.pipeline.session import RunFailedError, RunSession, StoppedByWatchError
from roll.report.watches import WATCHES, Watching
from roll.tracking.checkpointer import Checkpointer, CheckpointError, Write, restore_rng_state, rng_state
from roll.tracking.run import read_json_lines
from roll.utils.signals import SignalGuard

logger = logging.getLogger(__name__)


SKIPPED = "/skipped_steps"
"""End of the names of the metrics that count optimizer steps with a NaN or infinite loss or gradient."""


class TrainingDivergedError(RunFailedError):
    """Too many optimizer steps in a row had a NaN or infinite loss."""


class TrainingLoop(ABC):
    """Takes the steps of a run. Subclasses say what a step is.

    Args:
        signals: holds back Ctrl-C while the state could not be saved.
    """

    def __init__(self, config: PipelineConfig, session: RunSession, roles: Roles, signals: SignalGuard) -> None:
        self.config = config
        self.session = session
        self.roles = roles
        self.signals = signals
        self.done_steps = 0
        self.saved_steps = 0
        self.intact = True
        """False while the trained state is half changed and must not be saved."""
        self.unreported: Metrics = {}
        """Metrics of the last finished step until they have been logged."""
        self.bad_steps = 0
        self.looks_learned = False
        """The last step had too little left to learn: an evaluation says whether the run is over (``confirm``)."""
        self.learned: str | None = None
        """Words of why the run is over before ``max_steps``."""
        self.profiler = StepProfiler(config.profiler, roles.clusters, session.folder.profile)
        self.utilisation = Utilisation(config, roles.actor.cluster, roles.clusters.get("actor_infer"))
        actions = {name: config.watches.action(name) for name in WATCHES}
        self.watching = Watching(config.model_dump(mode="json"), actions)
        self._remarks = Remarks()

    @abstractmethod
    def step(self, step: int) -> None:
        """Trains once, within ``update``; the metrics are left in ``unreported``."""

    @abstractmethod
    def evaluate(self, name: str, step: int) -> Metrics:
        """Measures the policy on held-out data; ``name`` is ``before``, ``after`` or ``step``."""

    def confirm(self, metrics: Metrics) -> str | None:
        """With the metrics of an evaluation, why a run that looks as if it had learned is over; ``None``: it is not."""
        return None

    def run(self) -> None:
        """Trains to ``max_steps``, or until all is learned, from a checkpoint if there is one to resume.

        Whatever ends it early, the steps done so far have been saved where that was possible.

        Raises:
            KeyboardInterrupt: the user asked to stop.
            TrainingDivergedError: ``max_bad_steps`` steps in a row could not be taken.
            StoppedByWatchError: a watch says that the run goes wrong.
        """
        try:
            if self.session.resume_path is not None:
                self.resume(self.session.resume_path)
            else:
                self.roles.sync_weights(0)
                metrics = self.measure("before", 0) if self.config.val_before_train or self.config.eval_only else {}
                self.watching.look(0, self.session.log_step(0, metrics | self.session.timer.step_metrics()))
                self._record_timeline(0)
            if self.config.eval_only:
                return
            config = self.config
            self.session.display.start(
                config.max_steps,
                done_steps=self.done_steps,
                eval_steps=config.eval_steps,
                save_steps=config.save_steps,
                evaluates_last=config.val_after_train,
            )
            for step in range(self.done_steps + 1, self.config.max_steps + 1):
                if self.learned is not None:
                    break
                Cluster.current_step = step
                with self.profiler.step(step):
                    self.step(step)
                self.after_step()
            self.profiler.close()
            with self.signals.deferred():
                self.session.checkpointer.wait()
        except (KeyboardInterrupt, Exception) as error:
            self.rescue(error)
            raise

    def publish(self, version: int) -> None:
        """Gives the generating workers the weights after ``version`` steps."""
        self.roles.sync_weights(version)

    def measure(self, name: str, step: int) -> Metrics:
        """Evaluates the weights after ``step`` steps; who evaluates gets them first."""
        roles = self.roles
        if roles.evaluator is not None:
            with self.session.phase("sync"):
                roles.sync_evaluator(step)
        elif roles.generator is not None and roles.generator.version != step:
            with self.session.phase("sync"):
                self.publish(step)
        return self.evaluate(name, step)

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Surrounds the change of the trained state. When the block ends, the step is done."""
        self.intact = False
        yield
        self.done_steps = step
        self.intact = True

    def after_step(self) -> None:
        """Evaluates, reports and saves when it is time to.

        Raises:
            TrainingDivergedError, StoppedByWatchError: see ``run``.
        """
        step, config = self.done_steps, self.config
        self.session.checkpointer.check()
        last = step == config.max_steps
        asks = self.looks_learned and not last
        if asks or (last and config.val_after_train) or (config.eval_steps and step % config.eval_steps == 0):
            metrics = self.measure("after" if asks or last else "step", step)
            self.unreported |= metrics
            if asks and (learned := self.confirm(metrics)) is not None:
                self.learned = self.session.summary["learned"] = learned
            elif asks:  # the end is yet to come
                self.session.summary["eval"].pop("after", None)
        with self.signals.deferred():  # each step is reported once, also by a run that is stopped here and resumed
            metrics = self.session.log_step(step, self.unreported | self.session.timer.step_metrics())
            self.unreported = {}
            self._record_timeline(step)
        self._check_divergence()
        self._watch(step, metrics, last=last or self.learned is not None)
        if last or self.learned is not None or (config.save_steps and step % config.save_steps == 0):
            self.save_checkpoint()
        self.session.write_summary()

    def save_checkpoint(self) -> None:
        """Saves the state after the last finished step, unless that was saved already or nothing is to be saved."""
        if self.saved_steps == self.done_steps or self.config.save_steps is None:
            return
        with self.session.phase("checkpoint"), self.signals.deferred():
            write, state = self.snapshot()
            self.session.checkpointer.save(self.done_steps, write, state)
        self.saved_steps = self.done_steps
        self.session.summary["steps"] = self.done_steps

    def rescue(self, error: BaseException) -> None:
        """Saves the steps done so far before ``error`` ends the run, unless they are gone or half changed."""
        role = error.role if isinstance(error, WorkerDiedError | RpcTimeoutError) else None
        lost = isinstance(error, CheckpointError) or role in ("actor_train", "critic") or not self.intact
        try:
            if not lost:
                self.save_checkpoint()
            with self.signals.deferred():  # a save that goes on in the background is finished
                self.session.checkpointer.wait()
        except (CheckpointError, ClusterError) as second:
            logger.error("the steps after the last checkpoint could not be saved: %s", second)

    def resume(self, path: Path) -> None:
        """Takes up the run where ``path`` was saved."""
        with self.session.phase("resume"):
            self.intact = False
            self.roles.load(path)
            self.restore(path)
            self.intact = True
            self.saved_steps = self.done_steps
            self.session.summary["checkpoint"] = str(path)
            self.roles.sync_weights(self.done_steps)
        logger.info("resumed from %s after step %d", path, self.done_steps)
        if self.config.eval_only:
            metrics = self.measure("after", self.done_steps)
            self.session.log_step(self.done_steps, metrics | self.session.timer.step_metrics())
        elif self.unreported:
            self.session.folder.truncate_metrics(self.done_steps - 1)  # an earlier resume may have reported it already
            self.after_step()

    def snapshot(self) -> tuple[Write, dict[str, Any]]:
        """Contents of a checkpoint: what writes its files, and ``state_dict``."""
        return self.roles.save, self.state_dict()

    def restore(self, path: Path) -> None:
        """Takes up what a checkpoint holds beside the models."""
        self.load_state_dict(Checkpointer.load_state(path))

    def state_dict(self) -> dict[str, Any]:
        """Everything outside the models that the next step depends on."""
        return {
            "config": type(self.config).__name__,
            "run": asdict(self.session.record),
            "step": self.done_steps,
            "unreported": self.unreported,
            "bad_steps": self.bad_steps,
            "looks_learned": self.looks_learned,
            "learned": self.learned,
            "watches": self.watching.state_dict(),
            "rng": rng_state() if "rng" in self.config.checkpoint_config.save_contents else None,
            "eval": self.session.summary["eval"],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done_steps = state["step"]
        self.unreported = state["unreported"]
        self.bad_steps = state["bad_steps"]
        self.looks_learned = state.get("looks_learned", False)  # "learned" is for who asks before a run is resumed
        if "rng" in self.config.checkpoint_config.load_contents and state["rng"] is not None:
            restore_rng_state(state["rng"])
        if not self.config.eval_only:
            reported = read_json_lines(self.session.folder.metrics_path)
            last = self.done_steps - bool(self.unreported)
            self.watching.take_up([each for each in reported if each["step"] <= last], state.get("watches", {}))
        self.session.summary["eval"] = state["eval"]
        self.session.summary["steps"] = self.done_steps

    def count_bad_steps(self, *histories: list[Metrics]) -> None:
        """Counts the optimizer steps in a row that some trained role had to skip."""
        for metrics in zip_longest(*histories, fillvalue={}):
            skipped = any(value for of_role in metrics for name, value in of_role.items() if name.endswith(SKIPPED))
            self.bad_steps = self.bad_steps + 1 if skipped else 0
        if self.bad_steps:
            logger.warning(
                "the loss or its gradient was not finite: %d optimizer steps in a row skipped", self.bad_steps
            )

    def _record_timeline(self, step: int) -> None:
        record_timeline(self.session.timer, self.session.folder, self.roles.workers, step)

    def _watch(self, step: int, metrics: Mapping[str, float], *, last: bool) -> None:
        """Tells of what goes wrong, and ends the run if that was asked for; one that is over is only told of."""
        alarms = self.watching.look(step, metrics)
        for alarm in alarms:
            self._remarks.make(alarm.watch, f"step {step}: {alarm.text} (watches.{alarm.watch})")
        if self.watching.alarms:
            self.session.summary["watches"] = self.watching.state_dict()
        if (stops := [alarm for alarm in alarms if alarm.action == "stop"]) and not last:
            raise StoppedByWatchError(
                f"watches.{stops[0].watch} stops the run after step {step}: {stops[0].text}; "
                "resume_from_checkpoint=true continues, with any changes"
            )

    def _check_divergence(self) -> None:
        if self.bad_steps >= self.config.max_bad_steps:
            bad_steps, self.bad_steps = self.bad_steps, 0  # whoever resumes, with a change, has all tries again
            raise TrainingDivergedError(
                f"{bad_steps} optimizer steps in a row had a NaN or infinite loss or gradient "
                f"(max_bad_steps={self.config.max_bad_steps}); the weights are those before them"
            )


def mean_metrics(history: list[Metrics]) -> Metrics:
    """Means over the optimizer steps; what counts skipped steps is summed."""
    names = {name for metrics in history for name in metrics}
    result = {}
    for name in names:
        values = [metrics[name] for metrics in history if name in metrics]
        result[name] = sum(values) if name.endswith(SKIPPED) else sum(values) / len(values)
    return result
