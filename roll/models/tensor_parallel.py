"""Tensor parallelism by the plan that each model class of Transformers brings, and FSDP2 on top of it.

The matrices of a decoder layer are split over neighbouring ranks as in Megatron-LM (Shoeybi et al. 2019): the first of
two by output features, the second by input features, with one sum over the ranks after it. What lies between works on
this rank's heads and units. Embeddings and the output layer stay whole. Split parameters become DTensors, which
``fully_shard`` then shards further.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from roll.configs.engines.fsdp2 import LAYERS_OF

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedConfig, PreTrainedModel

PARTIAL = "replicated_with_grad_allreduce"
"""A style of Transformers: every rank has the parameter, and a gradient from its own heads only."""


def uneven_heads(config: PreTrainedConfig, size: int) -> str | None:
    """What would be right in place of ``size``, if the model's attention heads cannot be dealt out to so many ranks."""
    text = config.get_text_config()
    heads = {"num_attention_heads": text.num_attention_heads}
    heads["num_key_value_heads"] = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return next((f"a divisor of {what} = {count}" for what, count in heads.items() if count % size), None)


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
    plan = {name: style for name, style in _plan(model).items() if name not in vocabulary}
    if not plan:
        raise ValueError(f"{key}; {type(model).__name__} has no tensor-parallel plan, expected 1")
    if (expected := uneven_heads(model.config, size)) is not None:
        raise ValueError(f"{key}, expected {expected}")
    whole_plan = model._tp_plan
    try:
        model._tp_plan = {name: style for name, style in plan.items() if style != PARTIAL}
        apply_tensor_parallelism(model, mesh)
    finally:
        model._tp_plan = whole_plan
    check_even(model, size, key)
    patterns = [name.split(".") for name, style in plan.items() if style == PARTIAL]
    return {
        name for name, _ in model.named_parameters() if any(_matches(name.split(".")[:-1], each) for each in patterns)
    }


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """Styles by patterns of modules' names."""
    if (other := LAYERS_OF.get(model.config.get_text_config().model_type)) is None:
        return dict(model.tp_plan)
    from transformers import CONFIG_MAPPING

    trunk: Any = model.base_model
    layers = getattr(trunk, "language_model", trunk)
    prefix = next(name for name, module in model.named_modules() if module is layers)
    styles = cast("dict[str, str]", CONFIG_MAPPING[other]().base_model_tp_plan)
    return {f"{prefix}.{name}": style for name, style in styles.items()}


def check_even(model: PreTrainedModel, size: int, key: str) -> None:
    """Checks that each rank has as much as the others of every split parameter, but for the vocabulary's.

    Args:
        key: which asked for so many ranks, and the number, for the message.

    Raises:
        ValueError: some size does not divide.
    """
    from torch.distributed.tensor import DTensor

    vocabulary = model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or parameter is vocabulary:
            continue
        for placement in parameter.placements:
            dim = getattr(placement, "dim", None)
            if dim is not None and parameter.shape[dim] % size:
                raise ValueError(f"{key}, expected a divisor of {parameter.shape[dim]}, the size of {name}")


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """``layers.0.mlp`` matches ``layers.*.mlp``."""
    return len(parts) == len(pattern) and all(p in ("*", part) for part, p in zip(parts, pattern, strict=True))
