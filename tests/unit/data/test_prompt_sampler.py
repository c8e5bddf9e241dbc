"""The order of the prompts, as a pure function of the seed and the number of the draw."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data.prompt_sampler import PromptSampler
from roll.data.prompts import Prompt
from tests.support.examples import examples


def prompts(**sizes: int) -> list[Prompt]:
    """Prompts ``a0, a1 … b0 …`` of the tags ``a, b …``."""
    messages = ({"role": "user", "content": "?"},)
    return [Prompt(f"{tag}{index}", tag, messages) for tag, size in sizes.items() for index in range(size)]


def ids(sampler: PromptSampler, draws: range) -> list[str]:
    return [sampler[n].id for n in draws]


SHARES = {"a": 0.5, "b": 0.3, "c": 0.2}
seeds = st.integers(0, 2**40)


@examples(40)
@given(size=st.integers(1, 40), seed=seeds, epochs=st.integers(1, 30))
def test_every_epoch_has_every_prompt_once(size: int, seed: int, epochs: int) -> None:
    dataset = prompts(a=size)
    sampler = PromptSampler(dataset, seed)
    for epoch in range(epochs):
        draws = range(epoch * size, (epoch + 1) * size)
        assert sorted(ids(sampler, draws)) == sorted(prompt.id for prompt in dataset)
        assert {sampler.epoch_of(n) for n in draws} == {epoch}


@examples(40)
@given(
    seed=seeds,
    draws=st.lists(st.integers(0, 20_000), max_size=30),
    mixed=st.booleans(),
    shuffle=st.booleans(),
)
def test_two_samplers_agree_whatever_the_order_of_asking(
    seed: int, draws: list[int], mixed: bool, shuffle: bool
) -> None:
    dataset = prompts(a=7, b=50, c=1)
    one, other = (PromptSampler(dataset, seed, shuffle, SHARES if mixed else None) for _ in range(2))
    first = {n: (one[n].id, one.epoch_of(n)) for n in draws}
    assert first == {n: (other[n].id, other.epoch_of(n)) for n in reversed(draws)}
    assert first == {n: (one[n].id, one.epoch_of(n)) for n in sorted(draws)}


@examples(25)
@given(seed=seeds, stop=st.integers(0, 3000), mixed=st.booleans())
def test_a_run_that_goes_on_at_any_draw_sees_what_the_unbroken_one_saw(seed: int, stop: int, mixed: bool) -> None:
    dataset = prompts(a=10, b=3, c=5)
    shares = SHARES if mixed else None
    unbroken = ids(PromptSampler(dataset, seed, True, shares), range(stop + 60))
    assert ids(PromptSampler(dataset, seed, True, shares), range(stop, stop + 60)) == unbroken[stop:]


@examples(20)
@given(seed=seeds, sizes=st.tuples(*[st.integers(1, 30)] * 3), shuffle=st.booleans())
def test_within_a_domain_nothing_repeats_before_all_of_it_was_seen(
    seed: int, sizes: tuple[int, int, int], shuffle: bool
) -> None:
    dataset = prompts(**dict(zip("abc", sizes, strict=True)))
    sampler = PromptSampler(dataset, seed, shuffle, SHARES)
    drawn: Counter[str] = Counter()
    per_tag: dict[str, list[str]] = {tag: [] for tag in "abc"}
    for n in range(2500):  # beyond two edges of the blocks in which domains are chosen
        prompt = sampler[n]
        assert sampler.epoch_of(n) == drawn[prompt.id]
        drawn[prompt.id] += 1
        per_tag[prompt.tag].append(prompt.id)
    for tag, size in zip("abc", sizes, strict=True):
        for start in range(0, len(per_tag[tag]) - size + 1, size):
            assert len(set(per_tag[tag][start : start + size])) == size


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    dataset = prompts(a=2, b=3)
    assert ids(PromptSampler(dataset, 0, shuffle=False), range(12)) == ["a0", "a1", "b0", "b1", "b2"] * 2 + ["a0", "a1"]
    mixed = PromptSampler(dataset, 0, False, {"a": 0.5, "b": 0.5})
    drawn = [mixed[n].id for n in range(100)]
    assert [name for name in drawn if name[0] == "b"][:7] == ["b0", "b1", "b2", "b0", "b1", "b2", "b0"]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    dataset = prompts(a=30)
    orders = {
        tuple(ids(PromptSampler(dataset, seed), range(epoch * 30, epoch * 30 + 30)))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_positions_of_a_prompt_are_spread_over_the_epochs_and_domains_have_their_shares() -> None:
    """Each of 5 prompts comes first in about a fifth of 2,000 epochs; 4 standard deviations are 72."""
    sampler = PromptSampler(prompts(a=5), 0)
    first = Counter(sampler[5 * epoch].id for epoch in range(2000))
    assert len(first) == 5 and all(abs(count - 400) < 72 for count in first.values())
    # Over 10,000 draws; 4 standard deviations are below 200.
    for seed in range(3):
        sampler = PromptSampler(prompts(a=3, b=500, c=20), seed, True, SHARES)
        drawn = Counter(sampler[n].tag for n in range(10_000))
        assert all(abs(drawn[tag] - 10_000 * share) < 200 for tag, share in SHARES.items())


def test_the_order_of_the_shares_in_the_file_does_not_matter() -> None:
    dataset = prompts(a=4, b=4, c=4)
    turned = dict(reversed(SHARES.items()))
    assert ids(PromptSampler(dataset, 1, True, SHARES), range(50)) == ids(
        PromptSampler(dataset, 1, True, turned), range(50)
    )


def test_the_order_stays_the_same_between_versions() -> None:
    """A checkpoint's position means the same prompts tomorrow."""
    dataset = prompts(a=4, b=2)
    assert ids(PromptSampler(dataset, 42), range(8)) == ["a1", "a0", "b0", "b1", "a2", "a3", "a1", "a3"]
    assert ids(PromptSampler(dataset, 42, True, {"a": 0.25, "b": 0.75}), range(8)) == [
        "a2",
        "a0",
        "b0",
        "b1",
        "b0",
        "b1",
        "b1",
        "b0",
    ]


def test_tags_may_share_a_domain() -> None:
    dataset = prompts(gsm8k=2, aime=2, humaneval=1)
    domains = {"gsm8k": "math", "aime": "math", "humaneval": "code"}
    sampler = PromptSampler(dataset, 0, True, {"math": 0.5, "code": 0.5}, domains)
    drawn = [sampler[n] for n in range(1000)]
    maths = [prompt.id for prompt in drawn if prompt.tag != "humaneval"]
    assert abs(len(maths) - 500) < 64
    assert {frozenset(maths[start : start + 4]) for start in range(0, 400, 4)} == {
        frozenset({"gsm8k0", "gsm8k1", "aime0", "aime1"})
    }


def test_a_far_position_is_reached_directly() -> None:
    sampler = PromptSampler(prompts(a=3, b=4), 0)
    assert sampler[10**15].id in {"a0", "a1", "a2", "b0", "b1", "b2", "b3"}
    assert sampler.epoch_of(10**15) == 10**15 // 7


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"a": 1.0}, r"no share for 'b' \(2 prompts\), expected one for every domain"),
        ({"a": 0.5, "b": 0.25, "x": 0.25}, "got x, for which the dataset has no prompts"),
        ({"a": 0.5, "b": 0.6}, "expected a sum of 1, not 1.1"),
        ({"a": 1.5, "b": -0.5}, "expected positive shares"),
        ({}, "expected a sum of 1, not 0"),
    ],
)
def test_wrong_shares_are_named(shares: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptSampler(prompts(a=1, b=2), 0, True, shares)


def test_no_prompts_and_no_draw_before_the_first() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        PromptSampler([], 0)
    with pytest.raises(IndexError, match="draw -1"):
        PromptSampler(prompts(a=1), 0)[-1]
