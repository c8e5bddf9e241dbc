"""The DPO pipeline: answers that are better or worse, and how well others are told apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch

from roll.algorithms.preferences import build_preference_loss
from roll.configs.data import DataArguments
from roll.configs.dpo import DPOConfig
from roll.configs.engine_rules import compute_dtype
from roll.data.batch import Batch
from roll.data.conversations import Conversations, Scoring, encode_talk
from roll.data.left_out import LeftOut
from roll.data.preferences import load_preferences
from roll.data.renderer import ChatRenderer
from roll.distributed.strategy.base import Metrics
from roll.pipeline.dpo.reference import Anchors, ReferenceScores
from roll.pipeline.offline.kept import check_writable
from roll.pipeline.offline.launch import Samples, run_offline
from roll.pipeline.offline.pipeline import OfflinePipeline, Parts
from roll.pipeline.offline.training import Prepare
from roll.pipeline.programs import DPO
from roll.pipeline.roles import Roles


def run_dpo(config: DPOConfig, started: float | None = None) -> int:
    """Runs the DPO pipeline to its end and returns the exit code, see ``launch``; 2 for wrong data."""
    return run_offline(config, DPO, _load, _build, started, _check)


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
