"""The distillation pipeline: a teacher's distributions to imitate, and how far those of held-out answers are."""

from __future__ import annotations

from typing import ClassVar

from roll.algorithms.distillation import build_distill_loss
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
        return self.as_one_step(build_distill_loss(self.config), self.roles.actor.logprobs(batch), batch)

    def said(self, metrics: Metrics) -> str:
        return f"divergence from the teacher {metrics['eval/divergence']:.4f}, nll {metrics['eval/nll']:.4f}"
