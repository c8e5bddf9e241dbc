"""The garbage collector of a process that spares what is there."""

import subprocess
import sys

PROGRAM = """
import gc
from roll.utils.memory import relax_gc

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        print("freed")

kept = Cycle()
relax_gc()
del kept
gc.collect()
print("spared")
"""


def test_what_was_spared_is_freed_when_the_process_ends():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["spared", "freed"]
