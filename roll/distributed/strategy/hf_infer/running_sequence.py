"""One completion on its way through the continuous batching."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from roll.data.columns import ExpertArray, IntArray, columns_of, unknown
from roll.data.requests import Completion, FinishReason, GenerateRequest


@dataclass(eq=False)
class RunningSequence:
    """One completion on its way. ``eq=False``: identity is what counts, and it makes the object hashable."""

    request: GenerateRequest
    seed: int
    """Unsigned 64 bits."""
    limit: int
    """Most tokens to sample: ``max_new_tokens``, or what is left of the context."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """The weights that sampled each token."""
    experts: list[ExpertArray] = field(default_factory=list)
    """Those of each token that the model has seen, where they are asked for."""
    num_routed: int = 0
    """Tokens in ``experts``."""

    @property
    def history(self) -> IntArray:
        """Prompt and sampled tokens: what must be in the cache, up to the last token, before the next step."""
        prompt = self.request.prompt_ids
        return np.concatenate([prompt, np.array(self.tokens, dtype=np.int64)]) if self.tokens else prompt

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.tokens)

    @property
    def final_length(self) -> int:
        return len(self.request.prompt_ids) + self.limit

    def waits(self, version: int) -> bool:
        """Its next token was recorded with later weights than ``version``."""
        end = 0
        for recorded, tokens in self.request.recorded:
            end += tokens
            if len(self.tokens) < end:
                return recorded > version
        return False

    def completion(self, reason: FinishReason) -> Completion:
        """The tokens sampled so far, as an answer."""
        return Completion(
            request_id=self.request.request_id,
            token_ids=np.array(self.tokens, dtype=np.int64),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            finish_reason=reason,
            versions=np.array(self.versions, dtype=np.int64),
            experts=self._all_experts(),
        )

    def add_experts(self, experts: ExpertArray) -> None:
        """Takes those of the history's beginning; what was known of it before stays."""
        if len(experts) > self.num_routed:
            self.experts.append(experts[self.num_routed :])
            self.num_routed = len(experts)

    def set_last_experts(self, experts_E: ExpertArray) -> None:
        """Takes those of the last token, known or not: what it is now sampled from."""
        if self.num_routed == self.length:
            self.experts.pop()  # the token that followed was thrown away
        self.experts.append(experts_E[None].copy())
        self.num_routed = self.length

    def _all_experts(self) -> ExpertArray | None:
        if not self.experts:
            return None
        rest = unknown(self.length - self.num_routed, self.experts[0].shape[1:], columns_of(Completion)["experts"])
        return np.concatenate([*self.experts, rest])
