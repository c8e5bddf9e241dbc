"""A Hugging Face model built from Megatron's modules, as far as one rank holds it.

The model stops at the final hidden states; ``scores`` applies the output layer to the tokens that count.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll.configs.strategy import MegatronConfig
from roll.distributed.strategy.base import RankInfo, StrategyContext
from roll.distributed.strategy.engines import constructor_fields
from roll.distributed.strategy.megatron.modules import layer_specs
from roll.distributed.strategy.megatron.scores import VocabularyShare
from roll.models.heads import load_value_head
from roll.models.megatron.config import MegatronModelConfig, check_parallel_sizes, megatron_config, padded_vocab_size
from roll.models.megatron.convert import load_shards
from roll.models.megatron.layout import ParallelLayout
from roll.models.megatron.weight_files import WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HEAD_PREFIX = "value_head."

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


@dataclass(eq=False)
class MegatronModel:
    """What one rank holds."""

    config: Any
    """Megatron's ``TransformerConfig``."""
    converted: MegatronModelConfig
    chunks: list[Any]
    """One trunk, or several where pipeline stages are virtual; a trainer wraps them for data parallelism."""
    layouts: list[ParallelLayout]
    """Which part of the model each chunk is."""
    wrapped: list[Any] = field(default_factory=list)
    """The chunks as they are called."""

    def named_parameters(self) -> Iterator[tuple[int, str, torch.nn.Parameter]]:
        """Chunk number, Megatron's name, parameter; without the value head."""
        for number, chunk in enumerate(self.chunks):
            for name, parameter in chunk.named_parameters():
                if not name.startswith(HEAD_PREFIX):
                    yield number, name, parameter

    @property
    def last(self) -> Any:
        """The chunk with the final norm, if this rank is on the last stage; else ``None``."""
        return self.chunks[-1] if self.layouts[-1].last_stage else None

    @property
    def value_head(self) -> Any:
        return getattr(self.last, "value_head", None)

    def output_weight(self) -> Tensor:
        """This rank's rows of the output layer (last stage only)."""
        last = self.last
        weight: Tensor = (
            last.shared_embedding_or_output_weight()
            if last.share_embeddings_and_output_weights
            else last.output_layer.weight
        )
        return weight

    def vocabulary(self) -> VocabularyShare:
        from megatron.core import parallel_state

        rows = padded_vocab_size(self.converted.vocab_size, self.config.tensor_model_parallel_size)
        share = rows // self.config.tensor_model_parallel_size
        return VocabularyShare(
            self.converted.vocab_size,
            parallel_state.get_tensor_model_parallel_rank() * share,
            parallel_state.get_tensor_model_parallel_group(),
        )


def check_engine_options(options: Mapping[str, Any]) -> list[str]:
    """What is wrong with the keys of a ``strategy_config`` that are for Megatron; reads its source, imports nothing."""
    known: set[str] = set()
    for file, classes in ENGINE_CONFIGS.items():
        known |= constructor_fields("megatron", file, classes)
    if not known:
        return []  # it is not installed, which setup says
    known -= {*CALLABLES, *OWNED}
    typed = set(MegatronConfig.model_fields)
    problems = []
    for name in sorted(options.keys() - typed):
        if name in MODEL_FIELDS:
            problems.append(f"{name}: seen {options[name]!r}, expected model_args.model_config_kwargs instead")
        elif name in OWNED:
            problems.append(f"{name}: seen {options[name]!r}, expected {OWNED[name]}")
        elif name not in known:
            nearest = difflib.get_close_matches(name, known | typed, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            problems.append(f"{name}: seen {options[name]!r}, expected an option of Megatron-Core{hint}")
    return problems


def check_model_fit(hf_config: PreTrainedConfig, options: MegatronConfig) -> list[str]:
    """Sizes of the model that the parallel layout does not divide, with the nearest right choice; needs no Megatron."""
    try:
        converted = megatron_config(hf_config)
    except ValueError as error:
        return [str(error)]
    problems = []
    try:
        check_parallel_sizes(
            converted,
            tensor=options.tensor_model_parallel_size,
            expert=options.expert_model_parallel_size,
            expert_tensor=options.expert_tensor_parallel_size,
        )
    except ValueError as error:
        problems += str(error).splitlines()
    problems += _stage_problems(converted.num_layers, options)
    if converted.num_experts and options.tensor_model_parallel_size > 1 and not options.sequence_parallel:
        problems.append(
            "sequence_parallel: seen false with experts and "
            f"tensor_model_parallel_size {options.tensor_model_parallel_size}, expected true"
        )
    return problems


def join_parallel_state(context: StrategyContext, options: MegatronConfig) -> RankInfo:
    """Makes Megatron's process groups, or finds them made alike by an earlier strategy in this process (collective).

    Raises:
        ValueError: the workers cannot be dealt out.
    """
    from megatron.core import parallel_state, tensor_parallel

    model, world = options.model_parallel_size, context.world_size
    if world % model:
        raise ValueError(
            f"{context.role}: {world} workers for tensor {options.tensor_model_parallel_size} x pipeline "
            f"{options.pipeline_model_parallel_size} x context {options.context_parallel_size}; expected a multiple of "
            f"{model} (nearest: {max(1, round(world / model)) * model})"
        )
    per_stage = world // options.pipeline_model_parallel_size
    if per_stage % (expert_ranks := options.expert_model_parallel_size * options.expert_tensor_size):
        raise ValueError(
            f"{context.role}: {per_stage} workers per pipeline stage for expert {options.expert_model_parallel_size} x "
            f"expert_tensor {options.expert_tensor_size}; expected a multiple of {expert_ranks}"
        )
    sizes = {
        "tensor_model_parallel_size": options.tensor_model_parallel_size,
        "pipeline_model_parallel_size": options.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": options.virtual_stages,
        "context_parallel_size": options.context_parallel_size,
        "expert_model_parallel_size": options.expert_model_parallel_size,
        "expert_tensor_parallel_size": options.expert_tensor_parallel_size,
    }
    if not parallel_state.model_parallel_is_initialized() or _joined != {**sizes, "world": dist.group.WORLD}:
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        _joined.clear()
        _joined.update(sizes, world=dist.group.WORLD)
    tensor_parallel.model_parallel_cuda_manual_seed(context.seed, force_reset_rng=True)
    return RankInfo(
        context.rank,
        world,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
    )


_joined: dict[str, Any] = {}
"""What Megatron's process groups of this process were made for."""


def build_model(
    context: StrategyContext, hf_config: PreTrainedConfig, options: MegatronConfig, dtype: torch.dtype, *, trained: bool
) -> MegatronModel:
    """Builds this rank's part of the model and loads its weights from the model folder.

    Raises:
        ValueError: sizes that do not divide, or a model that cannot be converted.
    """
    from megatron.core import parallel_state

    given = context.worker.strategy_args.strategy_config
    problems = [*check_engine_options(given), *check_model_fit(hf_config, options), *_machine_problems(options, dtype)]
    if problems:
        found = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"{context.role}: {context.model_path} with these megatron options\n{found}")
    converted = megatron_config(hf_config)
    config = transformer_config(context, converted, options, dtype, trained=trained)
    virtual = options.virtual_stages
    chunks, layouts = [], []
    for stage in range(virtual or 1):
        vp_stage = stage if virtual else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        chunk = _make_chunk(context, config, converted, vp_stage, first=first, last=last)
        if first:
            _spare_padding_token(chunk, hf_config.pad_token_id)
        chunks.append(chunk.train(trained).requires_grad_(trained))
        layouts.append(_layout(chunk, first=first, last=last))
    model = MegatronModel(config, converted, chunks, layouts, wrapped=list(chunks))
    load_weights(model, WeightFiles(context.model_path).read)
    for _, name, parameter in model.named_parameters():
        if trained and options.freeze_moe_router:
            parameter.requires_grad_(not name.endswith("mlp.router.weight"))
        if ".experts." in name and options.expert_tensor_size != options.tensor_model_parallel_size:
            # Gradients of experts are summed over other ranks then. Megatron marks them only if there are also
            # expert-parallel ranks.
            parameter.allreduce = False  # type: ignore[attr-defined]
    return model


@torch.no_grad()
def load_weights(model: MegatronModel, read: Callable[[str], Tensor]) -> None:
    """Fills the parameters from whole Hugging Face tensors."""
    for number, layout in enumerate(model.layouts):
        parameters = {name: parameter for index, name, parameter in model.named_parameters() if index == number}
        for name, shard in load_shards(read, parameters, model.converted, layout):
            parameters[name].copy_(shard)


def transformer_config(
    context: StrategyContext,
    converted: MegatronModelConfig,
    options: MegatronConfig,
    dtype: torch.dtype,
    *,
    trained: bool,
) -> Any:
    """Megatron's ``TransformerConfig``: the model's shape, the parallel layout, then the options passed on."""
    from megatron.core.transformer import TransformerConfig

    engine = uses_transformer_engine(dtype)
    gpu = torch.cuda.is_available()
    pipelined = options.pipeline_model_parallel_size > 1
    arguments: dict[str, Any] = {
        **converted.transformer,
        "transformer_impl": "transformer_engine" if engine else "local",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Weights are loaded anyway, but this is what marks parameters as cut over tensor-parallel ranks.
        "perform_initialization": True,
        "deallocate_pipeline_outputs": True,
        # Shapes are sent along where stages take turns; the interleaved schedule hangs with it, so there all are equal.
        "variable_seq_lengths": pipelined and not options.virtual_stages,
        "batch_p2p_comm": gpu,
        "bias_activation_fusion": gpu,
        "bias_dropout_fusion": gpu,
        "apply_rope_fusion": engine,
        "moe_router_dtype": "fp32",
    }
    fields = {f.name for f in dataclasses.fields(TransformerConfig)}
    arguments |= {name: value for name, value in options.engine_arguments().items() if name in fields}
    arguments |= _recompute(context, options, trained=trained)
    return TransformerConfig(**arguments)


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """Whether the model is made of TransformerEngine's modules, which need a GPU.

    In float32 it is not: its matrix products would round to TF32, and it has no attention with context parallelism.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None
    return torch.cuda.is_available() and installed and dtype != torch.float32


def _recompute(context: StrategyContext, options: MegatronConfig, *, trained: bool) -> dict[str, Any]:
    granularity = options.recompute_granularity
    if granularity is None and options.moe_layer_recompute:
        granularity = "selective"
    if granularity is None and not context.worker.model_args.disable_gradient_checkpointing:
        granularity = "full"
    if granularity is None or not trained:
        return {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
    if granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": options.recompute_method or "uniform",
            "recompute_num_layers": options.recompute_num_layers or 1,
        }
    modules = options.recompute_modules or (["core_attn"] if options.recompute_granularity else [])
    if options.moe_layer_recompute:
        modules = [*modules, "moe"]
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def _make_chunk(
    context: StrategyContext,
    config: Any,
    converted: MegatronModelConfig,
    vp_stage: int | None,
    *,
    first: bool,
    last: bool,
) -> Any:
    value = context.head == "value"
    arguments = dict(converted.model)
    arguments["vocab_size"] = padded_vocab_size(converted.vocab_size, config.tensor_model_parallel_size)
    if value:
        arguments["share_embeddings_and_output_weights"] = False
    chunk = _trunk_class()(
        config=config,
        transformer_layer_spec=layer_specs(config, vp_stage),
        pre_process=first,
        post_process=last,
        parallel_output=True,
        vp_stage=vp_stage,
        **arguments,
    )
    # Routers, gates of shared experts and the norms of ``modules`` are made in host memory, whatever else there is.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chunk.to(device, config.params_dtype)
    if value and last:
        del chunk.output_layer
        chunk.value_head = load_value_head(config.hidden_size, Path(context.model_path)).to(device)
    return chunk


def _spare_padding_token(chunk: Any, token: int | None) -> None:
    """Keeps the gradient from the padding token's embedding, as transformers' embeddings do."""
    if token is None:
        return

    def without_gradient(module: Any, args: object, inputs: dict[str, Tensor], embedded: Tensor) -> Tensor:
        padding_SR = inputs["input_ids"].T.contiguous() == token
        if chunk.config.sequence_parallel:
            padding_SR = padding_SR.chunk(module.tp_group.size())[module.tp_group.rank()]
        return torch.where(padding_SR[..., None], embedded.detach(), embedded)

    chunk.embedding.register_forward_hook(without_gradient, with_kwargs=True)


@functools.cache
def _trunk_class() -> type:
    from megatron.core.models.gpt import GPTModel

    class Trunk(GPTModel):  # type: ignore[misc]
        """A model that ends with its final norm."""

        def _postprocess(self, hidden_states: Tensor, **_: object) -> Tensor:
            return hidden_states

    return Trunk


def _layout(chunk: Any, *, first: bool, last: bool) -> ParallelLayout:
    from megatron.core import parallel_state

    return ParallelLayout(
        layers=tuple(layer.layer_number - 1 for layer in chunk.decoder.layers),
        first_stage=first,
        last_stage=last,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tp_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )


def _machine_problems(options: MegatronConfig, dtype: torch.dtype) -> list[str]:
    """Options for which this machine has not the kernels."""
    kernels = torch.cuda.is_available() and importlib.util.find_spec("grouped_gemm") is not None
    if not options.moe_grouped_gemm or uses_transformer_engine(dtype) or (kernels and dtype == torch.bfloat16):
        return []
    needs = "a GPU, TransformerEngine (or grouped_gemm) and dtype bf16"
    return [f"moe_grouped_gemm: seen true, expected false without {needs}"]


def _stage_problems(num_layers: int, options: MegatronConfig) -> list[str]:
    """Layers that cannot be dealt out to the pipeline's stages."""
    stages, virtual = options.pipeline_model_parallel_size, options.virtual_stages or 1
    first, last = options.num_layers_in_first_pipeline_stage, options.num_layers_in_last_pipeline_stage
    chunks = stages * virtual
    if first is None and last is None:
        if num_layers % chunks == 0:
            return []
        name = "pipeline_model_parallel_size" + (" x virtual_pipeline_model_parallel_size" if virtual > 1 else "")
        nearest = min(_divisors(num_layers), key=lambda divisor: abs(divisor - chunks))
        return [f"{name}: seen {chunks}, expected a divisor of num_hidden_layers {num_layers} (nearest: {nearest})"]
    rest, middle = num_layers - (first or 0) - (last or 0), stages - (first is not None) - (last is not None)
    seen = f"num_layers_in_first_pipeline_stage {first}, num_layers_in_last_pipeline_stage {last}"
    if middle < 0 or (middle == 0 and rest):
        return [f"{seen}: expected {num_layers} layers in {stages} stages"]
    if middle and (rest <= 0 or rest % middle):
        return [f"{seen}: {rest} layers left for {middle} other stages, expected a multiple of {middle} above 0"]
    counts = {"first": first, "last": last, "middle": rest // middle if middle else None}
    name = "virtual_pipeline_model_parallel_size"
    return [
        f"{name}: seen {virtual}, expected a divisor of the {count} layers of a {where} stage"
        for where, count in counts.items()
        if count is not None and count % virtual
    ]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
