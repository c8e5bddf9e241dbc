"""The generators under test, each started once for all tests of a file.

``ROLL_GENERATORS=hf_infer,vllm`` says which; without it, those whose package is installed. A generator that is named
but not installed fails instead of being skipped. Without it, vLLM starts for ``engine`` alone; other starts are slow.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.contract import LORA, save_model, started

PACKAGES = {"hf_infer": "transformers", "vllm": "vllm", "sglang": "sglang"}
ModelPath = Callable[[str, int], str]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture in {"engine", "lora_engine", "generator"}.intersection(metafunc.fixturenames):
        engines = [_parameter(name, slow=name == "vllm" and fixture != "engine") for name in PACKAGES]
        metafunc.parametrize(fixture, engines, indirect=fixture != "generator", scope="module")


def _parameter(name: str, *, slow: bool) -> Any:
    wanted = os.environ.get("ROLL_GENERATORS")
    if wanted is not None:
        reason = "" if name in wanted.split(",") else f"ROLL_GENERATORS={wanted} leaves it out"
    else:
        reason = "" if importlib.util.find_spec(PACKAGES[name]) else f"the package {PACKAGES[name]} is not installed"
        if slow:
            return pytest.param(name, marks=[pytest.mark.slow, pytest.mark.skipif(bool(reason), reason=reason)])
    return pytest.param(name, marks=[pytest.mark.skip(reason=f"{name}: {reason}")] if reason else [])


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> ModelPath:
    """Folder of a random model by (family, seed), made once."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda family, seed: save_model(root / f"{family}-{seed}", family, seed))


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, model_path: ModelPath) -> Iterator[Any]:
    """A generator with the model (tied, 0); a test that changes its weights puts them back."""
    with started(request.param, model_path("tied", 0)) as engine:
        yield engine


@pytest.fixture(scope="module")
def lora_engine(request: pytest.FixtureRequest, model_path: ModelPath) -> Iterator[Any]:
    """A generator with the model (untied, 0) and room for the adapter ``LORA``."""
    with started(request.param, model_path("untied", 0), lora=LORA) as engine:
        yield engine
