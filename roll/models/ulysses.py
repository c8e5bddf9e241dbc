"""Sequence parallelism as in DeepSpeed-Ulysses (Jacobs et al. 2023), for decoders whose attention Transformers looks
up in its table.

The ranks of a group get the same micro-batch, and each runs the model over one slice of its columns. Only attention
needs whole sequences: before it, an all-to-all hands every rank all tokens of a part of the heads, and another one
undoes that after it. A loss token is scored by the rank that holds the position before it; then all scores are
gathered, so every rank computes the whole loss. Backward, a rank follows only the scores it made: the plain sum of
gradients over all ranks is that of one rank with the whole micro-batch.

Axes: R rows, C columns, S columns of one rank (padded to equal slices), K loss tokens, H heads, D units of a head.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.algorithms.quantities import Given
from roll.algorithms.types import TokenScores
from roll.data.columns import UNKNOWN
from roll.data.packing import AttentionPlan, ModelInput, PackedSequences
from roll.models import planned_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.models.pictures import Tower

PREFIX = "roll_ulysses_"
FLASH = "flash_attention_2"


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share every sequence, and this process's place among them."""

    rank: int
    size: int
    process_group: dist.ProcessGroup


@dataclass(frozen=True, eq=False)
class SharedRows:
    """Description of the rows that a group shares, for attention."""

    group: SequenceGroup
    num_columns: int
    """C; what the slices hold beyond is padding."""
    plan: AttentionPlan | PackedSequences
    """Tokens that each token attends to. Every row of a rectangle is one sequence."""

    def to(self, device: torch.device) -> SharedRows:
        """The same on ``device``."""
        return SharedRows(self.group, self.num_columns, self.plan.to(device))


def make_group(size: int, stride: int = 1) -> SequenceGroup:
    """Groups of ``size`` ranks, each ``stride`` after the other (collective over all ranks).

    Raises:
        ValueError: the ranks cannot be dealt out.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world % (size * stride):
        split = f" × {stride} that split each layer" if stride > 1 else ""
        raise ValueError(f"model_args.ulysses_size: {size}{split}, expected a divisor of the {world} workers")
    blocks = range(0, world, size * stride)
    ranks = [[block + first + i * stride for i in range(size)] for block in blocks for first in range(stride)]
    process_group, _ = dist.new_subgroups_by_enumeration(ranks)
    return SequenceGroup(dist.get_rank() // stride % size, size, process_group)


def enable(model: PreTrainedModel, size: int, tensor_size: int = 1) -> None:
    """Lets a model take slices of sequences; whole ones go on as before.

    Args:
        tensor_size: ranks that split its layers and with them the heads.

    Raises:
        ValueError: its attention is of another kind, or has too few heads or heads that cannot be dealt out.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = model.config.get_text_config()
    _check(model, size, tensor_size)
    planned_attention.enable(model)
    kernel = config._attn_implementation
    if kernel.startswith(PREFIX):
        return
    ALL_ATTENTION_FUNCTIONS.register(
        PREFIX + kernel, functools.partial(_attention, ALL_ATTENTION_FUNCTIONS[kernel], kernel)
    )
    ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + kernel, ALL_MASK_ATTENTION_FUNCTIONS[kernel])
    config._attn_implementation = PREFIX + kernel


def score_shared_input(
    scorer: nn.Module,
    inputs: ModelInput,
    num_tokens: int,
    group: SequenceGroup,
    given: Given | None = None,
) -> TokenScores:
    """``scoring.score_input`` by a group of ranks that all call it with the same (collective over the group).

    Args:
        scorer: a ``TokenScorer`` whose model is prepared with ``enable``, or an engine around it.
        inputs: the whole micro-batch's layout, on the CPU.

    Returns:
        Scores of the whole micro-batch, the same on every rank of the group.
    """
    device = next(scorer.parameters()).device
    columns = inputs.input_ids_RC.shape[1]
    width = -(-columns // group.size)
    owner_K = torch.div(inputs.source_K % columns, width, rounding_mode="floor")
    order_K = owner_K.argsort(stable=True)
    counts = owner_K.bincount(minlength=group.size).tolist()
    own_K = order_K.split(counts)[group.rank]
    source_K = inputs.source_K[own_K]
    local_source_K = torch.div(source_K, columns, rounding_mode="floor") * width + source_K % columns % width
    positions_RC = inputs.position_ids_RC
    rows = _shared_rows(inputs, group).to(device)
    experts_NE = None if inputs.experts_NE is None else inputs.experts_NE.unflatten(0, (-1, columns))
    tower: Tower | None = cast(Any, getattr(scorer, "module", scorer)).tower
    pictures = None if tower is None else tower.of_batch(inputs)
    outputs = scorer(
        _slice(inputs.input_ids_RC, width, group).to(device),
        _slice(torch.arange(columns)[None] if positions_RC is None else positions_RC, width, group).to(device),
        local_source_K.to(device),
        inputs.target_K[own_K].to(device),
        None if given is None else given.take(inputs.token_K[own_K], device),
        rows,
        None if experts_NE is None else _slice(experts_NE, width, group, UNKNOWN).flatten(0, 1).to(device),
        None if pictures is None else pictures.of_columns(group.rank * width, width),
    )
    experts_NE = outputs.pop("experts_TE", None)
    token_K = inputs.token_K[order_K].to(device)
    flat = {}
    for name in sorted(outputs):
        values = _gather(outputs[name], counts, group)
        flat[name] = values.new_zeros(num_tokens, *values.shape[1:]).index_put((token_K,), values)
    if experts_NE is not None:
        flat["experts_TE"] = _whole_experts(experts_NE, columns, width, group)[inputs.cell_T.to(device)]
    return TokenScores.of(**flat)


def places(inputs: ModelInput, group: SequenceGroup) -> Tensor:
    """[T]: index of each token into this rank's slice, flattened; -1 of those in the others'."""
    columns = inputs.input_ids_RC.shape[1]
    width = -(-columns // group.size)
    row_T, column_T = inputs.cell_T // columns, inputs.cell_T % columns
    is_own_T = column_T // width == group.rank
    return torch.where(is_own_T, row_T * width + column_T % width, -1)


class _AllToAll(torch.autograd.Function):
    """Sends entry i of the first axis to rank i and puts what rank i sent in its place. It is its own transpose."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=process_group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        returned = grads[0].contiguous()
        received = torch.empty_like(returned)
        dist.all_to_all_single(received, returned, group=ctx.process_group)
        return received, None


class _Gather(torch.autograd.Function):
    """Stacks the ranks' tensors. Every rank computes the same loss of them, so each takes its own gradient only."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: SequenceGroup) -> Tensor:
        ctx.rank = group.rank
        own = own.contiguous()
        stacked = own.new_empty(group.size, *own.shape)
        dist.all_gather(list(stacked.unbind(0)), own, group=group.process_group)
        return stacked

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.rank], None


class _HeadShare:
    """An attention module as its kernel sees it, with a part of the heads: everything else is the module's."""

    def __init__(self, module: Any, kernel: str, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups
        if kernel == FLASH:  # it asks the configuration for the package to import
            self.config = copy.copy(module.config)
            self.config._attn_implementation = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


Kernel = Callable[..., tuple[Tensor, Tensor | None]]


def _attention(
    kernel: Kernel,
    kernel_name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_plan: SharedRows | AttentionPlan | PackedSequences | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """States are [R, H, S, D], the result [R, S, H, D]."""
    if not isinstance(attention_plan, SharedRows):
        share = _HeadShare(module, kernel_name, query.shape[1] // key.shape[1])
        if attention_plan is not None:
            kwargs["attention_plan"] = attention_plan
        return kernel(share, query, key, value, attention_mask, **kwargs)
    group, columns = attention_plan.group, attention_plan.num_columns
    query, key, value = (_to_heads(_repeat(states, group.size), columns, group) for states in (query, key, value))
    share = _HeadShare(module, kernel_name, query.shape[1] // key.shape[1])
    kwargs.pop("position_ids", None)  # this rank's slice of them
    if kwargs.get("s_aux") is not None:  # attention sinks, one per head
        kwargs["s_aux"] = kwargs["s_aux"].chunk(group.size)[group.rank]
    result = _attend(kernel, kernel_name, share, query, key, value, attention_plan, kwargs)
    return _to_columns(result, group), None


def _attend(
    kernel: Kernel,
    kernel_name: str,
    share: _HeadShare,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: SharedRows,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention over whole rows; the result is [R, C, H, D]."""
    if kernel_name != FLASH:
        return kernel(share, query, key, value, None, attention_plan=rows.plan.to(query.device), **kwargs)[0]
    if isinstance(rows.plan, PackedSequences) and len(query) == 1:
        longest = max(rows.plan.lengths)
        kwargs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), rows.plan.starts(query.device))
        kwargs |= {"max_length_q": longest, "max_length_k": longest}
    return kernel(share, query, key, value, None, **kwargs)[0]


def _repeat(states: Tensor, size: int) -> Tensor:
    """At least one head for each of ``size`` ranks: key-value heads that several ranks' queries share are repeated."""
    heads = states.shape[1]
    if heads % size and size % heads:
        raise ValueError(f"model_args.ulysses_size: {size} workers cannot share {heads} heads, expected a divisor")
    return states if heads % size == 0 else states.repeat_interleave(size // heads, dim=1)


def _to_heads(states: Tensor, columns: int, group: SequenceGroup) -> Tensor:
    """[R, H, S, D] of this rank's columns to [R, H / size, C, D] of its heads."""
    rows, heads, width, units = states.shape
    parts = states.view(rows, group.size, heads // group.size, width, units).transpose(0, 1)
    received: Tensor = _AllToAll.apply(parts, group.process_group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :columns]


def _to_columns(result: Tensor, group: SequenceGroup) -> Tensor:
    """[R, C, H / size, D] of this rank's heads to [R, S, H, D] of its columns."""
    rows, columns, heads, units = result.shape
    width = -(-columns // group.size)
    padded = nn.functional.pad(result, (0, 0, 0, 0, 0, width * group.size - columns))
    parts = padded.view(rows, group.size, width, heads, units).transpose(0, 1)
    received: Tensor = _AllToAll.apply(parts, group.process_group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _shared_rows(inputs: ModelInput, group: SequenceGroup) -> SharedRows:
    columns = inputs.input_ids_RC.shape[1]
    return SharedRows(group, columns, inputs.attention or PackedSequences((columns,)))


def _slice(grid: Tensor, width: int, group: SequenceGroup, padding: int = 0) -> Tensor:
    """This rank's columns, [R, S] of [R, C] or [R, S, E] of [R, C, E]."""
    missing = width * group.size - grid.shape[1]
    padded = nn.functional.pad(grid, (0, 0) * (grid.ndim - 2) + (0, missing), value=padding)
    return padded[:, group.rank * width : (group.rank + 1) * width]


def _whole_experts(experts_NE: Tensor, columns: int, width: int, group: SequenceGroup) -> Tensor:
    """Its inverse, of all ranks (collective)."""
    sent = experts_NE.int()  # gloo has no 16 bits
    parts = [torch.empty_like(sent) for _ in range(group.size)]
    dist.all_gather(parts, sent, group=group.process_group)
    whole = torch.cat([part.unflatten(0, (-1, width)) for part in parts], dim=1)[:, :columns]
    return whole.flatten(0, 1).to(experts_NE.dtype)


def _gather(values: Tensor, counts: list[int], group: SequenceGroup) -> Tensor:
    """All ranks' scores end to end; rank i has ``counts[i]``."""
    most = max(counts)
    filled = nn.functional.pad(values, (0, 0) * (values.ndim - 1) + (0, most - len(values)))
    stacked: Tensor = _Gather.apply(filled, group)
    return torch.cat([stacked[rank, :count] for rank, count in enumerate(counts)])


def _check(model: PreTrainedModel, size: int, tensor_size: int) -> None:
    config = model.config.get_text_config()
    name = type(model).__name__
    kernel = config._attn_implementation.removeprefix(PREFIX)
    if kernel not in ("sdpa", FLASH, planned_attention.NAME):
        raise ValueError(f"model_args.ulysses_size: attn_implementation is {kernel!r}, expected sdpa or fa2")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    states = "linear_attention" in kinds or planned_attention.find_state_layers(model)
    if states or not planned_attention.takes_arguments(model):
        raise ValueError(
            f"model_args.ulysses_size: {name} has layers of the kinds {', '.join(sorted(kinds))}; expected a decoder "
            "with full or sliding attention through Transformers' attention interface"
        )
    scaling = getattr(config, "rope_parameters", None) or {}
    rope = {each.get("rope_type", "default") for each in [scaling, *scaling.values()] if isinstance(each, dict)}
    if changing := sorted(rope & {"dynamic", "longrope"}):
        raise ValueError(
            f"model_args.ulysses_size: {name} has rotary positions of the kind {changing[0]}, which depend on the "
            "longest position that a worker sees; expected a fixed kind"
        )
    heads = config.num_attention_heads
    kv_heads = (getattr(config, "num_key_value_heads", None) or heads) // tensor_size
    heads //= tensor_size
    if heads % size:
        raise ValueError(f"model_args.ulysses_size: {size}, expected a divisor of the {heads} attention heads")
    if kv_heads % size and size % max(1, kv_heads):
        raise ValueError(
            f"model_args.ulysses_size: {size}, expected a divisor or a multiple of the {kv_heads} key-value heads"
        )
