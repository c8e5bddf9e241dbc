"""ROLL's configurations: keys that are converted together, engines, environments and judges included."""

from __future__ import annotations

import re
from typing import Any

from roll.configs import SHIPPED
from roll.configs.agentic import MANAGERS, AgenticConfig
from roll.configs.data import VIDEO_RULES
from roll.configs.distill import DistillConfig
from roll.configs.pipeline import PipelineConfig
from roll.configs.problems import NOTHING
from roll.configs.rlvr import RLVRConfig
from roll.configs.rules import TRAINED
from roll.configs.schema import ROLES
from roll.configs.worker import parse_device_mapping
from roll.extras.importers.common import (
    GEO3K,
    devices_of,
    drop_unread,
    parallel_sizes,
    profiler_of_roll,
    set_batch,
    tidy_engines,
    to_do,
)
from roll.extras.importers.draft import Draft, Kind, value_at
from roll.extras.importers.recognise import media_in
from roll.extras.importers.roll_offline import (
    is_distillation,
    offline_schema,
    set_distillation,
    set_offline,
    set_picture_columns,
    set_teacher,
    set_teachers,
)

_PROGRAMS, _SERVER, _SEARCH = "python_code", "mcp", "search"
_LIMITS = ("max_tool_uses",)
_REWARDS = ("tool_reward", "tool_success_reward")


def set_wrapped_tools(draft: Draft, tag: str) -> None:
    """The tools that an environment is wrapped in, for its tag alone."""
    base = f"custom_envs.{tag}.tool_wrapper"
    wrapper = draft.theirs(base)
    if not isinstance(wrapper, dict):
        return
    draft.tell(Kind.DERIVED, base, "a section", "tools")
    entries = wrapper.get("tool_configs") or []
    for entry in entries if isinstance(entries, list) else []:
        _tool(draft, tag, f"{base}.tool_configs", entry if isinstance(entry, dict) else {})
    given = wrapper.get("wrapper_args") or {}
    for key, value in given.items():
        where = f"{base}.wrapper_args.{key}"
        if key in _LIMITS and value and int(value) > 0:
            most = max(int(value), int(draft.get("tools.max_turns") or 0))
            if draft.get("tools"):
                draft.derive(where, "tools.max_turns", most, "turns with calls, the most of all environments")
        elif key in _REWARDS and value:
            note = "calls are not rewarded here: reward them in the environment's step"
            draft.tell(Kind.IMPOSSIBLE, where, value, "tools", note=note)


def _tool(draft: Draft, tag: str, where: str, entry: dict[str, Any]) -> None:
    """One tool of theirs; that of several environments has the tags and the most time of all."""
    name, given = str(entry.get("tool_id")), entry.get("tool_args") or {}
    if name == _PROGRAMS:
        seconds = max(float(given.get("timeout") or 5), draft.get("tools.use.python.args.wall_seconds", 0.0))
        own: dict[str, Any] = {"tool": "python", "args": {"wall_seconds": seconds}, "timeout": seconds + 10}
        key, note = "tools.use.python", "called as the chat template writes calls, where theirs reads <python>"
    elif name == _SERVER and given.get("server_url"):
        key, own, note = "tools.servers.mcp", {"url": str(given["server_url"])}, ""
    elif name == _SEARCH and given.get("search_url"):
        key, note = "tools.use.search", "called as the chat template writes calls, where theirs reads <search>"
        own = {"tool": "retrieval", "args": {"url": str(given["search_url"])}}
        if given.get("topk"):
            own["args"]["num_results"] = int(given["topk"])
    else:
        note = "no such tool here: write it (docs/agents.md), name a server in tools.servers, or a corpus for search"
        draft.tell(Kind.IMPOSSIBLE, where, name, "tools.use", note=note)
        return
    tags = [*(draft.get(f"{key}.tags") or []), tag]
    draft.derive(where, key, own | {"tags": tags}, note)


_ENVIRONMENTS = ("sokoban", "frozen_lake")
_TOLD_BY_TEMPLATE = {"sokoban_native_env": "sokoban"}
"""Environments there that write whole conversations: the same game here, described by ``agent_template``."""
_QUESTIONS = {"roll_math": ("problem", "answer", "math"), "roll_qa": ("question", "answer", "words")}
"""Environments there that ask the questions of a dataset: its columns, and who scores the answers here."""
_COLUMNS = {"question_key": "prompt", "answer_key": "answer"}
"""Keys there that name a column, and those here."""
_NEAREST = {
    "webshop": "the nearest here is shop",
    "math": "the nearest here is single_turn, with a dataset of questions, and tools",
    "qa": "the nearest here is single_turn, with a dataset of questions, and tools",
    "rock": "a program that works in a sandbox is a section agent, and its tasks are Harbor's (docs/agents.md)",
}
"""The nearest here to environments of theirs, by a part of their names."""


def set_environments(draft: Draft) -> None:
    """The tags that are played, and how many of each at once."""
    played = {str(tag) for manager in MANAGERS for tag in draft.theirs(f"{manager}.tags") or ()}
    for tag in draft.theirs("custom_envs") or {}:
        base = f"custom_envs.{tag}"
        if tag not in played:
            draft.drop_ours(base, "no manager uses it")
            continue
        _environment(draft, base)
        _picture_templates(draft, base)
        if isinstance(lookup := draft.get(codes := f"{base}.env_config.grid_lookup"), dict):
            draft.set(codes, {int(code) if str(code).isdigit() else code: each for code, each in lookup.items()})
        _runner(draft, f"{base}.agent_runner_cls")
        if draft.has(f"{base}.tool_wrapper"):
            set_wrapped_tools(draft, tag)
        if not draft.get(f"{base}.env_manager_cls"):
            draft.derive(
                f"{base}.env_manager_cls", f"{base}.env_manager_cls", "traj", "ROLL's environments are conversations"
            )
        if (turns := draft.theirs(f"{base}.history_length")) is not None:
            if draft.get(f"{base}.env_manager_cls") == "traj":
                words = "a conversation already holds every turn"
                draft.tell(Kind.DROPPED, f"{base}.history_length", turns, note=words)
            else:
                draft.derive(f"{base}.history_length", f"{base}.history_length", turns)
        sides = [draft.theirs(f"{base}.env_config.dim_{side}") for side in "xy"]
        if all(sides):
            draft.derive(f"{base}.env_config.dim_x", f"{base}.env_config.dim_room", sides)
    for manager, episodes in (("train_env_manager", "rollout_batch_size"), ("val_env_manager", "val_batch_size")):
        if not isinstance(draft.theirs(manager), dict):
            continue
        tell_worker(draft, manager, "the manager's own class does it")
        if draft.get(episodes, 128) is None:
            draft.drop_ours(episodes, "environments have no end: give a number of episodes")
        size = draft.get(f"{manager}.group_size", 1)
        slots = draft.get(f"{manager}.env_groups", 8) * size
        most, needed = draft.theirs(f"{manager}.max_traj_per_env", -1), draft.get(episodes, 128)
        if most > 0 and most * slots >= needed:
            draft.keep(f"{manager}.max_traj_per_env", most)
        elif most > 0:
            words = f"{slots} environments of {most} episodes are fewer than {episodes} {needed}"
            draft.tell(Kind.DROPPED, f"{manager}.max_traj_per_env", most, note=words)
        if needed % size:
            draft.derive(episodes, episodes, -(-needed // size) * size, f"whole groups of {size}")
        sampling = draft.get(f"{manager}.generating_args")
        if isinstance(sampling, dict):
            _manager_sampling(draft, manager, sampling)


def tell_worker(draft: Draft, section: str, own: str) -> None:
    """A class of theirs that runs a role or manager: one of ROLL's has a counterpart, which ``own`` names."""
    if worker := draft.theirs(key := f"{section}.worker_cls"):
        theirs = str(worker).startswith("roll.")
        note = own if theirs else "a class of another library's interface"
        draft.tell(Kind.DROPPED if theirs else Kind.IMPOSSIBLE, key, worker, note=note)


def _environment(draft: Draft, base: str) -> None:
    """The environment of a tag, or the nearest one."""
    key = f"{base}.env_type"
    kind = draft.theirs(key)
    if kind in _ENVIRONMENTS or "." in str(kind).partition(":")[0]:
        draft.keep(key, kind)
    elif ":" in str(kind):
        _gem(draft, base, str(kind))
    elif kind in _TOLD_BY_TEMPLATE:
        draft.derive(key, key, _TOLD_BY_TEMPLATE[kind], "described by agent_template")
        for template in ("agent_system_template", "agent_template"):
            if "{" not in str(draft.get(f"{base}.{template}", "{")):
                draft.drop_ours(f"{base}.{template}", f"{kind} writes its own messages")
    elif kind in _QUESTIONS:
        _questions(draft, base, str(kind))
    else:
        note = "no environment of this name: write it as a class, and give package.module:Class or register the name, "
        note += f"roll.agentic.env.register({kind!r}, …) (docs/environments.md)"
        note += "".join(f"; {near}" for word, near in _NEAREST.items() if word in str(kind))
        draft.set(key, kind)
        draft.tell(Kind.IMPOSSIBLE, key, kind, key, note=note)


def _picture_templates(draft: Draft, base: str) -> None:
    """What is said before and after the picture of a turn."""
    keys = [f"{base}.{name}" for name in ("pre_step_template", "next_step_template")]
    if not any(map(draft.has, keys)):
        return
    before, after = (str(draft.theirs(key) or "") for key in keys)
    note = "the picture stands between the two"
    if "{observation}" in before:
        note += "; the observation's words, which theirs has there too, are the environment's instruction"
        before = before.replace("{observation}", "")
    draft.derive(keys, f"{base}.agent_template", f"{before}{{observation}}{after}", note)


def _runner(draft: Draft, key: str) -> None:
    """What plays an environment through a proxy there."""
    runner = draft.theirs(key)
    if str(runner).endswith(".GEMRunner"):
        draft.tell(Kind.DROPPED, key, runner, note="turn by turn, like traj")
    elif runner is not None:
        draft.tell(Kind.IMPOSSIBLE, key, runner, note="a program talks to the endpoint: a section agent")


def _gem(draft: Draft, base: str, name: str) -> None:
    """An environment of the package GEM, whose own keys become arguments of it."""
    note = "of the package gem: pip install 'roll-rl[gem]'"
    draft.derive(f"{base}.env_type", f"{base}.env_type", "gem", note)
    given = draft.theirs(f"{base}.env_config")
    own = {key: value for key, value in (given if isinstance(given, dict) else {}).items() if value is not None}
    draft.set(f"{base}.env_config", {"env_id": name, **({"env_kwargs": own} if own else {})})
    for key in own:
        draft.retell(f"{base}.env_config.{key}", Kind.DERIVED, "an argument of gem.make: env_kwargs", own[key])


def _questions(draft: Draft, base: str, kind: str) -> None:
    """One question of a dataset per episode, with its tools."""
    given = draft.theirs(f"{base}.env_config")
    given = given if isinstance(given, dict) else {}
    prompt, answer, scorer = _QUESTIONS[kind]
    draft.derive(f"{base}.env_type", f"{base}.env_type", "single_turn", f"scored by {scorer}")
    columns = {"prompt": given.get("question_key") or prompt, "answer": given.get("answer_key") or answer}
    place = {"file_name": str(given["dataset_name"])} if given.get("dataset_name") else {}
    own = {"dataset": {**place, **columns}, "scorer": scorer}
    draft.forget(f"{base}.env_config")
    draft.set(f"{base}.env_config", own)
    for key, value in given.items():
        theirs, ours = f"{base}.env_config.{key}", f"{base}.env_config.dataset"
        if value is None:
            continue
        if key == "dataset_name":
            note = "data are files here: download it, and name them or their folder"
            to_do(draft, theirs, note, value, f"{ours}.file_name")
        elif key in _COLUMNS:
            draft.tell(Kind.DERIVED, theirs, value, f"{ours}.{_COLUMNS[key]}", value)
        else:
            draft.tell(Kind.DROPPED, theirs, value, note="a question has one answer, and data are files")


def evaluate_alone(draft: Draft) -> None:
    """Turns a file of the pipeline that only plays into an evaluation of the episodes that it plays."""
    draft.derive("train_env_manager", "eval_only", True, "no role is trained: episodes are run and reported")
    draft.drop_ours("actor_train", "nothing is trained")
    episodes = draft.get("rollout_batch_size", 128)
    draft.drop_ours("rollout_batch_size", "val_batch_size is used")
    draft.derive("rollout_batch_size", "val_batch_size", episodes, "one evaluation")
    draft.remove("val_env_manager")
    manager = draft.remove("train_env_manager")
    draft.set("val_env_manager", manager)
    if "tags" in manager:
        draft.set("train_env_manager.tags", manager["tags"])
    for key in ("max_steps", "save_steps", "eval_steps"):
        draft.drop_ours(key, "one evaluation: val_batch_size says of how many episodes")


def _manager_sampling(draft: Draft, manager: str, sampling: dict[str, Any]) -> None:
    """A manager's own sampling arguments. Theirs have their own defaults, ours those of the field."""
    known = ("max_new_tokens", "top_p", "top_k", "temperature", "do_sample", "repetition_penalty", "stop_strings")
    kept = {key: value for key, value in sampling.items() if key in known and value is not None}
    draft.set(f"{manager}.generating_args", kept)
    temperature = draft.get("actor_infer.generating_args.temperature")
    if manager == "train_env_manager" and kept.get("temperature") not in (None, temperature):
        draft.derive(
            f"{manager}.generating_args.temperature",
            "actor_infer.generating_args.temperature",
            kept["temperature"],
            "training log-probs divide by it",
        )


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "fp32"}
"""Data types by the names of PyTorch and of the engines."""


def set_model_kwargs(draft: Draft, role: str) -> None:
    """The generator and the reference hold the actor's model: entries of its config.json hold for them too."""
    key = "model_args.model_config_kwargs"
    kwargs = draft.get(f"actor_train.{key}")
    if kwargs and role in ("actor_infer", "reference") and draft.get(f"{role}.{key}") != kwargs:
        draft.derive(f"actor_train.{key}", f"{role}.{key}", dict(kwargs), "one model")


def drop_adapter(draft: Draft) -> None:
    """The generator's adapter is the one that is trained; theirs is told the names of its layers once more."""
    if draft.get("actor_train.model_args.lora_target"):
        for key in ("target", "rank", "alpha"):
            draft.drop_ours(f"actor_infer.model_args.lora_{key}", "it generates with the adapter of actor_train")


def set_engine(draft: Draft, role: str) -> None:
    """A role's engine and its options: presets of DeepSpeed, sizes of an engine, data types."""
    base = f"{role}.strategy_args.strategy_config"
    link = draft.link(base)
    preset = str(link)[2:-1] if isinstance(link, str) and link.startswith("${") else ""
    if preset == "deepspeed_zero1":
        preset = "deepspeed_zero"
    if preset.startswith("deepspeed_zero") and (SHIPPED / f"{preset}.yaml").is_file():
        draft.forget(base)
        draft.set(base, f"${{{preset}}}")
        draft.tell(Kind.KEPT, base, link, base, link)
    name = draft.get(f"{role}.strategy_args.strategy_name", "")
    if draft.theirs(f"{base}.save_only_model"):
        draft.derive(f"{base}.save_only_model", "checkpoint_config.save_contents", ["model"])
    if role in TRAINED and not draft.has("max_grad_norm"):
        draft.carry(f"{base}.max_grad_norm", "max_grad_norm")
    _precision(draft, role)
    if (reduced := draft.theirs(f"{base}.reduce_dtype")) is not None:
        reduced = _SHORT.get(str(reduced), reduced)
        if reduced == "fp32" or draft.get(f"{base}.fsdp_size") != 1:
            draft.derive(f"{base}.reduce_dtype", f"{base}.reduce_dtype", reduced)
    if name in ("vllm", "sglang"):
        _engine_precision(draft, role)
        split = draft.get(f"{base}.tensor_parallel_size") or draft.get(f"{base}.tp_size")
        size = int(split or draft.theirs(f"{role}.num_gpus_per_worker") or 1)
        key, ours = f"{base}.cuda_graph_sizes", f"{base}.cudagraph_capture_sizes"
        draft.carry(key, ours, note="its name in vLLM now")
        limit = draft.theirs(f"{base}.max_num_seqs")
        if limit and name == "vllm" and draft.get("max_running_requests") is None:
            draft.derive(f"{base}.max_num_seqs", "max_running_requests", int(limit))
        if size > 1:
            draft.derive(f"{role}.num_gpus_per_worker", f"{role}.num_gpus_per_worker", size)
    elif draft.theirs(f"{role}.num_gpus_per_worker", 1) != 1:
        words = f"{name or 'a trainer'} runs one process per device"
        draft.tell(Kind.DROPPED, f"{role}.num_gpus_per_worker", draft.theirs(f"{role}.num_gpus_per_worker"), note=words)


def _engine_precision(draft: Draft, role: str) -> None:
    """The data type that an option of the engine asks for, beside ``model_args.dtype``."""
    key, ours = f"{role}.strategy_args.strategy_config.dtype", f"{role}.model_args.dtype"
    asked = draft.remove(key)
    if asked is NOTHING:
        return
    short, given = _SHORT.get(str(asked), asked), draft.get(ours)
    if short == "auto" or short == given:
        draft.retell(key, Kind.DROPPED, f"{ours} says it", asked)
    elif given is None:
        draft.forget(key)
        draft.derive(key, ours, short)
    else:
        draft.retell(key, Kind.IMPOSSIBLE, f"{ours} is {given}", asked)


def _precision(draft: Draft, role: str) -> None:
    """The data type that the trainers' own switches ask for, beside ``model_args.dtype``."""
    base, ours = f"{role}.strategy_args.strategy_config", f"{role}.model_args.dtype"
    for dtype in ("bf16", "fp16"):
        key = f"{base}.{dtype}"
        asked = draft.theirs(key)
        if isinstance(asked, dict):  # DeepSpeed's
            asked = asked.get("enabled")
        if asked is None:
            continue
        if asked == "auto":
            draft.tell(Kind.DROPPED, key, asked, note=f"{ours} says it")
            continue
        given = draft.get(ours)
        if asked and given is None:
            draft.derive(key, ours, dtype)
        elif bool(asked) != (given == dtype):
            draft.tell(Kind.IMPOSSIBLE, key, asked, note=f"{ours} is {given or 'that of the model'}")
        else:
            draft.tell(Kind.DROPPED, key, asked, note=f"{ours} says it")


JUDGE_URL = "http://127.0.0.1:8000/v1"


def set_asked_model(draft: Draft) -> None:
    """The model that environments ask."""
    reward = draft.theirs("reward")
    if not isinstance(reward, dict):
        return
    model = (reward.get("model_args") or {}).get("model_name_or_path") or draft.get("reward_pretrain")
    engine = _judge_engine(draft, "reward", reward, "judge")
    draft.carry_set("reward.num_gpus_per_worker", "judge.num_gpus_per_worker")
    draft.derive("reward", "judge.model", model or draft.get("pretrain"), "the model that environments ask")
    draft.set("judge.engine", engine)
    for key, value in _sampling(reward).items():
        draft.set(f"judge.{key}", value)
    for key in ("model_args", "strategy_args", "generating_args", "device_mapping"):
        if reward.get(key):
            draft.tell(Kind.DERIVED, f"reward.{key}", NOTHING, "judge", note="of the judge")
    to_do(
        draft,
        "reward",
        "an environment that asks a judge sets asks = True on its class and calls self.ask",
        ours="judge",
    )


def judge_arguments(draft: Draft, base: str, domain: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the verifier ``judge``: an endpoint, or a model on the domain's devices."""
    own = (domain.get("model_args") or {}).get("model_name_or_path")
    hosted = domain.get("judge_model_type") != "api" and own
    model = own if hosted else domain.get("judge_model_name") or own
    arguments: dict[str, Any] = {"judge_model_name": model or "judge"}
    if hosted:
        arguments |= {"judge_model_type": "inference", "engine": _judge_engine(draft, base, domain)}
    else:
        arguments["judge_api_url"] = domain.get("judge_api_url") or JUDGE_URL
    arguments |= _sampling(domain)
    if domain.get("judge_api_key") and not hosted:
        arguments["judge_api_key_env"] = "JUDGE_API_KEY"
        to_do(draft, f"{base}.judge_api_key", "put it into the environment as JUDGE_API_KEY")
    if not hosted and not domain.get("judge_api_url"):
        note = f"serve {model} at {JUDGE_URL}, for example with vllm serve, on devices that the run does not use"
        to_do(draft, f"{base}.judge_model_type", note, domain.get("judge_model_type"))
    if domain.get("judge_prompt"):
        to_do(draft, f"{base}.judge_prompt", "its text is not copied: the judge's own is used unless you write one")
    return arguments


def _judge_engine(draft: Draft, base: str, domain: dict[str, Any], ours: str = "") -> dict[str, Any]:
    """Engine that samples a judge on the run's own devices: theirs, else plain Transformers."""
    strategy = dict(domain.get("strategy_args") or {})
    if strategy.get("strategy_name") not in ("vllm", "sglang"):
        strategy = {"strategy_name": "hf_infer"}
    elif (size := (strategy.get("strategy_config") or {}).get("tensor_parallel_size", 1)) > 1:
        draft.derive(f"{base}.strategy_args", f"{ours or base}.num_gpus_per_worker", size)
    engine: dict[str, Any] = {"strategy_args": {key: value for key, value in strategy.items() if value is not None}}
    model = domain.get("model_args") or {}
    if model.get("dtype"):
        engine["model_args"] = {"dtype": model["dtype"]}
    if mapping := domain.get("device_mapping"):
        draft.derive(f"{base}.device_mapping", f"{ours or base}.device_mapping", mapping)
    return engine


def _sampling(given: dict[str, Any]) -> dict[str, Any]:
    """Length and temperature of a judge's answers."""
    sampling = given.get("generating_args") or {}
    known = {"temperature": "temperature", "max_tokens": "max_new_tokens"}
    return {ours: sampling[theirs] for ours, theirs in known.items() if sampling.get(theirs) is not None}


TEMPLATES = ("native", "chatml", "qwen2", "qwen2_5", "llama3", "gemma", "plain")
_VERIFIERS: dict[str, str] = {
    "MathRuleRewardWorker": "math",
    "GeneralValRuleRewardWorker": "math",
    "CodeSandboxRewardWorker": "code",
    "GeneralRuleRewardWorker": "instruction",
    "CrossThinkQARuleRewardWorker": "multiple_choice",
    "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
    "DetectionRewardWorker": "boxes",
    "Geo3kRewardWorker": "math",
    "LLMJudgeRewardWorker": "judge",
}
"""Verifiers by the name of the worker class whose place they take."""
_LENGTHS = {"min_tokens": 100, "max_tokens": 400}
"""Within them their length reward rises from -0.5 to 0; they count the padding too, which is not copied."""
_BOX = r"\\boxed\{%s\}"
_CHOSEN: dict[str, list[dict[str, Any]]] = {
    "loose": [{"name": "multiple_choice", "weight": 2.0}],
    "soft": [
        {"name": "multiple_choice", "weight": 1.5},
        {"name": "format", "weight": 0.5, "args": {"pattern": rf".*{_BOX % '[^}]+'}(?!.*</think>).*"}},
    ],
    "strict": [{"name": "multiple_choice", "weight": 2.0, "args": {"answer_pattern": _BOX % "([^}]+)"}}],
}
"""Rewards by ``reward_type``, but for a constant: the right letter, a box, the right letter in a box."""
_FILTER, _BOUNDS = {"type", "filter_args", "low", "high"}, {"threshold_down", "threshold_up", "std_threshold"}
_THEIR_PROMPT = 1024
"""Tokens of a prompt by default."""
UNBOUNDED = 1.0e9
"""A bound on the norm of gradients that none reaches."""
_SWANLAB = {"experiment_name": "name", "logdir": "log_dir"}
_SECRETS = ("key", "token", "secret", "password", "login")


def derive(draft: Draft) -> type[PipelineConfig]:
    """Everything that no row of the table says by itself; returns whose configuration it is."""
    _run(draft)
    if is_distillation(draft):
        _roles(draft)
        set_distillation(draft)
        _validation(draft)
        drop_unread(draft)
        tidy_engines(draft)
        profiler_of_roll(draft)
        _nodes(draft)
        _clipping(draft, 0.0)
        return DistillConfig
    if (schema := offline_schema(draft)) is not None:
        _roles(draft)
        _template(draft)
        _validation(draft)
        set_offline(draft, schema)
        tidy_engines(draft)
        profiler_of_roll(draft)
        _nodes(draft)
        _clipping(draft, 1.0)
        return schema
    agentic = any(draft.has(key) for key in ("custom_envs", *MANAGERS))
    rollouts_alone = not any(draft.has(f"actor_train.{key}") for key in ("strategy_args", "device_mapping"))
    _roles(draft)
    set_teachers(draft, _roles)
    set_teacher(draft)
    _data(draft, agentic)
    _validation(draft)
    _lengths(draft, agentic)
    for name in draft.theirs("rewards", {}) or {}:
        _reward(draft, str(name))
    if agentic:
        set_environments(draft)
        set_asked_model(draft)
    if draft.get("async_generation_ratio") and not draft.get("train_infer_correction.is_weight.enabled"):
        draft.derive(
            "async_generation_ratio", "train_infer_correction.is_weight.enabled", True, "old samples have weights"
        )
    _normalisation(draft)
    drop_unread(draft)
    _loss(draft)
    _clipping(draft, 1.0)
    tidy_engines(draft)
    profiler_of_roll(draft)
    _batches(draft, agentic)
    _nodes(draft)
    if agentic and rollouts_alone:
        evaluate_alone(draft)
    return AgenticConfig if any(key in draft.ours for key in ("custom_envs", "train_env_manager")) else RLVRConfig


def _run(draft: Draft) -> None:
    trained = [f"{role}.training_args" for role in ("actor_train", "critic", "student")]
    if any(float(draft.theirs(f"{base}.warmup_{kind}") or 0) for base in trained for kind in ("steps", "ratio")):
        draft.given.notes.append(
            "a warm-up of W steps has the rate k / W in step k there, 0 in the first, and (k + 1) / (W + 1) here"
        )
    if draft.theirs("rollout_mock.enable"):
        mode, folder = draft.theirs("rollout_mock.mode", "dump"), draft.theirs("rollout_mock.dump_dir")
        ours = "rollout_replay_dir" if mode in ("mock", "replay") else "rollout_dump_dir"
        draft.derive(["rollout_mock.dump_dir", "rollout_mock.mode", "rollout_mock.enable"], ours, folder)
        if ours == "rollout_replay_dir":
            to_do(
                draft, "rollout_mock.dump_dir", "its dumps are not read: write them anew with rollout_dump_dir", folder
            )
    if draft.has("system_envs.USE_MODELSCOPE") or draft.theirs("model_download_type"):
        key = "system_envs.USE_MODELSCOPE" if draft.has("system_envs.USE_MODELSCOPE") else "model_download_type"
        to_do(draft, key, "models come from the Hugging Face hub: see that pretrain is a name there, or a folder")
    if (kind := draft.theirs("checkpoint_config.type")) not in (None, "file_system"):
        draft.derive("checkpoint_config.type", "checkpoint_config.type", "file_system")
        to_do(draft, "checkpoint_config.type", "checkpoints go to the folder checkpoint_config.output_dir", kind)
    if draft.has("track_with") and draft.get("track_with") is None:
        value = draft.theirs("track_with")
        draft.outcomes = [each for each in draft.outcomes if each.key != "track_with"]
        draft.derive("track_with", "track_with", "stdout")
        to_do(draft, "track_with", f"no tracker {value} here: package.module:Class names your own", value)
    for key, value in (draft.theirs("tracker_kwargs") or {}).items():
        path = f"tracker_kwargs.{key}"
        if draft.get("track_with") == "stdout":
            draft.tell(
                Kind.DROPPED,
                path,
                "…" if any(secret in str(key) for secret in _SECRETS) else value,
                note="stdout takes no options",
            )
            continue
        if any(secret in str(key) for secret in _SECRETS):
            if value:
                to_do(draft, path, "a secret is not written out: put it into the environment, as WANDB_API_KEY")
        elif value is not None and draft.get("track_with") == "swanlab" and key in _SWANLAB:
            draft.derive(path, f"tracker_kwargs.{_SWANLAB[key]}", value)
        elif value is not None:
            draft.keep(path, value)


def _roles(draft: Draft) -> None:
    for role in ROLES:
        if not isinstance(draft.theirs(role), dict):
            continue
        tell_worker(draft, role, "the role's own class does it")
        if model := draft.theirs(theirs := f"{role}.model_args.model_name_or_path"):
            key = {"critic": "reward_pretrain", "teacher": "teacher_pretrain"}.get(role, "pretrain")
            if role == "reference" and draft.get(key) not in (None, model):
                key = "reference_pretrain"
            if not draft.get(key):
                draft.derive(theirs, key, model)
            elif draft.get(key) != model:
                words = f"{role} starts from {key}, {draft.get(key)}"
                draft.tell(Kind.IMPOSSIBLE, theirs, model, note=words)
            else:
                draft.tell(Kind.DROPPED, theirs, model, note=f"it is {key}")
        set_engine(draft, role)
        set_model_kwargs(draft, role)
        if role == "actor_infer":
            drop_adapter(draft)
        if names := draft.get(frozen := f"{role}.model_args.freeze_module_prefix"):
            own = ",".join(_TOWER.sub("model.visual", name.strip()) for name in str(names).split(","))
            if own == "model.visual" and not media_in(draft):
                draft.drop_ours(frozen, "a run on text leaves the tower as it is; with pictures, freeze model.visual")
            elif own != names:
                draft.derive(frozen, frozen, own, "the name of the tower in a checkpoint")
        if role in TRAINED and draft.get(f"{role}.model_args.dtype") == "fp16":
            draft.set(f"{role}.model_args.dtype", "bf16")
            draft.retell(f"{role}.model_args.dtype", Kind.IMPOSSIBLE, "nothing is trained in fp16: bf16 is taken")


_TOWER = re.compile(r"^(?:model\.)?(?:vision_model|visual)(?=\.|$)")
"""The vision tower, as ROLL's Megatron models and older checkpoints call it."""


def _is_template(template: Any) -> bool:
    return template in TEMPLATES or "{" in str(template) or "/" in str(template)


def _template(draft: Draft) -> None:
    for tag, own in (draft.theirs("tag_to_template") or {}).items():
        taken = own if _is_template(own) else "native"
        note = "" if taken == own else f"{own}: the tokenizer's own"
        draft.derive(f"tag_to_template.{tag}", f"actor_train.data_args.tag_templates.{tag}", taken, note)
    template = draft.theirs("actor_train.data_args.template") or draft.theirs("global_template")
    if template and _is_template(template):
        draft.keep("actor_train.data_args.template", template)
    elif template:
        key = "actor_train.data_args.template"
        draft.derive(key, key, "native", f"{template}: the tokenizer's own")


def _data(draft: Draft, agentic: bool) -> None:
    _template(draft)
    if agentic:
        for key in ("file_name", "prompt", "messages", "response", "tag", "id", "preprocessing_num_workers"):
            draft.drop_ours(f"actor_train.data_args.{key}", "the environments are the data")
        return
    data = "actor_train.data_args"
    seen = bool(draft.get(f"{data}.file_name") and media_in(draft))
    if seen:
        _picture_columns(draft, data)
    elif draft.get(f"{data}.file_name") and not draft.get(f"{data}.messages") and not draft.get(f"{data}.prompt"):
        draft.derive(f"{data}.messages", f"{data}.messages", "messages", "the column that ROLL looks for first")
    if draft.get(f"{data}.messages") and draft.get(f"{data}.prompt"):
        draft.drop_ours(f"{data}.prompt", "messages is read")
    if draft.get(f"{data}.file_name") and not seen:
        column = draft.theirs(f"{data}.response") or "ground_truth"
        draft.derive(f"{data}.response", f"{data}.response", column, "the column that rewards compare with")
    if draft.get(f"{data}.file_name"):
        draft.derive("prompt_length", f"{data}.prompt_overflow", "drop", "a prompt that is too long is left out")
    if asked := [key for key in VIDEO_RULES if draft.has(f"{data}.{key}")]:
        draft.derive(f"{data}.{asked[0]}", f"{data}.video", "video", "the column of ROLL's own example")
        if not draft.has(most := f"{data}.video_max_frames"):
            draft.derive(f"{data}.{asked[0]}", most, 128, "ROLL's default")
    shares = draft.get(f"{data}.domain_interleave_probs")
    if isinstance(shares, dict):
        total = sum(float(share) for share in shares.values()) or 1.0
        total = 1.0 if abs(total - 1) < 1e-6 else total
        known = {name: float(share) / total for name, share in shares.items() if float(share) > 0}
        draft.set(f"{data}.domain_interleave_probs", known)


def _picture_columns(draft: Draft, data: str) -> None:
    """What ROLL's pipelines for pictures read of a row, whatever the keys say; that for mathematics has no domains."""
    if reader := draft.theirs(key := f"{data}.custom_data_kwargs_func"):
        _own_reader(draft, key, str(reader), data)
        return
    if draft.has(f"{data}.domain_interleave_probs"):
        own, most = {"messages": "prompt", "response": "reward_model.ground_truth", "tag": "data_source"}, 4096
        draft.forget(f"{data}.prompt")
    else:
        given = [draft.theirs(f"{data}.{key}") for key in ("prompt", "response")]
        own, most = {"prompt": given[0] or "problem", "response": given[1] or "solution", "image": "image"}, 768
        tags = [tag for domain in draft.theirs("rewards", {}).values() for tag in domain.get("tag_included") or ()]
        own["default_tag"] = next(iter([*tags, *draft.theirs("rewards", {})]), "math")
        draft.forget(f"{data}.messages")
    set_picture_columns(draft, own, most)


def _own_reader(draft: Draft, key: str, reader: str, data: str) -> None:
    """A function of theirs that reads the rows: ROLL's own example has columns of Video-R1."""
    if not reader.endswith(".video_r1_get_data_kwargs"):
        draft.tell(Kind.IMPOSSIBLE, key, reader, note=f"a function of its own reads the rows: {data}.dataset_cls does")
        return
    draft.forget(f"{data}.messages")
    for ours, column in {"prompt": "problem", "response": "solution", "tag": "modality_type"}.items():
        draft.derive(key, f"{data}.{ours}", column, "what that function reads")
    note = "a question is followed by how to think and answer there, by problem_type: write it into the rows"
    draft.tell(Kind.TO_DO, f"{data}.prompt", "problem", note=note)


def _validation(draft: Draft) -> None:
    data = draft.theirs("validation.data_args")
    if not isinstance(data, dict) or not data.get("file_name"):
        if draft.has("validation"):
            draft.remove("validation")
            draft.tell(Kind.DROPPED, "validation", "a section", note="it names no file")
        return
    own = {key: data[key] for key in ("file_name", "prompt", "messages", "response", "tag", "id") if data.get(key)}
    if "messages" in own:
        own.pop("prompt", None)
    for key, value in own.items():
        draft.keep(f"validation.data_args.{key}", value)


def _lengths(draft: Draft, agentic: bool) -> None:
    if agentic:
        _turn_lengths(draft)
    else:
        _answer_lengths(draft)
    for role, _ in list(draft.roles()):
        key = f"{role}.strategy_args.strategy_config.max_model_len"
        limit = draft.theirs(key)
        if limit and int(limit) < draft.get("sequence_length"):
            words = f"the engine holds a whole sample of sequence_length {draft.get('sequence_length')}"
            draft.tell(Kind.DROPPED, key, limit, note=words)
        elif limit:
            draft.keep(key, int(limit))


def _answer_lengths(draft: Draft) -> None:
    """RLVR: an answer has what prompts leave of a sequence, whatever its sampling arguments say."""
    prompt, response = int(draft.theirs("prompt_length") or _THEIR_PROMPT), draft.theirs("response_length")
    whole = int(draft.theirs("sequence_length") or prompt + int(response or _THEIR_PROMPT))
    longest = max(1, whole - prompt)
    if response is not None and int(response) == longest:
        draft.keep("response_length", longest)
    else:
        note = "an answer may have what prompt_length leaves of sequence_length there"
        draft.derive(["sequence_length", "prompt_length"], "response_length", longest, note)
        if response is not None:
            draft.tell(Kind.DROPPED, "response_length", response, note="sequence_length is read")
    if draft.has("prompt_length"):
        draft.keep("prompt_length", prompt)
    else:
        draft.derive("prompt_length", "prompt_length", prompt, "ROLL's default")
    if draft.theirs("sequence_length") is None:
        draft.derive(["prompt_length", "response_length"], "sequence_length", whole)
    else:
        draft.keep("sequence_length", whole)
    for key in ("actor_infer.generating_args", "validation.generating_args"):
        if draft.get(f"{key}.max_new_tokens") is not None:
            draft.drop_ours(f"{key}.max_new_tokens", "every answer may have response_length there, whatever it says")


def _turn_lengths(draft: Draft) -> None:
    """Environments: a turn is as long as the longest that is asked for."""
    answers = [
        draft.get("actor_infer.generating_args.max_new_tokens"),
        *(draft.theirs(f"custom_envs.{tag}.max_tokens_per_step") for tag in (draft.theirs("custom_envs") or {})),
        *(draft.theirs(f"{manager}.generating_args.max_new_tokens") for manager in MANAGERS),
    ]
    asked = [int(each) for each in answers if isinstance(each, int)]
    response = draft.theirs("response_length")
    longest = max([*asked, *([int(response)] if response and not asked else [])], default=1024)
    draft.derive("response_length", "response_length", longest, "the longest answer of a turn")
    prompt, whole = draft.theirs("prompt_length"), draft.theirs("sequence_length")
    if whole is None:
        prompt = int(prompt or 1024)
        draft.derive(["prompt_length", "response_length"], "sequence_length", prompt + longest)
    else:
        draft.keep("sequence_length", int(whole))
        room = max(1, int(whole) - longest)
        if prompt is None or int(prompt) > room:
            note = "what is left of sequence_length"
            draft.derive(["sequence_length", "prompt_length"], "prompt_length", room, note)
            prompt = None
    if prompt is not None:
        draft.keep("prompt_length", int(prompt))


def _snake(name: str) -> str:
    """The name of a file for a class."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _reward(draft: Draft, name: str) -> None:
    base = f"rewards.{name}"
    domain: dict[str, Any] = draft.theirs(base) or {}
    draft.set(f"{base}.tag_included", domain.get("tag_included") or [name])
    draft.tell(Kind.KEPT, f"{base}.tag_included", domain.get("tag_included"), f"{base}.tag_included")
    worker = str(domain.get("worker_cls") or "")
    verifier = _VERIFIERS.get(worker.rpartition(".")[2])
    if verifier is None:
        note = "no verifier takes its place: write the function that args.path of the verifier custom names"
        draft.tell(Kind.IMPOSSIBLE, f"{base}.worker_cls", worker or None, note=note)
        verifier = "custom"
    entry: dict[str, Any] = {"name": verifier}
    verifiers = [entry]
    if verifier == "custom":
        entry["args"] = {"path": f"{_snake(worker.rpartition('.')[2] or name)}.py:score"}
    if verifier == "judge":
        entry["args"] = judge_arguments(draft, base, domain)
    elif reward := worker.endswith("CrossThinkQARuleRewardWorker") and domain.get("reward_type"):
        verifiers = [*_CHOSEN.get(reward, verifiers)]
        note = "1 less in each row there, and up to 0.5 less for groups of three words that come again"
        draft.tell(Kind.DERIVED, f"{base}.reward_type", reward, f"{base}.verifiers", note=note)
    elif verifier == "code":
        entry["args"] = {"tests_key": "test_cases"}
        if domain.get("code_url") and domain.get("use_local") is False:
            entry["args"]["remote"] = {"url": domain["code_url"]}
    if worker.endswith("Geo3kRewardWorker"):
        verifiers = GEO3K["verifiers"]
    if domain.get("format_pattern"):
        verifiers = [*verifiers, {"name": "format", "args": {"pattern": domain["format_pattern"]}}]
    if coefficient := domain.get("response_length_penalty_coef"):
        key = f"{base}.response_length_penalty_coef"
        if worker.endswith("CrossThinkQARuleRewardWorker"):
            verifiers.append({"name": "length", "weight": float(coefficient), "args": dict(_LENGTHS)})
            draft.tell(Kind.DERIVED, key, coefficient, f"{base}.verifiers", note="the verifier length, in tokens")
        else:
            draft.tell(Kind.DROPPED, key, coefficient, note="only CrossThinkQARuleRewardWorker reads it there")
    draft.derive(f"{base}.worker_cls", f"{base}.verifiers", verifiers, f"the verifier {verifier}")
    if domain.get("world_size") and verifier != "judge":
        draft.derive(f"{base}.world_size", f"{base}.world_size", domain["world_size"])
    chosen = domain.get("query_filter_config") or {}
    limits = chosen.get("filter_args") or {}
    for key in [*(chosen.keys() - _FILTER), *(f"filter_args.{key}" for key in limits.keys() - _BOUNDS)]:
        draft.tell(Kind.UNKNOWN, f"{base}.query_filter_config.{key}", value_at(chosen, key))
    bounds = {"type": chosen.get("type", "no_filter")}
    bounds["low"] = limits.get("threshold_down", limits.get("std_threshold", chosen.get("low")))
    bounds["high"] = limits.get("threshold_up", chosen.get("high"))
    if bounds["type"] != "no_filter":
        given = {key: value for key, value in bounds.items() if value is not None}
        draft.derive(f"{base}.query_filter_config", f"{base}.query_filter_config", given)
    for key in ("model_args", "data_args", "strategy_args", "generating_args", "device_mapping"):
        if domain.get(key) and verifier == "judge":
            draft.tell(Kind.DERIVED, f"{base}.{key}", NOTHING, f"{base}.verifiers", note="of the judge")
        elif domain.get(key):
            draft.tell(Kind.DROPPED, f"{base}.{key}", "a section", note="rules load no model")


def _normalisation(draft: Draft) -> None:
    """At most one normalisation of the rewards; what is newer goes before."""
    if draft.get("use_reward_norm") and not draft.get("use_reward_scaling"):
        draft.drop_ours("use_reward_norm", "read with use_reward_scaling")
    if draft.get("reward_shift") and draft.get("reward_scale"):
        draft.drop_ours("reward_scale", "reward_shift goes before it")
    if draft.get("norm_mean_type") is None and draft.get("norm_std_type") is None:
        return
    if draft.get("reward_normalization.method", "identity") != "identity":
        draft.drop_ours("reward_normalization", "norm_mean_type and norm_std_type are read")


def _loss(draft: Draft) -> None:
    """What ROLL's losses have as constants, and keys have here."""
    if draft.get("dual_clip_loss"):
        bound = round(1 + 2 * float(draft.theirs("pg_clip", 0.2)), 6)
        draft.derive(["dual_clip_loss", "pg_clip"], "dual_clip_c", bound, "1 + 2 × pg_clip there")
    if draft.get("use_kl_loss"):
        key = "kl_loss_penalty" if draft.get("add_token_level_kl") else "kl_penalty"
        if key == "kl_penalty" and draft.get(key) is not None:
            draft.drop_ours(key, "of the KL in the reward, which is off")
        if key == "kl_penalty" or draft.get("kl_penalty", "k1") != "k3":
            draft.derive("use_kl_loss", key, "k3", "the KL loss is always k3 there")


def _clipping(draft: Draft, usual: float) -> None:
    """Gradients that are not clipped, where the bound is 0 or null, or 0 is the pipeline's default."""
    if not draft.theirs("max_grad_norm", usual):
        draft.derive("max_grad_norm", "max_grad_norm", UNBOUNDED, "0 there: gradients are not clipped")


def _batches(draft: Draft, agentic: bool) -> None:
    samples = int(draft.get("rollout_batch_size", 128))
    if not agentic:
        samples *= int(draft.get("num_return_sequences_in_group", 1))
    for role in ("actor_train", "critic"):
        if role not in draft.ours:
            continue
        arguments = f"{role}.training_args"
        per_device = int(draft.get(f"{arguments}.per_device_train_batch_size", 8))
        ranks = max(1, devices_of(draft, role) // parallel_sizes(draft, role))
        wanted = per_device * int(draft.get(f"{arguments}.gradient_accumulation_steps", 1)) * ranks
        if samples % wanted:
            keys = [f"{arguments}.gradient_accumulation_steps"]
            set_batch(draft, role, min(wanted, samples), per_device, keys, samples)
    if draft.ours.get("actor_infer", {}).get("generating_args", {}).get("num_return_sequences", 1) != 1:
        draft.remove("actor_infer.generating_args.num_return_sequences")


def _nodes(draft: Draft) -> None:
    sections = [*(section for _, section in draft.roles()), *draft.ours.get("rewards", {}).values()]
    sections += [*draft.ours.get("teachers", {}).values(), draft.ours.get("judge", {})]
    devices = [each for section in sections for each in parse_device_mapping(section.get("device_mapping")) or []]
    per_node = int(draft.get("num_gpus_per_node", 8))
    if devices and max(devices) >= per_node:
        draft.derive("num_nodes", "num_nodes", max(devices) // per_node + 1, "the largest device that a role has")
