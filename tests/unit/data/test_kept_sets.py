"""Kept sets in bytes and back, against Python's sets."""

import numpy as np
import pytest
import torch

from roll.data.batch import Batch
from roll.data.kept_sets import KeptSets, kept_item, kept_sizes

VOCABULARY = 152_000


def test_sets_come_back_where_they_were_in_no_more_bytes_than_promised():
    rng = np.random.default_rng(0)
    sizes = [1, 0, 7, 4096, 300, 0, 1, 20_000]
    sets = [rng.choice(VOCABULARY, size, replace=False) for size in sizes]
    sets[0], sets[6] = np.array([0]), np.array([VOCABULARY - 1])
    items = kept_item(3, sets[:4]), kept_item(300, sets[4:])  # two turns of one row
    for item, own in zip(items, (sizes[:4], sizes[4:]), strict=True):
        assert item.data.nbytes <= 8 + sum(3 + size + VOCABULARY // 128 + VOCABULARY // 16384 for size in own)
    tokens = torch.zeros(310, dtype=torch.int64)
    places = [*range(3, 7), *range(300, 304)]
    for place, ids in zip(places, sets, strict=True):
        tokens[place] = int(ids[0]) if len(ids) else 5
    lengths, mask_T = torch.tensor([2, 304, 4]), torch.zeros(310, dtype=torch.bool)
    batch = Batch(lengths, tokens.roll(2), mask_T, kept_I=((), items, ()))

    found = KeptSets.of(batch.select([2, 1]))  # rows of other lengths in front

    expected = {4 + place: set(ids.tolist()) for place, ids in zip(places, sets, strict=True) if len(ids)}
    for token in range(batch.num_tokens - 2):
        ids = found[torch.tensor([token])].ids.tolist()
        assert ids == sorted(expected.get(token, ()))
    mask = found[4:].mask(1000, 500)
    for place, ids in zip(places, sets, strict=True):
        assert mask[place].nonzero()[:, 0].tolist() == [
            i for i in range(500) if not len(ids) or i + 1000 in expected[4 + place]
        ]
    assert [*kept_sizes(items[0]), *kept_sizes(items[1])] == sizes
    with pytest.raises(ValueError, match="kept_I: 6 sampled tokens are not in their own kept sets"):
        KeptSets.of(batch.replace(tokens_T=torch.full_like(tokens, 77_777)))
