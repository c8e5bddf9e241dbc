"""Work that a process has done is seen from outside, its children's too."""

import os
import subprocess
import sys

from roll.utils.progress import advance, descendants, work_of

CHILD = """
import os, sys
{work}
print("done", flush=True)
sys.stdin.read()
"""
COUNTS = "from roll.utils.progress import advance\nfor _ in range(3): advance()"
WRITES = "with open(os.devnull, 'wb', buffering=0) as file: file.write(bytes(2**25 + 2**24))"


def test_what_a_child_counts_reads_and_writes_is_work():
    alone = work_of([os.getpid()], with_children=False)[0]
    advance()
    assert work_of([os.getpid()], with_children=False)[0] > alone
    for work in (COUNTS, WRITES):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD.format(work=work)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None and child.stdout.readline() == "done\n"
        assert child.pid in descendants(os.getpid()) and 3 <= work_of([child.pid])[0] < 10
        child.communicate()
    assert work_of([child.pid]) == [0], "it is gone"
