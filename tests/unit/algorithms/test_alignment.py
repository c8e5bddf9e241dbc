"""Chunks of text in two tokenizations against every pair of places in it, and sums over them in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch

from roll.algorithms.distillation import NO_CHUNK, WITHIN, chunk_means, common_chunks, shared_logprobs


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
def test_chunks_are_the_shortest_that_both_have(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.randint(1, 12)
    own, other = random_ends(rng, length), random_ends(rng, length)
    assert list(common_chunks(own, other)) == brute_force(own, other)


def test_ends_that_only_one_side_has() -> None:
    assert common_chunks([1, 2, 5], [2, 4, 5]) == ([0, 0, 1], [0, 1, 1])
    assert common_chunks([3, WITHIN], [1, 3]) == ([0, NO_CHUNK], [0, 0]), "it ends amid a character"
    assert common_chunks([2, 2, 3], [2, 3]) == ([0, 0, 1], [0, 1]), "a token without text"
    assert common_chunks([4], [1, 3]) == ([NO_CHUNK], [NO_CHUNK, NO_CHUNK])
    assert common_chunks([], [1]) == ([], [NO_CHUNK])


def test_sums_of_chunks_are_shared_out() -> None:
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


def test_a_token_each_is_what_it_is_without_chunks() -> None:
    values = torch.randn(40, generator=torch.Generator().manual_seed(0))
    rows_T = torch.arange(40) // 8
    chunk_T = torch.arange(40) % 8
    assert torch.equal(shared_logprobs(values, (rows_T, chunk_T), (rows_T, chunk_T)).float(), values)
    assert torch.equal(chunk_means(values.double(), rows_T, chunk_T), values.double())
