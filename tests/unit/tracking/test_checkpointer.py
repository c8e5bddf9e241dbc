"""Checkpoints are whole or absent, whatever happens while they are written."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from xxhash import xxh3_128

from roll.configs.pipeline import RunConfig
from roll.pipeline.session import RunSession
from roll.tracking.checkpointer import (
    MANIFEST_FILE,
    Checkpointer,
    CheckpointError,
    PostSaveHook,
    find_damage,
    restore_rng_state,
    rng_state,
)
from roll.utils.hashing import WrittenFile
from tests.support.processes import gone


def write_weights(text: str = "weights"):
    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "model.bin").write_text(text)

    return write


@pytest.fixture
def checkpointer(tmp_path: Path) -> Checkpointer:
    return Checkpointer(tmp_path)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_checkpoint_is_found_with_its_files_and_state(tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    saved = checkpointer.save(3, write_weights("abc"), {"step": 3, "seeds": [1, 2], "lr": 1e-4})
    assert checkpointer.latest() == saved == tmp_path / "checkpoints" / "checkpoint-3"
    assert (saved / "actor" / "model.bin").read_text() == "abc"
    assert checkpointer.load_state(saved) == {"step": 3, "seeds": [1, 2], "lr": 1e-4}
    assert checkpointer.step_of(saved) == 3
    manifest = json.loads((saved / MANIFEST_FILE).read_text())
    assert set(manifest["files"]) == {"actor/model.bin", "pipeline_state.json"}
    assert names(tmp_path / "checkpoints") == ["checkpoint-3"]


def test_old_checkpoints_are_pruned_but_never_the_newest_nor_folders_without_a_manifest(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    for keep, left in ((0, ["10", "11", "8", "9"]), (2, ["11", "12"])):
        checkpointer = Checkpointer(tmp_path, max_to_keep=keep)
        for step in (8, 9, 10, 11) if keep == 0 else (12,):
            checkpointer.save(step, write_weights(), {})
        assert names(tmp_path) == sorted(f"checkpoint-{step}" for step in ("1", *left))
    # A run resumed from an earlier step goes on with lower numbers: what it saved last is what counts.
    checkpointer.save(4, write_weights(), {})
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-12", "checkpoint-4"]
    assert checkpointer.latest() == tmp_path / "checkpoint-4"


def test_a_hook_that_fails_costs_no_checkpoint_and_no_run_unless_it_is_required(tmp_path, caplog):
    hook = PostSaveHook([sys.executable, "-c", "raise SystemExit('no room')"])
    checkpointer = Checkpointer(tmp_path, max_to_keep=1, hook=hook)
    checkpointer.save(3, write_weights(), {})
    saved = checkpointer.save(4, write_weights(), {})
    assert checkpointer.latest() == checkpointer.saved == saved and names(tmp_path) == ["checkpoint-4"]
    assert "post_save_hook after checkpoint-4 ended with exit code 1: no room" in caplog.text
    assert (hook.runs, hook.failures) == (2, 2)
    required = Checkpointer(tmp_path, hook=PostSaveHook(["false"], required=True), background=True)
    required.save(5, write_weights(), {})
    with pytest.raises(CheckpointError, match="checkpoint-5 ended with exit code 1; the checkpoint is complete"):
        required.wait()
    assert required.latest() == required.saved == tmp_path / "checkpoint-5"


def test_saving_a_step_again_replaces_it_and_a_kill_between_the_renames_loses_nothing(tmp_path, checkpointer):
    saved = checkpointer.save(5, write_weights("old"), {})
    saved.rename(tmp_path / "checkpoint-5.replaced")
    assert checkpointer.latest() == tmp_path / "checkpoint-5.replaced"
    for text in ("new", "newest"):
        checkpointer.save(5, write_weights(text), {})
        assert names(tmp_path) == ["checkpoint-5"]
        assert (tmp_path / "checkpoint-5" / "actor" / "model.bin").read_text() == text


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda c: (c / "actor" / "model.bin").unlink(), "actor/model.bin is missing"),
        (lambda c: (c / "actor" / "model.bin").write_text("weigh"), "has 5 bytes, expected 7"),
        (lambda c: (c / "actor" / "model.bin").write_text("weight5"), "checksum"),
        (lambda c: (c / MANIFEST_FILE).unlink(), "no manifest.json"),
        (lambda c: (c / MANIFEST_FILE).write_text('{"step": 2'), "cannot be read"),
        (lambda c: (c / MANIFEST_FILE).write_text("[]"), "lacks step"),
    ],
)
def test_a_damaged_checkpoint_is_passed_by_with_the_reason(checkpointer, caplog, damage, reason):
    good = checkpointer.save(1, write_weights(), {})
    bad = checkpointer.save(2, write_weights(), {})
    damage(bad)
    assert checkpointer.latest() == good
    assert "checkpoint-2" in caplog.text and reason in caplog.text


def write_truncated(folder: Path) -> None:
    save_file({"w": np.arange(1000, dtype=np.float32)}, folder / "model.safetensors")
    os.truncate(folder / "model.safetensors", 4000)


def write_interrupted(folder: Path) -> None:
    (folder / "part").write_text("x")
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("write", "error", "words"),
    [(write_truncated, CheckpointError, "its header announces"), (write_interrupted, KeyboardInterrupt, None)],
)
def test_a_writer_that_fails_or_leaves_half_a_file_leaves_nothing_behind(tmp_path, checkpointer, write, error, words):
    checkpointer.save(1, lambda folder: save_file({"w": np.zeros(9)}, folder / "model.safetensors"), {})
    with pytest.raises(error, match=words):
        checkpointer.save(2, write, {})
    assert names(tmp_path) == ["checkpoint-1"]


def test_resolve_understands_false_true_and_paths(tmp_path, caplog):
    run = tmp_path / "run"
    checkpointer = Checkpointer(run / "checkpoints")
    assert checkpointer.resolve(False) is None and checkpointer.resolve(True) is None
    first = checkpointer.save(1, write_weights(), {})
    second = checkpointer.save(2, write_weights(), {})
    given = {True: second, str(first): first, str(run): second, str(run / "checkpoints"): second}
    assert {path: checkpointer.resolve(path) for path in given} == given
    (first / "actor" / "model.bin").write_text("w")
    (second / MANIFEST_FILE).write_text((second / MANIFEST_FILE).read_text().replace("xxh3", "crc32"))
    for path, reason in (
        (tmp_path / "nowhere", "is not a folder"),
        (tmp_path, r"no manifest\.json"),
        (first, "has 1 bytes, expected 7"),
        (second, "cannot be used: it is of an earlier version"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            checkpointer.resolve(str(path))


def fill(folder: Path) -> None:
    (folder / "model.bin").write_bytes(os.urandom(1 << 22))


def test_a_full_disk_is_reported_and_keeps_the_earlier_checkpoint(small_disk):
    checkpointer = Checkpointer(small_disk)
    good = checkpointer.save(1, write_weights("x" * 200_000), {})
    with pytest.raises(CheckpointError, match=r"the disk under .* is full: 0\.2 MiB needed .* MiB free") as caught:
        checkpointer.save(2, fill, {})
    assert isinstance(caught.value.__cause__, OSError)
    assert names(small_disk) == ["checkpoint-1"] and checkpointer.latest() == good
    checkpointer.save(3, write_weights(), {})  # and the disk has room again


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; without the right to mount one, a limit on the size of files."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount") if os.geteuid() == 0 else None
    if mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "none", folder], check=False).returncode == 0:
        yield folder
        subprocess.run(["umount", folder], check=True)
        return
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
    yield folder
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, ignored)


STORAGE_FULL = RuntimeError("Error while serializing: IoError(Os { code: 28, kind: StorageFull })")


@pytest.mark.parametrize("error", [STORAGE_FULL, OSError(errno.EDQUOT, "Disk quota exceeded")])
def test_a_full_disk_is_recognised_behind_an_engines_own_exception(checkpointer, error):
    def write(folder: Path) -> None:
        raise RuntimeError("worker 3 failed") from error

    with pytest.raises(CheckpointError, match="is full"):
        checkpointer.save(1, write, {})


KILLED = """
import sys, time
from pathlib import Path
from roll.tracking.checkpointer import Checkpointer

def write(folder):
    def finish():
        (folder / "half.bin").write_bytes(b"x" * 1000)
        print("writing", flush=True)
        time.sleep(60)
    return finish

checkpointer = Checkpointer(sys.argv[1], background=bool(sys.argv[2]))
checkpointer.save(1, lambda folder: (folder / "whole.bin").write_text("y" * 1000) and None, {"step": 1})
checkpointer.save(2, write, {"step": 2})
time.sleep(60)
"""


@pytest.mark.parametrize("background", [False, True])
def test_a_kill_in_the_middle_of_a_save_leaves_the_earlier_checkpoint_and_the_next_save_cleans_up(tmp_path, background):
    command = [sys.executable, "-c", KILLED, str(tmp_path), "background" if background else ""]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "writing\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    if not background:
        assert names(tmp_path) == [f".tmp-checkpoint-2-{child.pid}", "checkpoint-1"]
    checkpointer = Checkpointer(tmp_path)
    latest = checkpointer.latest()
    assert latest is not None and checkpointer.load_state(latest) == {"step": 1}
    checkpointer.save(2, write_weights(), {})
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


class SlowWrite:
    """A writer in the background, as ``Roles.save`` gives one: ``go`` lets it write, ``error`` makes it fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go, self.error, self.told = threading.Event(), error, b"weights"

    def __call__(self, folder: Path):
        (folder / "half.bin").write_bytes(b"")

        def finish() -> list[WrittenFile]:
            assert self.go.wait(30)
            if self.error is not None:
                raise self.error
            (folder / "half.bin").write_bytes(b"weights")
            return [WrittenFile(str(folder / "half.bin"), len(self.told), xxh3_128(self.told).hexdigest())]

        return finish


def test_a_save_in_the_background_appears_when_it_is_whole_and_one_runs_at_a_time(tmp_path):
    checkpointer = Checkpointer(tmp_path, background=True)
    slow, state = SlowWrite(), {"step": 1}
    path = checkpointer.save(1, slow, state)
    state["step"] = 2  # the run goes on
    checkpointer.check()
    assert checkpointer.saved is None and checkpointer.latest() is None and not path.exists()
    slow.go.set()
    checkpointer.save(2, write_weights(), {})  # waits for the first
    assert path.is_dir() and checkpointer.load_state(path) == {"step": 1}
    checkpointer.wait()
    assert checkpointer.saved == checkpointer.latest() == tmp_path / "checkpoint-2"
    assert find_damage(path) is None


@pytest.mark.parametrize("how", ["check", "wait", "save"])
def test_a_save_that_fails_in_the_background_fails_what_comes_next_as_it_would_itself(tmp_path, how):
    checkpointer = Checkpointer(tmp_path, background=True)
    checkpointer.save(1, write_weights(), {})
    full = SlowWrite(OSError(errno.ENOSPC, "No space left on device"))
    checkpointer.save(2, full, {})
    full.go.set()
    deadline, arguments = time.monotonic() + 30, (3, full, {}) if how == "save" else ()
    with pytest.raises(CheckpointError, match=r"checkpoint-2: the disk under .* is full"):
        while time.monotonic() < deadline:
            getattr(checkpointer, how)(*arguments)
    assert names(tmp_path) == ["checkpoint-1"] and checkpointer.saved == tmp_path / "checkpoint-1"
    checkpointer.wait()  # it is told once


@pytest.mark.parametrize("background", [False, True])
def test_what_the_disk_refuses_is_told_in_a_line(tmp_path, background):
    checkpointer = Checkpointer(tmp_path, background=background)
    failing = SlowWrite(OSError(errno.EIO, "Input/output error"))
    failing.go.set()
    with pytest.raises(CheckpointError, match=r"^checkpoint-1: .*Input/output error; earlier checkpoints are kept$"):
        checkpointer.save(1, failing, {})
        checkpointer.wait()
    assert names(tmp_path) == []


@pytest.mark.parametrize("told", [b"weight5", b"weigh"])
def test_checksums_are_of_what_was_written_and_nothing_is_read_back(tmp_path, checkpointer, told):
    """A disk that keeps other bytes is found when the checkpoint is read, one that keeps fewer at once."""
    write = SlowWrite()
    write.told = told
    write.go.set()
    if len(told) == 7:
        saved = checkpointer.save(1, write, {})
        assert "half.bin has checksum" in (find_damage(saved) or "")
        assert checkpointer.latest() is None
    else:
        with pytest.raises(CheckpointError, match=r"half\.bin has 7 bytes, 5 were written"):
            checkpointer.save(1, write, {})
        assert names(tmp_path) == []


def test_the_temporary_folder_of_a_living_process_is_left_alone(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as other:
        (tmp_path / f".tmp-checkpoint-7-{other.pid}").mkdir()
        Checkpointer(tmp_path).save(1, write_weights(), {})
        assert names(tmp_path) == [f".tmp-checkpoint-7-{other.pid}", "checkpoint-1"]
        other.kill()


def test_random_states_come_back_through_a_checkpoint(tmp_path):
    random.gauss(0, 1), np.random.normal(), torch.rand(1)
    saved = Checkpointer(tmp_path).save(1, write_weights(), {"rng": rng_state()})

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.random(), np.random.normal(), float(torch.rand(1))]

    expected = draw()
    draw()
    restore_rng_state(Checkpointer.load_state(saved)["rng"])
    assert draw() == expected


def test_a_whole_checkpoint_has_no_damage_also_in_the_home_folder_and_after_a_clock_is_set_back(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpointer = Checkpointer("~/saved")
    assert checkpointer.save(1, write_weights(), {}) == tmp_path / "saved" / "checkpoint-1"
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    newest = checkpointer.save(2, write_weights(), {})
    assert newest == checkpointer.latest() and find_damage(newest) is None


TELL = """
import os, pathlib, sys
folder = pathlib.Path(os.environ["ROLL_CHECKPOINT"])
assert sys.argv[1:] == ["$HOME; true", str(folder)], sys.argv
(folder / "told").write_text(os.environ["ROLL_STEP"])
"""


def test_it_finds_the_folder_and_the_step_and_no_shell_reads_its_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint-7").mkdir()
    hook = PostSaveHook([sys.executable, "-c", TELL, "$HOME; true"])
    assert hook.metrics() == {}
    assert hook.run(Path("checkpoint-7"), 7) is None
    assert (tmp_path / "checkpoint-7" / "told").read_text() == "7"
    assert hook.metrics() == {"checkpoint/hook_runs": 1, "checkpoint/hook_failures": 0} and hook.exit_code == 0


def test_how_it_ended_is_told(tmp_path, caplog):
    hook = PostSaveHook([sys.executable, "-c", "import sys; print('x' * 9000, 'the end'); sys.exit(3)"])
    problem = str(hook.run(tmp_path, 1))
    assert "ended with exit code 3: xx" in problem and problem.endswith("the end") and len(problem) < 2200
    assert problem in caplog.text and hook.exit_code == 3
    killed = PostSaveHook([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert "SIGKILL" in str(killed.run(tmp_path, 1)) and killed.exit_code == -9
    absent = PostSaveHook(["/no/such/program"])
    assert "could not be started: [Errno 2]" in str(absent.run(tmp_path, 1))
    assert (absent.exit_code, absent.failures) == (None, 1)


def test_what_takes_too_long_is_killed_with_all_that_it_has_started_and_no_other(tmp_path):
    hook = PostSaveHook(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/child; sleep 60"], timeout=1.0)
    started = time.monotonic()
    assert "took longer than 1 s and was killed" in str(hook.run(tmp_path, 1))
    hook = PostSaveHook(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/left"])
    assert hook.run(tmp_path, 1) is None, "what it leaves running does not hold the save"
    assert time.monotonic() - started < 20
    os.kill(int((tmp_path / "left").read_text()), 9)
    assert gone(int((tmp_path / "child").read_text()))


def test_a_run_counts_its_failures(tmp_path):
    saving = {"post_save_hook": ["sh", "-c", "exit 5"], "post_save_timeout": 30}
    config = RunConfig.model_validate({"output_dir": str(tmp_path), "exp_name": "run", "checkpoint_config": saving})
    with RunSession(config, time.time()) as session:
        session.checkpointer.save(1, lambda path: None, {})
        session.log_step(2, {"loss": 1.0})
    assert session.summary["post_save_hook"] == {"runs": 1, "failures": 1, "last_exit_code": 5}
    (line,) = (session.folder.path / "metrics.jsonl").read_text().splitlines()
    assert '"checkpoint/hook_failures": 1' in line and '"checkpoint/hook_runs": 1' in line
    assert "ended with exit code 5" in (session.folder.logs / "roll.log").read_text()
