"""The DPO pipeline: preferences, the reference's log-probs, and KTO's reference point."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from roll.algorithms.preferences import build_preference_loss
from roll.configs.data import DataArguments
from roll.configs.engine_rules import compute_dtype
from roll.configs.preference import DPOConfig
from roll.data.batch import Batch
from roll.data.conversations import Conversations, Scoring, encode_talk
from roll.data.identity import identity
from roll.data.preferences import load_preferences
from roll.data.renderer import ChatRenderer
from roll.data.template_check import LeftOut
from roll.distributed.strategy.base import Metrics
from roll.models.tokenizer import model_folder
from roll.pipeline.column_cache import cached_columns, check_writable, digest_of, weight_files
from roll.pipeline.model_cluster import ModelCluster
from roll.pipeline.offline.pipeline import OfflinePipeline, Parts, Prepare, Samples, Take, run_offline
from roll.pipeline.programs import DPO
from roll.pipeline.roles import Roles
from roll.preflight.models import media_refused

logger = logging.getLogger(__name__)

_COLUMN = "ref_logprobs_T"


class ReferenceScores:
    """The reference's log-probs of responses.

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
        weights = weight_files(model_folder(self._model_path)) or [self._model_path]
        file = self._folder / f"reference-{digest_of(batch, [*weights, self._dtype])}.safetensors"

        def compute() -> dict[str, Tensor]:
            scores_T = self.score(batch).ref_logprobs_T
            assert scores_T is not None
            return {_COLUMN: scores_T}

        return batch.replace(**cached_columns(file, [_COLUMN], "log-probabilities of a reference", compute))


class Anchors:
    """KTO's reference point: the policy's divergence from the reference.

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
            "preference_loss kto: got %d responses to one question, expected several questions: the baseline of a "
            "response is estimated from responses to other questions",
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


def run_dpo(config: DPOConfig, started: float | None = None, take: Take = OfflinePipeline.run) -> int:
    """Runs the DPO pipeline to its end and returns the exit code, see ``run_offline``."""
    return run_offline(config, DPO, _load, _build, started, _check, take=take)


class DPOPipeline(OfflinePipeline):
    """Trains a policy on preferences (see ``OfflinePipeline``).

    Held-out samples bring the reference's log-probabilities, where the loss asks for them.
    """

    area = "dpo"
    shown: ClassVar = {"loss": "eval/loss", "preference_accuracy": "eval/accuracy", "margin": "eval/margin"}
    words: ClassVar = {
        "loss": "loss {:.4f}",
        "accuracy": "preference accuracy {:.1%}",
        "margin": "margin {:.3f}",
    }
    anchors: Anchors | None = None
    """Of the held-out samples, where the loss asks for them."""

    def measure_held_out(self, batch: Batch) -> Metrics:
        if self.anchors is not None:
            batch = self.anchors.anchored(batch, torch.arange(batch.num_sequences))
        return super().measure_held_out(batch)


def _check(config: DPOConfig, samples: Samples) -> None:
    """Checks that what the reference finds can be kept.

    Raises:
        ValueError: it cannot.
    """
    if config.reference_dir is not None:
        check_writable(config.reference_dir, "reference_dir")


def _load(
    config: DPOConfig, data: DataArguments, renderer: ChatRenderer, scoring: Scoring | None = None
) -> Conversations:
    return load_preferences(
        data,
        config.preferences,
        label=None if config.in_pairs else config.preferences.label,
        encode=encode_talk(renderer),
        left_out=LeftOut(renderer),
        max_tokens=config.sequence_length,
        overflow=config.sample_overflow,
        scoring=scoring,
        seed=config.seed,
        refused=media_refused(config),
    )


def _build(config: DPOConfig, parts: Parts) -> DPOPipeline:
    roles, train, held_out = parts.run.roles, parts.train, parts.held_out
    prepare, anchors = None, None
    if config.uses_reference:
        kept = Path(config.reference_dir).expanduser() if config.reference_dir else parts.run.session.folder.path
        scored_by = "actor_train" if config.reference is None else "reference"
        _, dtype = compute_dtype(scored_by, config.roles[scored_by])
        reference = ReferenceScores(roles, parts.model_path, dtype, kept if config.precompute_reference else None)
        # Now, since the policy may be the reference only as long as it is untrained.
        held_out = None if held_out is None else reference.ahead(held_out)
        if held_out is not None and not config.in_pairs:
            anchors = Anchors(held_out, roles.actor, reference, config.sequence_length, ahead=True)
        if train is not None:
            train, prepare = _prepared(config, roles, train, reference)
    parts = replace(parts, train=train, held_out=held_out)
    pipeline = DPOPipeline(config, parts, build_preference_loss, config, prepare=prepare)
    pipeline.anchors = anchors
    return pipeline


def _prepared(
    config: DPOConfig, roles: Roles, train: Batch, reference: ReferenceScores
) -> tuple[Batch, Prepare | None]:
    """The training data with what can be known ahead, and what adds the rest to a step."""
    ahead = config.precompute_reference
    if ahead:
        train = reference.ahead(train)
    if config.in_pairs:
        return train, None if ahead else lambda batch, rows: reference.score(batch)
    anchors = Anchors(train, roles.actor, reference, config.sequence_length, ahead=ahead)
    return train, lambda batch, rows: anchors.anchored(batch if ahead else reference.score(batch), rows)
