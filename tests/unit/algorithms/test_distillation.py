"""What a teacher's opinion becomes: advantages, rewards, a loss."""

from __future__ import annotations

import pytest
import torch

from roll.algorithms.distillation import (
    build_distill_loss,
    clip_metrics,
    no_advantages,
    teacher_advantages,
    teacher_metrics,
    teacher_rewards,
)
from roll.algorithms.losses import build_policy_loss
from roll.algorithms.types import LossContext, TokenScores
from roll.configs.distill import DistillLossConfig
from roll.configs.rl import RLConfig
from roll.configs.worker import WorkerConfig
from roll.data.batch import Batch
from roll.data.packing import take_micro_batch

MASK = [0, 1, 1, 0, 1, 0, 1, 1, 1]
BATCH = Batch(
    torch.tensor([3, 2, 4]),
    torch.arange(9),
    torch.tensor(MASK).bool(),
    rewards_T=torch.tensor([0, 0, 1.0, 0, 0.5, 0, 0, 0, -1.0]),
    advantages_T=torch.tensor([0, 0.3, 0.3, 0, -0.1, 0, 0.2, 0.2, 0.2]),
    returns_T=torch.zeros(9),
    rollout_logprobs_T=torch.tensor([0, -1.0, -2.0, 0, -0.5, 0, -0.25, -3.0, -1.5]),
    teacher_logprobs_T=torch.tensor([0, -0.5, -4.0, 0, -0.25, 0, -1.25, -3.0, -0.5]),
)
GAPS = [0, 0.5, -2.0, 0, 0.25, 0, -1.0, 0.0, 1.0]


def rl(**keys: object) -> RLConfig:
    return RLConfig(teacher=WorkerConfig(), teacher_pretrain="org/model", adv_estimator="reinforce", **keys)


def test_the_gap_is_added_where_the_configuration_says() -> None:
    config = rl(opd_kl_coef=0.5)
    expected = [a + 0.5 * gap for a, gap in zip(BATCH.advantages_T.tolist(), GAPS, strict=True)]
    assert teacher_advantages(BATCH, config.teacher_term).advantages_T.tolist() == pytest.approx(expected)
    expected = [r + 0.5 * gap for r, gap in zip(BATCH.rewards_T.tolist(), GAPS, strict=True)]
    assert teacher_rewards(BATCH, config.teacher_term).rewards_T.tolist() == pytest.approx(expected)
    pure = rl(opd_kl_coef=2.0, is_pure_opd=True).teacher_term
    assert teacher_rewards(BATCH, pure).rewards_T.tolist() == pytest.approx([2 * gap for gap in GAPS])
    found = teacher_advantages(no_advantages(BATCH), pure)
    assert found.advantages_T.tolist() == pytest.approx([2 * gap for gap in GAPS]) and not found.returns_T.any()


def test_a_token_counts_for_no_more_than_the_bound_says() -> None:
    config = rl(opd_kl_coef=2.0, opd_token_kld_clip=1.5)
    expected = [a + max(-1.5, min(2 * gap, 1.5)) for a, gap in zip(BATCH.advantages_T.tolist(), GAPS, strict=True)]
    assert teacher_advantages(BATCH, config.teacher_term).advantages_T.tolist() == pytest.approx(expected)
    floor = rl(opd_logprob_min=-1.5).teacher_term
    pairs = zip(BATCH.teacher_logprobs_T.tolist(), BATCH.rollout_logprobs_T.tolist(), strict=True)
    expected = [a + max(q, -1.5) - max(p, -1.5) for a, (q, p) in zip(BATCH.advantages_T.tolist(), pairs, strict=True)]
    assert teacher_advantages(BATCH, floor).advantages_T.tolist() == pytest.approx(expected)
    assert (
        clip_metrics(BATCH, config.teacher_term) == {"teacher/clipped": 3 / 6}
        and clip_metrics(BATCH, rl().teacher_term) == {}
    )


def test_chunks_of_text_share_their_gap() -> None:
    alone = BATCH.replace(teacher_chunk_T=torch.tensor([-1, 0, 1, -1, 0, -1, 0, 1, 2]))
    for form in (teacher_advantages, teacher_rewards):
        expected, found = (form(batch, rl(opd_kl_coef=0.3).teacher_term) for batch in (BATCH, alone))
        assert torch.equal(found.rewards_T, expected.rewards_T) and torch.equal(
            found.advantages_T, expected.advantages_T
        )
    shared = BATCH.replace(teacher_chunk_T=torch.tensor([-1, 0, 0, -1, -1, -1, 0, 1, 1]))
    gaps = [0, -0.75, -0.75, 0, 0, 0, -1.0, 0.5, 0.5]
    found = teacher_rewards(shared, rl(opd_form="reward", is_pure_opd=True).teacher_term)
    assert found.rewards_T.tolist() == pytest.approx(gaps)
    metrics = teacher_metrics(shared)
    assert metrics["teacher/aligned"] == pytest.approx(5 / 6) and metrics["teacher/reverse_kl"] == pytest.approx(0.25)


def test_the_policy_is_the_one_before_the_update() -> None:
    recomputed = BATCH.replace(old_logprobs_T=BATCH.rollout_logprobs_T + 0.125)
    metrics = [teacher_metrics(batch) for batch in (BATCH, recomputed)]
    mean = sum(gap for gap, mask in zip(GAPS, MASK, strict=True) if mask) / sum(MASK)
    assert metrics[0]["teacher/reverse_kl"] == pytest.approx(-mean)
    assert metrics[1]["teacher/reverse_kl"] == pytest.approx(-mean + 0.125)
    assert metrics[0]["teacher/logprob"] == pytest.approx((-0.5 - 4 - 0.25 - 1.25 - 3 - 0.5) / 6)
    mixed = recomputed.replace(fresh_B=torch.tensor([True, False, True]))  # only one of six tokens was scored again
    assert teacher_metrics(mixed)["teacher/reverse_kl"] == pytest.approx(-mean + 0.125 / 6)
    with pytest.raises(ValueError, match=r"teacher_logprobs_T"):
        teacher_advantages(BATCH.replace(teacher_logprobs_T=None), rl().teacher_term)
    with pytest.raises(ValueError, match=r"sequence 1"):
        broken = BATCH.teacher_logprobs_T.clone()
        broken[4] = -torch.inf
        teacher_advantages(BATCH.replace(teacher_logprobs_T=broken), rl().teacher_term)


def scores() -> TokenScores:
    generator = torch.Generator().manual_seed(0)
    logprobs, divergence = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    return TokenScores(logprobs_T=-logprobs.abs(), divergence_T=divergence.abs().requires_grad_())


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_loss_is_a_weighted_sum_of_divergence_and_likelihood(mode: str) -> None:
    config = DistillLossConfig(distill_loss_weight=0.75, loss_agg_mode=mode)
    found = build_distill_loss(config)(scores(), BATCH, LossContext.of(BATCH))
    given, weights = scores(), []
    rows = [[1, 2], [4], [6, 7, 8]]
    for row in rows:
        weights += [1 / 6 if mode == "token-mean" else 1 / (3 * len(row))] * len(row)
    index = [token for row in rows for token in row]
    divergence = sum(w * float(given.divergence_T[i].detach()) for w, i in zip(weights, index, strict=True))
    nll = -sum(w * float(given.logprobs_T[i]) for w, i in zip(weights, index, strict=True))
    assert float(found.loss.detach()) == pytest.approx(0.75 * divergence + 0.25 * nll)
    assert float(found.metrics["distill/divergence"]) == pytest.approx(divergence)
    assert float(found.metrics["distill/nll"]) == pytest.approx(nll)


def test_shares_of_micro_batches_add_up() -> None:
    build = build_distill_loss(DistillLossConfig(distill_loss_weight=0.5))
    context, given = LossContext.of(BATCH), scores()
    whole = build(given, BATCH, context).loss
    parts = []
    for rows in ([0, 2], [1]):
        index = BATCH.token_index(rows)
        part = TokenScores(logprobs_T=given.logprobs_T[index], divergence_T=given.divergence_T[index])
        parts.append(build(part, BATCH.select(rows), context).loss)
    torch.testing.assert_close(sum(parts), whole)
    blank = take_micro_batch(BATCH, [], 0)
    ones = torch.ones(blank.num_tokens, requires_grad=True)
    assert float(build(TokenScores(logprobs_T=ones, divergence_T=ones), blank, context).loss.detach()) == 0


def test_an_rl_loss_takes_the_divergence_with_its_coefficient() -> None:
    given = scores()
    config = rl(opd_form="loss", opd_kl_coef=0.5, is_pure_opd=True, loss_agg_mode="token-mean")
    batch = no_advantages(BATCH)
    found = build_policy_loss(config)(given, batch, LossContext.of(batch))
    (gradient,) = torch.autograd.grad(found.loss, given.divergence_T)
    torch.testing.assert_close(gradient, 0.5 / 6 * BATCH.loss_mask_T.double())
    assert float(found.metrics["actor/distill_loss"]) == pytest.approx(
        float(given.divergence_T[BATCH.loss_mask_T].mean().detach())
    )
    with pytest.raises(ValueError, match="divergence_T"):
        build_policy_loss(config)(TokenScores(logprobs_T=given.logprobs_T), batch, LossContext.of(batch))
