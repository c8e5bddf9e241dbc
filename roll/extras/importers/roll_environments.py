"""ROLL's environments, their managers, and the wrappers that are a section of tools here."""

from __future__ import annotations

from typing import Any

from roll.configs.agentic import MANAGERS
from roll.extras.importers.common import to_do
from roll.extras.importers.draft import Draft, Kind

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
