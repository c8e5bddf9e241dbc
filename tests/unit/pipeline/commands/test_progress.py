"""Progress of a command off a terminal: a line from time to time, also where nothing is finished yet."""

import time

from roll.pipeline.commands import progress as progress_module
from roll.pipeline.commands.progress import progress


def test_lines_come_while_nothing_is_finished_and_end_with_the_work(capsys, monkeypatch):
    monkeypatch.setattr(progress_module, "QUIET_SECONDS", 0.02)
    with progress("rows answered", 1000, 3) as advance:
        time.sleep(0.3)
        advance("12 tokens/s")
        time.sleep(0.3)
    time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("rows answered: 3 of 1,000 after ")
    assert lines[-1].startswith("rows answered: 4 of 1,000 after ") and lines[-1].endswith(", 12 tokens/s")
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
