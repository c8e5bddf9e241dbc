"""The HTTP server: sessions by key, limits on requests, errors in the form of each API.

It listens on loopback alone. In a run it is part of a rollout worker's event loop, and programs run on the worker's
machine: a key is a secret of 32 random bytes that opens one episode's session, as a bearer token or as a part of the
URL; nothing writes it to a log. ``roll serve`` gives each request a session of its own instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from roll.data.renderer import CHARS_PER_TOKEN
from roll.rollout.endpoint.anthropic import MessageRequest
from roll.rollout.endpoint.errors import ApiError, PortTakenError, as_anthropic, as_openai, from_validation
from roll.rollout.endpoint.openai import ChatRequest, CompletionRequest, ResponseRequest
from roll.rollout.endpoint.sampling import ApiRequest
from roll.rollout.endpoint.session import Session
from roll.rollout.endpoint.step import RewardRequest, StepRequest
from roll.utils.foreign import describe_error

logger = logging.getLogger(__name__)

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
    """Limits of a request's body, by the tokens of a conversation: a message has at least one."""

    bytes: int
    values: int
    """Members of objects and lists."""
    objects: int

    @classmethod
    def of(cls, sequence_length: int, *, pictures: bool = False) -> Bounds:
        """Room for a conversation that fills the context, and for its tools; with pictures, as much as there may be."""
        most = MAX_BODY if pictures else min(MAX_BODY, _ROOM + CHARS_PER_TOKEN * sequence_length)
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
        return ApiError(400, f"{what}: got {seen}, expected {expected}", code="invalid_value")


async def read_body(request: Request, session: Session) -> bytes:
    """The body, where it is not too much, alone or with all that the session sends at the same time.

    Raises:
        ApiError: it is, or takes too long to arrive.
    """
    policy = session.policy
    bounds = Bounds.of(policy.limits.sequence_length, pictures=policy.renderer.pictures is not None)
    body, shape = bytearray(), Shape(bounds)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                session.receiving += len(part)
                if len(body) > bounds.bytes:
                    message = f"got more than {bounds.bytes:,} bytes, expected a conversation that fits the context"
                    raise ApiError(413, message, code="request_too_large")
                if session.receiving > MAX_BODY:
                    message = f"got requests of more than {MAX_BODY >> 20} MB under way, expected less"
                    raise ApiError(429, message, code="rate_limit_exceeded")
                shape.feed(part)
    except TimeoutError:
        message = f"the body took more than {BODY_SECONDS:g} s to arrive"
        raise ApiError(408, message, code="request_timeout") from None
    finally:
        session.receiving -= len(body)
    return bytes(body)


HOST = "127.0.0.1"
MAX_HEADERS = 64 << 10
"""Bytes of a request's line and headers."""

MODEL = "policy"
"""The model's name in ``/v1/models``; requests may call it anything."""

_MAX_ENDED = 100_000
_ADVICE = "expected the key of a running episode, as a bearer token or in the URL /s/<key>/v1"

T = TypeVar("T")


class _Server(uvicorn.Server):
    """A server that leaves signals to the process that it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Endpoint:
    """Sessions behind one port of this machine.

    Args:
        port: where to listen; 0 is any that is free.
        fresh: makes a session for each request, whose key does not matter; ``None``: sessions are opened by key.

    Raises:
        PortTakenError: something else listens there.
    """

    def __init__(self, port: int = 0, fresh: Callable[[], Session] | None = None) -> None:
        self._fresh = fresh
        # asyncio sends without delay (TCP_NODELAY) only on sockets that say that they are TCP's.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((HOST, port))
            self._socket.listen(2048)  # until then another could share the port
        except OSError as error:
            self._socket.close()
            raise PortTakenError(f"agent.port: got {port}, expected a free port of {HOST}, or 0 ({error})") from error
        self._sessions: dict[bytes, Session] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._turned_away = 0
        config = uvicorn.Config(
            _application(self),
            http="h11",  # httptools takes any number of headers
            h11_max_incomplete_event_size=MAX_HEADERS,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    @property
    def has_episodes(self) -> bool:
        """Tells whether sessions are episodes, which take rewards and steps."""
        return self._fresh is None

    @property
    def url(self) -> str:
        """Base of the APIs: ``http://127.0.0.1:<port>/v1``."""
        return f"http://{HOST}:{self._socket.getsockname()[1]}/v1"

    async def start(self) -> None:
        """Begins to serve in this event loop, unless it does already."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
            self._serving.add_done_callback(_tell_failure)

    async def stop(self) -> None:
        """Ends all sessions and the server."""
        for session in self._sessions.values():
            session.close()
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
        self._socket.close()

    @contextlib.contextmanager
    def open(self, session: Session) -> Iterator[str]:
        """Lets requests into a session for a while; gives its key."""
        key = secrets.token_urlsafe(32)
        digest = _digest(key)
        self._sessions[digest] = session
        try:
            yield key
        finally:
            del self._sessions[digest]
            self._ended[digest] = None
            if len(self._ended) > _MAX_ENDED:
                self._ended.popitem(last=False)
            session.close()

    def session_of(self, request: Request) -> Session:
        """The session whose key the request has, or a new one where each request gets its own.

        Raises:
            ApiError: it has none, or that of an episode that has ended.
        """
        if self._fresh is not None:
            return self._fresh()
        key = request.path_params.get("key") or _header_key(request)
        digest = _digest(key)
        if (session := self._sessions.get(digest)) is not None:
            return session
        self._turned_away += 1
        if not key:
            raise ApiError(401, f"got no key, {_ADVICE}", code="missing_api_key")
        if digest in self._ended:
            raise ApiError(410, "the episode of this key has ended", code="episode_ended")
        raise ApiError(401, f"got a key that is none, {_ADVICE}", code="invalid_api_key")

    def count_turned_away(self) -> int:
        """Requests since the last call that had no key of a running episode."""
        count, self._turned_away = self._turned_away, 0
        return count


def _header_key(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the endpoint stopped: %s", describe_error(error))


def _application(endpoint: Endpoint) -> Starlette:
    async def models(request: Request) -> Response:
        endpoint.session_of(request)
        return JSONResponse({"object": "list", "data": [_MODEL_CARD]})

    async def model(request: Request) -> Response:
        endpoint.session_of(request)
        if (name := request.path_params["model"]) != MODEL:
            raise ApiError(404, f"got the model {name!r}, expected {MODEL}", code="model_not_found", param="model")
        return JSONResponse(_MODEL_CARD)

    async def reward(request: Request) -> Response:
        session = endpoint.session_of(request)
        with _refusing(session):
            RewardRequest.model_validate_json(await read_body(request, session)).post(session)
        return JSONResponse({"object": "reward"})

    async def step(request: Request) -> Response:
        session = endpoint.session_of(request)
        with _refusing(session):
            return JSONResponse(await StepRequest.model_validate_json(await read_body(request, session)).take(session))

    of_episodes = [("/v1/reward", ["POST"], reward), ("/v1/step", ["POST"], step)]
    paths: list[tuple[str, list[str], Callable[[Request], Awaitable[Response]]]] = [
        ("/v1/models", ["GET"], models),
        ("/v1/models/{model:path}", ["GET"], model),
        *(of_episodes if endpoint.has_episodes else []),
        ("/v1/chat/completions", ["POST"], _handler(endpoint, ChatRequest)),
        ("/v1/completions", ["POST"], _handler(endpoint, CompletionRequest)),
        ("/v1/responses", ["POST"], _handler(endpoint, ResponseRequest)),
        ("/v1/messages", ["POST"], _handler(endpoint, MessageRequest)),
    ]
    routes = [
        Route(prefix + path, handler, methods=methods)
        for prefix in ("", "/s/{key}")
        for path, methods, handler in paths
    ]
    return Starlette(
        routes=routes,
        exception_handlers={
            ApiError: _refuse,
            HTTPException: _refuse_http,
            ClientDisconnect: _gone,
            Exception: _fail,
        },
    )


_MODEL_CARD = {"id": MODEL, "object": "model", "created": 0, "owned_by": "roll"}


def _handler(endpoint: Endpoint, kind: type[ApiRequest]) -> Callable[[Request], Awaitable[Response]]:
    """Answers requests of one API."""

    async def handle(request: Request) -> Response:
        try:
            session = endpoint.session_of(request)
        except ApiError as error:
            return JSONResponse(kind.error_body(error), error.status)
        try:
            with _refusing(session):
                ask = kind.model_validate_json(await read_body(request, session))
                answers = await _unless_gone(request, ask.ask(session))
        except ApiError as refusal:
            return JSONResponse(kind.error_body(refusal), refusal.status)
        renderer = session.policy.renderer
        if ask.stream:
            return StreamingResponse(_stream(ask.events(answers, renderer)), media_type="text/event-stream")
        return JSONResponse(ask.whole(answers, renderer))

    return handle


@contextlib.contextmanager
def _refusing(session: Session) -> Iterator[None]:
    """Counts a request that is refused, in whatever words.

    Raises:
        ApiError: so it is.
    """
    try:
        yield
    except (ApiError, ValidationError) as error:
        raise session.refuse(error if isinstance(error, ApiError) else from_validation(error)) from None


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Waits for ``work``; gives it up when the program no longer waits for the answer."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(events: Iterator[str]) -> AsyncIterator[str]:
    for each in events:  # without a thread for each, which an iterator would get
        yield each


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(as_openai(error), error.status)


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = _path(request)
    refusal = ApiError(error.status_code, f"{request.method} {path}: {error.detail}", code="unknown_url")
    body = as_anthropic if "/v1/messages" in path else as_openai
    return JSONResponse(body(refusal), error.status_code)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _fail(request: Request, error: Exception) -> Response:
    logger.error("%s %s: %s", request.method, _path(request), describe_error(error))
    return JSONResponse(as_openai(ApiError(500, "the endpoint failed", code="internal_error")), 500)


def _path(request: Request) -> str:
    """The path without a key."""
    path = request.url.path
    return "/s/…/" + path.split("/", 3)[3] if path.startswith("/s/") and path.count("/") > 2 else path
