"""Bounds of a request's body, kept while it arrives: parsing it holds up all episodes of the worker."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from starlette.requests import Request

from roll.data.renderer import CHARS_PER_TOKEN
from roll.rollout.endpoint.errors import ApiError
from roll.rollout.endpoint.session import Session

MAX_BODY = 32 << 20
"""Bytes of a request, whatever the context."""
BODY_SECONDS = 60.0
"""Time in which a request has to arrive."""
_ROOM = 256 << 10
"""Bytes beside the conversation: tools, names, ids."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("|\\?\Z)', re.DOTALL)
_MAX_DEPTH = 100
_MAX_DIGITS = 400
_LONG_NUMBER = re.compile(rb"[0-9.eE+-]{%d}" % (_MAX_DIGITS + 1))


@dataclass(frozen=True)
class Bounds:
    """What a body may have, by the tokens of a conversation: a message has one at least."""

    bytes: int
    values: int
    """Members of objects and lists."""
    objects: int

    @classmethod
    def of(cls, sequence_length: int) -> Bounds:
        """Room for a conversation that fills the context, and for its tools."""
        most = min(MAX_BODY, _ROOM + CHARS_PER_TOKEN * sequence_length)
        return cls(most, 20_000 + sequence_length, 5_000 + sequence_length // 32)


class Shape:
    """Counts what a JSON text consists of, piece by piece as it arrives, without parsing it."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._open = b""
        """Beginning of a string that the next piece goes on with."""
        self._values = self._objects = self._depth = 0
        self._last = b""
        """End of the last piece: the beginning of a number, perhaps."""

    def feed(self, part: bytes) -> None:
        """Counts a piece.

        Raises:
            ApiError: the body has too much of something.
        """
        text, self._open = self._open + part, b""
        outside = _STRING.sub(self._closed, text)
        self._last += outside
        if _LONG_NUMBER.search(self._last):
            raise self._refusal("a number", f"more than {_MAX_DIGITS} digits", f"at most {_MAX_DIGITS}")
        self._last = self._last[-_MAX_DIGITS:]
        objects = outside.count(b"{")
        self._objects += objects
        self._values += outside.count(b",") + objects + outside.count(b"[")
        for name, seen, most in (
            ("objects", self._objects, self._bounds.objects),
            ("values", self._values, self._bounds.values),
        ):
            if seen > most:
                raise self._refusal("the body", f"more than {most:,} {name}", "a conversation that fits the context")
        for bracket in re.findall(rb"[\[\]{}]", outside):
            self._depth += 1 if bracket in b"[{" else -1
            if self._depth > _MAX_DEPTH:
                raise self._refusal("the body", f"values nested more than {_MAX_DEPTH} deep", "fewer levels")

    def _closed(self, string: re.Match[bytes]) -> bytes:
        if string[1] != b'"':
            self._open = b'"' + string[1]
        return b""

    def _refusal(self, what: str, seen: str, expected: str) -> ApiError:
        return ApiError(400, f"{what}: seen {seen}, expected {expected}", code="invalid_value")


async def read_body(request: Request, session: Session) -> bytes:
    """The body, where it is not too much, alone or with all that the session sends at the same time.

    Raises:
        ApiError: it is, or takes too long to arrive.
    """
    bounds = Bounds.of(session.policy.limits.sequence_length)
    body, shape = bytearray(), Shape(bounds)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                session.receiving += len(part)
                if len(body) > bounds.bytes:
                    message = f"seen more than {bounds.bytes:,} bytes, expected a conversation that fits the context"
                    raise ApiError(413, message, code="request_too_large")
                if session.receiving > MAX_BODY:
                    message = f"seen requests of more than {MAX_BODY >> 20} MB under way, expected less"
                    raise ApiError(429, message, code="rate_limit_exceeded")
                shape.feed(part)
    except TimeoutError:
        message = f"the body took more than {BODY_SECONDS:g} s to arrive"
        raise ApiError(408, message, code="request_timeout") from None
    finally:
        session.receiving -= len(body)
    return bytes(body)
