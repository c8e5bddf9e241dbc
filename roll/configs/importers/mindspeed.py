"""MindSpeed RL's configurations: what several of its keys say together."""

from __future__ import annotations

from typing import Any

from roll.configs.importers.common import (
    GPUS_OF_A_NODE,
    devices,
    drop_unread,
    set_batch,
    set_budget,
    tidy_engines,
    to_do,
    use_wandb,
)
from roll.configs.importers.draft import Draft, Kind
from roll.configs.importers.profiling import profiler_of_mindspeed
from roll.configs.importers.verl_tools import read_tools, set_form
from roll.configs.pipeline import PARTS
from roll.configs.rlvr import RLVRConfig

MEGATRON, RL, GENERATE = "megatron_training", "rl_config", "generate_config"
ACTOR, CRITIC = "actor_config", "critic_config"
_OPTIONS = "strategy_args.strategy_config"
_VERIFIERS = {
    "acc": "math",
    "base_acc": "math",
    "math_17k_acc": "math",
    "math_verify_reward": "math",
    "acc_for_dapo": "math",
    "acc_for_ppo": "math",
    "format": "format",
    "strict_format": "format",
    "base_model_format": "format",
}
_SHARED = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel")


def derive(draft: Draft) -> type[RLVRConfig]:
    """Everything that no row of the table says by itself; returns whose configuration it is."""
    draft.set("actor_train.strategy_args.strategy_name", "megatron_train")
    draft.set("actor_infer.strategy_args.strategy_name", "vllm")
    _model_and_data(draft)
    _tools(draft)
    _algorithm(draft)
    _checkpoints(draft)
    _trackers(draft)
    _roles(draft)
    _rewards(draft)
    _batches(draft)
    drop_unread(draft)
    tidy_engines(draft)
    profiler_of_mindspeed(draft)
    return RLVRConfig


def _model_and_data(draft: Draft) -> None:
    draft.carry_set(f"{MEGATRON}.tokenizer_name_or_path", "pretrain", note="the folder in Hugging Face format")
    if draft.has(f"{ACTOR}.load"):
        note = "Megatron's checkpoints are not read: see that pretrain is the same model in Hugging Face format"
        to_do(draft, f"{ACTOR}.load", note, draft.theirs(f"{ACTOR}.load"))
    data = "actor_train.data_args"
    if path := draft.theirs(f"{MEGATRON}.data_path"):
        draft.derive(f"{MEGATRON}.data_path", f"{data}.file_name", path)
        note = "name the rows that it was tokenised from: JSON lines, the question in problem, the answer in answer"
        to_do(draft, f"{MEGATRON}.data_path", note, path)
    for key, column in (("prompt", "problem"), ("response", "answer"), ("default_tag", "math")):
        draft.set(f"{data}.{key}", column)
    draft.set(f"{data}.prompt_overflow", "drop")
    whole = int(draft.get("prompt_length")) + int(draft.get("response_length"))
    draft.derive([f"{RL}.max_prompt_length", f"{GENERATE}.sampling_config.max_tokens"], "sequence_length", whole)
    _least_rate(draft, ACTOR, "actor_train")


def _least_rate(draft: Draft, theirs: str, role: str) -> None:
    """The rate at which a schedule ends, as a share of its peak."""
    rate, least = draft.get(f"{role}.training_args.learning_rate"), draft.theirs(f"{theirs}.min_lr")
    if rate and least and float(least) > 0:
        ratio = min(1.0, float(least) / float(rate))
        draft.derive([f"{theirs}.min_lr", f"{theirs}.lr"], f"{role}.training_args.min_lr_ratio", ratio)


def _tools(draft: Draft) -> None:
    """The section ``tools``, of what the file beside the run's says; its form is that of verl's."""
    switch, file, total = f"{RL}.multi_turn_enable", f"{RL}.tool_config_path", f"{RL}.max_total_response_length"
    if not draft.theirs(switch):
        return
    if not draft.theirs(file):
        note = "no tool_config_path says which tools there are: name them in tools.use or tools.servers"
        draft.tell(Kind.IMPOSSIBLE, switch, True, "tools", note=note)
        return
    if not read_tools(draft, file) or not draft.get("tools"):
        return
    draft.tell(Kind.DERIVED, switch, True, "tools")
    draft.carry_set(f"{RL}.max_tool_calls", "tools.max_turns", int, "turns with calls")
    draft.carry_set(f"{RL}.max_parallel_calls", "tools.max_parallel_calls", int)
    draft.carry_set(f"{RL}.max_tool_response_length", "tools.max_tool_response_tokens", int)
    set_form(draft, f"{RL}.tool_response_truncate_side", f"{RL}.tool_parser_format")
    if draft.theirs(total):  # of all turns and results of an episode together
        whole, note = int(draft.theirs(total)), "the prompt, and all turns and results of an episode"
        prompt = int(draft.get("prompt_length"))
        draft.derive([total, f"{RL}.max_prompt_length"], "sequence_length", prompt + whole, note)
        draft.set("response_length", min(int(draft.get("response_length")), whole))


def _algorithm(draft: Draft) -> None:
    stage = str(draft.theirs(f"{MEGATRON}.stage"))
    if stage == "ray_ppo":
        draft.derive(f"{MEGATRON}.stage", "adv_estimator", "gae")
    elif stage not in ("ray_grpo", "ray_dapo"):
        draft.tell(Kind.IMPOSSIBLE, f"{MEGATRON}.stage", stage, note="there are ray_grpo, ray_dapo and ray_ppo")
    note = "the mean over all tokens, of a micro-batch there and of an optimizer step here"
    draft.derive([f"{RL}.token_level_loss", f"{MEGATRON}.stage"], "loss_agg_mode", "token-mean", note)
    coefficient = float(draft.theirs(f"{RL}.init_kl_coef"))
    draft.derive(f"{RL}.init_kl_coef", "kl_loss_coef", coefficient, "a loss there; the same name is the reward's here")
    draft.derive(f"{RL}.init_kl_coef", "use_kl_loss", coefficient > 0)
    if (kind := draft.theirs(f"{RL}.kl_ctrl_type")) != "fixed" and coefficient > 0:
        target = draft.theirs(f"{RL}.kl_target")
        if kind == "adaptive" and target:
            draft.derive([f"{RL}.kl_target", f"{RL}.kl_ctrl_type"], "kl_loss_target", float(target))
            draft.carry_set(f"{RL}.kl_horizon", "kl_horizon", int)
        else:
            note = "adaptive needs a target: write kl_loss_target"
            draft.tell(Kind.IMPOSSIBLE, f"{RL}.kl_ctrl_type", kind, note=note)
    if draft.has(f"{RL}.clip_ratio_low") and not draft.theirs(f"{RL}.clip_higher_enable", True):
        draft.remove("use_pg_clip_range")


def _checkpoints(draft: Draft) -> None:
    for verb in ("save", "load"):
        keys = {f"{ACTOR}.no_{verb}_optim": "optimizer", f"{ACTOR}.no_{verb}_rng": "rng"}
        without = {part for key, part in keys.items() if draft.theirs(key)}
        if without:
            parts = [part for part in PARTS if part not in without]
            draft.derive(list(keys), f"checkpoint_config.{verb}_contents", parts)


def _trackers(draft: Draft) -> None:
    if draft.theirs(f"{RL}.use_wandb"):
        names = {"wandb_project": "project", "wandb_exp_name": "name", "wandb_save_dir": "log_dir"}
        use_wandb(draft, RL, "use_wandb", names)
    elif not draft.theirs(f"{RL}.use_tensorboard"):
        draft.derive(f"{RL}.use_tensorboard", "track_with", "stdout", "neither tensorboard nor wandb")


def _roles(draft: Draft) -> None:
    count = int(draft.theirs(f"{RL}.actor_resource.num_npus"))
    if (nodes := -(-count // GPUS_OF_A_NODE)) > 1:
        note = f"of {GPUS_OF_A_NODE} devices; on machines with more give num_nodes and num_gpus_per_node"
        draft.derive(f"{RL}.actor_resource.num_npus", "num_nodes", nodes, note)
    roles = ["actor_train", "actor_infer", *(["reference"] if draft.get("use_kl_loss") else [])]
    for role in roles:
        draft.derive(f"{RL}.actor_resource.num_npus", f"{role}.device_mapping", devices(0, count))
    if draft.get("adv_estimator") == "gae":
        _critic(draft, count)
    if "reference" in roles:
        base = "reference.strategy_args"
        draft.derive(ACTOR, f"{base}.strategy_name", "megatron_infer")
        for key in _SHARED:
            if (value := draft.get(f"actor_train.{_OPTIONS}.{key}")) is not None:
                draft.set(f"{base}.strategy_config.{key}", value)
        draft.set("reference.model_args.dtype", draft.get("actor_train.model_args.dtype"))
        draft.carry_set(f"{RL}.ref_forward_micro_batch_size", "reference.infer_batch_size", int)
    limit = draft.theirs(f"{GENERATE}.max_model_len")
    if limit and int(limit) >= draft.get("sequence_length"):
        draft.derive(f"{GENERATE}.max_model_len", f"actor_infer.{_OPTIONS}.max_model_len", int(limit))
    elif limit:
        note = f"the engine holds a whole sample of {draft.get('sequence_length')} tokens"
        draft.tell(Kind.DROPPED, f"{GENERATE}.max_model_len", limit, note=note)
    if int(draft.theirs(f"{GENERATE}.infer_expert_parallel_size", 1) or 1) > 1:
        key = f"actor_infer.{_OPTIONS}.enable_expert_parallel"
        draft.derive(f"{GENERATE}.infer_expert_parallel_size", key, True)


def _critic(draft: Draft, count: int) -> None:
    """The critic of ``ray_ppo``: the actor's engine, devices of its own where the workers are apart."""
    draft.derive(f"{MEGATRON}.stage", "critic.strategy_args.strategy_name", "megatron_train")
    draft.set("critic.model_args.dtype", draft.get("actor_train.model_args.dtype"))
    key = f"{RL}.critic_resource.num_npus"
    own = int(draft.theirs(key) or count)
    first = 0 if draft.theirs(f"{RL}.use_integrated_worker") else count
    draft.derive(key, "critic.device_mapping", devices(first, own))
    if (nodes := -(-(first + own) // GPUS_OF_A_NODE)) > int(draft.get("num_nodes") or 1):
        draft.derive(key, "num_nodes", nodes, f"of {GPUS_OF_A_NODE} devices")
    _least_rate(draft, CRITIC, "critic")
    draft.derive(f"{RL}.cliprange_value", "value_clip", float(draft.theirs(f"{RL}.cliprange_value", 0.5)))
    whitens = bool(draft.theirs(f"{RL}.advantage_whiten", True))
    draft.derive(f"{RL}.advantage_whiten", "whiten_advantages", whitens, "gae whitens there")


def _rewards(draft: Draft) -> None:
    names, weights = draft.theirs(f"{RL}.verifier_function"), draft.theirs(f"{RL}.verifier_weight")
    verifiers: list[dict[str, Any]] = []
    for number, name in enumerate(names or ["acc"]):
        verifier = _VERIFIERS.get(str(name))
        if verifier is None:
            note = "no verifier takes its place: write one, or a function for the verifier custom"
            draft.tell(Kind.IMPOSSIBLE, f"{RL}.verifier_function", name, note=note)
            continue
        weight = float(weights[number]) if isinstance(weights, list) and number < len(weights) else 1.0
        verifiers.append({"name": verifier, **({"weight": weight} if weight != 1.0 else {})})
    domain: dict[str, Any] = {"tag_included": ["math"], "verifiers": verifiers or [{"name": "math"}]}
    if draft.theirs(f"{RL}.verifier_timeout"):
        domain["timeout"] = float(draft.theirs(f"{RL}.verifier_timeout"))
    if draft.theirs(f"{RL}.verifier_parallel"):
        domain["num_processes"] = int(draft.theirs(f"{RL}.verifier_parallel"))
    if draft.theirs(f"{RL}.filter_groups_enable"):
        domain["query_filter_config"] = {"type": "std_filter"}
    draft.derive([f"{RL}.verifier_function", f"{RL}.verifier_weight"], "rewards.math", domain)


def _batches(draft: Draft) -> None:
    per_step = int(draft.get("rollout_batch_size")) * int(draft.get("num_return_sequences_in_group"))
    prompts, wanted = int(draft.get("rollout_batch_size")), int(draft.theirs(f"{RL}.mini_batch_size"))
    if wanted <= prompts:  # newer releases count prompts, older ones samples
        wanted *= int(draft.get("num_return_sequences_in_group"))
    keys = [f"{RL}.mini_batch_size", f"{ACTOR}.micro_batch_size"]
    dynamic = bool(draft.theirs(f"{RL}.use_dynamic_bsz"))
    micro = None if dynamic else int(draft.theirs(f"{ACTOR}.micro_batch_size"))
    samples = wanted if draft.has(f"{RL}.mini_batch_size") else per_step
    set_batch(draft, "actor_train", samples, micro, keys, per_step)
    if draft.get("adv_estimator") == "gae":
        size = draft.theirs(f"{CRITIC}.micro_batch_size") or micro
        set_batch(draft, "critic", samples, int(size) if size else None, [f"{CRITIC}.micro_batch_size"], per_step)
    if dynamic:
        budget = int(draft.theirs(f"{RL}.max_packing_token_size", 0) or 0)
        set_budget(draft, "actor_train", "train", budget, [f"{RL}.use_dynamic_bsz", f"{RL}.max_packing_token_size"])
