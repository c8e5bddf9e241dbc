"""``strategy_args``: which engine a role runs on, and the engine's own options."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from roll.configs.base import Config

Dtype = Literal["fp32", "bf16", "fp16"]


class HfInferConfig(Config):
    """Options of `hf_infer`, generation and scoring with plain Transformers."""

    max_prefill_tokens: int = Field(
        default=8192, ge=1, description="Most prompt tokens that one forward pass takes in; longer queues are split."
    )


class Fsdp2Config(Config):
    """Options of `fsdp2_train` and `fsdp2_infer` (PyTorch `fully_shard`)."""

    fsdp_size: int = Field(
        default=-1,
        ge=-1,
        description="Ranks over which the weights are sharded; must divide the world size. -1: all of them. 1: no "
        "sharding, a replica on each rank (fastest for small models).",
    )
    cpu_offload: bool = Field(default=False, description="Keep weights and optimizer states in host memory.")
    reshard_after_forward: bool = Field(
        default=True, description="Free gathered weights after each forward pass: less memory, one more all-gather."
    )
    param_dtype: Dtype | None = Field(
        default=None, description="Number format of computation. null: that of the weights."
    )
    reduce_dtype: Dtype | None = Field(default=None, description="Number format of gradient sums. null: fp32.")

    def problems(self) -> list[str]:
        return ["fsdp_size: seen 0, expected -1 or at least 1"] if self.fsdp_size == 0 else []


class EngineConfig(Config):
    """Options handed to an external engine's constructor: known keys are checked, others pass through."""

    model_config = ConfigDict(extra="allow")


class DeepSpeedConfig(EngineConfig):
    """Options of `deepspeed_train` and `deepspeed_infer`: the keys of a DeepSpeed configuration file.

    Batch sizes, gradient clipping and the optimizer come from `training_args`.
    """

    zero_optimization: dict[str, Any] = Field(
        default_factory=dict, description="ZeRO options: stage, offload_param, offload_optimizer …"
    )
    bf16: dict[str, Any] | None = Field(default=None, description="Passed on. null: model_args.dtype decides.")
    fp16: dict[str, Any] | None = Field(default=None, description="Passed on. null: model_args.dtype decides.")

    def problems(self) -> list[str]:
        stage = self.zero_optimization.get("stage", 0)
        known = type(stage) is int and 0 <= stage <= 3
        found = [] if known else [f"zero_optimization.stage: seen {stage!r}, expected 0, 1, 2 or 3"]
        owned = {
            "train_batch_size": "training_args.per_device_train_batch_size and gradient_accumulation_steps",
            "train_micro_batch_size_per_gpu": "training_args.per_device_train_batch_size",
            "gradient_accumulation_steps": "training_args.gradient_accumulation_steps",
        }
        extra = self.model_extra or {}
        # DeepSpeed files of other projects say "auto" here, which means the same as leaving the key out.
        found += [f"{k}: seen {extra[k]!r}, expected {v}" for k, v in owned.items() if extra.get(k, "auto") != "auto"]
        return found


class MegatronConfig(EngineConfig):
    """Options of `megatron_train` and `megatron_infer`."""

    tensor_model_parallel_size: int = Field(
        default=1, ge=1, description="Devices that share the matrices of each layer."
    )
    pipeline_model_parallel_size: int = Field(default=1, ge=1, description="Stages that the layers are dealt out to.")
    expert_model_parallel_size: int = Field(
        default=1, ge=1, description="Devices that the experts of a MoE layer share."
    )
    context_parallel_size: int = Field(default=1, ge=1, description="Devices that share one long sequence.")
    virtual_pipeline_model_parallel_size: int | None = Field(
        default=None, ge=1, description="Model chunks per pipeline stage (interleaved schedule)."
    )
    sequence_parallel: bool = Field(
        default=False, description="Also split normalisation and dropout over the tensor-parallel devices."
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(
        default=None, description="Activations computed again in the backward pass: whole layers, or attention only."
    )
    moe_layer_recompute: bool = Field(default=False, description="Compute MoE layers again in the backward pass.")
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] | None = Field(
        default=None, description="How tokens travel to their experts. null: the engine's default."
    )
    moe_grouped_gemm: bool = Field(default=False, description="One grouped matrix product for all experts.")
    moe_shared_expert_overlap: bool = Field(
        default=False, description="Compute the shared expert while the dispatcher communicates."
    )
    overlap_grad_reduce: bool = Field(default=False, description="Reduce gradients while the backward pass still runs.")
    use_distributed_optimizer: bool = Field(
        default=True, description="Shard the optimizer states over data-parallel ranks."
    )

    @property
    def model_parallel_size(self) -> int:
        """Devices that hold one copy of the model (experts live inside the data-parallel dimension)."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def problems(self) -> list[str]:
        found = []
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            found.append("sequence_parallel: seen true with tensor_model_parallel_size 1, expected at least 2")
        if self.virtual_pipeline_model_parallel_size and self.pipeline_model_parallel_size == 1:
            found.append(
                "virtual_pipeline_model_parallel_size: seen with pipeline_model_parallel_size 1, expected at least 2"
            )
        return found


class VllmConfig(EngineConfig):
    """Options of `vllm`."""

    gpu_memory_utilization: float = Field(
        default=0.8, gt=0, le=1, description="Share of the device memory vLLM may take."
    )
    tensor_parallel_size: int | None = Field(
        default=None, ge=1, description="Devices of one engine. null: num_gpus_per_worker."
    )
    block_size: int = Field(default=16, ge=1, description="Tokens per block of the KV cache.")
    max_model_len: int | None = Field(default=None, ge=1, description="Longest context. null: sequence_length.")
    load_format: str = Field(
        default="auto", description="dummy skips reading weights, since they are synchronised anyway."
    )
    enforce_eager: bool = Field(default=False, description="Do not capture CUDA graphs.")


class SglangConfig(EngineConfig):
    """Options of `sglang`."""

    mem_fraction_static: float = Field(
        default=0.8, gt=0, le=1, description="Share of the device memory for weights and KV cache."
    )
    tp_size: int | None = Field(default=None, ge=1, description="Devices of one engine. null: num_gpus_per_worker.")
    load_format: str = Field(
        default="auto", description="dummy skips reading weights, since they are synchronised anyway."
    )


STRATEGY_CONFIGS: dict[str, type[Config]] = {
    "hf_infer": HfInferConfig,
    "fsdp2_train": Fsdp2Config,
    "fsdp2_infer": Fsdp2Config,
    "deepspeed_train": DeepSpeedConfig,
    "deepspeed_infer": DeepSpeedConfig,
    "megatron_train": MegatronConfig,
    "megatron_infer": MegatronConfig,
    "vllm": VllmConfig,
    "sglang": SglangConfig,
}
"""The options of each strategy by its name; strategies of other packages check their own."""

GENERATORS = frozenset({"hf_infer", "vllm", "sglang"})
TRAINERS = frozenset({"fsdp2_train", "deepspeed_train", "megatron_train"})


class StrategyArguments(Config):
    """The engine and its options."""

    strategy_name: str = Field(
        default="fsdp2_train",
        min_length=1,
        description="Training: fsdp2_train, deepspeed_train, megatron_train. Generation: hf_infer, vllm, sglang. "
        "Scoring: any of those, or fsdp2_infer, deepspeed_infer, megatron_infer. Or package.module:Class.",
    )
    strategy_config: dict[str, Any] = Field(
        default_factory=dict, description="Options of that engine, see the tables of the strategies below."
    )

    def typed(self) -> Config | None:
        """The options as the strategy's own class; ``None`` for a strategy of another package.

        Raises:
            pydantic.ValidationError: a key or value that the strategy does not know.
        """
        section = STRATEGY_CONFIGS.get(self.strategy_name)
        return None if section is None else section.model_validate(self.strategy_config, strict=True)
