"""A run's folder: everything that a run writes, under ``output_dir/<exp_name>/``.

::

    config.yaml            resolved configuration, secrets removed
    logs/roll.log          every log record of the driver
    metrics.jsonl          one line of JSON per step
    timeline.jsonl         of each step, when its phases and its workers' work began and ended
    schedule.jsonl         which rollouts each step took, and their weights (async_generation_ratio)
    checkpoints/           checkpoint-N/ (see checkpointer.py)
    trajectories/          chosen episodes in full, JSON lines: eval-<step>, train-<step>, tokens-<step>
    renders/               episodes to watch, index.html
    profile/               recordings of single steps (profiler)
    summary.json           how the run went
    phase.json             what it does at the moment
"""

from __future__ import annotations

import enum
import errno
import fcntl
import itertools
import json
import logging
import math
import os
import platform
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml

from roll import __version__
from roll.tracking.redact import redact

logger = logging.getLogger(__name__)

TRAINED = "train-"
"""Start of the names of the files of training groups in ``trajectories/``, before the step."""
TOKENS = "tokens-"
"""The same for files of single tokens."""
TIMELINE = "timeline.jsonl"
PHASE = "phase.json"
"""File of what a run does at the moment: ``phase``, ``since`` (seconds of the epoch), ``host``."""
LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "ray",
    "numpy",
    "safetensors",
    "pydantic",
    "peft",
    "deepspeed",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
    "vllm",
    "sglang",
)


def software_versions() -> dict[str, str]:
    """Versions of the system, Python, this library and the installed ones that results depend on, and the machine's.

    ``kernels`` are the instructions that PyTorch's own use on a CPU, with the choice that MKL was told.
    """
    found = {"platform": platform.platform(), "python": platform.python_version(), "roll": __version__}
    found |= _machine()
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _machine() -> dict[str, str]:
    """Of the driver's node: its processor and GPUs by name, and the kernels that they run."""
    from torch.backends.cpu import get_cpu_capability

    told = [f"MKL_CBWR={value}" for value in [os.environ.get("MKL_CBWR")] if value]
    found = {"kernels": ", ".join([get_cpu_capability(), *told])}
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        found["cpu"] = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    models = [path.read_text(encoding="utf-8") for path in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    names = {
        line.partition(":")[2].strip() for text in models for line in text.splitlines() if line.startswith("Model:")
    }
    return found | ({"gpu": ", ".join(sorted(names))} if names else {})


class RunFolder:
    """Creates the folder and writes its files. All methods may be called again after a resume."""

    def __init__(
        self, output_dir: str | os.PathLike[str], exp_name: str, *, logs: str | os.PathLike[str] | None = None
    ) -> None:
        """Creates ``output_dir/exp_name`` and its subfolders; ``logs`` may lie elsewhere."""
        self.path = Path(output_dir).expanduser().resolve() / exp_name
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.schedule_path = self.path / "schedule.jsonl"
        self.timeline_path = self.path / TIMELINE
        self.summary_path = self.path / "summary.json"
        self.logs = self.path / "logs" if logs is None else Path(logs).expanduser().resolve()
        self.checkpoints = self.path / "checkpoints"
        self.trajectories = self.path / "trajectories"
        self.renders = self.path / "renders"
        self.profile = self.path / "profile"
        self._handlers: list[logging.Handler] = []
        self._lock: IO[bytes] | None = None
        self._make_folders()

    def claim(self, *, fresh: bool) -> Path | None:
        """Makes the folder this process's own until ``close``.

        Args:
            fresh: the run starts from the beginning. What an earlier run of the same name left is then moved aside, to
                ``<exp_name>.1`` or the next free number, so that neither its figures nor its checkpoints are mistaken
                for this run's.

        Returns:
            Where the earlier run's folder is now, if there was one.

        Raises:
            ValueError: another process runs in this folder.
        """
        self._lock = _locked(self.path)
        if not fresh or not self.summary_path.exists():
            return None
        numbers = (self.path.with_name(f"{self.path.name}.{number}") for number in itertools.count(1))
        aside = next(path for path in numbers if not path.exists())
        self.path.rename(aside)
        self._make_folders()
        self._lock.close()
        self._lock = _locked(self.path)
        return aside

    def write_phase(self, phase: str) -> None:
        """Replaces ``phase.json``, for who looks on; a disk that is full or slow to sync is no reason to stop."""
        record = {"phase": phase, "since": time.time(), "host": platform.node()}
        with suppress(OSError):
            write_atomic(self.path / PHASE, to_json(record) + "\n", synced=False)

    def _make_folders(self) -> None:
        for folder in (self.logs, self.checkpoints, self.trajectories, self.renders):
            folder.mkdir(parents=True, exist_ok=True)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes ``config.yaml`` without the secrets in it."""
        text = yaml.safe_dump(to_plain(redact(config)), sort_keys=False, allow_unicode=True)
        write_atomic(self.config_path, text)

    def setup_logging(self, console: logging.Handler) -> None:
        """Sends the driver's log records to ``logs/roll.log`` and the console; ``close`` undoes it."""
        self._remove_handlers()
        to_file = logging.FileHandler(self.logs / "roll.log", encoding="utf-8")
        to_file.setFormatter(logging.Formatter(LOG_FORMAT))
        self._handlers = [to_file, console]
        for handler in self._handlers:
            handler.setLevel(logging.INFO)
            logging.getLogger().addHandler(handler)
        logging.getLogger("roll").setLevel(logging.INFO)

    def close(self) -> None:
        """Takes this run's log handlers down and lets go of the folder."""
        self._remove_handlers()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _remove_handlers(self) -> None:
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)
            with suppress(OSError):  # a full disk has no room for the last lines
                handler.close()
        self._handlers = []

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line to ``metrics.jsonl``; a value that is not finite is written as null."""
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(to_json({"step": step, **metrics}) + "\n")

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Puts an evaluation into the line of the step that is evaluated, in place of the one there; others stay."""
        records = {record["step"]: record for record in read_json_lines(self.metrics_path)}
        trained = {name: value for name, value in records.get(step, {}).items() if not name.startswith("eval")}
        records[step] = {**trained, "step": step, **metrics}
        _write(self.metrics_path, [records[number] for number in sorted(records)])

    def log_schedule(self, record: Mapping[str, Any]) -> None:
        """Appends one line to ``schedule.jsonl``."""
        with self.schedule_path.open("a", encoding="utf-8") as file:
            file.write(to_json(record) + "\n")

    def log_timeline(self, record: Mapping[str, Any]) -> None:
        """Appends one line to ``timeline.jsonl``."""
        with self.timeline_path.open("a", encoding="utf-8") as file:
            file.write(to_json(record) + "\n")

    def truncate_metrics(self, step: int) -> None:
        """Drops the lines after ``step``, also of the timeline: those of the steps that a resumed run takes again."""
        _truncate(self.metrics_path, step)
        if self.timeline_path.exists():
            _truncate(self.timeline_path, step)

    def truncate_samples(self, step: int) -> None:
        """Deletes the training groups, and tokens, of the steps after ``step``."""
        for start in (TRAINED, TOKENS):
            for path in self.trajectories.glob(f"{start}*.jsonl"):
                if int(path.stem.removeprefix(start)) > step:
                    path.unlink()

    def truncate_schedule(self, step: int) -> None:
        """Drops the lines of ``schedule.jsonl`` after ``step``."""
        if self.schedule_path.exists():
            _truncate(self.schedule_path, step)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replaces ``summary.json`` in one step."""
        write_atomic(self.summary_path, to_json(summary, indent=2) + "\n")


def _truncate(path: Path, step: int) -> None:
    _write(path, [record for record in read_json_lines(path) if record["step"] <= step])


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    write_atomic(path, "".join(to_json(record) + "\n" for record in records))


def is_claimed(folder: Path, host: str | None) -> bool | None:
    """Tells whether a process of ``host`` has the folder of a run; ``None``: that is another machine, or not known."""
    if host != platform.node():
        return None
    try:
        with (folder / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    return False


def _locked(folder: Path) -> IO[bytes]:
    """An open file that locks ``folder`` for as long as it is open; the system lets go of it when the process ends."""
    file = (folder / ".lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise ValueError(
            f"{folder} is in use by another run; wait for it, or give this one another exp_name"
        ) from error
    return file


# --- files that are complete or absent, and strict JSON


def write_atomic(path: Path, text: str, *, synced: bool = True) -> None:
    """Replaces ``path`` with ``text`` in one step: at any moment there is the old file or the new one.

    A lone surrogate is written as ``\\udc80``, which a JSON reader turns back into it.

    Args:
        synced: it is on disk when this returns, also if the machine then fails.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file, none if there is no file; a line that a kill cut off is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().split(b"\n"):  # bytes: the cut may be within a character
        if not line:
            continue
        try:
            records.append(json.loads(line.decode()))
        except ValueError:
            logger.warning("%s: leaving out a line that was cut off: %.60r", path, line)
    return records


_AS_THEY_ARE = frozenset({str, int, bool, type(None)})


def to_plain(value: Any) -> Any:
    """``value`` made of dicts, lists, strings, numbers, booleans and None only; NaN and infinities become None.

    JSON has no word for a number that is not finite, and most parsers stop at Python's ``NaN``.

    Raises:
        TypeError: something else is inside, such as a tensor.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is dict:
        return {str(key): item if type(item) in _AS_THEY_ARE else to_plain(item) for key, item in value.items()}
    if isinstance(value, enum.Enum):
        return to_plain(value.value)
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.generic | np.ndarray):
        return to_plain(value.tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: {value!r:.80}")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON text of ``to_plain(value)``."""
    return json.dumps(to_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)
