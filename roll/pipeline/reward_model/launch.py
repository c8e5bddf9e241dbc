"""The data and the steps of a run that trains a reward model."""

from __future__ import annotations

from roll.algorithms.reward_models import build_reward_loss
from roll.configs.data import DataArguments
from roll.configs.reward_training import RewardLossConfig, RewardTrainingConfig
from roll.data.conversations import Conversations, Scoring
from roll.data.preferences import load_preferences
from roll.data.renderer import ChatRenderer
from roll.data.scored_answers import encode_whole, load_scored
from roll.pipeline.offline.launch import Parts, run_offline
from roll.pipeline.programs import REWARD_MODEL
from roll.pipeline.reward_model.pipeline import RewardModelPipeline


def run_reward_model(config: RewardTrainingConfig, started: float | None = None) -> int:
    """Runs the pipeline to its end and returns the exit code, see ``launch``; 2 for wrong data."""
    return run_offline(config, REWARD_MODEL, _load, _build, started)


def _load(
    config: RewardTrainingConfig, data: DataArguments, renderer: ChatRenderer, scoring: Scoring | None = None
) -> Conversations:
    max_tokens = config.sequence_length
    if config.reward_loss == "bradley_terry":
        return load_preferences(
            data,
            config.answers,
            label=None,
            encode=lambda talk: encode_whole(renderer, talk.messages),
            max_tokens=max_tokens,
            overflow=config.sample_overflow,
            seed=config.seed,
        )
    assert config.sample_overflow != "truncate", "a rule"
    return load_scored(
        data,
        config.answers,
        in_steps=config.reward_loss == "process",
        renderer=renderer,
        max_tokens=max_tokens,
        overflow=config.sample_overflow,
        seed=config.seed,
    )


def _build(config: RewardTrainingConfig, parts: Parts) -> RewardModelPipeline:
    loss = RewardLossConfig(reward_loss=config.reward_loss, center_coef=config.center_coef)
    training = parts.training(config, parts.train, "reward model", build_reward_loss, loss)
    return RewardModelPipeline(config, parts.session, parts.roles, parts.signals, training, parts.held_out, None)
