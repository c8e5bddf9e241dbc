"""Micro-batches hold every sequence once, respect their limits and waste little; layouts keep tokens in place."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.data.batch import Batch
from roll.data.packing import make_micro_batches, make_packs, packed_row, padding_waste, rectangle, take_micro_batch

lengths_lists = st.lists(st.integers(1, 60), max_size=40).map(torch.tensor).map(lambda t: t.long())


def make_batch() -> Batch:
    return Batch(
        lengths_B=torch.tensor([3, 2, 4]),
        tokens_T=torch.tensor([11, 12, 13, 21, 22, 31, 32, 33, 34]),
        loss_mask_T=torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 0]).bool(),
    )


@given(lengths_lists, st.integers(1, 9), st.integers(1, 200), st.integers(1, 8))
def test_micro_batches_hold_every_sequence_once_within_the_limits(
    lengths: torch.Tensor, max_sequences: int, max_tokens: int, round_to: int
) -> None:
    groups = make_micro_batches(lengths, max_sequences=max_sequences, max_tokens=max_tokens, round_to=round_to)
    assert sorted(row for rows in groups for row in rows.tolist()) == list(range(len(lengths)))
    for rows in groups:
        width = -(-int(lengths[rows].max()) // round_to) * round_to
        assert len(rows) <= max_sequences
        assert len(rows) * width <= max_tokens or len(rows) == 1


@given(lengths_lists, st.integers(1, 200))
def test_packs_hold_every_sequence_once_within_the_budget(lengths: torch.Tensor, max_tokens: int) -> None:
    packs = make_packs(lengths, max_tokens=max_tokens)
    assert sorted(row for rows in packs for row in rows.tolist()) == list(range(len(lengths)))
    loads = sorted(int(lengths[rows].sum()) for rows in packs)
    assert all(int(lengths[rows].sum()) <= max_tokens for rows in packs if len(rows) > 1)
    assert len(loads) < 2 or loads[0] + loads[1] > max_tokens, "two rows that fit in one"


def test_padding_waste_counts_padded_tokens_and_sorting_by_length_leaves_hardly_any() -> None:
    lengths = torch.randint(5, 400, (512,), generator=torch.Generator().manual_seed(0))
    budgeted = padding_waste(lengths, make_micro_batches(lengths, max_tokens=4096))
    unsorted = padding_waste(lengths, list(torch.arange(512).split(16)))
    assert budgeted < 0.05 < 0.4 < unsorted
    assert padding_waste(torch.tensor([4, 2]), [torch.tensor([0, 1])]) == pytest.approx(2 / 8)
    assert padding_waste(torch.tensor([3, 3]), [torch.tensor([0, 1])], round_to=4) == pytest.approx(2 / 8)
    assert padding_waste(torch.tensor([], dtype=torch.int64), []) == 0


def test_sequence_over_the_budget_gets_its_own_micro_batch_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        groups = make_micro_batches(torch.tensor([5, 50, 5]), max_tokens=10)
    assert [rows.tolist() for rows in groups] == [[1], [0, 2]]
    assert "50 tokens exceeds the budget of 10" in caplog.text


def test_rectangles_pad_on_the_right_packed_rows_restart_positions_and_no_first_token_is_learned() -> None:
    inputs = rectangle(make_batch(), round_to=3)
    assert inputs.position_ids_RC is None
    assert inputs.input_ids_RC.tolist() == [[11, 12, 13, 0, 0, 0], [21, 22, 0, 0, 0, 0], [31, 32, 33, 34, 0, 0]]
    assert inputs.input_ids_RC.flatten()[inputs.source_K].tolist() == [11, 12, 21, 32]
    assert inputs.target_K.tolist() == [12, 13, 22, 33]
    assert inputs.token_K.tolist() == [1, 2, 4, 7]
    inputs = packed_row(make_batch())
    assert inputs.position_ids_RC is not None
    assert inputs.position_ids_RC.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert inputs.input_ids_RC.flatten()[inputs.source_K].tolist() == [11, 12, 21, 32]
    batch = make_batch()
    with pytest.raises(ValueError, match="first token"):
        rectangle(batch.replace(loss_mask_T=torch.ones(9).bool()))


def test_placeholder_has_the_same_columns_and_no_loss_tokens() -> None:
    batch = make_batch().replace(
        scores_B=torch.ones(3), parts_BK=torch.ones(3, 2), advantages_T=torch.ones(9), ref_hidden_TH=torch.ones(9, 4)
    )
    placeholder = take_micro_batch(batch, [torch.tensor([2])], 1)
    assert not placeholder.loss_mask_T.any()
    assert placeholder.scores_B is not None and placeholder.advantages_T is not None
    assert placeholder.parts_BK is not None and placeholder.parts_BK.shape == (1, 2)
    assert placeholder.ref_hidden_TH is not None and placeholder.ref_hidden_TH.shape == (2, 4)
    assert placeholder.values_T is None
    assert take_micro_batch(batch, [torch.tensor([2])], 0).tokens_T.tolist() == [31, 32, 33, 34]


@pytest.mark.parametrize("limits", [{"max_sequences": 0}, {"max_tokens": 0}, {"round_to": 0}])
def test_limits_below_one_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(limits))}: 0, expected at least 1"):
        make_micro_batches(torch.tensor([3]), **limits)
