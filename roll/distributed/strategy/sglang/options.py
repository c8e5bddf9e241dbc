"""Which keys of a ``strategy_config`` SGLang takes, and where it is installed. Imports neither SGLang nor torch."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.configs.problems import ConfigProblem
from roll.configs.strategy import SglangConfig
from roll.distributed.strategy.engines import MissingEngineError, option_problems, require_engine

OWNED_OPTIONS = {
    "model_path": "pretrain",
    "tokenizer_path": "pretrain",
    "skip_tokenizer_init": "no such key, since stop strings need the tokenizer",
    "dtype": "model_args.dtype",
    "json_model_override_args": "model_args.model_config_kwargs",
    "context_length": "sequence_length",
    "random_seed": "seed",
    "max_running_requests": "max_running_requests",
    "enable_lora": "lora_target in actor_train",
    "lora_paths": "lora_target in actor_train",
    "lora_target_modules": "lora_target in actor_train",
    "max_lora_rank": "lora_rank in actor_train",
    "max_loras_per_batch": "lora_target in actor_train",
    "max_loaded_loras": "lora_target in actor_train",
    "trust_remote_code": "no such key, since code that comes with a model never runs",
    "sampling_backend": "no such key, since seeds and log-probs are those of hf_infer",
    "enable_custom_logit_processor": "no such key, since sampling parameters travel with it",
    "speculative_algorithm": "no such key, since draft tokens would report other log-probs",
    "custom_weight_loader": "no such key, since weights arrive through it",
    "custom_sigquit_handler": "no such key, since the engine has a process to itself",
    "weight_version": "no such key, since updates set it",
    "enable_memory_saver": "no such key, since offload needs it",
    "device": "no such key, since the machine decides",
    "dp_size": "more workers in device_mapping",
    "pp_size": "tp_size",
    "nnodes": "workers that fit into one machine",
    "tokenizer_worker_num": "more workers in device_mapping",
    "incremental_streaming_output": "no such key, since whole completions are wanted",
}
"""Arguments of the engine that are set from elsewhere, and where."""
OTHER_NAMES = {
    "enable_prefix_caching": "disable_radix_cache",
    "enforce_eager": "disable_cuda_graph",
    "gpu_memory_utilization": "mem_fraction_static",
    "kv_cache_memory_bytes": "max_total_tokens",
    "max_model_len": "sequence_length",
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_num_seqs": "max_running_requests",
    "tensor_parallel_size": "num_gpus_per_worker",
    "tensor_model_parallel_size": "num_gpus_per_worker",
}
"""What vLLM calls an option of this engine."""


def check_engine_options(options: Mapping[str, Any]) -> list[ConfigProblem]:
    """Keys of a ``strategy_config`` that the installed SGLang has no argument for, or that are set from elsewhere;
    only the latter when SGLang is not installed."""
    return option_problems(
        options,
        typed=SglangConfig.model_fields,
        known=server_arguments(options.get("python_executable")),
        elsewhere=OWNED_OPTIONS | OTHER_NAMES,
        arguments="SGLang's ServerArgs",
    )


def require_sglang(python: str | None) -> None:
    """Checks that SGLang is installed for an interpreter (``None``: this one), without starting it.

    Raises:
        MissingEngineError: it is not, or there is no such interpreter.
    """
    if python is None:
        require_engine("sglang", extra="sglang", strategy="sglang")
    elif problem := interpreter_problem(python):
        raise MissingEngineError(str(problem.under("strategy_config")))


def interpreter_problem(python: str) -> ConfigProblem | None:
    """The reason why SGLang cannot be started with an interpreter, if there is one."""
    key, made = "python_executable", "an environment that scripts/make_sglang_env.sh made"
    if not (Path(python).is_file() and os.access(python, os.X_OK)):
        return ConfigProblem(key, python, f"the interpreter of {made}", "no such program")
    if _package_folder(python) is None:
        return ConfigProblem(key, python, made, "the package sglang is not installed there")
    return None


def _package_folder(python: str | None) -> Path | None:
    """Where SGLang is installed for an interpreter (``None``: this one), found without starting it."""
    if python is None:
        spec = importlib.util.find_spec("sglang")
        return Path(spec.origin).parent if spec and spec.origin else None
    folders = Path(python).parent.parent.glob("lib/python*/site-packages/sglang")
    return next(folders, None)


def server_arguments(python: str | None) -> dict[str, str]:
    """The names that ``ServerArgs`` takes, read from SGLang's source (without types); empty where there is none."""
    folder = _package_folder(python)
    source = folder / "srt" / "arg_groups" / "field_order.py" if folder else None
    if source is None or not source.is_file():
        return {}
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "POSITIONAL_FIELD_ORDER":
            return dict.fromkeys(ast.literal_eval(statement.value), "")
    return {}
