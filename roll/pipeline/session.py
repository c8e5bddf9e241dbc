"""Surroundings of a run: its folder, terminal, trackers, timers and checkpoints, opened and closed as one."""

from __future__ import annotations

import logging
import time
import traceback as tracebacks
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from roll.configs.pipeline import RunConfig
from roll.configs.problems import ConfigErrors
from roll.configs.resuming import Change, Record, Rows, compare
from roll.pipeline.profiling import PhaseTimer, Span, host_memory
from roll.report.render import render_index
from roll.tracking.checkpointer import Checkpointer, CheckpointError, PostSaveHook
from roll.tracking.display import Display, closing_line
from roll.tracking.redact import redact
from roll.tracking.run import RunFolder, software_versions, write_atomic
from roll.tracking.trackers import AnswerRow, MultiTracker, TrackerContext
from roll.utils.foreign import Fault
from roll.utils.progress import advance

logger = logging.getLogger(__name__)


class RunFailedError(RuntimeError):
    """The run cannot continue, for a reason that its user can act on."""


class StoppedByWatchError(RunFailedError):
    """A watch has found the run to go wrong, and was to stop it then."""


class RunSession:
    """Use as a context manager; the summary is written whatever happens inside.

    Args:
        started: ``time.time()`` at launch, so that figures include the start-up.
        data: the datasets of the run, by the section that names them.

    Raises:
        ConfigErrors: the run to resume took its data in another order, or other data.
        CheckpointError: there is none, or it is another pipeline's.
    """

    def __init__(self, config: RunConfig, started: float, data: Mapping[str, Rows] | None = None) -> None:
        self.config = config
        self.record = Record.of(config, redact(config.model_dump(mode="json")), data or {})
        self.folder = RunFolder(config.output_dir, config.exp_name, logs=config.logging_dir)
        self.display = Display(config.exp_name)
        self.timer = PhaseTimer()
        saving = config.checkpoint_config
        self.checkpointer = Checkpointer(
            saving.output_dir or self.folder.checkpoints,
            config.max_ckpt_to_keep,
            background=config.async_save,
            hook=PostSaveHook(saving.post_save_hook, saving.post_save_timeout, required=saving.post_save_required),
        )
        renders = config.render_save_dir
        self.renders = Path(renders).expanduser() if renders else self.folder.renders
        self.changes: list[Change] = []
        """Settings that are others than those of the run that is resumed."""
        self._compared = True
        self.resume_path = self._resumable(config)
        self.summary: dict[str, Any] = {
            "status": "running",
            "steps": 0,
            "eval": {},
            "versions": software_versions(),
            "data": self.record.data,
        }
        self._started = started
        self._tracker: MultiTracker | None = None
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="aside")

    def __enter__(self) -> RunSession:
        plain = self.config.model_dump(mode="json")
        only_evaluates = self.resume_path is not None and self.config.eval_only  # and takes no step again
        resumed_step = self.checkpointer.step_of(self.resume_path) if self.resume_path and not only_evaluates else None
        aside = self.folder.claim(fresh=self.resume_path is None)
        self.folder.setup_logging(self.display.log_handler())
        if aside is not None:
            logger.info("an earlier run of this name is now in %s", aside)
        if not self._compared:
            logger.warning(
                "%s was saved by an earlier version, without a record of its data, seed and settings: they are not "
                "compared with this run's",
                self.resume_path,
            )
        if self.changes:
            self.summary["changed"] = [{"key": each.key, "was": each.was, "is": each.now} for each in self.changes]
            told = "\n".join(f"  {each}" for each in self.changes)
            logger.warning("changed since the run that saved %s:\n%s", self.resume_path, told)
        self.folder.write_config(plain)
        if not only_evaluates:
            last = -1 if resumed_step is None else resumed_step
            self.folder.truncate_metrics(last)
            self.folder.truncate_schedule(last)
            self.folder.truncate_samples(last)
        context = TrackerContext(self.folder, plain, resumed_step)
        self._tracker = MultiTracker(self.config.trackers, self.config.tracker_kwargs, context)
        self.folder.write_summary(self.summary)
        self.display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        stopped = isinstance(error, StoppedByWatchError)
        if error is not None:
            self.summary["status"] = "interrupted" if interrupted else "stopped" if stopped else "failed"
            self.summary["error"] = f"{type(error).__name__}: {error}"
        else:
            self.summary["status"] = "completed"
        ends: list[Callable[[], object]] = [
            self._memory,
            self.write_summary,
            self._aside.shutdown,
            *([] if error is None else [partial(self._leave_word, error, interrupted or stopped)]),
            partial(render_index, self.folder.path, self.renders, self.folder.logs, type(self.config)),
            *([] if self._tracker is None else [self._tracker.finish]),
            lambda: self.display.finish(closing_line(self.summary, self.folder.path)),
            self.folder.close,
        ]
        failed: Exception | None = None
        for end in ends:
            try:
                end()
            except Exception as problem:  # such as a full disk: the others are told, and why the run ended stays
                known = isinstance(problem, OSError)
                logger.error("ending the run: %s: %s", type(problem).__name__, problem, exc_info=not known)
                failed = failed or problem
        if failed is not None and error is None:
            raise failed

    def _resumable(self, config: RunConfig) -> Path | None:
        """The checkpoint to go on from, or to evaluate.

        Raises:
            CheckpointError: there is none, or a run of another pipeline has saved it, whose steps are others.
            ConfigErrors: see the class.
        """
        path = self.checkpointer.resolve(config.resume_from_checkpoint)
        if path is not None and not config.eval_only:
            state = Checkpointer.load_state(path)
            kind = state.get("config", type(config).__name__)  # earlier versions did not say
            if kind != type(config).__name__:
                raise CheckpointError(
                    f"resume_from_checkpoint: {path} is of a run with a {kind}, expected a {type(config).__name__}; "
                    f"its model is in {path / 'actor_train'}"
                )
            self._compare(path, state)
        return path

    def _compare(self, path: Path, state: Mapping[str, Any]) -> None:
        """Compares this run with the one whose checkpoint it goes on from.

        Raises:
            ConfigErrors: it would go on at another place of the data, which ``resume_with_changes`` has not asked for.
        """
        if "run" not in state:
            self._compared = False
            return
        moved, told = compare(Record(**state["run"]), self.record, type(self.config))
        if moved and not self.config.resume_with_changes:
            raise ConfigErrors([change.refused() for change in moved])
        self.changes = [*moved, *told]

    @property
    def is_finished(self) -> bool:
        """The run to resume has taken its last step, and nothing of that is left to evaluate or to report."""
        if self.resume_path is None or self.config.eval_only:
            return False
        state = Checkpointer.load_state(self.resume_path)
        learned = state.get("learned") is not None and getattr(self.config, "learned_share", None) is not None
        return bool((learned or state["step"] >= self.config.max_steps) and not state["unreported"])

    def _leave_word(self, error: BaseException, on_purpose: bool) -> None:
        """Says how to go on after an early end; what failed is kept with its remote traceback for whoever looks."""
        if not on_purpose:
            path = self.folder.logs / "traceback.txt"
            write_atomic(path, "".join(tracebacks.format_exception(error)))
            self.display.note(f"where it failed: {path}")
        if checkpoint := self.summary.get("checkpoint"):
            self.display.note(f"to continue from {checkpoint}: resume_from_checkpoint=true")

    @contextmanager
    def phase(self, name: str) -> Iterator[Span]:
        """Shows and times one phase of a step; the caller may set the span's tokens."""
        advance()
        self.display.phase(name)
        self.folder.write_phase(name)
        with self.timer.phase(name) as span:
            yield span

    def aside(self, work: Callable[[], object]) -> None:
        """Does what the run need not wait for, such as pictures, in a thread: in order, and before the session ends.

        An error in it is logged and costs no run.
        """

        def attempt() -> None:
            with Fault() as fault:  # pictures and pages must not end the training
                work()
            if fault.error is not None:
                logger.error("a background task failed; the run continues without it", exc_info=fault.error)

        self._aside.submit(attempt)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Reports one finished step everywhere; step 0 holds what was measured before training.

        Returns:
            What was reported: the metrics, and those of the checkpoints' hook and of the machine's memory.
        """
        self.summary["steps"] = step
        metrics = {**metrics, **self.checkpointer.hook.metrics(), **self._memory()}
        (self.folder.log_evaluation if self.config.eval_only else self.folder.log_metrics)(step, metrics)
        due = step % self.config.logging_steps == 0 or step == self.config.max_steps
        if self._tracker is not None and (due or any(name.startswith("eval/") for name in metrics)):
            self._tracker.log(metrics, step)
        if step and not self.config.eval_only:
            self.display.step(step, metrics)
        return metrics

    def _memory(self) -> dict[str, float]:
        """Measures the memory of the run's processes on this machine; their peak is noted in the summary."""
        peak_mb, metrics = host_memory()
        self.summary["peak_memory_mb"] = max(self.summary.get("peak_memory_mb", 0.0), round(peak_mb, 1))
        return metrics

    def log_answers(self, step: int, rows: Sequence[AnswerRow]) -> None:
        """Shows episodes of an evaluation in the trackers that have tables; before the step is reported."""
        if self._tracker is not None and rows:
            self._tracker.log_answers(rows, step)

    def write_summary(self) -> None:
        if self.checkpointer.saved is not None:
            self.summary["checkpoint"] = str(self.checkpointer.saved)
        if (hook := self.checkpointer.hook).runs:
            self.summary["post_save_hook"] = {
                "runs": hook.runs,
                "failures": hook.failures,
                "last_exit_code": hook.exit_code,
            }
        self.summary |= {
            "wall_s": round(self.elapsed(), 2),
            "tokens_per_s": {name: round(rate, 1) for name, rate in self.timer.tokens_per_s().items()},
            "seconds": {name: round(seconds, 2) for name, seconds in self.timer.seconds_by_phase().items()},
        }
        if "first_rollout_s" in self.summary:
            self.summary["rl_s"] = round(self.elapsed() - self.summary["first_rollout_s"], 2)
        self.folder.write_summary(self.summary)

    def elapsed(self) -> float:
        """Seconds since launch."""
        return time.time() - self._started
