"""What watches a run ends with it."""

import threading
import time

from roll.distributed.cluster import hangs
from roll.distributed.cluster.hangs import StallWatch


def test_a_watch_that_ends_has_given_up_its_questions(monkeypatch, tmp_path):
    """A thread that uses Ray while the run disconnects may end the process before the run has told its error."""
    asked, given_up = threading.Event(), []

    def ask(_processes, _job, _failed, over):
        asked.set()
        given_up.append(over.wait(20))
        time.sleep(0.2)
        given_up.append(True)
        return []

    monkeypatch.setattr(hangs, "_on_nodes", ask)
    with StallWatch({}, tmp_path / "stacks", 2.0, print, lambda: "a step"):
        assert asked.wait(20)
    assert given_up == [True, True]
