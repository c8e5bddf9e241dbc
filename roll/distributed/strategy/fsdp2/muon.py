"""Muon: orthogonalised momentum for the matrices of decoder layers and vision towers, AdamW for everything else.

``torch.optim.Muon`` takes DTensors, but sums its 16-bit products over the ranks: an update on two ranks differs from
that on one by up to 4 %, a matrix costs 11 to 16 collective calls, and all ranks compute all of it (PyTorch 2.13).
Here momentum stays in shares, of replicas and in host memory too, and each matrix is made whole on one rank, which
orthogonalises it for all: the ranks share the work, and none can differ from another by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.distributed.strategy.training.exchange import gather, own_rank, weight_shard, world_size
from roll.distributed.strategy.training.optim import DECAYS, MASTER, MOMENTUM, make_adamw
from roll.models.heads import decoder_layers, text_modules

if TYPE_CHECKING:
    from roll.configs.worker import TrainingArguments
    from roll.distributed.strategy.fsdp2.weights import Weights

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
"""The quintic of a Newton-Schulz iteration, and how often it is applied (Jordan et al. 2024)."""
RMS = 0.2
"""Root mean square of an update of learning rate 1: about that of AdamW's (Liu et al. 2025)."""
_LEAST_NORM = 1e-7


def layer_matrices(weights: Weights) -> list[str]:
    """Names of the trained parameters with two axes in decoder layers, and of the matrices of a tower and projector.

    No embedding, head, norm, bias or expert.
    """
    model = weights.scorer.model
    text = text_modules(model)
    layers = text.intersection(decoder_layers(model))
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    towers = [module for module in model.modules() if module not in text and isinstance(module, nn.Linear)]
    inside |= {id(module.weight) for module in towers}
    whole = weights.parameters
    return [name for name in weights.trained if whole[name].ndim == 2 and id(whole[name]) in inside]


def number_format(device: torch.device) -> torch.dtype:
    """That of the iteration: 16 bits where they are fast."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalise(matrix: Tensor) -> Tensor:
    """The matrix with its singular values moved to about 1 (0.7 to 1.2), of the same shape and number format.

    Five Newton-Schulz steps ``X <- a X + (b X X' + c (X X')²) X`` from ``X / |X|`` (Jordan et al. 2024); the side with
    fewer rows is the one that is squared.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) with Nesterov momentum and decoupled weight decay (Liu et al. 2025), and AdamW.

    ``m <- μ m + (1 - μ) g``, ``w <- (1 - η λ) w - 0.2 √max(rows, columns) η orthogonalise(μ m + (1 - μ) g)`` with the
    learning rate η and weight decay λ of AdamW, whose updates are as large. A step is collective.

    Args:
        weights: whose shares are changed, each with its ``grad``.
        args: learning rate, weight decay, momentum; what AdamW reads.
    """

    def __init__(self, weights: Weights, args: TrainingArguments) -> None:
        self._weights, self._names = weights, layer_matrices(weights)
        shares = weights.trained
        matrices = {name: shares.pop(name) for name in self._names}
        self._adamw = make_adamw(shares, weights.parameters, args, {})
        group = {"params": list(matrices.values()), "weight_decay": args.weight_decay, DECAYS: True}
        super().__init__([group], {"lr": args.learning_rate})
        self._momentum = args.muon_momentum
        self.param_groups += self._adamw.param_groups
        self.state.update(self._adamw.state)
        for share in matrices.values():
            self.state[share] = {MOMENTUM: torch.zeros_like(share, requires_grad=False)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Takes a step (collective)."""
        assert closure is None
        self._adamw.step()
        for start in range(0, len(self._names), world_size()):
            names = self._names[start : start + world_size()]
            for name, update in zip(names, self._updates(names), strict=True):
                self._apply(name, update)

    def _updates(self, names: Sequence[str]) -> list[Tensor]:
        """The whole updates of a matrix for each rank, which has orthogonalised it; on all ranks."""
        device, updates = self._weights.device, list[Tensor]()
        for owner, name in enumerate(names):
            whole = self._gather(name, owner)
            if own_rank() == owner:
                updates.append(orthogonalise(whole[name].to(device)))
            else:
                updates.append(torch.empty(self._weights.shape(name), dtype=number_format(device), device=device))
        if world_size() > 1:
            for owner, update in enumerate(updates):
                dist.broadcast(update, src=owner)
        return updates

    def _gather(self, name: str, owner: int) -> dict[str, Tensor]:
        """Momentum as it acts in this step, whole on a rank, in the number format of the iteration."""
        share = self._weights.local[name]
        assert share.grad is not None
        momentum = self.state[share][MOMENTUM].lerp_(share.grad, 1 - self._momentum)
        acting = share.grad.lerp(momentum, self._momentum)
        spread = self._weights.spread(name, MASTER, number_format(self._weights.device))
        shape = spread.own().shape
        spread = replace(spread, own=lambda: acting.view(shape))
        return gather([weight_shard(name, spread, self._weights.shape(name))], [owner])

    def _apply(self, name: str, update: Tensor) -> None:
        share, (group, *_) = self._weights.local[name], self.param_groups
        share.mul_(1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] * RMS * math.sqrt(max(update.shape))
        share.add_(self._weights.share(name, update).to(share.device), alpha=-rate)
