"""Runs one environment in threads, unless it is instant, and checks that it returns what ``TextEnv`` promises.

A slow or hung environment delays no other. A user's code may return anything; what gets past here are plain values:
text that every tokenizer and every file takes, pixels, finite numbers, truth values.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import reprlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, TypeVar

import numpy as np

from roll.agentic.env.base import Observation, Part, StepResult, TextEnv, picture
from roll.data.columns import UInt8Array
from roll.data.pictures import Pictures
from roll.rewards.types import RewardError
from roll.rollout.call_threads import CallThreads, CallTimeoutError
from roll.rollout.env_manager import SAID, TOOL_TURNS
from roll.rollout.errors import EnvCrashError, EnvError, EnvProtocolError, EnvTimeoutError, as_runtime_error
from roll.rollout.observations import MAX_PICTURE, with_items
from roll.rollout.reward_worker import Asking
from roll.rollout.types import Frame
from roll.utils.foreign import Fault, clean_text, describe_error, describe_fault
from roll.utils.progress import advance

logger = logging.getLogger(__name__)

MAX_TEXT = 4_000_000
"""Bytes of an observation: more than any context holds, few enough to tokenize."""

MAX_REWARD = 1e30
"""Rewards are float32 in a batch, and their squares are summed."""

MAX_EXTRA_TEXT = 10_000
"""Characters kept of each text in ``info`` that only people read."""

MAX_PIXELS = 2**24
"""Of a picture in an observation: more than any model takes."""

_MAX_INTEGER = 2**63
_COLORS = 128


@dataclass(frozen=True)
class _Call:
    """Names what is checked: ``Maze.step`` of the class ``Maze``."""

    name: str

    def fail(self, field: str, seen: object, expected: str) -> EnvProtocolError:
        return EnvProtocolError(f"{self.name} returned {field} {_shown(seen)}, expected {expected}")

    def text(self, field: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.fail(field, value, "text")
        plain = str.__str__(value)  # a subclass, such as NumPy's, becomes the plain type
        try:
            size = len(plain.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise self.fail(field, value, "text without lone surrogates") from error
        if size > MAX_TEXT:
            raise EnvProtocolError(f"{self.name} returned {field} of {size:,} bytes, expected at most {MAX_TEXT:,}")
        return plain

    def observation(self, value: object) -> Observation:
        """A text, or parts among which is a picture, whose pixels are an array of its own."""
        if not isinstance(value, list | tuple) or not value:
            if isinstance(value, str):
                return self.text("observation", value)
            raise self.fail("observation", value, "text, or a list of parts")
        parts = [self.part(f"observation[{index}]", part) for index, part in enumerate(value)]
        if all(part["type"] == "text" for part in parts):
            return "".join(part["text"] for part in parts)
        return parts

    def part(self, field: str, value: object) -> Part:
        if isinstance(value, Mapping) and value.get("type") == "text":
            return {"type": "text", "text": self.text(f"{field}['text']", value.get("text"))}
        if isinstance(value, Mapping) and value.get("type") == "image":
            return picture(self.pixels(f"{field}['image']", value.get("image")))
        raise self.fail(field, value, 'a part: {"type": "text", "text": …} or {"type": "image", "image": …}')

    def pixels(self, field: str, value: Any) -> UInt8Array:
        expected = "a Pillow image or an array of uint8, shape [height, width, 3]"
        if not isinstance(value, np.ndarray):
            with Fault() as fault:
                value = np.asarray(value.convert("RGB"))
            if fault.error is not None:
                raise self.fail(field, value, expected) from fault.error
        shape = "×".join(map(str, value.shape))
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3 or not value.size:
            raise EnvProtocolError(f"{self.name} returned {field} of shape {shape}, {value.dtype}, expected {expected}")
        if value.shape[0] * value.shape[1] > MAX_PIXELS:
            raise EnvProtocolError(
                f"{self.name} returned {field} of shape {shape}, expected at most {MAX_PIXELS:,} pixels"
            )
        return np.array(value, order="C")  # what an environment draws on next is its own

    def optional_text(self, field: str, value: object) -> str | None:
        return None if value is None else self.text(field, value)

    def number(self, field: str, value: Any) -> float:
        expected = f"a finite number (at most {MAX_REWARD:g})"
        if isinstance(value, str | bytes):
            raise self.fail(field, value, expected)
        try:
            number = float(value)
        except Exception as error:  # a user's object may raise anything
            raise self.fail(field, value, expected) from error
        if not abs(number) <= MAX_REWARD:  # so written, NaN fails too
            raise self.fail(field, value, expected)
        return number

    def flag(self, field: str, value: object) -> bool:
        if isinstance(value, bool | np.bool_ | int | np.integer) and value in (0, 1):
            return bool(value)
        raise self.fail(field, value, "True or False")

    def key(self, field: str, value: object) -> str:
        try:
            name = str(value)
        except Exception as error:  # a user's object may raise anything
            raise self.fail(field, value, "a value with a text") from error
        return self.text(field, name)

    def parts(self, value: object, *names: str) -> tuple[Any, ...]:
        if not isinstance(value, tuple | list) or len(value) != len(names):
            raise EnvProtocolError(f"{self.name} returned {_shown(value)}, expected ({', '.join(names)})")
        return tuple(value)

    def info(self, env: TextEnv, value: object) -> dict[str, Any]:
        """The info with what a manager reads of it checked, and the environment's instruction in it."""
        if not isinstance(value, Mapping):
            raise self.fail("info", value, "a dictionary")
        info: dict[str, Any] = {
            "env_instruction": env.env_instruction,
            **{clean_text(str(key)): value[key] for key in value},
        }
        for ours in (TOOL_TURNS, SAID):  # what rollouts note there is none of the environment's
            info.pop(ours, None)
        for name, check in _INFO_FIELDS.items():
            if name in info:
                info[name] = check(self, f"info[{name!r}]", info[name])
        return {key: item if key in _INFO_FIELDS else _extra(item) for key, item in info.items()}


_INFO_FIELDS: Mapping[str, Callable[[_Call, str, Any], Any]] = {
    "action": _Call.optional_text,
    "success": _Call.flag,
    "task_reward": _Call.number,
    "penalty": _Call.number,
    "state_key": _Call.key,
    "env_instruction": _Call.text,
}


def checked_reset(env: TextEnv, seed: int) -> tuple[Observation, dict[str, Any]]:
    """Resets the environment; info has its ``env_instruction`` too.

    Raises:
        EnvProtocolError: it returned something else than (observation, info).
    """
    call = _Call(f"{type(env).__name__}.reset")
    observation, info = call.parts(env.reset(seed=seed), "observation", "info")
    return call.observation(observation), call.info(env, info)


def checked_step(env: TextEnv, text: str) -> StepResult:
    """Steps the environment; info has its ``env_instruction`` here too.

    Raises:
        EnvProtocolError: it returned something else than ``StepResult``.
    """
    call = _Call(f"{type(env).__name__}.step")
    names = ("observation", "reward", "terminated", "truncated", "info")
    observation, reward, terminated, truncated, info = call.parts(env.step(text), *names)
    return (
        call.observation(observation),
        call.number("reward", reward),
        call.flag("terminated", terminated),
        call.flag("truncated", truncated),
        call.info(env, info),
    )


def checked_frame(env: TextEnv) -> Frame | None:
    """Shows the current state to a person, see ``frame``.

    A picture never costs an episode: one that cannot be made is told in the log.
    """
    with Fault() as fault:
        return frame(env)
    assert fault.error is not None, "else it has returned"
    _warn_once(f"{type(env).__name__}.render: no picture: {describe_error(fault.error)}")
    return None


def frame(env: TextEnv) -> Frame | None:
    """The current state as a PNG or a text; ``None`` where ``render`` shows nothing.

    Raises:
        ValueError: it is no picture.
        Exception: whatever ``render`` raised.
    """
    view = env.render()
    if view is None or isinstance(view, str):
        return None if view is None else str(_extra(view))
    pixels = np.asarray(view.convert("RGB") if hasattr(view, "convert") else view)  # Pillow's images convert
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (3, 4) or not pixels.size:
        raise ValueError(f"got shape {pixels.shape} of {pixels.dtype}, expected [height, width, 3] of uint8")
    return _png(pixels[..., :3].tobytes(), pixels.shape[:2])


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


@lru_cache(maxsize=32)
def _png(pixels: bytes, size: tuple[int, int]) -> bytes:
    """A small PNG. Equal pictures are encoded once: an action without an effect, members of a group."""
    from PIL import Image

    height, width = size
    image = Image.frombytes("RGB", (width, height), pixels)
    image.thumbnail((MAX_PICTURE, MAX_PICTURE))
    buffer = io.BytesIO()
    image.quantize(_COLORS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(buffer, "PNG")
    return buffer.getvalue()


def _extra(value: Any) -> Any:
    """Makes a value that only people read harmless to files; it never fails an episode."""
    if isinstance(value, str):
        plain = clean_text(str.__str__(value))
        return plain if len(plain) <= MAX_EXTRA_TEXT else plain[:MAX_EXTRA_TEXT] + "…"
    if isinstance(value, int) and abs(value) >= _MAX_INTEGER:  # Python refuses to write very long ones
        return float("inf") if value > 0 else float("-inf")
    return value


def _shown(value: object) -> str:
    """A value and its type, short."""
    kind = type(value).__name__
    with Fault():  # reprlib catches most of what a __repr__ may raise
        return f"{reprlib.repr(value)} ({kind})"
    return f"something of type {kind}"


T = TypeVar("T")


@dataclass(frozen=True)
class OneAtATime:
    """Allows one call at a time in several environments. Others wait in the event loop, outside of time limits."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    inside: threading.Lock = field(default_factory=threading.Lock)
    """Held in the thread of a call, which may go on when nobody waits for it any more."""


class EnvRunner:
    """Owns one ``TextEnv``; its calls run one at a time, in any of ``threads``.

    Args:
        make: builds the environment, as part of the first call.
        timeout: seconds that one call may take.
        lock: shared with others where the environment class is not thread-safe (``use_thread_lock``).
        instant: every call runs in the caller's event loop instead, unwatched (see ``TextEnv.instant``).
        own_thread: every call runs in the same thread (see ``TextEnv.own_thread``).
        threads: those of other environments too; its own if not given.
        asking: becomes ``TextEnv.ask``; what it raises is a failure of the call in which it did.
        pictures: makes the items of observations; without it, one with a picture is a failure.
    """

    def __init__(
        self,
        make: Callable[[], TextEnv],
        timeout: float,
        lock: OneAtATime | None = None,
        *,
        instant: bool = False,
        own_thread: bool = False,
        threads: CallThreads | None = None,
        asking: Asking | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        self._make = make
        self._pictures = pictures
        self._asking = asking
        self._timeout = timeout
        self._lock = lock
        self._env: TextEnv | None = None
        self._mailbox = None if instant else (threads or CallThreads()).mailbox(own_thread=own_thread)

    async def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Resets the environment, see ``checked_reset``; pictures are items."""

        def job(env: TextEnv) -> tuple[Observation, dict[str, Any]]:
            observation, info = checked_reset(env, seed)
            return with_items(f"{type(env).__name__}.reset", observation, self._pictures), info

        return await self.call("reset", job)

    async def step(self, text: str) -> StepResult:
        """Steps the environment, see ``checked_step``; pictures are items."""

        def job(env: TextEnv) -> StepResult:
            observation, reward, terminated, truncated, info = checked_step(env, text)
            observation = with_items(f"{type(env).__name__}.step", observation, self._pictures)
            return observation, reward, terminated, truncated, info

        return await self.call("step", job)

    async def render(self) -> Frame | None:
        """Shows the state to a person, see ``checked_frame``."""
        return await self.call("render", checked_frame)

    async def call(self, what: str, job: Callable[[TextEnv], T]) -> T:
        """Runs ``job`` on the environment; the first call builds it.

        Raises:
            EnvTimeoutError: it did not return in time; its thread ends as soon as it runs Python code again.
            EnvCrashError: it raised, or asked what the judge could not answer.
            EnvError: the job found what it got wrong.
            Exception: the judge is not there.
        """
        if self._asking is not None:
            self._asking.listen()
        try:
            async with self._lock.turn if self._lock is not None else contextlib.nullcontext():
                if self._mailbox is None:
                    return await self._here(job)
                return await self._mailbox.run(what, lambda: self._work(job), self._timeout)
        except EnvError:
            raise
        except CallTimeoutError as error:
            raise EnvTimeoutError(f"environment {what} took longer than step_timeout={self._timeout:g}s") from error
        except Exception as error:  # a user's environment may raise anything
            if self._asking is not None and (failure := self._asking.failure) is not None:
                if not isinstance(failure, RewardError):
                    raise failure from error
                raise EnvCrashError(f"environment {what} asked the judge: {failure}") from error
            raise EnvCrashError(f"environment {what} raised {describe_fault(error)}") from error

    def close(self) -> None:
        """Closes the environment once its calls have returned; a thread of its own ends then."""
        if self._mailbox is not None:
            self._mailbox.close(self._end)
            return
        try:
            self._end()
        except BaseException as error:  # nobody waits for it, and it must not end the caller's loop
            logger.warning("environment close raised %s", describe_error(error))

    def _end(self) -> None:
        if self._env is not None:
            self._env.close()

    def _work(self, job: Callable[[TextEnv], T]) -> T:
        with self._lock.inside if self._lock is not None else contextlib.nullcontext():
            if self._env is None:
                self._env = self._make()
                if self._asking is not None:
                    self._env.ask = self._asking
            done = job(self._env)
            if self._asking is not None and self._asking.failure is not None:
                raise self._asking.failure  # which the environment has caught
            advance()
            return done

    async def _here(self, job: Callable[[TextEnv], T]) -> T:
        await asyncio.sleep(0)  # whatever else is due comes in between the calls of many environments
        try:
            return self._work(job)
        except Exception:
            raise
        except BaseException as error:  # it must not end the caller's loop
            raise as_runtime_error(error) from error
