"""`hf_infer`: generation and log-probs with plain Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from roll.configs.engines.card import EngineCard, EngineOptions, Strategy

if TYPE_CHECKING:
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
    fit = "roll.distributed.strategy.hf_infer.model_fit:check_model"

    def no_pictures(self, worker: WorkerConfig) -> str:
        return ""


CARD = HfInferCard()
