"""`sglang`: generation and log-probs with SGLang, which can be installed in a separate environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from roll.configs.engines.arguments import EngineSource
from roll.configs.engines.card import EngineCard, EnginePackage, PassedOnOptions, Strategy, task_of
from roll.configs.engines.hf_infer import WINDOWED, layer_kinds
from roll.configs.problems import ConfigProblem

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from roll.configs.pipeline import PipelineConfig
    from roll.configs.worker import WorkerConfig


class SglangConfig(PassedOnOptions):
    """Options of `sglang`: arguments of its `ServerArgs`. Other arguments are passed on.

    The model, its dtype, the seed, the number of running requests and LoRA come from elsewhere.
    """

    python_executable: str | None = Field(
        default=None,
        min_length=1,
        description="Interpreter of the environment with SGLang, whose packages conflict with every other engine's "
        "(`scripts/make_sglang_env.sh` makes one). null: the run's.",
    )
    mem_fraction_static: float = Field(
        default=0.8, gt=0, le=1, description="Share of the device memory for weights and KV cache."
    )
    max_total_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens in the KV cache. null: as many as mem_fraction_static allows; on a CPU, enough for all "
        "running requests within a quarter of the free memory.",
    )
    tp_size: int | None = Field(default=None, ge=1, description="Devices of one engine. null: num_gpus_per_worker.")
    load_format: str = Field(
        default="auto", description="dummy skips reading weights, since they are synchronised anyway."
    )
    disable_radix_cache: bool = Field(
        default=False, description="Compute every prompt from scratch instead of reusing the cache of common prefixes."
    )


OWNED_OPTIONS = {
    "model_path": "pretrain",
    "tokenizer_path": "tokenizer_path",
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
    "trust_remote_code": "model_args.trust_remote_code",
    "sampling_backend": "no such key, since seeds and log-probs are those of hf_infer",
    "enable_custom_logit_processor": "no such key, since sampling parameters travel with it",
    "speculative_algorithm": "no such key, since draft tokens would report other log-probs",
    "enable_return_routed_experts": "no such key, since nothing reads the experts",
    "custom_weight_loader": "no such key, since weights arrive through it",
    "custom_sigquit_handler": "no such key, since the engine has a process to itself",
    "weight_version": "no such key, since updates set it",
    "enable_memory_saver": "no such key, since offload needs it",
    "device": "no such key, since the machine decides",
    "limit_mm_data_per_request": "no such key, since a prompt may have any number of pictures",
    "mm_process_config": "image_min_pixels and image_max_pixels in actor_train.data_args",
    "enable_mm_global_cache": "no such key, since features of pictures may not outlive an update",
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
    "limit_mm_per_prompt": "no such key, since a prompt may have any number of pictures",
    "max_model_len": "sequence_length",
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_num_seqs": "max_running_requests",
    "tensor_parallel_size": "num_gpus_per_worker",
    "tensor_model_parallel_size": "num_gpus_per_worker",
}
"""Options of this engine by vLLM's names."""


_STRATEGIES = "roll.distributed.strategy.sglang.strategy"


class SglangCard(EngineCard):
    """Generates, and computes log-probs of given tokens, on one or several devices of a machine."""

    name = "sglang"
    strategies: ClassVar[Mapping[str, Strategy]] = {
        "sglang": Strategy(f"{_STRATEGIES}:SglangStrategy", scores=True, generates=True)
    }
    options = SglangConfig
    package = EnginePackage("sglang", "sglang")
    source = EngineSource("SGLang", Path(__file__).with_suffix(".json"), {"srt/arg_groups/fields/*.py": ()})
    """SGLang puts `ServerArgs` together from classes that hold nothing but its fields."""
    arguments = "SGLang's ServerArgs"
    elsewhere = OWNED_OPTIONS | OTHER_NAMES
    own_attention = True
    scores_prompts = True
    keeps_kv = False
    pictured = ("qwen2_5_vl", "qwen3_vl")
    size_key = "tp_size"
    fit = "roll.configs.engines.sglang:check_model"

    def no_pictures(self, worker: WorkerConfig) -> str:
        return ""

    def installed_at(self, options: Mapping[str, Any]) -> Path | None:
        python = options.get("python_executable")
        return super().installed_at(options) if python is None else package_folder(python)

    def rules(self, role: str, worker: WorkerConfig, config: PipelineConfig) -> Iterator[ConfigProblem]:
        method = worker.strategy_args.strategy_config.get("quantization")
        if method is not None and task_of(role) == "generates" and not config.uses_lora:
            key = f"{role}.strategy_args.strategy_config.quantization"
            hint = "nothing has shown that SGLang quantises weights again after an update; vllm does"
            yield ConfigProblem(key, method, "null", hint)
        if task_of(role) == "generates" and config.uses_lora:
            args = config.actor_train.model_args
            for joined, needed in JOINED.items():
                if joined.intersection(args.lora_targets) and not needed.issubset(args.lora_targets):
                    names = [" and ".join(sorted(needed)), ", ".join(sorted(joined))]
                    expected = f"with {names[0]} beside any of {names[1]}: SGLang computes these as one"
                    yield ConfigProblem("actor_train.model_args.lora_target", args.lora_target, expected)

    def package_problem(self, worker: WorkerConfig) -> ConfigProblem | None:
        python = worker.strategy_args.strategy_config.get("python_executable")
        if python is None:
            return super().package_problem(worker)
        problem = interpreter_problem(python)
        return problem.under("strategy_args.strategy_config") if problem else None


def interpreter_problem(python: str) -> ConfigProblem | None:
    """The reason why SGLang cannot be started with an interpreter, if there is one."""
    key, made = "python_executable", "an environment that scripts/make_sglang_env.sh made"
    if not (Path(python).is_file() and os.access(python, os.X_OK)):
        return ConfigProblem(key, python, f"the interpreter of {made}", "no such program")
    if package_folder(python) is None:
        return ConfigProblem(key, python, made, "the package sglang is not installed there")
    return None


def package_folder(python: str) -> Path | None:
    """Folder in which SGLang is installed for an interpreter, found without starting it."""
    return next(Path(python).parent.parent.glob("lib/python*/site-packages/sglang"), None)


CARD = SglangCard()


JOINED = {
    frozenset(("q_proj", "k_proj", "v_proj")): frozenset(("q_proj", "v_proj")),
    frozenset(("gate_proj", "up_proj")): frozenset(("gate_proj",)),
}
"""Layers that SGLang computes as one, and those of them without which it loads no adapter."""

COMPUTES_WINDOWS = ("gemma2", "gemma3_text", "gpt_oss")
"""Families whose windows SGLang computes; its Llama, Qwen and Mixtral, which others share, read all that is before."""


def check_model(
    role: str, worker: WorkerConfig, sizes: PreTrainedConfig, config: PipelineConfig
) -> Iterator[ConfigProblem]:
    """Sequences within the window that SGLang leaves out, keys relative to the role."""
    if problem := window_problem(sizes, config.longest_sequence):
        expected = f"{'vllm or hf_infer' if task_of(role) == 'generates' else 'another strategy'}: {problem}"
        name = worker.strategy_args.strategy_name
        yield ConfigProblem("strategy_args.strategy_name", name, expected, involves=("pretrain", "sequence_length"))


def window_problem(sizes: PreTrainedConfig, sequence_length: int) -> str:
    """What a model has that SGLang does not compute for sequences of this length; empty if there is nothing."""
    window = getattr(sizes, "sliding_window", None)
    fits = window is None or sequence_length <= window or WINDOWED not in layer_kinds(sizes)
    if fits or sizes.model_type in COMPUTES_WINDOWS:
        return ""
    return f"SGLang's {sizes.model_type} has no windows, and is right up to a sequence_length of {window}"
