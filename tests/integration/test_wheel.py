"""The package as ``pip install`` leaves it: the ``roll`` command in an environment of its own, outside any checkout."""

import json
import shutil
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from roll import __version__
from roll.models.tiny import make_tiny_model
from tests.integration.conftest import ROOT, done

CONFIG = """\
defaults: [agentic_sokoban, _self_]
custom_envs:
  Guess: {env_type: "custom_environment:GuessNumber", max_steps: 4}
train_env_manager: {env_groups: 2, group_size: 4, tags: [Guess]}
val_env_manager: {env_groups: 4, group_size: 1, tags: [Guess]}
rollout_batch_size: 8
val_batch_size: 4
max_steps: 1
num_renders: 0
adv_estimator: grpo
lambd: 0.95
value_loss_coef: 1.0
turn_level_gae: false
whiten_advantages: false
actor_train:
  training_args: {per_device_train_batch_size: 8, gradient_accumulation_steps: 1}
"""


@pytest.fixture(scope="module")
def roll(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a virtual environment with the wheel in it; other packages are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves files beside the code
    source.mkdir()
    for name in ("roll", "examples"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, source)
    (wheel,) = folder.glob("*.whl")

    home = folder / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    base = {"base": str(home), "platbase": str(home)}
    packages = Path(sysconfig.get_path("purelib", vars=base))
    # Behind the environment's own; what is installed here as a link to a checkout is not followed.
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("--python", home / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    return home / "bin" / "roll"


def pip(*arguments: object) -> None:
    done(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)


def run(roll: Path, folder: Path, *words: str) -> str:
    """Runs the command in a folder that has nothing to do with the checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        return done(roll, *words, cwd=folder, timeout=800)[0]


def test_it_lists_and_checks_its_own_configurations(roll, tmp_path):
    assert run(roll, tmp_path, "--version") == f"roll {__version__}\n"
    listed = run(roll, tmp_path, "config", "list")
    assert str(roll.parents[1]) in listed and str(ROOT) not in listed
    engines = ("train=megatron", "infer=vllm")
    assert "agentic_sokoban: valid" in run(roll, tmp_path, "validate", "agentic_sokoban", *engines)
    options = "actor_infer.strategy_args.strategy_config={python_executable: /on/the/cluster, page_size: 16}"
    said = run(roll, tmp_path, "validate", "rlvr_math", "infer=sglang", options)
    assert "rlvr_math: valid" in said and "page_size: compared with SGLang" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # test_examples.py trains such a configuration from the checkout
def test_it_trains_a_configuration_of_the_users_with_an_environment_beside_it(roll, tmp_path):
    make_tiny_model(tmp_path / "model", seed=0)
    shutil.copy(ROOT / "examples" / "custom_environment.py", tmp_path)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    run(roll, tmp_path, "train", "./mine.yaml", "pretrain=model")
    summary = json.loads((tmp_path / "output" / "agentic_sokoban" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agentic_sokoban", "rlvr_math"])
def test_it_trains_the_demonstrations(roll, tmp_path, name):
    run(roll, tmp_path, "train", name, "max_steps=5")
    summary = json.loads((tmp_path / "output" / name / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 5)
