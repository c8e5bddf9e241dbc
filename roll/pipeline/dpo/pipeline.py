"""The DPO pipeline: answers that are better or worse, and how well others are told apart."""

from __future__ import annotations

from typing import ClassVar

import torch

from roll.algorithms.preferences import build_preference_loss
from roll.configs.dpo import DPOConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics
from roll.pipeline.dpo.reference import Anchors
from roll.pipeline.offline.pipeline import OfflinePipeline
from roll.pipeline.offline.training import OfflineTraining
from roll.pipeline.prompt_roles import PromptRoles
from roll.pipeline.roles import Roles
from roll.pipeline.session import RunSession
from roll.utils.signals import SignalGuard


class DPOPipeline(OfflinePipeline):
    """Trains a policy on preferences (see ``OfflinePipeline``).

    Args:
        held_out: brings the reference's log-probabilities, where the loss asks for them.
    """

    config: DPOConfig
    area = "dpo"
    shown: ClassVar = {"loss": "eval/loss", "preference_accuracy": "eval/accuracy", "margin": "eval/margin"}

    def __init__(
        self,
        config: DPOConfig,
        session: RunSession,
        roles: Roles,
        signals: SignalGuard,
        training: OfflineTraining | None,
        held_out: Batch | None,
        prompts: PromptRoles | None,
        anchors: Anchors | None,
    ) -> None:
        super().__init__(config, session, roles, signals, training, held_out, prompts)
        self.anchors = anchors

    def measure_held_out(self, batch: Batch) -> Metrics:
        if self.anchors is not None:
            batch = self.anchors.anchored(batch, torch.arange(batch.num_sequences))
        return self.as_one_step(build_preference_loss(self.config), self.roles.actor.logprobs(batch), batch)

    def said(self, metrics: Metrics) -> str:
        return (
            f"loss {metrics['eval/loss']:.4f}, preference accuracy {metrics['eval/accuracy']:.1%}, "
            f"margin {metrics['eval/margin']:.3f}"
        )
