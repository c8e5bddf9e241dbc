"""verl's tools: the file that names their classes, and their limits in an episode."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from roll.extras.importers.common import to_do
from roll.extras.importers.draft import Draft, Kind
from roll.extras.importers.reading import find_file
from roll.extras.importers.verl_roles import ROLLOUT

_TURNS = f"{ROLLOUT}.multi_turn"
_PATHS = (f"{_TURNS}.tool_config_path", "data.tool_config_path")
_RETRIEVAL = "SearchTool"
_PROGRAMS = ("SandboxFusionTool", "CodeInterpreter", "PythonTool")
_MOST_TURNS = 100
_DIALECTS = {"hermes": "hermes", "gpt-oss": "harmony"}
"""Ways to write calls, by their names."""
_NAME = re.compile(r"[^\w-]+")


class _NotThereError(ValueError):
    """A file, or what should be in it. The message says why."""


def set_tools(draft: Draft) -> None:
    """The section ``tools``, of what the named file holds."""
    where = next((key for key in _PATHS if draft.theirs(key)), None)
    loop = draft.theirs(f"{ROLLOUT}.agent.default_agent_loop") or "single_turn_agent"
    if where is None:
        if draft.theirs(f"{_TURNS}.enable") or loop == "tool_agent":
            key = f"{_TURNS}.enable" if draft.theirs(f"{_TURNS}.enable") else f"{ROLLOUT}.agent.default_agent_loop"
            note = "no tool_config_path says which tools there are: name them in tools.use or tools.servers"
            draft.tell(Kind.IMPOSSIBLE, key, draft.theirs(key), "tools", note=note)
        return
    if read_tools(draft, where) and draft.get("tools"):
        _limits(draft)


def read_tools(draft: Draft, where: str) -> bool:
    """Sets the tools of the file that a key names; whether it could be read, which is told."""
    path = str(draft.theirs(where))
    try:
        for entry in _entries(draft, path):
            _tool(draft, where, entry)
    except _NotThereError as why:
        note = f"{why}: name its tools in tools.use or tools.servers"
        draft.tell(Kind.IMPOSSIBLE, where, path, "tools", note=note)
        return False
    return True


def _entries(draft: Draft, path: str) -> list[dict[str, Any]]:
    file = _file(draft, path)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _NotThereError(f"{file} is no YAML ({' '.join(str(error).split())})") from error
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _NotThereError(f"{file} has no list of tools")
    return entries


def _file(draft: Draft, path: str) -> Path:
    found = find_file(path, draft.given.folders)
    if found is None:
        raise _NotThereError(f"{path} is not there")
    return found


def _tool(draft: Draft, where: str, entry: dict[str, Any]) -> None:
    """One entry: tools of a server, a program's sandbox, or a class of theirs."""
    path = str(entry.get("class_name") or "")
    config = dict(entry.get("config") or {})
    kind = config.pop("type", "native")
    if kind == "mcp":
        for name, server in _servers(draft, where, entry, config):
            draft.derive(where, f"tools.servers.{name}", server)
        return
    schema = (entry.get("tool_schema") or {}).get("function") or {}
    module, _, cls = path.rpartition(".")
    name = _NAME.sub("_", str(schema.get("name") or cls or "tool"))
    if cls in _PROGRAMS:
        timeout = float(config.get("default_timeout") or 30)
        own: dict[str, Any] = {"tool": "python", "args": {"wall_seconds": timeout}, "timeout": timeout + 10}
        note = f"programs run in the sandbox here, not where {cls} sends them"
        draft.derive(where, f"tools.use.{name}", own, note)
        return
    if cls == _RETRIEVAL and config.get("retrieval_service_url"):
        args: dict[str, Any] = {"url": str(config["retrieval_service_url"])}
        args |= {"num_results": int(config["topk"])} if config.get("topk") else {}
        args |= {"seconds": float(config["timeout"])} if config.get("timeout") else {}
        note = "one query per call; the lists of several that SearchTool takes are several calls"
        draft.derive(where, f"tools.use.{name}", {"tool": "retrieval", "args": args}, note)
        return
    own = {"tool": f"{module}:{cls}" if module else path}
    if "timeout" in config:
        own["timeout"] = float(config.pop("timeout"))
    if config:
        own["args"] = config
    draft.derive(where, f"tools.use.{name}", own)
    arguments = ", ".join((schema.get("parameters") or {}).get("properties") or {}) or "none"
    note = (
        f"make {cls} a subclass of roll.agentic.tools.tool:Tool: its schema (arguments: {arguments}) an attribute, "
        "execute becomes call(arguments, state), what create keeps goes into state; rewards of a tool are a verifier's"
    )
    to_do(draft, where, note, path, f"tools.use.{name}")


def _servers(
    draft: Draft, where: str, entry: dict[str, Any], config: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Servers of the Model Context Protocol, by names of ours."""
    own = entry.get("mcp") or {}
    file = _file(draft, str(own.get("mcp_servers_config_path") or "mcp_servers_config_path"))
    try:
        named = json.loads(file.read_text(encoding="utf-8"))["mcpServers"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _NotThereError(f"{file} has no mcpServers") from error
    for theirs, server in named:
        found: dict[str, Any] = {}
        if server.get("command"):
            found["command"] = [str(server["command"]), *map(str, server.get("args") or [])]
            if server.get("env"):
                found["env"] = {str(key): str(value) for key, value in server["env"].items()}
        else:
            found["url"] = str(server.get("url") or "")
        if server.get("auth_token") or server.get("headers"):
            note = f"{theirs} wants a token, which is not sent: reach it through a command that does"
            draft.tell(Kind.IMPOSSIBLE, where, theirs, note=note)
        if own.get("tool_selected_list"):
            found["only"] = [str(name) for name in own["tool_selected_list"]]
        if config.get("timeout"):
            found["timeout"] = float(config["timeout"])
        yield _NAME.sub("_", str(theirs)), found


def _limits(draft: Draft) -> None:
    """Turns and results; a number that is not given is theirs."""
    calls = draft.theirs(f"{_TURNS}.max_assistant_turns") or draft.theirs(f"{_TURNS}.max_turns")
    answers = draft.theirs(f"{_TURNS}.max_user_turns")
    bounds = [int(calls) - 1] if calls else []
    bounds += [int(answers)] if answers else []
    keys = [f"{_TURNS}.{key}" for key in ("max_assistant_turns", "max_user_turns", "max_turns")]
    note = "turns with calls; the last of the policy's turns answers" if bounds else "no bound there"
    draft.derive(keys, "tools.max_turns", max(1, min(bounds, default=_MOST_TURNS)), note)
    most = int(draft.theirs(f"{_TURNS}.max_parallel_calls") or 1)
    draft.derive(f"{_TURNS}.max_parallel_calls", "tools.max_parallel_calls", most)
    length = int(draft.theirs(f"{_TURNS}.max_tool_response_length") or 256)
    key = f"{_TURNS}.max_tool_response_length"
    draft.derive(key, "tools.max_tool_response_tokens", length, "tokens here, characters there")
    set_form(draft, f"{_TURNS}.tool_response_truncate_side", f"{_TURNS}.format")
    if draft.theirs(f"{_TURNS}.enable"):
        draft.tell(Kind.DERIVED, f"{_TURNS}.enable", True, "tools")


def set_form(draft: Draft, side: str, form: str) -> None:
    """Form of results and of calls, by their keys for it."""
    if draft.theirs(side) in ("left", "middle", "right"):
        draft.carry(side, "tools.tool_response_truncate_side")
    if (dialect := _DIALECTS.get(str(draft.theirs(form)))) is not None:
        draft.derive(form, "tools.dialect", dialect)
