"""Which models ``hf_infer`` can run, from their configuration alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from roll.configs.problems import ConfigProblem

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from roll.configs.rl import RLConfig
    from roll.configs.worker import WorkerConfig


def check_model(role: str, worker: WorkerConfig, sizes: PreTrainedConfig, config: RLConfig) -> Iterator[ConfigProblem]:
    """Layers of another attention than the engine has, keys relative to the role."""
    if kinds := foreign_attention(sizes, config.sequence_length):
        name, involved = worker.strategy_args.strategy_name, ("sequence_length", "pretrain")
        expected = f"{'vllm or sglang' if role == 'actor_infer' else 'fsdp2_infer'} for layers of {kinds}"
        key, hint = "strategy_args.strategy_name", "hf_infer has full attention"
        yield ConfigProblem(key, name, expected, hint, involves=involved)


def foreign_attention(config: PreTrainedConfig, sequence_length: int) -> str | None:
    """The kinds of attention layers that the engine does not have; ``None`` if it has them all.

    A window that the context never fills hides nothing.
    """
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    kinds = set(getattr(config, "layer_types", None) or [default]) - {"full_attention"}
    if window is not None and window >= sequence_length:
        kinds.discard("sliding_attention")
    return f"{', '.join(sorted(kinds))} (window {window})" if kinds else None
