"""What the running sequences leave behind in the layers: keys and values, in slots.

Keys and values lie in one dense tensor per layer with a slot (row) for each running sequence. These always fill the
slots 0 … B-1, each from position 0, so a forward takes a plain slice. Keys lie as [S, C, H·D]: one token of one
sequence is contiguous, and a decode step writes all its tokens with one ``index_copy_``.

Axes: S slots, C positions per slot, H key-value heads, D head size, B rows of one forward, L tokens per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

POSITION_BLOCK = 64  # capacity grows by whole blocks, so that growing (a copy of the cache) is rare
SLOT_BLOCK = 16


@dataclass
class _Plan:
    """Plan of the next forward for every layer alike."""

    slots: int = 0
    capacity: int = 0
    decoding: bool = False
    width: int = 0
    """Positions in use, the token of this step included (decode)."""
    write_index_B: Tensor | None = None
    """Row of the [S·C, H·D] view that each sequence's new token goes to (decode)."""
    first_slot: int = 0
    """Slot at which the rows of a prefill start."""
    source_B: Tensor | None = None
    """The prefilled row that each slot takes; ``None``: one slot per row, in order."""


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, allocated at the first forward (only then the shapes are known)."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, plan: _Plan) -> None:
        super().__init__()
        self._plan = plan

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, not empty memory: positions that the mask hides still meet a weight of 0, and 0 · NaN is NaN.
        self.keys, self.values = (
            x.new_zeros(self._plan.slots, self._plan.capacity, x.shape[1] * x.shape[3])
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores [B, H, L, D] and returns what attention reads: the prompt itself, or all positions in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._store(self.keys, key_states), self._store(self.values, value_states)

    def _store(self, memory: Tensor, states: Tensor) -> Tensor:
        plan = self._plan
        rows, heads, length, size = states.shape
        tokens = states.transpose(1, 2).reshape(rows, length, heads * size)
        if plan.decoding:
            assert plan.write_index_B is not None
            memory.view(-1, heads * size).index_copy_(0, plan.write_index_B, tokens[:, 0])
            return memory[:rows, : plan.width].view(rows, plan.width, heads, size).transpose(1, 2)
        tokens = tokens[:, : memory.shape[1]]  # what does not fit is padding
        if plan.source_B is not None:
            tokens = tokens[plan.source_B]
        memory[plan.first_slot : plan.first_slot + len(tokens), : tokens.shape[1]] = tokens
        return states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self._plan.width if self._plan.decoding else query_length), 0

    def get_seq_length(self) -> int:
        return self._plan.width - 1 if self._plan.decoding else 0

    def get_max_length(self) -> int:
        return -1

    def resize(self, slots: int, capacity: int) -> None:
        """Moves the contents, as far as they fit, to a memory of another size."""
        if self.is_initialized:
            self.keys, self.values = (_resized(x, slots, capacity) for x in (self.keys, self.values))

    def clear(self) -> None:
        """Gives the memory back."""
        if self.is_initialized:
            del self.keys, self.values
            self.is_initialized = False

    def move(self, sources: Tensor, targets: Tensor, width: int) -> None:
        for memory in (self.keys, self.values):
            memory[targets, :width] = memory[sources, :width]


class SlotCache(Cache):
    """The cache of all layers. Announce the next forward pass (``plan_prefill``, ``plan_decode``), then run it.

    Args:
        max_positions: bound on slots × capacity beyond which memory is not kept for later; ``None``: no bound.
    """

    def __init__(self, num_layers: int, max_positions: int | None = None) -> None:
        self._plan = _Plan()
        self._max_positions = max_positions
        self._slot_layers = [SlotLayer(self._plan) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))

    def reserve(self, slots: int, positions: int) -> None:
        """Makes room for ``slots`` sequences of at most ``positions`` tokens; what these sequences hold stays."""
        plan = self._plan
        if slots <= plan.slots and positions <= plan.capacity:
            return
        needed = _blocks(slots, SLOT_BLOCK), _blocks(positions, POSITION_BLOCK)
        kept = max(plan.slots, needed[0]), max(plan.capacity, needed[1])
        # Many short sequences and later a few long ones would otherwise add up to many long ones.
        too_large = self._max_positions is not None and kept[0] * kept[1] > self._max_positions
        plan.slots, plan.capacity = needed if too_large else kept
        for layer in self._slot_layers:
            layer.resize(plan.slots, plan.capacity)

    def plan_prefill(self, first_slot: int, source_B: Tensor | None) -> None:
        """The next forward writes whole prompts from position 0.

        Args:
            first_slot: the first of the consecutive slots to fill.
            source_B: which row of the forward each slot takes, when several slots share a prompt.
        """
        self._plan.decoding = False
        self._plan.first_slot, self._plan.source_B = first_slot, source_B

    def plan_decode(self, positions_B: Tensor, width: int) -> None:
        """The next forward adds one token to each of the slots 0 … B-1, at ``positions_B`` (all < ``width``)."""
        plan = self._plan
        plan.decoding, plan.width = True, width
        starts_B = torch.arange(len(positions_B), device=positions_B.device) * plan.capacity
        plan.write_index_B = starts_B + positions_B

    def move(self, sources: Sequence[int], targets: Sequence[int], width: int) -> None:
        """Copies the first ``width`` positions of some slots over others (to close the gaps that leavers make)."""
        device = self._slot_layers[0].keys.device
        from_S, to_S = torch.tensor([list(sources), list(targets)], device=device)
        for layer in self._slot_layers:
            layer.move(from_S, to_S, width)

    def free(self) -> None:
        """Gives all memory back."""
        self._plan.slots = self._plan.capacity = 0
        for layer in self._slot_layers:
            layer.clear()


def _blocks(count: int, block: int) -> int:
    return -(-count // block) * block


def _resized(memory: Tensor, slots: int, capacity: int) -> Tensor:
    other = memory.new_zeros(slots, capacity, memory.shape[2])
    part = memory[:slots, :capacity]
    other[: part.shape[0], : part.shape[1]] = part
    return other
