"""Freed memory stays with the process, and its collector spares what is there."""

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from roll.utils.memory import keep_freed_memory
if not keep_freed_memory():
    sys.exit(3)
def work():
    columns = [torch.ones(2**20) for _ in range(16)]  # 64 MiB
work(), work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_what_was_freed_is_used_again():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    if ended.returncode == 3:
        pytest.skip("another C library")
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 0.1 * 64 * 2**20 / resource.getpagesize(), "the third time, pages were mapped anew"


SPARED = """
import gc
from roll.utils.memory import relax_gc

class Cycle:
    def __init__(self, name):
        self.me, self.name = self, name
    def __del__(self):
        print("freed:", self.name)

frozen = Cycle("frozen by others")
gc.freeze()
del frozen
model = Cycle("old model")
relax_gc()
del model
gc.collect()
print("spared")
model = Cycle("model")
relax_gc()
del model
gc.collect()
print("end")
"""


def test_what_was_spared_is_freed_when_a_worker_starts_over_or_its_process_ends():
    done = subprocess.run([sys.executable, "-c", SPARED], capture_output=True, text=True, check=True)
    first, *_ = said = done.stdout.splitlines()
    assert first == "spared", "what a process has frozen before it forked is not looked through, nor copied"
    assert said.index("freed: old model") < said.index("end") < said.index("freed: model")
