"""Rules between a role and its engine: options that exclude each other, that another role reads, that nobody reads."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.problems import ConfigProblem
from roll.configs.rl import RLConfig
from roll.configs.rules import TRAINED, ULYSSES, Rule, sections, valid_options
from roll.configs.strategy import DeepSpeedConfig, Fsdp2Config, MegatronConfig, VllmConfig
from roll.configs.worker import WorkerConfig

_OWN_ATTENTION = ("vllm", "sglang")
"""Strategies that choose among attention kernels of their own."""

_UPDATES = ("model_update_frequency",)
_TRAINING = (
    "use_dynamic_batching_in_train",
    "max_tokens_per_microbatch_in_train",
    "sequence_length_round_in_train",
)
_SCORING = (
    "infer_batch_size",
    "use_dynamic_batching_in_infer",
    "max_tokens_per_microbatch_in_infer",
    "sequence_length_round_in_infer",
    "use_sequence_packing",
)
_UNREAD = {
    "actor_infer": (_TRAINING + _SCORING + _UPDATES, "actor_infer generates; set it in actor_train"),
    "reference": (_TRAINING + _UPDATES, "reference only scores; set it in actor_train"),
    "critic": (_UPDATES, "weights go from actor_train to actor_infer; set it in actor_train"),
}
"""By role: keys that it never reads, and where they are read."""


def check_unread(config: RLConfig) -> list[ConfigProblem]:
    """No role is told what it never reads. What it says like ``actor_train`` may come from a shared section."""
    default = WorkerConfig()
    problems = []
    for role, worker in sections(config):
        keys, hint = _UNREAD.get(role, ((), ""))
        for key in keys:
            seen = getattr(worker, key)
            if seen not in (getattr(default, key), getattr(config.actor_train, key)):
                expected = f"nothing: {role} does not read it"
                involved = (f"actor_train.{key}",)
                problems.append(ConfigProblem(f"{role}.{key}", seen, expected, hint, involves=involved))
    return problems


def check_rounding(config: RLConfig) -> list[ConfigProblem]:
    """Lengths are not rounded beyond the longest sample, and a token budget holds that one when it is rounded."""
    problems = []
    for role, worker in sections(config):
        for phase in ("train", "infer"):
            key = f"sequence_length_round_in_{phase}"
            step, longest = getattr(worker, key), config.sequence_length
            budget = getattr(worker, budget_key := f"max_tokens_per_microbatch_in_{phase}")
            rounded = -(-longest // step) * step
            involved = ("sequence_length", f"{role}.{key}", f"{role}.{budget_key}")
            if step > longest:
                expected = f"at most sequence_length = {longest}"
                problems.append(ConfigProblem(f"{role}.{key}", step, expected, involves=involved))
            elif longest <= budget < rounded and not worker.use_sequence_packing:
                expected = f"at least {rounded}: sequence_length {longest} rounded up to a multiple of {key} {step}"
                problems.append(ConfigProblem(f"{role}.{budget_key}", budget, expected, involves=involved))
    return problems


def check_precision(config: RLConfig) -> list[ConfigProblem]:
    """Nothing is trained in fp16, and FlashAttention computes in 16 bits."""
    problems = []
    for role, worker in sections(config):
        key, dtype = compute_dtype(role, worker)
        involved = (f"{role}.strategy_args.strategy_name", f"{role}.model_args.dtype")
        if dtype == "fp16" and role in TRAINED:
            expected = "bf16 or fp32: training in fp16 would need loss scaling"
            seen = True if key.endswith(".enabled") else dtype
            problems.append(ConfigProblem(key, seen, expected, involves=involved))
        name = worker.strategy_args.strategy_name
        if dtype == "fp32" and worker.model_args.attn_implementation == "fa2" and name.startswith(ULYSSES):
            path = f"{role}.model_args.attn_implementation"
            expected = f"sdpa with {key} fp32, or dtype bf16: FlashAttention computes in 16 bits"
            problems.append(ConfigProblem(path, "fa2", expected, involves=(*involved, key)))
    return problems


def compute_dtype(role: str, worker: WorkerConfig) -> tuple[str, str | None]:
    """The key that says what a role's model computes in, and its value; ``None``: the checkpoint decides."""
    options = valid_options(worker)
    base = f"{role}.strategy_args.strategy_config"
    if isinstance(options, Fsdp2Config) and options.param_dtype is not None:
        return f"{base}.param_dtype", options.param_dtype
    if isinstance(options, DeepSpeedConfig) and options.precision is not None:
        section = "fp16" if options.precision == "fp16" else "bf16"
        return f"{base}.{section}.enabled", options.precision
    return f"{role}.model_args.dtype", worker.model_args.dtype


def check_attention(config: RLConfig) -> list[ConfigProblem]:
    """``attn_implementation`` is said to engines that read it, and Ulysses has a kernel that it can share."""
    problems = []
    for role, worker in sections(config):
        name, args = worker.strategy_args.strategy_name, worker.model_args
        kernel, path = args.attn_implementation, f"{role}.model_args.attn_implementation"
        involved = (f"{role}.strategy_args.strategy_name", "actor_train.model_args.attn_implementation")
        shared = role != "actor_train" and kernel == config.actor_train.model_args.attn_implementation
        if kernel in ("eager", "fa2") and name in _OWN_ATTENTION and not shared:
            expected = f"auto or sdpa with {name}, which has kernels of its own"
            hint = f"strategy_config.attention_backend chooses one of {name}'s"
            problems.append(ConfigProblem(path, kernel, expected, hint, involves=involved))
        if kernel == "eager" and args.ulysses_size > 1 and name.startswith(ULYSSES):
            expected = f"sdpa or fa2 with ulysses_size {args.ulysses_size}"
            also = (*involved, f"{role}.model_args.ulysses_size")
            problems.append(ConfigProblem(path, kernel, expected, involves=also))
    return problems


def check_megatron(config: RLConfig) -> list[ConfigProblem]:
    """Experts can be dealt out to the workers of a stage; recomputation is on where it is described."""
    problems: list[ConfigProblem] = []
    for role, worker in sections(config):
        options = valid_options(worker)
        if isinstance(options, MegatronConfig) and worker.num_workers % options.model_parallel_size == 0:
            problems += _expert_problems(role, worker, options)
            problems += _recompute_problems(role, worker, options)
    return problems


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
            expected = "recompute_granularity full, or no such key: nothing is computed again"
            hint = "model_args.disable_gradient_checkpointing is true"
            involved = (f"{base}.recompute_granularity", f"{role}.model_args.disable_gradient_checkpointing")
            yield ConfigProblem(f"{base}.{key}", seen, expected, hint, involves=involved)


def check_context(config: RLConfig) -> list[ConfigProblem]:
    """A generator's context holds a whole sample."""
    options = valid_options(config.actor_infer)
    if (
        not isinstance(options, VllmConfig)
        or (options.max_model_len or config.sequence_length) >= config.sequence_length
    ):
        return []
    path = "actor_infer.strategy_args.strategy_config.max_model_len"
    expected = f"null, or at least sequence_length = {config.sequence_length}"
    return [ConfigProblem(path, options.max_model_len, expected, involves=("sequence_length",))]


ENGINE_RULES: tuple[Rule, ...] = (
    check_unread,
    check_rounding,
    check_precision,
    check_attention,
    check_megatron,
    check_context,
)
