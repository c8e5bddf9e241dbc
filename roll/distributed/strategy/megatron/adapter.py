"""LoRA adapters (Hu et al. 2021) on Megatron's linear layers.

Megatron holds several projections of a Hugging Face model in one layer. Each keeps matrices of its own here, so that an
adapter is the same in every engine. Of a layer that is cut by rows (query, key and value; gate and up projection), A is
whole on every tensor-parallel rank and B is cut; of one that is cut by columns, A is cut and B whole; of one that every
rank has whole, both are. What travels between ranks is never wider than the adapter's rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from roll.configs.engines.megatron import MegatronConfig
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.megatron.fit import check_adapter_fit
from roll.distributed.strategy.megatron.model import MegatronModel, own_parts, with_gradient
from roll.distributed.strategy.training.exchange import raise_on_all_ranks
from roll.models.loading import make_skeleton
from roll.models.lora import LoraSpec, adapted_layers, initial_value, matrix_shapes
from roll.models.megatron.names import source


def add_adapter(model: MegatronModel, context: StrategyContext, spec: LoraSpec, options: MegatronConfig) -> None:
    """Adds an adapter with its first values to this rank's part of a model, whose own weights need no gradients.

    Raises:
        ValueError: a target that matches no layer, or layers that cannot have an adapter here.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    kwargs = context.worker.model_args.model_config_kwargs
    with raise_on_all_ranks():
        with torch.device("meta"):
            # Of a reward model too: Megatron's trunk has the names of the whole model.
            hf_model = make_skeleton(
                "lm", context.model_path, dtype=torch.float32, config_kwargs=kwargs, pictures=model.has_tower
            )
        adapted = adapted_layers(hf_model, spec.targets, spec.excluded)
        if problems := list(check_adapter_fit(hf_model.config, options, adapted, dropout=spec.dropout)):
            raise ValueError("; ".join(f"{context.role}.{problem}" for problem in problems))
    for chunk, layout in zip(model.chunks, model.layouts, strict=True):
        for name, linear in list(chunk.decoder.named_modules(prefix="decoder")):
            if not isinstance(linear, ColumnParallelLinear | RowParallelLinear | nn.Linear):
                continue
            found = source(f"{name}.weight", model.converted, layout)
            names = [hf.removesuffix(".weight") for hf in found.hf[0]]
            if any(name in adapted for name in names):
                groups = model.converted.transformer["num_query_groups"] if found.form == "qkv" else 1
                projections = {
                    name.rpartition(".")[2]: (cast(nn.Linear, hf_model.get_submodule(name)), name in adapted)
                    for name in names
                }
                linear.lora = LinearAdapter(linear, projections, spec, groups)
                linear.register_forward_hook(linear.lora.add)
        if layout.first_stage:
            chunk.embedding.register_forward_hook(with_gradient)
    shapes = matrix_shapes(hf_model, spec)

    def first(name: str) -> Tensor:
        return initial_value(name, shapes[name], context.seed)

    with torch.no_grad():
        for parameter, part in own_parts(model, first, adapter=True):
            parameter.copy_(part)


@contextlib.contextmanager
def adapter_off(model: MegatronModel) -> Iterator[None]:
    """The model as it is without its adapter."""
    adapters = [module for chunk in model.chunks for module in chunk.modules() if isinstance(module, LinearAdapter)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


class LinearAdapter(nn.ModuleDict):
    """The matrices of a linear layer's projections, by the last part of their Hugging Face names.

    Args:
        projections: the Hugging Face layers in it, in order, and whether each is adapted.
        groups: of queries, if those, their key and their value follow each other; 1 if whole projections do.
    """

    enabled = True

    def __init__(
        self, linear: Any, projections: dict[str, tuple[nn.Linear, bool]], spec: LoraSpec, groups: int
    ) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import RowParallelLinear, set_tensor_model_parallel_attributes

        self._whole = isinstance(linear, nn.Linear)
        size = 1 if self._whole else linear.tp_group.size()
        self._by_columns = isinstance(linear, RowParallelLinear)
        self._sequence_parallel = bool(getattr(linear.weight if self._whole else linear, "sequence_parallel", False))
        self._scale = spec.alpha / spec.rank
        self._groups = groups // size if groups > 1 else 1
        self._widths = {name: layer.out_features // size for name, (layer, _) in projections.items()}
        cut = "" if self._whole else "lora_A" if self._by_columns else "lora_B"
        for name, (layer, adapted) in projections.items():
            if not adapted:
                continue
            inputs = layer.in_features // size if self._by_columns else layer.in_features
            outputs = layer.out_features if self._by_columns else self._widths[name]
            sizes = {"lora_A": (inputs, spec.rank), "lora_B": (spec.rank, outputs)}
            device = linear.weight.device
            self[name] = nn.ModuleDict(
                {key: nn.Linear(*both, bias=False, device=device) for key, both in sizes.items()}
            )
            for key in sizes:
                weight: Any = self._weight(name, key)
                set_tensor_model_parallel_attributes(weight, key == cut, int(self._by_columns), 1)
                # With sequence parallelism each rank has some of the tokens that a whole matrix meets: Megatron sums.
                weight.sequence_parallel = self._sequence_parallel and key != cut

    def add(self, linear: nn.Module, args: tuple[Tensor, ...], output: Any) -> Any:
        """A forward hook: the layer's input is [S, B, inputs], its output [S, B, outputs], and of Megatron's a bias."""
        if isinstance(output, Tensor):
            return output + self._delta(args[0]) if self.enabled else output
        result, bias = output
        return (result + self._delta(args[0]) if self.enabled else result), bias

    def _delta(self, inputs: Tensor) -> Tensor:
        """Addition of the adapter to the output, [S, B, outputs], for [S, B, inputs] and in their number format."""
        down = torch.cat([self._weight(name, "lora_A").to(inputs.dtype) for name in self])
        lows = self._across_ranks(functional.linear(inputs, down)).chunk(len(self), dim=-1)
        found = {
            n: functional.linear(low, self._weight(n, "lora_B").to(low.dtype))
            for n, low in zip(self, lows, strict=True)
        }
        if self._by_columns:
            (delta,) = found.values()
            return delta * self._scale
        axes = lows[0].shape[:-1]
        parts = [found[n] if n in found else lows[0].new_zeros(*axes, width) for n, width in self._widths.items()]
        delta = torch.cat([part.unflatten(-1, (self._groups, -1)) for part in parts], dim=-1).flatten(-2)
        return delta * self._scale

    def _weight(self, name: str, key: str) -> Tensor:
        return cast(nn.Linear, cast(nn.ModuleDict, self[name])[key]).weight

    def _across_ranks(self, low: Tensor) -> Tensor:
        """From what tensor-parallel ranks have after A to what they need before B; gradients likewise."""
        from megatron.core import tensor_parallel

        if self._whole:
            return low
        if self._sequence_parallel:
            if self._by_columns:
                return cast(Tensor, tensor_parallel.reduce_scatter_to_sequence_parallel_region(low))
            return cast(Tensor, tensor_parallel.gather_from_sequence_parallel_region(low))
        if self._by_columns:
            return cast(Tensor, tensor_parallel.reduce_from_tensor_model_parallel_region(low))
        return cast(Tensor, tensor_parallel.copy_to_tensor_model_parallel_region(low))
