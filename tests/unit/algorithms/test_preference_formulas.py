"""Every loss of preferences beside its paper's formula, written out here in float64: values and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.algorithms.preferences import build_preference_loss
from roll.algorithms.types import LossContext, TokenScores
from roll.configs.preference import PreferenceConfig, PreferenceLoss
from roll.data.batch import Batch

LENGTHS = ((5, 2), (7, 4), (4, 1), (9, 6), (6, 3), (5, 4))
"""Tokens of each row, and how many of them are its answer."""
MARGINS = (0.0, 0.3, 1.7)
ANCHOR = 0.4
"""Of KTO: how far the policy is from the reference."""


@dataclass
class Answer:
    """Log-probabilities of an answer's tokens under policy and reference."""

    policy: Tensor
    reference: Tensor

    @property
    def ratio(self) -> Tensor:
        return self.policy.sum() - self.reference.sum()

    @property
    def mean(self) -> Tensor:
        return self.policy.mean()


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def dpo(
    won: Answer, lost: Answer, beta: float, margin: float, label_smoothing: float = 0.0, offset: float = 0.0
) -> Tensor:
    """Rafailov et al. (2023), equation 7; smoothed as Mitchell (2023); offset as Amini et al. (2024)."""
    x = beta * won.ratio - beta * lost.ratio - margin - offset
    return -(1 - label_smoothing) * torch.log(sigmoid(x)) - label_smoothing * torch.log(sigmoid(-x))


def ipo(won: Answer, lost: Answer, tau: float) -> Tensor:
    """Azar et al. (2023), equation 17."""
    return (won.ratio - lost.ratio - 1 / (2 * tau)) ** 2


def slic(won: Answer, lost: Answer, beta: float) -> Tensor:
    """Liu et al. (2023), the hinge loss of rewards with a reference."""
    return torch.clamp(1 - beta * (won.ratio - lost.ratio), min=0)


def simpo(won: Answer, lost: Answer, beta: float, gamma: float, margin: float) -> Tensor:
    """Meng et al. (2024), equation 6."""
    return -torch.log(sigmoid(beta * won.mean - beta * lost.mean - gamma - margin))


def orpo(won: Answer, lost: Answer, weight: float) -> Tensor:
    """Hong et al. (2024), equation 7: odds of the geometric means of the tokens' probabilities."""

    def odds(answer: Answer) -> Tensor:
        likelihood = answer.policy.exp().prod() ** (1 / len(answer.policy))
        return likelihood / (1 - likelihood)

    return -weight * torch.log(sigmoid(torch.log(odds(won) / odds(lost))))


def kto(answer: Answer, good: bool, beta: float, desirable: float, undesirable: float) -> Tensor:
    """Ethayarajh et al. (2024), equation 8: lambda_y minus the value."""
    if good:
        return desirable - desirable * sigmoid(beta * (answer.ratio - ANCHOR))
    return undesirable - undesirable * sigmoid(beta * (ANCHOR - answer.ratio))


def per_token(answer: Answer) -> Answer:
    return Answer(answer.policy / len(answer.policy), answer.reference / len(answer.policy))


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "sigmoid": ({"beta": 0.3}, lambda won, lost, m: dpo(won, lost, 0.3, m)),
    "sigmoid, smoothed with an offset": (
        {"beta": 0.3, "label_smoothing": 0.1, "target_margin": 0.5},
        lambda won, lost, m: dpo(won, lost, 0.3, m, 0.1, 0.5),
    ),
    "sigmoid, per token": (
        {"beta": 2.0, "length_normalized": True},
        lambda won, lost, m: dpo(per_token(won), per_token(lost), 2.0, m),
    ),
    "sigmoid with RPO's term": (
        {"beta": 0.3, "nll_coef": 0.7},
        lambda won, lost, m: dpo(won, lost, 0.3, m) - 0.7 * won.mean,
    ),
    "ipo": ({"beta": 0.2}, lambda won, lost, m: ipo(won, lost, 0.2)),
    "ipo, per token": (
        {"beta": 0.2, "length_normalized": True},
        lambda won, lost, m: ipo(per_token(won), per_token(lost), 0.2),
    ),
    "hinge": ({"beta": 0.3, "nll_coef": 0.2}, lambda won, lost, m: slic(won, lost, 0.3) - 0.2 * won.mean),
    "simpo": ({"beta": 2.5, "target_margin": 1.4}, lambda won, lost, m: simpo(won, lost, 2.5, 1.4, m)),
    "orpo": ({"beta": 0.25, "nll_coef": 1.0}, lambda won, lost, m: orpo(won, lost, 0.25) - won.mean),
    "kto": (
        {"beta": 0.6, "desirable_weight": 1.3, "undesirable_weight": 0.8},
        lambda answer, good: kto(answer, good, 0.6, 1.3, 0.8),
    ),
}


def make() -> tuple[Batch, Tensor]:
    """Three pairs, or six answers, the better side of a pair not always first, and the policy's log-probabilities."""
    generator = torch.Generator().manual_seed(11)
    total = sum(length for length, _ in LENGTHS)
    mask_T = torch.cat([torch.arange(length) >= length - answer for length, answer in LENGTHS])
    reference_T, policy_T = (-2 * torch.rand(total, generator=generator).double() - 0.05 for _ in range(2))
    batch = Batch(
        torch.tensor([length for length, _ in LENGTHS]),
        torch.arange(total),
        mask_T,
        ref_logprobs_T=reference_T * mask_T,
        preferred_B=torch.tensor([True, False, False, True, True, False]),
    )
    return batch, policy_T * mask_T


def answers(batch: Batch, policy_T: Tensor) -> list[Answer]:
    assert batch.ref_logprobs_T is not None
    lengths = batch.lengths_B.tolist()
    columns = (column.split(lengths) for column in (policy_T, batch.ref_logprobs_T, batch.loss_mask_T))
    return [Answer(policy[mask], reference[mask]) for policy, reference, mask in zip(*columns, strict=True)]


def test_every_loss_has_a_case() -> None:
    assert {name.split()[0].strip(",") for name in CASES} == set(PreferenceLoss.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_paper(name: str) -> None:
    keys, formula = CASES[name]
    loss = name.split()[0].strip(",")
    config = PreferenceConfig(preference_loss=loss, **keys)
    assert not list(config.problems())
    batch, policy_T = make()
    margins = (0.0, 0.0, 0.0)
    own_T, expected_T = policy_T.clone().requires_grad_(), policy_T.clone().requires_grad_()
    said = answers(batch, expected_T)
    assert batch.preferred_B is not None
    good = batch.preferred_B.tolist()
    if loss == "kto":
        batch = batch.replace(anchor_B=torch.full((6,), ANCHOR))
        terms = [formula(answer, one) for answer, one in zip(said, good, strict=True)]
    else:
        batch = batch.replace(pair_B=torch.tensor([5, 5, 1, 1, 3, 3]))
        if loss in ("sigmoid", "simpo"):  # these read margins
            margins = MARGINS
            batch = batch.replace(target_B=torch.tensor(margins).repeat_interleave(2))
        pairs = [(row, row + 1) if good[row] else (row + 1, row) for row in (0, 2, 4)]
        terms = [formula(said[won], said[lost], m) for (won, lost), m in zip(pairs, margins, strict=True)]
    expected = torch.stack(terms).mean()
    expected.backward()

    found = build_preference_loss(config)(TokenScores(own_T), batch, LossContext.of(batch))
    found.loss.backward()
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-6)  # references and margins are float32
    torch.testing.assert_close(own_T.grad, expected_T.grad, rtol=1e-5, atol=1e-9)
    assert float(found.metrics["dpo/loss"]) == pytest.approx(expected.item(), rel=1e-6)
    if loss == "kto":
        of = {"dpo/reward": [0.6 * one.ratio for one in said], "dpo/logprob": [one.policy.sum() for one in said]}
        means = {metric: torch.stack(each).mean().item() for metric, each in of.items()}
        assert {metric: float(found.metrics[metric]) for metric in means} == pytest.approx(means, rel=1e-6)
