"""Parameters between Hugging Face and Megatron-Core: the map of names, and whole tensors to one rank's shards and back.

Megatron-Core builds the same model from two sets of modules: its own (``local``) and TransformerEngine's (``te``),
which fuses the normalisation into the linear layer after it. Experts come in three shapes: one module each
(``sequential``), one TransformerEngine module with a weight per expert (``grouped``), and two weights for all
(``legacy_grouped``). Transformers' module keeps all experts of a layer in a few tensors, which are cut into single
experts on the way in and put together on the way out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from roll.models.lora import matrix_name
from roll.models.megatron.config import MegatronModelConfig, padded_vocab_size
from roll.models.megatron.families import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    TIED_OUTPUT,
    Entry,
    ExpertModules,
    Experts,
    Family,
    Form,
)
from roll.models.stored import StoredTensor

Part = Literal["gate", "up", "down"]

TOWER = "tower."
"""Before the names of what a trunk has beside its language model, whole on every rank of the first stage."""


@dataclass(frozen=True)
class ExpertTensor:
    """What the name of one expert's tensor says."""

    layer: str
    """All before the layer's own names, e.g. ``model.layers.3.``."""
    number: int
    part: Part
    kind: str
    """``weight`` or ``bias``."""


def find_expert(name: str, family: Family) -> ExpertTensor | None:
    """Reads the name of one expert's tensor, by which ``names`` knows it; ``None`` of all others."""
    for part, pattern in _patterns(family.experts):
        if found := pattern.fullmatch(name):
            return ExpertTensor(found["layer"], int(found["number"]), part, found["kind"])
    return None


@lru_cache
def _patterns(experts: Experts) -> list[tuple[Part, re.Pattern[str]]]:
    names: list[tuple[Part, str]] = [("gate", experts.gate), ("up", experts.up), ("down", experts.down)]
    number = r"(?P<number>\d+)"
    return [
        (
            part,
            re.compile(rf"(?P<layer>.*?){number.join(map(re.escape, name.split('{expert}')))}\.(?P<kind>weight|bias)"),
        )
        for part, name in names
    ]


def module_name(name: str, family: Family) -> str:
    """The name in Transformers' module of a checkpoint's tensor, but for routed experts."""
    for stored, own in family.renamed:
        name = name.replace(stored, own)
    return name


def fused_name(layer: str, part: Part, kind: str) -> str:
    """The tensor of Transformers' module that has a part of all of a layer's experts."""
    return f"{layer}mlp.experts.{'down' if part == 'down' else 'gate_up'}_proj{'_bias' if kind == 'bias' else ''}"


def fused_names(layer: str, family: Family) -> list[str]:
    """Of all of them."""
    kinds = ("weight", "bias") if family.experts.biased else ("weight",)
    parts: tuple[Part, ...] = ("gate", "down")
    return [fused_name(layer, part, kind) for kind in kinds for part in parts]


def split_reader(read: Callable[[str], StoredTensor], family: Family) -> Callable[[str], Tensor]:
    """Reads by the names of ``names`` what ``read`` has by those of Transformers' module; of experts one at a time."""

    def expert_tensor(name: str) -> Tensor:
        found = find_expert(name, family)
        if found is None:
            return read(module_name(name, family)).whole()
        stored = read(fused_name(found.layer, found.part, found.kind))
        _, rows = next(stored.rows(found.number, found.number + 1, stored.shape))
        one, alternating = rows[0], family.experts.alternating
        if alternating and found.kind == "weight":
            one = one.T
        if found.part == "down":
            return one
        gate, up = (one[0::2], one[1::2]) if alternating else one.chunk(2)
        return gate if found.part == "gate" else up

    return expert_tensor


def fuse(named: Iterable[tuple[str, Tensor]], family: Family, num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """From the names of ``names`` to those of Transformers' module; all of a layer's experts must be there."""
    parts: dict[tuple[str, Part, str, int], Tensor] = {}
    for name, tensor in named:
        if (found := find_expert(name, family)) is None:
            yield module_name(name, family), tensor
        else:
            parts[found.layer, found.part, found.kind, found.number] = tensor
    for layer, kind in dict.fromkeys((layer, kind) for layer, _, kind, _ in parts):

        def every(part: Part, layer: str = layer, kind: str = kind) -> Iterator[Tensor]:
            return (parts.pop((layer, part, kind, number)) for number in range(num_experts))

        both = torch.stack([_gate_up(*one, family.experts) for one in zip(every("gate"), every("up"), strict=True)])
        down = torch.stack(list(every("down")))
        turned = family.experts.alternating and kind == "weight"
        yield fused_name(layer, "gate", kind), both.mT.contiguous() if turned else both
        yield fused_name(layer, "down", kind), down.mT.contiguous() if turned else down


def _gate_up(gate: Tensor, up: Tensor, experts: Experts) -> Tensor:
    return torch.stack([gate, up], dim=1).flatten(0, 1) if experts.alternating else torch.cat([gate, up])


@dataclass(frozen=True)
class ParallelLayout:
    """One rank's place, or that of one of its model chunks where pipeline stages are virtual.

    Example: the second of two stages of a four-layer model, first of two tensor-parallel ranks:
    ``ParallelLayout(layers=(2, 3), first_stage=False, tp_rank=0, tp_size=2)``.
    """

    layers: tuple[int, ...]
    """Whole-model number of each layer held, from 0, in order (a layer's ``layer_number`` counts from 1)."""
    first_stage: bool = True
    """Holds the embedding (the model's ``pre_process``)."""
    last_stage: bool = True
    """Holds the last normalisation and the output layer (the model's ``post_process``)."""
    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    """Experts are dealt out in blocks: rank r holds those from ``r * num_experts / ep_size``."""
    expert_tp_rank: int | None = None
    """Tensor parallelism within an expert; ``None``: as outside."""
    expert_tp_size: int | None = None

    def tensor_rank(self, *, expert: bool) -> tuple[int, int]:
        """Rank and size of the tensor-parallel group that shares a parameter."""
        if expert and self.expert_tp_size is not None and self.expert_tp_rank is not None:
            return self.expert_tp_rank, self.expert_tp_size
        return self.tp_rank, self.tp_size

    def experts(self, num_experts: int) -> range:
        """Whole-model numbers of the routed experts held."""
        held = num_experts // self.ep_size
        return range(self.ep_rank * held, (self.ep_rank + 1) * held)


@dataclass(frozen=True)
class Source:
    """Origin of a Megatron parameter of one rank."""

    form: Form
    hf: tuple[tuple[str, ...], ...]
    """Full names of its Hugging Face tensors, in the order of the form; one tuple per expert where it holds several."""
    expert: bool
    """Part of a routed expert: cut over the experts' own tensor-parallel group."""


def source(name: str, config: MegatronModelConfig, layout: ParallelLayout) -> Source:
    """Source of a parameter, by its name on the rank (or chunk) of ``layout``.

    Raises:
        ValueError: no such parameter in a converted model, or not on this rank.
    """
    if adapter := _ADAPTER.fullmatch(name):
        return _adapter_source(adapter, config, layout)
    if name.startswith(TOWER):
        return Source("replicated", (("model." + name.removeprefix(TOWER),),), expert=False)
    relative, layer, expert = _parse(name)
    table = WITHOUT_LAYER if layer is None else config.family.by_name
    if (entry := table.get(relative)) is None:
        raise ValueError(f"Megatron parameter {name!r}: not one of those that {config.model_class} has")
    if entry is OUTPUT and config.tied:
        entry = TIED_OUTPUT
    if layer is None:
        return Source(entry.form, (tuple(re.sub(r"^model\.", config.trunk, hf) for hf in entry.hf),), expert=False)
    prefix = f"{config.trunk}layers.{_held(name, 'layer', layer, layout.layers)}."
    if "{expert}" not in entry.hf[0]:
        return Source(entry.form, (tuple(prefix + hf for hf in entry.hf),), expert=False)
    held = layout.experts(config.num_experts)
    numbers = held if expert is None else [_held(name, "expert", expert, held)]
    groups = tuple(tuple(prefix + hf.format(expert=number) for hf in entry.hf) for number in numbers)
    return Source(entry.form, groups, expert=True)


def layer_entries(config: MegatronModelConfig, layer: int, experts: ExpertModules) -> tuple[Entry, ...]:
    """The parameters of one layer, by its number in the whole model."""
    traits = config.traits(layer)
    return tuple(
        entry
        for entry in (*config.family.entries, *config.family.expert_entries[experts])
        if all((need.removeprefix("!") in traits) != need.startswith("!") for need in entry.when)
    )


def is_buffer(name: str, config: MegatronModelConfig) -> bool:
    """Tells whether it is the name of a tensor that no gradient trains."""
    return _parse(name)[0] in {entry.local for entry in config.family.buffers}


def module_parts(name: str, config: MegatronModelConfig) -> tuple[str, ...]:
    """Parameters of a Hugging Face module that stand or fall with a checkpoint's tensor: a layer's experts do
    together."""
    if (found := find_expert(name, config.family)) is None:
        return (module_name(name, config.family),)
    return tuple(fused_names(found.layer, config.family))


def torn(held: Collection[str], frozen: Collection[str]) -> str:
    """Says what would have to be frozen beside those of Megatron's one tensor that are; empty where all or none are."""
    missing = set(held).difference(frozen)
    if not missing or missing == set(held):
        return ""
    names = ", ".join(sorted(missing))
    return f"{names} with the rest that Megatron stores together ({', '.join(sorted(held))}), or none of them"


def at_odds(held: Collection[str], rates: Mapping[str, float]) -> str:
    """Says that those of Megatron's one tensor would learn at several rates; empty where they do not."""
    if len({rates.get(name) for name in held}) == 1:
        return ""
    return f"one rate for {', '.join(sorted(held))}, which Megatron stores together"


def adaptable_layers(config: MegatronModelConfig) -> Iterator[str]:
    """Hugging Face names of the linear layers that can have an adapter: not routers, gates and routed experts."""
    for layer in range(config.num_layers):
        for entry in layer_entries(config, layer, "sequential"):
            fused = entry.form in ("qkv", "gate_up") and len(entry.hf) == 1
            if _LINEAR.search(entry.local) and not fused:
                names = (hf for hf in entry.hf if "{expert}" not in hf)
                yield from (f"model.layers.{layer}.{hf.removesuffix('.weight')}" for hf in names)


def _adapter_source(found: re.Match[str], config: MegatronModelConfig, layout: ParallelLayout) -> Source:
    """Of one of the two matrices of a projection in a linear layer, which is cut where the layer is."""
    base = source(f"{found['linear']}.weight", config, layout)
    (layer,) = (hf.removesuffix(".weight") for hf in base.hf[0] if hf.endswith(f".{found['projection']}.weight"))
    form: Form = "replicated"
    if base.form == "columns" and found["matrix"] == "A":
        form = "columns"
    elif base.form not in ("columns", "replicated") and found["matrix"] == "B":
        form = "rows"
    return Source(form, ((matrix_name(layer, found["matrix"]),),), expert=False)


_ADAPTER = re.compile(r"(?P<linear>.+)\.lora\.(?P<projection>\w+)\.lora_(?P<matrix>[AB])\.weight")
_LINEAR = re.compile(r"\.(linear_\w+|module\.\w*proj\w*)\.weight$")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+$")


def _parse(name: str) -> tuple[str, int | None, int | None]:
    """The name as in the tables, and the layer and expert numbers (on this rank) in it."""
    layer, expert = _LAYER.match(name), _EXPERT.search(name)
    relative = name[layer.end() :] if layer else name
    if expert:
        relative = _EXPERT.sub("{expert}", relative)
    return relative, int(layer[1]) if layer else None, int(expert[0]) if expert else None


def _held(name: str, what: str, index: int, held: tuple[int, ...] | range) -> int:
    if index >= len(held):
        raise ValueError(f"Megatron parameter {name!r}: {what} {index}, but the rank holds {len(held)}")
    return held[index]


WITHOUT_LAYER = {entry.local: entry for entry in (EMBEDDING, FINAL_NORM, OUTPUT)}


ShardGroup = Literal["replicated", "tensor", "expert_tensor"]


def load_shards(
    read: Callable[[str], Tensor], names: Iterable[str], config: MegatronModelConfig, layout: ParallelLayout
) -> Iterator[tuple[str, Tensor]]:
    """Yields each parameter's part for one rank; holds one parameter's whole tensors at a time.

    Args:
        read: the whole tensor for a Hugging Face name (``WeightFiles.read`` for a model folder).
        names: the model's own parameter names, e.g. of ``model.named_parameters()``, of either module set.
        layout: of the rank, or of the model chunk that the names are from.

    Yields:
        Name and shard, in the number format that was read; a shard may share the storage of what was read.

    Raises:
        ValueError: a name that no converted model has, or a tensor of the wrong shape.
    """
    for name in names:
        yield name, shard(name, read, config, layout)


def shard(name: str, read: Callable[[str], Tensor], config: MegatronModelConfig, layout: ParallelLayout) -> Tensor:
    """One parameter's part for one rank. Arguments and errors as ``load_shards``."""
    found = source(name, config, layout)
    rank, size = layout.tensor_rank(expert=found.expert)
    parts = [_cut(found.form, _read(read, hf, found.form, config), config, rank, size) for hf in found.hf]
    if found.form == "all_gate_up":  # [experts, hidden, rows] in the shape that Megatron gives this memory
        return torch.stack(parts).reshape(parts[0].shape[0], -1)
    return torch.cat(parts) if found.form == "all_down" else parts[0]


def shard_group(name: str, config: MegatronModelConfig, layout: ParallelLayout) -> ShardGroup:
    """Over which ranks a parameter is cut: those whose shards ``join`` needs (any one if ``replicated``)."""
    found = source(name, config, layout)
    if found.expert:
        return "expert_tensor"
    return "replicated" if found.form == "replicated" else "tensor"


def join(
    name: str, shards: Sequence[Tensor], config: MegatronModelConfig, layout: ParallelLayout
) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors that a parameter holds.

    Args:
        name: of the parameter, on the rank of ``layout``.
        shards: that parameter on every rank of its ``shard_group``, in rank order; just one if it is replicated.
        layout: of any of these ranks (their layers and experts are the same).

    Yields:
        Hugging Face name and whole tensor; may share the storage of the shards. Nothing for an output layer that is a
        copy of the embedding.

    Raises:
        ValueError: not as many shards as ranks.
    """
    found = source(name, config, layout)
    if name == "output_layer.weight" and config.tied:
        return
    size = 1 if found.form == "replicated" else layout.tensor_rank(expert=found.expert)[1]
    if len(shards) != size:
        raise ValueError(f"Megatron parameter {name!r}: {len(shards)} shards, expected {size}")
    for index, hf in enumerate(found.hf):
        own = [_of_expert(s, found.form, index, len(found.hf), config) for s in shards]
        whole = _uncut(found.form, own, config)
        yield from zip(hf, [torch.cat(list(whole))] if len(hf) < len(whole) else whole, strict=True)


def _cut(form: Form, whole: list[Tensor], config: MegatronModelConfig, rank: int, size: int) -> Tensor:
    if form == "replicated":
        return whole[0]
    if form == "vocab":
        added = padded_vocab_size(config.vocab_size, size) - config.vocab_size
        rows = functional.pad(whole[0], (0, 0, 0, added)) if added else whole[0]
        return rows.chunk(size)[rank]
    if form == "qkv":
        return _interleave(whole, config).chunk(size)[rank]
    if form == "rows":
        return whole[0].chunk(size)[rank]
    if form in ("columns", "all_down"):
        part = whole[0].chunk(size, dim=1)[rank].contiguous()
    else:
        part = torch.cat([half.chunk(size)[rank] for half in whole])
    return part.T if form.startswith("all_") else part


def _uncut(form: Form, shards: list[Tensor], config: MegatronModelConfig) -> Sequence[Tensor]:
    if form == "replicated":
        return shards
    if form == "vocab":
        return [torch.cat(shards)[: config.vocab_size]]
    if form == "qkv":
        return _separate(torch.cat(shards), config)
    if form == "rows":
        return [torch.cat(shards)]
    if form in ("columns", "all_down"):
        return [torch.cat(shards, dim=1)]
    return [torch.cat(halves) for halves in zip(*(part.chunk(2) for part in shards), strict=True)]


def _of_expert(part: Tensor, form: Form, index: int, count: int, config: MegatronModelConfig) -> Tensor:
    """One expert's weight from a parameter that holds those of ``count``; other parameters as they are."""
    if form == "all_gate_up":
        return part.reshape(count, config.transformer["hidden_size"], -1)[index].T
    return part.chunk(count)[index].T if form == "all_down" else part


def _interleave(qkv: Sequence[Tensor], config: MegatronModelConfig) -> Tensor:
    """Query, key and value rows, so that each query group's queries, key and value follow each other."""
    groups = config.transformer["num_query_groups"]
    return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in qkv], dim=1).flatten(0, 1)


def _separate(fused: Tensor, config: MegatronModelConfig) -> list[Tensor]:
    size = config.transformer
    groups, width = size["num_query_groups"], size["kv_channels"]
    queries = size["num_attention_heads"] // groups * width
    by_group = fused.reshape(groups, -1, *fused.shape[1:]).split([queries, width, width], dim=1)
    return [part.flatten(0, 1) for part in by_group]


def _read(read: Callable[[str], Tensor], names: Sequence[str], form: Form, config: MegatronModelConfig) -> list[Tensor]:
    """The parts that a form takes, with their rows checked where cutting would hide that they are wrong."""
    tensors = [read(name) for name in names]
    size = config.transformer
    rows: list[int] = []
    if form == "vocab":
        rows = [config.vocab_size]
    elif form == "qkv":
        rows = [size[heads] * size["kv_channels"] for heads in ("num_attention_heads", *["num_query_groups"] * 2)]
    elif form == "gate_up" and len(names) == 1:
        rows = [size["ffn_hidden_size"]] * 2
    if whole := len(names) < len(rows):
        rows, parts = [sum(rows)], rows
    for name, tensor, expected in zip(names, tensors, rows, strict=False):
        if tensor.shape[0] != expected:
            raise ValueError(f"{name}: {tensor.shape[0]} rows, expected {expected} by the model's configuration")
    return list(tensors[0].split(parts)) if whole else tensors
