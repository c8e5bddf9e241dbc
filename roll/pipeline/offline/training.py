"""The optimizer steps of a run on a fixed set of samples, in an order that follows from the seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from roll.algorithms.types import LossFn
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics
from roll.pipeline.model_cluster import ModelCluster, plan_optimizer_steps

Prepare: TypeAlias = Callable[[Batch, Tensor], Batch]
"""Gets the rows of an optimizer step, and which of the dataset they are."""


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Optimizer steps of one pass; samples that do not fill another step are spread over the others."""
    return max(1, num_samples // batch_size)


def first_samples(batch: Batch, count: int | None) -> Batch:
    """At most ``count`` samples from the start; ``None``: all."""
    return batch.select(batch.samples[:count].flatten())


class OfflineTraining:
    """Trains a model on a fixed set of samples (rows, or pairs of them), in reshuffled epochs.

    Args:
        build_loss: makes the loss of its further arguments, in the trainers.
        batch_size: samples of an optimizer step, at least.
        prepare: adds to the samples of a step what depends on the model as it is then; ``None``: nothing does.
    """

    def __init__(
        self,
        actor: ModelCluster,
        data: Batch,
        build_loss: Callable[..., LossFn],
        *loss_args: Any,
        batch_size: int,
        max_steps: int,
        seed: int,
        prepare: Prepare | None = None,
    ) -> None:
        self._actor = actor
        self._data = data
        self._prepare = prepare
        self._samples = data.samples
        self._per_epoch = steps_per_epoch(len(self._samples), batch_size)
        epochs = -(-max_steps // self._per_epoch)
        self._steps = plan_optimizer_steps(len(self._samples), self._per_epoch, epochs, seed)[:max_steps]
        actor.call("set_loss", build_loss, *loss_args)

    def rows(self, step: int) -> Tensor:
        """int64: what optimizer step number ``step``, counted from 1, learns from."""
        return self._samples[self._steps[step - 1]].flatten()

    def batch(self, step: int) -> Batch:
        """The same, as it lies in the data."""
        return self._data.select(self.rows(step))

    def epochs(self, step: int) -> float:
        """Number of times that the data has been met after that many steps."""
        return step / self._per_epoch

    def train(self, first: int, last: int) -> list[Metrics]:
        """Takes the optimizer steps from number ``first`` to ``last``; the metrics of each."""
        steps = [self.rows(step) for step in range(first, last + 1)]
        if self._prepare is None:
            return self._actor.train(self._data, steps)
        history = []
        for rows in steps:
            batch = self._prepare(self._data.select(rows), rows)
            history += self._actor.train(batch, [torch.arange(batch.num_sequences)])
        return history
