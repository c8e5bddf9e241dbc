"""Losses of preferences against their formulas, and the same however the pairs are cut."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from roll.algorithms.preferences import build_preference_loss, log_of_rest
from roll.algorithms.types import LossContext, TokenScores
from roll.configs.preference import PreferenceConfig
from roll.data.batch import Batch
from roll.data.packing import take_micro_batch
from roll.models.scoring import split_batch
from tests.support.harness import PREFERENCES, make_labelled, make_preferences

CUTTINGS = {
    "one sample each": {"max_sequences": 1, "max_tokens": None},
    "by tokens": {"max_sequences": None, "max_tokens": 60},
    "packed": {"max_sequences": None, "max_tokens": 45, "packing": True},
    "shared": {"max_sequences": 2, "max_tokens": None, "sharing": True},
}


def total(config: PreferenceConfig, batch: Batch, parts: list[Batch], logprobs: list[Tensor]) -> dict[str, float]:
    """Sums of the shares of micro-batches; their gradient is left in ``logprobs``."""
    loss_fn, context = build_preference_loss(config), LossContext.of(batch)
    outputs = [loss_fn(TokenScores(x), part, context) for x, part in zip(logprobs, parts, strict=True)]
    torch.stack([output.loss for output in outputs]).sum().backward()
    return {name: sum(float(output.metrics[name]) for output in outputs) for name in outputs[0].metrics}


@pytest.mark.parametrize("cutting", CUTTINGS)
@pytest.mark.parametrize("loss", PREFERENCES)
def test_the_gradient_does_not_depend_on_the_cutting(loss: str, cutting: str) -> None:
    batch = make_labelled(0) if loss == "kto" else make_preferences(0)
    generator = torch.Generator().manual_seed(3)
    scores_T = (-3 * torch.rand(batch.num_tokens, generator=generator).double() - 0.01) * batch.loss_mask_T
    whole = scores_T.clone().requires_grad_()
    expected = total(PREFERENCES[loss], batch, [batch], [whole])

    groups = split_batch(batch, **CUTTINGS[cutting])
    assert len(groups) > 1
    places = [batch.token_index(group) for group in groups] + [torch.zeros(2, dtype=torch.int64)]
    parts = [take_micro_batch(batch, groups, index) for index in range(len(groups) + 1)]  # the last is a placeholder
    pieces = [scores_T[place].clone().requires_grad_() for place in places]
    assert total(PREFERENCES[loss], batch, parts, pieces) == pytest.approx(expected, rel=1e-6)
    gradient_T = torch.zeros_like(scores_T)
    for place, piece in zip(places[:-1], pieces[:-1], strict=True):
        gradient_T[place] = piece.grad
    torch.testing.assert_close(gradient_T, whole.grad)
    assert not pieces[-1].grad.any()


def test_a_pair_says_what_its_formula_says() -> None:
    batch = Batch(
        torch.tensor([3, 4]),
        torch.arange(7),
        torch.tensor([0, 1, 1, 0, 1, 1, 1]).bool(),
        ref_logprobs_T=torch.tensor([0, -1.0, -2, 0, -1, -1, -1]),
        pair_B=torch.tensor([8, 8]),
        preferred_B=torch.tensor([False, True]),
    )
    scores = TokenScores(torch.tensor([0, -1.5, -1.0, 0, -0.5, -1.5, -0.4], dtype=torch.float64))
    lead = 0.5 * ((-2.4 + 3) - (-2.5 + 3))
    found = build_preference_loss(PreferenceConfig(preference_loss="hinge", beta=0.5))(
        scores, batch, LossContext.of(batch)
    )
    assert found.loss.item() == pytest.approx(1 - lead)
    assert found.metrics["dpo/margin"] == pytest.approx(lead) and found.metrics["dpo/accuracy"] == 1
    assert found.metrics["dpo/chosen_reward"] == pytest.approx(0.3)
    assert found.metrics["dpo/rejected_logprob"] == pytest.approx(-2.5)
    assert found.metrics["dpo/chosen_nll"] == pytest.approx(0.8)
    differences = (-0.5, 1.0, 0.5, -0.5, 0.6)
    assert found.metrics["dpo/kl"] == pytest.approx(sum(math.exp(-d) - 1 + d for d in differences) / 5)


@pytest.mark.parametrize("logprob", [-1e-30, -1e-9, -0.3, math.log(0.5), -2.0, -50.0, -1e4])
def test_the_rest_of_a_probability_is_exact_at_both_ends(logprob: float) -> None:
    value = torch.tensor(logprob, dtype=torch.float64, requires_grad=True)
    found = log_of_rest(value)
    expected = math.log(-math.expm1(logprob)) if logprob > -1 else math.log1p(-math.exp(logprob))
    assert found.item() == pytest.approx(expected, rel=1e-12, abs=1e-300)
    found.backward()
    assert value.grad is not None and torch.isfinite(value.grad)


def test_a_certain_answer_has_a_finite_loss() -> None:
    value = torch.zeros(1, requires_grad=True)
    log_of_rest(value).backward()
    assert torch.isfinite(log_of_rest(value)).all() and torch.isfinite(value.grad).all()


def test_what_is_missing_is_named() -> None:
    batch = make_preferences(0)
    loss = build_preference_loss(PreferenceConfig())
    scores = TokenScores(torch.zeros(batch.num_tokens))
    with pytest.raises(ValueError, match=r"Batch\.ref_logprobs_T"):
        loss(scores, batch.replace(ref_logprobs_T=None), LossContext.of(batch))
    with pytest.raises(ValueError, match="a pair of 1 rows, expected two"):
        loss(scores, batch.replace(pair_B=torch.arange(10)), LossContext.of(batch))


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"preference_loss": "hinge", "label_smoothing": 0.1}, "label_smoothing"),
        ({"preference_loss": "kto", "nll_coef": 1.0}, "nll_coef"),
        ({"preference_loss": "simpo", "length_normalized": True}, "length_normalized"),
        ({"preference_loss": "sigmoid", "desirable_weight": 2.0}, "desirable_weight"),
        ({"preference_loss": "orpo"}, "nll_coef"),
    ],
)
def test_keys_that_a_loss_does_not_read_are_refused(given: dict, key: str) -> None:
    assert [problem.path for problem in PreferenceConfig(**given).problems()] == [key]
