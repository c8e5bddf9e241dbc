"""A LoRA adapter on its way to a generator: checked against the model, and as a change of its weights.

The names are those of peft's state dict: ``base_model.model.<layer>.lora_A.weight`` [rank, inputs] and ``lora_B``
[outputs, rank]; the layer's weight becomes W + alpha / rank · B A (Hu et al. 2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from roll.distributed.weights.buckets import WeightMismatchError
from roll.models.lora import (
    LoraSpec,
    adapted_layers,
    adapted_names,
    is_transposed,
    matrix_name,
    matrix_shapes,
)

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def check_adapter(model: PreTrainedModel, spec: LoraSpec | None, tensors: Mapping[str, Tensor]) -> LoraSpec:
    """Checks that ``tensors`` are one whole adapter for ``model`` (whose weights may be on the meta device).

    Returns:
        ``spec``, which there is.

    Raises:
        WeightMismatchError: the role has no adapter; unknown or missing names, or wrong shapes; the first are listed.
    """
    if spec is None:
        raise WeightMismatchError("adapter refused: this role has no LoRA adapter; expected lora_target in actor_train")
    expected = matrix_shapes(model, spec)
    problems = [f"missing name {name}" for name in expected if name not in tensors]
    problems += [f"unknown name {name}" for name in tensors if name not in expected]
    problems += [
        f"{name} has shape {tuple(tensor.shape)}, expected {expected[name]}"
        for name, tensor in tensors.items()
        if name in expected and tensor.shape != expected[name]
    ]
    if problems:
        shown, rest = problems[:8], len(problems) - 8
        more = f"; and {rest} more" if rest > 0 else ""
        raise WeightMismatchError(f"adapter refused, the old one stays: {'; '.join(shown)}{more}")
    return spec


def peft_config(spec: LoraSpec, names: Iterable[str]) -> dict[str, Any]:
    """The part of a peft folder's ``adapter_config.json`` that engines read, for an adapter with these tensors."""
    return {
        "peft_type": "LORA",
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": sorted(adapted_names(names)),
        "bias": "none",
    }


class MergedAdapter:
    """An adapter that is added to the weights of a model.

    The weights as they are without it are kept in host memory, for the adapted layers only, so that nothing of one
    adapter stays in the next.
    """

    def __init__(self, model: PreTrainedModel, spec: LoraSpec) -> None:
        self._spec = spec
        self._layers = adapted_layers(model, spec.targets, spec.excluded)
        self._base: dict[str, Tensor] = {}

    @torch.no_grad()
    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes the weights those of the base model plus this adapter, in place of the one before."""
        scale = self._spec.alpha / self._spec.rank
        for name, layer in self._layers.items():
            weight = cast("nn.Parameter", layer.weight)
            if name not in self._base:
                self._base[name] = weight.detach().cpu()
            base = self._base[name]
            down_RI, up_OR = (tensors[matrix_name(name, part)].to(weight.device, torch.float32) for part in ("A", "B"))
            # The sum in float32, rounded once: what peft's merge gives in float32, and at least as exact in others.
            delta = (down_RI.T, up_OR.T) if is_transposed(layer) else (up_OR, down_RI)
            merged = torch.addmm(base.to(weight.device).float(), *delta, alpha=scale)
            weight.data = merged.to(weight.dtype)

    def forget(self) -> None:
        """Takes the weights as they are for the base: they were replaced."""
        self._base.clear()
