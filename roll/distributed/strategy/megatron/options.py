"""Which keys of a ``strategy_config`` Megatron-Core takes. Imports neither Megatron nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.configs.problems import ConfigProblem
from roll.configs.strategy import MegatronConfig
from roll.distributed.strategy.arguments import constructor_fields, type_problems
from roll.distributed.strategy.engines import advice

OWNED = {
    "bf16": "model_args.dtype",
    "fp16": "model_args.dtype (bf16 or fp32)",
    "params_dtype": "model_args.dtype",
    "pipeline_dtype": "model_args.dtype",
    "lr": "training_args.learning_rate",
    "min_lr": "training_args.min_lr_ratio",
    "weight_decay": "training_args.weight_decay",
    "adam_beta1": "training_args.adam_beta1",
    "adam_beta2": "training_args.adam_beta2",
    "adam_eps": "training_args.adam_epsilon",
    "clip_grad": "max_grad_norm",
    "calculate_per_token_loss": "loss_agg_mode",
    "average_in_collective": "nothing: gradients are summed",
    "optimizer": "nothing: it is AdamW",
    "use_precision_aware_optimizer": "nothing: Adam's moments are float32",
    "optimizer_cpu_offload": "nothing: optimizer states leave the device between steps, with offload",
    "overlap_param_gather": "nothing: weights are read between steps",
    "num_distributed_optimizer_instances": "nothing: all data-parallel ranks share the optimizer states",
    "use_megatron_fsdp": "strategy_name fsdp2_train",
    "use_custom_fsdp": "strategy_name fsdp2_train",
    "variable_seq_lengths": "nothing: it follows from the pipeline's schedule",
    "moe_router_force_load_balancing": "nothing: routing at random only serves benchmarks",
    "perform_initialization": "nothing: weights are always loaded",
    "use_cpu_initialization": "nothing: weights are always loaded",
    "init_model_with_meta_device": "nothing: weights are always loaded",
}
"""Fields of Megatron's configurations that are not options here, and what to set instead."""

MODEL_FIELDS = frozenset(
    (
        "activation_func",
        "add_bias_linear",
        "add_qkv_bias",
        "attention_dropout",
        "ffn_hidden_size",
        "gated_linear_unit",
        "hidden_dropout",
        "hidden_size",
        "kv_channels",
        "layernorm_epsilon",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_topk",
        "moe_shared_expert_gate",
        "moe_shared_expert_intermediate_size",
        "normalization",
        "num_attention_heads",
        "num_layers",
        "num_moe_experts",
        "num_query_groups",
        "qk_layernorm",
    )
)
"""Fields of Megatron's configurations that the model's own configuration sets."""

ENGINE_CONFIGS = {
    "core/model_parallel_config.py": ("ModelParallelConfig",),
    "core/transformer/transformer_config.py": ("TransformerConfig",),
    "core/distributed/distributed_data_parallel_config.py": ("DistributedDataParallelConfig",),
    "core/optimizer/optimizer_config.py": ("OptimizerConfig",),
}
"""Where Megatron's configurations are, below its package."""

CALLABLES = ("timers", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func")


def check_engine_options(options: Mapping[str, Any]) -> list[ConfigProblem]:
    """Wrong keys and values of a ``strategy_config`` that are for Megatron; reads its source, imports nothing."""
    known: dict[str, str] = {}
    for file, classes in ENGINE_CONFIGS.items():
        known |= constructor_fields("megatron", file, classes)
    if not known:
        return []  # it is not installed, which setup says
    known = {name: annotation for name, annotation in known.items() if name not in OWNED and name not in CALLABLES}
    typed = set(MegatronConfig.model_fields)
    problems = []
    for name in sorted(options.keys() - typed):
        if name in MODEL_FIELDS:
            problems.append(ConfigProblem(name, options[name], "model_args.model_config_kwargs instead"))
        elif name in OWNED:
            problems.append(ConfigProblem(name, options[name], OWNED[name]))
        elif name not in known:
            hint = advice(name, known.keys() | typed)
            problems.append(ConfigProblem(name, options[name], "an option of Megatron-Core", hint))
        else:
            problems += type_problems({name: options[name]}, known)
    return problems
