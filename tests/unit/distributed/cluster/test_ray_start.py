"""A local Ray cluster that does not come up in time."""

from pathlib import Path

import pytest
import ray

from roll.distributed.cluster import ray_session
from roll.distributed.cluster.errors import RaySessionError
from roll.distributed.cluster.ray_session import started_too_slowly

SLOW = [
    Exception(
        "The current node timed out during startup. This could happen because some of the raylet failed to startup"
    ),
    RuntimeError("Timed out waiting for file /tmp/roll-x/session_y/gcs_server_port_z"),
    RuntimeError("Failed to start GCS.  Last 0 lines of error files:"),
    ray.exceptions.RaySystemError("Failed to connect to GCS. Please check if the GCS server is running"),
]


@pytest.mark.parametrize("error", SLOW, ids=lambda error: str(error)[:24])
def test_a_start_that_is_too_slow_is_tried_once_more_and_then_ends_with_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_more_time_does_not_mend_is_not_tried_again() -> None:
    assert not started_too_slowly(ValueError("object_store_memory must be at least 78643200"))
