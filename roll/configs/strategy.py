"""``strategy_args``: which engine a role runs on, and the engine's own options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import ConfigDict, Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem

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
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Workers that share the matrices of each layer; divides the workers and the heads."
    )

    activation_offload: bool = Field(
        default=False,
        description="Keep large activations that wait for the backward pass in host memory; best with gradient "
        "checkpointing, which leaves the layers' inputs.",
    )
    checkpoint: Literal["whole", "sharded"] = Field(
        default="whole",
        description="Form of checkpoints. whole: a Hugging Face model folder and the optimizer beside it, which any "
        "engine can continue from. sharded: each worker writes its own shards, nothing is gathered; any number of "
        "workers of the same strategy can continue from it.",
    )

    @property
    def model_parallel_size(self) -> int:
        """Devices that work on the same sequences."""
        return self.tensor_parallel_size

    @property
    def replicated(self) -> bool:
        """Every worker holds a whole replica, and the weights are never sharded."""
        return self.fsdp_size == 1 and not self.cpu_offload and self.tensor_parallel_size == 1

    def problems(self) -> list[ConfigProblem]:
        if self.fsdp_size == 0:
            return [self.problem("fsdp_size", "-1 or at least 1")]
        if self.replicated and self.reduce_dtype not in (None, "fp32"):
            expected = "null or fp32 with fsdp_size 1: replicas add up gradients in fp32"
            return [self.problem("reduce_dtype", expected, "fsdp_size", "cpu_offload", "tensor_parallel_size")]
        return []


class EngineConfig(Config):
    """Options handed to an external engine's constructor: known keys are checked, others pass through."""

    model_config = ConfigDict(extra="allow")


AUTO = "auto"
"""What DeepSpeed files of other projects say in place of a value that is decided elsewhere, or by DeepSpeed."""


class DeepSpeedConfig(EngineConfig):
    """Options of `deepspeed_train` and `deepspeed_infer`: the keys of a DeepSpeed configuration file.

    Batch sizes, gradient clipping, the optimizer and its schedule come from `training_args`. `auto` anywhere means the
    same as leaving the key out.
    """

    zero_optimization: dict[str, Any] = Field(
        default_factory=dict, description="ZeRO options: stage, offload_param, offload_optimizer …"
    )
    bf16: dict[str, Any] | None = Field(
        default=None,
        description="Passed on. null: model_args.dtype decides. Weights are kept, and gradients added up, in fp32 too; "
        "with stage 0 the model runs under torch_autocast for that.",
    )
    fp16: dict[str, Any] | None = Field(
        default=None, description="null: model_args.dtype decides. fp16 is for deepspeed_infer only."
    )
    optimizer: dict[str, Any] | None = Field(
        default=None,
        description="{type: AdamW, params: {torch_adam: false}} takes DeepSpeed's own Adam, which compiles itself when "
        "it is first used, in place of PyTorch's. Its rates come from training_args.",
    )

    @property
    def stage(self) -> int:
        stage = self.zero_optimization.get("stage", AUTO)
        return stage if type(stage) is int else 0

    @property
    def precision(self) -> Dtype | None:
        """The number format that the file asks for, if it does."""
        asked = {name: (getattr(self, name) or {}).get("enabled", AUTO) for name in ("bf16", "fp16")}
        for name, enabled in asked.items():
            if enabled is True:
                return "bf16" if name == "bf16" else "fp16"
        return "fp32" if asked["bf16"] is False else None

    @property
    def torch_adam(self) -> bool:
        chosen = ((self.optimizer or {}).get("params") or {}).get("torch_adam", AUTO)
        return True if chosen == AUTO else bool(chosen)

    def problems(self) -> list[ConfigProblem]:
        stage = self.zero_optimization.get("stage", AUTO)
        known = stage == AUTO or (type(stage) is int and 0 <= stage <= 3)
        found = [] if known else [ConfigProblem("zero_optimization.stage", stage, "0, 1, 2 or 3")]
        extra = self.model_extra or {}
        found += [
            ConfigProblem(key, extra[key], instead)
            for key, instead in DEEPSPEED_ELSEWHERE.items()
            if extra.get(key, AUTO) != AUTO
        ]
        return [*found, *self._optimizer_problems(), *self._section_problems()]

    def _optimizer_problems(self) -> Iterator[ConfigProblem]:
        options = self.optimizer or {}
        kind, params = options.get("type", AUTO), options.get("params") or {}
        if not isinstance(params, dict):
            yield ConfigProblem("optimizer.params", params, "a mapping such as {torch_adam: true}")
            return
        if str(kind).lower() not in (AUTO, "adam", "adamw"):
            yield ConfigProblem("optimizer.type", kind, "AdamW")
        if params.get("torch_adam", AUTO) not in (True, False, AUTO):
            yield ConfigProblem("optimizer.params.torch_adam", params["torch_adam"], "true or false")
        for key, value in params.items():
            if key != "torch_adam" and value != AUTO:
                yield ConfigProblem(f"optimizer.params.{key}", value, "training_args instead")

    def _section_problems(self) -> Iterator[ConfigProblem]:
        zero = self.zero_optimization
        for section, least in (("offload_param", 3), ("offload_optimizer", 1)):
            key, options = f"zero_optimization.{section}", zero.get(section) or {}
            if not isinstance(options, dict):
                yield ConfigProblem(key, options, "a mapping such as {device: cpu}")
                continue
            device = options.get("device", AUTO)
            if device not in ("cpu", "none", None, AUTO):
                yield ConfigProblem(f"{key}.device", device, "cpu or none")
            if device == "cpu" and self.stage < least:
                yield ConfigProblem("zero_optimization.stage", self.stage, f"at least {least} with {section}")
        for old, section in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if zero.get(old) not in (None, AUTO):
                yield ConfigProblem(f"zero_optimization.{old}", zero[old], f"{section}: {{device: cpu}} instead")
        if zenflow := zero.get("zenflow"):
            expected = "no such key: it takes steps before they are whole"
            yield ConfigProblem("zero_optimization.zenflow", zenflow, expected)
        for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            if (self.bf16 or {}).get(key, AUTO) is True:
                yield ConfigProblem(f"bf16.{key}", True, "false: these are kept in fp32")
        if all((section or {}).get("enabled", AUTO) is True for section in (self.bf16, self.fp16)):
            yield ConfigProblem("fp16.enabled", True, "false beside bf16.enabled true: one of the two")


DEEPSPEED_ELSEWHERE = {
    "train_batch_size": "training_args.per_device_train_batch_size and gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "training_args.per_device_train_batch_size",
    "gradient_accumulation_steps": "training_args.gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm instead",
    "scheduler": "training_args.lr_scheduler_type instead",
    "sequence_parallel_size": "model_args.ulysses_size instead",
    "gradient_allreduce_op": "no such key: gradients are added up",
    "managed_gradient_accumulation": "no such key: the trainer says which micro-batch is the last",
    "tensor_parallel": "no such key; megatron_train has tensor parallelism",
    "expert_parallel": "no such key; megatron_train has expert parallelism",
    "pipeline": "no such key; megatron_train has pipeline parallelism",
    "hybrid_engine": "no such key; actor_infer generates",
    "data_efficiency": "no such key; the pipeline chooses the data",
    "autotuning": "no such key; it would start runs of its own",
    "activation_checkpointing": "model_args.disable_gradient_checkpointing instead",
    "aio": "no such key: offload goes to host memory, never to a disk",
    "checkpoint": "no such key; save_steps, max_ckpt_to_keep and checkpoint_config write checkpoints",
    "compile": "no such key",
}
"""Keys of a DeepSpeed configuration file that this library decides, and where."""


RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]


class MegatronConfig(EngineConfig):
    """Options of `megatron_train` and `megatron_infer`.

    Other keys are passed on to Megatron-Core's `TransformerConfig`, `DistributedDataParallelConfig` and
    `OptimizerConfig`, whichever have a field of that name.
    """

    tensor_model_parallel_size: int = Field(
        default=1, ge=1, description="Devices that share the matrices of each layer."
    )
    pipeline_model_parallel_size: int = Field(default=1, ge=1, description="Stages that the layers are dealt out to.")
    virtual_pipeline_model_parallel_size: int | None = Field(
        default=None, ge=1, description="Model chunks per pipeline stage (interleaved schedule)."
    )
    num_layers_in_first_pipeline_stage: int | None = Field(
        default=None, ge=1, description="Layers of the first stage. null: as many as the others have."
    )
    num_layers_in_last_pipeline_stage: int | None = Field(
        default=None, ge=1, description="Layers of the last stage. null: as many as the others have."
    )
    expert_model_parallel_size: int = Field(
        default=1, ge=1, description="Devices that the experts of a MoE layer share."
    )
    expert_tensor_parallel_size: int | None = Field(
        default=None, ge=1, description="Devices that share the matrices of each expert. null: as for other layers."
    )
    context_parallel_size: int = Field(default=1, ge=1, description="Devices that share one long sequence.")
    sequence_parallel: bool = Field(
        default=False, description="Also split normalisation and dropout over the tensor-parallel devices."
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(
        default=None,
        description="Activations computed again in the backward pass: those of whole layers, or of recompute_modules. "
        "null: whole layers, unless model_args.disable_gradient_checkpointing.",
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        default=None,
        description="With granularity full: all layers, in groups of recompute_num_layers that keep one input "
        "(uniform, the default), or only the first recompute_num_layers of each stage (block).",
    )
    recompute_num_layers: int | None = Field(
        default=None, ge=1, description="Layers per group (uniform) or per stage (block). null: 1."
    )
    recompute_modules: list[RecomputeModule] | None = Field(
        default=None, description="With granularity selective: the parts of a layer. null: core_attn."
    )
    moe_layer_recompute: bool = Field(default=False, description="Compute MoE layers again in the backward pass.")
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = Field(
        default="alltoall", description="How tokens travel to their experts."
    )
    moe_grouped_gemm: bool = Field(default=False, description="One grouped matrix product for all experts (GPU).")
    moe_shared_expert_overlap: bool = Field(
        default=False, description="Compute the shared expert while the dispatcher communicates."
    )
    moe_aux_loss_coeff: float = Field(
        default=0.0, ge=0, description="Weight of the loss that balances experts, a mean over micro-batches and ranks."
    )
    freeze_moe_router: bool = Field(default=False, description="Do not train the routers.")
    attention_backend: Literal["auto", "flash", "fused", "unfused"] | None = Field(
        default=None, description="Attention kernel of TransformerEngine. null: model_args.attn_implementation decides."
    )
    overlap_grad_reduce: bool = Field(default=False, description="Reduce gradients while the backward pass still runs.")
    use_distributed_optimizer: bool = Field(
        default=True, description="Shard the optimizer states over data-parallel ranks."
    )

    @property
    def model_parallel_size(self) -> int:
        """Devices that hold one copy of the model (experts live inside the data-parallel dimension)."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def virtual_stages(self) -> int | None:
        """Model chunks per stage, if there are several."""
        size = self.virtual_pipeline_model_parallel_size
        return None if size == 1 else size

    @property
    def expert_tensor_size(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def engine_arguments(self) -> dict[str, Any]:
        """What goes to the fields of Megatron's configurations under the same name."""
        ours = {
            "attention_backend",
            "freeze_moe_router",
            "moe_layer_recompute",
            "recompute_granularity",
            "recompute_method",
            "recompute_modules",
            "recompute_num_layers",
        }
        arguments = {name: value for name, value in self if name not in ours}
        return arguments | {"virtual_pipeline_model_parallel_size": self.virtual_stages}

    def problems(self) -> list[ConfigProblem]:
        return [*self._layout_problems(), *self._recompute_problems()]

    def _layout_problems(self) -> Iterator[ConfigProblem]:
        tensor, stages = "tensor_model_parallel_size", "pipeline_model_parallel_size"
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            yield self.problem("sequence_parallel", f"false, or {tensor} of at least 2", tensor)
        if self.virtual_stages and self.pipeline_model_parallel_size == 1:
            yield self.problem("virtual_pipeline_model_parallel_size", f"null, or {stages} of at least 2", stages)
        for key in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            if self.pipeline_model_parallel_size == 1 and getattr(self, key) is not None:
                yield self.problem(key, f"null with {stages} 1: one stage has all layers", stages)
        if self.moe_shared_expert_overlap and self.moe_token_dispatcher_type != "alltoall":
            dispatcher = "moe_token_dispatcher_type"
            yield self.problem("moe_shared_expert_overlap", f"false, or {dispatcher} alltoall", dispatcher)

    def _recompute_problems(self) -> Iterator[ConfigProblem]:
        granularity, chosen = self.recompute_granularity, "recompute_granularity"
        if self.moe_layer_recompute and granularity == "full":
            expected = f"false with {chosen} full: whole layers include their experts"
            yield self.problem("moe_layer_recompute", expected, chosen)
        selective = granularity == "selective" or (granularity is None and self.moe_layer_recompute)
        for key in ("recompute_method", "recompute_num_layers"):
            if selective and getattr(self, key) is not None:
                yield self.problem(key, f"null, or {chosen} full", chosen, "moe_layer_recompute")
        modules = self.recompute_modules or []
        if self.recompute_modules is not None and granularity != "selective":
            yield self.problem("recompute_modules", f"null, or {chosen} selective", chosen)
        if "moe_act" in modules and not self.moe_grouped_gemm:
            expected = "moe, or no moe_act, with moe_grouped_gemm false"
            yield self.problem("recompute_modules", expected, "moe_grouped_gemm")
        if "shared_experts" in modules and self.moe_shared_expert_overlap:
            expected = "no shared_experts with moe_shared_expert_overlap: one of the two"
            yield self.problem("recompute_modules", expected, "moe_shared_expert_overlap")


VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes that vLLM makes room for in an adapter."""


class VllmConfig(EngineConfig):
    """Options of `vllm`: arguments of its `AsyncEngineArgs`. Others than these are passed on.

    The model, its dtype, the seed, the number of running requests and LoRA come from elsewhere.
    """

    gpu_memory_utilization: float = Field(
        default=0.8, gt=0, le=1, description="Share of the device memory vLLM may take (not on a CPU)."
    )
    kv_cache_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Size of the KV cache. null: what gpu_memory_utilization leaves; on a CPU, enough for all running "
        "requests within a quarter of the free memory.",
    )
    tensor_parallel_size: int | None = Field(
        default=None, ge=1, description="Devices of one engine. null: num_gpus_per_worker."
    )
    block_size: int = Field(
        default=16, ge=1, description="Tokens per block of the KV cache; on a CPU rounded up to a multiple of 32."
    )
    max_model_len: int | None = Field(default=None, ge=1, description="Longest context. null: sequence_length.")
    load_format: str = Field(
        default="auto", description="dummy skips reading weights, since they are synchronised anyway."
    )
    enforce_eager: bool = Field(default=False, description="Do not capture CUDA graphs (a CPU has none).")
    enable_prefix_caching: bool = Field(
        default=True, description="Reuse the cache of prompts that begin alike, until the next weights."
    )


class SglangConfig(EngineConfig):
    """Options of `sglang`: arguments of its `ServerArgs`. Others than these are passed on.

    The model, its dtype, the seed, the number of running requests and LoRA come from elsewhere.
    """

    python_executable: str | None = Field(
        default=None,
        min_length=1,
        description="Interpreter of the environment that SGLang is installed in, as its packages agree with no other "
        "engine's (`scripts/make_sglang_env.sh` makes one). null: that of the run.",
    )
    mem_fraction_static: float = Field(
        default=0.8, gt=0, le=1, description="Share of the device memory for weights and KV cache."
    )
    max_total_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens in the KV cache. null: what mem_fraction_static leaves; on a CPU, enough for all running "
        "requests within a quarter of the free memory.",
    )
    tp_size: int | None = Field(default=None, ge=1, description="Devices of one engine. null: num_gpus_per_worker.")
    load_format: str = Field(
        default="auto", description="dummy skips reading weights, since they are synchronised anyway."
    )
    disable_radix_cache: bool = Field(
        default=False, description="Compute every prompt anew instead of reusing the cache of those that begin alike."
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
SCORERS = TRAINERS | {"hf_infer", "fsdp2_infer", "deepspeed_infer", "megatron_infer"}


class StrategyArguments(Config):
    """The engine and its options."""

    strategy_name: str = Field(
        default="fsdp2_train",
        min_length=1,
        description="Training: fsdp2_train, deepspeed_train, megatron_train. Generation: hf_infer, vllm, sglang. "
        "Scoring: hf_infer, fsdp2_infer, deepspeed_infer, megatron_infer, or one that trains. Or package.module:Class.",
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
