"""A quick start imports less of Transformers, which is the same afterwards."""

import subprocess
import sys
from importlib import metadata

from roll.models.tiny import make_tiny_model
from roll.utils.start import Distributions

PROGRAM = """
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
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "model")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_packages_are_found_in_the_same_distributions():
    found, expected = Distributions(), metadata.packages_distributions()
    assert dict(found) | {} and list(found) == list(expected) and len(found) == len(expected)
    for package in ("torch", "PIL", "yaml", "accelerate"):
        assert set(found[package]) <= set(expected[package]) and found[package]
    assert found.get("no_such_package") is None
