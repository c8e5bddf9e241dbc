"""Log-probs of given tokens from a generator: each row is a prompt.

Axes: L tokens of a row, K of its likeliest tokens in each place, T tokens of a batch.
"""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.types import TokenScores
from roll.configs.engines.card import task_of
from roll.data.batch import Batch
from roll.data.columns import IntArray, Item
from roll.distributed.strategy.base import States
from roll.distributed.strategy.evidence import FORMAT, config_settings
from roll.distributed.strategy.generation.generator import Generator, PlanT
from roll.distributed.strategy.generation.model_outline import ModelOutline
from roll.distributed.strategy.generation.prompt_scoring import PromptScoring
from roll.distributed.weights.buckets import dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence


PromptScores: TypeAlias = tuple["Sequence[float]", "Sequence[int]", "Sequence[float]"]
"""Of a prompt's tokens from the second on: their log-probabilities [L - 1], and ids and values as
``PromptScoring.told`` in flat form, [(L - 1) x width] each."""


class ScoringGenerator(Generator[PlanT]):
    """A generator that is a ``ScoreStrategy`` too, for frozen models that are served."""

    _outline: ModelOutline
    """Set by ``start``."""

    @property
    def scoring(self) -> PromptScoring:
        """Settings by which each prompt is scored; known when the engine has started."""
        return PromptScoring.of(self.context, self.vocab_size)

    @abstractmethod
    def score(self, name: str, token_ids: IntArray, items: Sequence[Item]) -> Future[PromptScores]:
        """Scores a prompt with its pictures as ``scoring`` says, at any time; ``name`` is no other request's."""

    def settings(self) -> dict[str, str]:
        options = self.context.worker.strategy_args.strategy_config
        lower = [
            str(options[key]) for key in ("quantization", "kv_cache_dtype") if options.get(key) not in (None, "auto")
        ]
        plain = dtype_name(self._outline.dtype)
        if plain == "float32" and torch.cuda.is_available():
            plain = "tf32"  # attention kernels round to it
        own = {FORMAT: " ".join([plain, *lower])}
        return super().settings() | config_settings(self._outline.text_config) | own

    def logprobs(self, batch: Batch) -> TokenScores:
        """Log-probabilities of the batch's loss tokens, and with ``top_k`` the likeliest tokens in their places.

        Raises:
            ValueError: a row is longer than ``sequence_length``, or has a token that the model has not.
            EngineStoppedError: the engine failed, now or earlier.
        """
        self._check_alive()
        self._check_rows(batch)
        ids_T, items_B = batch.tokens_T.numpy(), batch.items_I or [()] * batch.num_sequences
        wanted = torch.zeros(batch.num_sequences, dtype=torch.bool)
        wanted[batch.rows_T[batch.loss_mask_T]] = True
        pending = {
            row: self.score(f"score-{row}", ids_T[first : first + length], items_B[row])
            for row, (first, length) in enumerate(zip(batch.offsets_B.tolist(), batch.lengths_B.tolist(), strict=True))
            if wanted[row]
        }
        width = self.scoring.width
        logprobs_T = torch.zeros(batch.num_tokens)
        ids_TW = torch.zeros(batch.num_tokens, width, dtype=torch.int32)
        values_TW = torch.zeros(batch.num_tokens, width)
        for row, future in pending.items():
            logprobs, ids, values = future.result()
            start, count = int(batch.offsets_B[row]) + 1, int(batch.lengths_B[row]) - 1
            logprobs_T[start : start + count] = _tensor(logprobs, np.float32)
            ids_TW[start : start + count] = _tensor(ids, np.int32).view(count, width)
            values_TW[start : start + count] = _tensor(values, np.float32).view(count, width)
        kept_T = batch.loss_mask_T
        if logprobs_T[kept_T].isnan().any():
            raise FloatingPointError(f"{self.context.role}: the model's logits are NaN")
        scores = TokenScores(logprobs_T * kept_T)
        if not width:
            return scores
        ids_TW, values_TW = ids_TW * kept_T[:, None], values_TW * kept_T[:, None]
        return TokenScores(
            scores.logprobs_T,
            top_ids_TK=ids_TW[:, :-1].contiguous(),
            top_logprobs_TK=values_TW[:, :-1].contiguous(),
            tail_T=values_TW[:, -1].contiguous(),
        )

    def forward_logprobs(self, batch: Batch) -> Tensor | None:
        return self.logprobs(batch).logprobs_T

    def onload(self, what: States) -> None:
        """As a generator's; where it scores, the cache comes with the weights, as a scorer is asked for these alone."""
        scores = task_of(self.context.role) == "scores"
        super().onload(what | States.CACHE if scores and States.WEIGHTS in what else what)

    def _check_rows(self, batch: Batch) -> None:
        role, tokens_T = self.context.role, batch.tokens_T
        if batch.num_sequences and (longest := int(batch.lengths_B.max())) > self.context.sequence_length:
            raise ValueError(
                f"{role}: a row of {longest} tokens, expected at most sequence_length ({self.context.sequence_length})"
            )
        if batch.num_tokens and int(tokens_T.max()) >= self.vocab_size:
            raise ValueError(f"{role}: token {int(tokens_T.max())}, expected less than {self.vocab_size}, its model's")


def _tensor(values: Sequence[Any], dtype: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=dtype))
