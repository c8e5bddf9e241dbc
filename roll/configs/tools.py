"""``tools``: what a policy can call in an episode, and the limits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem
from roll.configs.schema import did_you_mean
from roll.configs.worker import EnvironmentVariables

AUTO_DIALECT = "auto"
"""The dialect that the chat template speaks."""


class ToolConfig(Config):
    """One tool."""

    tool: str = Field(
        min_length=1,
        description="Built-in tool (calculator, python, search), or package.module:name or folder/file.py:name of a "
        "function with typed arguments or of a subclass of roll.agentic.tools.tool:Tool.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the tool's constructor.")
    tags: list[str] | None = Field(
        default=None, description="Tags of prompts or environments that have the tool; null: all."
    )
    timeout: float = Field(
        default=10.0,
        gt=0,
        description="Seconds for one call, not counting waits for a free sandbox or process.",
    )
    isolation: Literal["none", "process"] = Field(
        default="none",
        description="process: each call runs in its own process, forked from one that has built the tool, which is "
        "killed at the end or the timeout with everything it started. State between calls must then be JSON. "
        "none: a thread or the event loop of the rollout worker.",
    )
    processes: int = Field(
        default=2,
        ge=1,
        description="With isolation process: calls of one rollout worker that run at the same time. Waiting for one "
        "does not count towards the timeout.",
    )
    memory_mb: int = Field(
        default=1024,
        ge=16,
        description="With isolation process: memory that a call can use in addition to the tool's.",
    )
    retries: int = Field(default=0, ge=0, description="Retries of a call that raised anything but a ToolError.")


class McpServerConfig(Config):
    """A server of the Model Context Protocol: its tools under their own names."""

    command: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Program and arguments; it speaks the protocol on its pipes. python is the run's.",
    )
    url: str | None = Field(default=None, min_length=1, description="Address of a running server (streamable HTTP).")
    env: EnvironmentVariables = Field(
        default_factory=dict,
        description="Environment variables of the program, in addition to a few harmless ones of the run.",
    )
    cwd: str | None = Field(default=None, description="Working folder of the program.")
    only: list[str] | None = Field(default=None, description="The tools to take; null: all.")
    tags: list[str] | None = Field(
        default=None, description="Tags of prompts or environments that have the tools; null: all."
    )
    timeout: float = Field(default=10.0, gt=0, description="Seconds for a call.")
    start_timeout: float = Field(
        default=60.0, gt=0, description="Seconds for the server to respond and list its tools."
    )
    retries: int = Field(default=0, ge=0, description="Retries of a call that the server did not answer.")

    def problems(self) -> Iterator[ConfigProblem]:
        if (self.command is None) == (self.url is None):
            yield self.problem("command", "a command or a url, one of them", "url")


class ToolsConfig(Config):
    """The tools of an episode, and their limits."""

    use: dict[str, ToolConfig] = Field(
        default_factory=dict,
        description="Tools, by the name under which the policy calls them; null removes one of an included file.",
    )
    servers: dict[str, McpServerConfig] = Field(
        default_factory=dict,
        description="Servers of the Model Context Protocol; each rollout worker has one connection to each.",
    )
    dialect: str = Field(
        default=AUTO_DIALECT,
        min_length=1,
        description="How the model writes calls: auto for its chat template's dialect, the name of a dialect, or "
        "package.module:Class.",
    )
    max_turns: int = Field(
        default=6,
        ge=1,
        description="Most turns with calls in an episode, in addition to those of its environment; later calls are "
        "not run.",
    )
    max_parallel_calls: int = Field(
        default=4,
        ge=1,
        description="Most calls of one turn that are run, and most malformed ones reported separately; the others get "
        "an error.",
    )
    max_tool_response_tokens: int = Field(
        default=256, ge=1, description="A longer result is cut to this many tokens, plus a note about the cut."
    )
    tool_response_truncate_side: Literal["left", "middle", "right"] = Field(
        default="middle", description="Where a result that is too long is cut."
    )
    pictures: bool = Field(
        default=False,
        description="Results may have pictures. Needs a policy that takes them and a chat template that writes them in "
        "results. false: an error for a tool, [image] in the text of a server.",
    )
    malformed_call_penalty: float = Field(
        default=0.0, le=0, description="Added to the reward of a turn for each call that cannot be parsed."
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nothing(cls, data: Any) -> Any:
        """Leaves out entries that are null, by which a file takes away what another one gives it."""
        if not isinstance(data, dict):
            return data
        return {
            key: {name: entry for name, entry in value.items() if entry is not None}
            if isinstance(value, dict)
            else value
            for key, value in data.items()
        }

    def problems(self) -> Iterator[ConfigProblem]:
        expected = "letters, digits, _ and -, at most 64 of them"
        yield from [
            self.problem("use", expected, got=name)
            for name in self.use
            if len(name) > 64 or not name.replace("_", "").replace("-", "").isalnum() or not name.isascii()
        ]
        if not self.use and not self.servers:
            yield self.problem("use", "at least one tool, here or of servers", "servers")

    def placed(self) -> ToolsConfig:
        """The section with paths that are the same in every folder, where files lie in this one."""
        use = {name: entry.model_copy(update={"tool": placed_path(entry.tool)}) for name, entry in self.use.items()}
        servers = {
            name: server.model_copy(
                update={
                    "command": server.command and placed_files(server.command),
                    "cwd": server.cwd and os.path.abspath(server.cwd),
                }
            )
            for name, server in self.servers.items()
        }
        return self.model_copy(update={"use": use, "servers": servers})

    def reaches(self, tag: str) -> bool:
        """Tells whether a prompt or environment of that tag has tools."""
        entries: list[ToolConfig | McpServerConfig] = [*self.use.values(), *self.servers.values()]
        return any(entry.tags is None or tag in entry.tags for entry in entries)


def tool_tag_problems(tools: ToolsConfig | None, tags: Sequence[str], beside: str) -> Iterator[ConfigProblem]:
    """Tools for tags that there are not."""
    if tools is None:
        return
    entries: dict[str, ToolConfig | McpServerConfig] = {f"use.{name}": entry for name, entry in tools.use.items()}
    entries |= {f"servers.{name}": entry for name, entry in tools.servers.items()}
    for key, one in entries.items():
        for tag in one.tags or ():
            if tag not in tags:
                hint = did_you_mean(tag, tags)
                expected = f"tags among {', '.join(tags) or 'none'}"
                yield ConfigProblem(f"tools.{key}.tags", tag, expected, hint, involves=(beside,))


def placed_files(command: list[str]) -> list[str]:
    """Program and arguments, files among them by whole paths; a program without a slash is one of ``PATH``."""
    return [
        os.path.abspath(part) if ("/" in part or (index and os.path.isfile(part))) and os.path.exists(part) else part
        for index, part in enumerate(command)
    ]


def placed_path(path: str) -> str:
    """``folder/file.py:name`` with the file's whole path; any other as it is."""
    file, colon, name = path.rpartition(":")
    return f"{os.path.abspath(os.path.expanduser(file))}{colon}{name}" if file.endswith(".py") else path
