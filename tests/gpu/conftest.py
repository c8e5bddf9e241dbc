"""Generators on GPUs: which are installed, and the share of the device that each takes."""

import importlib.util
from typing import Any

import pytest

from tests.support.contract import OPTIONS as EVERYWHERE

PACKAGES = {"hf_infer": "transformers", "vllm": "vllm", "sglang": "sglang"}
OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {"gpu_memory_utilization": 0.3},
    "sglang": {"mem_fraction_static": 0.3, **EVERYWHERE.get("sglang", {})},
}


def require(name: str) -> None:
    if importlib.util.find_spec(PACKAGES[name]) is None and name not in EVERYWHERE:
        pytest.skip(f"{name}: the package {PACKAGES[name]} is not installed")
