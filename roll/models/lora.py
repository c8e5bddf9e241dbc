"""LoRA adapters (Hu et al. 2021) on Transformers models, with layers of peft in the existing model.

The base weights are frozen, the adapter's are float32, and so is a reward model's head, which is trained beside it. Two
sets of names matter: those of the model's checkpoint, which knows no adapter, and those of a peft folder
(``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``).
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roll.models.adapter_files import CLASSIFIES, GENERATES
from roll.models.heads import SCORE_WEIGHT, text_modules
from roll.utils.hashing import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
PREFIX = "base_model.model."
SCORE_NAME = PREFIX + SCORE_WEIGHT
"""A reward model's head in a peft folder."""
_ADAPTER = "default"
_MARKS = (".lora_A.", ".lora_B.")
_LANGUAGE = ".language_model."


@dataclass(frozen=True)
class LoraSpec:
    """A low-rank adapter on top of frozen weights (Hu et al. 2021)."""

    rank: int
    alpha: int
    """The adapter's output is scaled by ``alpha / rank``."""
    targets: tuple[str, ...]
    """Names of the linear layers that have one, e.g. ``q_proj``; ``("all-linear",)``: all but the output layer, and but
    those that peft cannot tell from others (``adapted_layers``)."""
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

    layers = adapted_layers(model, shape.targets, shape.excluded)
    config = _peft_config(shape, list(layers))
    config.fan_in_fan_out = any(map(is_transposed, layers.values()))
    inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
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
) -> dict[str, nn.Module]:
    """The linear layers that the targets mean, by name: their last part. None is the output layer or in a tower.

    They are ``nn.Linear``, or Transformers' ``Conv1D``, whose weight lies the other way round. Of those that peft takes
    for others, or refuses, ``all-linear`` means none.

    Raises:
        UnknownLayerError: a target, or an excluded name, that matches none or only such.
    """
    linear = _linear_layers(model)
    reserved = _reserved(model, {name.rpartition(".")[2] for name in linear})
    known = sorted({name.rpartition(".")[2] for name in linear} - reserved.keys())
    for key, names in (("lora_target", targets), ("lora_exclude", excluded)):
        for target in names:
            if target in known or (key == "lora_target" and target == ALL_LINEAR and known):
                continue
            if key == "lora_exclude" and target in reserved:
                continue
            near = difflib.get_close_matches(target, known, n=3, cutoff=0.5) or known
            beside = f"{ALL_LINEAR} or " if key == "lora_target" and known else ""
            reason = reserved.get(target, f"matches no linear layer of {type(model).__name__}")
            expected = f"{beside}some of {', '.join(known)}; the nearest: {', '.join(near)}" if known else "no adapter"
            raise UnknownLayerError(key, f"{target!r} {reason}", expected)
    chosen = known if ALL_LINEAR in targets else targets
    wanted = set(chosen) - set(excluded)
    return {name: layer for name, layer in linear.items() if name.rpartition(".")[2] in wanted}


def left_out(model: PreTrainedModel, targets: tuple[str, ...], excluded: tuple[str, ...] = ()) -> str:
    """Says what an adapter leaves as it is that one might expect in it: empty if it is nothing.

    That are with ``all-linear`` all matrices that are no linear layers, such as a mixture's routed experts, which
    Transformers keeps in three dimensions; and names that only some of the layers have.
    """
    from transformers.pytorch_utils import Conv1D

    layers = adapted_layers(model, targets, excluded)
    parts = []
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    for last in sorted({name.rpartition(".")[2] for name in layers}):
        found = {number for name in layers if name.endswith(f".{last}") and (number := _number_of(name)) is not None}
        if found and len(found) < depth:
            parts.append(f"{last} is in {len(found)} of {depth} layers")
    output = model.get_output_embeddings() if model.can_generate() else None
    groups: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        linear = isinstance(module, nn.Linear | Conv1D)
        if module is output or isinstance(module, nn.Embedding) or name in layers:
            continue
        if linear and (name.rpartition(".")[2] in excluded or ALL_LINEAR not in targets):
            continue
        for own, parameter in module.named_parameters(recurse=False):
            experts = parameter.ndim == 3 and "expert" in name
            if parameter.ndim > 1 and (ALL_LINEAR in targets or experts):
                kind = ".".join(part for part in f"{name}.{own}".split(".")[-3:] if not part.isdigit())
                groups.setdefault(kind, []).append(parameter.numel())
    parts += [f"{kind} ({len(sizes)} tensors, {sum(sizes):,} parameters)" for kind, sizes in sorted(groups.items())]
    return "; ".join(parts)


def layer_sizes(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    inputs, outputs = layer.weight.shape  # type: ignore[union-attr,misc]
    return int(inputs), int(outputs)


def is_transposed(layer: nn.Module) -> bool:
    """Tells whether a linear layer's weight is [inputs, outputs], as ``Conv1D`` has it."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D)


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings() if model.can_generate() else None
    own = {module for module in text_modules(model) if isinstance(module, nn.Linear | Conv1D) and module is not output}
    return {name: module for name, module in model.named_modules() if module in own and _returns_a_row(module)}


def _returns_a_row(layer: nn.Module) -> bool:
    """Tells whether a layer returns what a linear layer does: a router may be one that returns its choice too."""
    if type(layer).forward is nn.Linear.forward:
        return True
    inputs, outputs = layer_sizes(layer)
    weight = next(layer.parameters())
    try:
        with torch.no_grad():
            found = layer(torch.zeros(1, inputs, dtype=weight.dtype, device=weight.device))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return isinstance(found, Tensor) and found.shape == (1, outputs)


def _reserved(model: PreTrainedModel, names: set[str]) -> dict[str, str]:
    """Last names of layers that cannot have an adapter in a folder that peft reads as it was written, and why.

    In mixtures peft means the routed experts by names of their projections (``gate_proj``), and takes them for nothing
    else; it refuses layers whose weights the kernels of Mamba read beside the layer.
    """
    try:
        from peft import LoraConfig
        from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # said by those who train one
        return {}
    found = {}
    config = LoraConfig(target_modules=sorted(names))
    convert_peft_config_for_transformers(config, model, None)
    for name in names.difference(config.target_modules or ()):
        found[name] = "means the routed experts in peft, which no engine here adapts"
    for name in names:
        try:
            _check_lora_target_modules_mamba(config, model, name)
        except ValueError:
            found[name] = "is a layer whose weights Mamba's kernels read by themselves"
    return found


def _number_of(name: str) -> int | None:
    """Number of the decoder layer that a module is in."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


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
        inputs, outputs = layer_sizes(layer)
        shapes[matrix_name(name, "A")] = (shape.rank, inputs)
        shapes[matrix_name(name, "B")] = (outputs, shape.rank)
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


def write_adapter_config(
    folder: Path, shape: LoraSpec, base_model: str, names: Iterable[str], *, scores: bool = False
) -> None:
    """Writes ``ADAPTER_CONFIG``, which makes a folder with ``ADAPTER_FILE`` one that peft loads.

    Args:
        names: of the adapter's matrices: by ``all-linear`` peft means other layers in some models.
        scores: the adapter is a reward model's, whose head is beside it.
    """
    named = list(names)
    config = _peft_config(shape, sorted(adapted_names(named)))
    if any(_LANGUAGE in name for name in named):  # beside a tower, whose layers may have the same last names
        config.target_modules = rf".*{re.escape(_LANGUAGE)}.*\.({'|'.join(sorted(adapted_names(named)))})"
    config.base_model_name_or_path = base_model
    config.task_type = CLASSIFIES if scores else GENERATES
    config.modules_to_save = [SCORE_WEIGHT.partition(".")[0]] if scores else None
    config.inference_mode = True
    config.save_pretrained(str(folder))


def adapted_names(names: Iterable[str]) -> set[str]:
    """The last names of the layers that an adapter with these tensors is for."""
    return {name.rpartition(".lora_")[0].rpartition(".")[2] for name in names if ".lora_" in name}


def _peft_config(shape: LoraSpec, targets: list[str]) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=shape.rank, lora_alpha=shape.alpha, lora_dropout=shape.dropout, target_modules=targets)


def _adapted(model: nn.Module) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]
