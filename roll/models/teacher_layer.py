"""The output layer of a teacher, read from its files: it makes distributions of the hidden states that come."""

from __future__ import annotations

import torch
from torch import nn

from roll.algorithms.quantities import OutputLayer
from roll.models.heads import OutputHead
from roll.models.loading import make_skeleton
from roll.models.weight_files import WeightFiles


def load_teacher_layer(path: str, dtype: torch.dtype, *, trust_remote_code: bool = False) -> OutputLayer:
    """The output layer of a model (a folder in Hugging Face format, or a hub name) in host memory.

    Raises:
        ValueError: it is not a linear map of the hidden states, or its weights are not in the files.
    """
    with torch.device("meta"):
        model = make_skeleton("lm", path, dtype=dtype, trust_remote_code=trust_remote_code)
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"teacher {path!r}: the output layer is a {type(layer).__name__}, expected Linear")
    head = OutputHead(model)
    if head.others:
        raise ValueError(
            f"teacher {path!r}: {type(model).__name__} has other weights in its head than its output layer's"
        )
    files = WeightFiles(path)
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is layer.weight]
    error = None
    for name in names:  # tied weights are in the files once
        try:
            weight_VH = files.read(name)
            break
        except ValueError as missing:
            error = missing
    else:
        raise ValueError(f"teacher {path!r}: its output layer is not in its files") from error
    bias = [name for name, p in model.named_parameters() if p is layer.bias]
    bias_V = files.read(bias[0]).to(dtype) if bias else None
    return OutputLayer(weight_VH.to(dtype), bias_V, head)
