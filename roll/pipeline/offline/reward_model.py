"""The reward model pipeline: training, and agreement with held-out labels."""

from __future__ import annotations

from typing import ClassVar

import torch

from roll.algorithms.preferences import build_reward_loss, calibration_error, pairs_in_order, row_scores
from roll.configs.data import DataArguments
from roll.configs.preference import RewardTrainingConfig
from roll.data.batch import Batch
from roll.data.conversations import Conversations, Scoring
from roll.data.preferences import encode_whole_talk, load_preferences, load_scored
from roll.data.renderer import ChatRenderer
from roll.data.template_check import LeftOut
from roll.distributed.strategy.base import Metrics
from roll.pipeline.offline.pipeline import OfflinePipeline, Parts, Take, run_offline
from roll.pipeline.programs import REWARD_MODEL
from roll.preflight.models import media_refused


def run_reward_model(
    config: RewardTrainingConfig, started: float | None = None, take: Take = OfflinePipeline.run
) -> int:
    """Runs the pipeline to its end and returns the exit code, see ``run_offline``."""
    return run_offline(config, REWARD_MODEL, _load, _build, started, take=take)


class RewardModelPipeline(OfflinePipeline):
    """Trains a reward model (see ``OfflinePipeline``)."""

    config: RewardTrainingConfig
    area = "rm"
    order = "reward model"
    shown: ClassVar = {
        "loss": "eval/loss",
        "pairwise_accuracy": "eval/accuracy",
        "calibration_error": "eval/calibration_error",
        "correlation": "eval/correlation",
    }
    words: ClassVar = {
        "loss": "loss {:.4f}",
        "accuracy": "accuracy {:.1%}",
        "calibration_error": "calibration error {:.3f}",
        "correlation": "correlation {:.3f}",
    }

    def measure_held_out(self, batch: Batch) -> Metrics:
        """The training metrics of all held-out samples as one optimizer step, and how far the scores can be believed.

        ``eval/calibration_error`` is that of the probabilities which the scores state: that one answer is better than
        the other, that a step is right. ``eval/correlation`` is Pearson's, of scores with targets.
        """
        scores = self.roles.actor.logprobs(batch)
        assert scores.values_T is not None, "a reward model scores"
        values_T = scores.values_T.double()
        metrics = self.as_one_step(scores, batch)
        if self.config.reward_loss == "bradley_terry":
            lead = row_scores(values_T, batch)[pairs_in_order(batch)].diff(dim=1)[:, 0].neg()
            return metrics | {"eval/calibration_error": calibration_error(lead.abs().sigmoid(), lead > 0)}
        assert batch.returns_T is not None, "the data brings targets"
        value, target = values_T[batch.loss_mask_T], batch.returns_T[batch.loss_mask_T].double()
        if self.config.reward_loss == "process":
            return metrics | {"eval/calibration_error": calibration_error(value.sigmoid(), target)}
        varied = min(float(value.std()), float(target.std())) > 0 if len(value) > 1 else False
        return metrics | (
            {"eval/correlation": float(torch.corrcoef(torch.stack([value, target]))[0, 1])} if varied else {}
        )


def _load(
    config: RewardTrainingConfig, data: DataArguments, renderer: ChatRenderer, scoring: Scoring | None = None
) -> Conversations:
    max_tokens = config.sequence_length
    if config.reward_loss == "bradley_terry":
        return load_preferences(
            data,
            config.answers,
            label=None,
            encode=encode_whole_talk(renderer),
            left_out=LeftOut(renderer, "whole"),
            max_tokens=max_tokens,
            overflow=config.sample_overflow,
            seed=config.seed,
            refused=media_refused(config),
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
        refused=media_refused(config),
    )


def _build(config: RewardTrainingConfig, parts: Parts) -> RewardModelPipeline:
    return RewardModelPipeline(config, parts, build_reward_loss, config)
