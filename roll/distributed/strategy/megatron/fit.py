"""Fit of a model to a layout: sizes that must divide, layers per stage, options for experts. Needs no Megatron."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from roll.configs.engines.megatron import MegatronConfig
from roll.configs.problems import ConfigProblem, Words, show
from roll.models.freezing import FREEZE, RATES
from roll.models.megatron.config import LANGUAGE, MegatronModelConfig, megatron_config, parallel_size_problems
from roll.models.megatron.names import adaptable_layers, at_odds, layer_entries, module_parts, torn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from roll.configs.rl import RLConfig
    from roll.configs.worker import WorkerConfig

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
VIRTUAL = "virtual_pipeline_model_parallel_size"
FOR_EXPERTS = (
    "expert_tensor_parallel_size",
    "moe_layer_recompute",
    "moe_token_dispatcher_type",
    "moe_grouped_gemm",
    "moe_shared_expert_overlap",
    "moe_aux_loss_coeff",
    "freeze_moe_router",
)
"""Options that say nothing to a dense model; ``expert_model_parallel_size`` is one of the sizes."""


def check_model(role: str, worker: WorkerConfig, sizes: PreTrainedConfig, config: RLConfig) -> Iterator[ConfigProblem]:
    """Problems of a role's options with a model, keys relative to the role."""
    options, base = worker.strategy_args.typed(), "strategy_args.strategy_config"
    assert isinstance(options, MegatronConfig)
    try:
        yield from (problem.under(base) for problem in check_model_fit(sizes, options))
    except ValueError as error:
        expected, name = "a strategy that can run the model, such as fsdp2_train", worker.strategy_args.strategy_name
        yield ConfigProblem("strategy_args.strategy_name", name, expected, str(error))


def check_adapter(worker: WorkerConfig, sizes: PreTrainedConfig, layers: Iterable[str]) -> Iterable[ConfigProblem]:
    """Problems of a role's options with an adapter, keys relative to the role, for a model that they fit."""
    options = worker.strategy_args.typed()
    assert isinstance(options, MegatronConfig)
    try:
        fits = not any(check_model_fit(sizes, options))
    except ValueError:
        fits = False
    return check_adapter_fit(sizes, options, layers, dropout=worker.model_args.lora_dropout) if fits else ()


def check_frozen(
    worker: WorkerConfig, sizes: PreTrainedConfig, frozen: Collection[str], rates: Mapping[str, float]
) -> Iterator[ConfigProblem]:
    """The first of Megatron's tensors of which a part is frozen, or learns, by itself; keys relative to the role."""
    try:
        converted = megatron_config(sizes)
    except ValueError:
        return  # told of elsewhere
    engine = worker.strategy_args.strategy_name
    trunks = "model.", f"model.{LANGUAGE}."  # a model with pictures has other names
    for layer, trunk in itertools.product(range(converted.num_layers), trunks):
        for entry in layer_entries(converted, layer, "sequential"):
            names = [f"{trunk}layers.{layer}.{hf.format(expert=0)}" for hf in entry.hf]
            held = {part for name in names for part in module_parts(name, converted)}
            if expected := torn(held, frozen):
                yield ConfigProblem(FREEZE, worker.model_args.freeze_module_prefix, f"with {engine} {expected}")
                return
            if expected := at_odds(held, rates):
                yield ConfigProblem(RATES, worker.training_args.learning_rate_of, f"with {engine} {expected}")
                return


def check_model_fit(hf_config: PreTrainedConfig, options: MegatronConfig) -> Iterator[ConfigProblem]:
    """Options of a layout that do not go together with a model, with the nearest right choice.

    Raises:
        ValueError: the model cannot be converted.
    """
    converted = megatron_config(hf_config)
    yield from parallel_size_problems(
        converted,
        tensor=options.tensor_model_parallel_size,
        expert=options.expert_model_parallel_size,
        expert_tensor=options.expert_tensor_parallel_size,
        context=options.context_parallel_size,
    )
    yield from [*_stage_problems(converted.num_layers, options)] or _recompute_problems(converted.num_layers, options)
    tensor, latent = options.tensor_model_parallel_size, converted.transformer.get("kv_lora_rank")
    if tensor > 1 and not options.sequence_parallel and (converted.num_experts or latent):
        what = "experts" if converted.num_experts else "latent attention"
        yield options.problem("sequence_parallel", f"true with {what} and tensor_model_parallel_size {tensor}")
    yield from _moe_problems(converted, options)


def check_adapter_fit(
    hf_config: PreTrainedConfig, options: MegatronConfig, layers: Iterable[str], *, dropout: float
) -> Iterator[ConfigProblem]:
    """Keys of a LoRA adapter that Megatron's layers cannot have, with the nearest right choice.

    Args:
        hf_config: of a model that can be converted.
        layers: Hugging Face names of the adapted layers.

    Returns:
        Problems with keys of the role's section.
    """
    converted = megatron_config(hf_config)
    known = list(adaptable_layers(converted))
    names = sorted({name.rpartition(".")[2] for name in known})
    base = "strategy_args.strategy_config"
    layers = list(layers)
    if left := sorted({name.rpartition(".")[2] for name in layers} - set(names)):
        expected = f"some of {', '.join(names)}"
        yield ConfigProblem("model_args.lora_target", Words(f"{', '.join(left)} among the layers"), expected)
    if dropout:
        yield ConfigProblem("model_args.lora_dropout", dropout, "0 with Megatron-Core")
    tensor, groups = options.tensor_model_parallel_size, converted.transformer["num_query_groups"]
    if tensor > groups and any(name.endswith((".q_proj", ".k_proj", ".v_proj")) for name in layers):
        expected = f"at most num_key_value_heads {groups} with an adapter on queries, keys or values"
        yield ConfigProblem(f"{base}.tensor_model_parallel_size", tensor, expected)
    if options.moe_shared_expert_overlap and any(".shared_expert" in name for name in layers):
        expected = "false with an adapter on the shared expert"
        yield ConfigProblem(f"{base}.moe_shared_expert_overlap", True, expected)


def _stage_problems(num_layers: int, options: MegatronConfig) -> Iterator[ConfigProblem]:
    """Layers that cannot be dealt out to the pipeline's stages."""
    stages, virtual = options.pipeline_model_parallel_size, options.virtual_stages or 1
    if options.num_layers_in_first_pipeline_stage is None and options.num_layers_in_last_pipeline_stage is None:
        chunks = stages * virtual
        if num_layers % chunks:
            seen = Words(f"{stages} x {VIRTUAL} {virtual} = {chunks}") if virtual > 1 else stages
            fits = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
            nearest = min(fits, key=lambda divisor: abs(divisor - chunks))
            expected = f"a divisor of num_hidden_layers {num_layers} (nearest: {nearest})"
            yield ConfigProblem("pipeline_model_parallel_size", seen, expected)
    elif stages > 1:  # one stage is refused by itself
        counts = _uneven_stages(num_layers, options)
        if isinstance(counts, ConfigProblem):
            yield counts
            return
        for where, count in counts.items():
            if count % virtual:
                yield ConfigProblem(VIRTUAL, virtual, f"a divisor of the {count} layers of a {where} stage")


def _uneven_stages(num_layers: int, options: MegatronConfig) -> dict[str, int] | ConfigProblem:
    """Layers of the first, the last and the other stages; a problem where they do not add up."""
    given = {"first": options.num_layers_in_first_pipeline_stage, "last": options.num_layers_in_last_pipeline_stage}
    counts = {where: count for where, count in given.items() if count is not None}
    stages, rest = options.pipeline_model_parallel_size, num_layers - sum(counts.values())
    others = stages - len(counts)
    if (rest == 0) if others == 0 else (rest > 0 and rest % others == 0):
        return counts | ({"middle": rest // others} if others else {})
    where = max(counts, key=lambda each: counts[each])
    key = FIRST if where == "first" else LAST
    # Leaving equally many, at least one, to each of the others.
    left = num_layers - sum(count for each, count in counts.items() if each != where)
    fits = [n for n in range(1, left + 1) if (n == left if others == 0 else left > n and (left - n) % others == 0)]
    near = f" (nearest: {min(fits, key=lambda n: abs(n - counts[where]))})" if fits else ""
    beside = "".join(f" and {count} in the {each} stage" for each, count in counts.items() if each != where)
    share = f"equally many for {others} other stage{'s' if others > 1 else ''}" if others else "none over"
    seen = Words(f"{counts[where]}{beside}") if beside else counts[where]
    return ConfigProblem(key, seen, f"to leave {share} of {num_layers} layers{near}")


def _recompute_problems(num_layers: int, options: MegatronConfig) -> Iterator[ConfigProblem]:
    """Groups of recomputed layers that do not fit the layers of a stage."""
    count = options.recompute_num_layers
    if count is None:
        return
    stages, virtual = options.pipeline_model_parallel_size, options.virtual_stages or 1
    given = options.num_layers_in_first_pipeline_stage or options.num_layers_in_last_pipeline_stage
    uneven = _uneven_stages(num_layers, options) if stages > 1 and given else None
    layers = {n // virtual for n in uneven.values()} if isinstance(uneven, dict) else {num_layers // stages // virtual}
    if options.recompute_method == "block" and count > max(layers):
        yield options.problem("recompute_num_layers", f"at most {max(layers)}, the layers of a stage")
    if options.recompute_method != "block" and any(n % count for n in layers):
        words = ", ".join(map(str, sorted(layers)))
        shared = [n for n in range(1, max(layers) + 1) if not any(each % n for each in layers)]
        near = min(shared, key=lambda n: abs(n - count))
        expected = f"with recompute_method uniform a divisor of the {words} layers of a stage (nearest: {near})"
        yield options.problem("recompute_num_layers", expected)


def _moe_problems(converted: MegatronModelConfig, options: MegatronConfig) -> Iterator[ConfigProblem]:
    """Options for experts that the model does not have, or that need others."""
    parts = [part for part in options.recompute_modules or () if part in ("moe", "moe_act", "shared_experts")]
    if not converted.num_experts:
        default = MegatronConfig()
        unread = [key for key in FOR_EXPERTS if getattr(options, key) != getattr(default, key)]
        words = f"({converted.model_class} has no experts)"
        yield from [options.problem(key, f"{show(getattr(default, key))} {words}") for key in unread]
        yield from [options.problem("recompute_modules", f"no {part} {words}") for part in parts]
        return
    if not converted.transformer.get("moe_shared_expert_intermediate_size"):
        words = f"({converted.model_class} has no shared expert)"
        if options.moe_shared_expert_overlap:
            yield options.problem("moe_shared_expert_overlap", f"false {words}")
        if "shared_experts" in parts:
            yield options.problem("recompute_modules", f"no shared_experts {words}")
