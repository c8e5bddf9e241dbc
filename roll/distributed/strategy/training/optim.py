"""AdamW's parameter groups and the learning-rate schedule, counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from roll.configs.worker import TrainingArguments

ADAM_STATE = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
MOMENTS = (*ADAM_STATE, MOMENTUM)
MASTER = "master"
"""The kinds of state behind a trained parameter: Adam's moments or Muon's, and its float32 weights."""
DECAYS = "decays"
"""Key of a parameter group that weight decay is for."""
SHARE = "share_of_rate"
"""Key of a parameter group: its learning rate as a share of the optimizer's; 1 for groups without it."""


def parameter_groups(
    parameters: Mapping[str, nn.Parameter],
    whole: Mapping[str, nn.Parameter],
    args: TrainingArguments,
    rates: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Groups of an optimizer: those with the same learning rate that weight decay is for, and those it is not for.

    Norm scales and biases (one axis) are not decayed, as is usual since GPT-2: shrinking them regularises nothing.

    Args:
        parameters: a rank's share of each trained parameter.
        whole: the parameters themselves (an empty share has lost its axes).
        rates: peak learning rates by name; ``args.learning_rate`` is that of the others.
    """
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for rate in (args.learning_rate, *rates.values()):
        share = rate / args.learning_rate
        groups.setdefault((rate, True), {"params": [], "weight_decay": args.weight_decay, SHARE: share, DECAYS: True})
        groups.setdefault((rate, False), {"params": [], "weight_decay": 0.0, SHARE: share})
    for name, parameter in parameters.items():
        kind = rates.get(name, args.learning_rate), whole[name].ndim >= 2
        groups[kind]["params"].append(parameter)
    return list(groups.values())


def make_adamw(
    local: Mapping[str, nn.Parameter],
    whole: Mapping[str, nn.Parameter],
    args: TrainingArguments,
    rates: Mapping[str, float],
) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019) on matrices only.

    The state is allocated here, so that a lack of memory shows at setup and a fresh optimizer can be saved like any
    other. Arguments as in ``parameter_groups``.
    """
    optimizer = torch.optim.AdamW(
        parameter_groups(local, whole, args, rates),
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
    falls so that step ``total_steps`` (or ``lr_decay_steps``), the first that is not taken, would have
    ``min_lr_ratio`` of it.
    """
    if args.lr_scheduler_type == "constant":
        return args.learning_rate
    warmup = args.warmup_steps or math.ceil(args.warmup_ratio * total_steps)
    if step < warmup:
        rate = args.learning_rate * (step + 1) / (warmup + 1)
        return rate + args.warmup_init_ratio * (args.learning_rate - rate)
    if args.lr_scheduler_type == "constant_with_warmup":
        return args.learning_rate
    if args.lr_scheduler_type == "inverse_sqrt":
        unit = max(1, warmup)
        return args.learning_rate * max(args.min_lr_ratio, math.sqrt(unit / (step - warmup + unit)))
    remaining = _remaining(args, step, warmup, args.lr_decay_steps or total_steps)
    return args.learning_rate * (args.min_lr_ratio + (1.0 - args.min_lr_ratio) * remaining)


def _remaining(args: TrainingArguments, step: int, warmup: int, end: int) -> float:
    """Share left at a step of the way from the peak (1) down to the least rate (0), where it is at ``end``."""
    if args.lr_scheduler_type == "wsd":
        fall = args.lr_wsd_decay_steps or math.ceil(end / 10)
        return _FALLS[args.lr_wsd_decay_style](min(1.0, max(0.0, (step - (end - fall)) / fall)))
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    if args.lr_scheduler_type == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * (2 * args.num_cycles) * progress))


_FALLS: dict[str, Callable[[float], float]] = {
    "linear": lambda r: 1.0 - r,
    "cosine": lambda r: 0.5 * (1.0 + math.cos(math.pi * r)),
    "exponential": lambda r: 2.0 * 0.5**r - 1.0,
    "minus_sqrt": lambda r: 1.0 - math.sqrt(r),
}
"""By style: from 1 at the start of the fall to 0 at its end."""


def weight_decay(args: TrainingArguments, step: int, total_steps: int) -> float:
    """The weight decay of optimizer step ``step`` (the first is 0); the last of the run has ``weight_decay_end``."""
    if args.weight_decay_end is None:
        return args.weight_decay
    done = min(1.0, step / max(1, total_steps - 1))
    done = done if args.weight_decay_incr_style == "linear" else 0.5 * (1.0 - math.cos(math.pi * done))
    return args.weight_decay + done * (args.weight_decay_end - args.weight_decay)


def set_rates(groups: Iterable[dict[str, Any]], rate: float, decay: float) -> None:
    """Sets the learning rate of an optimizer's groups, and the weight decay of those that have any (``DECAYS``)."""
    for group in groups:
        group["lr"] = rate * group.get(SHARE, 1.0)
        if group.get(DECAYS):
            group["weight_decay"] = decay
