"""Several teachers as one: each scores the rows of its own tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray
import torch
from torch import Tensor

from roll.algorithms.alignment import NO_CHUNK
from roll.algorithms.distillation import teacher_metrics
from roll.algorithms.types import TokenScores
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics
from roll.pipeline.model_cluster import Scorer


class TaggedTeachers:
    """Scores of a policy's batch, each row by the teacher of its tag.

    Args:
        teachers: by name, set up.
        tags: of each teacher, as ``Batch.tag_B`` counts them.
    """

    def __init__(self, teachers: Mapping[str, Scorer], tags: Mapping[str, Sequence[int]]) -> None:
        self._teachers = teachers
        self._tags = tags

    def rows(self, batch: Batch) -> dict[str, Tensor]:
        """int64: the rows of each teacher, which may be none."""
        assert batch.tag_B is not None, "rollouts have tags"
        return {
            name: torch.isin(batch.tag_B, torch.tensor(self._tags[name])).nonzero()[:, 0] for name in self._teachers
        }

    def submit_logprobs(self, batch: Batch, rows: Tensor | None = None) -> tuple[list[Tensor], list[ray.ObjectRef]]:
        """Starts scoring all rows, as ``ModelCluster.submit_logprobs``; teachers on other devices work side by side."""
        self._submitted = []
        for name, own in self.rows(batch).items():
            if len(own):
                part, teacher = batch.select(own), self._teachers[name]
                self._submitted.append((own, part, teacher, teacher.submit_logprobs(part)))
        return [], []

    def gather_scores(self, batch: Batch, parts: list[Tensor], refs: list[ray.ObjectRef]) -> TokenScores:
        """Log-probabilities of each row under its teacher, and chunks where one of them has other tokens.

        Args:
            batch: the one that was submitted last.
            parts: not read: there is a list for each teacher.
            refs: likewise.
        """
        logprobs_T, chunk_T = torch.zeros(batch.num_tokens), torch.full((batch.num_tokens,), NO_CHUNK)
        aligned = False
        for own, part, teacher, submitted in self._submitted:
            scores, place = teacher.gather_scores(part, *submitted), batch.token_index(own)
            assert scores.logprobs_T is not None, "a language model's"
            logprobs_T[place] = scores.logprobs_T
            aligned |= scores.chunk_T is not None
            every_T = torch.where(part.loss_mask_T, part.positions_T, NO_CHUNK)  # with the policy's tokens, each is one
            chunk_T[place] = every_T if scores.chunk_T is None else scores.chunk_T
        return TokenScores(logprobs_T, chunk_T=chunk_T if aligned else None)

    def metrics(self, batch: Batch) -> Metrics:
        """``teacher_metrics`` of each teacher's rows, ``teacher/<name>/…``."""
        return {
            key.replace("teacher/", f"teacher/{name}/", 1): value
            for name, own in self.rows(batch).items()
            for key, value in teacher_metrics(batch.select(own)).items()
        }
