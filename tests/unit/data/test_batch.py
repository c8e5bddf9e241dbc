"""The ragged batch against plain lists of sequences; kept sets in bytes and back, against Python's sets."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.types import require_finite
from roll.data.batch import Batch
from roll.data.columns import Item
from roll.data.kept_sets import KeptSets, kept_item, kept_sizes
from roll.data.packing import (
    make_micro_batches,
    make_packs,
    packed_row,
    padding_waste,
    rectangle,
    rows_by_pictures,
    take_micro_batch,
)
from roll.data.stored import Arrays, heavy, joined, leave, store

Sequences = list[list[int]]
sequences_strategy = st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=7), min_size=0, max_size=9)


def make_batch(sequences: Sequences) -> Batch:
    """Every kind of column: ids, a mask and a score per token, an index and a score per sequence."""
    tokens = torch.tensor([token for tokens in sequences for token in tokens], dtype=torch.int64)
    return Batch(
        lengths_B=torch.tensor([len(tokens) for tokens in sequences], dtype=torch.int64),
        tokens_T=tokens,
        loss_mask_T=tokens % 2 == 0,
        rewards_T=tokens.float() / 2,
        group_B=torch.tensor([tokens[0] for tokens in sequences], dtype=torch.int64),
        scores_B=torch.tensor([sum(tokens) for tokens in sequences], dtype=torch.float32),
        ref_hidden_TH=hidden(tokens),
    )


def hidden(tokens_T: torch.Tensor) -> torch.Tensor:
    return torch.stack([tokens_T, -tokens_T, tokens_T * 2], dim=1).float()


def lists(batch: Batch) -> Sequences:
    """Back to one list per sequence, after a check that the other columns moved along."""
    assert torch.equal(batch.loss_mask_T, batch.tokens_T % 2 == 0)
    assert torch.equal(batch.rewards_T, batch.tokens_T.float() / 2)
    assert torch.equal(batch.ref_hidden_TH, hidden(batch.tokens_T))
    found = [part.tolist() for part in batch.tokens_T.split(batch.lengths_B.tolist())] if len(batch.lengths_B) else []
    assert batch.group_B.tolist() == [tokens[0] for tokens in found]
    assert batch.scores_B.tolist() == [sum(tokens) for tokens in found]
    return found


@given(sequences_strategy)
def test_positions_and_rows_count_as_lists_do(sequences):
    batch = make_batch(sequences)
    assert lists(batch) == sequences
    assert batch.num_sequences == len(sequences)
    assert batch.num_tokens == sum(map(len, sequences))
    assert batch.positions_T.tolist() == [i for tokens in sequences for i in range(len(tokens))]
    assert batch.rows_T.tolist() == [row for row, tokens in enumerate(sequences) for _ in tokens]
    assert batch.offsets_B.tolist() == [sum(map(len, sequences[:row])) for row in range(len(sequences))]


@given(sequences_strategy, st.data())
def test_select_takes_any_rows_in_any_order(sequences, data):
    batch = make_batch(sequences)
    rows = data.draw(st.lists(st.sampled_from(range(len(sequences))), max_size=12)) if sequences else []
    expected = [sequences[row] for row in rows]
    assert lists(batch.select(rows)) == expected
    assert lists(batch.select(torch.tensor(rows, dtype=torch.int64))) == expected
    assert batch.tokens_T[batch.token_index(rows)].tolist() == [token for tokens in expected for token in tokens]


@given(sequences_strategy, st.integers(1, 6), st.none() | st.integers(0, 50))
def test_split_gives_every_row_to_one_part_and_balances_tokens_or_the_work_of_attention(sequences, num_parts, linear):
    batch = make_batch(sequences)
    parts = batch.split(num_parts) if linear is None else batch.split(num_parts, linear)
    assert len(parts) == num_parts
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(sequences)))
    assert sum(len(part) > 0 for part in parts) == min(num_parts, len(sequences))
    works = [len(one) if linear is None else linear * len(one) + len(one) ** 2 for one in sequences]
    loads = [sum(works[row] for row in part.tolist()) for part in parts]
    # Longest first onto the lightest: no two parts differ by more than the longest sequence.
    assert max(loads) - min(loads) <= max(works, default=0)
    assert all(part.dtype == torch.int64 for part in parts)


@given(sequences_strategy, st.integers(1, 5), st.data())
def test_some_rows_are_split_as_a_batch_of_them_would_be(sequences, num_parts, data):
    batch = make_batch(sequences)
    rows = torch.tensor(data.draw(st.permutations(range(len(sequences))))[: len(sequences) // 2], dtype=torch.int64)
    alone = [rows[part].tolist() for part in batch.select(rows).split(num_parts)]
    assert [part.tolist() for part in batch.split(num_parts, rows=rows)] == alone


@given(sequences_strategy)
def test_loss_tokens_are_counted_per_row(sequences):
    batch = make_batch(sequences)
    counts = [sum(token % 2 == 0 for token in tokens) for tokens in sequences]
    assert batch.loss_tokens_B.tolist() == counts
    assert batch.rows_with_loss.tolist() == [row for row, count in enumerate(counts) if count]


def test_a_narrowed_batch_has_the_named_columns_and_all_of_rows():
    batch = make_batch([[1, 2], [3]])
    narrowed = batch.only({"rewards_T", "values_T"})
    assert narrowed.ref_hidden_TH is None and narrowed.rewards_T is batch.rewards_T
    assert narrowed.tokens_T is batch.tokens_T and narrowed.scores_B is batch.scores_B


@dataclass(frozen=True)
class Shelf:
    """A block, and what was fetched of all of them."""

    number: int
    held: ClassVar[list[Arrays]] = []
    fetched: ClassVar[list[int]] = []

    @classmethod
    def put(cls, arrays: Arrays) -> Shelf:
        cls.held.append(pickle.loads(pickle.dumps(arrays)))
        return cls(len(cls.held) - 1)

    @classmethod
    def fetch(cls, blocks: Sequence[Shelf]) -> list[Arrays]:
        cls.fetched.append(len(blocks))
        return [cls.held[block.number] for block in blocks]


def test_pictures_that_were_left_travel_as_references_and_are_fetched_at_once():
    large, other, small = (Item(np.full((side, 200, 3), side, dtype=np.uint8)) for side in (200, 201, 2))
    same = Item(large.data.copy())
    leave([large, same, other, small], Shelf.put)
    assert len(Shelf.held) == 2 and not heavy([large, same, other, small]), "equal ones are left once"
    batch = make_batch([[1], [2], [3]]).replace(items_I=((large, small), (same,), (other, same)))
    sent = pickle.dumps(batch)
    assert len(sent) < 5000
    batch = pickle.loads(sent).select([2, 1])
    Shelf.fetched.clear()
    batch.fetched()
    assert Shelf.fetched == [2]
    for found, expected in zip(batch.items_I, ((other, same), (same,)), strict=True):
        assert found == expected and all(Item(item.data).hash == item.hash for item in found)
    assert Shelf.fetched == [2] and len(pickle.dumps(batch)) < 5000, "what was fetched does not travel on"
    Shelf.held.clear()


@given(sequences_strategy.filter(bool), st.integers(1, 3), st.data())
def test_stored_columns_move_along_and_are_fetched_when_they_are_read(sequences, num_parts, data):
    whole = make_batch(sequences)
    parts = [part for part in whole.split(num_parts) if len(part)]
    left = [
        store({name: getattr(share, name) for name in ("tokens_T", "ref_hidden_TH", "rewards_T")}, share.lengths_B, put)
        for share, put in ((whole.select(part), Shelf.put) for part in parts)
    ]
    batch = whole.replace(**{name: joined([one[name] for one in left], whole.lengths_B, parts) for name in left[0]})
    rows = data.draw(st.lists(st.sampled_from(range(len(sequences))), max_size=12))
    Shelf.fetched.clear()
    chosen = pickle.loads(pickle.dumps(batch.select(rows).replace(group_B=whole.select(rows).group_B)))
    assert Shelf.fetched == [] and chosen.num_tokens == sum(len(sequences[row]) for row in rows)
    assert lists(chosen.fetched()) == lists(chosen) == [sequences[row] for row in rows]
    needed = sum(any(row in part.tolist() for row in rows) for part in parts)
    assert Shelf.fetched == [needed] * 4 * bool(needed), "all at once, then each for itself"
    Shelf.fetched.clear()
    lists(chosen)
    require_finite(batch, "rewards_T")
    assert Shelf.fetched == [], "what was read is kept, and sums say that all is finite"
    some = joined([left[0]["rewards_T"]], whole.lengths_B, parts[:1], unset=7).value
    assert set(some[~torch.isin(whole.rows_T, parts[0])].tolist()) <= {7.0}


def test_one_long_sequence_weighs_as_much_as_many_short_ones():
    batch = make_batch([[1] * length for length in (8, 4, 4, 4, 4)])
    by_tokens, by_work = batch.split(2), batch.split(2, 0)  # 8² = 4 × 4²
    assert sorted(len(part) for part in by_tokens) == [2, 3] and sorted(len(part) for part in by_work) == [1, 4]
    lengths = {"min": 8.0, "max": 16.0, "minmax_diff": 8.0, "balanced_min": 12.0, "balanced_max": 12.0, "mean": 12.0}
    assert batch.balance(2) == {f"global_seqlen/{name}": value for name, value in lengths.items()}
    assert batch.balance(2, 0)["global_seqlen/balanced_max"] == 16.0


def test_split_keeps_groups_whole_where_that_costs_no_balance():
    batch = make_batch([[1] * length for length in (5, 4, 6, 5, 5, 6, 4, 5)])
    whole = [part.tolist() for part in batch.replace(group_B=torch.tensor([7, 7, 3, 3, 9, 9, 4, 4])).split(2)]
    assert whole in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[2, 3, 6, 7], [0, 1, 4, 5]])
    uneven = batch.replace(group_B=torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])).split(2)
    assert [part.tolist() for part in uneven] == [part.tolist() for part in batch.split(2)]


def test_an_empty_share_goes_through_every_method():
    full = make_batch([[1, 2, 3], [4]])
    empty = full.select([])
    assert (empty.num_sequences, empty.num_tokens) == (0, 0)
    assert [column is None for column in vars(empty).values()] == [column is None for column in vars(full).values()]
    assert [len(part) for part in empty.split(3)] == [0, 0, 0]
    assert empty.select([]).token_index([]).tolist() == []
    assert (len(empty.offsets_B), len(empty.rows_T), len(empty.positions_T)) == (0, 0, 0)
    assert pickle.loads(pickle.dumps(empty)).num_sequences == 0


@pytest.mark.parametrize(
    ("field", "shape", "expected"),
    [
        ("loss_mask_T", (3,), "(4)"),
        ("group_B", (4,), "(2)"),
        ("values_T", (2, 2), "(4)"),
        ("ref_hidden_TH", (3, 2), "(4, H)"),
        ("ref_hidden_TH", (4, 2, 2), "(4, H)"),
    ],
)
def test_a_wrong_shape_names_the_field(field, shape, expected):
    batch = make_batch([[1, 2, 3], [4]])
    with pytest.raises(ValueError, match=re.escape(f"Batch.{field}: got shape {shape}, expected {expected}")):
        batch.replace(**{field: torch.zeros(shape)})


def test_a_batch_does_not_change():
    batch = make_batch([[1, 2]])
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.tokens_T = torch.zeros(2)  # type: ignore[misc]
    assert batch.replace(rewards_T=None).rewards_T is None
    assert batch.rewards_T is not None


@pytest.mark.filterwarnings("error")
def test_pickles_out_of_band_without_a_copy_and_read_only_memory_gives_a_usable_batch_without_a_warning():
    """As out of Ray's object store, where arrays are read-only."""
    batch = make_batch([[1, 2, 3], [4]])
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 7  # one per column that is set
    again = pickle.loads(data, buffers=buffers)
    assert lists(again) == [[1, 2, 3], [4]]
    assert again.tokens_T.data_ptr() == batch.tokens_T.data_ptr()
    again = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
    assert not np.shares_memory(again.tokens_T.numpy(), batch.tokens_T.numpy())
    assert lists(again.select([1, 0])) == [[4], [1, 2, 3]]
    assert lists(pickle.loads(pickle.dumps(again))) == [[1, 2, 3], [4]]


lengths_lists = st.lists(st.integers(1, 60), max_size=40).map(torch.tensor).map(lambda t: t.long())


def three_rows() -> Batch:
    return Batch(
        lengths_B=torch.tensor([3, 2, 4]),
        tokens_T=torch.tensor([11, 12, 13, 21, 22, 31, 32, 33, 34]),
        loss_mask_T=torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 0]).bool(),
    )


@given(lengths_lists, st.integers(1, 9), st.integers(1, 200), st.integers(1, 8))
def test_micro_batches_hold_every_sequence_once_within_the_limits(lengths, max_sequences, max_tokens, round_to):
    groups = make_micro_batches(lengths, max_sequences=max_sequences, max_tokens=max_tokens, round_to=round_to)
    assert sorted(row for rows in groups for row in rows.tolist()) == list(range(len(lengths)))
    for rows in groups:
        width = -(-int(lengths[rows].max()) // round_to) * round_to
        assert len(rows) <= max_sequences
        assert len(rows) * width <= max_tokens or len(rows) == 1


@given(lengths_lists, st.integers(1, 200))
def test_packs_hold_every_sequence_once_within_the_budget(lengths, max_tokens):
    packs = make_packs(lengths, max_tokens=max_tokens)
    assert sorted(row for rows in packs for row in rows.tolist()) == list(range(len(lengths)))
    loads = sorted(int(lengths[rows].sum()) for rows in packs)
    assert all(int(lengths[rows].sum()) <= max_tokens for rows in packs if len(rows) > 1)
    assert len(loads) < 2 or loads[0] + loads[1] > max_tokens, "two rows that fit in one"


def test_padding_waste_counts_padded_tokens_and_sorting_by_length_leaves_hardly_any():
    lengths = torch.randint(5, 400, (512,), generator=torch.Generator().manual_seed(0))
    budgeted = padding_waste(lengths, make_micro_batches(lengths, max_tokens=4096))
    unsorted = padding_waste(lengths, list(torch.arange(512).split(16)))
    assert budgeted < 0.05 < 0.4 < unsorted
    assert padding_waste(torch.tensor([4, 2]), [torch.tensor([0, 1])]) == pytest.approx(2 / 8)
    assert padding_waste(torch.tensor([3, 3]), [torch.tensor([0, 1])], round_to=4) == pytest.approx(2 / 8)
    assert padding_waste(torch.tensor([], dtype=torch.int64), []) == 0


def test_sequence_over_the_budget_gets_its_own_micro_batch_and_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        groups = make_micro_batches(torch.tensor([5, 50, 5]), max_tokens=10)
    assert [rows.tolist() for rows in groups] == [[1], [0, 2]]
    assert "50 tokens exceeds the budget of 10" in caplog.text


def test_rectangles_pad_on_the_right_packed_rows_restart_positions_and_no_first_token_is_learned():
    inputs = rectangle(three_rows(), round_to=3)
    assert inputs.position_ids_RC is None
    assert inputs.input_ids_RC.tolist() == [[11, 12, 13, 0, 0, 0], [21, 22, 0, 0, 0, 0], [31, 32, 33, 34, 0, 0]]
    assert inputs.input_ids_RC.flatten()[inputs.source_K].tolist() == [11, 12, 21, 32]
    assert inputs.target_K.tolist() == [12, 13, 22, 33]
    assert inputs.token_K.tolist() == [1, 2, 4, 7]
    inputs = packed_row(three_rows())
    assert inputs.position_ids_RC.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert inputs.input_ids_RC.flatten()[inputs.source_K].tolist() == [11, 12, 21, 32]
    with pytest.raises(ValueError, match="first token"):
        rectangle(three_rows().replace(loss_mask_T=torch.ones(9).bool()))


def test_placeholder_has_the_same_columns_and_no_loss_tokens():
    batch = three_rows().replace(
        scores_B=torch.ones(3), parts_BK=torch.ones(3, 2), advantages_T=torch.ones(9), ref_hidden_TH=torch.ones(9, 4)
    )
    placeholder = take_micro_batch(batch, [torch.tensor([2])], 1)
    assert not placeholder.loss_mask_T.any()
    assert placeholder.scores_B is not None and placeholder.advantages_T is not None
    assert placeholder.parts_BK.shape == (1, 2) and placeholder.ref_hidden_TH.shape == (2, 4)
    assert placeholder.values_T is None
    assert take_micro_batch(batch, [torch.tensor([2])], 0).tokens_T.tolist() == [31, 32, 33, 34]


@pytest.mark.parametrize("limits", [{"max_sequences": 0}, {"max_tokens": 0}, {"round_to": 0}])
def test_limits_below_one_are_refused(limits):
    with pytest.raises(ValueError, match=f"{next(iter(limits))}: 0, expected at least 1"):
        make_micro_batches(torch.tensor([3]), **limits)


SIZES = {"a": 1, "b": 2, "c": 2, "d": 5}
"""Pixels of pictures."""


@given(st.lists(st.sets(st.sampled_from("abcd")), min_size=2, max_size=12), st.integers(1, 8), st.booleans())
def test_pictures_of_a_part_are_bounded_each_counted_once(shown, most, pairs):
    known = {name: Item(np.full((1, size, 3), ord(name), dtype=np.uint8)) for name, size in SIZES.items()}
    shown = shown[: len(shown) // 2 * 2]
    batch = make_batch([[1]] * len(shown))
    batch = batch.replace(items_I=tuple(tuple(known[name] for name in names) for names in shown))
    if pairs:
        batch = batch.replace(pair_B=torch.arange(len(shown)) // 2)
    parts = [rows.tolist() for rows in rows_by_pictures(batch, most)]
    assert sorted(row for rows in parts for row in rows) == list(range(len(shown)))
    for rows in parts:
        assert not pairs or all(row ^ 1 in rows for row in rows)
        sets = [shown[row] | (shown[row ^ 1] if pairs else set()) for row in rows]
        union = set().union(*sets)
        assert sum(map(SIZES.__getitem__, union)) <= most or union in sets, "a sample alone may have more"


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
