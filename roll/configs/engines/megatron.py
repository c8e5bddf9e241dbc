"""`megatron_train`, `megatron_infer`: Megatron-Core, for models that it can compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from roll.configs.engines.arguments import EngineSource, foreign_key_hint, type_problems
from roll.configs.engines.card import EngineCard, EnginePackage, PassedOnOptions, Strategy
from roll.configs.problems import ConfigProblem

if TYPE_CHECKING:
    from roll.configs.pipeline import PipelineConfig
    from roll.configs.worker import WorkerConfig

RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]


class MegatronConfig(PassedOnOptions):
    """Options of `megatron_train` and `megatron_infer`.

    Other keys are passed on to Megatron-Core's `TransformerConfig`, `DistributedDataParallelConfig` and
    `OptimizerConfig`, whichever have a field of that name.
    """

    tensor_model_parallel_size: int = Field(
        default=1, ge=1, description="Devices that share the matrices of each layer."
    )
    pipeline_model_parallel_size: int = Field(
        default=1, ge=1, description="Pipeline stages that the layers are split into."
    )
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
        description="Activations recomputed in the backward pass: those of whole layers, or of recompute_modules. "
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
    moe_layer_recompute: bool = Field(default=False, description="Recompute MoE layers in the backward pass.")
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = Field(
        default="alltoall", description="How tokens travel to their experts."
    )
    moe_grouped_gemm: bool | Literal["auto"] = Field(
        default="auto",
        description="One grouped matrix product for all experts. auto: where it can be, on GPUs in bf16 with "
        "TransformerEngine or the package grouped_gemm; else one product per expert.",
    )
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
    fp8: Literal["e4m3", "hybrid"] | None = Field(
        default=None,
        description="Number format of the layers' matrix products with TransformerEngine; hybrid has e5m2 for "
        "gradients. Weights stay in bf16. Not tested on GPUs.",
    )
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = Field(
        default="delayed",
        description="Scaling of fp8. Rows are padded to what its products want: multiples of 16 tokens on each "
        "device, 128 with blockwise, 32 with mxfp8 (Blackwell). delayed keeps a history that checkpoints lack.",
    )
    overlap_grad_reduce: bool = Field(default=False, description="Reduce gradients while the backward pass still runs.")
    use_distributed_optimizer: bool = Field(
        default=True, description="Shard the optimizer states over data-parallel ranks."
    )

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """Experts live inside the data-parallel dimension."""
        keys = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        return {key: getattr(self, key) for key in keys}

    @property
    def virtual_stages(self) -> int | None:
        """Model chunks per stage, if there are several."""
        size = self.virtual_pipeline_model_parallel_size
        return None if size == 1 else size

    @property
    def expert_tensor_size(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def gemm_rows(self) -> int:
        """Tokens on a device must be a multiple of it: what TransformerEngine's products in fp8 want."""
        return {"blockwise": 128, "mxfp8": 32}.get(self.fp8_recipe, 16) if self.fp8 else 1

    def engine_arguments(self) -> dict[str, Any]:
        """Options that go to the fields of Megatron's configurations under the same name."""
        ours = {
            "attention_backend",
            "freeze_moe_router",
            "moe_grouped_gemm",
            "moe_layer_recompute",
            "recompute_granularity",
            "recompute_method",
            "recompute_modules",
            "recompute_num_layers",
        }
        arguments = {name: value for name, value in self if name not in ours}
        return arguments | {"virtual_pipeline_model_parallel_size": self.virtual_stages}

    def problems(self) -> Iterator[ConfigProblem]:
        if self.fp8_recipe != "delayed" and not self.fp8:
            yield self.problem("fp8_recipe", "no such key without fp8", "fp8")
        yield from self._layout_problems()
        yield from self._recompute_problems()

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
    "moe_enable_routing_replay": "router_replay",
    "calculate_per_token_loss": "loss_agg_mode",
    "average_in_collective": "nothing: gradients are summed",
    "optimizer": "nothing: it is AdamW",
    "fp8_param": "nothing: weights are kept in bf16, as they are sent and saved",
    "fp8_quantizer_factory": "fp8_recipe",
    "fp4": "fp8",
    "fp4_param": "fp8",
    "fp4_recipe": "fp8_recipe",
    "use_precision_aware_optimizer": "nothing: Adam's moments are float32",
    "optimizer_cpu_offload": "nothing: optimizer states leave the device between steps, with offload",
    "overlap_param_gather": "nothing: weights are read between steps",
    "num_distributed_optimizer_instances": "nothing: all data-parallel ranks share the optimizer states",
    "use_megatron_fsdp": "strategy_name fsdp2_train",
    "use_custom_fsdp": "strategy_name fsdp2_train",
    "variable_seq_lengths": "nothing: it follows from the pipeline's schedule",
    "moe_router_force_load_balancing": "nothing: random routing is only for benchmarks",
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

CALLABLES = ("timers", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func")


_STRATEGIES = "roll.distributed.strategy.megatron.strategy"


class MegatronCard(EngineCard):
    """Trains and computes log-probs with tensor, pipeline, context and expert parallelism."""

    name = "megatron"
    strategies: ClassVar[Mapping[str, Strategy]] = {
        "megatron_train": Strategy(f"{_STRATEGIES}:MegatronTrain", trains=True, scores=True),
        "megatron_infer": Strategy(f"{_STRATEGIES}:MegatronInfer", scores=True),
    }
    options = MegatronConfig
    package = EnginePackage("megatron.core", "megatron")
    source = EngineSource(
        "Megatron-Core",
        Path(__file__).with_suffix(".json"),
        {
            "model_parallel_config.py": ("ModelParallelConfig",),
            "transformer/transformer_config.py": ("TransformerConfig",),
            "distributed/distributed_data_parallel_config.py": ("DistributedDataParallelConfig",),
            "optimizer/optimizer_config.py": ("OptimizerConfig",),
        },
    )
    ulysses_instead = "context_parallel_size shares sequences"
    rates_parts = True
    replays_experts = True
    scores_kept_sets = True
    splits_heads = False  # among other layouts: its own fit knows
    fit = "roll.distributed.strategy.megatron.fit:check_model"
    frozen_fit = "roll.distributed.strategy.megatron.fit:check_frozen"
    adapter_fit = "roll.distributed.strategy.megatron.fit:check_adapter"

    def option_problems(self, options: Mapping[str, Any]) -> Iterator[ConfigProblem]:
        known = self.signature(options)
        fields = {name: kind for name, kind in known.arguments.items() if name not in OWNED and name not in CALLABLES}
        typed = set(MegatronConfig.model_fields)
        for name in sorted(options.keys() - typed):
            if name in MODEL_FIELDS:
                yield ConfigProblem(name, options[name], "model_args.model_config_kwargs instead")
            elif name in OWNED:
                yield ConfigProblem(name, options[name], OWNED[name])
            elif fields and name not in fields:
                hint = foreign_key_hint(name, fields.keys() | typed)
                wrong = ConfigProblem(name, options[name], "an option of Megatron-Core", hint)
                yield known.attributed(wrong)
            else:
                yield from map(known.attributed, type_problems({name: options[name]}, fields))

    def rules(self, role: str, worker: WorkerConfig, config: PipelineConfig) -> Iterator[ConfigProblem]:
        """Experts can be dealt out to the workers of a stage; recomputation is on where it is described."""
        options = worker.strategy_args.typed()
        assert isinstance(options, MegatronConfig)
        if worker.model_args.trust_remote_code:
            name, key = worker.strategy_args.strategy_name, f"{role}.model_args.trust_remote_code"
            expected = f"false with {name}, which computes models in Megatron's own code; fsdp2 and hf_infer run theirs"
            yield ConfigProblem(key, True, expected)
        mode, fused = worker.router_replay.mode, (options.model_extra or {}).get("moe_router_fusion")
        if fused and role == "actor_train" and mode != "disable":  # a fused router does not ask which experts to take
            key, replay = f"{role}.strategy_args.strategy_config.moe_router_fusion", f"{role}.router_replay.mode"
            expected = f"false with router_replay {mode}: the fused kernel chooses experts itself"
            yield ConfigProblem(key, True, expected, involves=(replay,))
        if worker.num_workers % options.model_parallel_size == 0:
            yield from _expert_problems(role, worker, options)
            yield from _recompute_problems(role, worker, options)

    scores_pictures = False
    pictured = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe", "llava", "mistral3")

    def no_pictures(self, worker: WorkerConfig) -> str:
        options = worker.strategy_args.typed()
        assert isinstance(options, MegatronConfig)
        size = options.context_parallel_size
        return f"takes no pictures with context_parallel_size {size}" if size > 1 else ""

    def untested(self, options: MegatronConfig) -> Iterator[tuple[str, str]]:
        if options.fp8:
            yield "fp8", "TransformerEngine's products in fp8 have run with no test; rows are padded for them"
        if options.moe_grouped_gemm is True:
            yield "moe_grouped_gemm", "grouped products have run with no test; the names of their weights are tested"

    def environment(self, options: MegatronConfig) -> Mapping[str, str]:
        """Layers that several devices share start their communication first; one queue of CUDA's keeps that order."""
        shared = options.tensor_model_parallel_size > 1 or options.context_parallel_size > 1
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if shared else {}

    def gpu_only(self, worker: WorkerConfig) -> Iterator[ConfigProblem]:
        options, base = worker.strategy_args.typed(), "strategy_args.strategy_config"
        assert isinstance(options, MegatronConfig)
        if options.moe_grouped_gemm is True:
            yield options.problem("moe_grouped_gemm", "auto or false").under(base)
        if "moe_act" in (options.recompute_modules or ()):
            yield options.problem("recompute_modules", "no moe_act, which needs moe_grouped_gemm,").under(base)
        if options.fp8:
            yield options.problem("fp8", "null").under(base)
        if options.attention_backend not in (None, "auto"):
            yield options.problem("attention_backend", "null or auto").under(base)


def _expert_problems(role: str, worker: WorkerConfig, options: MegatronConfig) -> Iterator[ConfigProblem]:
    expert, tensor = options.expert_model_parallel_size, options.expert_tensor_size
    workers = worker.num_workers // options.pipeline_model_parallel_size
    if workers % (expert * tensor) == 0:
        return
    base = f"{role}.strategy_args.strategy_config"
    alone = options.expert_tensor_parallel_size or 1
    key = "expert_model_parallel_size" if expert > 1 else "expert_tensor_parallel_size"
    seen, other = (expert, tensor) if expert > 1 else (tensor, expert)
    words = f"expert_model_parallel_size {expert} × expert_tensor_parallel_size {tensor} = {expert * tensor}"
    expected = f"{words} to divide the {workers} workers of a stage of {role}"
    fits = [size for size in range(1, workers + 1) if workers % (size * other) == 0]
    hint = f"the nearest is {min(fits, key=lambda size: abs(size - seen))}" if fits else ""
    if tensor > alone and workers % expert == 0:
        hint = "or expert_tensor_parallel_size 1; null is tensor_model_parallel_size" + (f"; {hint}" if hint else "")
    sizes = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    involved = [f"{base}.{size}_parallel_size" for size in sizes]
    involved += [f"{role}.device_mapping", f"{role}.world_size", f"{role}.strategy_args.strategy_name"]
    yield ConfigProblem(f"{base}.{key}", seen, expected, hint, involves=tuple(involved))


def _recompute_problems(role: str, worker: WorkerConfig, options: MegatronConfig) -> Iterator[ConfigProblem]:
    chosen = options.recompute_granularity or options.moe_layer_recompute
    if chosen or not worker.model_args.disable_gradient_checkpointing:
        return
    base = f"{role}.strategy_args.strategy_config"
    for key in ("recompute_method", "recompute_num_layers"):
        if (seen := getattr(options, key)) is not None:
            expected = "recompute_granularity full, or no such key: nothing is recomputed"
            hint = "model_args.disable_gradient_checkpointing is true"
            involved = (f"{base}.recompute_granularity", f"{role}.model_args.disable_gradient_checkpointing")
            yield ConfigProblem(f"{base}.{key}", seen, expected, hint, involves=involved)


CARD = MegatronCard()
