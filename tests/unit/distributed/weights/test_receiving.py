"""Whole updates of weights on their way into an engine: staged and checked first, or streamed from a device."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping

import pytest
import torch
from torch import Tensor

from roll.distributed.weights.buckets import WeightChecksumError, WeightMismatchError, pack_buckets
from roll.distributed.weights.contents import BucketOutline, WeightBucket
from roll.distributed.weights.receiver import UpdateStream

SHAPES = {"a": (2, 3), "b": (4,), "c": (5, 1)}


def on_host(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> list[WeightBucket]:
    return list(pack_buckets([(name, torch.ones(shape)) for name, shape in shapes.items()], 64))


def on_device(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> list[WeightBucket]:
    """As they come through CUDA IPC or nccl, on a device that every machine has."""
    data = torch.empty(64, dtype=torch.uint8, device="meta")
    outlines = [BucketOutline((name,), ("float32",), (shape,)) for name, shape in shapes.items()]
    return [WeightBucket(outline, data, 0, checked=True) for outline in outlines]


def check(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    if tensors.keys() != SHAPES.keys():
        raise WeightMismatchError("other names")
    return {name: f"engine.{name}" for name in tensors}


class Source:
    """Buckets, and how many of them were asked for."""

    def __init__(self, buckets: Iterable[WeightBucket]) -> None:
        self.buckets, self.given = list(buckets), 0

    async def __aiter__(self) -> AsyncIterator[WeightBucket]:
        for bucket in self.buckets:
            self.given += 1
            yield bucket


async def test_the_first_update_is_checked_as_a_whole_and_later_ones_are_loaded_as_they_come() -> None:
    stream = UpdateStream(check)
    for _ in range(2):  # through host memory, always
        source = Source(on_host())
        buckets, names = await stream.open(aiter(source))
        assert source.given == 3 and names == {name: f"engine.{name}" for name in SHAPES}
        assert [bucket.outline.names async for bucket in buckets] == [("a",), ("b",), ("c",)]
    source = Source(on_device())
    buckets, names = await stream.open(aiter(source))
    assert source.given == 1 and names["c"] == "engine.c"
    for number in range(1, 4):
        assert (await anext(buckets)).outline.names == (list(SHAPES)[number - 1],)
        assert source.given == number, "none is asked for before it can be loaded"
    assert await anext(buckets, None) is None


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"a": (2, 3), "b": (5,)}, r"b has shape \(5,\), expected \(4,\)"),
        ({"a": (2, 3), "x": (4,)}, r"x has shape \(4,\), expected None"),
        ({"a": (2, 3), "c": (5, 1)}, "missing b, which the first update had"),
        ({"a": (2, 3), "b": (4,), "c": (5, 1), "d": (1,)}, "d has shape"),
    ],
)
async def test_an_update_from_a_device_that_is_not_like_the_first_is_refused(
    shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(WeightMismatchError, match=message):
        stream = UpdateStream(check)
        await stream.open(aiter(Source(on_host())))
        buckets, _ = await stream.open(aiter(Source(on_device(shapes))))
        async for _ in buckets:
            pass


async def test_a_first_update_that_is_refused_or_damaged_teaches_nothing() -> None:
    stream = UpdateStream(check)
    with pytest.raises(WeightMismatchError, match="other names"):
        await stream.open(aiter(Source(on_host({"a": (1,)}))))
    damaged = on_host()
    damaged[1].data[0] ^= 1
    with pytest.raises(WeightChecksumError):
        await stream.open(aiter(Source(damaged)))
    _, names = await stream.open(aiter(Source(on_host())))
    assert names.keys() == SHAPES.keys()
