"""The session of a run: what it does beside the run is done, in order, before it ends."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from roll.configs.pipeline import RunConfig
from roll.pipeline.session import RunSession


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
