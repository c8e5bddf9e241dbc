"""Parts of a Megatron model that take no gradient."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.training.agreement import raise_on_all_ranks
from roll.distributed.strategy.training.checkpoint import HEAD_PREFIX
from roll.models.freezing import frozen_parameters
from roll.models.loading import make_skeleton
from roll.models.megatron.names import source

if TYPE_CHECKING:
    from roll.distributed.strategy.megatron.model import MegatronModel

_EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.\d+\.\w+\.weight")


def freeze_parts(model: MegatronModel, context: StrategyContext) -> None:
    """Freezes ``freeze_module_prefix`` in this rank's part of a model (collective).

    Raises:
        ValueError: a prefix without parameters, or one that takes only some of the tensors that Megatron keeps in one.
    """
    args = context.worker.model_args
    with raise_on_all_ranks():
        with torch.device("meta"):
            kwargs = args.model_config_kwargs
            hf_model = make_skeleton(context.head, context.model_path, dtype=torch.float32, config_kwargs=kwargs)
        frozen = frozen_parameters(hf_model, args.frozen_prefixes, head=context.head != "lm")
        for chunk, layout in zip(model.chunks, model.layouts, strict=True):
            for name, parameter in chunk.named_parameters():
                if name.startswith(HEAD_PREFIX):
                    continue
                held = {part for group in source(name, model.converted, layout).hf for hf in group for part in _in(hf)}
                if held & frozen and not held <= frozen:
                    missing = ", ".join(sorted(held - frozen))
                    raise ValueError(
                        f"{context.role}.model_args.freeze_module_prefix: Megatron keeps {', '.join(sorted(held))} "
                        f"together, expected {missing} beside the rest, or none of them"
                    )
                parameter.requires_grad_(not held <= frozen)
    for chunk, layout in zip(model.chunks, model.layouts, strict=True):
        if layout.first_stage:
            chunk.embedding.register_forward_hook(with_gradient)


def _in(name: str) -> tuple[str, ...]:
    """The module's parameters that stand or fall with a checkpoint's tensor: a layer's experts do together."""
    found = _EXPERT.fullmatch(name)
    return (name,) if found is None else (f"{found['experts']}.gate_up_proj", f"{found['experts']}.down_proj")


def with_gradient(module: nn.Module, args: object, embedded: Tensor) -> Tensor:
    """Lets gradients pass recomputed layers, which Megatron computes none for if their inputs need none."""
    return embedded.requires_grad_() if torch.is_grad_enabled() and not embedded.requires_grad else embedded
