"""What ranks read of a folder is what Transformers reads, in any part."""

import random

import pytest
import torch
from torch import Tensor

from roll.models.loading import fit_folder, load_causal_lm, load_config, persistent_buffers
from roll.models.stored import LowPrecision, StoredTensor
from tests.support.known_families import KNOWN, make_known

QUICK = {"qwen2", "qwen3_moe", "gpt_oss"}
"""Tied weights, experts that are merged, and experts that lie in one tensor."""
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KNOWN]


def check_parts(stored: StoredTensor, whole: Tensor) -> None:
    """Compares a flat part and a block in bf16, at random."""
    assert stored.whole().to(whole.dtype).equal(whole)
    for view, dtype in ((whole.reshape(-1), whole.dtype), (whole, torch.bfloat16)):
        offsets = [random.randrange(size) for size in view.shape]
        sizes = [random.randrange(size - start) + 1 for size, start in zip(view.shape, offsets, strict=True)]
        place = torch.full(sizes, 7.0, dtype=dtype)
        stored.copy_into(place, tuple(view.shape), offsets, sizes)
        region = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        assert place.equal(view[region].to(dtype))


@pytest.mark.parametrize("family", CASES)
def test_every_part_of_a_family_is_that_of_transformers(tmp_path, family):
    random.seed(0)
    make_known(tmp_path, family, 96)
    model = load_causal_lm(str(tmp_path), dtype=torch.float32)
    fit = fit_folder("lm", str(tmp_path), load_config(str(tmp_path)))
    for name, tensor in [*model.named_parameters(), *persistent_buffers(model)]:
        check_parts(fit.stored(name), tensor.detach().float())
    merged = [name for name, one in model.named_parameters() if len(fit.stored(name).blocks) == len(one) == 4]
    assert bool(merged) == (family == "qwen3_moe") or family not in QUICK  # experts are read one by one


@pytest.mark.parametrize("sizes", [[40], [12, 28], [7, 20, 13]])
def test_blocks_may_end_anywhere(sizes):
    whole = torch.randn(5, 8)
    pieces = whole.view(-1).split(sizes)
    check_parts(StoredTensor((5, 8), [(len(one), lambda one=one: one) for one in pieces]), whole)


def test_weights_of_few_bits_are_read_in_rows(monkeypatch):
    monkeypatch.setattr("roll.models.stored._MAX_ELEMENTS", 50)
    values, scales = torch.randn(23, 10).to(torch.float8_e4m3fn), torch.rand(6, 3)
    fp8 = LowPrecision("fp8", (4, 4), "F32").stored("w", values, scales)
    assert len(fp8.blocks) == 6
    wide = scales.repeat_interleave(4, 0)[:23].repeat_interleave(4, 1)[:, :10]
    check_parts(fp8, values.float() * wide)
    blocks, exponents = torch.randint(0, 256, (3, 4, 2, 16), dtype=torch.uint8), torch.full((3, 4, 2), 127)
    mxfp4 = LowPrecision("mxfp4", dtype="F32").stored("w", blocks, exponents)
    assert len(mxfp4.blocks) == 3
    check_parts(mxfp4, mxfp4.whole())
