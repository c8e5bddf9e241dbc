"""The optimizer steps of supervised training, in an order that follows from the seed."""

from __future__ import annotations

from torch import Tensor

from roll.algorithms.losses import build_sft_loss
from roll.configs.algorithm import LossAggMode
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics
from roll.pipeline.model_cluster import ModelCluster, plan_optimizer_steps


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """Optimizer steps of one pass; rows that do not fill another step are spread over the others."""
    return max(1, num_rows // batch_size)


class SupervisedTraining:
    """Trains a model on a fixed set of rows, in epochs that are shuffled anew.

    Args:
        actor: the role that is trained, set up.
        data: the rows; the loss is that of the tokens with loss mask 1.
        batch_size: rows of an optimizer step, at least.
        max_steps: optimizer steps in all.
        seed: of the order.
        loss_agg_mode: see ``sft_loss``.
    """

    def __init__(
        self,
        actor: ModelCluster,
        data: Batch,
        *,
        batch_size: int,
        max_steps: int,
        seed: int,
        loss_agg_mode: LossAggMode = "token-mean",
    ) -> None:
        self._actor = actor
        self._data = data
        self._per_epoch = steps_per_epoch(data.num_sequences, batch_size)
        epochs = -(-max_steps // self._per_epoch)
        self._steps = plan_optimizer_steps(data.num_sequences, self._per_epoch, epochs, seed)[:max_steps]
        actor.call("set_loss", build_sft_loss, loss_agg_mode)

    def rows(self, step: int) -> Tensor:
        """int64: what optimizer step number ``step``, counted from 1, learns from."""
        return self._steps[step - 1]

    def num_tokens(self, step: int) -> int:
        return int(self._data.lengths_B[self.rows(step)].sum())

    def epochs(self, step: int) -> float:
        """How often the data has been met after that many steps."""
        return step / self._per_epoch

    def train(self, first: int, last: int) -> list[Metrics]:
        """Takes the optimizer steps from number ``first`` to ``last``; the metrics of each."""
        return self._actor.train(self._data, self._steps[first - 1 : last])
