"""What a process does first: it imports less of Transformers, keeps freed memory, and spares what is there."""

import resource
import subprocess
import sys
from importlib import metadata

import pytest

from roll.models.tiny import make_tiny_model
from roll.utils.start import Distributions


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


QUICK = """
import sys, time
from pathlib import Path
from roll.utils.start import quick_start
quick_start()
quick_start()
from roll.models.loading import load_config
config = load_config(sys.argv[1])
assert not {"transformers.models.auto.modeling_auto", "torch._dynamo"} & set(sys.modules)
from transformers.utils import import_utils
assert import_utils.create_import_structure_from_path.cache_info().hits > 100, "the models' sources were read twice"
assert type(config).__name__ == "Qwen2Config" and not type(config).__doc__.startswith("This is the configuration class")
"""


def test_a_configuration_is_read_without_the_code_of_models(tmp_path):
    make_tiny_model(tmp_path / "model", seed=0)
    done = run(QUICK, str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr


def test_packages_are_found_in_the_same_distributions():
    found, expected = Distributions(), metadata.packages_distributions()
    assert dict(found) | {} and list(found) == list(expected) and len(found) == len(expected)
    for package in ("torch", "PIL", "yaml", "accelerate"):
        assert set(found[package]) <= set(expected[package]) and found[package]
    assert found.get("no_such_package") is None


KEPT = """
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
    ended = run(KEPT)
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
    ended = run(SPARED)
    assert ended.returncode == 0, ended.stderr
    first, *_ = said = ended.stdout.splitlines()
    assert first == "spared", "what a process has frozen before it forked is not looked through, nor copied"
    assert said.index("freed: old model") < said.index("end") < said.index("freed: model")
