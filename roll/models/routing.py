"""Choice of experts in the mixture-of-experts layers of a Hugging Face model: recorded and replayed.

A router takes the largest k of its probabilities. Where a choice is given for a token, it takes those experts in their
place; their weights are its own probabilities, through which the gradient flows on into the router
(https://arxiv.org/abs/2510.11370).

Axes: N tokens that the layers see, L such layers, K experts of a token in a layer, E = L x K.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roll.data.columns import UNKNOWN

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STORED = torch.int16
"""Number format of the choices between processes."""

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k")

_SIZES = (_NUM_EXPERTS, _PER_TOKEN)


def expert_sizes(config: object) -> tuple[int, int]:
    """The number of experts of a layer and of those of a token; zeros of a model without any."""
    sizes = [next((size for name in names if (size := getattr(config, name, None))), 0) for names in _SIZES]
    return (int(sizes[0]), int(sizes[1])) if all(isinstance(size, int) and size for size in sizes) else (0, 0)


class ExpertRouting:
    """The routers of a model.

    A choice stays until the next one is given, so that layers which are computed again in the backward pass see it.

    Raises:
        ValueError: the model has no layers with experts, or none that are known.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._num_experts, self.per_token = expert_sizes(model.config.get_text_config())
        blocks = [module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.Module)]
        if not self.per_token or not blocks:
            raise ValueError(f"router_replay: {type(model).__name__} has no layers with experts; expected disable")
        self.num_layers = len(blocks)
        self._replayed_NLK: Tensor | None = None
        self._chosen_NK: list[Tensor | None] = [None] * len(blocks)
        for layer, block in enumerate(blocks):
            block.forward = functools.partial(self._run, layer, block.forward)

    def replay(self, experts_NE: Tensor | None) -> None:
        """Sets what the next forward pass routes by; ``None``: its routers choose.

        Raises:
            ValueError: the choice is that of another model.
        """
        if experts_NE is not None and experts_NE.shape[1] != self.num_layers * self.per_token:
            raise ValueError(
                f"router_replay: {experts_NE.shape[1]} experts for each token, expected {self.num_layers} layers x "
                f"{self.per_token}"
            )
        self._replayed_NLK = None if experts_NE is None else experts_NE.view(-1, self.num_layers, self.per_token)
        self._chosen_NK = [None] * self.num_layers

    @property
    def chosen_NE(self) -> Tensor:
        """``STORED`` [N, E]: the experts of the last forward pass, layer by layer."""
        layers = [chosen_NK for chosen_NK in self._chosen_NK if chosen_NK is not None]
        assert len(layers) == self.num_layers, "a forward pass went before"
        return torch.cat(layers, dim=1).to(STORED)

    def choose(self, layer: int, found_NK: Tensor) -> Tensor:
        """Experts of a layer's tokens, int64 [N, K]: those given, else those found."""
        if self._replayed_NLK is not None:
            given_NK = self._replayed_NLK[:, layer].to(found_NK.device, torch.int64)
            found_NK = torch.where(given_NK == UNKNOWN, found_NK, given_NK)
        self._chosen_NK[layer] = found_NK
        return found_NK

    def is_choice(self, scores: Tensor, count: int) -> bool:
        """Tells a router's choice of experts from other uses of ``torch.topk``, such as a choice of groups of them."""
        return count == self.per_token and scores.shape[-1] == self._num_experts

    def _run(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _TopK(self, layer):
            result = forward(*args, **kwargs)
        if self._chosen_NK[layer] is None:
            expected = f"torch.topk of {self.per_token} of {self._num_experts} experts"
            raise ValueError(f"router_replay: layer {layer} of this model does not choose its experts with {expected}")
        return result


class _TopK(TorchFunctionMode):
    """Puts the choice of a layer's experts in the hands of ``ExpertRouting`` inside."""

    def __init__(self, routing: ExpertRouting, layer: int) -> None:
        super().__init__()
        self._routing, self._layer = routing, layer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        if not self._routing.is_choice(scores, result.indices.shape[-1]):
            return result
        chosen = self._routing.choose(self._layer, result.indices.flatten(0, -2)).view_as(result.indices)
        return type(result)((scores.gather(-1, chosen), chosen))


@functools.cache
def autocast_experts() -> None:
    """Lets ``torch.autocast`` apply to the product of all experts at once, which torch leaves in float32."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutocastCPU", "AutocastCUDA"):
        library.impl("_grouped_mm", _autocast_grouped_product, key)
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []
"""What they register is gone with them."""


def _autocast_grouped_product(inputs: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``aten::_grouped_mm`` of operands in autocast's number format."""
    device = inputs.device.type
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        result: Tensor = torch.ops.aten._grouped_mm(inputs.to(dtype), weights.to(dtype), *args, **kwargs)
    return result
