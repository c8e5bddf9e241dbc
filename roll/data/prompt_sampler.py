"""The order of a run's prompts: a pure function of the seed, so that a position is one integer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from roll.configs.data import probability_problems
from roll.configs.problems import ConfigErrors
from roll.data.columns import IntArray
from roll.data.prompts import Prompt
from roll.utils.hashing import derive_seed

_BLOCK = 1024
"""Draws whose domains are chosen together. Part of the order: another number, another order."""

_CACHED = 16


class PromptSampler:
    """``sampler[n]`` is the prompt of the n-th draw of a run, n = 0, 1, 2 …, in any order of access.

    Each domain is met in epochs: every prompt of it once, then every prompt again in a new order. Without
    ``interleave_probs`` the whole dataset is one domain. With them each draw's domain is random by its share, and
    small domains repeat sooner than large ones.

    Args:
        shuffle: a new order in every epoch; otherwise that of the dataset.
        interleave_probs: share of each domain, all positive, sum 1; every prompt belongs to one of them.
        domain_of_tag: the domains of the tags, where domains are not the tags themselves.

    Raises:
        ValueError: no prompts, shares that are no distribution, a domain without prompts, or a tag without a share.
    """

    def __init__(
        self,
        dataset: Sequence[Prompt],
        seed: int,
        shuffle: bool = True,
        interleave_probs: Mapping[str, float] | None = None,
        domain_of_tag: Mapping[str, str] | None = None,
    ) -> None:
        if not dataset:
            raise ValueError("the dataset has no prompts, expected at least one")
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        if interleave_probs is None:
            self._names = [""]
            self._members = [np.arange(len(dataset), dtype=np.int64)]
            self._mixer = None
        else:
            if wrong := list(probability_problems(dict(interleave_probs))):
                raise ConfigErrors(wrong)
            # Sorted, so that the order of the keys in a file does not matter.
            self._names = sorted(interleave_probs)
            self._members = _members(dataset, self._names, domain_of_tag or {})
            self._mixer = _Mixer([interleave_probs[name] for name in self._names], seed)
        self._order = lru_cache(maxsize=_CACHED * len(self._names))(self._make_order)

    def __getitem__(self, n: int) -> Prompt:
        domain, turn = self._locate(n)
        members = self._members[domain]
        epoch, position = divmod(turn, len(members))
        return self._dataset[int(members[self._order(domain, epoch)[position]])]

    def epoch_of(self, n: int) -> int:
        """Number of times that the prompt of the n-th draw was drawn before."""
        domain, turn = self._locate(n)
        return turn // len(self._members[domain])

    def _locate(self, n: int) -> tuple[int, int]:
        """The domain of draw ``n``, and how many earlier draws were of that domain."""
        if n < 0:
            raise IndexError(f"draw {n}, expected at least 0")
        return (0, n) if self._mixer is None else self._mixer.locate(n)

    def _make_order(self, domain: int, epoch: int) -> IntArray:
        size = len(self._members[domain])
        if not self._shuffle:
            return np.arange(size, dtype=np.int64)
        seed = derive_seed(self._seed, "prompts", "order", self._names[domain], epoch)
        return np.random.Generator(np.random.PCG64(seed)).permutation(size)


class _Mixer:
    """Domain of each draw. Blocks of draws are seeded by their number; their counts are summed as needed."""

    def __init__(self, probs: Sequence[float], seed: int) -> None:
        # The last bound is left out: whatever rounding leaves above the others is the last domain's.
        self._bounds = np.cumsum(probs)[:-1]
        self._num_domains = len(probs)
        self._seed = seed
        self._before = [np.zeros(self._num_domains, dtype=np.int64)]  # draws of each domain before each block
        self._domains = lru_cache(maxsize=_CACHED)(self._make_domains)

    def locate(self, n: int) -> tuple[int, int]:
        block, position = divmod(n, _BLOCK)
        while len(self._before) <= block:
            counts = np.bincount(self._domains(len(self._before) - 1), minlength=self._num_domains)
            self._before.append(self._before[-1] + counts)
        domains = self._domains(block)
        domain = int(domains[position])
        return domain, int(self._before[block][domain] + np.count_nonzero(domains[:position] == domain))

    def _make_domains(self, block: int) -> IntArray:
        generator = np.random.Generator(np.random.PCG64(derive_seed(self._seed, "prompts", "domains", block)))
        return np.searchsorted(self._bounds, generator.random(_BLOCK), side="right").astype(np.int64)


def _members(dataset: Sequence[Prompt], domains: Sequence[str], domain_of_tag: Mapping[str, str]) -> list[IntArray]:
    """Indices of each domain's prompts, in the order of the dataset."""
    members: dict[str, list[int]] = {domain: [] for domain in domains}
    unknown: dict[str, int] = {}
    for index, prompt in enumerate(dataset):
        domain = domain_of_tag.get(prompt.tag, prompt.tag)
        if domain in members:
            members[domain].append(index)
        else:
            unknown[domain] = unknown.get(domain, 0) + 1
    if unknown:
        seen = ", ".join(f"{domain!r} ({count:,} prompts)" for domain, count in sorted(unknown.items()))
        raise ValueError(
            f"domain_interleave_probs: got no share for {seen}, expected one for every domain of the dataset; "
            f"it names {', '.join(domains) or 'none'}"
        )
    empty = [domain for domain in domains if not members[domain]]
    if empty:
        raise ValueError(
            f"domain_interleave_probs: got {', '.join(empty)}, for which the dataset has no prompts; expected domains "
            "of the dataset"
        )
    return [np.array(members[domain], dtype=np.int64) for domain in domains]
