"""Starting vLLM: its arguments and their limits, its environment, and why its processes failed."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from roll.configs.engines.card import task_of
from roll.configs.engines.vllm import LORA_RANKS, VllmConfig
from roll.distributed.cluster.reaper import MARK
from roll.distributed.strategy.base import EngineNodes, StrategyContext
from roll.distributed.strategy.generation.model_outline import ModelOutline
from roll.distributed.strategy.generation.prompt_scoring import PromptScoring
from roll.models.tokenizer import locate_model
from roll.utils.hashing import derive_seed

logger = logging.getLogger(__name__)

CPU_BLOCK = 32  # tokens; the CPU attention kernels want multiples of it
CPU_STEP_TOKENS = 4096  # prompt tokens computed in one step on a CPU
SOCKET_FOLDER_CHARS = 70  # vLLM adds 37, and 107 are the most that a Unix socket's path may have
CPU_STATES_BYTES = 2**30  # for a model whose layers carry states
CPU_CACHE_SHARE = 0.25  # of the host memory that is free, at most, unless kv_cache_memory_bytes says otherwise

COMMON_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",  # where all processes of an engine are on one machine
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy threads' locks
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # whoever scores asks for one more, see engine_arguments; roles are checked
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler reports log-probs without the temperature
}
CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else vLLM turns the executor "uni" into "mp", one more process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers share the cores with other roles
    "TORCHDYNAMO_DISABLE": "1",  # else the sampler compiles for 16 s at the first request
}


def engine_arguments(
    context: StrategyContext, config: VllmConfig, outline: ModelOutline, *, on_cpu: bool
) -> dict[str, Any]:
    """The arguments of ``AsyncEngineArgs``, for this role, model and machine."""
    devices = config.tensor_parallel_size or context.worker.num_gpus_per_worker
    arguments: dict[str, Any] = {
        "model": locate_model(context.model_path)[0],
        "tokenizer": locate_model(context.tokenizer_path or context.model_path, tokenizer_alone=True)[0],
        "dtype": str(outline.dtype).removeprefix("torch."),
        "hf_overrides": dict(context.worker.model_args.model_config_kwargs),
        "generation_config": "vllm",
        # Requests without a seed draw from the engine's own stream, which must differ between replicas.
        "seed": derive_seed(context.seed, context.role, context.rank) % 2**31,
        "max_model_len": config.max_model_len or context.sequence_length,
        "max_num_seqs": context.max_running_requests,
        "tensor_parallel_size": devices,
        "distributed_executor_backend": "uni" if devices == 1 else "mp",
        **nodes_arguments(context.nodes),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "load_format": "hf" if config.load_format == "auto" else config.load_format,
        "config_format": "hf",  # Mistral's folders have both, of which vLLM would take theirs
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        "quantization": config.quantization,
        "enable_expert_parallel": config.enable_expert_parallel,
        "logprobs_mode": "raw_logprobs",
        "worker_extension_cls": "roll.distributed.strategy.vllm.worker.WorkerExtension",
        "disable_log_stats": True,
        "trust_remote_code": context.worker.model_args.trust_remote_code,
    }
    if task_of(context.role) == "scores":
        arguments["max_model_len"] += 1  # for the token that vLLM always samples; nobody reads it
        arguments["max_logprobs"] = PromptScoring.of(context, outline.vocab_size).width
    if context.pictures:
        # Its own cache would answer for pictures that it has processed; these come from elsewhere.
        arguments |= {"limit_mm_per_prompt": {"video": 0}, "mm_processor_cache_gb": 0}
    if "mistral" in outline.text_config.model_type:
        arguments["tokenizer_mode"] = "hf"
    if context.lora is not None:
        room = next((size for size in LORA_RANKS if size >= context.lora.rank), None)
        if room is None:
            raise ValueError(f"lora_rank: {context.lora.rank}, expected at most {LORA_RANKS[-1]} with vllm")
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
    if config.kv_transfer_config is not None:
        from vllm.config import KVTransferConfig

        arguments["kv_transfer_config"] = KVTransferConfig(**config.kv_transfer_config)
    if config.block_size is not None:  # vLLM takes no other size for one that is given
        arguments["block_size"] = config.block_size
    if on_cpu:
        arguments |= _cpu_arguments(context, config, outline)
    else:
        arguments["enable_sleep_mode"] = True
    return arguments | (config.model_extra or {})


def nodes_arguments(nodes: EngineNodes | None) -> dict[str, Any]:
    """For an engine over several nodes: which of them this is, and where its processes meet."""
    if nodes is None:
        return {}
    return {
        "nnodes": nodes.count,
        "node_rank": nodes.number,
        "master_addr": nodes.address,
        "master_port": nodes.port,
    }


def _cpu_arguments(context: StrategyContext, config: VllmConfig, outline: ModelOutline) -> dict[str, Any]:
    if config.quantization in ("fp8", "fp8_per_tensor"):
        key = f"{context.role}.strategy_args.strategy_config.quantization"
        raise ValueError(f"{key}: got {config.quantization}, expected fp8_per_channel on a CPU (vLLM has no kernel)")
    block = -(-(config.block_size or CPU_BLOCK) // CPU_BLOCK) * CPU_BLOCK
    if config.block_size not in (None, block):
        logger.info(
            "%s: block_size %d is %d on a CPU, whose kernels want multiples of %d",
            context.role,
            config.block_size,
            block,
            CPU_BLOCK,
        )
    cache = config.kv_cache_memory_bytes
    if cache is None:
        # On a CPU gpu_memory_utilization would be a share of the machine's memory, for each worker.
        blocks = -(-(config.max_model_len or context.sequence_length) // block) + 1
        one = blocks * block * outline.cache_bytes_per_token
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        cache = max(2 * one, min(context.max_running_requests * one, int(CPU_CACHE_SHARE * free)))
        if outline.has_states:  # their size only vLLM knows
            cache = max(cache, min(CPU_STATES_BYTES, int(CPU_CACHE_SHARE * free)))
    return {
        # vLLM keeps the states of common beginnings only where it reads prompts in parts.
        **({"enable_prefix_caching": False} if outline.has_states else {}),
        "block_size": block,
        "kv_cache_memory_bytes": cache,
        "enforce_eager": True,
        # After part of a prompt vLLM winds a seeded generator back; a CPU's cannot be wound, and the engine would die.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_STEP_TOKENS, 1 + (config.max_model_len or context.sequence_length)),
    }


def check_cpu_kernels(outline: ModelOutline) -> None:
    """vLLM itself finds out at the first request, and dies of it."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if getattr(outline.text_config, "kv_lora_rank", None):  # latent attention has other heads, and kernels
        return
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if outline.head_size not in sizes:
        raise ValueError(
            f"vllm: the model's attention heads have size {outline.head_size}, expected one of "
            f"{', '.join(map(str, sizes))} on a CPU; hf_infer takes any size"
        )


def engine_environment(model_path: str, on_cpu: bool, log_config: Path, own_ip: str | None = None) -> dict[str, str]:
    """Environment that vLLM reads when it is imported and when it starts its processes.

    What the user has set stays as it is.

    Args:
        own_ip: this node's address, for an engine over several nodes.
    """
    wanted = COMMON_ENVIRONMENT | (CPU_ENVIRONMENT if on_cpu else {}) | {"VLLM_LOGGING_CONFIG_PATH": str(log_config)}
    if own_ip is not None:
        wanted |= {"VLLM_HOST_IP": own_ip}
    if len(str(log_config.parent)) <= SOCKET_FOLDER_CHARS:
        wanted |= {"VLLM_RPC_BASE_PATH": str(log_config.parent)}  # it leaves its sockets behind
    if locate_model(model_path)[1]:
        wanted = wanted | {"HF_HUB_OFFLINE": "1"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


class FailureHandler(logging.Handler):
    """Appends the exception of every error that vLLM logs to a file, a line each; vLLM's processes load it by name."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and (error := record.exc_info[1]) is not None:
            words = " ".join(str(error).split())
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{type(error).__name__}: {words}\n")


class Failures:
    """A file that all processes of one engine write to, and the logging configuration that makes them."""

    def __init__(self) -> None:
        # It goes with this object, or, where a worker is killed at the end of its run, with the run's Ray session.
        self._folder = tempfile.TemporaryDirectory(prefix="roll-vllm-log-", dir=os.environ.get(MARK))
        self._file = Path(self._folder.name) / "failures"
        self.config = Path(self._folder.name) / "logging.json"
        """For ``VLLM_LOGGING_CONFIG_PATH``: vLLM's own lines, and the file."""
        handlers = {
            "vllm": {"class": "logging.StreamHandler", "formatter": "vllm", "stream": "ext://sys.stdout"},
            "failures": {"class": f"{__name__}.{FailureHandler.__name__}", "path": str(self._file)},
        }
        logger = {"handlers": list(handlers), "level": "WARNING", "propagate": False}
        formatter = {"format": "vllm %(process)d %(levelname)s %(asctime)s %(message)s"}
        config = {"version": 1, "disable_existing_loggers": False, "formatters": {"vllm": formatter}}
        self.config.write_text(json.dumps(config | {"handlers": handlers, "loggers": {"vllm": logger}}))

    def first(self) -> str:
        """The first failure, of which later ones are consequences."""
        if not self._file.is_file():
            return "its own log says why"
        return self._file.read_text(encoding="utf-8").partition("\n")[0]
