"""Comparison of a policy with its teacher over the vocabulary: its set-up, and what the teacher's scores become."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.types import TokenScores
from roll.configs.divergence import DivergenceConfig
from roll.data.batch import Batch
from roll.models.comparison import ComparisonSpec
from roll.models.loading import load_config

TEACHER_COLUMNS = ("teacher_hidden_TH", "teacher_ids_TK", "teacher_top_TK", "teacher_tail_T")
"""Columns of a batch that a comparison over the vocabulary reads; large."""


@dataclass(frozen=True)
class Teaching:
    """Settings that the roles are told. Without a divergence: none."""

    comparison: ComparisonSpec | None = None
    """For the policy."""
    top_k: int = 0
    """Of the teacher's tokens that travel; 0: none."""
    num_ids: int | None = None
    """Ids of the teacher that count; ``None``: all."""

    @property
    def sends_hidden(self) -> bool:
        """Tells whether the teacher's hidden states travel."""
        return self.comparison is not None and self.comparison.teacher_path is not None

    @classmethod
    def of(
        cls,
        divergence: DivergenceConfig,
        temperature: float,
        model_path: str,
        teacher_path: str | None,
        *,
        trust_policy: bool = False,
        trust_teacher: bool = False,
    ) -> Teaching:
        """The setting of a run.

        Args:
            temperature: divides the logits of both.
            teacher_path: ``None``: the teacher's top tokens are on disk.
            trust_policy: whether Python files that come with the policy may run.
        """
        shared = _num_ids(model_path, teacher_path, trust_policy, trust_teacher)
        if divergence.logits_topk is None:
            return cls(ComparisonSpec(divergence, temperature, teacher_path, shared, trust_teacher))
        return cls(ComparisonSpec(divergence, temperature), divergence.logits_topk, shared)


def with_teacher(batch: Batch, scores: TokenScores, teaching: DivergenceConfig | None) -> Batch:
    """The batch with what a teacher's scores say of it.

    Raises:
        ValueError: they say too little for a comparison over the vocabulary.
    """
    columns: dict[str, Tensor | None] = {
        "teacher_logprobs_T": scores.logprobs_T,
        "teacher_chunk_T": scores.chunk_T,
    }
    if teaching is not None:
        found = (scores.hidden_TH, scores.top_ids_TK, scores.top_logprobs_TK, scores.tail_T)
        if all(column is None for column in found):
            raise ValueError(
                "teacher: its strategy tells neither hidden states nor top tokens; expected hf_infer or an fsdp2, "
                "deepspeed or megatron strategy"
            )
        columns |= dict(zip(TEACHER_COLUMNS, found, strict=True))
    return batch.replace(**columns)


def _num_ids(model_path: str, teacher_path: str | None, trust_policy: bool, trust_teacher: bool) -> int | None:
    """Ids that both models have, from 0 on; ``None`` where no teacher is loaded."""
    if teacher_path is None:
        return None
    models = ((model_path, trust_policy), (teacher_path, trust_teacher))
    return int(min(load_config(path, trust_remote_code=trust).get_text_config().vocab_size for path, trust in models))
