"""Policy-gradient losses: value and gradient by definition in float64, splits, and what each parameter changes."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms.losses import build_policy_loss
from roll.algorithms.policy_losses import POLICY_LOSSES, PolicyTokens
from roll.algorithms.types import LossContext, TokenScores
from roll.configs.algorithm import AlgorithmConfig
from roll.configs.policy_loss import PG_VARIANTS, LossAggMode
from roll.data.batch import Batch
from tests.support.algorithms_batches import aggregate, assert_any_split_adds_up, context, gradient, make_batch, rows_of
from tests.support.examples import examples

seeds = st.integers(0, 2**32 - 1)
MODES = list(LossAggMode.__args__)  # type: ignore[attr-defined]
PARAMETERS: dict[str, dict[str, Any]] = {
    "cispo": {"cispo_epsilon_low": 0.3, "cispo_epsilon_high": 0.2, "cispo_use_unified_mask": True},
    "clip_cov": {"pg_clip": 0.3, "dual_clip_loss": True, "dual_clip_c": 1.5},
    "dppo_kl": {"use_pg_clip_range": True, "pg_clip_low": 0.05, "pg_clip_high": 0.1},
    "dppo_tv": {"use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.3},
    "gmpo": {"use_pg_clip_range": True, "pg_clip_low": 0.3, "pg_clip_high": 0.5},
    "kimi15": {"kimi15_tau": 0.7},
    "kl_cov": {"ppo_kl_coef": 0.3},
    "ppo": {"use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.3},
    "sapo": {"sapo_tau_pos": 0.8, "sapo_tau_neg": 1.7},
    "tis": {"tis_lower_bound": 0.6, "tis_upper_bound": 1.3},
    "topr": {"topr_positive_weight": 0.7, "topr_negative_weight": 0.4},
    "vanilla": {},
}
WITH_RATIO = ["cispo", "clip_cov", "kl_cov", "ppo", "sapo", "tis", "topr"]
CASES = [(name, "token") for name in PG_VARIANTS] + [(name, unit) for unit in ("segment", "seq") for name in WITH_RATIO]


def keys_of(name: str, sampling: str, **more: Any) -> dict[str, Any]:
    return {"pg_variant": name, "importance_sampling": sampling, **PARAMETERS[name], **more}


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def oracle_token(name: str, lp: float, old: float, adv: float, ratio: float) -> tuple[float, float]:
    """Loss of one token and its derivative by log p."""
    weight = None
    if name == "vanilla":
        weight = 1.0
    if name == "tis":
        weight = clip(ratio, 0.6, 1.3)
    if name == "topr":
        weight = 0.7 if adv > 0 else 0.4 * min(ratio, 1.0)
    if name == "cispo":
        weight = clip(ratio, 0.7, 1.2)
        if (adv > 0 and ratio > 1.2) or (adv <= 0 and ratio < 0.7):
            weight = 0.0
    if weight is not None:
        return -weight * adv * lp, -weight * adv
    if name == "kimi15":
        return -adv * lp + 0.35 * (lp - old) ** 2, -adv + 0.7 * (lp - old)
    if name.startswith("dppo"):
        p, q = math.exp(lp), math.exp(old)
        if name == "dppo_tv":
            distance, low, high = abs(p - q), 0.1, 0.3
        else:
            other_p, other_q = -math.expm1(min(lp, -1e-7)), -math.expm1(min(old, -1e-7))
            distance = q * (old - lp) + (1 - q) * math.log(other_q / other_p)
            low, high = 0.05, 0.1
        too_far = (ratio > 1 and distance > high) if adv > 0 else (ratio < 1 and distance > low)
        return (0.0, 0.0) if too_far else (-adv * ratio, -adv * ratio)
    if name == "sapo":
        tau = 0.8 if adv > 0 else 1.7
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -adv * 4 / tau * gate, -adv * 4 * gate * (1 - gate) * ratio
    low, high = (0.3, 0.3) if name == "clip_cov" else (0.1, 0.3)
    loss, slope = -adv * ratio, -adv * ratio
    if -adv * clip(ratio, 1 - low, 1 + high) > loss:
        loss, slope = -adv * clip(ratio, 1 - low, 1 + high), 0.0
    if name == "clip_cov" and adv < 0 and loss > -1.5 * adv:
        loss, slope = -1.5 * adv, 0.0
    return loss, slope


def turns_of(batch: Batch) -> list[list[int]]:
    """Token indices of each turn of each row that count."""
    turns: dict[tuple[int, int], list[int]] = {}
    for i in batch.loss_mask_T.nonzero().flatten().tolist():
        turns.setdefault((int(batch.rows_T[i]), int(batch.turn_T[i])), []).append(i)
    return list(turns.values())


def oracle(
    name: str, sampling: str, scores: TokenScores, batch: Batch, rows: list[list[int]]
) -> tuple[dict[int, float], dict[int, float]]:
    """Losses of all tokens, and the derivative of their plain sum by each log p."""
    losses, slopes = {}, {}
    for row in rows:
        lp, old, adv = (
            [column[i].item() for i in row] for column in (scores.logprobs_T, batch.old_logprobs_T, batch.advantages_T)
        )
        d = [x - y for x, y in zip(lp, old, strict=True)]
        if name == "gmpo" and row:
            mean_adv = sum(adv) / len(row)
            kept = [min(x, 0.5) if mean_adv > 0 else max(x, -0.3) for x in d]
            loss = -mean_adv * math.exp(sum(kept) / len(row))
            for i, x, y in zip(row, d, kept, strict=True):
                losses[i], slopes[i] = loss, loss if x == y else 0.0  # n tokens share it, each with a slope of 1 / n
            continue
        for k, i in enumerate(row):
            ratio = math.exp(d[k] if sampling == "token" else sum(d) / len(d))
            if name == "kl_cov":
                marked = bool(batch.marked_T[i])
                losses[i] = -adv[k] * ratio + 0.3 * abs(d[k]) * marked
                slopes[i] = -adv[k] * ratio + 0.3 * math.copysign(1.0, d[k]) * marked
                continue
            losses[i], slopes[i] = oracle_token(name, lp[k], old[k], adv[k], ratio)
    return losses, slopes


@examples(15)
@given(seed=seeds, mode=st.sampled_from(MODES), history=st.booleans())
@pytest.mark.parametrize(("name", "sampling"), CASES)
def test_loss_and_gradient_are_their_definition(
    name: str, sampling: str, seed: int, mode: LossAggMode, history: bool
) -> None:
    batch, scores = make_batch(seed, history)
    if not batch.loss_mask_T.any():
        return
    config = AlgorithmConfig(loss_agg_mode=mode, **keys_of(name, sampling))
    assert not list(config.problems())
    rows = rows_of(batch, batch.loss_mask_T)
    losses, slopes = oracle(name, sampling, scores, batch, turns_of(batch) if sampling == "segment" else rows)
    got = build_policy_loss(config)(scores, batch, context(batch)).loss.item()
    assert got == pytest.approx(aggregate(losses, rows, mode), rel=1e-9, abs=1e-9)
    config = AlgorithmConfig(loss_agg_mode="token-mean", **keys_of(name, sampling))
    _, exact = gradient(build_policy_loss(config), scores, batch, context(batch))
    expected = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for i, slope in slopes.items():
        expected[i] = slope / len(slopes)
    torch.testing.assert_close(exact[0], expected, rtol=1e-8, atol=1e-10)


@examples(10)
@given(seed=seeds, parts=st.integers(1, 6), weighted=st.booleans())
@pytest.mark.parametrize(("name", "sampling"), CASES)
def test_any_split_adds_up(name: str, sampling: str, seed: int, parts: int, weighted: bool) -> None:
    batch, scores = make_batch(seed, history=False)
    if not batch.loss_mask_T.any():
        return
    if weighted:
        batch = batch.replace(weights_T=torch.rand(batch.num_tokens) + 0.5)
    assert_any_split_adds_up(build_policy_loss(AlgorithmConfig(**keys_of(name, sampling))), scores, batch, parts, seed)


@pytest.mark.parametrize("name", ["gmpo", "kimi15", "kl_cov", "sapo", "ppo", "vanilla"])
def test_gradients_agree_with_finite_differences(name: str) -> None:
    batch, scores = make_batch(8)
    loss_fn = build_policy_loss(AlgorithmConfig(**keys_of(name, "token")))

    def loss(logprobs_T: Tensor) -> Tensor:
        return loss_fn(TokenScores(logprobs_T), batch, context(batch)).loss

    assert torch.autograd.gradcheck(loss, (scores.logprobs_T.clone().requires_grad_(),))


def test_gspo_has_the_gradient_of_the_sequence_loss() -> None:
    batch, scores = make_batch(8)
    batch = batch.replace(advantages_T=(batch.rows_T + 1.0) * batch.loss_mask_T)  # one advantage per sequence
    config = AlgorithmConfig(importance_sampling="seq", use_pg_clip_range=True, pg_clip_low=1.0, pg_clip_high=1e6)
    _, got = gradient(build_policy_loss(config), scores, batch, context(batch))
    leaf = scores.logprobs_T.clone().requires_grad_()
    rows = [row for row in rows_of(batch, batch.loss_mask_T) if row]
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        ratio = (leaf[row] - batch.old_logprobs_T[row]).mean().exp()
        total = total - batch.advantages_T[row[0]] * ratio / len(rows)
    total.backward()
    torch.testing.assert_close(got[0], leaf.grad)


@pytest.mark.parametrize("name", PG_VARIANTS)
def test_on_fresh_samples_every_loss_starts_as_the_plain_policy_gradient(name: str) -> None:
    batch, scores = make_batch(4, history=False)
    fresh = batch.replace(old_logprobs_T=scores.logprobs_T, advantages_T=(batch.rows_T - 1.5) * batch.loss_mask_T)
    defaults = AlgorithmConfig(pg_variant=name)
    _, got = gradient(build_policy_loss(defaults), scores, fresh, context(fresh))
    _, plain = gradient(build_policy_loss(AlgorithmConfig(pg_variant="vanilla")), scores, fresh, context(fresh))
    torch.testing.assert_close(got[0], plain[0])


def loss_of(batch: Batch, scores: TokenScores, **keys: Any) -> float:
    return build_policy_loss(AlgorithmConfig(**keys))(scores, batch, context(batch)).loss.item()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("topr", "topr_positive_weight", 0.5),
        ("topr", "topr_negative_weight", 0.5),
        ("tis", "tis_lower_bound", 0.5),
        ("tis", "tis_upper_bound", 2.0),
        ("cispo", "cispo_epsilon_low", 0.5),
        ("cispo", "cispo_epsilon_high", 0.5),
        ("cispo", "cispo_use_unified_mask", True),
        ("kimi15", "kimi15_tau", 0.5),
        ("sapo", "sapo_tau_pos", 2.0),
        ("sapo", "sapo_tau_neg", 2.0),
        ("kl_cov", "ppo_kl_coef", 0.5),
        ("gmpo", "pg_clip", 0.5),
        ("clip_cov", "pg_clip", 0.5),
        ("dppo_tv", "pg_clip", 0.5),
        ("dppo_kl", "pg_clip", 0.5),
        *((name, "importance_sampling", "seq") for name in WITH_RATIO),
    ],
)
def test_each_parameter_changes_its_loss_and_no_other(name: str, key: str, value: Any) -> None:
    batch, scores = make_batch(0, max_episodes=20)
    assert abs(loss_of(batch, scores, pg_variant=name, **{key: value}) - loss_of(batch, scores, pg_variant=name)) > 1e-4
    changed = loss_of(batch, scores, pg_variant="vanilla", **{key: value})
    assert changed == loss_of(batch, scores, pg_variant="vanilla")


@pytest.mark.parametrize("name", [name for name in PG_VARIANTS if name not in ("ppo", "clip_cov")])
def test_each_variant_differs_from_ppo(name: str) -> None:
    batch, scores = make_batch(0, max_episodes=20)
    assert abs(loss_of(batch, scores, pg_variant=name) - loss_of(batch, scores)) > 1e-4


def test_use_topr_loss_is_topr() -> None:
    batch, scores = make_batch(0, max_episodes=20)
    assert loss_of(batch, scores, use_topr_loss=True) == loss_of(batch, scores, pg_variant="topr")


@pytest.mark.parametrize(("name", "sampling"), CASES)
def test_enormous_ratios_stay_finite(name: str, sampling: str) -> None:
    batch, scores = make_batch(3)
    far = batch.replace(old_logprobs_T=batch.old_logprobs_T - 1e4)
    out, grads = gradient(build_policy_loss(AlgorithmConfig(**keys_of(name, sampling))), scores, far, context(far))
    assert math.isfinite(out.loss.item()) and torch.isfinite(grads).all()


@pytest.mark.parametrize(("name", "sampling"), CASES)
def test_a_micro_batch_without_sampled_tokens_adds_a_differentiable_zero(name: str, sampling: str) -> None:
    batch, scores = make_batch(3)
    empty = batch.replace(loss_mask_T=torch.zeros_like(batch.loss_mask_T))
    loss_fn = build_policy_loss(AlgorithmConfig(**keys_of(name, sampling)))
    out, grads = gradient(loss_fn, scores, empty, context(batch))
    assert out.loss.item() == 0.0 and not grads.any()


def test_clip_frac_counts_tokens_beyond_a_bound() -> None:
    batch = Batch(
        lengths_B=torch.tensor([3]),
        tokens_T=torch.tensor([0, 1, 2]),
        loss_mask_T=torch.tensor([True, True, True]),
        advantages_T=torch.tensor([1.0, 1.0, -1.0]),
        old_logprobs_T=torch.tensor([-1.0, 0.0, -1.0]),
    )
    scores = TokenScores(torch.zeros(3))  # ratios e, 1, e
    for name, expected in {"tis": 2, "cispo": 2, "topr": 1, "gmpo": 2, "ppo": 1, "vanilla": 0}.items():
        out = build_policy_loss(AlgorithmConfig(pg_variant=name))(scores, batch, LossContext(3, 1, 3))
        assert float(out.metrics["actor/clip_frac"]) == pytest.approx(expected / 3), name


def test_token_weights_multiply_the_policy_gradient_alone() -> None:
    batch, scores = make_batch(0, max_episodes=20)
    weights_T = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    others = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_loss_coef": 0.2, "sft_loss_coef": 0.4}
    weighted = batch.replace(weights_T=weights_T)
    assert loss_of(weighted, scores) == pytest.approx(
        loss_of(batch.replace(advantages_T=batch.advantages_T * weights_T), scores)
    )
    assert loss_of(weighted, scores, rl_loss_coef=0.0, **others) == loss_of(batch, scores, rl_loss_coef=0.0, **others)


def test_kl_cov_without_marks_is_an_error() -> None:
    batch, scores = make_batch(2)
    with pytest.raises(ValueError, match=r"kl_cov.*marked_T"):
        loss_of(batch.replace(marked_T=None), scores, pg_variant="kl_cov")


def halved(tokens: PolicyTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    return -0.5 * tokens.advantage_M * tokens.logprobs_M, torch.zeros_like(tokens.row_M, dtype=torch.bool)


def test_losses_have_the_names_of_the_configuration_or_are_reached_by_path_and_travel() -> None:
    batch, scores = make_batch(2)
    loss_fn = pickle.loads(pickle.dumps(build_policy_loss(AlgorithmConfig(pg_variant=f"{__name__}:halved"))))
    got = loss_fn(scores, batch, context(batch)).loss.item()
    assert got == pytest.approx(0.5 * loss_of(batch, scores, pg_variant="vanilla"))
    assert tuple(POLICY_LOSSES.names()) == tuple(PG_VARIANTS)
