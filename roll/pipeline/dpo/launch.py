"""The DPO pipeline's data, its reference and its steps."""

from __future__ import annotations

from pathlib import Path

from roll.algorithms.preferences import build_preference_loss
from roll.configs.data import DataArguments
from roll.configs.dpo import DPOConfig
from roll.configs.engine_rules import compute_dtype
from roll.configs.preference import PreferenceConfig
from roll.data.batch import Batch
from roll.data.conversations import Conversations, Scoring
from roll.data.preferences import load_preferences
from roll.data.renderer import ChatRenderer
from roll.pipeline.dpo.pipeline import DPOPipeline
from roll.pipeline.dpo.reference import Anchors, ReferenceScores
from roll.pipeline.offline.kept import check_writable
from roll.pipeline.offline.launch import Datasets, Parts, run_offline
from roll.pipeline.offline.training import Prepare
from roll.pipeline.programs import DPO
from roll.pipeline.roles import Roles


def run_dpo(config: DPOConfig, started: float | None = None) -> int:
    """Runs the DPO pipeline to its end and returns the exit code, see ``launch``; 2 for wrong data."""
    return run_offline(config, DPO, _load, _build, started, _check)


def _check(config: DPOConfig, datasets: Datasets) -> None:
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
        encode=lambda talk: renderer.conversation(talk.messages, last_only=True),
        max_tokens=config.sequence_length,
        overflow=config.sample_overflow,
        scoring=scoring,
        seed=config.seed,
    )


def _build(config: DPOConfig, parts: Parts) -> DPOPipeline:
    roles, train, held_out = parts.roles, parts.train, parts.held_out
    prepare, anchors = None, None
    if config.uses_reference:
        kept = Path(config.reference_dir).expanduser() if config.reference_dir else parts.session.folder.path
        scored_by = "actor_train" if config.reference is None else "reference"
        _, dtype = compute_dtype(scored_by, config.roles[scored_by])
        reference = ReferenceScores(roles, parts.model_path, dtype, kept if config.precompute_reference else None)
        # Now, since the policy may be the reference only as long as it is untrained.
        held_out = None if held_out is None else reference.ahead(held_out)
        if held_out is not None and not config.in_pairs:
            anchors = Anchors(held_out, roles.actor, reference, config.sequence_length, ahead=True)
        if train is not None:
            train, prepare = _prepared(config, roles, train, reference)
    loss = PreferenceConfig.model_validate(config.model_dump(include=set(PreferenceConfig.model_fields)))
    training = parts.training(config, train, "dpo", build_preference_loss, loss, prepare=prepare)
    return DPOPipeline(config, parts.session, roles, parts.signals, training, held_out, parts.prompts, anchors)


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
