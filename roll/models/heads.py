"""A scalar head on a language model's trunk, for critics and reward models."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

VALUE_HEAD_FILE = "value_head.safetensors"
SCORE_WEIGHT = "score.weight"
"""The head of a sequence classifier, as Transformers names it in a model's files."""


class ValueHead(nn.Module):
    """Maps a hidden state to a value. Starts at zero, so that an untrained critic predicts nothing.

    Args:
        bias: a reward model has none, as classifiers have none.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, bias=bias, dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_KH: Tensor) -> Tensor:
        """Values in float32, shape [K]. Beside an adapter the head is float32, the trunk may be narrower."""
        values: Tensor = self.linear(hidden_KH.to(self.linear.weight.dtype))
        return values.float().squeeze(-1).clone()  # no view: FSDP2 could not hook one safely


def load_value_head(hidden_size: int, folder: Path, *, bias: bool = True) -> ValueHead:
    """The head saved in ``folder``: a critic's, or a classifier's with one output; a fresh one where there is none.

    Raises:
        ValueError: it is one of several outputs.
    """
    from safetensors.torch import load_file

    head = ValueHead(hidden_size, bias=bias)
    file = folder / VALUE_HEAD_FILE
    if file.exists():
        head.load_state_dict(load_file(file))
    elif (weight := _score_weight(folder)) is not None:
        if weight.shape != (expected := head.linear.weight.shape):
            seen = f"{SCORE_WEIGHT}: seen shape {tuple(weight.shape)}, expected {tuple(expected)}"
            raise ValueError(f"model path {str(folder)!r}: {seen}, a head with one output")
        head.load_state_dict({"linear.weight": weight.float()}, strict=False)
    return head


def _score_weight(folder: Path) -> Tensor | None:
    from safetensors import safe_open

    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            if SCORE_WEIGHT in tensors.keys():  # noqa: SIM118 (not a dict)
                found: Tensor = tensors.get_tensor(SCORE_WEIGHT)
                return found
    return None
