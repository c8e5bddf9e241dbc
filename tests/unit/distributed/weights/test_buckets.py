"""Weight buckets and updates: bit-exact round trips, refusals, and models whose checkpoint names are not their own."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.distributed.weights import deltas
from roll.distributed.weights.adapters import MergedAdapter
from roll.distributed.weights.buckets import (
    ALIGNMENT,
    WeightChecksumError,
    WeightMismatchError,
    checksum,
    pack_buckets,
    unpack_bucket,
)
from roll.distributed.weights.receiver import WeightUpdate
from roll.models.lora import LoraSpec, matrix_shapes
from tests.support.contract import weights_of
from tests.support.families import tiny_config, tiny_model

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
)
KINDS = ("tied", "untied", "mixtral", "qwen3_moe")
SPEC = LoraSpec(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips_bit_for_bit_whatever_the_layout(dtype):
    torch.manual_seed(0)
    shapes = {"matrix": (7, 5), "turned": (3, 9), "vector": (13,), "long": (400, 501), "long, turned": (501, 400)}
    sources = {name: (torch.randn(shape) * 3).to(dtype) for name, shape in shapes.items()}
    sources |= {name: tensor.t() for name, tensor in sources.items() if "turned" in name}
    if dtype in (torch.float32, torch.bfloat16):
        sources["long"][3, 5] = sources["long, turned"][3, 5] = float("nan")
    sources |= {"scalar": torch.ones(()).to(dtype), "empty": torch.empty(0, 4).to(dtype)}
    (bucket,) = pack_buckets(sources.items(), 1 << 24)
    assert bucket.checksum == checksum(bucket.data.copy())
    received = dict(unpack_bucket(bucket))
    assert list(received) == list(sources)
    for name, tensor in sources.items():
        assert received[name].dtype == dtype
        assert received[name].shape == tensor.shape
        assert as_bytes(received[name]) == as_bytes(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0, 1e-3, 0.05, 0.2, 1])
def test_a_delta_leads_to_the_same_bits_or_is_not_shorter(dtype, share, monkeypatch):
    monkeypatch.setattr(deltas, "_PIECE", 4096)
    generator, size = np.random.default_rng(0), dtype.itemsize
    (old,) = pack_buckets([("w", torch.randn(3001, 7).to(dtype)), ("v", torch.ones(5).to(dtype))], 1 << 20)
    new, elements = old.data.copy(), 3001 * 7
    changed = generator.permutation(elements)[: int(share * elements)]
    new[: elements * size].reshape(-1, size)[changed] ^= generator.integers(1, 256, (len(changed), size), np.uint8)
    found = deltas.delta_between(old.outline, old.data, new)
    if found is None:
        assert len(changed) * (min(size, 8) + 1) > 0.9 * len(new)
        return
    counts, delta = found
    least = len(changed) * (min(size, 8) + 1)
    assert least <= len(delta) == deltas.delta_bytes(old.outline, counts) <= least + len(new) // 100 * (1 + 2 // size)
    into = np.full_like(new, 9)
    deltas.apply_delta(old.outline, old.data, counts, delta, into)
    assert into.tobytes() == new.tobytes()


def test_a_delta_tells_zeros_and_nans_apart():
    values = torch.tensor([0x0000, 0x7FC0, 0x7FC1, 0x3F80] + 60 * [0x4000], dtype=torch.int16)
    others = torch.tensor([-0x8000, 0x7FC0, 0x7FC2, 0x3F80] + 60 * [0x4000], dtype=torch.int16)
    (old,), (new,) = (pack_buckets([("w", bits.view(torch.bfloat16))], 1 << 20) for bits in (values, others))
    counts, delta = deltas.delta_between(old.outline, old.data, new.data)
    assert counts == (2,) and delta.tolist() == [0x00, 0x80, 0xC2, 0x7F, 1, 2], "values, little-endian, then steps"


def test_buckets_respect_their_size_except_for_a_larger_tensor():
    lengths = [10, 10, 300, 1, 40, 24, 1]
    tensors = [(f"w{i}", torch.full((n,), float(i))) for i, n in enumerate(lengths)]
    buckets = list(pack_buckets(iter(tensors), 256))
    assert [bucket.outline.names for bucket in buckets] == [("w0", "w1"), ("w2",), ("w3", "w4"), ("w5", "w6")]
    assert [len(bucket.data) % ALIGNMENT for bucket in buckets] == [0] * 4
    assert all(len(bucket.data) <= 256 for bucket in buckets if bucket.outline.names != ("w2",))
    received = [item for bucket in buckets for item in unpack_bucket(bucket)]
    assert all(name == n and torch.equal(t, s) for (name, t), (n, s) in zip(received, tensors, strict=True))
    assert list(pack_buckets([], 256)) == []
    with pytest.raises(ValueError, match="bucket_bytes: 0"):
        list(pack_buckets(tensors, 0))


def test_unpacking_copies_nothing_and_reads_read_only_arrays(recwarn):
    (bucket,) = pack_buckets([("w", torch.arange(8.0)), ("v", torch.arange(3))], 1 << 10)
    bucket.data.setflags(write=False)
    base = bucket.data.__array_interface__["data"][0]
    addresses = [tensor.data_ptr() for _, tensor in unpack_bucket(bucket)]
    assert addresses == [base, base + ALIGNMENT]
    assert not recwarn.list


def test_damage_is_noticed():
    (bucket,) = pack_buckets([("w", torch.arange(64.0))], 1 << 10)
    data = bucket.data.copy()
    data[77] ^= 4
    with pytest.raises(WeightChecksumError, match=r"1 tensors \(w …\): checksum 0x.*, expected 0x"):
        list(unpack_bucket(dataclasses.replace(bucket, data=data)))
    longer, unknown = (dataclasses.replace(bucket.outline, **c) for c in ({"shapes": ((100,),)}, {"dtypes": ("f31",)}))
    with pytest.raises(ValueError, match="w ends at byte 400, the data has 256"):
        list(unpack_bucket(dataclasses.replace(bucket, outline=longer)))
    with pytest.raises(ValueError, match="dtype 'f31'"):
        list(unpack_bucket(dataclasses.replace(bucket, outline=unknown)))


def pair(kind: str) -> list[PreTrainedModel]:
    """Two models of one architecture with different weights."""
    family = {"tied": "qwen2", "untied": "qwen2"}.get(kind, kind)
    config = tiny_config(family, num_hidden_layers=2, tie_word_embeddings=kind == "tied")
    return [tiny_model(config, seed) for seed in (0, 1)]


def read_only_buckets(model: PreTrainedModel):
    """As they come through shared memory; a write to them would end the process there."""
    buckets = list(pack_buckets(weights_of(model).items(), 4096))
    for bucket in buckets:
        bucket.data.setflags(write=False)
    return buckets


def unpacked(buckets) -> dict[str, Tensor]:
    return dict(item for bucket in buckets for item in unpack_bucket(bucket))


def take(receiver: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    WeightUpdate(receiver, tensors).apply(tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_makes_the_receiver_equal_to_the_sender(kind):
    receiver, sender = pair(kind)
    tensors = unpacked(read_only_buckets(sender))
    update = WeightUpdate(receiver, tensors)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected, before = sender(ids).logits, receiver(ids).logits
        assert not torch.equal(before, expected)
        assert torch.equal(receiver(ids).logits, before), "nothing may change before apply"
        update.apply(tensors)
        assert torch.equal(receiver(ids).logits, expected)


def test_what_needs_no_cast_becomes_the_models_without_a_copy_and_is_let_go_at_the_next_update():
    receiver, sender = pair("tied")
    buckets = read_only_buckets(sender)
    watched = [weakref.ref(bucket.data) for bucket in buckets]
    tensors = unpacked(buckets)
    take(receiver, tensors)
    assert {n: p.data_ptr() for n, p in receiver.named_parameters()} == {n: t.data_ptr() for n, t in tensors.items()}
    assert receiver.get_output_embeddings().weight is receiver.get_input_embeddings().weight
    del buckets, tensors
    assert all(array() is not None for array in watched)
    take(receiver, unpacked(read_only_buckets(pair("tied")[0])))
    gc.collect()
    assert [array for array in watched if array() is not None] == []


def test_an_adapter_leaves_the_buckets_of_the_base_as_they_are():
    receiver, sender = pair("untied")
    buckets = read_only_buckets(sender)
    before = [bucket.data.tobytes() for bucket in buckets]
    adapter = MergedAdapter(receiver, SPEC)
    take(receiver, unpacked(buckets))
    torch.manual_seed(3)
    for _ in range(2):  # the second in place of the first, not on top of it
        tensors = {name: torch.randn(shape) for name, shape in matrix_shapes(receiver, SPEC).items()}
        adapter.apply(tensors)
    layer = "model.layers.1.self_attn.q_proj"
    down, up = (tensors[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
    expected = sender.get_parameter(f"{layer}.weight") + 2.0 * up @ down
    torch.testing.assert_close(receiver.get_parameter(f"{layer}.weight"), expected)
    assert [bucket.data.tobytes() for bucket in buckets] == before


def test_weights_come_to_the_host_once_for_all_adapters(monkeypatch):
    receiver, _ = pair("untied")
    adapter, shapes, fetched = MergedAdapter(receiver, SPEC), matrix_shapes(receiver, SPEC), []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: fetched.append(tensor) or tensor)
    for _ in range(3):
        adapter.apply({name: torch.zeros(shape) for name, shape in shapes.items()})
    assert len(fetched) == len(shapes) // 2, "a layer has two matrices"


def test_weights_are_cast_to_the_receivers_dtype():
    receiver, sender = pair("untied")
    take(receiver.to(torch.bfloat16), weights_of(sender))
    for name, parameter in receiver.named_parameters():
        assert torch.equal(parameter, sender.get_parameter(name).to(torch.bfloat16))


@pytest.mark.parametrize("names", [("lm_head.weight",), ("model.embed_tokens.weight", "lm_head.weight")])
def test_tied_weights_may_come_under_any_of_their_names(names):
    receiver, sender = pair("tied")
    weights = weights_of(sender)
    table = weights.pop("model.embed_tokens.weight")
    take(receiver, weights | dict.fromkeys(names, table))
    assert torch.equal(receiver.get_input_embeddings().weight, table)
    assert torch.equal(receiver.get_output_embeddings().weight, table)


def test_all_that_does_not_match_is_listed_at_once():
    receiver, sender = pair("qwen3_moe")
    weights = weights_of(sender)
    expert = "model.layers.1.mlp.experts.2.up_proj.weight"
    del weights[expert]
    weights |= {"model.norm.weight": torch.ones(3), "model.extra": torch.ones(1)}
    before = {name: value.clone() for name, value in receiver.state_dict().items()}
    with pytest.raises(WeightMismatchError) as caught:
        WeightUpdate(receiver, weights)
    shape = "model.norm.weight has shape (3,), expected (64,)"
    for part in (f"missing name {expert}", shape, "unknown name model.extra"):
        assert part in str(caught.value)
    with pytest.raises(WeightMismatchError, match=r"and [0-9]+ more"):
        WeightUpdate(receiver, {})
    assert all(torch.equal(value, before[name]) for name, value in receiver.state_dict().items())
