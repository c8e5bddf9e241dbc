"""The distillation pipeline: a teacher's distributions to imitate, and how far those of held-out answers are."""

from __future__ import annotations

from typing import ClassVar

from roll.algorithms.distillation import build_distill_loss
from roll.algorithms.types import LossContext
from roll.configs.distill import DistillConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics
from roll.pipeline.offline.pipeline import OfflinePipeline


class DistillPipeline(OfflinePipeline):
    """Trains a policy to give a teacher's probabilities (see ``OfflinePipeline``); held-out samples bring them too."""

    config: DistillConfig
    area = "distill"
    shown: ClassVar = {"loss": "eval/loss", "divergence": "eval/divergence", "nll": "eval/nll"}

    def measure_held_out(self, batch: Batch) -> Metrics:
        """The training metrics, of all held-out samples as one optimizer step."""
        scores = self.roles.actor.logprobs(batch)
        found = build_distill_loss(self.config)(scores, batch, LossContext.of(batch)).metrics
        return {name.replace("distill/", "eval/"): float(value) for name, value in found.items()}

    def said(self, metrics: Metrics) -> str:
        return f"divergence from the teacher {metrics['eval/divergence']:.4f}, nll {metrics['eval/nll']:.4f}"
