"""Several teachers as one: each scores the rows of its own tags, and their opinions of a row are weighed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from roll.algorithms.alignment import NO_CHUNK
from roll.algorithms.distillation import teacher_metrics
from roll.algorithms.types import TokenScores
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics
from roll.pipeline.model_cluster import Scorer


class TaggedTeachers:
    """Scores of a policy's batch, each row by the teachers of its tag.

    Args:
        teachers: by name, set up.
        tags: of each teacher, as ``Batch.tag_B`` counts them.
        coefficients: what a teacher counts for beside the others of a row.
    """

    def __init__(
        self, teachers: Mapping[str, Scorer], tags: Mapping[str, Sequence[int]], coefficients: Mapping[str, float]
    ) -> None:
        self._teachers = teachers
        self._tags = tags
        self._coefficients = coefficients
        self._scored: list[tuple[str, Tensor, Tensor]] = []

    def rows(self, batch: Batch) -> dict[str, Tensor]:
        """int64: the rows of each teacher, which may be none."""
        assert batch.tag_B is not None, "rollouts have tags"
        return {
            name: torch.isin(batch.tag_B, torch.tensor(self._tags[name])).nonzero()[:, 0] for name in self._teachers
        }

    def submit_logprobs(self, batch: Batch, rows: Tensor | None = None) -> Callable[[], TokenScores]:
        """Log-probabilities of each row under its teacher, and chunks where one of them has other tokens.

        Teachers on other devices work side by side. Of a row with several teachers the scores are the mean, weighted
        with the coefficients. All rows are scored.
        """
        pending = []
        for name, own in self.rows(batch).items():
            if len(own):
                part = batch.select(own)
                pending.append((name, own, part, self._teachers[name].submit_logprobs(part)))
        return partial(self._weighed, batch, pending)

    def _weighed(
        self, batch: Batch, pending: Sequence[tuple[str, Tensor, Batch, Callable[[], TokenScores]]]
    ) -> TokenScores:
        sum_T, weight_T = torch.zeros(2, batch.num_tokens, dtype=torch.float64)
        chunk_T, aligned, self._scored = torch.full((batch.num_tokens,), NO_CHUNK), False, []
        for name, own, part, wait in pending:
            scores, place = wait(), batch.token_index(own)
            assert scores.logprobs_T is not None, "a language model's"
            self._scored.append((name, own, scores.logprobs_T))
            sum_T[place] += self._coefficients[name] * scores.logprobs_T.double()
            weight_T[place] += self._coefficients[name]
            aligned |= scores.chunk_T is not None
            every_T = torch.where(part.loss_mask_T, part.positions_T, NO_CHUNK)  # with the policy's tokens, each is one
            chunk_T[place] = every_T if scores.chunk_T is None else scores.chunk_T
        logprobs_T = torch.where(weight_T > 0, sum_T / weight_T, sum_T).float()
        return TokenScores(logprobs_T, chunk_T=chunk_T if aligned else None)

    def metrics(self, batch: Batch) -> Metrics:
        """``teacher_metrics`` of each teacher's rows and own opinion, ``teacher/<name>/…``.

        Args:
            batch: the one that was scored last.
        """
        return {
            key.replace("teacher/", f"teacher/{name}/", 1): value
            for name, own, logprobs_T in self._scored
            for key, value in teacher_metrics(batch.select(own).replace(teacher_logprobs_T=logprobs_T)).items()
        }
