"""Large linear layers in float32 on processors where PyTorch's choice of kernels is slow.

PyTorch multiplies float32 matrices on a CPU with MKL, which uses AVX-512 on Intel's processors alone. On others that
have it, oneDNN, which PyTorch brings too, takes half the time or less. Its result for a row does not depend on how many
rows there are (but for a single one), nor on the number of threads, so a run repeats exactly with either.
"""

from __future__ import annotations

import functools
import os
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEAST_WEIGHTS = 100_000
"""Layers with fewer take PyTorch's way: calling oneDNN from Python would cost them what it saves."""
LEAST_ROWS = 64
"""Products over fewer rows, of a weight's gradient, take PyTorch's way: some of oneDNN's are slower."""


@functools.cache
def is_quicker() -> bool:
    """Whether oneDNN is the quicker one on this processor; not asked where ``MKL_CBWR`` wants MKL's results."""
    if (
        "MKL_CBWR" in os.environ
        or not torch.backends.mkldnn.is_available()
        or not hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return False
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(found.get("avx512_f")) and "Intel" not in str(found.get("cpu_name", "Intel"))


def speed_up(model: nn.Module) -> None:
    """Lets a model's large linear layers take the quicker way; the classes of its modules stay as they are.

    Where there is a GPU, models are computed on it, and nothing is done.
    """
    if not is_quicker() or torch.cuda.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= LEAST_WEIGHTS:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What ``nn.functional.linear`` computes, the quicker way where there is one.

    Args:
        inputs: [..., I].
        weight: [O, I].
        bias: [O].

    Returns:
        [..., O].
    """
    if not is_quicker() or weight.numel() < LEAST_WEIGHTS or not _takes(inputs, weight):
        return nn.functional.linear(inputs, weight, bias)
    result: Tensor = (_Linear.apply if torch.is_grad_enabled() else _product)(inputs, weight, bias)
    return result


def _forward(module: nn.Linear, inputs: Tensor) -> Tensor:
    return linear(inputs, module.weight, module.bias)


def _takes(inputs: Tensor, weight: Tensor) -> bool:
    """Tells whether both are whole tensors of float32 on a CPU, and stay so; a ``DTensor`` is of another class."""
    return (
        not torch.is_autocast_enabled("cpu")
        and type(inputs) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and inputs.dtype == weight.dtype == torch.float32
        and inputs.device.type == weight.device.type == "cpu"
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        wants_inputs, wants_weight, wants_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        of_inputs = _product(gradient, weight.t()) if wants_inputs else None
        of_weight = None
        if wants_weight:
            columns, seen = rows.t(), inputs.flatten(0, -2)
            of_weight = _product(columns, seen.t()) if len(rows) >= LEAST_ROWS else columns @ seen
        return of_inputs, of_weight, rows.sum(0) if wants_bias else None


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., O] of [..., I] and [O, I], by oneDNN, which Inductor calls in this way too."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return result
