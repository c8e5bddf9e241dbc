"""Mixtures: every share right at every length."""

from collections import Counter
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from roll.configs.env import Mixture

WEIGHTS = st.lists(st.one_of(st.integers(1, 50), st.floats(0.01, 9.0)), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(weights=WEIGHTS, seed=st.integers(0, 9))
def test_each_share_is_right_to_within_one_at_every_length(weights, seed):
    mixture, total, counts = Mixture(weights, seed), sum(map(Fraction, map(str, weights))), Counter[int]()
    for length in range(1, 80):
        counts[mixture[length - 1]] += 1
        assert all(abs(counts[k] - length * Fraction(str(w)) / total) < 1 for k, w in enumerate(weights))


def test_whole_rounds_are_exact_and_the_order_depends_on_the_seed_alone():
    mixture = Mixture([0.7, 0.1, 0.2])
    for start in range(0, 300, 10):
        assert Counter(mixture[start + n] for n in range(10)) == {0: 7, 1: 1, 2: 2}

    def order(seed: int) -> list[int]:
        mixture = Mixture([1, 1, 1], seed)
        return [mixture[n] for n in range(30)]

    backwards = Mixture([1, 1, 1], 5)
    assert order(5) == order(5) == [backwards[n] for n in reversed(range(30))][::-1]
    assert len({tuple(order(seed)) for seed in range(6)}) > 1
