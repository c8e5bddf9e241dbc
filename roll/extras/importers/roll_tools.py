"""ROLL's tools: what wraps an environment there is a section of tools, by tag, here."""

from __future__ import annotations

from typing import Any

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
