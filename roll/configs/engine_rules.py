"""Rules between a role and its engine: options that exclude each other, or that this role does not read."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.engines.card import kind_of, task_of
from roll.configs.pipeline import PipelineConfig
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.rl import RLConfig
from roll.configs.rules import TRAINED, Rule, sections
from roll.configs.worker import WorkerConfig

_UPDATES = ("model_update_frequency",)
_EXPERTS = ("router_replay",)
_TRAINING = (
    "use_dynamic_batching_in_train",
    "max_tokens_per_microbatch_in_train",
    "max_pixels_per_microbatch_in_train",
    "sequence_length_round_in_train",
)
_SCORING = (
    "infer_batch_size",
    "use_dynamic_batching_in_infer",
    "max_tokens_per_microbatch_in_infer",
    "max_pixels_per_microbatch_in_infer",
    "sequence_length_round_in_infer",
    "use_sequence_packing",
)
UNREAD = {
    "actor_infer": (_TRAINING + _SCORING + _UPDATES + _EXPERTS, "actor_infer generates; set it in actor_train"),
    "reference": (_TRAINING + _UPDATES + _EXPERTS, "reference only computes log-probs; set it in actor_train"),
    "teacher": (_TRAINING + _UPDATES + _EXPERTS, "teacher only computes log-probs; set it in actor_train"),
    "critic": (_UPDATES + _EXPERTS, "it applies to the policy; set it in actor_train"),
}
"""By role: keys that it never reads, and where they are read."""


def check_unread(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """No role is told what it never reads. What it says like ``actor_train`` may come from a shared section."""
    default = WorkerConfig()
    for role, worker in sections(config):
        keys, hint = UNREAD.get(kind_of(role), ((), ""))
        card = worker.strategy_args.card
        if task_of(role) == "scores" and card is not None and card.scores_prompts:
            keys, hint = keys + _SCORING, f"{worker.strategy_args.strategy_name} forms batches itself"
        for key in keys:
            got = getattr(worker, key)
            if got not in (getattr(default, key), getattr(config.actor_train, key)):
                expected = f"nothing: {role} does not read it"
                involved = (f"actor_train.{key}", f"{role}.strategy_args.strategy_name")
                yield ConfigProblem(f"{role}.{key}", got, expected, hint, involves=involved)


def check_rounding(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Lengths are not rounded beyond the longest sample, and a token budget holds that one when it is rounded."""
    for role, worker in sections(config):
        for phase in ("train", "infer"):
            key = f"sequence_length_round_in_{phase}"
            step, longest = getattr(worker, key), config.sequence_length
            budget = getattr(worker, budget_key := f"max_tokens_per_microbatch_in_{phase}")
            rounded = -(-longest // step) * step
            involved = ("sequence_length", f"{role}.{key}", f"{role}.{budget_key}")
            if step > longest:
                expected = f"at most sequence_length = {longest}"
                yield ConfigProblem(f"{role}.{key}", step, expected, involves=involved)
            elif longest <= budget < rounded and not worker.use_sequence_packing:
                expected = f"at least {rounded}: sequence_length {longest} rounded up to a multiple of {key} {step}"
                yield ConfigProblem(f"{role}.{budget_key}", budget, expected, involves=involved)


def check_precision(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Nothing is trained in fp16, and FlashAttention computes in 16 bits."""
    for role, worker in sections(config):
        key, dtype = compute_dtype(role, worker)
        involved = (f"{role}.strategy_args.strategy_name", f"{role}.model_args.dtype")
        if dtype == "fp16" and role in TRAINED:
            expected = "bf16 or fp32: training in fp16 would need loss scaling"
            got = True if key.endswith(".enabled") else dtype
            yield ConfigProblem(key, got, expected, involves=involved)
        card = worker.strategy_args.card
        if dtype == "fp32" and worker.model_args.attn_implementation == "fa2" and card and card.trains_modules:
            path = f"{role}.model_args.attn_implementation"
            expected = f"sdpa with {key} fp32, or dtype bf16: FlashAttention computes in 16 bits"
            yield ConfigProblem(path, "fa2", expected, involves=(*involved, key))


def check_optimizer(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """A trained role has an optimizer that its engine can step with, and Muon whole matrices to orthogonalise."""
    for role, worker in sections(config):
        got, card = worker.training_args.optimizer, worker.strategy_args.card
        path, strategy = f"{role}.training_args.optimizer", f"{role}.strategy_args.strategy_name"
        if rates := worker.training_args.learning_rate_of:
            key, lora = f"{role}.training_args.learning_rate_of", f"{role}.model_args.lora_target"
            if role not in TRAINED:
                yield ConfigProblem(key, rates, f"nothing: {role} trains nothing")
            elif card is not None and not card.rates_parts:
                expected = f"nothing with {worker.strategy_args.strategy_name}, which has one rate for all"
                yield ConfigProblem(key, rates, expected, involves=(strategy,))
            elif role == "actor_train" and config.uses_lora:
                yield ConfigProblem(key, rates, f"nothing with {lora}: the model's own parts stay", involves=(lora,))
        if role not in TRAINED or got == "adamw":
            continue
        if card is not None and got not in card.optimizers:
            expected = f"{' or '.join(card.optimizers)} with {worker.strategy_args.strategy_name}"
            hint = "only fsdp2_train gathers whole matrices, which muon needs"
            yield ConfigProblem(path, got, expected, hint, involves=(strategy,))
        if role == "actor_train" and config.uses_lora:
            key = f"{role}.model_args.lora_target"
            expected = f"adamw with {key}: a factor of an adapter is not the matrix that the layer multiplies by"
            yield ConfigProblem(path, got, expected, involves=(key,))


def compute_dtype(role: str, worker: WorkerConfig) -> tuple[str, str | None]:
    """The key that says what a role's model computes in, and its value; ``None``: the checkpoint decides."""
    if own := worker.strategy_args.typed().own_dtype:
        return f"{role}.strategy_args.strategy_config.{own[0]}", own[1]
    return f"{role}.model_args.dtype", worker.model_args.dtype


def no_pictures(config: PipelineConfig) -> str:
    """Why a run's prompts must have no pictures, in words; empty: they may."""
    if (agent := getattr(config, "agent", None)) is not None and not agent.pictures:
        return "agent is set without agent.pictures: programs get text"
    if getattr(config, "teacher_prompt", None) is not None:
        return "teacher_prompt is set, and it is text"
    for role, worker in config.roles.items():
        card = worker.strategy_args.card
        if card is not None and (why := card.no_pictures(worker)):
            return f"{role}'s {worker.strategy_args.strategy_name} {why}"
    chosen = config.actor_train.strategy_args
    if config.trains_scores and chosen.card is not None and not chosen.card.scores_pictures:
        return f"actor_train's {chosen.strategy_name} has not trained a reward model that sees"
    return ""


def no_videos(config: PipelineConfig) -> str:
    """Likewise no videos, where they may have pictures."""
    if getattr(config, "agent", None) is not None:
        return "agent is set: programs get text and pictures"
    if config.trains_scores:
        return "reward models have not been compared with plain Transformers on videos"
    for role, worker in config.roles.items():
        card = worker.strategy_args.card
        if card is not None and (why := card.no_videos(worker)):
            return f"{role}'s {worker.strategy_args.strategy_name} {why}"
    return ""


def check_attention(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """``attn_implementation`` is said to engines that read it, and Ulysses has a kernel that it can share."""
    for role, worker in sections(config):
        name, card, args = worker.strategy_args.strategy_name, worker.strategy_args.card, worker.model_args
        if card is None:
            continue
        kernel, path = args.attn_implementation, f"{role}.model_args.attn_implementation"
        involved = (f"{role}.strategy_args.strategy_name", "actor_train.model_args.attn_implementation")
        shared = role != "actor_train" and kernel == config.actor_train.model_args.attn_implementation
        if kernel in ("eager", "fa2") and card.own_attention and not shared:
            expected = f"auto or sdpa with {name}, which has its own kernels"
            hint = f"strategy_config.attention_backend chooses one of {name}'s"
            yield ConfigProblem(path, kernel, expected, hint, involves=involved)
        if kernel == "eager" and args.ulysses_size > 1 and card.trains_modules:
            expected = f"sdpa or fa2 with ulysses_size {args.ulysses_size}"
            also = (*involved, f"{role}.model_args.ulysses_size")
            yield ConfigProblem(path, kernel, expected, involves=also)


def check_hidden_states(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """A comparison over the whole vocabulary takes hidden states, which who scores prompts does not send."""
    whole = config.divergence is not None and config.divergence.logits_topk is None
    needs = {
        "teacher": ("logits_topk", NOTHING, "a number of top tokens", whole),
        "reference": ("kl_penalty", "full", "an estimator such as k3", config.uses_full_kl),
    }
    for role, worker in sections(config):
        name, card = worker.strategy_args.strategy_name, worker.strategy_args.card
        if role not in needs or card is None or not card.scores_prompts:
            continue
        path = f"{role}.strategy_args.strategy_name"
        key, got, expected, wanted = needs[role]
        if wanted:
            expected = f"{expected} with {path} {name}, which returns no hidden states"
            yield ConfigProblem(key, got, expected, involves=(path,))


def check_router_replay(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Experts are taken again where somebody has chosen them, told so, and trains with them."""
    key, mode = "actor_train.router_replay.mode", config.actor_train.router_replay.mode
    if mode == "disable":
        return
    if not isinstance(config, RLConfig):
        yield ConfigProblem(key, mode, "disable: without rollouts there are no experts to replay")
        return
    name, card = config.actor_train.strategy_args.strategy_name, config.actor_train.strategy_args.card
    if card is None or not card.replays_experts:
        expected = f"disable with {name}, which cannot replay experts"
        yield ConfigProblem(key, mode, expected, involves=("actor_train.strategy_args.strategy_name",))
    if mode == "R2" and config.leaves_rollouts_unscored:
        expected = "R3 or disable if the trainer computes no log-probs before it trains on rollouts"
        involved = ("train_infer_correction.bypass", "force_disable_old_logprobs_recompute", "online_dpo")
        yield ConfigProblem(key, mode, expected, involves=involved)
    name, card = config.actor_infer.strategy_args.strategy_name, config.actor_infer.strategy_args.card
    if mode == "R3" and (card is None or not card.tells_experts):
        expected = f"R2 or disable with {name}, which does not report the experts that it chose"
        yield ConfigProblem(key, mode, expected, involves=("actor_infer.strategy_args.strategy_name",))


def check_kept_sets(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Kept sets are told by the generator, and all log-probs that are compared are among them."""
    if not isinstance(config, RLConfig) or not (most := config.train_infer_correction.replay_kept_sets):
        return
    key = "train_infer_correction.replay_kept_sets"
    for role, worker in sections(config):
        name, card = worker.strategy_args.strategy_name, worker.strategy_args.card
        involved = (f"{role}.strategy_args.strategy_name",)
        if role == "actor_infer" and (card is None or not card.tells_kept_sets):
            expected = f"0 with {name}, which does not tell the sets that it samples from; hf_infer does"
            yield ConfigProblem(key, most, expected, involves=involved)
        if role in ("actor_train", "reference") and (card is None or not card.scores_kept_sets):
            expected = f"0 with {role}'s {name}, which computes log-probs over the whole vocabulary"
            yield ConfigProblem(key, most, expected, involves=involved)
    whole = {"a teacher": bool(config.teacher_roles), "online_dpo": getattr(config, "online_dpo", None) is not None}
    for what in (name for name, is_on in whole.items() if is_on):
        yield ConfigProblem(key, most, f"0 with {what}, which compares whole distributions")


ENGINE_RULES: tuple[Rule, ...] = (
    check_unread,
    check_rounding,
    check_precision,
    check_optimizer,
    check_attention,
    check_hidden_states,
    check_router_replay,
    check_kept_sets,
)
