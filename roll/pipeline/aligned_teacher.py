"""A teacher with another tokenizer than the policy, which scores the same text in tokens of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from roll.algorithms.alignment import shared_logprobs
from roll.algorithms.types import TokenScores
from roll.data.batch import Batch
from roll.distributed.strategy.base import StrategyContext
from roll.models.aligned_text import Retokenizer
from roll.models.loading import load_config
from roll.models.tokenizer import load_tokenizer
from roll.pipeline.model_cluster import ModelCluster

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MORE_TOKENS = 2
"""Times the policy's longest row that a teacher may need for the same text, where its model has positions for it."""


class AlignedTeacher:
    """Scores of a policy's batch from a teacher that reads other tokens."""

    def __init__(self, teacher: ModelCluster, retokenizer: Retokenizer) -> None:
        self._teacher = teacher
        self._retokenizer = retokenizer

    def submit_logprobs(self, batch: Batch, rows: Tensor | None = None) -> Callable[[], TokenScores]:
        """The teacher's log-probability of each chunk of text, in equal parts for the policy's tokens in it."""
        theirs, chunk_S, chunk_T = self._retokenizer.batch(batch)
        wait = self._teacher.submit_logprobs(theirs, rows)

        def shared() -> TokenScores:
            scores = wait()
            assert scores.logprobs_T is not None, "a language model's"
            logprobs_T = shared_logprobs(scores.logprobs_T, (theirs.rows_T, chunk_S), (batch.rows_T, chunk_T))
            return TokenScores(logprobs_T.float(), chunk_T=chunk_T)

        return shared


def aligned(
    context: StrategyContext, teacher: ModelCluster, policy: PreTrainedTokenizerBase
) -> tuple[StrategyContext, ModelCluster | AlignedTeacher]:
    """A teacher that reads the text of a policy, and the context to set it up with.

    With the policy's own vocabulary it is a teacher like any other: it reads the very tokens that were sampled.

    Args:
        context: that of a teacher with the policy's tokens.
    """
    args = context.worker.model_args
    own = load_tokenizer(context.model_path, trust_remote_code=args.trust_remote_code)
    if own.get_vocab() == policy.get_vocab():
        return context, teacher
    config = load_config(context.model_path, args.model_config_kwargs, trust_remote_code=args.trust_remote_code)
    longest = _MORE_TOKENS * context.sequence_length
    longest = min(longest, getattr(config.get_text_config(), "max_position_embeddings", None) or longest)
    retokenizer = Retokenizer(policy, own, context.template, longest)
    return replace(context, tokenizer_path=None, sequence_length=longest), AlignedTeacher(teacher, retokenizer)
