"""``tools``: what a policy may call while it answers, and how far it may go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem
from roll.configs.schema import nearest
from roll.configs.worker import EnvironmentVariables


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
    timeout: float = Field(default=10.0, gt=0, description="Seconds that one call may take.")
    retries: int = Field(
        default=0, ge=0, description="New attempts at a call that raised something else than a ToolError."
    )


class McpServerConfig(Config):
    """A server of the Model Context Protocol: its tools under their own names."""

    command: list[str] | None = Field(
        default=None, min_length=1, description="Program and arguments; it speaks the protocol on its pipes."
    )
    url: str | None = Field(default=None, min_length=1, description="Of a running server (streamable HTTP).")
    env: EnvironmentVariables = Field(
        default_factory=dict, description="Environment variables of the program, beside a few harmless ones of ours."
    )
    cwd: str | None = Field(default=None, description="Working folder of the program.")
    only: list[str] | None = Field(default=None, description="The tools to take; null: all.")
    tags: list[str] | None = Field(
        default=None, description="Tags of prompts or environments that have the tools; null: all."
    )
    timeout: float = Field(default=10.0, gt=0, description="Seconds that a call, or the start of the server, may take.")
    retries: int = Field(default=0, ge=0, description="New attempts at a call that the server did not answer.")

    def problems(self) -> list[ConfigProblem]:
        if (self.command is None) != (self.url is None):
            return []
        return [self.problem("command", "a command or a url, one of them", "url")]


class ToolsConfig(Config):
    """The tools of an episode, and its limits."""

    use: dict[str, ToolConfig] = Field(
        default_factory=dict, description="Tools by the name that the policy calls them by, functions included."
    )
    servers: dict[str, McpServerConfig] = Field(
        default_factory=dict,
        description="Servers of the Model Context Protocol; each rollout worker has one connection to each.",
    )
    dialect: str = Field(
        default="hermes",
        min_length=1,
        description="How the model writes calls: the name of a dialect, or package.module:Class.",
    )
    max_turns: int = Field(
        default=6,
        ge=1,
        description="Most turns with calls in an episode, beside those of its environment; what is called after them "
        "is not run.",
    )
    max_parallel_calls: int = Field(
        default=4, ge=1, description="Most calls of one turn that are run; the others are answered with an error."
    )
    max_tool_response_tokens: int = Field(
        default=256, ge=1, description="A longer result is cut to this many tokens, the note of it not included."
    )
    tool_response_truncate_side: Literal["left", "middle", "right"] = Field(
        default="middle", description="Where a result that is too long is cut."
    )
    malformed_call_penalty: float = Field(
        default=0.0, le=0, description="Added to the reward of a turn for each call that cannot be read."
    )

    def problems(self) -> list[ConfigProblem]:
        expected = "letters, digits, _ and -, at most 64 of them"
        found = [
            self.problem("use", expected, seen=name)
            for name in self.use
            if len(name) > 64 or not name.replace("_", "").replace("-", "").isalnum() or not name.isascii()
        ]
        if not self.use and not self.servers:
            found.append(self.problem("use", "at least one tool, here or of servers", "servers"))
        return found

    def reaches(self, tag: str) -> bool:
        """Whether a prompt or environment of that tag has tools."""
        entries: list[ToolConfig | McpServerConfig] = [*self.use.values(), *self.servers.values()]
        return any(entry.tags is None or tag in entry.tags for entry in entries)


def tool_tag_problems(tools: ToolsConfig | None, tags: Sequence[str], beside: str) -> list[ConfigProblem]:
    """Tools for tags that there are not.

    Args:
        tools: the section.
        tags: of the prompts or environments.
        beside: the section that has them.
    """
    problems = []
    if tools is None:
        return []
    entries: dict[str, ToolConfig | McpServerConfig] = {f"use.{name}": entry for name, entry in tools.use.items()}
    entries |= {f"servers.{name}": entry for name, entry in tools.servers.items()}
    for key, one in entries.items():
        for tag in one.tags or ():
            if tag not in tags:
                near = nearest(tag, tags)
                hint = f"did you mean {near}?" if near else ""
                expected = f"tags among {', '.join(tags) or 'none'}"
                problems.append(ConfigProblem(f"tools.{key}.tags", tag, expected, hint, involves=(beside,)))
    return problems
