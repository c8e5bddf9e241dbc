"""Buckets in host memory, read by an engine's own processes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from roll.distributed.weights.contents import WeightBucket
from roll.distributed.weights.segments import SegmentPool, SharedMemory


class Lender:
    """Lends buckets where they lie, or as copies where no other process could map that memory."""

    def __init__(self) -> None:
        self._copies = SegmentPool()
        self._lent: dict[str, tuple[set[str], object]] = {}
        """By segment: who reads it, and what keeps its bytes as they are."""
        self.segments: list[str] = []
        """Those of this update."""

    def lend(self, bucket: WeightBucket, readers: Iterable[str]) -> SharedMemory:
        """Place where ``readers`` find a bucket in host memory; its bytes stay until each has given it back."""
        place, data = bucket.place, bucket.data
        assert isinstance(data, np.ndarray)
        if place is None:
            memory = self._copies.allocate(len(data))
            np.copyto(memory, data)
            segment = self._copies.find(memory)
            assert segment is not None
            place = segment.place
            self._copies.hand_over(segment, readers)
        self._lent[place.segment] = set(readers), data
        self.segments.append(place.segment)
        return place

    def take_back(self, segments: Iterable[str], reader: str) -> None:
        """The reader is done with these."""
        segments = tuple(segments)
        self._copies.release(segments, reader)
        for segment in segments:
            if segment in self._lent:
                readers, _ = self._lent[segment]
                readers.discard(reader)
                if not readers:
                    del self._lent[segment]

    def end(self, num_copies: int) -> None:
        """The update is over; keeps at most so many free copies for the next."""
        self.segments = []
        self._copies.trim(num_copies, 0)
