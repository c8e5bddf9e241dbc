"""A catalogue of products, drawn from a seed, with a search over their titles by ``bm25s``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

KINDS = ("basket", "blanket", "bowl", "chair", "clock", "hat", "knife", "lamp", "mirror", "mug", "scarf", "shelf")
ATTRIBUTES: Mapping[str, Sequence[str]] = {
    "colour": ("black", "blue", "green", "red", "white", "yellow"),
    "material": ("glass", "leather", "oak", "steel", "tin", "wool"),
    "size": ("large", "medium", "small"),
}


@dataclass(frozen=True)
class Shelves:
    """Recipe of a catalogue: the words and numbers that it is drawn from."""

    kinds: tuple[str, ...]
    attributes: tuple[tuple[str, ...], ...]
    """Values of each attribute."""
    num_shown: int
    """Attributes that a title says; the others are details."""
    num_products: int
    max_price: int
    num_results: int
    """Products on a page of results."""
    seed: int


@dataclass(frozen=True)
class Product:
    """A thing to buy."""

    kind: str
    values: tuple[str, ...]
    """One of each attribute, in their order."""
    price: int
    """In francs."""

    def title(self, num_shown: int) -> str:
        """As the results list it and the search knows it."""
        return " ".join((*self.values[:num_shown], self.kind))


@dataclass(frozen=True)
class Goal:
    """Demands of a customer."""

    kind: str
    values: tuple[str, ...]
    limit: int
    """Most francs."""

    def score(self, product: Product) -> float:
        """Share of the demands that the product meets: its attributes, the price, the kind; 0 for another kind."""
        if product.kind != self.kind:
            return 0.0
        met = sum(wanted == value for wanted, value in zip(self.values, product.values, strict=True))
        return (1 + met + (product.price <= self.limit)) / (2 + len(self.values))


class Catalogue:
    """Products and the search over them.

    Raises:
        ModuleNotFoundError: bm25s is not installed.
    """

    def __init__(self, shelves: Shelves, products: Sequence[Product] | None = None) -> None:
        try:
            import bm25s
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("shop searches with the package bm25s: pip install 'roll-rl[tools]'") from error
        self.shelves = shelves
        self.products = list(_drawn(shelves) if products is None else products)
        self._tokenize = bm25s.tokenize
        self._index = bm25s.BM25()
        self._index.index(self._words([self.title(place) for place in range(len(self.products))]), show_progress=False)
        self.search = lru_cache(maxsize=4096)(self._search)

    def title(self, place: int) -> str:
        """Of the product at this place of the catalogue."""
        return self.products[place].title(self.shelves.num_shown)

    @cached_property
    def goals(self) -> list[Goal]:
        """Goals at the price of a product, for all of which the search of the whole title lists one that meets them."""
        wanted = dict.fromkeys(Goal(product.kind, product.values, product.price) for product in self.products)
        return [
            goal for goal in wanted if any(goal.score(self.products[n]) == 1 for n in self.search(self.query(goal)))
        ]

    def query(self, goal: Goal) -> str:
        """The title of what is wanted."""
        return Product(goal.kind, goal.values, goal.limit).title(self.shelves.num_shown)

    def _search(self, query: str) -> tuple[int, ...]:
        """The places of the products that fit best, the best one first; equal ones as in the catalogue."""
        words = self._words([query])[0]
        if not words:
            return ()
        scores = np.round(self._index.get_scores(words), 4)  # what fits equally well may differ in the last bit
        best = np.argsort(-scores, kind="stable")[: self.shelves.num_results]
        return tuple(int(place) for place in best if scores[place] > 0)

    def _words(self, texts: list[str]) -> list[list[str]]:
        return list(self._tokenize(texts, return_ids=False, show_progress=False))


@lru_cache(maxsize=16)
def catalogue(shelves: Shelves) -> Catalogue:
    """The catalogue of these shelves, made once in a process."""
    return Catalogue(shelves)


def _drawn(shelves: Shelves) -> Iterator[Product]:
    rng = random.Random(shelves.seed)
    for _ in range(shelves.num_products):
        kind, values = rng.choice(shelves.kinds), tuple(map(rng.choice, shelves.attributes))
        yield Product(kind, values, rng.randint(1, shelves.max_price))


def titles(kinds: Sequence[str], shown: Sequence[Sequence[str]]) -> list[str]:
    """Every title that a product may have."""
    return [" ".join(words) for words in itertools.product(*shown, kinds)]
