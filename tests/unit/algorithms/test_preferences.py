"""Losses of preferences against their formulas, and the same however the pairs are cut."""

import math
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from roll.algorithms.preferences import build_preference_loss, log_of_rest
from roll.algorithms.selection import best_and_worst, informative_pairs
from roll.algorithms.types import LossContext, LossOutput, TokenScores
from roll.configs.preference import PreferenceConfig, PreferenceLoss
from roll.data.batch import Batch
from roll.data.packing import take_micro_batch
from roll.models.scoring import split_batch
from tests.support.batches import batch_of
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
def test_the_gradient_does_not_depend_on_the_cutting(loss, cutting):
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


def loss_of(batch: Batch, scores: TokenScores, **keys: Any) -> LossOutput:
    return build_preference_loss(PreferenceConfig(**keys))(scores, batch, LossContext.of(batch))


def test_a_pair_says_what_its_formula_says():
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
    found = loss_of(batch, scores, preference_loss="hinge", beta=0.5)
    assert found.loss.item() == pytest.approx(1 - lead)
    kl = sum(math.exp(-d) - 1 + d for d in (-0.5, 1.0, 0.5, -0.5, 0.6)) / 5
    expected = {"margin": lead, "accuracy": 1, "chosen_reward": 0.3, "rejected_logprob": -2.5}
    expected |= {"chosen_nll": 0.8, "kl": kl}
    assert {name: float(found.metrics[f"dpo/{name}"]) for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("logprob", [-1e-30, -1e-9, -0.3, math.log(0.5), -2.0, -50.0, -1e4])
def test_the_rest_of_a_probability_is_exact_at_both_ends(logprob):
    value = torch.tensor(logprob, dtype=torch.float64, requires_grad=True)
    found = log_of_rest(value)
    expected = math.log(-math.expm1(logprob)) if logprob > -1 else math.log1p(-math.exp(logprob))
    assert found.item() == pytest.approx(expected, rel=1e-12, abs=1e-300)
    found.backward()
    assert torch.isfinite(value.grad)


def test_a_certain_answer_has_a_finite_loss():
    value = torch.zeros(1, requires_grad=True)
    log_of_rest(value).backward()
    assert torch.isfinite(log_of_rest(value)).all() and torch.isfinite(value.grad).all()


def test_what_is_missing_is_named():
    batch = make_preferences(0)
    scores = TokenScores(torch.zeros(batch.num_tokens))
    with pytest.raises(ValueError, match=r"Batch\.ref_logprobs_T"):
        loss_of(batch.replace(ref_logprobs_T=None), scores)
    with pytest.raises(ValueError, match="a pair of 1 rows, expected two"):
        loss_of(batch.replace(pair_B=torch.arange(10)), scores)


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
def test_keys_that_a_loss_does_not_read_are_refused(given, key):
    assert [problem.path for problem in PreferenceConfig(**given).problems()] == [key]


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
    reference_T, policy_T = (-2 * torch.rand(total, generator=generator).double() - 0.05 for _ in range(2))
    better = torch.tensor([True, False, False, True, True, False])
    rows = torch.arange(total).split([length for length, _ in LENGTHS])
    batch = batch_of(rows, [length - answer for length, answer in LENGTHS], preferred_B=better)
    mask_T = batch.loss_mask_T
    return batch.replace(ref_logprobs_T=reference_T * mask_T), policy_T * mask_T


def answers(batch: Batch, policy_T: Tensor) -> list[Answer]:
    lengths = batch.lengths_B.tolist()
    columns = (column.split(lengths) for column in (policy_T, batch.ref_logprobs_T, batch.loss_mask_T))
    return [Answer(policy[mask], reference[mask]) for policy, reference, mask in zip(*columns, strict=True)]


def test_every_loss_has_a_case():
    assert {name.split()[0].strip(",") for name in CASES} == set(get_args(PreferenceLoss))


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_paper(name):
    keys, formula = CASES[name]
    loss = name.split()[0].strip(",")
    config = PreferenceConfig(preference_loss=loss, **keys)
    assert not list(config.problems())
    batch, policy_T = make()
    margins = (0.0, 0.0, 0.0)
    own_T, expected_T = policy_T.clone().requires_grad_(), policy_T.clone().requires_grad_()
    said = answers(batch, expected_T)
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

    found = loss_of(batch, TokenScores(own_T), preference_loss=loss, **keys)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-6)  # references and margins are float32
    torch.testing.assert_close(own_T.grad, expected_T.grad, rtol=1e-5, atol=1e-9)
    assert float(found.metrics["dpo/loss"]) == pytest.approx(expected.item(), rel=1e-6)
    if loss == "kto":
        of = {"dpo/reward": [0.6 * one.ratio for one in said], "dpo/logprob": [one.policy.sum() for one in said]}
        means = {metric: torch.stack(each).mean().item() for metric, each in of.items()}
        assert {metric: float(found.metrics[metric]) for metric in means} == pytest.approx(means, rel=1e-6)


GROUPS = [7, 3, 7, 3, 7, 5, 5, 9, 2, 2]
SCORES = [0.5, 1.0, 0.0, 0.25, 1.0, 0.5, 0.5, 1.0, 1.0, 0.0]
ANSWERS = [[4, 5], [6], [7, 8, 9], [5, 5], [4], [6, 7], [7], [8], [4, 4], [4, 4]]
"""By hand: group 2 answers twice the same, 3 has rows 1 and 3, 5 is tied, 7 has rows 4 and 2, 9 has one answer."""


def rollout() -> Batch:
    batch = batch_of([[1, 2, *answer] for answer in ANSWERS], prompts=2)
    ref_logprobs_T = -torch.arange(batch.num_tokens, dtype=torch.float64) / 10
    return batch.replace(group_B=torch.tensor(GROUPS), scores_B=torch.tensor(SCORES), ref_logprobs_T=ref_logprobs_T)


def test_the_best_and_the_worst_of_each_group_are_a_pair():
    whole, rows = rollout(), [8, 9, 1, 3, 5, 6, 4, 2]
    places_T = torch.arange(whole.num_tokens).float()
    batch, metrics = best_and_worst(
        whole.replace(rewards_T=whole.loss_mask_T.float(), rollout_logprobs_T=places_T)  # travel with their rows
    )
    expected = whole.select(rows)
    told_T = expected.loss_mask_T & torch.tensor([False, True, False, True])[expected.rows_T // 2]
    assert torch.equal(batch.tokens_T, expected.tokens_T)
    assert torch.equal(batch.loss_mask_T, told_T) and torch.equal(batch.rewards_T > 0, told_T)
    assert torch.equal(batch.rollout_logprobs_T, places_T[whole.token_index(rows)])
    assert batch.pair_B.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.preferred_B.tolist() == [True, False] * 4
    assert informative_pairs(batch).tolist() == [[2, 3], [6, 7]]
    assert metrics == {"dpo/pair_frac": 0.5, "dpo/score_gap": pytest.approx((1 + 0.75 + 0 + 1) / 4)}


def test_what_has_no_pair_is_refused():
    with pytest.raises(ValueError, match="a group with at least two responses"):
        best_and_worst(rollout().select([0, 1, 7]))
    with pytest.raises(ValueError, match="scores_B"):
        best_and_worst(rollout().replace(scores_B=None))
