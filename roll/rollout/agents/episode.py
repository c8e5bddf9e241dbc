"""An episode of an agent program: its start, its session, its end, its reward.

A program is a function of this process, a service of this machine, or a command, which another command may judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from roll.agentic.tools.dialects import dialect_for
from roll.configs.agent import AgentConfig
from roll.data.prompts import Prompt
from roll.data.renderer import ChatRenderer
from roll.data.requests import GenerateFn, SamplingParams
from roll.distributed.cluster.reaper import MARK
from roll.rollout.agents.command import Ended, run_supervised
from roll.rollout.agents.task import AgentError, AgentExitError, AgentProgram, AgentTask, Workplace
from roll.rollout.call_threads import CallThreads
from roll.rollout.endpoint.server import Endpoint
from roll.rollout.endpoint.session import Policy, Session
from roll.rollout.endpoint.step import RewardRequest, Steps
from roll.rollout.env_manager import AsyncEnv, EpisodeSpec, LengthLimits
from roll.rollout.errors import contained
from roll.rollout.tokenization_audit import TokenizationAudit
from roll.rollout.types import AGENT, VALID_UNKNOWN, EpisodeEnd, Trajectory, Turn
from roll.utils.foreign import describe_error
from roll.utils.registry import extra, import_path

logger = logging.getLogger(__name__)


_NO_LIMIT_S = 1e8
"""The caller of the program watches the episode's time, and cancels it."""


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
            raise AgentError(f"{self._url} did not answer with JSON: {error}") from error
        return _answer(answer.get("answer") if isinstance(answer, dict) else None, self._url)


def _answer(value: object, name: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise AgentError(f"{name} returned {value!r:.80} ({type(value).__name__}), expected a text or nothing")
    return value


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


PROGRAMS: Mapping[str, Callable[[AgentConfig], AgentProgram]] = {
    "process": ProcessProgram,
    "python": FunctionProgram,
    "url": ServiceProgram,
}
"""By ``agent.type``."""

_LOOK_S = 0.05
_PATIENCE_S = 60.0
"""With a program that is cancelled; one that is a command takes less."""


class AgentPlayer:
    """Runs prompts or environments with an agent program, in the event loop of a rollout worker.

    Args:
        rank: of the worker, whose endpoint listens at ``agent.port + rank``.
        watch: compares what is trained with its conversations; ``None``: nobody does.

    Raises:
        PortTakenError: something else listens there.
        SandboxUnavailableError: this machine has no sandbox, and one is asked for.
        UnknownNameError: there is no such program or dialect.
    """

    def __init__(
        self, config: AgentConfig, renderer: ChatRenderer, rank: int, watch: TokenizationAudit | None = None
    ) -> None:
        self._config = config
        self._policy = partial(Policy, renderer, dialect_for(config.dialect, renderer, default="hermes"))
        self._watch = watch
        self._program = PROGRAMS[config.type](config)
        self._verification = Verification(config) if config.reward == "verify" else None
        self.endpoint = Endpoint(config.port + rank if config.port else 0)

    async def play(
        self,
        env: AsyncEnv,
        prompt: Prompt,
        generate: GenerateFn,
        params: SamplingParams,
        limits: LengthLimits,
        episode: EpisodeSpec,
        *,
        max_steps: int | None = None,
        trains: bool = True,
    ) -> Trajectory:
        """Plays one episode.

        A program that ends with an error behind a limit (``max_calls``, the context, the length of an answer) has been
        cut off, which is the policy's doing: what it has is judged.

        Args:
            env: judges the task and has been reset; a program that has taken no step has its answer taken as one.
            limits: token budgets; of them the longest sequence bounds a conversation.
            max_steps: most steps that the program may take in ``env`` by ``/v1/step``; ``None``: it may take none.

        Raises:
            AgentError: the program crashed, hung, asked nothing of the policy, or gave no reward where it should.
            Exception: what made an answer impossible, such as an engine's death.
        """
        await self.endpoint.start()
        session = Session(self._config, self._policy(limits), generate, params, episode)
        steps = Steps(env, session, max_steps or 1)
        if max_steps is not None:
            session.act = steps.take
        async with workplace(self._config.template) as place:
            with self.endpoint.open(session) as key:
                try:
                    answer = await self._run(AgentTask.of(prompt, self.endpoint.url, key), place, session)
                except AgentExitError:
                    if not session.cut_off:
                        raise
                    answer = None
            if not session.turns:
                long = session.end is EpisodeEnd.CONTEXT_FULL
                told = f"its first prompt does not fit in sequence_length {limits.sequence_length}"
                raise AgentError(told if long else "the agent program sent no request to the policy")
            words = session.turns[-1].text if answer is None else answer
            await steps.settle(words if self._config.reward == "task" else None)
            given = await self._given(session, prompt, words, place)
        info = dict(steps.taken[-1].info) if steps.taken else {}
        if given is not None:
            info |= {"success": given[1], "prompt_id": prompt.id, VALID_UNKNOWN: True}
        elif max_steps is not None:
            info |= {VALID_UNKNOWN: True}  # a step may have taken many answers
        counts = session.counts | {"turned_away": self.endpoint.count_turned_away()}
        if max_steps is not None:
            counts |= {"steps": len(steps.taken)}
        return Trajectory(
            tag=episode.tag,
            group_id=episode.group_id,
            member=episode.member,
            seed=episode.env_seed,
            turns=_rewarded(session.turns, steps, None if given is None else given[0]),
            end=session.end or (steps.end if steps.taken else None) or EpisodeEnd.TERMINATED,
            success=bool(info.get("success", False)),
            final_observation=(steps.taken[-1].observation if steps.taken else "") or answer or "",
            history=True,
            info={key: value for key, value in info.items() if isinstance(value, bool | int | float | str)}
            | {f"{AGENT}{name}": count for name, count in counts.items()}
            | (self._compared(session, episode) if trains else {}),
        )

    def _compared(self, session: Session, episode: EpisodeSpec) -> dict[str, int]:
        if self._watch is None or not self._watch.watches(episode.member):
            return {}
        name = f"{episode.tag} group {episode.group_id} member {episode.member}"
        return self._watch.compare(name, session.conversation_rows())

    async def _run(self, task: AgentTask, place: Workplace, session: Session) -> str | None:
        """The program, to its end or that of its time, of which the policy's answers take none."""
        start, limit = time.monotonic(), self._config.timeout
        running = asyncio.create_task(self._program.run(task, place))
        running.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may look at it
        try:
            waiting: set[asyncio.Future[Any]] = {running, session.failure}
            while not any(each.done() for each in waiting):
                left = limit - (time.monotonic() - start - session.generating_s)
                if left <= 0:
                    raise AgentError(f"the agent took longer than agent.timeout={limit:g} s")
                await asyncio.wait(waiting, timeout=max(left, _LOOK_S), return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                session.failure.result()
            return running.result()
        finally:
            running.cancel()
            await asyncio.wait([running], timeout=_PATIENCE_S)  # what it has started is gone then
            if not running.done():
                logger.warning("an agent program of %s did not end when cancelled; it is abandoned", task.tag)

    async def _given(self, session: Session, prompt: Prompt, words: str, place: Workplace) -> tuple[float, bool] | None:
        """Reward and success that the program's call or the verification says; ``None``: the environment's count."""
        if self._config.reward == "task":
            return None
        reward, success = session.reward, session.success
        if self._verification is not None:
            task = AgentTask.of(prompt, "", "").public() | {"ground_truth": prompt.ground_truth}
            verdict = await self._verification.judge(task, words, place)
            reward, success = verdict.reward, verdict.success
        if reward is None:
            raise AgentError("the agent program posted no reward to /v1/reward (agent.reward: call)")
        return reward, reward > 0 if success is None else success


def _rewarded(turns: list[Turn], steps: Steps, given: float | None) -> tuple[Turn, ...]:
    """The turns with their rewards: of each step to the last turn before it, or ``given`` to the last of all."""
    turns = list(turns)
    if given is not None:
        turns[-1] = replace(turns[-1], task_reward=given)
        return tuple(turns)
    for step in steps.taken:
        at = max(step.turn - 1, 0)
        turns[at] = replace(
            turns[at],
            action=step.info.get("action"),
            task_reward=turns[at].task_reward + step.task_reward,
            penalty=turns[at].penalty + step.penalty,
        )
    return tuple(turns)
