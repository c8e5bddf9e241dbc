"""Which models FSDP2 can split over devices, from their configuration alone. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from roll.configs.engines.fsdp2 import Fsdp2Config
from roll.configs.problems import ConfigProblem

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from roll.configs.rl import RLConfig
    from roll.configs.worker import WorkerConfig

SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
"""Sizes of a model that its tensor-parallel size must divide."""


def check_model(role: str, worker: WorkerConfig, sizes: PreTrainedConfig, config: RLConfig) -> Iterator[ConfigProblem]:
    """A tensor-parallel size that does not divide the model, keys relative to the role."""
    options = worker.strategy_args.typed()
    assert isinstance(options, Fsdp2Config)
    tensor, key = options.tensor_parallel_size, "strategy_args.strategy_config.tensor_parallel_size"
    common = math.gcd(*(size for name in SPLIT if isinstance(size := getattr(sizes, name, None), int)))
    if tensor == 1:
        return
    if not getattr(sizes, "base_model_tp_plan", None):
        yield ConfigProblem(key, tensor, f"1: {type(sizes).__name__} has no tensor-parallel plan")
    elif common % tensor and sizes.num_attention_heads % worker.devices_per_copy == 0:
        near = min((n for n in range(1, common + 1) if common % n == 0), key=lambda n: abs(n - tensor))
        expected = f"a divisor of {common}: of the attention and key-value heads and the units of an MLP"
        yield ConfigProblem(key, tensor, expected, f"the nearest is {near}")
