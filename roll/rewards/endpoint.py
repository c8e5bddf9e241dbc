"""A client for an HTTP server that may fail: limited requests, retries, and a key that is never shown."""

from __future__ import annotations

import asyncio
import email.utils
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import httpx
import tenacity
from pydantic import ConfigDict, Field, SecretStr

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem, Words
from roll.data.addresses import is_loopback
from roll.rewards.types import RewardError
from roll.utils.threads import turn

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHOWN_CHARACTERS = 200
"""Length to which an error repeats an endpoint's words."""

_RETRIED_STATUS = {408, 429}
_KEY_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
_HIDDEN = Words("a value that is not shown")


class Patience(Config):
    """Limits on requests to a server: how many at a time, how long, how many times."""

    # A key that was put into the wrong place must not be repeated by the error about it.
    model_config = ConfigDict(hide_input_in_errors=True)

    max_concurrency: int = Field(default=16, ge=1, description="Requests of one reward worker in flight at a time.")
    request_timeout: float = Field(default=20.0, gt=0, description="Seconds for one request, reply included.")
    max_attempts: int = Field(
        default=3,
        ge=1,
        description="Attempts in all for one request: after 408, 429, 5xx, broken connections, timeouts, and unusable "
        "replies.",
    )
    retry_wait: float = Field(
        default=1.0, ge=0, description="Longest wait before the second attempt; random, doubles with each attempt."
    )
    max_retry_wait: float = Field(
        default=30.0,
        ge=0,
        description="Longest wait between attempts. A request is given up if Retry-After asks for more.",
    )


class RemoteConfig(Patience):
    """A server with an address and perhaps a key; which server, subclasses say."""

    url: str = Field(description="Address of the server.")
    api_key_env: str | None = Field(
        default=None,
        description="Name of the environment variable that holds the key, in the reward worker. null: no key is sent.",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        """An address or a name of a variable that cannot be one."""
        yield from url_problems("url", self.url, "api_key_env")
        yield from key_name_problems("api_key_env", self.api_key_env)


class TransientError(RewardError):
    """The next attempt may succeed."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Endpoint:
    """One URL that takes JSON by POST. Serves one event loop.

    Args:
        patience: see ``Patience``.
        key: sent as a bearer token; ``None``: none is.
    """

    def __init__(self, url: httpx.URL, name: str, patience: Patience, key: SecretStr | None = None) -> None:
        self._url = url
        self._patience = patience
        self._key = key
        self.shown = f"{name} at {url.copy_with(query=None)}"
        """Name and address in messages."""
        self._slots = asyncio.Semaphore(patience.max_concurrency)
        self._backoff = tenacity.wait_random_exponential(multiplier=patience.retry_wait, max=patience.max_retry_wait)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key.get_secret_value()}"} if key else {},
            timeout=None,  # _post limits the whole request; httpx's limits are per read
            limits=httpx.Limits(max_connections=patience.max_concurrency),
            # A proxy of the environment would send what is meant for this machine elsewhere.
            trust_env=not is_loopback(url.host),
        )

    async def ask(
        self, body: dict[str, Any], read: Callable[[httpx.Response], T], more_s: float = 0.0
    ) -> tuple[T, int]:
        """Asks, again where that may help; returns what was read, and the requests that it took.

        Args:
            read: makes the result of an answer with status 200; may raise ``TransientError``.
            more_s: seconds that a request may take beyond ``request_timeout``.

        Raises:
            RewardError: refused by the endpoint, or no usable answer after ``max_attempts``.
        """
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(TransientError),
            stop=self._gives_up,
            wait=self._wait,
            before_sleep=self._log_retry,
            reraise=True,
        )
        try:
            value: T = await retrying(self._ask_once, body, read, more_s)
        except TransientError as error:
            tried = f"attempt {retrying.statistics['attempt_number']} of {self._patience.max_attempts}"
            if error.retry_after is not None:
                tried += f", Retry-After {error.retry_after:g} s, max_retry_wait {self._patience.max_retry_wait:g} s"
            raise RewardError(f"{self.shown}: {error} ({tried})") from error
        return value, int(retrying.statistics["attempt_number"])

    def shorten(self, text: str) -> str:
        """The beginning of foreign words, in quotes, without the key that an endpoint may have repeated."""
        if self._key:
            text = text.replace(self._key.get_secret_value(), "<redacted>")
        return repr(text[:SHOWN_CHARACTERS])

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def _ask_once(self, body: dict[str, Any], read: Callable[[httpx.Response], T], more_s: float) -> T:
        async with turn(self._slots):  # the connection pool would bound it too, but on the request's time
            response = await self._post(body, self._patience.request_timeout + more_s)
        if response.status_code != httpx.codes.OK:
            words = f"status {response.status_code}, expected 200: {self.shorten(response.text)}"
            if response.status_code in _RETRIED_STATUS or response.is_server_error:
                raise TransientError(words, _retry_after(response.headers.get("retry-after")))
            raise RewardError(f"{self.shown}: {words}")
        return read(response)

    async def _post(self, body: dict[str, Any], limit: float) -> httpx.Response:
        try:
            async with asyncio.timeout(limit):
                return await self._client.post(self._url, json=body)
        except TimeoutError as error:
            more = limit - self._patience.request_timeout
            own = f" + {more:g}" if more else ""
            words = f"no reply within request_timeout = {self._patience.request_timeout:g}{own} seconds"
            raise TransientError(words) from error
        except httpx.RequestError as error:
            raise TransientError(f"{type(error).__name__}: {self.shorten(str(error))}") from error

    def _wait(self, state: tenacity.RetryCallState) -> float:
        asked = _asked_wait(state)
        return self._backoff(state) if asked is None else asked

    def _gives_up(self, state: tenacity.RetryCallState) -> bool:
        if state.attempt_number >= self._patience.max_attempts:
            return True
        return (_asked_wait(state) or 0.0) > self._patience.max_retry_wait

    def _log_retry(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        logger.debug("%s: attempt %d failed: %s", self.shown, state.attempt_number, error)


def read_key(name: str | None, setting: str) -> SecretStr | None:
    """The key in an environment variable.

    Args:
        name: of the variable; ``None``: there is no key.

    Raises:
        ValueError: the variable is unset, or no possible key.
    """
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise ValueError(f"{setting}: the environment variable {name} is not set, expected the endpoint's key")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ValueError(f"{setting}: the value of {name} cannot be a key: it has spaces or special characters")
    return SecretStr(key)


def url_problems(setting: str, url: str, key_setting: str) -> Iterator[ConfigProblem]:
    """Problems of an endpoint's address; a login in it is not repeated."""
    expected = "http(s)://host[:port]/path"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        yield ConfigProblem(setting, _HIDDEN, expected, str(error))
        return
    if parsed.userinfo:
        hint = f"{key_setting} names the variable with the key"
        yield ConfigProblem(setting, Words("a login in it"), f"{expected} without one", hint)
    elif parsed.scheme not in ("http", "https") or not parsed.host:
        yield ConfigProblem(setting, url, expected)


def key_name_problems(setting: str, name: str | None) -> Iterator[ConfigProblem]:
    """A name that no environment variable with a key would have; it may be the key itself, so it is not repeated."""
    if name is not None and not _KEY_NAME.fullmatch(name):
        yield ConfigProblem(setting, _HIDDEN, "the name of an environment variable in capitals, such as JUDGE_API_KEY")


def _asked_wait(state: tenacity.RetryCallState) -> float | None:
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after if isinstance(error, TransientError) else None


def _retry_after(value: str | None) -> float | None:
    """Seconds to wait by a ``Retry-After`` header: a number, or a date (RFC 9110, 10.2.3)."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(seconds, 0.0) if seconds == seconds else None  # float() understands "nan"
