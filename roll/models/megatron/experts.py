"""Routed experts one by one, as Megatron has them, and all of a layer in a few tensors, as Transformers' modules do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from roll.models.megatron.families import Experts, Family

Part = Literal["gate", "up", "down"]


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


def split_reader(read: Callable[[str], Tensor], family: Family) -> Callable[[str], Tensor]:
    """Reads by the names of ``names`` what ``read`` has by those of Transformers' module."""

    @lru_cache(maxsize=4)  # a layer's experts are asked for one after the other
    def module_tensor(name: str) -> Tensor:
        return read(name)

    def expert_tensor(name: str) -> Tensor:
        found = find_expert(name, family)
        if found is None:
            return module_tensor(module_name(name, family))
        one = module_tensor(fused_name(found.layer, found.part, found.kind))[found.number]
        alternating = family.experts.alternating
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
