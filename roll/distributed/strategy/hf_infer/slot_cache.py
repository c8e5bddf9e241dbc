"""What the running sequences leave behind in the layers: keys and values, and states, in slots.

Keys and values lie in one dense tensor per layer with a slot (row) for each running sequence. These always fill the
slots 0 … B-1, each from position 0, so a forward takes a plain slice. Keys lie as [S, C, H·D]: one token of one
sequence is contiguous, and a decode step writes all its tokens with one ``index_copy_``.

A layer that reads a state (gated delta net, Mamba, short convolution) has one row of it per slot. A prefill computes
states of its own by Transformers' code, which are then copied to the slots; a decode step works on the slots in place.

Axes: S slots, C positions per slot, H key-value heads, D head size, B rows of one forward, L tokens per row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

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

    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a query may see, and the position of the first."""
        return (self.width if self.decoding else query_length), 0

    @property
    def cached(self) -> int:
        return self.width - 1 if self.decoding else 0


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, allocated at the first forward (only then the shapes are known)."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, plan: _Plan) -> None:
        CacheLayerMixin.__init__(self)
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
            SlotLayer.lazy_initialization(self, key_states, value_states)
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
        return self._plan.mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self._plan.cached

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


class StateLayer(LinearAttentionLayer):
    """One layer's states: between two forwards in ``_memory``, during one where Transformers expects them.

    A layer that keeps nothing (a feed-forward layer of its own) is one without states.
    """

    def __init__(self, plan: _Plan, number_of_states: int = 1) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)
        self._plan = plan
        self._memory: dict[tuple[str, int], Tensor] = {}
        """[S, …] by attribute and number of the state."""

    def begin(self, rows: int) -> None:
        """Before a forward: a decode step works on the first slots, a prefill begins without states."""
        for name in _STATES:
            for index in range(self.number_of_states):
                memory = self._memory.get((name, index)) if self._plan.decoding else None
                getattr(self, name)[index] = None if memory is None else memory[:rows]
                getattr(self, f"is_{name}_initialized")[index] = memory is not None
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), self._plan.decoding)

    def end(self) -> None:
        """After a prefill: its states go to the slots."""
        plan = self._plan
        for name in _STATES:
            for index, states in getattr(self, name).items():
                if states is None:
                    continue
                if (name, index) not in self._memory:
                    self._memory[name, index] = states.new_zeros(plan.slots, *states.shape[1:])
                rows = states if plan.source_B is None else states[plan.source_B]
                self._memory[name, index][plan.first_slot : plan.first_slot + len(rows)] = rows

    def rows(self, slots: Tensor) -> list[Tensor]:
        """Copies of some slots' states."""
        return [memory[slots] for memory in self._memory.values()]

    def set_rows(self, slots: Tensor, rows: Sequence[Tensor]) -> None:
        for memory, states in zip(self._memory.values(), rows, strict=True):
            memory[slots] = states

    def forget(self, slots: slice) -> None:
        for memory in self._memory.values():
            memory[slots] = 0

    def resize(self, slots: int, capacity: int) -> None:
        for key, memory in self._memory.items():
            self._memory[key] = memory.new_zeros(slots, *memory.shape[1:])
            self._memory[key][: len(memory)] = memory[:slots]

    def clear(self) -> None:
        self._memory.clear()

    def move(self, sources: Tensor, targets: Tensor, width: int) -> None:
        self.set_rows(targets, self.rows(sources))


_STATES = ("conv_states", "recurrent_states")


class HybridLayer(StateLayer, SlotLayer):  # type: ignore[override]
    """Keys and values, and states, of a layer that has both."""

    def __init__(self, plan: _Plan, number_of_states: int = 1) -> None:
        StateLayer.__init__(self, plan, number_of_states)
        SlotLayer.__init__(self, plan)

    def resize(self, slots: int, capacity: int) -> None:
        StateLayer.resize(self, slots, capacity)
        SlotLayer.resize(self, slots, capacity)

    def clear(self) -> None:
        StateLayer.clear(self)
        SlotLayer.clear(self)

    def move(self, sources: Tensor, targets: Tensor, width: int) -> None:
        StateLayer.move(self, sources, targets, width)
        SlotLayer.move(self, sources, targets, width)


LAYERS: dict[str, type[SlotLayer | StateLayer]] = {
    "full_attention": SlotLayer,
    "sliding_attention": SlotLayer,
    "linear_attention": StateLayer,
    "conv": StateLayer,
    "mlp": StateLayer,
    "moe": StateLayer,
    "hybrid": HybridLayer,
}
"""By ``layer_types`` of a model's configuration. Windows are masks: all positions are kept."""


class SlotCache(Cache):
    """The cache of all layers; a forward pass runs within ``prefill`` or ``decode``.

    Args:
        kinds: of the layers, see ``LAYERS``.
        max_positions: bound on slots × capacity beyond which memory is not kept for later; ``None``: no bound.
        states: most states of a kind that a layer has.
    """

    def __init__(self, kinds: Sequence[str], max_positions: int | None = None, states: int = 1) -> None:
        self._plan = _Plan()
        self._max_positions = max_positions
        self._slot_layers = [
            kind(self._plan, states) if issubclass(kind, StateLayer) else kind(self._plan)
            for kind in map(LAYERS.__getitem__, kinds)
        ]
        self._state_layers = [layer for layer in self._slot_layers if isinstance(layer, StateLayer)]
        super().__init__(layers=list(self._slot_layers))

    @property
    def has_states(self) -> bool:
        """A prompt must then be computed without padding: it would change the states."""
        return bool(self._state_layers)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Of all layers, where Transformers needs one with keys."""
        return self._plan.mask_sizes(query_length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._plan.cached

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

    @contextlib.contextmanager
    def prefill(self, first_slot: int, source_B: Tensor | None) -> Iterator[None]:
        """A forward that writes whole prompts from position 0.

        Args:
            first_slot: the first of the consecutive slots to fill.
            source_B: which row of the forward each slot takes, when several slots share a prompt.
        """
        self._plan.decoding = False
        self._plan.first_slot, self._plan.source_B = first_slot, source_B
        for layer in self._state_layers:
            layer.begin(0)
        yield
        for layer in self._state_layers:
            layer.end()

    @contextlib.contextmanager
    def decode(self, positions_B: Tensor, width: int, held: Sequence[int] = ()) -> Iterator[None]:
        """A forward that adds one token to each of the slots 0 … B-1, at ``positions_B`` (all < ``width``).

        Args:
            held: slots that take the same token again later; their states stay as they are.
        """
        plan = self._plan
        plan.decoding, plan.width = True, width
        starts_B = torch.arange(len(positions_B), device=positions_B.device) * plan.capacity
        plan.write_index_B = starts_B + positions_B
        slots = torch.tensor(list(held), dtype=torch.int64, device=positions_B.device)
        kept = [layer.rows(slots) for layer in self._state_layers] if held else []
        for layer in self._state_layers:
            layer.begin(len(positions_B))
        yield
        for layer, rows in zip(self._state_layers, kept, strict=False):
            layer.set_rows(slots, rows)

    def forget(self, first_slot: int, count: int) -> None:
        """These slots' sequences have no token yet: states begin with zeros."""
        for layer in self._state_layers:
            layer.forget(slice(first_slot, first_slot + count))

    def move(self, sources: Sequence[int], targets: Sequence[int], width: int) -> None:
        """Copies the first ``width`` positions of some slots over others (to close the gaps that leavers make)."""
        assert self._plan.write_index_B is not None  # a sequence leaves after a step
        from_S, to_S = torch.tensor([list(sources), list(targets)], device=self._plan.write_index_B.device)
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
