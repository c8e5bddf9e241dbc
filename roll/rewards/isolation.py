"""Rule verifiers in child processes that can be killed: a slow regular expression or a symbolic bomb costs one sample.

The parent side is ``RulePool``; ``python -m roll.rewards.isolation`` is a child. They speak JSON, one line per message:
first what the child shall hold, then one request and one reply at a time. A child is no sandbox: verifiers are trusted,
the texts that they read are not, and texts travel as data only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, BinaryIO, cast

from roll.rewards.types import RewardError, RuleVerifier, Sample, Verdict
from roll.utils.registry import import_path

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Seconds for the imports of a child; a user's module may bring torch."""
MAX_REPLY_BYTES = 1 << 20
MAX_ANSWER_CHARS = 1000
MAX_ERROR_CHARS = 1000
_STOP_TIMEOUT = 5.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RuleSpec:
    """Recipe with which a child builds one verifier."""

    path: str
    """``package.module:Class`` of the ``RuleVerifier``."""
    args: Mapping[str, Any]
    """Values of its ``config_class``; JSON."""


def rule_spec(cls: type[RuleVerifier], args: Mapping[str, Any]) -> RuleSpec:
    """The specification of a class.

    Raises:
        ValueError: another process cannot import the class.
    """
    path = f"{cls.__module__}:{cls.__qualname__}"
    if cls.__module__ == "__main__" or "." in cls.__qualname__:
        raise ValueError(f"verifier: seen {path}, expected a class at the top of a module that can be imported")
    return RuleSpec(path, dict(args))


class RulePool:
    """Child processes that run ``RuleVerifier.check``, each one sample at a time, under a hard timeout.

    A child that exceeds the timeout or dies is replaced, with its whole process group; the samples of the others go on.
    Children die with the thread that started them (Linux), so start the pool from a thread that lives as long as it.

    Args:
        specs: the verifiers that every child holds.
        num_processes: children, and samples that are checked at the same time.
    """

    def __init__(self, specs: Sequence[RuleSpec], num_processes: int = 1) -> None:
        assert num_processes >= 1, num_processes
        setup = _encode([asdict(spec) for spec in specs])
        self._children = [_Child(setup) for _ in range(num_processes)]
        self._idle: asyncio.Queue[_Child] = asyncio.Queue()
        for child in self._children:
            self._idle.put_nowait(child)
        self._restarts: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that run."""
        return [child.pid for child in self._children if child.pid is not None]

    async def start(self) -> None:
        """Starts all children, so that no sample waits for their imports; ``check`` starts those that do not run.

        Raises:
            RewardError: a child could not be started or a verifier not be built.
        """
        await asyncio.gather(*(child.start() for child in self._children))

    async def check(self, verifier: int, sample: Sample, timeout: float) -> Verdict:
        """Judges a sample in the next free child.

        Args:
            verifier: index into ``specs``.
            timeout: seconds of the check itself; waiting for a free child does not count.

        Raises:
            RewardError: the check raised, took too long, returned no verdict, or killed its process.
        """
        request = _encode({"verifier": verifier, "sample": _sample_json(sample)})
        child = await self._idle.get()
        healthy = False
        try:
            if self._closed:
                raise RewardError("the verifier processes are closed")
            await child.start()
            async with asyncio.timeout(timeout):
                reply = await child.ask(request)
            healthy = True
        except TimeoutError as error:
            raise RewardError(f"took longer than {timeout:g} s and was killed") from error
        finally:
            # A child that was cancelled in the middle of a check would answer the next sample with the last verdict.
            if healthy or self._closed:
                self._idle.put_nowait(child)
            else:
                self._replace(child)
        if "error" in reply:
            raise RewardError(reply["error"])
        return Verdict(**reply["verdict"])

    async def close(self) -> None:
        """Kills the children. Checks under way end with a ``RewardError``."""
        self._closed = True
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(child.close() for child in self._children))

    def _replace(self, child: _Child) -> None:
        child.kill()
        task = asyncio.create_task(self._restart(child))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _restart(self, child: _Child) -> None:
        try:
            await child.start()
        except RewardError as error:
            logger.warning("a verifier process was not replaced, the next sample tries again: %s", error)
        finally:
            self._idle.put_nowait(child)


class _Child:
    """One child process, seen from the parent; it can be started again after it died."""

    def __init__(self, setup: bytes) -> None:
        self._setup = setup
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._killed = False
        """Tells whether the process has been killed, also while the system still has it."""

    @property
    def pid(self) -> int | None:
        if self._process is None or self._process.returncode is not None or self._killed:
            return None
        return self._process.pid

    async def start(self) -> None:
        """Starts the process unless it runs.

        Raises:
            RewardError: it died, or did not get ready in ``START_TIMEOUT`` seconds.
        """
        async with self._starting:
            if self.pid is not None:
                return
            await self.stop()
            try:
                async with asyncio.timeout(START_TIMEOUT):
                    self._process = await _spawn()
                    self._killed = False
                    reply = {"error": "closed"} if self._closed else await self.ask(self._setup)
            except BaseException as error:
                self.kill()
                if isinstance(error, TimeoutError):
                    raise RewardError(f"a verifier process was not ready after {START_TIMEOUT:g} s") from error
                raise
            if "error" in reply:
                await self.stop()
                raise RewardError(f"a verifier process could not be set up: {reply['error']}")

    async def ask(self, request: bytes) -> dict[str, Any]:
        """Sends a request and reads the reply.

        Raises:
            RewardError: the process died or broke the protocol.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request)
            await process.stdin.drain()
            line = await process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        except ValueError as error:
            raise RewardError(f"its process replied with more than {MAX_REPLY_BYTES} bytes") from error
        if not line.endswith(b"\n"):
            raise RewardError(f"its process died ({_ending(await process.wait())})")
        return cast(dict[str, Any], json.loads(line))

    def kill(self) -> None:
        """Kills the process and what it started."""
        if self._process is not None:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Stops the process for good."""
        self._closed = True
        await self.stop()

    async def stop(self) -> None:
        """Kills the process and waits until the system has taken it away."""
        self.kill()
        if self._process is not None:
            # Somebody else may hold the pipe open, and then asyncio waits for the end of the pipe too.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT)
            self._process = None


async def _spawn() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "roll.rewards.isolation"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=_environment(),
        start_new_session=True,  # its own process group: Ctrl-C is the parent's affair, and a kill takes all
        limit=MAX_REPLY_BYTES,
    )


def _environment() -> dict[str, str]:
    """The parent's environment, with its import path: a user's module need not be installed."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    # A fixed hash seed, since the order of sets reaches SymPy's output, which must be the same in every process.
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-returncode).name
    return f"signal {-returncode}"


def _encode(message: object) -> bytes:
    # ASCII escapes keep every string intact, lone surrogates and line breaks included.
    return json.dumps(message).encode() + b"\n"


def _sample_json(sample: Sample) -> dict[str, Any]:
    values = {field.name: getattr(sample, field.name) for field in fields(sample)}
    values["extra_info"] = dict(sample.extra_info)
    values["messages"] = [dict(message) for message in sample.messages]
    return values


def main() -> None:
    """The child: builds the verifiers, then answers requests until the pipe ends."""
    _die_with_parent()
    requests, replies = _take_pipes()
    verifiers: list[RuleVerifier] = []
    for number, line in enumerate(requests):
        try:
            if number == 0:
                verifiers = [_build(RuleSpec(**spec)) for spec in json.loads(line)]
                reply: dict[str, Any] = {"ready": True}
            else:
                reply = {"verdict": _check(verifiers, json.loads(line))}
        # Whatever a verifier raises, sys.exit included, is an answer: it could not tell.
        except (Exception, SystemExit) as error:
            kind = "" if isinstance(error, RewardError) else f"{type(error).__name__}: "
            reply = {"error": f"{kind}{error}"[:MAX_ERROR_CHARS]}
        encoded = _encode(reply)
        if len(encoded) > MAX_REPLY_BYTES:
            encoded = _encode({"error": f"a verdict of {len(encoded)} bytes, expected at most {MAX_REPLY_BYTES}"})
        replies.write(encoded)
        replies.flush()


def _die_with_parent() -> None:
    """No orphans, no core dumps, and when memory runs out this process goes first."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        import ctypes

        # The end of the pipe tells an idle child only; a busy one would go on.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes under new numbers; what a verifier reads and prints goes to /dev/null and to stderr."""
    requests, replies = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return os.fdopen(requests, "rb"), os.fdopen(replies, "wb")


def _build(spec: RuleSpec) -> RuleVerifier:
    cls = cast(type[RuleVerifier], import_path(spec.path, "verifier"))
    return cls(cls.config_class.model_validate(dict(spec.args)))


def _check(verifiers: Sequence[RuleVerifier], request: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(request["sample"])
    values["messages"] = tuple(values["messages"])
    verdict = verifiers[request["verifier"]].check(Sample(**values))
    if not isinstance(verdict, Verdict):
        raise TypeError(f"check returned {type(verdict).__name__}, expected a Verdict")
    return {
        "score": float(verdict.score),
        "correct": bool(verdict.correct),
        "answer": None if verdict.answer is None else str(verdict.answer)[:MAX_ANSWER_CHARS],
        "parts": {str(name): float(value) for name, value in verdict.parts.items()},
        "notes": {str(name): str(text)[:MAX_ANSWER_CHARS] for name, text in verdict.notes.items()},
        "seeks_answer": bool(verdict.seeks_answer),
    }


if __name__ == "__main__":
    main()
