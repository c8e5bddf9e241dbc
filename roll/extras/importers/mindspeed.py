"""MindSpeed RL's configurations: keys that are converted together."""

from __future__ import annotations

from typing import Any

from roll.configs.offline import OfflineConfig, SFTConfig
from roll.configs.pipeline import PARTS, PipelineConfig
from roll.configs.preference import DPOConfig, RewardTrainingConfig
from roll.configs.rlvr import RLVRConfig
from roll.extras.importers.common import (
    ENGINE_OF_A_NODE,
    GPUS_OF_A_NODE,
    devices,
    devices_of,
    drop_unread,
    drop_unread_of_roles,
    parallel_sizes,
    profiler_of_mindspeed,
    set_batch,
    set_budget,
    tidy_engines,
    to_do,
    use_wandb,
)
from roll.extras.importers.draft import Draft, Kind
from roll.extras.importers.reading import Given
from roll.extras.importers.verl_tools import read_tools, set_form

MEGATRON, RL, GENERATE = "megatron_training", "rl_config", "generate_config"
ACTOR, CRITIC = "actor_config", "critic_config"
RUN = (MEGATRON, "sft", "reward")
"""Sections that say what a run is; each kind has one of them."""
_OFFLINE: dict[str, type[OfflineConfig]] = {"dpo": DPOConfig, "sft": SFTConfig, "orm": RewardTrainingConfig}
"""By ``stage``: the pipelines that train on given samples."""
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
_OF_ITS_OWN = {
    "lr": "learning_rate",
    "lr_decay_style": "lr_scheduler_type",
    "weight_decay": "weight_decay",
    "lr_warmup_fraction": "warmup_ratio",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
}
"""Keys that a critic may have of its own, and else of the training section."""
_SCORES = {
    "acc": "a wrong answer gets -0.5 there, one without a box -1",
    "base_acc": "there an answer scores only in the form <think>…</think> <answer>…</answer>, with one box",
    "strict_format": "another form gets -0.5 there",
}
"""Scores of theirs that are not 0 or 1 by the answer alone."""
_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's layers, by those that they are laid together from."""
_LEVEL = "constant_with_warmup"
_BUDGETS = (("actor_train", "train", "update"), ("actor_train", "infer", "actor"), ("reference", "infer", "ref"))
"""Role and phase of a token budget, and what their key begins with."""
_SHARED = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel")


def prepare(given: Given) -> None:
    """Spells keys with underscores, as theirs are read, and puts the section that others go before to the front."""
    for values in (given.values, given.links):
        for name, section in list(values.items()):
            if isinstance(section, dict):
                values[name] = {str(key).replace("-", "_"): value for key, value in section.items()}
        if ACTOR in values and MEGATRON in values:
            values[ACTOR] = values.pop(ACTOR)


def derive(draft: Draft) -> type[PipelineConfig]:
    """Everything that no row of the table says by itself; returns whose configuration it is."""
    draft.set("actor_train.strategy_args.strategy_name", "megatron_train")
    stage, key = _stage(draft)
    if stage in _OFFLINE:
        return _offline(draft, _OFFLINE[stage], key)
    draft.set("actor_infer.strategy_args.strategy_name", "vllm")
    _model_and_data(draft)
    _tools(draft)
    _algorithm(draft)
    _checkpoints(draft)
    _trackers(draft)
    _adapter(draft)
    _experts(draft)
    _roles(draft)
    _rewards(draft)
    _batches(draft)
    drop_unread(draft)
    tidy_engines(draft)
    profiler_of_mindspeed(draft)
    return RLVRConfig


def _stage(draft: Draft) -> tuple[str, str]:
    """What a run does, and the key that says it."""
    key = _said(draft, "stage", *RUN)
    return str(draft.theirs(key)), key


def _said(draft: Draft, name: str, *sections: str) -> str:
    """The key of a section that has a name; a section goes before those behind it, the first where none has it."""
    sections = sections or (ACTOR, *RUN)
    return next((key for section in sections if draft.has(key := f"{section}.{name}")), f"{sections[0]}.{name}")


def _offline(draft: Draft, schema: type[OfflineConfig], stage: str) -> type[OfflineConfig]:
    """A run on given samples: one section, no rollouts, and as many devices as ``torchrun`` starts."""
    generated = ("actor_infer", "reference", "rewards", "prompt_length", "response_length")
    for key in [key for key in draft.ours if key not in schema.model_fields or key in generated]:
        draft.forget(key)
    _model_and_data(draft, given=True)
    _checkpoints(draft)
    _trackers(draft)
    _adapter(draft)
    _experts(draft)
    count = parallel_sizes(draft, "actor_train")
    key = _said(draft, "tensor_model_parallel_size")
    draft.derive(key, "actor_train.device_mapping", devices(0, count))
    to_do(draft, key, f"torchrun says on how many devices: {count} hold the model", ours="actor_train.device_mapping")
    if (nodes := -(-count // GPUS_OF_A_NODE)) > 1:
        draft.derive(key, "num_nodes", nodes, f"of {GPUS_OF_A_NODE} devices")
    batch, micro = _said(draft, "global_batch_size", *RUN), _said(draft, "micro_batch_size")
    set_batch(draft, "actor_train", int(draft.theirs(batch)), int(draft.theirs(micro) or 1), [batch, micro])
    if schema is DPOConfig:
        loss = f"{MEGATRON}.dpo_loss_type"
        draft.derive([loss, stage], "preference_loss", str(draft.theirs(loss) or "sigmoid"))
        draft.derive(stage, "precompute_reference", True, "the untrained policy is the reference")
        reference, policy = draft.theirs(f"{MEGATRON}.ref_model"), draft.theirs(_said(draft, "load"))
        if reference and reference != policy:
            note = "the reference is pretrain: another model is reference_pretrain, in Hugging Face format"
            draft.tell(Kind.IMPOSSIBLE, f"{MEGATRON}.ref_model", reference, note=note)
    packed = _said(draft, "reset_position_ids", *RUN)
    if schema is SFTConfig and draft.theirs(packed):
        length = draft.theirs(_said(draft, "seq_length"))
        note = (
            f"a row of packed data holds samples up to {length} tokens there, {draft.theirs(batch)} such rows are a "
            "batch; a row is one sample here: raise gradient_accumulation_steps by the samples of a pack"
        )
        to_do(draft, packed, note, True, "actor_train.training_args.gradient_accumulation_steps")
    shares = str(draft.theirs(split := _said(draft, "split", *RUN)) or "").split(",")
    if len(shares) > 1 and float(shares[1] or 0) and draft.theirs(_said(draft, "eval_iters", *RUN)):
        every = int(draft.theirs(_said(draft, "eval_interval", *RUN)) or 1000)
        note = f"held-out rows are a file of their own here: name it in validation, with eval_steps {every}"
        to_do(draft, split, note, ",".join(shares))
    drop_unread_of_roles(draft)
    tidy_engines(draft)
    return schema


def _model_and_data(draft: Draft, *, given: bool = False) -> None:
    """Model, rows and lengths; ``given``: the rows hold the answers too."""
    tokenizer, rows = (_said(draft, name, *RUN) for name in ("tokenizer_name_or_path", "data_path"))
    draft.carry_set(tokenizer, "pretrain", note="the folder in Hugging Face format")
    load = _said(draft, "load")
    if not draft.theirs(tokenizer) and (checkpoint := draft.theirs(load)):
        draft.derive([tokenizer, load], "pretrain", checkpoint)
        to_do(draft, load, "no tokenizer is named: name the model in Hugging Face format", checkpoint, "pretrain")
    elif draft.has(load):
        note = "Megatron's checkpoints are not read: see that pretrain is the same model in Hugging Face format"
        to_do(draft, load, note, draft.theirs(load))
    data, columns = "actor_train.data_args", {"prompt": "problem", "response": "answer", "default_tag": "math"}
    said = "the question in problem, the answer in answer"
    if given:
        columns, said = (
            {"prompt": "instruction", "response": "output"},
            "the question in instruction, the answer in output",
        )
        if _stage(draft)[0] != "sft":
            columns, said = {"prompt": "prompt"}, "the question in prompt, the answers in chosen and rejected"
    if path := draft.theirs(rows):
        draft.derive(rows, f"{data}.file_name", path)
        to_do(draft, rows, f"name the rows that it was tokenised from: JSON lines, {said}", path, f"{data}.file_name")
    for key, column in columns.items():
        draft.set(f"{data}.{key}", column)
    if given:
        whole = _said(draft, "seq_length", *RUN)
        draft.carry_set(whole, "sequence_length", int)
        cut = "drop" if _stage(draft)[0] == "orm" else "truncate"
        note = "a longer one loses its end there" + ("; here the score is read at the end" if cut == "drop" else "")
        draft.derive(whole, "sample_overflow", cut, note)
    else:
        draft.set(f"{data}.prompt_overflow", "drop")
        both = int(draft.get("prompt_length")) + int(draft.get("response_length"))
        draft.derive([f"{RL}.max_prompt_length", f"{GENERATE}.sampling_config.max_tokens"], "sequence_length", both)
        _dropout(draft)
    _least_rate(draft, _said(draft, "min_lr"), "actor_train")


def _of_model(draft: Draft, name: str) -> Any:
    """Value of a key in the file of the model, which the sections go before; ``None`` where there is none."""
    sections = draft.given.values.get("model")
    chosen = draft.theirs(_said(draft, "model")) if isinstance(sections, dict) else None
    section = sections.get(chosen) if isinstance(sections, dict) else None
    return section.get(name) if isinstance(section, dict) else None


def _dropout(draft: Draft) -> None:
    """Says that a file without the keys trains with dropout there, unless the model's own file says otherwise."""
    for name in ("attention_dropout", "hidden_dropout"):
        share = _of_model(draft, name)
        if draft.has(_said(draft, name)) or share == 0:
            continue
        note = "here nothing is dropped" + (
            "" if share else "; it is 0.1 where neither the file nor the model's gives it"
        )
        to_do(draft, f"{MEGATRON}.{name}", note, share or 0.1)


def _experts(draft: Draft) -> None:
    """The loss that balances experts, which a model with some has there unless it is switched off."""
    names = ("num_experts", "expert_model_parallel_size", "moe_router_load_balancing_type", "moe_aux_loss_coeff")
    keys = {name: _said(draft, name) for name in names}
    said = {name: draft.theirs(key) if draft.has(key) else _of_model(draft, name) for name, key in keys.items()}
    if not said["num_experts"] and int(said["expert_model_parallel_size"] or 1) == 1:
        return
    weight = 0.001 if said["moe_aux_loss_coeff"] is None else float(said["moe_aux_loss_coeff"])
    kind = said["moe_router_load_balancing_type"] or "aux_loss"
    ours, note = f"actor_train.{_OPTIONS}.moe_aux_loss_coeff", f"{kind} there; here a mean over micro-batches and ranks"
    draft.derive([keys["moe_aux_loss_coeff"], keys["num_experts"]], ours, weight if kind != "none" else 0.0, note)


def _least_rate(draft: Draft, theirs: str, role: str) -> None:
    """The rate at which a schedule ends, as a share of its peak."""
    rate, least = draft.get(f"{role}.training_args.learning_rate"), draft.theirs(theirs)
    if rate and least and float(least) > 0 and draft.get(f"{role}.training_args.lr_scheduler_type") != _LEVEL:
        draft.derive(theirs, f"{role}.training_args.min_lr_ratio", round(min(1.0, float(least) / float(rate)), 6))


def _adapter(draft: Draft) -> None:
    if layers := draft.theirs(key := _said(draft, "lora_target_modules", ACTOR, MEGATRON)):
        names = [name for layer in layers for name in _LAYERS.get(str(layer), (str(layer),))]
        draft.derive(key, "actor_train.model_args.lora_target", ",".join(names))


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
    stage, key = _stage(draft)
    if stage == "ray_ppo":
        draft.derive(key, "adv_estimator", "gae")
    elif stage not in ("ray_grpo", "ray_dapo"):
        known = "ray_grpo, ray_dapo, ray_ppo, dpo, sft and orm"
        draft.tell(Kind.IMPOSSIBLE, key, stage, "adv_estimator", note=f"there are {known}; this is a run of ray_grpo")
    loss = f"{RL}.token_level_loss"
    if stage == "ray_dapo" and not draft.theirs(loss):
        draft.derive([loss, key], "loss_agg_mode", "seq-mean-token-mean")
    else:
        note = "the mean over all tokens of a micro-batch there, of an optimizer step here"
        if int(draft.theirs(_said(draft, "micro_batch_size")) or 1) == 1 and not draft.theirs(f"{RL}.use_dynamic_bsz"):
            note += "; with micro_batch_size 1 that is seq-mean-token-mean"
        draft.derive([loss, key], "loss_agg_mode", "token-mean", note)
    if draft.theirs(higher := f"{RL}.clip_higher_enable") and stage == "ray_dapo":
        draft.derive(higher, "use_pg_clip_range", True)
        for side in ("low", "high"):
            draft.derive(bound := f"{RL}.clip_ratio_{side}", f"pg_clip_{side}", float(draft.theirs(bound, 0.1)))
    _kl(draft, stage)


def _kl(draft: Draft, stage: str) -> None:
    """The loss of GRPO has a KL, the reward of PPO may have one, and DAPO has none."""
    key, kind = f"{RL}.init_kl_coef", draft.theirs(f"{RL}.kl_ctrl_type")
    coefficient, switch = float(draft.theirs(key)), f"{RL}.use_kl_in_reward"
    if stage == "ray_dapo" or (stage == "ray_ppo" and not draft.theirs(switch)):
        draft.forget("kl_penalty")
        if draft.has(key):
            note = "the loss of ray_dapo has no KL" if stage == "ray_dapo" else f"with {switch} false nothing reads it"
            draft.tell(Kind.DROPPED, key, coefficient, note=note)
        return
    names = ("kl_loss_coef", "use_kl_loss", "kl_loss_target")
    if stage == "ray_ppo":
        names = ("init_kl_coef", "add_token_level_kl", "target_kl")
    note = "" if stage == "ray_ppo" else "a loss there; the same name is the reward's here"
    draft.derive(key, names[0], coefficient, note)
    draft.derive([key, switch] if stage == "ray_ppo" else key, names[1], coefficient > 0)
    if kind != "fixed" and coefficient > 0:
        target = draft.theirs(f"{RL}.kl_target")
        if kind == "adaptive" and target:
            draft.derive([f"{RL}.kl_target", f"{RL}.kl_ctrl_type"], names[2], float(target))
            draft.carry_set(f"{RL}.kl_horizon", "kl_horizon", int)
        else:
            note = f"adaptive needs a target: write {names[2]}"
            draft.tell(Kind.IMPOSSIBLE, f"{RL}.kl_ctrl_type", kind, note=note)


def _checkpoints(draft: Draft) -> None:
    for verb in ("save", "load"):
        keys = {_said(draft, f"no_{verb}_{short}"): part for short, part in (("optim", "optimizer"), ("rng", "rng"))}
        without = {part for key, part in keys.items() if draft.theirs(key)}
        if without:
            parts = [part for part in PARTS if part not in without]
            draft.derive(list(keys), f"checkpoint_config.{verb}_contents", parts)


def _trackers(draft: Draft) -> None:
    if draft.theirs(f"{RL}.use_wandb"):
        names = {"wandb_project": "project", "wandb_exp_name": "name", "wandb_save_dir": "log_dir"}
        use_wandb(draft, RL, "use_wandb", names)
    elif draft.theirs(f"{RL}.use_swanlab"):
        draft.derive(f"{RL}.use_swanlab", "track_with", "swanlab")
        for name, ours in (("project", "project"), ("exp_name", "experiment_name"), ("save_dir", "log_dir")):
            draft.carry_set(f"{RL}.swanlab_{name}", f"tracker_kwargs.{ours}")
    elif not draft.theirs(f"{RL}.use_tensorboard"):
        draft.derive(f"{RL}.use_tensorboard", "track_with", "stdout", "neither tensorboard nor wandb")


def _roles(draft: Draft) -> None:
    if (size := int(draft.get("actor_infer.num_gpus_per_worker"))) > GPUS_OF_A_NODE:
        key, ours = f"{GENERATE}.infer_tensor_parallel_size", "actor_infer.num_gpus_per_worker"
        draft.derive(key, ours, GPUS_OF_A_NODE)
        to_do(draft, key, ENGINE_OF_A_NODE, size, ours)
    count = int(draft.theirs(f"{RL}.actor_resource.num_npus"))
    if (nodes := -(-count // GPUS_OF_A_NODE)) > 1:
        note = f"of {GPUS_OF_A_NODE} devices; on machines with more give num_nodes and num_gpus_per_node"
        draft.derive(f"{RL}.actor_resource.num_npus", "num_nodes", nodes, note)
    compares = draft.get("use_kl_loss") or draft.get("add_token_level_kl")
    roles = ["actor_train", "actor_infer", *(["reference"] if compares else [])]
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
    draft.carry(_said(draft, "sequence_parallel", CRITIC, MEGATRON), f"critic.{_OPTIONS}.sequence_parallel")
    key = f"{RL}.critic_resource.num_npus"
    own = int(draft.theirs(key) or count)
    first = 0 if draft.theirs(f"{RL}.use_integrated_worker") else count
    draft.derive(key, "critic.device_mapping", devices(first, own))
    if (nodes := -(-(first + own) // GPUS_OF_A_NODE)) > int(draft.get("num_nodes") or 1):
        draft.derive(key, "num_nodes", nodes, f"of {GPUS_OF_A_NODE} devices")
    for name, ours in _OF_ITS_OWN.items():
        if draft.has(theirs := _said(draft, name, CRITIC, MEGATRON)) and theirs.startswith(MEGATRON):
            how = "schedule" if name == "lr_decay_style" else "listed"  # which leaves a number as it is
            draft.translate([theirs], f"critic.training_args.{ours}", how, draft.theirs(theirs))
    _least_rate(draft, _said(draft, "min_lr", CRITIC, MEGATRON), "critic")
    draft.derive(f"{RL}.cliprange_value", "value_clip", float(draft.theirs(f"{RL}.cliprange_value", 0.5)))
    whitens = bool(draft.theirs(f"{RL}.advantage_whiten", True))
    draft.derive(f"{RL}.advantage_whiten", "whiten_advantages", whitens, "gae whitens there")


def _rewards(draft: Draft) -> None:
    names, weights = draft.theirs(f"{RL}.verifier_function"), draft.theirs(f"{RL}.verifier_weight")
    verifiers: list[dict[str, Any]] = []
    for number, name in enumerate(names or ["base_acc"]):
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
    if draft.theirs(f"{RL}.overlong_buffer_enable") and not draft.has(key := f"{RL}.rollout_max_tokens"):
        draft.derive(key, "overlong_buffer.max_length", 2048, "its default")
    if draft.theirs(f"{RL}.filter_groups_enable"):
        domain["query_filter_config"] = {"type": "std_filter"}
    scores = "; ".join(f"{name}: {_SCORES[name]}" for name in map(str, names or ["base_acc"]) if name in _SCORES)
    draft.derive([f"{RL}.verifier_function", f"{RL}.verifier_weight"], "rewards.math", domain, scores)


def _batches(draft: Draft) -> None:
    per_step = int(draft.get("rollout_batch_size")) * int(draft.get("num_return_sequences_in_group"))
    prompts, samples = int(draft.get("rollout_batch_size")), int(draft.theirs(f"{RL}.mini_batch_size"))
    if samples <= prompts:  # newer releases count prompts, older ones samples
        samples *= int(draft.get("num_return_sequences_in_group"))
    keys = [f"{RL}.mini_batch_size", size_key := _said(draft, "micro_batch_size")]
    ranks = max(1, devices_of(draft, "actor_train") // parallel_sizes(draft, "actor_train"))
    at_once = int(draft.theirs(part := f"{RL}.actor_update_dispatch_size") or 0) * ranks
    if 0 < at_once < samples:
        keys, samples = [part, *keys], at_once
    dynamic = bool(draft.theirs(f"{RL}.use_dynamic_bsz"))
    micro = None if dynamic else int(draft.theirs(size_key) or 1)
    set_batch(draft, "actor_train", samples, micro, keys, per_step)
    if draft.get("adv_estimator") == "gae":
        size = draft.theirs(f"{CRITIC}.micro_batch_size") or micro
        set_batch(draft, "critic", samples, int(size) if size else None, [f"{CRITIC}.micro_batch_size"], per_step)
    for role, phase, name in _BUDGETS if dynamic else ():
        if role in draft.ours:
            own, every = f"{RL}.{name}_max_packing_token_size", f"{RL}.max_packing_token_size"
            key = own if draft.has(own) else every
            set_budget(draft, role, phase, int(draft.theirs(key)), [f"{RL}.use_dynamic_bsz", key])
