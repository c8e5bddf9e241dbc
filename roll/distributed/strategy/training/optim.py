"""AdamW's parameter groups and the learning-rate schedule, counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from roll.configs.training import TrainingArguments

ADAM_STATE = ("exp_avg", "exp_avg_sq")
MASTER = "master"
"""The kinds of state behind a trained parameter: Adam's moments, and its float32 weights."""


def make_adamw(
    local: Mapping[str, nn.Parameter], whole: Mapping[str, nn.Parameter], args: TrainingArguments
) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019) on matrices only.

    Norm scales and biases (one axis) are not decayed, as is usual since GPT-2: shrinking them regularises nothing. The
    state is allocated here, so that a lack of memory shows at setup and a fresh optimizer can be saved like any other.

    Args:
        local: this rank's share of each trained parameter.
        whole: the parameters themselves (an empty share has lost its axes).
        args: learning rate, betas, epsilon and weight decay.
    """
    decayed = [parameter for name, parameter in local.items() if whole[name].ndim >= 2]
    others = [parameter for name, parameter in local.items() if whole[name].ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=True,
    )
    for parameter in local.values():
        moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in ADAM_STATE}
        optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
    return optimizer


def learning_rate(args: TrainingArguments, step: int, total_steps: int) -> float:
    """The rate of optimizer step ``step`` (the first is 0) out of ``total_steps``.

    The warm-up's W steps rise in equal parts towards the peak, which step W is the first to use; from there the rate
    falls so that step ``total_steps``, the first that is not taken, would have ``min_lr_ratio`` of it.
    """
    if args.lr_scheduler_type == "constant":
        return args.learning_rate
    warmup = args.warmup_steps or math.ceil(args.warmup_ratio * total_steps)
    if step < warmup:
        return args.learning_rate * (step + 1) / (warmup + 1)
    if args.lr_scheduler_type == "constant_with_warmup":
        return args.learning_rate
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    remaining = 1.0 - progress if args.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return args.learning_rate * (args.min_lr_ratio + (1.0 - args.min_lr_ratio) * remaining)
