"""Divergences from a teacher against their definitions, one probability at a time, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from roll.algorithms.quantities import divergence_addends
from roll.configs.divergence import DivergenceConfig

SETTINGS: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "reverse_kl": {},
    "js_divergence": {"jsd_beta": 0.3},
    "skewed_forward_kl": {"skew_lambda": 0.2},
    "skewed_reverse_kl": {"skew_lambda": 0.2},
}


def config(objective: str, **keys: float) -> DivergenceConfig:
    return DivergenceConfig(kd_objective=objective, **(SETTINGS[objective] | keys))


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def mix(p: list[float], q: list[float], share: float) -> list[float]:
    return [share * a + (1 - share) * b for a, b in zip(p, q, strict=True)]


def by_hand(objective: str, t: list[float], s: list[float]) -> float:
    middle = mix(t, s, 0.3)
    return {
        "forward_kl": kl(t, s),
        "reverse_kl": kl(s, t),
        "js_divergence": 0.3 * kl(t, middle) + 0.7 * kl(s, middle),
        "skewed_forward_kl": kl(t, mix(t, s, 0.2)),
        "skewed_reverse_kl": kl(s, mix(s, t, 0.2)),
    }[objective]


def distributions(seed: int, count: int = 4, width: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, count, width, generator=generator, dtype=torch.float64)
    teacher, student = logits.log_softmax(-1)
    return teacher, student


@pytest.mark.parametrize("objective", SETTINGS)
def test_they_are_what_their_papers_say(objective: str) -> None:
    teacher, student = distributions(1)
    found = divergence_addends(teacher, student, config(objective)).sum(-1)
    expected = [by_hand(objective, t.tolist(), s.tolist()) for t, s in zip(teacher.exp(), student.exp(), strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert all(value > 0 for value in expected)
    assert divergence_addends(teacher, teacher, config(objective)).sum(-1).tolist() == pytest.approx([0] * 4, abs=1e-14)


@pytest.mark.parametrize("objective", SETTINGS)
def test_gradients_are_those_of_small_differences(objective: str) -> None:
    teacher, _ = distributions(2, count=1, width=4)
    logits = torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)

    def value(student_logits: torch.Tensor) -> torch.Tensor:
        return divergence_addends(teacher, student_logits.log_softmax(-1), config(objective)).sum()

    assert torch.autograd.gradcheck(value, (logits,))


def test_limits() -> None:
    teacher, student = distributions(4)
    forward, reverse = (
        divergence_addends(teacher, student, config(name)).sum(-1) for name in ("forward_kl", "reverse_kl")
    )
    for beta, limit in ((1e-6, forward), (1 - 1e-6, reverse)):  # of JSD / b and JSD / (1 - b)
        found = divergence_addends(teacher, student, config("js_divergence", jsd_beta=beta)).sum(-1)
        torch.testing.assert_close(found / min(beta, 1 - beta), limit, rtol=1e-3, atol=0)
    for name, limit in (("skewed_forward_kl", forward), ("skewed_reverse_kl", reverse)):
        found = divergence_addends(teacher, student, config(name, skew_lambda=0.0)).sum(-1)
        torch.testing.assert_close(found, limit, rtol=1e-12, atol=0)
    half = [
        divergence_addends(p, q, config("js_divergence", jsd_beta=0.5)).sum(-1)
        for p, q in ((teacher, student), (student, teacher))
    ]
    torch.testing.assert_close(*half, rtol=1e-12, atol=0)
    assert float(half[0].max()) < math.log(2)


def test_impossible_outcomes_add_nothing() -> None:
    """An id that both mask (``comparison.MASKED``) counts for nothing, and its gradient is no NaN."""
    teacher = torch.tensor([[0.5, 0.5, 0.0]]).log().clamp_min(-1e30)
    logits = torch.tensor([[0.3, -0.2, -1e30]], requires_grad=True)
    for objective in SETTINGS:
        found = divergence_addends(teacher, logits.log_softmax(-1), config(objective)).sum()
        (gradient,) = torch.autograd.grad(found, logits)
        alone = divergence_addends(teacher[:, :2], logits[:, :2].log_softmax(-1), config(objective)).sum()
        assert found.item() == pytest.approx(alone.item(), rel=1e-6)
        assert gradient.isfinite().all() and gradient[0, 2] == 0
