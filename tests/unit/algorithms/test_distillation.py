"""What a teacher's opinion becomes: advantages, rewards, a loss."""

import math
import random
from typing import Any

import pytest
import torch

from roll.algorithms.distillation import (
    NO_CHUNK,
    WITHIN,
    build_distill_loss,
    chunk_means,
    clip_metrics,
    common_chunks,
    no_advantages,
    shared_logprobs,
    teacher_advantages,
    teacher_metrics,
    teacher_rewards,
)
from roll.algorithms.losses import build_policy_loss
from roll.algorithms.quantities import divergence_addends
from roll.algorithms.types import LossContext, TokenScores
from roll.configs.distill import DistillLossConfig
from roll.configs.rl import RLConfig
from roll.configs.teacher import DivergenceConfig
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


def test_the_gap_is_added_where_the_configuration_says():
    config = rl(opd_kl_coef=0.5)
    expected = [a + 0.5 * gap for a, gap in zip(BATCH.advantages_T.tolist(), GAPS, strict=True)]
    assert teacher_advantages(BATCH, config.teacher_term).advantages_T.tolist() == pytest.approx(expected)
    expected = [r + 0.5 * gap for r, gap in zip(BATCH.rewards_T.tolist(), GAPS, strict=True)]
    assert teacher_rewards(BATCH, config.teacher_term).rewards_T.tolist() == pytest.approx(expected)
    pure = rl(opd_kl_coef=2.0, is_pure_opd=True).teacher_term
    assert teacher_rewards(BATCH, pure).rewards_T.tolist() == pytest.approx([2 * gap for gap in GAPS])
    found = teacher_advantages(no_advantages(BATCH), pure)
    assert found.advantages_T.tolist() == pytest.approx([2 * gap for gap in GAPS]) and not found.returns_T.any()


def test_a_token_counts_for_no_more_than_the_bound_says():
    config = rl(opd_kl_coef=2.0, opd_token_kld_clip=1.5)
    expected = [a + max(-1.5, min(2 * gap, 1.5)) for a, gap in zip(BATCH.advantages_T.tolist(), GAPS, strict=True)]
    assert teacher_advantages(BATCH, config.teacher_term).advantages_T.tolist() == pytest.approx(expected)
    floor = rl(opd_logprob_min=-1.5).teacher_term
    pairs = zip(BATCH.teacher_logprobs_T.tolist(), BATCH.rollout_logprobs_T.tolist(), strict=True)
    expected = [a + max(q, -1.5) - max(p, -1.5) for a, (q, p) in zip(BATCH.advantages_T.tolist(), pairs, strict=True)]
    assert teacher_advantages(BATCH, floor).advantages_T.tolist() == pytest.approx(expected)
    assert clip_metrics(BATCH, config.teacher_term) == {"teacher/clipped": 3 / 6}
    assert clip_metrics(BATCH, rl().teacher_term) == {}


def test_chunks_of_text_share_their_gap():
    alone = BATCH.replace(teacher_chunk_T=torch.tensor([-1, 0, 1, -1, 0, -1, 0, 1, 2]))
    for form in (teacher_advantages, teacher_rewards):
        expected, found = (form(batch, rl(opd_kl_coef=0.3).teacher_term) for batch in (BATCH, alone))
        assert torch.equal(found.rewards_T, expected.rewards_T)
        assert torch.equal(found.advantages_T, expected.advantages_T)
    shared = BATCH.replace(teacher_chunk_T=torch.tensor([-1, 0, 0, -1, -1, -1, 0, 1, 1]))
    gaps = [0, -0.75, -0.75, 0, 0, 0, -1.0, 0.5, 0.5]
    found = teacher_rewards(shared, rl(opd_form="reward", is_pure_opd=True).teacher_term)
    assert found.rewards_T.tolist() == pytest.approx(gaps)
    metrics = teacher_metrics(shared)
    assert metrics["teacher/aligned"] == pytest.approx(5 / 6) and metrics["teacher/reverse_kl"] == pytest.approx(0.25)


def test_the_policy_is_the_one_before_the_update():
    recomputed = BATCH.replace(old_logprobs_T=BATCH.rollout_logprobs_T + 0.125)
    metrics = [teacher_metrics(batch) for batch in (BATCH, recomputed)]
    mean = sum(gap for gap, mask in zip(GAPS, MASK, strict=True) if mask) / sum(MASK)
    assert metrics[0]["teacher/reverse_kl"] == pytest.approx(-mean)
    assert metrics[1]["teacher/reverse_kl"] == pytest.approx(-mean + 0.125)
    assert metrics[0]["teacher/logprob"] == pytest.approx((-0.5 - 4 - 0.25 - 1.25 - 3 - 0.5) / 6)
    mixed = recomputed.replace(on_policy_B=torch.tensor([True, False, True]))  # only one of six tokens was scored again
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
def test_the_loss_is_a_weighted_sum_of_divergence_and_likelihood(mode):
    config = DistillLossConfig(distill_loss_weight=0.75, loss_agg_mode=mode)
    found = build_distill_loss(config)(scores(), BATCH, LossContext.of(BATCH))
    given = scores()
    rows = [[1, 2], [4], [6, 7, 8]]
    weights = {token: 1 / 6 if mode == "token-mean" else 1 / (3 * len(row)) for row in rows for token in row}
    divergence = sum(weight * float(given.divergence_T[i].detach()) for i, weight in weights.items())
    nll = -sum(weight * float(given.logprobs_T[i]) for i, weight in weights.items())
    assert float(found.loss.detach()) == pytest.approx(0.75 * divergence + 0.25 * nll)
    assert float(found.metrics["distill/divergence"]) == pytest.approx(divergence)
    assert float(found.metrics["distill/nll"]) == pytest.approx(nll)


def test_shares_of_micro_batches_add_up():
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


def test_an_rl_loss_takes_the_divergence_with_its_coefficient():
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
def test_they_are_what_their_papers_say(objective):
    teacher, student = distributions(1)
    found = divergence_addends(teacher, student, config(objective)).sum(-1)
    expected = [by_hand(objective, t.tolist(), s.tolist()) for t, s in zip(teacher.exp(), student.exp(), strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert all(value > 0 for value in expected)
    assert divergence_addends(teacher, teacher, config(objective)).sum(-1).tolist() == pytest.approx([0] * 4, abs=1e-14)


@pytest.mark.parametrize("objective", SETTINGS)
def test_gradients_are_those_of_small_differences(objective):
    teacher, _ = distributions(2, count=1, width=4)
    logits = torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)

    def value(student_logits: torch.Tensor) -> torch.Tensor:
        return divergence_addends(teacher, student_logits.log_softmax(-1), config(objective)).sum()

    assert torch.autograd.gradcheck(value, (logits,))


def test_impossible_outcomes_add_nothing():
    """An id that both mask (``comparison.MASKED``) counts for nothing, and its gradient is no NaN."""
    teacher = torch.tensor([[0.5, 0.5, 0.0]]).log().clamp_min(-1e30)
    logits = torch.tensor([[0.3, -0.2, -1e30]], requires_grad=True)
    for objective in SETTINGS:
        found = divergence_addends(teacher, logits.log_softmax(-1), config(objective)).sum()
        (gradient,) = torch.autograd.grad(found, logits)
        alone = divergence_addends(teacher[:, :2], logits[:, :2].log_softmax(-1), config(objective)).sum()
        assert found.item() == pytest.approx(alone.item(), rel=1e-6)
        assert gradient.isfinite().all() and gradient[0, 2] == 0


def brute_force(own: list[int], other: list[int]) -> list[list[int]]:
    """Chunks of both sides: for each token, how many common ends lie before the end of the first token that has text
    at or after it."""
    both = []
    for ends in (own, other):
        numbers = []
        for index in range(len(ends)):
            # Where the text stands that a token is a part of: its own end, or that of the next which ends a character.
            reached = max((end for end in ends[: index + 1] if end != WITHIN), default=0)
            if ends[index] == WITHIN:
                reached = next((end for end in ends[index:] if end != WITHIN), math.inf)
            common = sorted({end for end in own if end != WITHIN} & {end for end in other if end != WITHIN})
            first = next((number for number, end in enumerate(common) if end >= reached), NO_CHUNK)
            numbers.append(first)
        both.append(numbers)
    return both


def random_ends(rng: random.Random, length: int) -> list[int]:
    cuts = sorted(rng.sample(range(1, length), rng.randint(0, length - 1)))
    ends = []
    for end in [*cuts, length]:
        ends += [WITHIN] * (rng.random() < 0.2) + [end]
    return ends


@pytest.mark.parametrize("seed", range(50))
def test_chunks_are_the_shortest_that_both_have(seed):
    rng = random.Random(seed)
    length = rng.randint(1, 12)
    own, other = random_ends(rng, length), random_ends(rng, length)
    assert list(common_chunks(own, other)) == brute_force(own, other)


def test_sums_of_chunks_are_shared_out():
    rng = random.Random(0)
    own, theirs = [], []  # (row, chunk) of tokens
    for row in range(6):
        for chunk in range(rng.randint(1, 5)):
            own += [(row, chunk)] * rng.randint(1, 4)
            theirs += [(row, chunk)] * rng.randint(1, 4)
        own += [(row, NO_CHUNK)] * rng.randint(0, 2)
        theirs += [(row, NO_CHUNK)] * rng.randint(0, 2)
    q, p = ([-5 * rng.random() for _ in side] for side in (theirs, own))
    q32 = torch.tensor(q, dtype=torch.float32)
    q = q32.tolist()
    (rows_T, chunk_T), (rows_S, chunk_S) = (torch.tensor(side).T for side in (own, theirs))
    found = shared_logprobs(q32, (rows_S, chunk_S), (rows_T, chunk_T))
    gaps = chunk_means(found - torch.tensor(p, dtype=torch.float64), rows_T, chunk_T)
    for token, (row, chunk) in enumerate(own):
        if chunk == NO_CHUNK:
            assert found[token] == gaps[token] == 0
            continue
        said = math.fsum(value for key, value in zip(theirs, q, strict=True) if key == (row, chunk))
        sampled = [value for key, value in zip(own, p, strict=True) if key == (row, chunk)]
        assert found[token].item() == pytest.approx(said / len(sampled), abs=1e-12)
        assert gaps[token].item() == pytest.approx((said - math.fsum(sampled)) / len(sampled), abs=1e-12)
