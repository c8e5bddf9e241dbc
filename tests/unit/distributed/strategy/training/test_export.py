"""Buckets of an export: planned once, packed from pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from roll.distributed.strategy.training.pieces import ShardLayout, Slice, WeightShard, everywhere, weight_shard
from roll.distributed.strategy.training.trainer import export, plan_buckets
from roll.distributed.weights.buckets import pack_buckets, unpack_bucket


def spread(tensor: Tensor) -> ShardLayout:
    return ShardLayout(tuple(tensor.shape), tensor.dtype, tensor.device, everywhere(tensor.shape), lambda: tensor)


def plain(name: str, tensor: Tensor) -> WeightShard:
    return weight_shard(name, spread(tensor))


def split(name: str, tensor: Tensor) -> WeightShard:
    """A fused parameter: a tensor of a checkpoint for each row."""

    def make(whole: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return {f"{name}.{i}": row for i, row in enumerate(whole[0])}

    return WeightShard([spread(tensor)], make)


@pytest.mark.parametrize("check", [True, False])
def test_an_export_is_what_packing_the_tensors_gives(check: bool) -> None:
    torch.manual_seed(0)
    a, b, fused = torch.randn(7, 3), torch.randn(50).to(torch.bfloat16), torch.randn(40, 16)
    named = {"a": a, **{f"f.{i}": row for i, row in enumerate(fused)}, "b": b}
    planned = plan_buckets([plain("a", a), split("f", fused), plain("b", b)], 512)
    expected = list(pack_buckets(named.items(), 512))
    assert [bucket.outline for bucket in planned] == [bucket.outline for bucket in expected]
    for _ in range(2):
        buckets = list(export(planned, [0], check=check))
        assert [bucket.checksum for bucket in buckets] == [one.checksum if check else None for one in expected]
        found = {name: tensor for bucket in buckets for name, tensor in unpack_bucket(bucket)}
        assert found.keys() == named.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in named.items())
        for tensor in (a, b, fused):
            tensor.add_(1)
        expected = list(pack_buckets(named.items(), 512))


def test_a_fused_parameter_is_gathered_for_the_bucket_in_which_it_begins() -> None:
    planned = plan_buckets([plain("a", torch.ones(16)), split("f", torch.ones(5, 16))], 128)
    assert [bucket.outline.names for bucket in planned] == [("a", "f.0"), ("f.1", "f.2"), ("f.3", "f.4")]
    assert [len(bucket.pieces) for bucket in planned] == [2, 0, 0]
    with pytest.raises(ValueError, match="bucket_bytes: 0"):
        plan_buckets([], 0)


def test_a_rank_that_serves_nobody_reads_nothing_that_nobody_needs() -> None:
    def own() -> Tensor:
        raise AssertionError("read")

    everyones = ShardLayout((3,), torch.float32, torch.device("cpu"), [Slice((0,), (3,), (0, 1))], own)
    assert list(export(plan_buckets([weight_shard("a", everyones)], 64), [1], check=True)) == []
