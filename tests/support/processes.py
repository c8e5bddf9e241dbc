"""Whether a process is over: it is not there, or a zombie that nobody has waited for."""

import time
from pathlib import Path


def ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def gone(pid: int, seconds: float = 10.0) -> bool:
    """It has ended within that time."""
    end = time.monotonic() + seconds
    while not ended(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return ended(pid)
