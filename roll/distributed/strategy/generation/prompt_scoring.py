"""Log-probs of a prompt's tokens: the part that runs in an engine's own processes.

Axes: L places of a prompt, V vocabulary, K top tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from roll.algorithms.quantities import TopTokens, WholeVocabulary, top_tokens

if TYPE_CHECKING:
    from roll.distributed.strategy.base import StrategyContext


SCORING = "ROLL_SGLANG_SCORING"
"""Environment variable of an engine's processes: the fields of a ``PromptScoring`` as JSON."""


@dataclass(frozen=True)
class PromptScoring:
    """How an engine computes a prompt's log-probs; sent to its processes."""

    temperature: float = 1.0
    """Divides the logits."""
    top_k: int = 0
    """Likeliest tokens in each place; 0: none."""
    num_ids: int | None = None
    """Of these tokens, ids from this on do not count. ``None``: all count."""

    @classmethod
    def of(cls, context: StrategyContext, vocab_size: int) -> PromptScoring:
        """Returns the settings that a role's context asks for, of a model with so many tokens."""
        top = next((each for each in context.needs if isinstance(each, TopTokens)), TopTokens(0))
        num_ids = None if top.num_ids is None else min(top.num_ids, vocab_size)
        return cls(context.temperature or 1.0, min(top.count, num_ids or vocab_size), num_ids)

    @property
    def width(self) -> int:
        """Numbers in each place beside the token's own: top tokens and the rest together."""
        return self.top_k + 1 if self.top_k else 0

    def logprobs(self, logits_LV: Tensor) -> Tensor:
        """float32 log-probabilities of all tokens."""
        return (logits_LV.float() / self.temperature).log_softmax(-1)

    def told(self, logprobs_LV: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities [L, width]: the top tokens in descending order, then the rest (of id 0)."""
        if not self.top_k:
            return logprobs_LV.new_empty(len(logprobs_LV), 0, dtype=torch.int32), logprobs_LV[:, :0]
        ids_LK, top_LK, tail_L = top_tokens(logprobs_LV, self.top_k, self.num_ids, WholeVocabulary())
        return torch.nn.functional.pad(ids_LK, (0, 1)), torch.cat([top_LK, tail_L[:, None]], dim=1)
