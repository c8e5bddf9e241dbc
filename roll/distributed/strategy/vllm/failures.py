"""Reason why vLLM's own processes failed. They write it to their log and end, and the strategy sees only the end."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path

from roll.distributed.cluster.reaper import MARK


class FailureHandler(logging.Handler):
    """Appends the exception of every error that vLLM logs to a file, a line each; vLLM's processes load it by name."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and (error := record.exc_info[1]) is not None:
            words = " ".join(str(error).split())
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{type(error).__name__}: {words}\n")


class Failures:
    """A file that all processes of one engine write to, and the logging configuration that makes them."""

    def __init__(self) -> None:
        # It goes with this object, or, where a worker is killed at the end of its run, with the run's Ray session.
        self._folder = tempfile.TemporaryDirectory(prefix="roll-vllm-log-", dir=os.environ.get(MARK))
        self._file = Path(self._folder.name) / "failures"
        self.config = Path(self._folder.name) / "logging.json"
        """For ``VLLM_LOGGING_CONFIG_PATH``: vLLM's own lines, and the file."""
        handlers = {
            "vllm": {"class": "logging.StreamHandler", "formatter": "vllm", "stream": "ext://sys.stdout"},
            "failures": {"class": f"{__name__}.{FailureHandler.__name__}", "path": str(self._file)},
        }
        logger = {"handlers": list(handlers), "level": "WARNING", "propagate": False}
        formatter = {"format": "vllm %(process)d %(levelname)s %(asctime)s %(message)s"}
        config = {"version": 1, "disable_existing_loggers": False, "formatters": {"vllm": formatter}}
        self.config.write_text(json.dumps(config | {"handlers": handlers, "loggers": {"vllm": logger}}))

    def first(self) -> str:
        """The first failure, of which later ones are consequences."""
        if not self._file.is_file():
            return "its own log says why"
        return self._file.read_text(encoding="utf-8").partition("\n")[0]
