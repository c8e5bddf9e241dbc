"""A scalar head on a language model's trunk, for critics."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

VALUE_HEAD_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """Maps a hidden state to a value. Starts at zero, so that an untrained critic predicts nothing."""

    def __init__(self, hidden_size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_KH: Tensor) -> Tensor:
        """Values in float32, shape [K]."""
        values: Tensor = self.linear(hidden_KH)
        return values.float().squeeze(-1).clone()  # no view: FSDP2 could not hook one safely


def load_value_head(hidden_size: int, folder: Path, dtype: torch.dtype = torch.float32) -> ValueHead:
    """The head saved in ``folder``, or a fresh one where there is none."""
    from safetensors.torch import load_file

    head = ValueHead(hidden_size, dtype)
    file = folder / VALUE_HEAD_FILE
    if file.exists():
        head.load_state_dict(load_file(file))
    return head
