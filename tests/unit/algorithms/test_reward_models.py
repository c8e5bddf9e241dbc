"""Losses of reward models against their formulas; calibration."""

from __future__ import annotations

import math

import pytest
import torch

from roll.algorithms.reward_models import build_reward_loss, calibration_error
from roll.algorithms.types import LossContext, TokenScores
from roll.configs.reward_training import RewardLossConfig
from roll.data.batch import Batch
from roll.data.packing import take_micro_batch

VALUES = torch.tensor([9.0, 9, 1.5, 9, 0.5, 9, 9, -1.0, 9, 2.0]).double()
BATCH = Batch(
    torch.tensor([3, 2, 3, 2]),
    torch.arange(10),
    torch.tensor([0, 0, 1, 0, 1, 0, 0, 1, 0, 1]).bool(),
    pair_B=torch.tensor([4, 4, 7, 7]),
    preferred_B=torch.tensor([True, False, True, False]),
    target_B=torch.tensor([0.25, 0.25, 0.0, 0.0]),
    returns_T=torch.tensor([0, 0, 1.0, 0, 0, 0, 0, 0, 0, 0.5]),
)


def run(batch: Batch, **keys: float | str) -> dict[str, float]:
    context = LossContext.of(BATCH)
    found = build_reward_loss(RewardLossConfig(**keys))(TokenScores(values_T=VALUES), batch, context)
    return {"total": float(found.loss)} | {name: float(value) for name, value in found.metrics.items()}


def test_pairs_lead_by_their_margin() -> None:
    found = run(BATCH, reward_loss="bradley_terry", center_coef=0.1)
    leads = (1.5 - 0.5 - 0.25, -1.0 - 2.0)
    expected = sum(math.log1p(math.exp(-lead)) for lead in leads) / 2 + 0.1 * (2.0**2 + 1.0**2) / 2
    assert found["total"] == pytest.approx(expected)
    assert found["rm/accuracy"] == 0.5 and found["rm/margin"] == pytest.approx((1.0 - 3.0) / 2)
    assert found["rm/chosen_score"] == pytest.approx(0.25)


def test_ends_meet_their_targets() -> None:
    errors = (0.5, 0.5, -1.0, 1.5)
    found = run(BATCH, reward_loss="regression")
    assert found["total"] == pytest.approx(sum(error**2 for error in errors) / 4)
    assert found["rm/absolute_error"] == pytest.approx(3.5 / 4)
    labels = ((1.5, 1.0), (0.5, 0.0), (-1.0, 0.0), (2.0, 0.5))
    expected = sum(y * math.log1p(math.exp(-r)) + (1 - y) * math.log1p(math.exp(r)) for r, y in labels) / 4
    found = run(BATCH, reward_loss="process")
    assert found["total"] == pytest.approx(expected) and found["rm/accuracy"] == 0.5


@pytest.mark.parametrize("loss", ["bradley_terry", "regression", "process"])
def test_a_placeholder_adds_nothing(loss: str) -> None:
    blank = take_micro_batch(BATCH, [], 0)
    values = torch.ones(2, requires_grad=True)
    found = build_reward_loss(RewardLossConfig(reward_loss=loss))(
        TokenScores(values_T=values), blank, LossContext.of(BATCH)
    )
    found.loss.backward()
    assert found.loss == 0 and not values.grad.any()


def test_calibration_is_the_distance_of_shares_and_probabilities() -> None:
    stated = torch.tensor([0.05, 0.05, 0.95, 0.95, 0.95, 0.95, 1.0, 0.61])
    right = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1]).bool()
    expected = (abs(0.1 - 0) + abs(4 * 0.95 + 1 - 4) + abs(0.61 - 1)) / 8
    assert calibration_error(stated, right) == pytest.approx(expected)
    assert calibration_error(torch.tensor([1.0, 0.0]), torch.tensor([1, 0])) == 0
