"""Values that the policy is compared with: the reference's log-probabilities, and KTO's point of comparison."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from roll.data.batch import Batch
from roll.data.identity import identity
from roll.pipeline.model_cluster import ModelCluster
from roll.pipeline.offline.kept import digest_of, kept, weight_files
from roll.pipeline.roles import Roles

logger = logging.getLogger(__name__)

_COLUMN = "ref_logprobs_T"


class ReferenceScores:
    """The reference's opinion of answers.

    A role of its own gives it, else the policy without its adapter, else, ahead of the first step, the policy itself.

    Args:
        dtype: number format that it computes in; ``None``: that of the model.
        folder: where ``ahead`` keeps what it finds; ``None``: nowhere.
    """

    def __init__(self, roles: Roles, model_path: str, dtype: str | None, folder: Path | None) -> None:
        self._model = roles.reference or roles.actor
        self._model_path = model_path
        self._dtype = dtype or "the model's"
        self._folder = folder

    def score(self, batch: Batch) -> Batch:
        """The batch with ``ref_logprobs_T``."""
        found = self._model.submit_logprobs(batch)().logprobs_T
        assert found is not None, "a language model scores"
        return batch.replace(ref_logprobs_T=found)

    def ahead(self, batch: Batch) -> Batch:
        """The same of a whole dataset before the first step, read from disk where it has been kept.

        Raises:
            ValueError: a kept file cannot be read.
        """
        if self._folder is None:
            return self.score(batch)
        # A model of the hub has no files here: there its name tells it from others.
        weights = weight_files(Path(self._model_path).expanduser()) or [self._model_path]
        file = self._folder / f"reference-{digest_of(batch, [*weights, self._dtype])}.safetensors"

        def compute() -> dict[str, Tensor]:
            scores_T = self.score(batch).ref_logprobs_T
            assert scores_T is not None
            return {_COLUMN: scores_T}

        return batch.replace(**kept(file, [_COLUMN], "log-probabilities of a reference", compute))


class Anchors:
    """KTO's point of comparison: how far the policy has gone from the reference.

    Ethayarajh et al. (2024) estimate their KL by answers to other questions. Here each question of the dataset gets the
    answer of the next row that asks another. The estimate is a constant of the optimizer step, and at least 0.

    Args:
        max_tokens: of a crossed row, which loses its end.
        ahead: all of them now, else those of each step.
    """

    def __init__(
        self, data: Batch, actor: ModelCluster, reference: ReferenceScores, max_tokens: int, *, ahead: bool
    ) -> None:
        self._actor = actor
        self._reference = reference
        crossed = cross(data, max_tokens)
        self._crossed = reference.ahead(crossed) if ahead else crossed

    def anchored(self, batch: Batch, rows: Tensor) -> Batch:
        """The batch, which is these rows of the dataset, with ``anchor_B``."""
        crossed = self._crossed.select(rows)
        if crossed.ref_logprobs_T is None:
            crossed = self._reference.score(crossed)
        logprobs_T, ref_logprobs_T = self._actor.logprobs(crossed).logprobs_T, crossed.ref_logprobs_T
        assert logprobs_T is not None and ref_logprobs_T is not None, "a language model scores"
        gone = (logprobs_T - ref_logprobs_T)[crossed.loss_mask_T].double().sum() / crossed.num_sequences
        return batch.replace(anchor_B=torch.full((batch.num_sequences,), max(0.0, float(gone))))


def cross(batch: Batch, max_tokens: int) -> Batch:
    """Each row's question with the answer of the next row that asks another; behind the last row comes the first."""
    tokens, masks = (column.split(batch.lengths_B.tolist()) for column in (batch.tokens_T, batch.loss_mask_T))
    cuts = [int(mask.to(torch.uint8).argmax()) for mask in masks]
    asked = [identity(ids[:cut]) for ids, cut in zip(tokens, cuts, strict=True)]
    if len(set(asked)) == 1:
        logger.warning(
            "preference_loss kto: got %d answers to one question, expected answers to several: what a question is "
            "compared with is estimated by answers to others, and here by its own",
            len(asked),
        )
    count = len(cuts)
    others = [(row + 1) % count for row in range(count)]
    for row in [*range(count)][::-1] * 2:  # once more for questions that the last row and the first have in common
        if asked[(row + 1) % count] == asked[row]:
            others[row] = others[(row + 1) % count]
    rows, marks = [], []
    for row, (cut, other) in enumerate(zip(cuts, others, strict=True)):
        question, answer, mark = tokens[row][:cut], tokens[other][cuts[other] :], masks[other][cuts[other] :]
        rows.append(torch.cat([question, answer])[:max_tokens])
        marks.append(torch.cat([torch.zeros(cut, dtype=torch.bool), mark])[:max_tokens])
    return Batch(torch.tensor([len(row) for row in rows]), torch.cat(rows), torch.cat(marks))
