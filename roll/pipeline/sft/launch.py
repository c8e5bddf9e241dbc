"""The SFT pipeline's data and its steps."""

from __future__ import annotations

from roll.algorithms.losses import build_sft_loss
from roll.configs.sft import SFTConfig
from roll.pipeline.offline.imitated import load_imitated
from roll.pipeline.offline.launch import Parts, run_offline
from roll.pipeline.programs import SFT
from roll.pipeline.sft.pipeline import SFTPipeline


def run_sft(config: SFTConfig, started: float | None = None) -> int:
    """Runs the SFT pipeline to its end and returns the exit code, see ``launch``; 2 for wrong data."""
    return run_offline(config, SFT, load_imitated, _build, started)


def _build(config: SFTConfig, parts: Parts) -> SFTPipeline:
    training = parts.training(config, parts.train, "sft", build_sft_loss, config.loss_agg_mode)
    return SFTPipeline(config, parts.session, parts.roles, parts.signals, training, parts.held_out, parts.prompts)
