"""Rows for Megatron that hold common prompts once: their widths, and attention by their plan."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from roll.distributed.strategy.megatron.input import Rounding, grid_shape, lay_out
from roll.distributed.strategy.megatron.substitutes import CoreAttention
from tests.support.harness import make_batch, make_groups

HEADS, KEY_HEADS, WIDTH = 4, 2, 8


@pytest.mark.parametrize("packing", [False, True])
def test_a_row_is_shorter_than_its_sequences_and_padded_for_tensor_parallel_ranks(packing: bool) -> None:
    groups = make_groups(0)
    found = lay_out(groups, rounding := Rounding(1, packing, 8, 0, 1, sharing=True))
    rows, columns = found.input_ids_RS.shape
    assert (rows, columns) == grid_shape(groups, rounding)
    assert rows == 1 and columns % 8 == 0 and columns < 0.8 * groups.num_tokens
    assert found.input_ids_RS[0, found.source_K].equal(groups.tokens_T[found.token_K - 1])
    assert found.planned is not None
    assert found.planned.positions_C[found.source_K].equal(groups.positions_T[found.token_K - 1])
    wider = lay_out(groups, rounding, (1, columns + 16))
    assert wider.input_ids_RS.shape == (1, columns + 16)
    assert wider.input_ids_RS[0, wider.source_K].equal(found.input_ids_RS[0, found.source_K])


def test_what_does_not_share_enough_stays_a_rectangle() -> None:
    batch = make_batch(0)
    assert lay_out(batch, Rounding(1, False, 1, 0, 1, sharing=True)).planned is None


def test_attention_by_the_plan_is_that_of_the_sequences() -> None:
    groups = make_groups(0)
    attention = CoreAttention(None, SimpleNamespace(cp=SimpleNamespace(size=lambda: 1)))
    plain, shared = (lay_out(groups, Rounding(1, False, 4, 0, 1, sharing=sharing)) for sharing in (False, True))
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(2, 61, heads, WIDTH, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]

    def attended(ids_RS: Tensor, positions_RS: Tensor, source_K: Tensor, params: object) -> Tensor:
        states = [token[ids_RS.T] + place[positions_RS.T % 61] for token, place in tables]
        found: Tensor = attention(*states, packed_seq_params=params).flatten(0, 1).index_select(0, source_K)
        return found

    rows, columns = plain.input_ids_RS.shape
    expected = attended(plain.input_ids_RS, torch.arange(columns).expand(rows, -1), plain.source_K, None)
    assert shared.planned is not None
    found = attended(shared.input_ids_RS, shared.planned.positions_C[None], shared.source_K, shared.packed_seq_params())
    torch.testing.assert_close(found, expected)
