"""Around a run: a local Ray cluster that does not come up in time, and what records its workers."""

import gzip
import json
import mmap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from roll.distributed.cluster import ray_session
from roll.distributed.cluster.cluster import Worker
from roll.distributed.cluster.errors import RaySessionError
from roll.distributed.cluster.ray_session import started_too_slowly
from roll.distributed.cluster.recording import Recording, RecordingOptions

SLOW = [
    Exception(
        "The current node timed out during startup. This could happen because some of the raylet failed to startup"
    ),
    RuntimeError("Timed out waiting for file /tmp/roll-x/session_y/gcs_server_port_z"),
    RuntimeError("Failed to start GCS.  Last 0 lines of error files:"),
    ray.exceptions.RaySystemError("Failed to connect to GCS. Please check if the GCS server is running"),
]


@pytest.mark.parametrize("error", SLOW, ids=lambda error: str(error)[:24])
def test_a_start_that_is_too_slow_is_tried_once_more_and_then_ends_with_one_line(error, monkeypatch):
    folders: list[Path] = []

    def too_slow(*, _temp_dir: str, **_: object) -> None:
        folders.append(Path(_temp_dir))
        raise error

    monkeypatch.setattr(ray, "init", too_slow)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(RaySessionError, match=r"no local Ray cluster came up within 180 s, at the second try"):
        ray_session._start_daemons({"log_to_driver": False})
    assert len(folders) == 2
    assert not [folder for folder in folders if folder.exists()]


def test_what_more_time_does_not_mend_is_not_tried_again():
    assert not started_too_slowly(ValueError("object_store_memory must be at least 78643200"))


def events_of(file: Path) -> Any:
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def operators(file: Path) -> dict[str, set[int]]:
    """Threads by the names of what they called."""
    found: dict[str, set[int]] = {}
    for event in events_of(file):
        if event.get("cat") == "cpu_op":
            found.setdefault(event["name"], set()).add(event["tid"])
    return found


def test_a_worker_records_from_one_call_to_another(tmp_path):
    worker = Worker("actor_train", 0, 1, {})
    assert worker.stop_recording(tmp_path / "nothing") == []
    worker.start_recording(RecordingOptions(memory=True, shapes=True))
    torch.randn(8, 8).inverse()
    other = threading.Thread(target=lambda: torch.linalg.svd(torch.ones(5, 5)))
    other.start()
    other.join()
    files = worker.stop_recording(tmp_path / "profile" / "step-00003-actor_train-0")
    assert files[0].name == "step-00003-actor_train-0.trace.json.gz"
    found = operators(files[0])
    assert "aten::linalg_svd" in found and {"aten::linalg_inv_ex", "aten::inverse"} & found.keys()
    assert len(found["aten::linalg_svd"] | found["aten::randn"]) == 2, "two threads"
    torch.randn(3).exp()
    assert len(files) == 1 + torch.cuda.is_available()
    Recording(RecordingOptions()).stop(tmp_path / "again")
    assert "aten::exp" not in operators(tmp_path / "again.trace.json.gz"), "of the time in between"


def test_memory_is_a_counter_beside_the_operators(tmp_path):
    worker = Worker("actor_train", 0, 1, {})
    worker.start_recording(RecordingOptions(memory=True))
    worker.start_recording(RecordingOptions(memory=True))  # what was under way is given up
    time.sleep(0.05)
    assert [thread.name for thread in threading.enumerate()].count("resident-memory") == 1
    torch.ones(3).sqrt()
    large = mmap.mmap(-1, 128 << 20)
    large.write(bytes(128 << 20))
    time.sleep(0.03)
    [file, *_] = worker.stop_recording(tmp_path / "step")
    assert len(large) and "resident-memory" not in [thread.name for thread in threading.enumerate()]
    events = events_of(file)
    counted = [(event["ts"], event["args"]["MiB"]) for event in events if event["name"] == "resident memory"]
    [moment] = [event["ts"] for event in events if event["name"] == "aten::sqrt"]
    before = next(size for _, size in counted)
    after = [size for when, size in counted if when > moment][-1]
    assert 60 < after - before < 400, counted
    worker.start_recording(RecordingOptions())
    [file] = worker.stop_recording(tmp_path / "plain")
    assert b"resident memory" not in gzip.decompress(file.read_bytes())
