"""Agent programs that are a function of this process or a service of this machine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import httpx

from roll.configs.agent import AgentConfig
from roll.rollout.agents.task import AgentError, AgentExitError, AgentTask, Workplace
from roll.rollout.call_threads import CallThreads
from roll.rollout.errors import contained
from roll.utils.foreign import describe_error
from roll.utils.registry import import_path

_NO_LIMIT_S = 1e8
"""The episode's time is watched by whoever runs the program, who cancels it."""


class FunctionProgram:
    """Calls ``agent.path`` with the task (an ``AgentProgram``).

    A coroutine function runs in the worker's event loop and must not block it; any other in a thread.

    Raises:
        UnknownNameError: there is no such function.
    """

    def __init__(self, config: AgentConfig) -> None:
        assert config.path is not None, "AgentConfig.problems"
        self._function = cast("Callable[[AgentTask], Any]", import_path(config.path, "agent.path"))
        self._name = config.path
        self._threads = CallThreads()

    async def run(self, task: AgentTask, place: Workplace) -> str | None:
        """See ``AgentProgram``."""
        try:
            answer = await self._call(task)
        except Exception as error:  # a user's function may raise anything
            raise AgentExitError(f"{self._name} raised {describe_error(error)}".replace(task.api_key, "***")) from error
        return _answer(answer, self._name)

    async def _call(self, task: AgentTask) -> Any:
        if inspect.iscoroutinefunction(self._function):
            with contained():
                return await self._function(task)
        mailbox = self._threads.mailbox()
        try:
            return await mailbox.run("agent", lambda: self._function(task), _NO_LIMIT_S, ends_with_caller=True)
        finally:
            mailbox.close(lambda: None)


class ServiceProgram:
    """Posts the task, with its key, to ``agent.url`` (an ``AgentProgram``).

    The episode lasts as long as the request. A status of 200 to 299 is an episode, and ``{"answer": …}`` in its body
    the answer; any other is a failure.
    """

    def __init__(self, config: AgentConfig) -> None:
        assert config.url is not None, "AgentConfig.problems"
        self._url = config.url

    async def run(self, task: AgentTask, place: Workplace) -> str | None:
        """See ``AgentProgram``."""
        body = task.public() | {"api_key": task.api_key}
        try:
            async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
                response = await client.post(self._url, json=body)
        except httpx.HTTPError as error:
            raise AgentError(f"{self._url}: {describe_error(error)}") from error
        if not response.is_success:
            said = response.text[:500].replace(task.api_key, "***")
            raise AgentExitError(f"{self._url} answered with status {response.status_code}: {said}")
        try:
            answer = response.json() if response.content else {}
        except ValueError as error:
            raise AgentError(f"{self._url} answered with no JSON: {error}") from error
        return _answer(answer.get("answer") if isinstance(answer, dict) else None, self._url)


def _answer(value: object, name: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise AgentError(f"{name} returned {value!r:.80} ({type(value).__name__}), expected a text or nothing")
    return value
