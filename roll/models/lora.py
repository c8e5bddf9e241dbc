"""LoRA adapters (Hu et al. 2021) on Transformers models, by peft, whose layers go into the model that is there.

The base weights are frozen, the adapter's are float32, and so is a reward model's head, which is trained beside it. Two
sets of names matter: those of the model's checkpoint, which knows no adapter, and those of a peft folder
(``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``).
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roll.models.adapter_files import CLASSIFIES, GENERATES
from roll.models.heads import SCORE_WEIGHT
from roll.utils.seeding import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
PREFIX = "base_model.model."
SCORE_NAME = PREFIX + SCORE_WEIGHT
"""A reward model's head in a peft folder."""
_ADAPTER = "default"
_MARKS = (".lora_A.", ".lora_B.")


@dataclass(frozen=True)
class LoraSpec:
    """A low-rank adapter on top of frozen weights (Hu et al. 2021)."""

    rank: int
    alpha: int
    """The adapter's output is scaled by ``alpha / rank``."""
    targets: tuple[str, ...]
    """Names of the linear layers that have one, e.g. ``q_proj``; ``("all-linear",)``: all but the output layer."""
    dropout: float = 0.0
    excluded: tuple[str, ...] = ()
    """Names of linear layers that have none although ``all-linear`` means them."""
    start: str | None = None
    """Folder of the adapter that training starts from, as peft keeps one; ``None``: a new one."""


def inject_adapter(model: PreTrainedModel, shape: LoraSpec) -> None:
    """Adds an adapter to the target layers and freezes everything else; its values are unset (``initial_value``).

    Raises:
        ValueError: a target that matches no linear layer.
    """
    from peft import inject_adapter_in_model

    inject_adapter_in_model(
        _peft_config(shape, list(adapted_layers(model, shape.targets, shape.excluded))), model, adapter_name=_ADAPTER
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.float()
    model.eval()  # the new layers too: their dropout belongs to training steps alone


class UnknownLayerError(ValueError):
    """A name in ``lora_target`` or ``lora_exclude`` that no linear layer has."""

    def __init__(self, key: str, reason: str, expected: str) -> None:
        self.key, self.reason, self.expected = key, reason, expected
        super().__init__(f"model_args.{key}: {reason}, expected {expected}")


def adapted_layers(
    model: PreTrainedModel, targets: tuple[str, ...], excluded: tuple[str, ...] = ()
) -> dict[str, nn.Linear]:
    """The linear layers that the targets mean, by name: those whose last part it is, never the output layer.

    Raises:
        UnknownLayerError: a target, or an excluded name, that matches none.
    """
    output = model.get_output_embeddings() if model.can_generate() else None
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not output}
    known = sorted({name.rpartition(".")[2] for name in linear})
    for key, names in (("lora_target", targets), ("lora_exclude", excluded)):
        for target in names:
            if target not in known and not (key == "lora_target" and target == ALL_LINEAR):
                near = difflib.get_close_matches(target, known, n=3, cutoff=0.5) or known
                beside = f"{ALL_LINEAR} or " if key == "lora_target" else ""
                raise UnknownLayerError(
                    key,
                    f"{target!r} matches no linear layer of {type(model).__name__}",
                    f"{beside}some of {', '.join(known)}; the nearest: {', '.join(near)}",
                )
    chosen = known if ALL_LINEAR in targets else targets
    wanted = set(chosen) - set(excluded)
    return {name: layer for name, layer in linear.items() if name.rpartition(".")[2] in wanted}


def is_adapter(name: str) -> bool:
    """Tells whether a parameter is an adapter's."""
    return any(mark in name for mark in _MARKS)


def base_name(name: str) -> str:
    """A base parameter's name in the model without an adapter."""
    return name.replace(".base_layer.", ".")


def adapter_name(name: str) -> str:
    """An adapter parameter's name in a peft folder."""
    return PREFIX + name.replace(f".{_ADAPTER}.", ".")


def matrix_name(layer: str, matrix: str) -> str:
    """The name in a peft folder of a layer's ``A`` [rank, inputs] or ``B`` [outputs, rank]."""
    return f"{PREFIX}{layer}.lora_{matrix}.weight"


def matrix_shapes(model: PreTrainedModel, shape: LoraSpec) -> dict[str, tuple[int, int]]:
    """All of an adapter's matrices, under their names in a peft folder."""
    shapes = {}
    for name, layer in adapted_layers(model, shape.targets, shape.excluded).items():
        shapes[matrix_name(name, "A")] = (shape.rank, layer.in_features)
        shapes[matrix_name(name, "B")] = (layer.out_features, shape.rank)
    return shapes


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Start of an adapter's matrix: B is zero, A as in ``nn.Linear``, from the seed and its name alone.

    Returns:
        float32, the same on every rank, in every layout and every engine.
    """
    value = torch.zeros(shape)
    if _MARKS[0] in name:
        generator = torch.Generator().manual_seed(derive_seed(seed, "adapter", name))
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value


@contextlib.contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The model as it is without its adapter."""
    layers = _adapted(model)
    for layer in layers:
        # Not enable_adapters(), which also changes what is trained.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextlib.contextmanager
def adapter_dropout(model: nn.Module) -> Iterator[None]:
    """Drops out inputs of the adapter, as in training; elsewhere and otherwise the model stays in evaluation mode."""
    dropouts = [layer.lora_dropout for layer in _adapted(model)]
    for dropout in dropouts:
        dropout.train()
    try:
        yield
    finally:
        for dropout in dropouts:
            dropout.eval()


def write_adapter_config(folder: Path, shape: LoraSpec, base_model: str, *, scores: bool = False) -> None:
    """Writes ``ADAPTER_CONFIG``, which makes a folder with ``ADAPTER_FILE`` one that peft loads.

    Args:
        scores: the adapter is a reward model's, whose head is beside it.
    """
    config = _peft_config(shape, ALL_LINEAR if ALL_LINEAR in shape.targets else list(shape.targets))
    config.exclude_modules = list(shape.excluded) or None
    config.base_model_name_or_path = base_model
    config.task_type = CLASSIFIES if scores else GENERATES
    config.modules_to_save = [SCORE_WEIGHT.partition(".")[0]] if scores else None
    config.inference_mode = True
    config.save_pretrained(str(folder))


def _peft_config(shape: LoraSpec, targets: list[str] | str) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=shape.rank, lora_alpha=shape.alpha, lora_dropout=shape.dropout, target_modules=targets)


def _adapted(model: nn.Module) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]
