"""A teacher with another tokenizer than the policy, which scores the same text in tokens of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import ray
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
    """Scores of a policy's batch from a teacher that reads other tokens.

    Args:
        teacher: its role, set up.
        retokenizer: writes the policy's rows in its tokens.
    """

    def __init__(self, teacher: ModelCluster, retokenizer: Retokenizer) -> None:
        self._teacher = teacher
        self._retokenizer = retokenizer

    def submit_logprobs(self, batch: Batch, rows: Tensor | None = None) -> tuple[list[Tensor], list[ray.ObjectRef]]:
        """Starts scoring, as ``ModelCluster.submit_logprobs``."""
        self._theirs, self._chunk_S, self._chunk_T = self._retokenizer.batch(batch)
        return self._teacher.submit_logprobs(self._theirs, rows)

    def gather_scores(self, batch: Batch, parts: list[Tensor], refs: list[ray.ObjectRef]) -> TokenScores:
        """The teacher's log-probability of each chunk of text, in equal parts for the policy's tokens in it.

        Args:
            batch: the one that was submitted last.
            parts: see ``ModelCluster.gather_scores``.
            refs: likewise.
        """
        scores = self._teacher.gather_scores(self._theirs, parts, refs)
        assert scores.logprobs_T is not None, "a language model's"
        theirs, own = (self._theirs.rows_T, self._chunk_S), (batch.rows_T, self._chunk_T)
        return TokenScores(shared_logprobs(scores.logprobs_T, theirs, own).float(), chunk_T=self._chunk_T)


def aligned(
    context: StrategyContext, teacher: ModelCluster, policy: PreTrainedTokenizerBase
) -> tuple[StrategyContext, ModelCluster | AlignedTeacher]:
    """A teacher that reads the text of a policy, and the context to set it up with.

    With the policy's own vocabulary it is a teacher like any other: it reads the very tokens that were sampled.

    Args:
        context: that of a teacher with the policy's tokens.
        teacher: its role.
        policy: the policy's tokenizer.
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
