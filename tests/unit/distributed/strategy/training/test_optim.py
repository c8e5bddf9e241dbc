"""Learning-rate schedules have their documented values; only matrices decay."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from transformers import get_inverse_sqrt_schedule

from roll.configs.worker import TrainingArguments
from roll.distributed.strategy.fsdp2.muon import COEFFICIENTS, STEPS, orthogonalise
from roll.distributed.strategy.training.optim import learning_rate, make_adamw, set_rates, weight_decay

WARMUP, LINEAR = {"lr_scheduler_type": "constant_with_warmup"}, {"lr_scheduler_type": "linear"}


def rates(total_steps: int, **kwargs: object) -> list[float]:
    args = TrainingArguments.model_validate({"learning_rate": 8.0, **kwargs})
    return [learning_rate(args, step, total_steps) for step in range(total_steps + 2)]


@pytest.mark.parametrize(
    ("steps", "keys", "expected"),
    [
        (3, {"lr_scheduler_type": "constant"}, [8.0] * 5),
        (10, WARMUP | {"warmup_ratio": 0.25}, [2, 4, 6, 8, 8]),
        (5, WARMUP | {"warmup_steps": 3}, [2, 4, 6, 8, 8, 8, 8]),
        (5, WARMUP | {"warmup_steps": 3, "warmup_init_ratio": 0.5}, [5, 6, 7, 8, 8, 8, 8]),
        (6, LINEAR | {"warmup_steps": 1, "min_lr_ratio": 0.0}, [4, 8, 6.4, 4.8, 3.2, 1.6, 0, 0]),
        (4, LINEAR | {"min_lr_ratio": 0.5}, [8, 7, 6, 5, 4, 4]),
        (6, LINEAR | {"lr_decay_steps": 4}, [8, 6, 4, 2, 0, 0, 0, 0]),
    ],
)
def test_rates_follow_their_schedule(steps, keys, expected):
    assert rates(steps, **keys)[: len(expected)] == pytest.approx(expected)


def test_a_cosine_has_as_many_half_periods_as_asked_for():
    expected = [8 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 4))) for step in range(5)]
    assert rates(4, lr_scheduler_type="cosine", min_lr_ratio=0.1) == pytest.approx([*expected, 0.8])
    expected = [4 * (1 + math.cos(math.pi * 3 * step / 6)) for step in range(7)]
    assert rates(6, lr_scheduler_type="cosine", num_cycles=1.5) == pytest.approx([*expected, expected[-1]])
    assert expected[2] == pytest.approx(0) and expected[4] == pytest.approx(8)
    args = TrainingArguments(lr_scheduler_type="constant", lr_decay_steps=4, num_cycles=2)
    assert [problem.path for problem in args.problems()] == ["lr_decay_steps", "num_cycles"]


def test_inverse_square_root_is_that_of_transformers():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=8.0)
    theirs = get_inverse_sqrt_schedule(optimizer, num_warmup_steps=4)
    found = rates(20, lr_scheduler_type="inverse_sqrt", warmup_steps=4, min_lr_ratio=0.5)
    for step in range(4, 20):
        theirs.last_epoch = step
        assert found[step] == pytest.approx(max(4.0, 8.0 * theirs.lr_lambdas[0](step)))
    assert found[:5] == pytest.approx([1.6, 3.2, 4.8, 6.4, 8.0])


def test_wsd_is_level_and_falls_at_the_end():
    falls = {
        "linear": [1, 0.75, 0.5, 0.25, 0],
        "cosine": [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0],
        "exponential": [1, 2**0.75 - 1, 2**0.5 - 1, 2**0.25 - 1, 0],
        "minus_sqrt": [1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0],
    }
    for style, fall in falls.items():
        keys = {"lr_scheduler_type": "wsd", "lr_wsd_decay_steps": 4, "lr_wsd_decay_style": style}
        expected = [4, 8, 8, *(8 * (0.5 + 0.5 * left) for left in fall), 4]
        assert rates(7, **keys, warmup_steps=1, min_lr_ratio=0.5) == pytest.approx(expected)
    assert rates(20, lr_scheduler_type="wsd")[17:21] == pytest.approx([8, 8, 4, 0]), "a tenth"


def test_weight_decay_goes_to_its_end():
    def decays(**keys: object) -> list[float]:
        args = TrainingArguments.model_validate({"weight_decay": 0.1, **keys})
        return [weight_decay(args, step, 5) for step in range(6)]

    assert decays() == [0.1] * 6
    assert decays(weight_decay_end=0.5) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    rising = [0.1, 0.1 + 0.2 * (1 - 0.5**0.5), 0.3, 0.1 + 0.2 * (1 + 0.5**0.5), 0.5, 0.5]
    assert decays(weight_decay_end=0.5, weight_decay_incr_style="cosine") == pytest.approx(rising)


@pytest.mark.parametrize("changed", [False, True])
def test_only_matrices_decay_by_the_given_or_by_a_changed_weight_decay(changed):
    local = {"matrix": nn.Parameter(torch.ones(2, 2)), "norm": nn.Parameter(torch.ones(3))}
    args = TrainingArguments() if changed else TrainingArguments(learning_rate=0.1, weight_decay=0.5)
    optimizer = make_adamw(local, local, args, {})
    if changed:
        set_rates(optimizer.param_groups, 0.1, 0.5)
    for parameter in local.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(local["matrix"], torch.full((2, 2), 0.95))
    assert torch.equal(local["norm"], torch.ones(3))


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 4)])
def test_singular_values_go_through_the_quintic(shape):
    """The iteration multiplies matrices; the oracle puts the values of an SVD into ``a s + b s³ + c s⁵`` in float64."""
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    left, values, right = np.linalg.svd(matrix.numpy(), full_matrices=False)
    values = values / np.linalg.norm(values)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        values = a * values + b * values**3 + c * values**5
    found = orthogonalise(matrix)
    np.testing.assert_allclose(found.numpy(), left @ np.diag(values) @ right, rtol=1e-9, atol=1e-12)
    assert found.is_contiguous() and values.min() > 0.6 and values.max() < 1.3
    assert torch.allclose(orthogonalise(matrix.bfloat16()).double(), found, atol=0.05)


def test_no_gradient_moves_nothing():
    assert torch.equal(orthogonalise(torch.zeros(3, 4)), torch.zeros(3, 4))
