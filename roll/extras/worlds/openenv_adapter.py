"""Runs environments of an OpenEnv server, over its websocket.

The wire is spoken here: three kinds of messages. OpenEnv's own client needs an older ``mcp`` than tools do, and a web
interface, in the Python of the rollout workers.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from roll.agentic.env.base import stable_hash
from roll.agentic.env.game import AdaptedEnvConfig, AdaptedGame, Played
from roll.configs.problems import ConfigProblem
from roll.extras.worlds.own_random import find_renderer
from roll.utils.registry import UnknownNameError

if TYPE_CHECKING:
    from websockets.sync.connection import Connection

INSTALL = "pip install 'roll-rl[openenv]'"

_MAX_MESSAGE = 100 << 20
"""Bytes; the server's own bound."""


class OpenEnvConfig(AdaptedEnvConfig):
    """Keys of ``env_config`` for ``env_type: openenv``."""

    url: str = Field(description="Address of the server: http://, https://, ws:// or wss://.")
    reset_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of reset, in addition to the seed."
    )
    action_key: str | None = Field(
        "message",
        description="Field of the action that holds the response; null: the response is the whole action, as JSON.",
    )
    action_kwargs: dict[str, Any] = Field(default_factory=dict, description="Further fields of every action.")
    renderer: str = Field(
        "values",
        description="Text of an observation: values (its fields by name), package.module:function or "
        "folder/file.py:function, dictionary to text.",
    )
    success_key: str | None = Field(None, description="Field of the observation that is true on success.")
    success_return: float | None = Field(
        None, description="An episode that ends with at least this sum of rewards (before reward_scale) succeeds."
    )
    timeout: float = Field(60.0, gt=0, description="Seconds to wait for the server.")

    def problems(self) -> Iterator[ConfigProblem]:
        """Finds a missing package, a wrong address, and broken rules between keys."""
        yield from super().problems()
        try:
            import websockets.sync.client  # noqa: F401
        except ModuleNotFoundError as error:
            yield self.problem("url", f"the package {error.name} to be installed", hint=INSTALL)
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            yield self.problem("url", "an address that begins with http://, https://, ws:// or wss://")
        if self.success_key is None and self.success_return is None:
            yield self.problem("success_return", "a number, or success_key, to define success", "success_key")
        try:
            find_renderer(self.renderer)
        except UnknownNameError as error:
            expected = "values, package.module:function or folder/file.py:function"
            yield self.problem("renderer", expected, hint=str(error))


class InvalidActionError(ValueError):
    """The server knows no such action."""


class _Seen(BaseModel):
    """Answer of a server to a reset or a step."""

    model_config = ConfigDict(strict=True)

    observation: dict[str, Any]
    reward: bool | int | float | None = None
    done: bool = False


class _Session:
    """One connection, which the server gives an environment of its own; made at its first use."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url = re.sub("^http", "ws", url).rstrip("/") + "/ws"
        self._timeout = timeout
        self._connection: Connection | None = None
        self._open = contextlib.ExitStack()

    def ask(self, kind: str, data: Mapping[str, Any]) -> _Seen:
        """Sends a message and reads the answer.

        Raises:
            InvalidActionError: the data are not what the server takes.
            RuntimeError: the server says that it failed, or something else than an observation.
            TimeoutError: no answer in time.
            OSError: no server.
        """
        from websockets.sync.client import connect

        if self._connection is None:
            made = connect(self._url, open_timeout=self._timeout, max_size=_MAX_MESSAGE, proxy=None)
            self._connection = self._open.enter_context(made)
        self._connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._connection.recv(self._timeout))
        told = answer["data"]
        if answer["type"] == "error":
            error = InvalidActionError if told.get("code") == "VALIDATION_ERROR" else RuntimeError
            raise error(f"{self._url} answered {kind} with {told.get('code')}: {told.get('message')}")
        return _Seen.model_validate(told)

    def close(self) -> None:
        self._open.close()


class OpenEnvEnv(AdaptedGame):
    """One session of a server, which has an environment of its own for each."""

    config: OpenEnvConfig
    config_class = OpenEnvConfig

    def __init__(self, **env_config: Any) -> None:
        super().__init__(**env_config)
        config = self.config
        self._render = find_renderer(config.renderer)
        self._session = _Session(config.url, config.timeout)
        self._return: float | None = None

    def begin(self, seed: int, options: dict[str, Any]) -> None:
        """Starts an episode; the first one connects.

        Raises:
            Exception: there is no server, or it says no.
        """
        self._key, self._return = "", None
        self._observe(self._session.ask("reset", {**self.config.reset_kwargs, "seed": seed}))

    def play(self, text: str) -> Played:
        """Sends the answer of a text; one that the server does not understand is no action.

        Raises:
            RuntimeError: the server failed, or the episode ended and no step of it said a reward.
            Exception: the server does not answer.
        """
        before = self._text
        answer = self.said(text)
        seen = None if answer is None else self._ask(answer)
        if seen is None:
            return Played(None, 0.0, False, False, False)
        reward = 0.0
        if seen.reward is not None:
            reward = float(seen.reward)
            self._return = reward + (self._return or 0.0)
        self._observe(seen)
        if seen.done and self._return is None:
            raise RuntimeError(f"{self.config.url}: the episode ended, and no step of it said a reward")
        effective = seen.done or self._text != before
        return Played(answer, self.config.reward_scale * reward, effective, seen.done, self._succeeded(seen))

    def close(self) -> None:
        """Ends the session."""
        self._session.close()

    def _ask(self, answer: str) -> _Seen | None:
        fields = self._fields(answer)
        if fields is None:
            return None
        try:
            return self._session.ask("step", {**self.config.action_kwargs, **fields})
        except InvalidActionError:
            return None

    def _fields(self, answer: str) -> dict[str, Any] | None:
        if self.config.action_key is not None:
            return {self.config.action_key: answer}
        try:
            fields = json.loads(answer)
        except (ValueError, RecursionError):
            return None
        return fields if isinstance(fields, dict) else None

    def _observe(self, seen: _Seen) -> None:
        shown = {key: value for key, value in seen.observation.items() if value is not None and key != "metadata"}
        self._text = self._render(shown)
        self._key = stable_hash(f"{self._key}\n{self._text}".encode())

    def _succeeded(self, seen: _Seen) -> bool:
        if self.config.success_key is not None:
            told = {**(seen.observation.get("metadata") or {}), **seen.observation}
            return bool(told.get(self.config.success_key, False))
        assert self.config.success_return is not None, "OpenEnvConfig.problems"
        return seen.done and (self._return or 0.0) >= self.config.success_return
