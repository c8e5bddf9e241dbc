"""An endless mixture of several kinds, exact from the first to the last."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor


class Mixture:
    """Order of kinds, one at each index: of the first ``n``, each kind has its share of ``n`` to within one.

    The j-th of a kind with share s belongs to the indices from ⌊j/s⌋ to ⌈(j+1)/s⌉ − 1. Whichever kind may come and must
    come first is taken, which keeps to all of these windows (earliest deadline first; Tijdeman 1980 has the bound).

    Args:
        weights: of the kinds, above zero, in any unit.
        seed: decides where several kinds are equally urgent.
    """

    def __init__(self, weights: Sequence[float], seed: int = 0) -> None:
        exact = [Fraction(str(weight)) for weight in weights]  # 0.1 is meant as a tenth
        self._shares = [weight / sum(exact) for weight in exact]
        self._counts = [0] * len(exact)
        self._rng = random.Random(seed)
        self._order: list[int] = []

    def __getitem__(self, index: int) -> int:
        """The kind at an index from 0, as its place in ``weights``."""
        while len(self._order) <= index:
            self._order.append(self._next(len(self._order)))
        return self._order[index]

    def _next(self, index: int) -> int:
        urgency = {
            kind: (ceil((count + 1) / share), self._rng.random())
            for kind, (count, share) in enumerate(zip(self._counts, self._shares, strict=True))
            if floor(count / share) <= index
        }
        kind = min(urgency, key=urgency.__getitem__)
        self._counts[kind] += 1
        return kind
