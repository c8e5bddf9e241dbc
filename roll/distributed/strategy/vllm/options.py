"""Which keys of a ``strategy_config`` vLLM takes. Imports neither vLLM nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.configs.problems import ConfigProblem
from roll.configs.strategy import VllmConfig
from roll.distributed.strategy.arguments import constructor_fields
from roll.distributed.strategy.engines import option_problems

OWNED_OPTIONS = {
    "model": "pretrain",
    "tokenizer": "pretrain",
    "dtype": "model_args.dtype",
    "hf_overrides": "model_args.model_config_kwargs",
    "seed": "seed",
    "max_num_seqs": "max_running_requests",
    "enable_lora": "lora_target in actor_train",
    "max_lora_rank": "lora_rank in actor_train",
    "max_loras": "lora_target in actor_train",
    "trust_remote_code": "no such key, since code that comes with a model never runs",
    "logprobs_mode": "no such key, since log-probs follow the sampling temperature",
    "speculative_config": "no such key, since draft tokens would report other log-probs",
    "generation_config": "generating_args",
    "worker_extension_cls": "no such key, since weights arrive through it",
    "data_parallel_size": "more workers in device_mapping",
    "pipeline_parallel_size": "tensor_parallel_size",
}
"""Arguments of the engine that are set from elsewhere, and where."""
OTHER_NAMES = {
    "context_length": "max_model_len",
    "disable_cuda_graph": "enforce_eager",
    "disable_radix_cache": "enable_prefix_caching",
    "max_total_tokens": "kv_cache_memory_bytes",
    "mem_fraction_static": "gpu_memory_utilization",
    "python_executable": "no such key, since vLLM runs in the environment of the run",
    "tensor_model_parallel_size": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
}
"""What SGLang calls an option of this engine."""


def check_engine_options(options: Mapping[str, Any]) -> list[ConfigProblem]:
    """Keys of a ``strategy_config`` that the installed vLLM has no argument for, or that are set from elsewhere; only
    the latter when vLLM is not installed."""
    return option_problems(
        options,
        typed=VllmConfig.model_fields,
        known=constructor_fields("vllm", "engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs")),
        elsewhere=OWNED_OPTIONS | OTHER_NAMES,
        arguments="vLLM's AsyncEngineArgs",
    )
