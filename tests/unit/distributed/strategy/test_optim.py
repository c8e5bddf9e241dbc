"""Learning-rate schedules have their documented values; only matrices decay."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from roll.configs.training import TrainingArguments
from roll.distributed.strategy.training.optim import learning_rate, make_adamw


def rates(total_steps: int, **kwargs: object) -> list[float]:
    args = TrainingArguments.model_validate({"learning_rate": 8.0, **kwargs})
    return [learning_rate(args, step, total_steps) for step in range(total_steps + 2)]


def test_constant_is_level() -> None:
    assert rates(3, lr_scheduler_type="constant") == [8.0] * 5


def test_warmup_rises_in_equal_parts_to_a_level() -> None:
    assert rates(5, lr_scheduler_type="constant_with_warmup", warmup_steps=3) == [2, 4, 6, 8, 8, 8, 8]


def test_linear_falls_to_the_minimum_after_the_last_step() -> None:
    assert rates(6, lr_scheduler_type="linear", warmup_steps=1, min_lr_ratio=0.0) == pytest.approx(
        [4, 8, 6.4, 4.8, 3.2, 1.6, 0, 0]
    )
    assert rates(4, lr_scheduler_type="linear", min_lr_ratio=0.5) == [8, 7, 6, 5, 4, 4]


def test_cosine_is_half_a_cosine() -> None:
    expected = [8 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 4))) for step in range(5)]
    assert rates(4, lr_scheduler_type="cosine", min_lr_ratio=0.1) == pytest.approx([*expected, 0.8])


def test_warmup_ratio_counts_all_optimizer_steps() -> None:
    assert rates(10, lr_scheduler_type="constant_with_warmup", warmup_ratio=0.25)[:4] == [2, 4, 6, 8]


def test_norms_and_biases_do_not_decay() -> None:
    local = {"matrix": nn.Parameter(torch.ones(2, 2)), "norm": nn.Parameter(torch.ones(3))}
    args = TrainingArguments(learning_rate=0.1, weight_decay=0.5)
    optimizer = make_adamw(local, local, args)
    for parameter in local.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(local["matrix"], torch.full((2, 2), 0.95))
    assert torch.equal(local["norm"], torch.ones(3))
