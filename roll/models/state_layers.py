"""Layers that carry a state along a row (gated delta nets, Mamba, short convolutions): in a packed row, each sequence
starts with none.

Such a layer is run on one sequence of the row after another; what is around it, attention included, runs on the whole
row. Transformers' own code would need kernels for a GPU to do it in one call, and passes over the borders without them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roll.data.packing import PackedSequences

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def find(model: PreTrainedModel) -> list[nn.Module]:
    """Every kind that Transformers has looks a few tokens back by a convolution of its own."""
    return [module for module in model.modules() if any(isinstance(part, nn.Conv1d) for part in module.children())]


class StateLayers:
    """Those of a model.

    Borders stay until the next are given, so that layers which are computed again in the backward pass see them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.modules = find(model)
        self.lengths: tuple[int, ...] = ()
        """Of the sequences of the row that is computed; empty: it is one."""
        for module in self.modules:
            module.forward = functools.partial(self._run, module.forward)

    def set_borders(self, attention: object) -> None:
        """Sets what the next forward pass is cut by: a packed row's sequences, if it is one."""
        self.lengths = attention.lengths if isinstance(attention, PackedSequences) else ()

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(self.lengths) < 2:
            return forward(*args, **kwargs)
        states_RCH, *others = args or (kwargs.pop("hidden_states"),)
        parts = [forward(part, *others, **kwargs) for part in states_RCH.split(self.lengths, dim=1)]
        return torch.cat(parts, dim=1)
