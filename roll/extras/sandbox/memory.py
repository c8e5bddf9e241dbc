"""The memory of a process and its descendants, together."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def uses_more(root: int, allowed: int) -> bool:
    """Tells whether a process and its descendants use more than that many bytes together."""
    pids = _tree(root)
    # The exact figure takes milliseconds; what is resident counts shared pages more than once.
    return sum(map(_resident, pids)) > allowed and sum(map(_proportional, pids)) > allowed


def _tree(root: int) -> list[int]:
    """A process and its descendants; a process of another namespace has its number of this one."""
    found = [root]
    for pid in found:  # grows meanwhile
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def _resident(pid: int) -> int:
    """Bytes of a process that are in memory, those that it shares with others too."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _proportional(pid: int) -> int:
    """Bytes of a process that no file holds; a page that n processes share counts 1/n for each.

    Where only root may see that, a shared page counts for each of them.
    """
    sizes: dict[str, int] = {}
    for name in ("smaps_rollup", "status"):
        with suppress(OSError):
            lines = (line.split() for line in Path(f"/proc/{pid}/{name}").read_text().splitlines())
            sizes = {words[0]: int(words[1]) << 10 for words in lines if len(words) == 3 and words[2] == "kB"}
        if sizes:
            break
    return sum(sizes.get(f"{name}:", 0) for name in ("Pss_Anon", "Pss_Shmem", "RssShmem"))
