"""The task of an agent program for one episode, and its errors."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll.data.prompts import Prompt
from roll.data.tool_messages import PICTURE
from roll.rollout.errors import EnvError
from roll.rollout.observations import for_programs


class AgentError(EnvError):
    """An agent program crashed, hung or broke the protocol: its episode has no reward."""


class AgentExitError(AgentError):
    """An agent program exited with an error."""


@dataclass(frozen=True)
class AgentTask:
    """One task and the way to the policy. The reference answer is not in it."""

    id: str
    """Of the prompt."""
    tag: str
    messages: tuple[Mapping[str, Any], ...]
    """The dataset's, ``{"role": …, "content": …}``; the last is the user's. Pictures are OpenAI's parts, data URIs."""
    extra_info: Mapping[str, Any]
    """The row's other columns."""
    base_url: str
    """For a client of OpenAI's API, ``http://127.0.0.1:<port>/v1``; of Anthropic's, without ``/v1``."""
    api_key: str
    """Opens this episode alone, until it ends."""

    @property
    def prompt(self) -> str:
        """Text of the last message."""
        content = self.messages[-1]["content"]
        return content if isinstance(content, str) else "".join(part.get("text", PICTURE) for part in content)

    @classmethod
    def of(cls, prompt: Prompt, base_url: str, api_key: str) -> AgentTask:
        messages = tuple({**message, "content": for_programs(message["content"])} for message in prompt.messages)
        return cls(prompt.id, prompt.tag, messages, prompt.extra_info, base_url, api_key)

    def public(self) -> dict[str, Any]:
        """The task as JSON, without the key."""
        return {
            "id": self.id,
            "tag": self.tag,
            "prompt": self.prompt,
            "messages": [dict(message) for message in self.messages],
            "extra_info": dict(self.extra_info),
            "base_url": self.base_url,
        }


@dataclass(frozen=True)
class Workplace:
    """The folders of one episode."""

    folder: Path

    @property
    def work(self) -> Path:
        """Folder in which a command starts."""
        return self.folder / "work"


class AgentProgram(Protocol):
    """Runs one episode; cancelling it ends everything that it has started."""

    def run(self, task: AgentTask, place: Workplace) -> Coroutine[Any, Any, str | None]:
        """Returns the program's answer; ``None``: the policy's last words are it.

        Raises:
            AgentError: it failed.
        """
        ...
