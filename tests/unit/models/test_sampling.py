"""Sampling and stop strings: distributions against exact probabilities, the hash against plain integers."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from roll.distributed.strategy.hf_infer.continuous_batching import StopStrings
from roll.models.sampling import SamplerRows, sample, uniforms
from roll.models.tiny import make_tokenizer

NUM_DRAWS = 20_000
CPU = torch.device("cpu")


def rows_of(
    count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, penalty: float = 1.0, **options: Any
) -> SamplerRows:
    """Of equal rows but for the options."""
    return SamplerRows.build([temperature] * count, [top_k] * count, [top_p] * count, [penalty] * count, CPU, **options)


def draws_uniform(count: int) -> Tensor:
    """One uniform per (seed, index), over several indices as in a real run."""
    seeds = np.arange(count, dtype=np.uint64) // np.uint64(4)
    return torch.from_numpy(uniforms(seeds, np.arange(count, dtype=np.uint64) % np.uint64(4)))


def assert_follows(outcomes: Tensor, probabilities: Tensor) -> None:
    """By Pearson's statistic over the possible outcomes, which exceeds the bound about once in 100,000 times."""
    probabilities, counts = probabilities.numpy(), np.bincount(outcomes.numpy(), minlength=len(probabilities))
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * counts.sum()
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = max(1, possible.sum() - 1)
    # Wilson and Hilferty 1931: the cube root of chi-square is nearly normal.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4.27 * (2 / (9 * freedom)) ** 0.5) ** 3


def assert_said(logprobs_B: Tensor, tokens_B: Tensor, logits: Tensor, temperature: float) -> None:
    """Log-probabilities are those at the temperature, before penalties, top-k and top-p."""
    full = torch.log_softmax(logits.double() / temperature, -1)
    torch.testing.assert_close(logprobs_B.double(), full[tokens_B], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "penalty", "min_p"),
    [
        (1.0, 0, 1.0, 1.0, 0.0),
        (0.6, 0, 1.0, 1.0, 0.0),
        (1.7, 4, 1.0, 1.0, 0.0),
        (1.0, 0, 0.7, 1.0, 0.0),
        (0.9, 6, 0.8, 1.3, 0.0),
        (1.2, 0, 1.0, 1.0, 0.3),
        (1.2, 6, 0.9, 1.0, 0.1),
    ],
)
def test_tokens_follow_the_distribution_of_transformers_warpers(temperature, top_k, top_p, penalty, min_p):
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 0.3, 1.2])
    seen = torch.tensor([[0, 3, 6]])
    warped = logits[None].double()
    if penalty != 1:
        warped = RepetitionPenaltyLogitsProcessor(penalty)(seen, warped)
    warped = TemperatureLogitsWarper(temperature)(seen, warped)
    if min_p:
        warped = MinPLogitsWarper(min_p)(seen, warped)
    if top_k:
        warped = TopKLogitsWarper(top_k)(seen, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(seen, warped)
    seen_BV = torch.zeros(NUM_DRAWS, 10, dtype=torch.bool)
    seen_BV[:, seen[0]] = True

    rows = rows_of(NUM_DRAWS, temperature, top_k, top_p, penalty, min_p=[min_p] * NUM_DRAWS)
    tokens_B, logprobs_B = sample(logits.expand(NUM_DRAWS, -1), rows, draws_uniform(NUM_DRAWS), seen_BV)

    assert_follows(tokens_B, warped.softmax(-1)[0])
    assert_said(logprobs_B, tokens_B, logits, temperature)
    if rows.top_k_R is not None and penalty == 1:
        kept, rows = {}, replace(rows, max_kept_R=torch.full_like(rows.top_k_R, 5))
        again_B, among_B = sample(logits.expand(NUM_DRAWS, -1), rows, draws_uniform(NUM_DRAWS), None, None, None, kept)
        left = warped[0].isfinite().nonzero()[:, 0].tolist()
        assert torch.equal(again_B, tokens_B)
        assert [sorted(ids) for ids in kept.values()] == ([left] * NUM_DRAWS if len(left) <= 5 else [])
        assert_said(among_B, tokens_B, *((warped[0], 1.0) if len(left) <= 5 else (logits, temperature)))


def test_presence_and_frequency_come_off_the_logits_of_what_was_sampled():
    """Oracle: the formula in float64, after the repetition penalty and before the temperature."""
    logits = torch.tensor([2.0, -1.5, 1.0, 0.5, 0.0, 1.2])
    count = torch.tensor([3, 1, 0, 0, 2, 0], dtype=torch.int32)
    seen = torch.tensor([True, True, False, True, True, False])
    presence, frequency, repetition, temperature = 0.7, -0.4, 1.5, 0.8
    penalised = logits.double()
    penalised = torch.where(seen, torch.where(penalised > 0, penalised / repetition, penalised * repetition), penalised)
    penalised = penalised - frequency * count.double() - presence * (count > 0).double()
    more = {"presence": [presence] * NUM_DRAWS, "frequency": [frequency] * NUM_DRAWS}
    rows = rows_of(NUM_DRAWS, temperature, penalty=repetition, **more)
    every = [each.expand(NUM_DRAWS, -1) for each in (logits, seen, count)]

    tokens_B, logprobs_B = sample(every[0], rows, draws_uniform(NUM_DRAWS), every[1], None, every[2])
    assert_follows(tokens_B, (penalised / temperature).softmax(-1))
    assert_said(logprobs_B, tokens_B, logits, temperature)


def test_consecutive_tokens_of_one_seed_are_independent():
    seeds = np.arange(NUM_DRAWS, dtype=np.uint64)
    first, second = (uniforms(seeds, np.full(NUM_DRAWS, i, dtype=np.uint64)) for i in (0, 1))
    pairs = (first * 8).astype(int) * 8 + (second * 8).astype(int)
    assert_follows(torch.from_numpy(pairs), torch.full((64,), 1 / 64))


def test_rows_with_different_parameters_do_not_disturb_each_other():
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    parameters = [(1.0, 0, 1.0, 1.0), (0.0, 0, 1.0, 1.0), (0.5, 3, 1.0, 1.0), (2.0, 0, 0.5, 1.0), (1.0, 5, 0.9, 1.8)]
    parameters.append((0.0, 2, 0.1, 1.5))
    seen = torch.rand(6, 50) < 0.3
    uniform = draws_uniform(6)
    together, _ = sample(logits, SamplerRows.build(*zip(*parameters, strict=True), CPU), uniform, seen)
    for row, (temperature, top_k, top_p, penalty) in enumerate(parameters):
        part = slice(row, row + 1)
        alone, _ = sample(logits[part], rows_of(1, temperature, top_k, top_p, penalty), uniform[part], seen[part])
        assert together[row] == alone[0]


def test_a_first_token_has_a_temperature_of_its_own_and_the_others_theirs():
    logits = torch.tensor([2.0, 1.5, 1.0, -3.0])
    rows = rows_of(NUM_DRAWS, 0.5, first_temperature=[30.0, None] * (NUM_DRAWS // 2))
    hot_B = torch.arange(NUM_DRAWS) % 2 == 0
    for index in (0, 1):
        index_B = torch.full((NUM_DRAWS,), index)
        uniform = torch.from_numpy(uniforms(np.arange(NUM_DRAWS, dtype=np.uint64), np.full(NUM_DRAWS, 0, np.uint64)))
        tokens_B, logprobs_B = sample(logits.expand(NUM_DRAWS, -1), rows, uniform, None, index_B)
        for chosen_B, temperature in ((hot_B, 30.0 if index == 0 else 0.5), (~hot_B, 0.5)):
            assert_follows(tokens_B[chosen_B], (logits.double() / temperature).softmax(-1))
            assert_said(logprobs_B[chosen_B], tokens_B[chosen_B], logits, temperature)


def test_a_first_token_has_a_top_k_of_its_own_and_the_others_theirs():
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0]).expand(600, -1)
    few = [None] * 200 + [2] * 200 + [0] * 200
    rows = rows_of(600, top_k=3, first_top_k=few)
    for index, expected in ((0, (3, 2, 5)), (1, (3, 3, 3))):
        tokens_B, _ = sample(logits, rows, draws_uniform(600), index_B=torch.full((600,), index))
        assert tuple(len(part.unique()) for part in tokens_B.split(200)) == expected


def test_greedy_takes_the_maximum_and_the_ends_of_the_unit_interval_pick_possible_tokens():
    torch.manual_seed(0)
    logits = torch.randn(20, 30)
    tokens_B, logprobs_B = sample(logits, rows_of(20, temperature=0.0), draws_uniform(20))
    assert torch.equal(tokens_B, logits.argmax(-1))
    torch.testing.assert_close(logprobs_B, torch.log_softmax(logits, -1).max(-1).values)
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]] * 2)
    ends = torch.tensor([2.0**-24, 1 - 2.0**-24])
    for rows in (rows_of(2), rows_of(2, top_k=3)):
        tokens_B, _ = sample(logits, rows, ends)
        assert set(tokens_B.tolist()) == {1, 2}


def test_uniforms_are_split_mix_64_in_plain_integers():
    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    rng = random.Random(0)
    cases = [(rng.getrandbits(64), rng.randrange(5000)) for _ in range(200)] + [(0, 0), (2**64 - 1, 0)]
    found = uniforms(*(np.array(column, dtype=np.uint64) for column in zip(*cases, strict=True)))
    for (seed, index), value in zip(cases, found, strict=True):
        bits = mix((mix((seed + golden) % 2**64) + (index + 1) * golden) % 2**64) >> 41
        assert value == (bits + 0.5) / 2**23
        assert 0 < value < 1


def test_few_tokens_ask_for_a_look_at_the_text():
    tokenizer = make_tokenizer()
    finder = StopStrings(tokenizer)
    asked = sum(finder.may_end(("</answer>",), token) for token in range(len(tokenizer)))
    assert 0 < asked < 0.25 * len(tokenizer)
    assert not finder.may_end(("</answer>",), len(tokenizer) + 5)  # a model may have more rows than the tokenizer
    assert all(finder.may_end(("left ",), token) for token in range(len(tokenizer))), "lone tokens may lose their space"


@pytest.mark.parametrize("numbers", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("largest", [1, 50, 512, 513])
def test_a_small_top_k_sorts_no_vocabulary_and_draws_the_same_to_the_last_bit(largest, numbers, monkeypatch):
    """bfloat16 has many equal logits, whose order must stay that of a stable sort."""
    generator = torch.Generator().manual_seed(largest)
    logits = (torch.randn(24, 2000, generator=generator) * 4).to(numbers)
    logits[:8, ::3] = float("-inf")
    top_k = [largest - i % largest for i in range(24)]
    options = [0.7] * 24, top_k, [1.0 - 0.1 * (i % 3) for i in range(24)], [1.0] * 24, CPU
    rows = SamplerRows.build(*options, min_p=[0.02 * (i % 2) for i in range(24)])
    sorts, sort = [], Tensor.sort
    monkeypatch.setattr(Tensor, "sort", lambda *args, **kwargs: sorts.append(1) or sort(*args, **kwargs))
    for _ in range(10):
        uniform = torch.rand(24, generator=generator).clamp(1e-6, 1 - 1e-6)
        found = sample(logits, rows, uniform)
        assert bool(sorts) == (largest == 513)
        expected = sample(logits, replace(rows, most=10**6), uniform)
        sorts.clear()
        assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
