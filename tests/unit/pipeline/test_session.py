"""The session of a run: what it does beside the run is done, in order, before it ends."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from roll.configs.pipeline import RunConfig
from roll.pipeline.launch import EXPECTED_ERRORS
from roll.pipeline.session import RunSession
from roll.tracking.files import CheckpointError
from roll.tracking.trackers import TrackerContext


def test_what_is_done_aside_delays_nobody_and_is_there_when_the_session_ends(tmp_path: Path) -> None:
    done: list[int] = []
    gate = threading.Event()

    def fail() -> None:
        raise OSError("no space left on device")

    def write(number: int) -> None:
        assert gate.wait(30)
        done.append(number)

    with RunSession(RunConfig(output_dir=str(tmp_path), exp_name="aside"), time.time()) as session:
        session.aside(lambda: write(1))
        session.aside(fail)
        session.aside(lambda: write(2))
        assert done == []
        gate.set()
    assert done == [1, 2]
    assert "no space left on device" in (session.folder.logs / "roll.log").read_text()
    assert session.summary["status"] == "completed"


def test_an_error_of_the_run_waits_for_what_is_done_aside(tmp_path: Path) -> None:
    done: list[int] = []
    config = RunConfig(output_dir=str(tmp_path), exp_name="aside")
    with pytest.raises(KeyError), RunSession(config, time.time()) as session:
        session.aside(lambda: (time.sleep(0.1), done.append(1)))
        raise KeyError("on purpose")
    assert done == [1]


class Listening:
    """A tracker."""

    finished = 0
    told: ClassVar[list[int]] = []

    def __init__(self, context: TrackerContext) -> None:
        self.told.clear()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.told.append(step)

    def finish(self) -> None:
        Listening.finished += 1


def test_trackers_are_told_of_every_evaluation_and_of_other_steps_now_and_then(tmp_path: Path) -> None:
    listening = {"track_with": f"{__name__}:Listening", "logging_steps": 4, "max_steps": 9}
    with RunSession(RunConfig(output_dir=str(tmp_path), exp_name="told", **listening), time.time()) as session:
        for step in range(10):
            session.log_step(step, {"eval/success": 0.5} if step == 6 else {"actor/loss": 0.5})
    assert Listening.told == [0, 4, 6, 8, 9]


def test_a_run_that_a_full_disk_ends_says_why_and_lets_go_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    handlers, before = list(logging.getLogger().handlers), Listening.finished
    config = RunConfig(output_dir=str(tmp_path), exp_name="full", track_with=f"{__name__}:Listening")
    with pytest.raises(CheckpointError, match="is full"), RunSession(config, time.time()):
        monkeypatch.setattr(os, "fsync", no_room)
        raise CheckpointError("checkpoint-3: the disk is full")
    assert Listening.finished == before + 1 and logging.getLogger().handlers == handlers
    assert capsys.readouterr().out.splitlines()[-1].startswith("Failed. No evaluation")
    monkeypatch.undo()
    with RunSession(config, time.time()):
        pass  # nobody holds the folder


def test_a_run_that_ends_well_but_cannot_say_so_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        pytest.raises(EXPECTED_ERRORS, match="No space left"),
        RunSession(RunConfig(output_dir=str(tmp_path), exp_name="full"), time.time()),
    ):
        monkeypatch.setattr(os, "fsync", no_room)


def test_what_failed_is_kept_whatever_its_words_are_and_the_page_names_the_runs_logs(tmp_path: Path) -> None:
    config = RunConfig(output_dir=str(tmp_path), exp_name="words")
    with pytest.raises(ValueError, match="no rows"), RunSession(config, time.time()) as session:
        raise ValueError("no rows in caf\udce9.jsonl")
    assert "no rows in caf\\udce9.jsonl" in (session.folder.logs / "traceback.txt").read_text()
    assert "no rows" in (session.renders / "index.html").read_text()
    logs = tmp_path / "logs"
    config = RunConfig(output_dir=str(tmp_path), exp_name="page", logging_dir=str(logs), track_with=[])

    with pytest.raises(ValueError, match="on purpose"), RunSession(config, time.time()) as session:
        raise ValueError("on purpose")
    page = (session.renders / "index.html").read_text()
    assert str(logs / "roll.log") in page and str(logs / "traceback.txt") in page
