"""`vllm`: generation and log-probs with vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from roll.configs.engines.arguments import EngineSource
from roll.configs.engines.card import EngineCard, EnginePackage, PassedOnOptions, Strategy, task_of
from roll.configs.problems import ConfigProblem

if TYPE_CHECKING:
    from roll.configs.pipeline import PipelineConfig
    from roll.configs.worker import WorkerConfig

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes that vLLM makes room for in an adapter."""

QUANTISES = ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel")
"""Formats in which vLLM puts plain weights when it loads them, and again after an update."""


class VllmConfig(PassedOnOptions):
    """Options of `vllm`: arguments of its `AsyncEngineArgs`. Other arguments are passed on.

    The model, its dtype, the seed, the number of running requests and LoRA come from elsewhere.
    """

    gpu_memory_utilization: float = Field(
        default=0.8, gt=0, le=1, description="Share of the device memory that vLLM can use (not on a CPU)."
    )
    kv_cache_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Size of the KV cache. null: as much as gpu_memory_utilization allows; on a CPU, enough for all "
        "running requests within a quarter of the free memory.",
    )
    tensor_parallel_size: int | None = Field(
        default=None,
        ge=1,
        description="Devices of one engine, for actor_infer and val_infer also on several nodes. null: "
        "num_gpus_per_worker.",
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        description="Tokens per block of the KV cache; on a CPU rounded up to a multiple of 32. null: as vLLM chooses "
        "for the model's attention; 32 on a CPU.",
    )
    max_model_len: int | None = Field(default=None, ge=1, description="Longest context. null: sequence_length.")
    load_format: str = Field(
        default="auto", description="dummy skips reading weights, since they are synchronised anyway."
    )
    enforce_eager: bool = Field(default=False, description="Do not capture CUDA graphs (a CPU has none).")
    enable_prefix_caching: bool = Field(
        default=True, description="Reuse the cache of common prefixes until the next weight update."
    )
    enable_expert_parallel: bool = Field(
        default=False,
        description="With tensor_parallel_size above 1, each device holds whole experts of a mixture instead of a part "
        "of every one. Not tested on GPUs.",
    )
    kv_transfer_config: dict[str, Any] | None = Field(
        default=None,
        description="A connector that keeps keys and values elsewhere: {kv_connector: OffloadingConnector, kv_role: "
        "kv_both} and its kv_connector_extra_config (host memory). Not tested on GPUs.",
    )
    quantization: str | None = Field(
        default=None,
        description="Format in which vLLM computes. fp8 (fp8_per_tensor), fp8_per_block and fp8_per_channel quantise "
        "the weights at the start and after every update (on a CPU: fp8_per_channel); other formats are for models "
        "that are stored so and not updated. null: that of the folder.",
    )


DATA_PARALLEL = (
    "data_parallel_address",
    "data_parallel_backend",
    "data_parallel_external_lb",
    "data_parallel_hybrid_lb",
    "data_parallel_multi_port_external_lb",
    "data_parallel_rank",
    "data_parallel_rpc_port",
    "data_parallel_size",
    "data_parallel_size_local",
    "data_parallel_start_rank",
)
NODES = ("nnodes", "node_rank", "master_addr", "master_port")
OWNED_OPTIONS = {
    "model": "pretrain",
    "tokenizer": "tokenizer_path",
    "dtype": "model_args.dtype",
    "hf_overrides": "model_args.model_config_kwargs",
    "seed": "seed",
    "max_num_seqs": "max_running_requests",
    "enable_lora": "lora_target in actor_train",
    "max_lora_rank": "lora_rank in actor_train",
    "max_loras": "lora_target in actor_train",
    "trust_remote_code": "model_args.trust_remote_code",
    "max_logprobs": "logits_topk",
    "logprobs_mode": "no such key, since log-probs follow the sampling temperature",
    "speculative_config": "no such key, since with ngram drafts vLLM 0.32 gave other greedy completions on a CPU",
    "generation_config": "generating_args",
    "enable_return_routed_experts": "no such key, since the runner that reports experts returns other log-probs",
    "worker_extension_cls": "no such key, since weights arrive through it",
    "limit_mm_per_prompt": "no such key, since a prompt may have any number of pictures",
    "mm_processor_cache_gb": "no such key, since pictures reach the engine prepared",
    "mm_processor_kwargs": "image_min_pixels and image_max_pixels in actor_train.data_args",
    **dict.fromkeys(DATA_PARALLEL, "more workers in device_mapping (for experts: enable_expert_parallel)"),
    **dict.fromkeys(NODES, "device_mapping and num_gpus_per_worker"),
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
"""Options of this engine by SGLang's names."""


_STRATEGIES = "roll.distributed.strategy.vllm.strategy"


class VllmCard(EngineCard):
    """Generates, and computes log-probs of given tokens, on one or several devices of a machine.

    One engine that generates may lie on several machines.
    """

    name = "vllm"
    strategies: ClassVar[Mapping[str, Strategy]] = {
        "vllm": Strategy(f"{_STRATEGIES}:VllmStrategy", scores=True, generates=True)
    }
    options = VllmConfig
    package = EnginePackage("vllm", "vllm")
    source = EngineSource(
        "vLLM", Path(__file__).with_suffix(".json"), {"engine/arg_utils.py": ("EngineArgs", "AsyncEngineArgs")}
    )
    arguments = "vLLM's AsyncEngineArgs"
    elsewhere = OWNED_OPTIONS | OTHER_NAMES
    own_attention = True
    scores_prompts = True
    pictured = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe", "llava", "glm4v", "mistral3")
    size_key = "tensor_parallel_size"
    spans_nodes = True

    def no_pictures(self, worker: WorkerConfig) -> str:
        return ""

    def gpu_only(self, worker: WorkerConfig) -> Iterator[ConfigProblem]:
        options, base = worker.strategy_args.typed(), "strategy_args.strategy_config"
        assert isinstance(options, VllmConfig)
        if options.enable_expert_parallel:  # vLLM 0.32's kernel for a CPU's experts ends the process
            yield options.problem("enable_expert_parallel", "false").under(base)
        if options.kv_transfer_config is not None:
            yield options.problem("kv_transfer_config", "null").under(base)

    def untested(self, options: VllmConfig) -> Iterator[tuple[str, str]]:
        if options.enable_expert_parallel:
            yield "enable_expert_parallel", "no test has run an engine whose devices hold whole experts"
        if options.kv_transfer_config is not None:
            yield "kv_transfer_config", "its connector needs a GPU and has run with no test"

    def rules(self, role: str, worker: WorkerConfig, config: PipelineConfig) -> Iterator[ConfigProblem]:
        options, name = worker.strategy_args.typed(), f"{role}.strategy_args.strategy_name"
        assert isinstance(options, VllmConfig)
        if options.max_model_len is not None and options.max_model_len < config.longest_sequence:
            key = f"{role}.strategy_args.strategy_config.max_model_len"
            longest = "sequence_length" if config.longest_sequence == config.sequence_length else "val_sequence_length"
            expected = f"null, or at least {longest} = {config.longest_sequence}"
            yield ConfigProblem(key, options.max_model_len, expected, involves=(longest,))
        if (given := options.kv_transfer_config) is not None:
            connector, kv_role = given.get("kv_connector"), given.get("kv_role")
            if (connector, kv_role) != ("OffloadingConnector", "kv_both"):
                key = f"{role}.strategy_args.strategy_config.kv_transfer_config"
                expected = "null, or kv_connector OffloadingConnector with kv_role kv_both"
                hint = "others may find keys and values of old weights, or send requests to engines that are not there"
                yield ConfigProblem(key, given, expected, hint)
        mapping, each = worker.device_mapping or [], worker.num_gpus_per_worker
        spans = any(
            len({device // config.num_gpus_per_node for device in mapping[start : start + each]}) > 1
            for start in range(0, len(mapping), each)
        )
        if spans and config.uses_lora and task_of(role) == "generates":
            key, expected = f"{role}.num_gpus_per_worker", "devices of one node for each worker, with an adapter"
            others = (f"{role}.device_mapping", "num_gpus_per_node", "actor_train.model_args.lora_target")
            yield ConfigProblem(key, each, expected, involves=others)
        if options.enable_expert_parallel and (options.tensor_parallel_size or worker.num_gpus_per_worker) == 1:
            key = f"{role}.strategy_args.strategy_config.enable_expert_parallel"
            yield ConfigProblem(key, True, "false with one device", involves=(f"{role}.num_gpus_per_worker",))
        if options.quantization not in (None, *QUANTISES) and task_of(role) == "generates" and not config.uses_lora:
            key = f"{role}.strategy_args.strategy_config.quantization"
            expected = f"null or one of {', '.join(QUANTISES)}"
            hint = "only in these are new weights quantised after an update as they are at the start"
            yield ConfigProblem(key, options.quantization, expected, hint)
        adapter = config.actor_train.model_args
        if config.uses_lora and task_of(role) == "generates" and adapter.lora_rank > LORA_RANKS[-1]:
            key, expected = "actor_train.model_args.lora_rank", f"at most {LORA_RANKS[-1]} with vllm"
            involved = (name, "actor_train.model_args.lora_target")
            yield ConfigProblem(key, adapter.lora_rank, expected, involves=involved)
        heads, units, _ = config.tiny_sizes
        if config.model_of(role) in ("tiny", "tiny_vl") and units < 32 * heads:
            expected = "at most tiny_hidden_size / 32 with vllm: its attention kernels take heads of 32 units or more"
            model = "teacher_pretrain" if role == "teacher" else "pretrain"
            yield ConfigProblem("tiny_num_heads", heads, expected, involves=(model, "tiny_hidden_size", name))


CARD = VllmCard()
