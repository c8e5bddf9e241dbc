"""Memory of this process: what it holds, and what it has freed and will want again."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

KEPT_BYTES = 256 * 2**20
"""Most that stays with the process at the end of its heap."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_IN_HEAP = 32 * 2**20
"""In bytes; what is larger goes back to the system at once. The C library comes to the same by itself, in time."""


def keep_freed_memory() -> bool:
    """Lets glibc keep what is freed, for the next tensors; otherwise all but a few megabytes goes back to the system.

    Every step makes columns and activations as large as those of the step before, and to have their pages mapped and
    cleared anew takes several times as long as writing to them.

    Returns:
        Whether it does; other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(option, value)
        for option, value in ((_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP), (_M_TRIM_THRESHOLD, KEPT_BYTES))
    )


def resident_bytes() -> int | None:
    """Bytes of this process that are in memory; ``None`` where the system does not tell (outside of Linux)."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * mmap.PAGESIZE if pages.exists() else None
