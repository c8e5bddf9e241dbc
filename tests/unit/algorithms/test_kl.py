"""KL estimators, their controller, and the train/infer mismatch metrics."""

import math

import pytest
import torch

from roll.algorithms.correction import mismatch_metrics
from roll.algorithms.kl import KL_ESTIMATORS, KlController, kl_divergence
from roll.configs.algorithm import AlgorithmConfig, KlPenalty
from tests.support.algorithms_batches import random_episodes, to_batch


def oracle(kind: str, d: float) -> float:
    kind = kind.removesuffix("+")
    if kind in ("kl", "k1"):
        return d
    if kind == "abs":
        return abs(d)
    if kind in ("mse", "k2"):
        return d * d / 2
    return min(max(math.exp(min(max(-d, -20.0), 20.0)) + d - 1, -10.0), 10.0)


@pytest.mark.parametrize("kind", KL_ESTIMATORS.names())
def test_estimators_follow_their_formula_also_far_out(kind):
    d = torch.tensor([-1e4, -25.0, -3.0, -0.1, 0.0, 0.1, 3.0, 9.0, 25.0, 1e4], dtype=torch.float64)
    got = kl_divergence(d - 1.5, torch.full_like(d, -1.5), kind)
    assert got.tolist() == pytest.approx([oracle(kind, x) for x in d.tolist()], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", [kind for kind in KL_ESTIMATORS.names() if kind.endswith("+")])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind):
    logprobs = torch.tensor([-0.3, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.5, -0.4, -9.5], dtype=torch.float64)
    kl_divergence(logprobs, ref, kind).sum().backward()
    torch.testing.assert_close(logprobs.grad, logprobs.detach() - ref)


@pytest.mark.parametrize("kind", [kind for kind in KL_ESTIMATORS.names() if not kind.endswith("+")])
def test_gradients_flow_to_the_policy(kind):
    logprobs = torch.tensor([-0.3, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.5, -0.4, -2.5], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_divergence(x, ref, kind), (logprobs,))


def test_k1_and_k3_estimate_the_true_divergence_and_every_documented_name_is_registered():
    torch.manual_seed(0)
    p, q = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    true = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):  # their expectation under p, taken exactly
        assert (p.exp() * kl_divergence(p, q, kind)).sum().item() == pytest.approx(true.item(), rel=1e-9)
    # "full" is no estimate from one token: the strategy computes it.
    assert {*KL_ESTIMATORS.names(), "full"} == set(KlPenalty.__args__)  # type: ignore[attr-defined]


def test_a_fixed_coefficient_stays_that_of_the_configuration_also_in_a_resumed_run():
    controller = KlController.of(AlgorithmConfig(add_token_level_kl=True, init_kl_coef=0.3).kl.reward)
    controller.update(100.0, 10_000)
    assert controller.coef == 0.3
    saved = KlController.of(AlgorithmConfig(add_token_level_kl=True, init_kl_coef=0.3).kl.reward).state_dict()
    controller = KlController.of(AlgorithmConfig(add_token_level_kl=True, init_kl_coef=0.1).kl.reward)
    controller.load_state_dict(saved)
    assert controller.coef == 0.1


def test_an_adaptive_coefficient_moves_towards_the_target_by_bounded_steps():
    config = AlgorithmConfig(add_token_level_kl=True, init_kl_coef=0.1, target_kl=2.0, kl_horizon=100)
    controller = KlController.of(config.kl.reward)
    controller.update(2.2, 50)  # 10 % above
    assert controller.coef == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    controller.update(1000.0, 50)  # bounded at 20 %
    assert controller.coef == pytest.approx(0.105 * (1 + 0.2 * 0.5))
    controller.update(0.0, 50)
    assert controller.coef == pytest.approx(0.105 * 1.1 * 0.9)
    restored = KlController.of(config.kl.reward)
    restored.load_state_dict(controller.state_dict())
    assert restored.coef == controller.coef


def test_a_step_of_more_sequences_than_the_horizon_moves_the_coefficient_by_a_fifth_at_most():
    controller = KlController(0.1, target=0.1, horizon=100)
    for kl, coef in ((0.01, 0.08), (5.0, 0.096), (0.1, 0.096)):
        controller.update(kl, 1024)
        assert controller.coef == pytest.approx(coef)


def test_the_coefficient_of_the_loss_is_steered_by_its_own_target():
    config = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_target=2.0, kl_horizon=100)
    controller = KlController.of(config.kl.loss)
    controller.update(2.2, 50)
    assert controller.coef == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    fixed = KlController.of(config.kl.reward)
    fixed.update(2.2, 50)
    assert config.kl.reward is None and fixed.coef == 0


def test_mismatch_compares_the_two_engines_on_sampled_tokens():
    batch = to_batch(random_episodes(7, max_episodes=10), history=False)
    rows = zip(
        batch.loss_mask_T.tolist(), batch.rollout_logprobs_T.tolist(), batch.old_logprobs_T.tolist(), strict=True
    )
    d = [rollout - old for on, rollout, old in rows if on]
    metrics = mismatch_metrics(batch)
    assert metrics["mismatch/logprob_diff_mean"] == pytest.approx(sum(map(abs, d)) / len(d))
    assert metrics["mismatch/logprob_diff_max"] == pytest.approx(max(map(abs, d)))
    assert metrics["mismatch/k3"] == pytest.approx(sum(oracle("k3", x) for x in d) / len(d))
    batch = to_batch(random_episodes(7), history=False)
    assert set(mismatch_metrics(batch.replace(old_logprobs_T=batch.rollout_logprobs_T)).values()) == {0.0}
    assert mismatch_metrics(batch.replace(old_logprobs_T=None)) == {}
