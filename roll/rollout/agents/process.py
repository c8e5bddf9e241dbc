"""An agent program that is a command, started for each episode, and the command that judges it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from roll.configs.agent import AgentConfig
from roll.distributed.cluster.reaper import MARK
from roll.rollout.agents.command import Ended, run_supervised
from roll.rollout.agents.task import AgentError, AgentExitError, AgentTask, Workplace
from roll.rollout.endpoint.step import RewardRequest
from roll.utils.foreign import describe_error
from roll.utils.registry import extra

MAX_ANSWER = 4_000_000
"""Bytes of an answer that a program writes."""

_INHERITED = ("PATH", "LANG", "LANGUAGE", "TZ")
_INHERITED_OUTSIDE = (
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "TMPDIR",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
"""Variables that a command in the sandbox does not get: it could not see the files."""


@contextlib.asynccontextmanager
async def workplace(template: str | None) -> AsyncIterator[Workplace]:
    """A fresh workplace, removed at the end, or with the Ray session's folder where this process is killed before.

    Raises:
        AgentError: they cannot be copied.
    """
    session = os.environ.get(MARK)
    place = Workplace(
        Path(tempfile.mkdtemp(prefix="roll-agent-", dir=session if session and os.path.isdir(session) else None))
    )
    try:
        if template is None:
            place.work.mkdir()
        else:
            try:
                await asyncio.to_thread(shutil.copytree, template, place.work, symlinks=True)
            except OSError as error:
                raise AgentError(f"agent.template: cannot copy {template!r}: {describe_error(error)}") from error
        yield place
    finally:
        await asyncio.to_thread(shutil.rmtree, place.folder, ignore_errors=True)


class _Command:
    """A command of the section ``agent``, in its sandbox if there is one."""

    def __init__(self, config: AgentConfig, command: Sequence[str]) -> None:
        self.argv = list(command)
        self._cell = None if config.sandbox is None else extra("sandbox").Cell(config.sandbox, self.argv)
        self._env = _environment(() if config.sandbox else _INHERITED_OUTSIDE) | dict(config.env)

    async def run(self, env: Mapping[str, str], cwd: str, folders: Sequence[Path], port: int | None = None) -> Ended:
        """Runs it to its end, with what the sandbox lets it write to and reach."""
        env = self._env | dict(env)
        if self._cell is None:
            return await run_supervised(self.argv, env, cwd)
        ended: Ended = await self._cell.run(self.argv, env, cwd, [str(folder) for folder in folders], port)
        return ended


class ProcessProgram:
    """Starts ``agent.command`` (an ``AgentProgram``).

    The command finds ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` (and Anthropic's), the task as JSON in the file
    ``ROLL_TASK``, and may write its answer to the file ``ROLL_ANSWER``. Exit code 0 is an episode; any other is a
    failure. Whatever it has started is killed when it ends or is ended.

    Raises:
        SandboxUnavailableError: this machine has no sandbox, and one is asked for.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._command = _Command(config, config.command)
        self._cwd = config.cwd

    async def run(self, task: AgentTask, place: Workplace) -> str | None:
        """See ``AgentProgram``."""
        _write(place.folder / "task.json", json.dumps(task.public()))
        env = {
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_KEY": task.api_key,
            "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": task.api_key,
            "ROLL_TASK": str(place.folder / "task.json"),
            "ROLL_ANSWER": str(place.folder / "answer"),
        }
        port = urlsplit(task.base_url).port
        ended = await self._command.run(env, self._cwd or str(place.work), [place.folder], port)
        if ended.code != 0:
            said = str(ended).replace(task.api_key, "***")
            raise AgentExitError(f"{self._command.argv[0]} ended with {said}")
        answer = _read(place.folder / "answer", "ROLL_ANSWER")
        try:
            return None if answer is None else answer.decode("utf-8")
        except UnicodeDecodeError as error:
            raise AgentError(f"ROLL_ANSWER is no UTF-8: {error}") from error


class Verification:
    """Judges an episode with ``agent.verify``, in the folder that its program left.

    The command finds the task with its reference answer in the file ``ROLL_TASK``, the answer in ``ROLL_ANSWER``, and
    writes a number, or ``{"reward": …, "success": …}``, to ``ROLL_REWARD``. The folder of these files is made when
    everything that the program has started is gone, so that no program can write to it.

    Raises:
        SandboxUnavailableError: this machine has no sandbox, and one is asked for.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._command = _Command(config, config.verify)
        self._timeout = config.verify_timeout

    async def judge(self, task: Mapping[str, Any], answer: str, place: Workplace) -> RewardRequest:
        """The reward.

        Raises:
            AgentError: the command failed, took too long, or gave no reward.
        """
        folder = Path(tempfile.mkdtemp(prefix="roll-verify-"))
        try:
            _write(folder / "task.json", json.dumps(task))
            _write(folder / "answer", answer)
            names = {"ROLL_TASK": "task.json", "ROLL_ANSWER": "answer", "ROLL_REWARD": "reward"}
            env = {key: str(folder / name) for key, name in names.items()}
            async with asyncio.timeout(self._timeout):
                ended = await self._command.run(env, str(place.work), [folder, place.folder])
            if ended.code != 0:
                raise AgentError(f"agent.verify: {self._command.argv[0]} ended with {ended}")
            return _reward(_read(folder / "reward", "ROLL_REWARD"))
        except TimeoutError as error:
            raise AgentError(f"agent.verify took longer than agent.verify_timeout={self._timeout:g} s") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _reward(data: bytes | None) -> RewardRequest:
    if data is None:
        raise AgentError("agent.verify wrote no ROLL_REWARD")
    try:
        value = json.loads(data)
        return RewardRequest.model_validate(value if isinstance(value, dict) else {"reward": value}, strict=True)
    except (ValueError, RecursionError) as error:
        expected = 'a finite number or {"reward": …, "success": …}'
        raise AgentError(f"ROLL_REWARD: got {data[:80]!r}, expected {expected}") from error


def _environment(further: Sequence[str]) -> dict[str, str]:
    """Part of this process's environment that a command may know, its own ``python`` first in the path."""
    names = {*_INHERITED, *further}
    kept = {key: value for key, value in os.environ.items() if key in names or key.startswith("LC_")}
    return kept | {"PATH": os.pathsep.join([os.path.dirname(sys.executable), kept.get("PATH", os.defpath)])}


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _read(path: Path, name: str) -> bytes | None:
    """Reads what a command wrote to a file, if it did."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            data = file.read(MAX_ANSWER + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgentError(f"{name} cannot be read: {error.strerror}") from error
    if len(data) > MAX_ANSWER:
        raise AgentError(f"{name} has more than {MAX_ANSWER:,} bytes")
    return data
