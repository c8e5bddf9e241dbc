"""`hf_infer`: generation and log-probs with plain Transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from roll.configs.engines.card import EngineCard, EngineOptions, Strategy
from roll.configs.problems import ConfigProblem

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from roll.configs.rl import RLConfig
    from roll.configs.worker import WorkerConfig


class HfInferConfig(EngineOptions):
    """Options of `hf_infer`: generation and log-probs with plain Transformers."""

    max_prefill_tokens: int = Field(
        default=8192, ge=1, description="Most prompt tokens in one forward pass; longer queues are split."
    )


class HfInferCard(EngineCard):
    """Runs everywhere, with models of Transformers that have attention, windows or recurrent states."""

    name = "hf_infer"
    strategies: ClassVar[Mapping[str, Strategy]] = {
        "hf_infer": Strategy("roll.distributed.strategy.hf_infer.strategy:HfInfer", scores=True, generates=True)
    }
    options = HfInferConfig
    packs_modules = True
    replays = True
    tells_experts = True
    tells_kept_sets = True
    scores_kept_sets = True
    fit = "roll.configs.engines.hf_infer:check_model"

    def no_pictures(self, worker: WorkerConfig) -> str:
        return ""

    def no_videos(self, worker: WorkerConfig) -> str:
        return ""


CARD = HfInferCard()


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
