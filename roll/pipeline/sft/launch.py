"""The SFT pipeline's data and its steps."""

from __future__ import annotations

from roll.algorithms.losses import build_sft_loss
from roll.configs.sft import SFTConfig
from roll.pipeline.offline.imitated import load_imitated
from roll.pipeline.offline.launch import Parts, run_offline
from roll.pipeline.offline.training import OfflineTraining
from roll.pipeline.programs import SFT
from roll.pipeline.sft.pipeline import SFTPipeline
from roll.utils.seeding import derive_seed


def run_sft(config: SFTConfig, started: float | None = None) -> int:
    """Runs the SFT pipeline to its end and returns the exit code, see ``launch``; 2 for wrong data."""
    return run_offline(config, SFT, load_imitated, _build, started)


def _build(config: SFTConfig, parts: Parts) -> SFTPipeline:
    training = None
    if parts.train is not None:
        training = OfflineTraining(
            parts.roles.actor,
            parts.train,
            build_sft_loss,
            config.loss_agg_mode,
            batch_size=config.actor_train.global_train_batch_size,
            max_steps=config.max_steps,
            seed=derive_seed(config.seed, "sft"),
        )
    return SFTPipeline(config, parts.session, parts.roles, parts.signals, training, parts.held_out, parts.prompts)
