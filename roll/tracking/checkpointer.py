"""Checkpoints that are complete or absent, and the saved model that a path means.

A checkpoint is written into a hidden folder, forced to disk, listed in a manifest with the sizes and checksums of what
was written, and only then renamed to ``checkpoint-N``. A kill at any moment leaves the earlier checkpoints as they
were. Nothing is read back when it is saved: a checkpoint is read and compared with its manifest before it is used.
"""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from roll.configs.pipeline import SMOLLM2
from roll.models.tokenizer import locate_model
from roll.tracking.run import to_plain
from roll.utils.children import ending
from roll.utils.hashing import WrittenFile, checksum_of
from roll.utils.progress import advance
from roll.utils.threads import in_background

logger = logging.getLogger(__name__)


MANIFEST_FILE = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or the requested one cannot be used."""


FOLDER_VARIABLE, STEP_VARIABLE = "ROLL_CHECKPOINT", "ROLL_STEP"
KEY = "checkpoint_config.post_save_hook"
_LOOK_S = 10.0
"""Between two looks at whether the command has ended."""
_TOLD_BYTES = 2000


class PostSaveHook:
    """Runs a program, without a shell, after a checkpoint is complete.

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
                self.exit_code = self._end_of(process)
                problem = f"ended with {ending(self.exit_code)}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                self.exit_code = process.wait()
                problem = f"took longer than {self._timeout:g} s and was killed"
            if self.exit_code == 0:
                return None
            said.seek(max(0, said.seek(0, os.SEEK_END) - _TOLD_BYTES))
            return f"{problem}: {said.read().decode(errors='replace').strip()}".rstrip(": ")

    def _end_of(self, process: subprocess.Popen[bytes]) -> int:
        """Its exit code, waited for; until then the run is at work, whatever the command does."""
        end = time.monotonic() + self._timeout
        while (left := end - time.monotonic()) > _LOOK_S:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_LOOK_S)
            advance()
        return process.wait(max(0.0, left))


STATE_FILE = "pipeline_state.json"

_FINAL = re.compile(r"checkpoint-(\d+)(?:\.replaced)?")
_TEMPORARY = re.compile(r"\.tmp-checkpoint-[^-]+-(\d+)")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DISK_FULL_TEXT = re.compile(r"no space left on device|storagefull|disk quota exceeded|file too large", re.IGNORECASE)

Write: TypeAlias = Callable[[Path], Callable[[], Iterable[WrittenFile]] | None]
"""Puts files into a folder, and returns what waits for those that are still being written and tells their checksums."""


class Checkpointer:
    """Saves into, prunes and finds the checkpoints of one folder (a run's ``checkpoints/``).

    "Newest" means saved last, not highest step: a run that was resumed from an earlier step writes lower numbers than
    those its predecessor left behind.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_to_keep: int = 0,
        *,
        background: bool = False,
        hook: PostSaveHook | None = None,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            folder: made when the first checkpoint is saved.
            max_to_keep: 0 keeps everything; the newest checkpoint is never removed.
            background: ``save`` returns before all is written; ``wait`` and ``check`` tell how it ended.
            hook: run with each checkpoint's folder, before older ones are removed.
        """
        self.folder = Path(folder).expanduser()
        self.max_to_keep = max_to_keep
        self.saved: Path | None = None
        """Checkpoint that this object has saved last, whole and in place."""
        self._background = background
        self.hook = hook or PostSaveHook(())
        self._running: Future[None] | None = None

    def save(self, step: int, write: Write, state: Mapping[str, Any]) -> Path:
        """Writes ``checkpoint-<step>`` and prunes old ones. Waits first for a save that still runs.

        Args:
            write: may let other processes on the same filesystem write. Whatever it changes afterwards is not saved.
                Checksums of files that it does not name are read.
            state: the pipeline's own state, JSON values only.

        Returns:
            Where it is; in the background, where it will be.

        Raises:
            CheckpointError: the disk is full or fails, or a file is not as it was written. Earlier checkpoints stay.
                Or the hook failed and is required; the checkpoint is complete.
        """
        self.wait()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        temporary = self.folder / f".tmp-checkpoint-{step}-{os.getpid()}"
        started = time.monotonic()
        with self._cleaning_up(temporary, step):
            temporary.mkdir()
            finish = write(temporary)
            (temporary / STATE_FILE).write_text(json.dumps(dict(state)), encoding="utf-8")

        def complete() -> None:
            with self._cleaning_up(temporary, step):
                files = [] if finish is None else [file.relative_to(temporary) for file in finish() or ()]
                write_manifest(temporary, step, self._next_timestamp(), files)
                final = self._publish(temporary, step)
            logger.info("saved %s in %.1f s", final, time.monotonic() - started)
            self.saved = final
            problem = self.hook.run(final, step)
            if problem is not None and self.hook.required:
                raise CheckpointError(f"{problem}; the checkpoint is complete")
            self._prune(keep=final)

        if self._background:
            self._running = in_background(complete, name="checkpoint")
        else:
            complete()
        return self.folder / f"checkpoint-{step}"

    def wait(self) -> None:
        """Waits for a save in the background.

        Raises:
            CheckpointError: it failed; whatever ``save`` would raise.
        """
        if (running := self._running) is not None:
            running.exception()  # a signal may end the waiting: the save then still runs
            self._running = None
            running.result()

    def check(self) -> None:
        """Raises what ``wait`` would if a save in the background has failed already; does not wait."""
        if self._running is not None and self._running.done():
            self.wait()

    @contextmanager
    def _cleaning_up(self, temporary: Path, step: int) -> Iterator[None]:
        """Removes what is half written when something fails inside, and says so if the disk refused it."""
        try:
            yield
        except BaseException as error:  # whatever it is, it travels on; the half-written folder does not stay
            numbers = self._disk_numbers(temporary) if _is_disk_full(error) else None
            shutil.rmtree(temporary, ignore_errors=True)
            if numbers is not None:
                raise CheckpointError(
                    f"checkpoint-{step}: the disk under {self.folder} is full: {numbers}; earlier checkpoints are kept"
                ) from error
            if isinstance(error, OSError) and not isinstance(error, TimeoutError | ConnectionError):
                raise CheckpointError(f"checkpoint-{step}: {error}; earlier checkpoints are kept") from error
            raise  # a worker's death, a signal, a bug

    def latest(self) -> Path | None:
        """The newest checkpoint whose files match its manifest; a damaged one is named in a warning and passed by."""
        candidates = sorted(self._folders(), key=_save_order, reverse=True)
        for path in candidates:
            if (problem := find_damage(path)) is None:
                return path
            logger.warning("ignoring checkpoint %s: %s", path, problem)
        return None

    def before(self, step: int) -> Path | None:
        """The whole checkpoint with the most finished steps, but fewer than ``step``."""
        earlier = {path: saved["step"] for path, saved in self._saved().items() if saved["step"] < step}
        candidates = sorted(earlier, key=earlier.__getitem__, reverse=True)
        return next((path for path in candidates if find_damage(path) is None), None)

    def resolve(self, resume_from_checkpoint: bool | str) -> Path | None:
        """The checkpoint that the ``resume_from_checkpoint`` key means, or None to start afresh.

        Args:
            resume_from_checkpoint: False; True for the newest of this folder, if any; or the path of a checkpoint, of
                a folder of checkpoints, or of a run.

        Raises:
            CheckpointError: a path was given and there is no whole checkpoint.
        """
        if resume_from_checkpoint is False or resume_from_checkpoint == "":
            return None
        if resume_from_checkpoint is True:
            found = self.latest()
            if found is None:
                logger.info("resume_from_checkpoint: no checkpoint under %s yet, starting afresh", self.folder)
            return found
        path = Path(resume_from_checkpoint).expanduser()
        if not path.is_dir():
            raise CheckpointError(f"resume_from_checkpoint: {path} is not a folder")
        if not (path / MANIFEST_FILE).exists():
            inner = path / "checkpoints" if (path / "checkpoints").is_dir() else path
            if (found := Checkpointer(inner).latest()) is not None:
                return found
        if problem := find_damage(path):
            raise CheckpointError(f"resume_from_checkpoint: {path} cannot be used: {problem}")
        return path

    @staticmethod
    def load_state(path: Path) -> dict[str, Any]:
        """The pipeline's state that ``save`` was given."""
        state: dict[str, Any] = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        return state

    @staticmethod
    def step_of(path: Path) -> int:
        """The number of finished steps when ``path`` was saved."""
        return int(read_manifest(path)["step"])

    def _publish(self, temporary: Path, step: int) -> Path:
        """Renames into place. An older folder of the same step makes room under a name that ``latest`` still finds."""
        final = self.folder / f"checkpoint-{step}"
        replaced = self.folder / f"checkpoint-{step}.replaced"
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        temporary.rename(final)
        sync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def _remove_leftovers(self) -> None:
        """Deletes temporary folders of processes that are gone, and replaced ones whose successor is in place."""
        for path in self.folder.iterdir():
            owner = _TEMPORARY.fullmatch(path.name)
            if owner and not _is_other_live_process(int(owner.group(1))):
                logger.warning("removing %s, left by a save that did not finish", path)
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix == ".replaced" and path.with_suffix("").exists():
                shutil.rmtree(path, ignore_errors=True)

    def _folders(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from (path for path in self.folder.iterdir() if _FINAL.fullmatch(path.name) and path.is_dir())

    def _saved(self) -> dict[Path, dict[str, Any]]:
        """Manifests of the checkpoints, oldest first; a folder without one is not ours to judge or delete."""
        found = {}
        for path in self._folders():
            with suppress(CheckpointError):
                found[path] = read_manifest(path)
        return dict(sorted(found.items(), key=lambda saved: (saved[1]["saved_at"], saved[1]["step"])))

    def _next_timestamp(self) -> float:
        """The time, but later than any saved checkpoint's even if the clock was set back."""
        newest = max((manifest["saved_at"] for manifest in self._saved().values()), default=0.0)
        return max(time.time(), newest + 1e-3)

    def _prune(self, keep: Path) -> None:
        if self.max_to_keep == 0:
            return
        others = [path for path in self._saved() if path != keep]
        for path in others[: max(0, len(others) - (self.max_to_keep - 1))]:
            # Renamed first: a kill during the deletion then leaves a leftover, not a damaged checkpoint.
            doomed = self.folder / f".tmp-{path.name}-{os.getpid()}"
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            logger.info("removed %s (max_ckpt_to_keep=%d)", path, self.max_to_keep)

    def _disk_numbers(self, temporary: Path) -> str:
        """Taken before the temporary folder goes: what was written, what is free, what a checkpoint takes."""
        written = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
        needed = f"more than {_mib(written)} needed"
        if saved := self._saved():
            *_, last = saved.values()
            size = sum(entry["size"] for entry in last["files"].values())
            needed = f"{_mib(size)} needed (the size of the last one)"
        free = shutil.disk_usage(self.folder).free
        return f"{needed}, {_mib(free + written)} free of which {_mib(written)} were filled before it stopped"


def _save_order(path: Path) -> tuple[float, int]:
    """Sort key: by time of saving; a folder whose manifest cannot be read counts as the oldest of its step."""
    match = _FINAL.fullmatch(path.name)
    step = int(match.group(1)) if match else 0
    try:
        return float(read_manifest(path)["saved_at"]), step
    except CheckpointError:
        return path.stat().st_mtime, step


def _is_other_live_process(pid: int) -> bool:
    if pid == os.getpid():
        return False  # a save by this process would not be running now
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def _is_disk_full(error: BaseException | None) -> bool:
    """Tells whether a full disk is behind ``error``.

    The engines' writers are not all Python: safetensors and torch raise their own types with the system's message
    inside, and a remote call wraps the worker's exception.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if getattr(error, "errno", None) in _DISK_FULL or _DISK_FULL_TEXT.search(str(error)):
            return True
        error = getattr(error, "cause", None) or error.__cause__ or error.__context__
    return False


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def rng_state() -> dict[str, Any]:
    """The state of Python's and numpy's global generators, and of torch's where torch is loaded."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": to_plain(np.random.get_state(legacy=False)),
    }
    if (torch := sys.modules.get("torch")) is not None:
        state["torch"] = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode("ascii")
    return state


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Sets what ``rng_state`` saved."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    if "torch" in state:
        import torch

        saved = np.frombuffer(base64.b64decode(state["torch"]), dtype=np.uint8).copy()
        torch.set_rng_state(torch.from_numpy(saved))


CONFIG_FILE = "config.yaml"
POLICY = "actor_train"


@dataclass(frozen=True)
class Saved:
    """The model that a user's path means."""

    model: str
    """Folder in Hugging Face format, or a name on the hub."""
    checkpoint: Path | None = None
    """The checkpoint that the model is in."""
    run: Path | None = None
    """The folder of the run that saved it, where its configuration is."""


def find_saved(path: str, role: str = POLICY) -> Saved:
    """The model that is meant by a path.

    Args:
        path: a run's folder (its newest whole checkpoint), a checkpoint, a model's folder, a name on the hub, or
            ``smollm2``.

    Raises:
        CheckpointError: the folder of a run without a whole checkpoint, or a model that cannot be made.
    """
    if path == SMOLLM2:
        try:
            return Saved(locate_model(path)[0])
        except ValueError as error:
            raise CheckpointError(str(error)) from error
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return Saved(path)
    if (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file():
        checkpoint = _newest(folder)
        return Saved(str(checkpoint / role), checkpoint, folder.resolve())
    if (folder / MANIFEST_FILE).is_file():
        return Saved(str(folder / role), folder.resolve(), _run_of(folder))
    if (folder.parent / MANIFEST_FILE).is_file():
        return Saved(str(folder), folder.parent.resolve(), _run_of(folder.parent))
    return Saved(str(folder))


def _newest(run: Path) -> Path:
    if (found := Checkpointer(run / "checkpoints").latest()) is not None:
        return found
    summary = run / "summary.json"  # they may be kept elsewhere
    named = json.loads(summary.read_text(encoding="utf-8")).get("checkpoint") if summary.is_file() else None
    if named is not None and (Path(named) / MANIFEST_FILE).is_file():
        return Path(named)
    raise CheckpointError(f"{run}: no complete checkpoint in it; expected one in {run / 'checkpoints'}")


def _run_of(checkpoint: Path) -> Path | None:
    run = checkpoint.resolve().parent.parent
    return run if (run / CONFIG_FILE).is_file() else None


# --- the manifest of a folder's checksums


def find_damage(path: Path) -> str | None:
    """Reason why ``path`` is not a whole checkpoint, or None when every file matches the manifest."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return str(error)
    files: dict[str, dict[str, Any]] = manifest["files"]
    sized = []
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != expected["size"]:
            return f"{name} has {size} bytes, expected {expected['size']}"
        sized.append(file)
    with ThreadPoolExecutor(max_workers=4) as pool:
        checksums = list(pool.map(checksum_of, sized))
    for file, checksum in zip(sized, checksums, strict=True):
        name = file.relative_to(path).as_posix()
        if checksum != files[name]["xxh3"]:
            return f"{name} has checksum {checksum}, expected {files[name]['xxh3']}"
        if file.suffix == ".safetensors" and (problem := _safetensors_problem(file)):
            return f"{name} {problem}"
    return None


def write_manifest(folder: Path, step: int, saved_at: float, written: Iterable[WrittenFile]) -> None:
    """Lists every file once all are on disk; the manifest is the last file to appear.

    Args:
        written: files that are on disk already, with their checksums; the others are read.
    """
    known = {file.path: file for file in written}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {}
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if name not in known:
            _sync_file(path)
            known[name] = WrittenFile(name, path.stat().st_size, checksum_of(path))
        entries[name] = {"size": known[name].size, "xxh3": known[name].checksum}
    for name, file in known.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != file.size:
            raise CheckpointError(f"checkpoint-{step}: {name} has {size} bytes, {file.size} were written")
        if name.endswith(".safetensors") and (problem := _safetensors_problem(folder / name)):
            raise CheckpointError(f"checkpoint-{step}: {name} {problem}")
    manifest = {"step": step, "saved_at": saved_at, "files": entries}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _sync_file(folder / MANIFEST_FILE)
    for sub in {path.parent for path in paths} | {folder}:
        sync_folder(sub)


def read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_FILE
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"it has no {MANIFEST_FILE} (half-written, or not a checkpoint of this library)"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"its {MANIFEST_FILE} cannot be read ({error})") from error
    if not isinstance(manifest, dict) or not {"step", "saved_at", "files"} <= manifest.keys():
        raise CheckpointError(f"its {MANIFEST_FILE} lacks step, saved_at or files")
    if any("xxh3" not in entry for entry in manifest["files"].values()):
        raise CheckpointError("it is of an earlier version, whose model folders also held what resumes a run")
    return manifest


def _safetensors_problem(path: Path) -> str | None:
    """A safetensors file announces its own length (8 bytes of header size, a JSON header, the data)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or header_size > size - 8:
            return f"is cut off inside its header ({size} bytes)"
        try:
            header = json.loads(file.read(header_size))
        except ValueError as error:
            return f"has an unreadable header ({error})"
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + header_size + max(ends, default=0)
    return None if size == expected else f"has {size} bytes, its header announces {expected}"


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
