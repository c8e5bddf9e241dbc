"""The generators under test, each started once for all tests of a file.

``ROLL_GENERATORS=hf_infer,vllm`` says which; without it, those whose package is installed. A generator that is named
but not installed fails instead of being skipped.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from roll.distributed.strategy import STRATEGIES
from tests.support.contract import LORA, OPTIONS, context_of, save_model

PACKAGES = {"hf_infer": "transformers", "vllm": "vllm", "sglang": "sglang"}
ModelPath = Callable[[str, int], str]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture in ("engine", "lora_engine"):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, [_parameter(name) for name in PACKAGES], indirect=True, scope="module")
    if "generator" in metafunc.fixturenames:
        metafunc.parametrize("generator", [_parameter(name) for name in PACKAGES], scope="module")


def _parameter(name: str) -> Any:
    wanted = os.environ.get("ROLL_GENERATORS")
    if wanted is not None:
        reason = "" if name in wanted.split(",") else f"ROLL_GENERATORS={wanted} leaves it out"
    else:
        reason = "" if importlib.util.find_spec(PACKAGES[name]) else f"the package {PACKAGES[name]} is not installed"
    return pytest.param(name, marks=[pytest.mark.skip(reason=f"{name}: {reason}")] if reason else [])


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> ModelPath:
    """Folder of a random model by (family, seed), made once."""
    root = tmp_path_factory.mktemp("models")

    def path(family: str, seed: int) -> str:
        folder: Path = root / f"{family}-{seed}"
        if not folder.exists():
            save_model(folder, family, seed)
        return str(folder)

    return path


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, model_path: ModelPath) -> Iterator[Any]:
    """A generator with the model (tied, 0); a test that changes its weights puts them back."""
    yield from _started(context_of(request.param, model_path("tied", 0), OPTIONS.get(request.param)))


@pytest.fixture(scope="module")
def lora_engine(request: pytest.FixtureRequest, model_path: ModelPath) -> Iterator[Any]:
    """A generator with the model (untied, 0) and room for the adapter ``LORA``."""
    yield from _started(context_of(request.param, model_path("untied", 0), OPTIONS.get(request.param), lora=LORA))


def _started(context: Any) -> Iterator[Any]:
    strategy = STRATEGIES.get(context.worker.strategy_args.strategy_name)(context)
    strategy.setup()
    yield strategy
    strategy.shutdown()
