"""Parts of a Megatron model that take no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.training.agreement import raise_on_all_ranks
from roll.distributed.strategy.training.checkpoint import HEAD_PREFIX
from roll.models.freezing import frozen_parameters
from roll.models.loading import make_skeleton
from roll.models.megatron.names import module_parts, source, torn

if TYPE_CHECKING:
    from roll.distributed.strategy.megatron.model import MegatronModel


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
                groups = source(name, model.converted, layout).hf
                held = {part for group in groups for hf in group for part in module_parts(hf)}
                if expected := torn(held, frozen):
                    raise ValueError(f"{context.role}.model_args.freeze_module_prefix: expected {expected}")
                parameter.requires_grad_(not held <= frozen)
    for chunk, layout in zip(model.chunks, model.layouts, strict=True):
        if layout.first_stage:
            chunk.embedding.register_forward_hook(with_gradient)


def with_gradient(module: nn.Module, args: object, embedded: Tensor) -> Tensor:
    """Lets gradients pass recomputed layers, which Megatron computes none for if their inputs need none."""
    return embedded.requires_grad_() if torch.is_grad_enabled() and not embedded.requires_grad else embedded
