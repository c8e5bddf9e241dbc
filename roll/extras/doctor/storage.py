"""Room and speed of the disk that a run writes to."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from roll.extras.doctor.findings import Finding, judged

GIB = 2**30
PROBE_BYTES, PROBE_SECONDS = 32 * 2**20, 1.0
"""Most that is written to find the speed, and how long at most."""
LEAST_ROOM, GOOD_ROOM = GIB, 20 * GIB
SLOW = 50e6
"""Bytes per second below which checkpoints take longer than steps."""


def check_disk(folder: Path) -> Iterator[Finding]:
    """Writes a file of at most 32 MiB beside where the output will be, and removes it.

    Args:
        folder: ``output_dir``; where it is not there yet, its nearest parent is tried.
    """
    place = folder.expanduser().absolute()
    while not place.is_dir():
        place = place.parent
    room = shutil.disk_usage(place).free
    seen = f"{room / GIB:.1f} GiB free in {place} (expected {GOOD_ROOM // GIB} GiB)"
    fix = "output_dir or checkpoint_config.output_dir on a larger disk; max_ckpt_to_keep=2"
    yield judged("disk room", seen, error=room < LEAST_ROOM, warning=room < GOOD_ROOM, fix=fix)
    try:
        speed = write_speed(place)
    except OSError as error:
        yield Finding("error", "disk", f"cannot write in {place}: {error.strerror}", "output_dir=<a folder of yours>")
        return
    fix = "checkpoint_config.output_dir on a faster disk, or async_save=true"
    yield judged("disk speed", f"{speed / 1e6:.0f} MB/s written in {place}", warning=speed < SLOW, fix=fix)


def write_speed(folder: Path) -> float:
    """Bytes per second of a file that is written and forced to the disk.

    Raises:
        OSError: it cannot be written.
    """
    data, written = os.urandom(4 * 2**20), 0
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        while written < PROBE_BYTES and (not written or time.perf_counter() - start < PROBE_SECONDS):
            written += file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return written / (time.perf_counter() - start)
