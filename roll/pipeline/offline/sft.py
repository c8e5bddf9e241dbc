"""The SFT pipeline: trains on conversations, and evaluates on held-out ones."""

from __future__ import annotations

import math
from typing import ClassVar

from roll.algorithms.losses import SFT_NEEDS, build_sft_loss
from roll.configs.offline import SFTConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics
from roll.pipeline.offline.pipeline import OfflinePipeline, Parts, Take, load_sft_data, run_offline
from roll.pipeline.programs import SFT


def run_sft(config: SFTConfig, started: float | None = None, take: Take = OfflinePipeline.run) -> int:
    """Runs the SFT pipeline to its end and returns the exit code, see ``run_offline``."""
    return run_offline(config, SFT, load_sft_data, _build, started, take=take, needs=SFT_NEEDS)


class SFTPipeline(OfflinePipeline):
    """Trains a policy to imitate (see ``OfflinePipeline``)."""

    area = "sft"
    shown: ClassVar = {"loss": "eval/loss", "perplexity": "eval/perplexity", "token_accuracy": "eval/token_accuracy"}
    words: ClassVar = {
        "loss": "loss {:.4f}",
        "perplexity": "perplexity {:.3f}",
        "token_accuracy": "token accuracy {:.1%}",
    }

    def measure_held_out(self, batch: Batch) -> Metrics:
        """Likelihood of the tokens with loss mask 1.

        ``eval/loss`` is their mean negative log-likelihood (nats), ``eval/perplexity`` its exponential, and
        ``eval/token_accuracy`` the share of them that are the model's first choice, given the tokens before.
        """
        scores, said_T = self.roles.actor.logprobs(batch), batch.loss_mask_T
        assert scores.logprobs_T is not None, "a language model scores"
        loss = -float(scores.logprobs_T[said_T].double().mean())
        metrics = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0)), "eval/tokens": float(said_T.sum())}
        if scores.top1_T is not None:  # an engine of one's own may not tell
            metrics["eval/token_accuracy"] = float(scores.top1_T[said_T].double().mean())
        return metrics


def _build(config: SFTConfig, parts: Parts) -> SFTPipeline:
    return SFTPipeline(config, parts, build_sft_loss, config.loss_agg_mode)
