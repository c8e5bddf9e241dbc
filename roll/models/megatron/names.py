"""The map of parameter names between Hugging Face and Megatron-Core, and the part of a model that one rank holds.

Megatron-Core builds the same model from two sets of modules: its own (``local``) and TransformerEngine's (``te``),
which fuses the normalisation into the linear layer after it. Experts come in three shapes: one module each
(``sequential``), one TransformerEngine module with a weight per expert (``grouped``), and two weights for all
(``legacy_grouped``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from roll.models.lora import matrix_name
from roll.models.megatron.config import MegatronModelConfig


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


ExpertModules = Literal["sequential", "grouped", "legacy_grouped"]

Form = Literal["replicated", "vocab", "rows", "columns", "qkv", "gate_up", "all_gate_up", "all_down"]
"""Rule by which Hugging Face tensors become one of Megatron's, and its tensor-parallel shards are cut.

``replicated``: as it is, on every rank. ``vocab``: rows padded, cut by rows. ``rows``, ``columns``: cut by these.
``qkv``: rows of query, key and value interleaved by query group, cut by rows. ``gate_up``: each shard is its rows of
the gate above its rows of the up projection. ``all_gate_up``, ``all_down``: the transposed weights of all experts of a
rank, as ``gate_up`` and ``columns``.
"""


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors that it holds.

    Within layers, both names are relative to the layer; ``{expert}`` stands for an expert's number.
    """

    hf: tuple[str, ...]
    local: str
    form: Form
    te: str = ""
    """The name in a model of TransformerEngine modules; empty: the same."""


EMBEDDING = Entry(("model.embed_tokens.weight",), "embedding.word_embeddings.weight", "vocab")
FINAL_NORM = Entry(("model.norm.weight",), "decoder.final_layernorm.weight", "replicated")
OUTPUT = Entry(("lm_head.weight",), "output_layer.weight", "vocab")
TIED_OUTPUT = Entry(("model.embed_tokens.weight",), "output_layer.weight", "vocab")
"""A copy of the embedding, where the last pipeline stage is not the first."""

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION = (
    Entry(
        ("input_layernorm.weight",),
        "input_layernorm.weight",
        "replicated",
        te="self_attention.linear_qkv.layer_norm_weight",
    ),
    Entry(tuple(f"{name}.weight" for name in _QKV), "self_attention.linear_qkv.weight", "qkv"),
    Entry(("self_attn.o_proj.weight",), "self_attention.linear_proj.weight", "columns"),
)
QKV_BIAS = (Entry(tuple(f"{name}.bias" for name in _QKV), "self_attention.linear_qkv.bias", "qkv"),)
QK_NORM = (
    Entry(("self_attn.q_norm.weight",), "self_attention.q_layernorm.weight", "replicated"),
    Entry(("self_attn.k_norm.weight",), "self_attention.k_layernorm.weight", "replicated"),
)
DENSE_MLP = (
    Entry(
        ("post_attention_layernorm.weight",),
        "pre_mlp_layernorm.weight",
        "replicated",
        te="mlp.linear_fc1.layer_norm_weight",
    ),
    Entry(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "mlp.linear_fc1.weight", "gate_up"),
    Entry(("mlp.down_proj.weight",), "mlp.linear_fc2.weight", "columns"),
)
LINEAR_BIASES = (
    Entry(("self_attn.o_proj.bias",), "self_attention.linear_proj.bias", "replicated"),
    Entry(("mlp.gate_proj.bias", "mlp.up_proj.bias"), "mlp.linear_fc1.bias", "gate_up"),
    Entry(("mlp.down_proj.bias",), "mlp.linear_fc2.bias", "replicated"),
)
MOE = (
    # The router needs the normalised input too, so TransformerEngine does not fuse it here.
    Entry(("post_attention_layernorm.weight",), "pre_mlp_layernorm.weight", "replicated"),
    Entry(("mlp.gate.weight",), "mlp.router.weight", "replicated"),
)
SHARED_EXPERT = (
    Entry(
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        "mlp.shared_experts.linear_fc1.weight",
        "gate_up",
    ),
    Entry(("mlp.shared_expert.down_proj.weight",), "mlp.shared_experts.linear_fc2.weight", "columns"),
    Entry(("mlp.shared_expert_gate.weight",), "mlp.shared_experts.gate_weight", "replicated"),
)

_GATE_UP = ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight")
_DOWN = ("mlp.experts.{expert}.down_proj.weight",)
EXPERTS: dict[ExpertModules, tuple[Entry, ...]] = {
    "sequential": (
        Entry(_GATE_UP, "mlp.experts.local_experts.{expert}.linear_fc1.weight", "gate_up"),
        Entry(_DOWN, "mlp.experts.local_experts.{expert}.linear_fc2.weight", "columns"),
    ),
    "grouped": (
        Entry(_GATE_UP, "mlp.experts.linear_fc1.weight{expert}", "gate_up"),
        Entry(_DOWN, "mlp.experts.linear_fc2.weight{expert}", "columns"),
    ),
    "legacy_grouped": (
        Entry(_GATE_UP, "mlp.experts.weight1", "all_gate_up"),
        Entry(_DOWN, "mlp.experts.weight2", "all_down"),
    ),
}


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
    relative, layer, expert = _parse(name)
    entry, is_expert = _ENTRIES.get(relative, (None, False))
    if entry is None or (layer is not None) != (relative in _LAYER_ENTRIES):
        raise ValueError(f"Megatron parameter {name!r}: not one of those that {config.model_class} has")
    if entry is OUTPUT and config.tied:
        entry = TIED_OUTPUT
    prefix = "" if layer is None else f"model.layers.{_held(name, 'layer', layer, layout.layers)}."
    if not is_expert:
        return Source(entry.form, (tuple(prefix + hf for hf in entry.hf),), expert=False)
    held = layout.experts(config.num_experts)
    numbers = held if expert is None else [_held(name, "expert", expert, held)]
    groups = tuple(tuple(prefix + hf.format(expert=number) for hf in entry.hf) for number in numbers)
    return Source(entry.form, groups, expert=True)


def layer_entries(config: MegatronModelConfig, layer: int, experts: ExpertModules) -> tuple[Entry, ...]:
    """The parameters of one layer, by its number in the whole model."""
    has = config.transformer
    entries: tuple[Entry, ...] = ATTENTION
    if has["add_qkv_bias"]:
        entries += QKV_BIAS
    if has["qk_layernorm"]:
        entries += QK_NORM
    if not config.moe_layers[layer]:
        return entries + DENSE_MLP + (LINEAR_BIASES if has["add_bias_linear"] else ())
    return entries + MOE + (SHARED_EXPERT if has.get("moe_shared_expert_gate") else ()) + EXPERTS[experts]


def module_parts(name: str) -> tuple[str, ...]:
    """Parameters of a Hugging Face module that stand or fall with a checkpoint's tensor: a layer's experts do
    together."""
    found = _ROUTED.fullmatch(name)
    return (name,) if found is None else (f"{found['experts']}.gate_up_proj", f"{found['experts']}.down_proj")


def torn(held: Collection[str], frozen: Collection[str]) -> str:
    """Says what would have to be frozen beside those of Megatron's one tensor that are; empty where all or none are."""
    missing = set(held).difference(frozen)
    if not missing or missing == set(held):
        return ""
    names = ", ".join(sorted(missing))
    return f"{names} beside the rest of what Megatron keeps together ({', '.join(sorted(held))}), or none of them"


def adaptable_layers(config: MegatronModelConfig) -> Iterator[str]:
    """Hugging Face names of the linear layers that can have an adapter: not routers, gates and routed experts."""
    for layer in range(config.num_layers):
        for entry in layer_entries(config, layer, "sequential"):
            if entry.form in ("qkv", "gate_up", "columns") and entry.local.endswith(".weight"):
                names = (hf for hf in entry.hf if "{expert}" not in hf)
                yield from (f"model.layers.{layer}.{hf.removesuffix('.weight')}" for hf in names)


def _adapter_source(found: re.Match[str], config: MegatronModelConfig, layout: ParallelLayout) -> Source:
    """Of one of the two matrices of a projection in a linear layer, which is cut where the layer is."""
    base = source(f"{found['linear']}.weight", config, layout)
    (layer,) = (hf.removesuffix(".weight") for hf in base.hf[0] if hf.endswith(f".{found['projection']}.weight"))
    form: Form = "replicated"
    if base.form == "columns" and found["matrix"] == "A":
        form = "columns"
    elif base.form != "columns" and found["matrix"] == "B":
        form = "rows"
    return Source(form, ((matrix_name(layer, found["matrix"]),),), expert=False)


_ROUTED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.\d+\.\w+\.weight")
_ADAPTER = re.compile(r"(?P<linear>.+)\.lora\.(?P<projection>\w+)\.lora_(?P<matrix>[AB])\.weight")
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


def _by_name(*tables: tuple[Entry, ...]) -> dict[str, Entry]:
    return {name: entry for table in tables for entry in table for name in {entry.local, entry.te or entry.local}}


_EXPERT_ENTRIES = _by_name(*EXPERTS.values())
_LAYER_ENTRIES = _EXPERT_ENTRIES | _by_name(ATTENTION, QKV_BIAS, QK_NORM, DENSE_MLP, LINEAR_BIASES, MOE, SHARED_EXPERT)
_ENTRIES = {
    name: (entry, name in _EXPERT_ENTRIES)
    for name, entry in (_LAYER_ENTRIES | _by_name((EMBEDDING, FINAL_NORM, OUTPUT))).items()
}
