"""One rank's part of a Hugging Face model, built from Megatron's modules, with its frozen parts.

The model stops at the final hidden states; ``scores`` applies the output layer to the tokens that count.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.configs.engines.megatron import CARD, MegatronConfig
from roll.configs.problems import ConfigProblem
from roll.distributed.strategy.base import RankInfo, StrategyContext
from roll.distributed.strategy.megatron.fit import check_model_fit
from roll.distributed.strategy.megatron.pictures import take_tower
from roll.distributed.strategy.megatron.scores import VocabularyShare
from roll.distributed.strategy.megatron.substitutes import PlannedRow, layer_specs
from roll.distributed.strategy.training.checkpoint import HEAD_PREFIX, MODEL_PREFIX
from roll.distributed.strategy.training.exchange import raise_on_all_ranks
from roll.models.freezing import FREEZE, RATES, freeze, freeze_unseen, frozen_parameters, own_rates
from roll.models.heads import ValueHead, load_value_head
from roll.models.loading import Head, fit_folder, load_config, make_skeleton
from roll.models.lora import is_adapter
from roll.models.megatron.config import MegatronModelConfig, megatron_config, padded_vocab_size, set_rotary
from roll.models.megatron.names import (
    ParallelLayout,
    at_odds,
    is_buffer,
    load_shards,
    module_parts,
    source,
    split_reader,
    torn,
)
from roll.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def freeze_parts(model: MegatronModel, context: StrategyContext) -> None:
    """Freezes ``freeze_module_prefix`` in this rank's part of a model (collective).

    Raises:
        ValueError: a prefix without parameters, or one that takes only some of the tensors that Megatron keeps in one.
    """
    args = context.worker.model_args
    with raise_on_all_ranks():
        frozen = frozen_parameters(_names_of(context), args.frozen_prefixes, head=context.head != "lm")
        for parameter, held in _held_parts(model):
            if expected := torn(held, frozen):
                raise ValueError(f"{context.role}.{FREEZE}: expected {expected}")
            parameter.requires_grad_(parameter.requires_grad and not held <= frozen)
    for chunk, layout in zip(model.chunks, model.layouts, strict=True):
        if layout.first_stage:
            chunk.embedding.register_forward_hook(with_gradient)


def own_rates_of(model: MegatronModel, context: StrategyContext) -> dict[nn.Parameter, float]:
    """Learning rates (``learning_rate_of``) of this rank's parameters that have one of their own (collective).

    Raises:
        ValueError: a key is no part of the model, nothing of it is trained, or it takes only some of the tensors that
            Megatron keeps in one.
    """
    args, found = context.worker.model_args, dict[nn.Parameter, float]()
    with raise_on_all_ranks():
        hf_model = _names_of(context)
        freeze(hf_model, args.frozen_prefixes, head=context.head != "lm")
        rates = own_rates(hf_model, context.worker.training_args.learning_rate_of)
        for parameter, held in _held_parts(model):
            if expected := at_odds(held, rates):
                raise ValueError(f"{context.role}.{RATES}: expected {expected}")
            if (rate := rates.get(next(iter(held)))) is not None:
                found[parameter] = rate
    return found


def _names_of(context: StrategyContext) -> PreTrainedModel:
    """The Hugging Face model without values."""
    kwargs = context.worker.model_args.model_config_kwargs
    with torch.device("meta"):
        return make_skeleton(
            context.head, context.model_path, dtype=torch.float32, config_kwargs=kwargs, pictures=context.pictures
        )


def _held_parts(model: MegatronModel) -> Iterator[tuple[nn.Parameter, set[str]]]:
    """This rank's parameters but a head's, and what each holds of the Hugging Face module's."""
    for chunk, layout in zip(model.chunks, model.layouts, strict=True):
        for name, parameter in chunk.named_parameters():
            if not name.startswith(HEAD_PREFIX):
                names = chain.from_iterable(source(name, model.converted, layout).hf)
                yield parameter, {part for each in names for part in module_parts(each, model.converted)}


def with_gradient(module: nn.Module, args: object, embedded: Tensor) -> Tensor:
    """Lets gradients pass recomputed layers, which Megatron computes none for if their inputs need none."""
    return embedded.requires_grad_() if torch.is_grad_enabled() and not embedded.requires_grad else embedded


ATTENTION = {"fa2": "flash", "eager": "unfused"}
"""Kernels of TransformerEngine by ``model_args.attn_implementation``; otherwise it chooses."""


@dataclass(eq=False)
class MegatronModel:
    """Chunks of the model that one rank holds."""

    config: Any
    """Megatron's ``TransformerConfig``."""
    converted: MegatronModelConfig
    chunks: list[Any]
    """One trunk, or several where pipeline stages are virtual; a trainer wraps them for data parallelism."""
    layouts: list[ParallelLayout]
    """Part of the model that each chunk is."""
    wrapped: list[Any] = field(default_factory=list)
    """The chunks as they are called."""
    hf_model: PreTrainedModel | None = None
    """Of a configuration with other parts than a language model, which it has on the meta device."""

    @property
    def has_tower(self) -> bool:
        """The trunk is more than a language model; whether that is computed with or not."""
        return self.converted.trunk != MODEL_PREFIX

    @property
    def takes_plans(self) -> bool:
        """A row may hold a common prompt once.

        Neither TransformerEngine's attention nor context parallelism can follow its plan, nor windows, sinks, latent
        attention and states; and the loss that balances experts counts every token that they see.
        """
        config = self.config
        own = config.transformer_impl != "transformer_engine" and config.context_parallel_size == 1
        mixed = self.converted.family.mixers
        plain = not (mixed or config.window_size or config.multi_latent_attention or config.softmax_type != "vanilla")
        return own and plain and not config.moe_aux_loss_coeff

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
        minutes = math.ceil(context.timeout / 60)
        parallel_state.initialize_model_parallel(
            **sizes, create_gloo_process_groups=False, distributed_timeout_minutes=minutes
        )
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
"""Layout for which Megatron's process groups of this process were made."""


def build_model(
    context: StrategyContext, hf_config: PreTrainedConfig, options: MegatronConfig, dtype: torch.dtype, *, trained: bool
) -> MegatronModel:
    """Builds this rank's part of the model and loads its weights from the model folder.

    Raises:
        ValueError: sizes that do not divide, or a model that cannot be converted.
    """
    from megatron.core import parallel_state

    given, kwargs = context.worker.strategy_args.strategy_config, context.worker.model_args.model_config_kwargs
    text, hf_model, tower = hf_config.get_text_config(), None, nn.ModuleDict()
    if text is not hf_config:
        hf_model = make_skeleton(
            context.head, context.model_path, dtype=dtype, config_kwargs=kwargs, pictures=context.pictures
        )
        tower = take_tower(hf_model)
    converted = megatron_config(hf_config, hf_model)
    problems = [
        *CARD.option_problems(given),
        *check_model_fit(hf_config, options),
        *_machine_problems(context, converted, options, dtype),
    ]
    if problems:
        found = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"{context.role}: {context.model_path} with these megatron options\n{found}")
    config = transformer_config(context, converted, options, dtype, trained=trained)
    virtual = options.virtual_stages
    chunks, layouts = [], []
    for stage in range(virtual or 1):
        vp_stage = stage if virtual else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        specs = layer_specs(config, vp_stage, text, mixers=converted.family.mixers)
        chunk = _make_chunk(context, config, converted, vp_stage, specs, first=first, last=last)
        if first:
            _spare_padding_token(chunk, text.pad_token_id)
        chunk.train(trained).requires_grad_(trained and context.lora is None)
        if first and len(tower):  # text gives it no gradient, but weight decay would change it
            device = next(chunk.parameters()).device
            chunk.tower = tower.to(device).requires_grad_(trained and context.lora is None and context.pictures)
            assert hf_model is not None
            freeze_unseen(hf_model)
        if hasattr(chunk, "value_head"):
            chunk.value_head.requires_grad_(trained)  # beside an adapter too
        chunks.append(chunk)
        layouts.append(_layout(chunk, first=first, last=last))
    if not layouts[0].first_stage:
        tower.to("meta")
    model = MegatronModel(config, converted, chunks, layouts, wrapped=list(chunks), hf_model=hf_model)
    read = folder_reader(model, context, Path(context.model_path))
    with raise_on_all_ranks(), torch.no_grad():
        for parameter, part in own_parts(model, read):
            parameter.copy_(part)
        for layout, chunk in zip(layouts, chunks, strict=True):
            buffers = own_buffers(chunk, converted)
            for name, part in load_shards(read, buffers, converted, layout):
                buffers[name].data = part.to(buffers[name].device, torch.float32)
    if trained and context.worker.model_args.frozen_prefixes:
        freeze_parts(model, context)
    for name, parameter in chain.from_iterable(chunk.named_parameters() for chunk in chunks):
        if options.freeze_moe_router and name.endswith("mlp.router.weight"):
            parameter.requires_grad_(False)
        if ".experts." in name and options.expert_tensor_size != options.tensor_model_parallel_size:
            # Gradients of experts are summed over other ranks then. Megatron marks them only if there are also
            # expert-parallel ranks.
            parameter.allreduce = False  # type: ignore[attr-defined]
    return model


def saved_name(name: str, head: Head) -> str:
    """The name in the module: a trunk's have no prefix."""
    return name if head == "lm" else name.removeprefix(MODEL_PREFIX)


def folder_reader(model: MegatronModel, context: StrategyContext, path: Path) -> Callable[[str], Tensor]:
    """Reads the tensors of a model folder (or hub name) by their names, and this rank's value head, if it has one.

    Raises:
        ValueError: no such folder, or no safetensors files in it; later, no tensor of a name.
    """
    files, saved = WeightFiles(str(path)), {}
    if model.value_head is not None:
        head = load_value_head(model.config.hidden_size, files.folder, bias=model.value_head.linear.bias is not None)
        saved = {HEAD_PREFIX + name: parameter.detach() for name, parameter in head.named_parameters()}
    family = model.converted.family
    stored = split_reader(files.stored, family) if family.experts.alternating else files.read
    if model.hf_model is not None:
        config = load_config(str(path), context.worker.model_args.model_config_kwargs)
        fit = fit_folder(context.head, str(path), config, sampled=True, pictures=context.pictures)
        stored = split_reader(lambda name: fit.stored(saved_name(name, context.head)), family)
    return lambda name: saved[name] if name in saved else stored(name)


def own_buffers(chunk: Any, converted: MegatronModelConfig) -> dict[str, Tensor]:
    """What a chunk has of a model folder's tensors beside its parameters, float32."""
    return {name: buffer for name, buffer in chunk.named_buffers() if is_buffer(name, converted)}


def own_parts(
    model: MegatronModel, read: Callable[[str], Tensor], *, adapter: bool | None = False, trained: bool = False
) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Every parameter of this rank with its part of the whole tensors, which are read by a checkpoint's names.

    ``adapter``: those of a LoRA adapter, or all but those; ``None``: both. ``trained``: of these, what an optimizer
    changes.

    Raises:
        ValueError: a tensor of the wrong shape.
    """
    for layout, chunk in zip(model.layouts, model.chunks, strict=True):
        named = chunk.named_parameters()
        chosen = {n: p for n, p in named if adapter is None or is_adapter(n) == adapter}
        parameters = {n: p for n, p in chosen.items() if p.requires_grad or not trained}
        trunk = [name for name in parameters if not name.startswith(HEAD_PREFIX)]
        head = ((name, read(name)) for name in parameters if name.startswith(HEAD_PREFIX))
        for name, part in chain(load_shards(read, trunk, model.converted, layout), head):
            expected = parameters[name].shape
            if part.shape != expected:
                raise ValueError(f"{name}: got a part of shape {tuple(part.shape)}, expected {tuple(expected)}")
            yield parameters[name], part


def transformer_config(
    context: StrategyContext,
    converted: MegatronModelConfig,
    options: MegatronConfig,
    dtype: torch.dtype,
    *,
    trained: bool,
) -> Any:
    """Megatron's ``TransformerConfig``: the model's shape, the parallel layout, then the options passed on."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    engine = uses_transformer_engine(context, converted, dtype)
    kind = MLATransformerConfig if converted.transformer.get("multi_latent_attention") else TransformerConfig
    gpu = torch.cuda.is_available()
    pipelined = options.pipeline_model_parallel_size > 1
    arguments: dict[str, Any] = {
        "transformer_impl": "transformer_engine" if engine else "local",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Weights are loaded anyway, but this is what marks parameters as cut over tensor-parallel ranks.
        "perform_initialization": True,
        **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _leave_unset),
        "deallocate_pipeline_outputs": True,
        "cuda_graph_scope": [],  # whole layers, as by Megatron's own default, which warns that it is deprecated
        # Shapes are sent along where stages take turns; the interleaved schedule hangs with it, so there all are equal.
        "variable_seq_lengths": pipelined and not options.virtual_stages,
        "batch_p2p_comm": gpu,
        "bias_activation_fusion": gpu,
        "bias_dropout_fusion": gpu,
        "apply_rope_fusion": engine,
        "moe_router_dtype": "fp32",
        **converted.transformer,
    }
    fields = {f.name for f in dataclasses.fields(TransformerConfig)}
    arguments |= {name: value for name, value in options.engine_arguments().items() if name in fields}
    arguments["moe_grouped_gemm"] = groups_experts(context, converted, options, dtype)
    if engine:
        asked = ATTENTION.get(context.worker.model_args.attn_implementation, "auto")
        arguments["attention_backend"] = AttnBackend[options.attention_backend or asked]
    arguments |= _recompute(context, options, trained=trained)
    return kind(**arguments)


def _leave_unset(parameter: Tensor) -> Tensor:
    return parameter


def uses_transformer_engine(context: StrategyContext, converted: MegatronModelConfig, dtype: torch.dtype) -> bool:
    """Tells whether the model is made of TransformerEngine's modules, which need a GPU.

    In float32 it is not: its matrix products would round to TF32, and it has no attention with context parallelism.
    With a LoRA adapter neither: its layers normalise inside what the adapter reads the inputs of. Nor are models with
    something that was compared in Megatron's own modules alone.
    """
    return _has("transformer_engine") and _suits_transformer_engine(context, converted, dtype)


def _suits_transformer_engine(context: StrategyContext, converted: MegatronModelConfig, dtype: torch.dtype) -> bool:
    able = torch.cuda.is_available() and not converted.own_modules
    return able and dtype != torch.float32 and context.lora is None


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def without_transformer_engine(
    context: StrategyContext, converted: MegatronModelConfig, dtype: torch.dtype
) -> str | None:
    """What the lack of TransformerEngine costs a model that could use it; ``None``: it is there, or of no use."""
    if _has("transformer_engine") or not _suits_transformer_engine(context, converted, dtype):
        return None
    return (
        f"{context.role}: TransformerEngine is not installed, so layers are Megatron's own: norms and products are "
        "separate kernels, attention runs on one sequence of a packed row after another and waits for the GPU in "
        "every layer, and context parallelism gathers all keys and values. fp8, attention_backend and "
        "recompute_modules moe_act are refused, and so is moe_grouped_gemm: true without the package grouped_gemm. "
        "docs/running_on_gpus.md says how to install it"
    )


def groups_experts(
    context: StrategyContext, converted: MegatronModelConfig, options: MegatronConfig, dtype: torch.dtype
) -> bool:
    """Tells whether one grouped product computes a layer's experts."""
    if options.moe_grouped_gemm != "auto":
        return options.moe_grouped_gemm
    can_add_biases = not converted.family.experts.biased
    return bool(converted.num_experts) and can_add_biases and _can_group(context, converted, dtype)


def _can_group(context: StrategyContext, converted: MegatronModelConfig, dtype: torch.dtype) -> bool:
    kernels = torch.cuda.is_available() and _has("grouped_gemm") and dtype == torch.bfloat16
    return kernels or uses_transformer_engine(context, converted, dtype)


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
    specs: Any,
    *,
    first: bool,
    last: bool,
) -> Any:
    value = context.head != "lm"
    arguments = dict(converted.model)
    arguments["vocab_size"] = padded_vocab_size(converted.vocab_size, config.tensor_model_parallel_size)
    if value:
        arguments["share_embeddings_and_output_weights"] = False
    chunk = _trunk_class()(
        config=config,
        transformer_layer_spec=specs,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        vp_stage=vp_stage,
        **arguments,
    )
    set_rotary(chunk, converted)
    for name, module in chunk.named_modules():
        if converted.family.experts.biased and re.search(r"local_experts\.\d+\.linear_fc2$", name):
            module.register_forward_hook(_copy_output)
            # No tensor-parallel rank has another's tokens or experts: nothing is summed, nothing is counted twice.
            module.bias.sequence_parallel, module.bias.tensor_model_parallel = False, True  # type: ignore[union-attr]
    # Routers, gates of shared experts and the norms of ``modules`` are made in host memory, whatever else there is.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chunk.to(device, config.params_dtype)
    if value and last:
        del chunk.output_layer
        chunk.value_head = ValueHead(config.hidden_size, bias=context.head == "value").to(device)
    return chunk


def _copy_output(module: nn.Module, args: object, found: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Megatron adds an expert's bias in place, to what may be a view of its own function for tensor-parallel ranks."""
    return found[0].clone(), found[1]


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
        """A model that ends with its final norm, and places the tokens of a ``PlannedRow`` by their positions."""

        angles: Callable[[Tensor], Tensor]
        """Of tokens by the positions that a model with a tower gives them, see ``pictures``."""

        def _preprocess(
            self, *args: Any, position_ids: Tensor | None, packed_seq_params: Any = None, **kwargs: Any
        ) -> tuple[Any, ...]:
            embedded, rotary, *others = super()._preprocess(
                *args, position_ids=position_ids, packed_seq_params=packed_seq_params, **kwargs
            )
            if position_ids is not None:
                rotary = self.angles(position_ids)
            elif isinstance(packed_seq_params, PlannedRow):
                rotary = rotary.index_select(0, packed_seq_params.positions_C)
            return embedded, rotary, *others

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


def _machine_problems(
    context: StrategyContext, converted: MegatronModelConfig, options: MegatronConfig, dtype: torch.dtype
) -> Iterator[ConfigProblem]:
    """Options for which this machine has not the kernels."""
    engine = uses_transformer_engine(context, converted, dtype)
    if options.moe_grouped_gemm is True and not _can_group(context, converted, dtype):
        needs = "a GPU, TransformerEngine without lora_target (or grouped_gemm) and dtype bf16"
        yield options.problem("moe_grouped_gemm", f"auto or false without {needs}")
    if "moe_act" in (options.recompute_modules or ()) and not groups_experts(context, converted, options, dtype):
        yield options.problem("recompute_modules", "no moe_act where moe_grouped_gemm is not possible")
    if options.fp8 and not engine:
        yield options.problem("fp8", "null without a GPU, TransformerEngine and dtype bf16, and with lora_target")
    if options.attention_backend not in (None, "auto") and not engine:
        needs = "a GPU, TransformerEngine and dtype bf16, and with lora_target"
        yield options.problem("attention_backend", f"null without {needs}")
