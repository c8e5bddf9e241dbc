"""Plays episodes again in another process, as a worker would: from the class path and the configuration alone."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from roll.extras.env_check.plays import Episode, Subject, replay

_ASKED, _ANSWERED = "asked.pickle", "answered.pickle"
_START_S = 60.0
_LAST_WORDS = 300


class ElsewhereError(RuntimeError):
    """The other process did not play them."""


async def replay_elsewhere(subject: Subject, episodes: Sequence[Episode], patience: float) -> list[Episode]:
    """The episodes as another process plays them, one whose ``hash`` of texts is another.

    Args:
        patience: seconds for the playing, beside the start of Python.

    Raises:
        ElsewhereError: the process failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="roll-env-check-") as name:
        folder = Path(name)
        (folder / _ASKED).write_bytes(pickle.dumps((subject, list(episodes))))
        other_hash = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        try:
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-m", __name__, name],
                env={**os.environ, "PYTHONHASHSEED": other_hash, "PYTHONPATH": path},
                capture_output=True,
                timeout=_START_S + patience,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ElsewhereError(f"it took longer than {error.timeout:.0f} s") from error
        if done.returncode or not (folder / _ANSWERED).exists():
            said = done.stderr.decode(errors="replace").strip()[-_LAST_WORDS:]
            raise ElsewhereError(f"it ended with code {done.returncode}: {said}")
        answered: list[Episode] = pickle.loads((folder / _ANSWERED).read_bytes())  # written by this very module
        return answered


def _main(folder: Path) -> None:
    subject, episodes = pickle.loads((folder / _ASKED).read_bytes())
    (folder / _ANSWERED).write_bytes(pickle.dumps(asyncio.run(replay(subject, episodes))))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
