"""Comparison of a policy with its teacher over the vocabulary: ids of both, and what the teacher's scores become."""

from __future__ import annotations

from torch import Tensor

from roll.algorithms.types import TokenScores
from roll.configs.divergence import DivergenceConfig
from roll.data.batch import Batch
from roll.models.loading import load_config

TEACHER_COLUMNS = ("teacher_hidden_TH", "teacher_ids_TK", "teacher_top_TK", "teacher_tail_T")
"""Columns of a batch that a comparison over the vocabulary reads; large."""


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
                "teacher: its strategy returns neither hidden states nor top tokens; expected hf_infer or an fsdp2, "
                "deepspeed or megatron strategy"
            )
        columns |= dict(zip(TEACHER_COLUMNS, found, strict=True))
    return batch.replace(**columns)


def shared_ids(*models: tuple[str, bool]) -> int:
    """Ids that all models have, from 0 on; of each its folder or hub name, and whether its Python files may run."""
    return int(min(load_config(path, trust_remote_code=trust).get_text_config().vocab_size for path, trust in models))
