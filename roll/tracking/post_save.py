"""A user's program that is run with each checkpoint's folder: copies it to a store, registers it, tells somebody."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from roll.utils.children import ending

logger = logging.getLogger(__name__)

FOLDER_VARIABLE, STEP_VARIABLE = "ROLL_CHECKPOINT", "ROLL_STEP"
KEY = "checkpoint_config.post_save_hook"
_TOLD_BYTES = 2000


class PostSaveHook:
    """Runs a program, without a shell, once a checkpoint is whole.

    It finds the folder in ``ROLL_CHECKPOINT`` and as its last argument, the step in ``ROLL_STEP``.

    Args:
        command: program and arguments; none: nothing is run.
        timeout: seconds, after which it is killed with all that it has started.
    """

    def __init__(self, command: Sequence[str], timeout: float = 3600.0, *, required: bool = False) -> None:
        self._command = tuple(command)
        self._timeout = timeout
        self.required = required
        self.runs = 0
        self.failures = 0
        self.exit_code: int | None = None
        """Of the last run, as ``subprocess`` has it; ``None`` where it could not be started."""

    def metrics(self) -> dict[str, float]:
        """Counts so far; none before the first run."""
        counts = {"checkpoint/hook_runs": float(self.runs), "checkpoint/hook_failures": float(self.failures)}
        return counts if self.runs else {}

    def run(self, checkpoint: Path, step: int) -> str | None:
        """Runs it and waits for its end.

        Returns:
            What went wrong.
        """
        if not self._command:
            return None
        self.runs += 1
        started = time.monotonic()
        if (problem := self._failure(checkpoint.resolve(), step)) is None:
            logger.info("%s after %s: %.1f s", KEY, checkpoint.name, time.monotonic() - started)
            return None
        self.failures += 1
        problem = f"{KEY} after {checkpoint.name} {problem}"
        if not self.required:
            logger.warning("%s", problem)
        return problem

    def _failure(self, checkpoint: Path, step: int) -> str | None:
        """Runs the command; says what went wrong, in words."""
        variables = {FOLDER_VARIABLE: str(checkpoint), STEP_VARIABLE: str(step)}
        with tempfile.TemporaryFile() as said:  # no pipe: what it leaves running may hold one open
            try:
                process = subprocess.Popen(
                    [*self._command, str(checkpoint)],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env=os.environ | variables,
                    start_new_session=True,  # Ctrl-C is the run's affair, and a kill takes all
                )
            except OSError as error:
                self.exit_code = None
                return f"could not be started: {error}"
            try:
                self.exit_code = process.wait(self._timeout)
                problem = f"ended with {ending(self.exit_code)}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                self.exit_code = process.wait()
                problem = f"took longer than {self._timeout:g} s and was killed"
            if self.exit_code == 0:
                return None
            said.seek(max(0, said.seek(0, os.SEEK_END) - _TOLD_BYTES))
            return f"{problem}: {said.read().decode(errors='replace').strip()}".rstrip(": ")
