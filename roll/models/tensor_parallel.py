"""Tensor parallelism for FSDP2, by the plan that each model class of Transformers brings.

The matrices of a decoder layer are split over neighbouring ranks as in Megatron-LM (Shoeybi et al. 2019): the first of
two by output features, the second by input features, with one sum over the ranks after it. What lies between works on
this rank's heads and units. Embeddings and the output layer stay whole. Split parameters become DTensors, which
``fully_shard`` then shards further.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

PARTIAL = "replicated_with_grad_allreduce"
"""A style of Transformers: every rank has the parameter, and a gradient from its own heads only."""


def split_layers(model: PreTrainedModel, mesh: DeviceMesh) -> set[str]:
    """Splits the decoder layers of a model whose weights are on the meta device.

    Returns:
        Names of whole parameters whose gradients must be summed over the group.

    Raises:
        ValueError: the class has no plan, or its sizes do not divide.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    size = mesh.size()
    key = f"strategy_config.tensor_parallel_size: {size}"
    outside = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    vocabulary = {name for name, module in model.named_modules() if id(module) in outside}
    plan = {name: style for name, style in model.tp_plan.items() if name not in vocabulary}
    if not plan:
        raise ValueError(f"{key}; {type(model).__name__} has no tensor-parallel plan, expected 1")
    config = model.config.get_text_config()
    heads = {"num_attention_heads": config.num_attention_heads}
    heads["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for what, count in heads.items():
        if count % size:
            raise ValueError(f"{key}, expected a divisor of {what} = {count}")
    whole_plan = model._tp_plan
    try:
        model._tp_plan = {name: style for name, style in plan.items() if style != PARTIAL}
        apply_tensor_parallelism(model, mesh)
    finally:
        model._tp_plan = whole_plan
    _check_even(model, mesh, key)
    patterns = [name.split(".") for name, style in plan.items() if style == PARTIAL]
    return {
        name for name, _ in model.named_parameters() if any(_matches(name.split(".")[:-1], each) for each in patterns)
    }


def _check_even(model: PreTrainedModel, mesh: DeviceMesh, key: str) -> None:
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        for placement in parameter.placements:
            dim = getattr(placement, "dim", None)
            if dim is not None and parameter.shape[dim] % mesh.size():
                raise ValueError(f"{key}, expected a divisor of {parameter.shape[dim]}, the size of {name}")


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """``layers.0.mlp`` matches ``layers.*.mlp``."""
    return len(parts) == len(pattern) and all(p in ("*", part) for part, p in zip(parts, pattern, strict=True))
