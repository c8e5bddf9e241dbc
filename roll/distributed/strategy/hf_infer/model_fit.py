"""Which models ``hf_infer`` can run, from their configuration alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from roll.configs.problems import ConfigProblem

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from roll.configs.rl import RLConfig
    from roll.configs.worker import WorkerConfig


WINDOWED = "sliding_attention"
STATES = {"linear_attention", "conv", "hybrid"}
"""Layers with a state; those of the last kind have keys and values, too."""
TAKEN = STATES | {"full_attention", WINDOWED, "mlp", "moe"}
"""The keys of ``slot_cache.LAYERS``."""


def check_model(role: str, worker: WorkerConfig, sizes: PreTrainedConfig, config: RLConfig) -> Iterator[ConfigProblem]:
    """Layers of another kind than the engine has, keys relative to the role."""
    if kinds := foreign_layers(sizes):
        name = worker.strategy_args.strategy_name
        expected = f"{'vllm or sglang' if role == 'actor_infer' else 'fsdp2_infer'} for layers of kind {kinds}"
        key, hint = "strategy_args.strategy_name", "hf_infer has full and windowed attention, and recurrent states"
        yield ConfigProblem(key, name, expected, hint, involves=("pretrain",))


def foreign_layers(config: PreTrainedConfig) -> str:
    """The kinds of layers that the engine does not have; empty if it has them all."""
    return ", ".join(sorted(set(layer_kinds(config)) - TAKEN))


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """Of all layers, by Transformers' names."""
    default = "full_attention" if getattr(config, "sliding_window", None) is None else WINDOWED
    return list(getattr(config, "layer_types", None) or [default] * config.num_hidden_layers)
