"""Steps that the importers of all systems share: batches, roles that nothing reads, switches, devices, profiling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from roll.configs.engine_rules import UNREAD
from roll.configs.engines import card_of
from roll.configs.problems import NOTHING
from roll.configs.rlvr import RLVRConfig
from roll.configs.rules import TRAINED
from roll.configs.worker import parse_device_mapping
from roll.extras.importers.draft import Draft, Kind

_UNREAD = {
    role: (*sections, *(key for key in UNREAD.get(role, ((), ""))[0] if key != "router_replay"))
    for role, sections in {
        "actor_infer": ("training_args", "data_args"),
        "actor_train": ("generating_args",),
        "reference": ("training_args", "data_args", "generating_args"),
        "teacher": ("training_args", "data_args", "generating_args"),
        "critic": ("data_args", "generating_args"),
    }.items()
}
"""By role: what is read elsewhere. ``router_replay`` stays: their files say it of both of the policy's roles."""

GPUS_OF_A_NODE = 8
ENGINE_OF_A_NODE = f"an engine stays on one node here, and has its {GPUS_OF_A_NODE} devices: see that the model fits"

DOMAINS: dict[str, tuple[str, tuple[str, ...]]] = {
    "gsm8k": ("gsm8k", ("openai/gsm8k",)),
    "math": (
        "math",
        (
            "lighteval/MATH",
            "DigitalLearningGmbH/MATH-lighteval",
            "HuggingFaceH4/MATH-500",
            "math_dapo",
            "math",
            "math_dapo_reasoning",
            "aime_2024",
            "aime_2025",
            "aime24",
            "aime25",
            "numina_aops_forum",
            "numina_synthetic_math",
            "numina_amc_aime",
            "numina_synthetic_amc",
            "numina_cn_k12",
            "numina_olympiads",
        ),
    ),
    "code": ("code", ("codecontests", "apps", "codeforces", "taco")),
}
"""The data sources that verl scores by itself: our verifier, and their names in the data."""
GEO3K: dict[str, Any] = {
    "tag_included": ["hiyouga/geometry3k"],
    "verifiers": [
        {"name": "math", "weight": 0.9},
        {"name": "format", "weight": 0.1, "args": {"pattern": r"<think>.*</think>.*\\boxed\{.*\}.*"}},
    ],
}
"""Geometry with pictures."""


def drop_unread(draft: Draft) -> None:
    """Takes out roles and keys that nothing reads, and switches' keys without their switch."""
    if draft.get("adv_estimator", "gae") != "gae" and "critic" in draft.ours:
        draft.drop_ours("critic", f"adv_estimator {draft.get('adv_estimator')} has no critic")
        draft.drop_ours("reward_pretrain", "there is no critic")
    uses_kl = draft.get("add_token_level_kl") or (draft.get("use_kl_loss") and draft.get("kl_loss_coef", 0) > 0)
    if not uses_kl and "reference" in draft.ours:
        draft.drop_ours("reference", "no KL term is switched on")
    if draft.get("reference_pretrain") == draft.get("pretrain"):
        draft.drop_ours("reference_pretrain", "it is pretrain")
    elif not uses_kl:
        draft.drop_ours("reference_pretrain", "no KL term is switched on")
    own_reference = draft.get("reference_pretrain") is not None
    if draft.get("actor_train.model_args.lora_target") and "reference" in draft.ours and not own_reference:
        draft.drop_ours("reference", "with an adapter the reference is the actor without it")
    drop_unread_of_roles(draft)
    if draft.get("use_kl_loss") and not draft.get("kl_loss_coef"):
        draft.drop_ours("use_kl_loss", "its coefficient is 0")
    _old_logprobs(draft)
    unset = RLVRConfig.model_fields

    def given(key: str) -> Any:
        if key == "pg_variant" and draft.get("use_topr_loss"):
            return "topr"
        return draft.get(key, unset[key].default)

    for key, expected, _ in list(RLVRConfig.unread(given)):
        if key in draft.ours:
            draft.drop_ours(key, expected.removeprefix("no such key "))


def _old_logprobs(draft: Draft) -> None:
    """``force_disable_old_logprobs_recompute`` beside what reads old log-probabilities, or trains a sample twice."""
    key, correction = "force_disable_old_logprobs_recompute", draft.get("train_infer_correction", {}) or {}
    if not draft.get(key):
        return
    filters = any(each.get("enabled") for each in correction.get("filters") or [])
    weight = correction.get("is_weight") or {}
    weighted = weight.get("enabled") and weight.get("detach", True)
    if filters or weighted or correction.get("bypass") or draft.get("add_token_level_kl"):
        draft.drop_ours(key, "the correction, or the KL in the reward, reads log-probabilities of the training engine")
    elif (epochs := draft.get("ppo_epochs", 1)) > 1:
        draft.remove(key)
        note = f"with ppo_epochs {epochs} later passes compare with the first one's log-probabilities, not kept here"
        draft.retell(key, Kind.IMPOSSIBLE, note)
    else:
        draft.drop_ours("enable_old_logprobs_recompute", f"{key} goes before it")


def drop_unread_of_roles(draft: Draft) -> None:
    """Takes out the keys of model roles that these do not read."""
    for role, section in list(draft.roles()):
        for key in _UNREAD[role]:
            if key in section:
                draft.drop_ours(f"{role}.{key}", f"{role} does not read it")
        key = f"{role}.model_args.freeze_module_prefix"
        for phase in ("train", "infer"):
            if not draft.get(switch := f"{role}.use_dynamic_batching_in_{phase}"):
                draft.drop_ours(f"{role}.max_tokens_per_microbatch_in_{phase}", f"without {switch}: true")
        if (role not in TRAINED or not draft.get(key)) and draft.get(key, NOTHING) is not NOTHING:
            draft.drop_ours(key, "nothing is frozen" if role in TRAINED else f"{role} trains nothing")


def tidy_engines(draft: Draft) -> None:
    """Makes every role's options such as its engine takes: sizes of 1 that mean nothing, null sections, kernels."""
    names = {role: draft.get(f"{role}.strategy_args.strategy_name", "") for role, _ in draft.roles()}
    megatron = any(name.startswith("megatron") for name in names.values())
    for role, name in names.items():
        base = f"{role}.strategy_args.strategy_config"
        if megatron and draft.get(f"{role}.model_args.trust_remote_code"):
            note = "Megatron computes models in code of its own; with fsdp2_train give it to every role"
            draft.drop_ours(f"{role}.model_args.trust_remote_code", note)
        if draft.get(base, {}) is None:
            draft.remove(base)
        if draft.get(f"{base}.sequence_parallel") and draft.get(f"{base}.tensor_model_parallel_size", 1) == 1:
            draft.drop_ours(f"{base}.sequence_parallel", "it has no meaning with a tensor-parallel size of 1")
        if draft.get(f"{base}.pipeline_model_parallel_size", 1) == 1 or draft.get(
            f"{base}.virtual_pipeline_model_parallel_size", 2
        ) in (1, None):
            draft.drop_ours(f"{base}.virtual_pipeline_model_parallel_size", "there is one chunk of layers per stage")
        if name in ("vllm", "sglang"):
            draft.drop_ours(f"{role}.model_args.attn_implementation", f"{name} has kernels of its own")
            draft.drop_ours(f"{role}.model_args.disable_gradient_checkpointing", f"{role} has no backward pass")


def parallel_sizes(draft: Draft, role: str) -> int:
    """Devices that hold one copy of a role's model and share its sequences."""
    card, size = card_of(draft.get(f"{role}.strategy_args.strategy_name", "")), 1
    for key in card.options().parallel_sizes if card else ():
        size *= draft.get(f"{role}.strategy_args.strategy_config.{key}", 1) or 1
    return int(size * (draft.get(f"{role}.model_args.ulysses_size", 1) or 1))


def sequence_ranks(draft: Draft, role: str) -> int:
    """Devices among which one sequence of a role is divided, each with a share of its tokens."""
    if draft.get(f"{role}.strategy_args.strategy_name", "").startswith("megatron"):
        return int(draft.get(f"{role}.strategy_args.strategy_config.context_parallel_size", 1) or 1)
    return int(draft.get(f"{role}.model_args.ulysses_size", 1) or 1)


def devices_of(draft: Draft, role: str) -> int:
    """Devices of a role of ours."""
    try:
        mapping = parse_device_mapping(draft.get(f"{role}.device_mapping"))
    except ValueError:
        return 1
    return len(mapping) if mapping else draft.get(f"{role}.world_size") or 1


def set_batch(
    draft: Draft, role: str, samples: int, per_device: int | None, keys: list[str], per_step: int | None = None
) -> None:
    """Sets how many samples make an optimizer step: passes per device and their size.

    Args:
        role: that is trained.
        samples: of one optimizer step.
        per_device: samples of one pass; all of a device's, if not given.
        keys: of theirs that say it.
        per_step: samples of a rollout, which the optimizer steps must divide.
    """
    ranks = max(1, devices_of(draft, role) // parallel_sizes(draft, role))
    wanted = samples
    if per_step:
        samples = _nearest_divisor(per_step, samples, ranks)
    share = max(1, samples // ranks)
    size = _largest_divisor(share, min(per_device or share, share))
    base = f"{role}.training_args"
    note = f"{samples} samples = {size} per device × {share // size} accumulated × {ranks} data-parallel"
    if samples != wanted:
        note += f"; {wanted} would not divide the {per_step} samples of a step"
    draft.derive(keys, f"{base}.per_device_train_batch_size", size)
    draft.derive(keys, f"{base}.gradient_accumulation_steps", share // size, note)


def _largest_divisor(number: int, at_most: int) -> int:
    return next(n for n in range(max(1, min(at_most, number)), 0, -1) if number % n == 0)


def _nearest_divisor(number: int, near: int, multiple_of: int) -> int:
    """The divisor of a number that is nearest to another, in whole shares of so many ranks where that can be."""
    fits = [n for n in range(1, number + 1) if number % n == 0 and n % multiple_of == 0]
    return min(fits, key=lambda n: abs(n - near)) if fits else near


def to_do(draft: Draft, key: str, note: str, got: Any = None, ours: str = "") -> None:
    """Notes something outside of the configuration that the user has to see to."""
    draft.tell(Kind.TO_DO, key, got, ours, note=note)


def set_budget(draft: Draft, role: str, phase: str, tokens: int, keys: list[str]) -> None:
    """Micro-batches by tokens; a budget holds the longest sample."""
    whole = int(draft.get("sequence_length", 0))
    draft.derive(keys, f"{role}.use_dynamic_batching_in_{phase}", True)
    note = f"at least sequence_length {whole}" if tokens < whole else ""
    draft.derive(keys, f"{role}.max_tokens_per_microbatch_in_{phase}", max(tokens, whole), note)


def use_wandb(draft: Draft, section: str, switch: str, names: Mapping[str, str]) -> None:
    """Tracks with Weights & Biases, by its options under the names that a section of theirs has for them."""
    draft.derive(f"{section}.{switch}", "track_with", "wandb")
    for key, ours in names.items():
        draft.carry_set(f"{section}.{key}", f"tracker_kwargs.{ours}")


def trust_code(
    draft: Draft, keys: list[str], roles: tuple[str, ...] = ("actor_train", "actor_infer", "reference")
) -> None:
    """Lets code that comes with a model run where their files ask for it.

    Args:
        draft: the configuration, all its roles there.
        keys: of theirs, of which one asks.
        roles: of ours that load that model.
    """
    asked = [key for key in keys if draft.theirs(key)]
    for role, _ in list(draft.roles()) if asked else ():
        if role in roles:
            note = "Python files that come with the model run: read them"
            draft.derive(asked, f"{role}.model_args.trust_remote_code", True, note)


def drop_nulls(draft: Draft, takes_null: Callable[[str], bool]) -> None:
    """Takes out what is null where null is no value here: it asks for the default."""
    for key, _ in list(leaves(draft.ours)):
        if draft.get(key, 0) is None and not takes_null(key):
            draft.remove(key)
            draft.retell(key, Kind.DROPPED, "null means the default")


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys that hold no further ones, dotted, with their values."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def devices(first: int, count: int) -> str:
    """A ``device_mapping`` of devices in a row."""
    return f"list(range({first},{first + count}))"


def verl_columns(draft: Draft) -> None:
    """The columns of data that verl's preparation scripts write, which others took over."""
    data = "actor_train.data_args"
    for key, column in (("messages", "prompt"), ("tag", "data_source"), ("response", "reward_model.ground_truth")):
        draft.derive([], f"{data}.{key}", column, "the column that its data has")


def public_domains(draft: Draft, key: str) -> None:
    """Reward domains of the public data sources: those that the names of the files speak of, else all."""
    files = [draft.get(f"{section}.data_args.file_name") for section in ("actor_train", "validation")]
    names = str(files).lower()
    if "geo3k" in names or "geometry3k" in names:
        draft.derive(key, "rewards.geo3k", GEO3K, "the data sources that it scores by itself")
        return
    for domain in [name for name in DOMAINS if name in names] or DOMAINS:
        verifier, tags = DOMAINS[domain]
        value = {"tag_included": list(tags), "verifiers": [{"name": verifier}]}
        draft.derive(key, f"rewards.{domain}", value, "the data sources that it scores by itself")


_VERL = {
    "actor_rollout_ref.actor": "actor_train",
    "actor_rollout_ref.ref": "reference",
    "actor_rollout_ref.rollout": "actor_infer",
    "critic": "critic",
}
_VERL_CONTENTS = {"shapes": "shapes", "stack": "stacks", "memory": "memory"}
_BY_STEP = ("capture-range", "capture-range-end", "kill")
"""Options of nsys with which verl records single steps; a process is recorded whole here."""
_MINDSPEED = "profiler_config.integrated"
_MINDSPEED_STAGES = {
    "actor_generate": "actor_infer",
    "actor_compute_log_prob": "actor_train",
    "actor_update": "actor_train",
    "reference_compute_log_prob": "reference",
}


def profiler_of_verl(draft: Draft) -> None:
    """``global_profiler`` and the roles' ``profiler``; before them there was ``trainer.profile_steps``, of nsys."""
    if timeline := next((key for key in _TIMELINES if draft.theirs(key)), None):
        draft.derive(timeline, "profiler.ray_timeline", True, "in output_dir/<exp_name>/profile")
    steps, tool = draft.theirs("global_profiler.steps"), draft.theirs("global_profiler.tool")
    options = "global_profiler.global_tool_config.nsys.worker_nsight_options"
    if not steps and (steps := draft.theirs("trainer.profile_steps")):
        tool, options = "nsys", "trainer.worker_nsight_options"
    chosen = [theirs for theirs, role in _VERL.items() if role in draft.ours and _verl_records(draft, theirs)]
    if not steps or tool is None or not chosen:
        return
    keys = [f"{theirs}.profiler.{name}" for theirs in chosen for name in ("enable", "all_ranks", "ranks")]
    draft.derive(keys, "profiler.roles", [_VERL[theirs] for theirs in chosen])
    everywhere = any(draft.theirs(f"{theirs}.profiler.all_ranks") for theirs in chosen)
    ranks = {int(rank) for theirs in chosen for rank in draft.theirs(f"{theirs}.profiler.ranks") or ()}
    draft.derive(keys, "profiler.ranks", None if everywhere else sorted(ranks))
    if tool == "nsys":
        given = draft.theirs(options) or {}
        kept = {key: str(value) for key, value in given.items() if value is not None and key not in _BY_STEP}
        draft.derive([options, "global_profiler.tool"], "profiler.nsight", kept, "whole processes, not single steps")
        return
    switches = _verl_switches(draft, tool, [f"{theirs}.profiler" for theirs in chosen])
    _record(draft, ["global_profiler.steps", "global_profiler.tool"], steps, switches)


def profiler_of_verl_supervised(draft: Draft) -> None:
    """The steps of ``trainer.profile_interval``, both ends, where ``profiler`` is switched on."""
    interval = draft.theirs("trainer.profile_interval")
    if not draft.theirs("profiler.enable") or not isinstance(interval, list) or int(interval[0]) < 1:
        return
    keys = ["trainer.profile_interval", "profiler.enable", "profiler.tool"]
    tool = draft.theirs("profiler.tool")
    ranks = None if draft.theirs("profiler.all_ranks") else [int(rank) for rank in draft.theirs("profiler.ranks") or ()]
    draft.derive(["profiler.all_ranks", "profiler.ranks"], "profiler.ranks", [0] if ranks == [] else ranks)
    if tool == "nsys":
        draft.derive(keys, "profiler.nsight", {}, "whole processes, not single steps")
        return
    switches = _verl_switches(draft, tool, ["profiler"])
    _record(draft, keys, range(int(interval[0]), int(interval[1]) + 1), switches)


def _verl_switches(draft: Draft, tool: object, sections: Sequence[str]) -> list[str]:
    """What is recorded beside times, by the tool and its sections."""
    contents = [name for each in sections for name in draft.theirs(f"{each}.tool_config.torch.contents") or ()]
    asked = [_VERL_CONTENTS[name] for name in contents if name in _VERL_CONTENTS]
    return ["memory"] if tool == "torch_memory" else asked


_TIMELINES = ("ray_kwargs.timeline_json_file", "ray_init.timeline_json_file")


def profiler_of_roll(draft: Draft) -> None:
    """Every step of rank 0 there; of one step's trace the others are copies."""
    if str(draft.theirs("system_envs.RAY_PROFILING", "0")) == "1":
        draft.derive("system_envs.RAY_PROFILING", "profiler.ray_timeline", True, "in output_dir/<exp_name>/profile")
    asked = [key for key in ("profiler_timeline", "profiler_memory") if draft.theirs(key)]
    if asked:
        _record(draft, asked, [2], ["stacks" if key == "profiler_timeline" else "memory" for key in asked])


def profiler_of_chatlearn(draft: Draft) -> None:
    """The third step of the first replica, after two that it leaves out."""
    if draft.theirs("runtime_args.profiler_dir"):
        _record(draft, ["runtime_args.profiler_dir"], [3], [])
    if draft.theirs("runtime_args.nsys"):
        draft.derive("runtime_args.nsys", "profiler.nsight", {}, "Ray starts the processes under nsys")


def profiler_of_mindspeed(draft: Draft) -> None:
    """Steps from one up to another."""
    if not draft.theirs(f"{_MINDSPEED}.profile"):
        return
    keys = [f"{_MINDSPEED}.{name}" for name in ("profile", "profile_step_start", "profile_step_end")]
    start, end = (int(draft.theirs(key, default)) for key, default in zip(keys[1:], (1, 2), strict=True))
    names = {"shapes": "record_shapes", "stacks": "with_stack", "memory": "with_memory"}
    switches = [ours for ours, theirs in names.items() if draft.theirs(f"{_MINDSPEED}.profile_{theirs}")]
    _record(draft, keys, range(max(1, start), max(end, start + 1, 2)), switches)
    role = _MINDSPEED_STAGES.get(str(draft.theirs(f"{_MINDSPEED}.stage")))
    if role in draft.ours:
        draft.derive(f"{_MINDSPEED}.stage", "profiler.roles", [role], "whole steps of the role")
    ranks = draft.theirs(f"{_MINDSPEED}.profile_ranks", "all")
    draft.derive(f"{_MINDSPEED}.profile_ranks", "profiler.ranks", None if ranks == "all" else list(ranks))


def _verl_records(draft: Draft, theirs: str) -> bool:
    """Tells whether a role is recorded: switched on (what there was no switch for before), on any rank."""
    base = f"{theirs}.profiler"
    return bool(
        draft.theirs(f"{base}.enable", True) and (draft.theirs(f"{base}.all_ranks") or draft.theirs(f"{base}.ranks"))
    )


def _record(draft: Draft, keys: Sequence[str], steps: Iterable[Any], switches: Iterable[str]) -> None:
    """Has PyTorch's profiler record those of the steps that there are."""
    most = draft.get("max_steps")
    kept = sorted({int(step) for step in steps if most is None or int(step) <= most}) or [1]
    draft.derive(keys, "profiler.steps", kept, "in output_dir/<exp_name>/profile")
    for switch in dict.fromkeys(switches):
        draft.derive(keys, f"profiler.{switch}", True)
