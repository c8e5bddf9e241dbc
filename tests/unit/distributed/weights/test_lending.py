"""Buckets that an engine's own processes read."""

from __future__ import annotations

from dataclasses import replace

import torch

from roll.distributed.weights.buckets import as_tensor, pack_buckets, packing_into
from roll.distributed.weights.lending import Lender
from roll.distributed.weights.segments import SegmentPool, SegmentReader


def test_what_lies_in_shared_memory_is_lent_where_it_lies_until_all_have_given_it_back() -> None:
    pool, lender = SegmentPool(), Lender()
    with packing_into(pool.allocate):
        (bucket,) = pack_buckets([("w", torch.arange(100.0))], 4096)
    segment = pool.find(bucket.data)
    assert segment is not None
    pool.hand_over(segment, ["the worker"])
    reader = SegmentReader()
    place = lender.lend(
        replace(bucket, data=reader.read(segment.place, len(bucket.data)), place=segment.place), ["0", "1"]
    )
    assert place == segment.place and lender.segments == [segment.id]
    lender.take_back([segment.id], "0")
    assert reader.take_released() == (), "another still reads it"
    lender.take_back([segment.id], "1")
    assert reader.take_released() == (segment.id,)


def test_what_no_other_process_could_map_is_copied_into_memory_that_is_used_again() -> None:
    lender, places = Lender(), set()
    for value in range(3):
        (bucket,) = pack_buckets([("w", torch.full((100,), float(value)))], 4096)
        place = lender.lend(bucket, ["it"])
        places.add(place)
        seen = as_tensor(SegmentReader().read(place, len(bucket.data)))[:400].view(torch.float32)
        assert seen.tolist() == [float(value)] * 100
        lender.take_back(lender.segments, "it")
        lender.end(1)
        assert lender.segments == []
    assert len(places) == 1
