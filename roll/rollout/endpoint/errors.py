"""Errors of the endpoint, independent of the API: each API writes them in its own form."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError


class ApiError(Exception):
    """A request that is refused.

    Args:
        param: the field of the request that is to blame.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


class PortTakenError(RuntimeError):
    """The endpoint cannot listen where it should."""


_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def type_of(status: int) -> str:
    """The name that OpenAI's and Anthropic's APIs give to a kind of error."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def as_openai(error: ApiError) -> dict[str, Any]:
    """The body of an answer of OpenAI's API."""
    return {
        "error": {
            "message": error.message,
            "type": type_of(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


def as_anthropic(error: ApiError) -> dict[str, Any]:
    """The body of an answer of Anthropic's API."""
    return {"type": "error", "error": {"type": type_of(error.status), "message": error.message}}


def from_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong with the form of a request."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['msg']}", code="invalid_json")
    # A union's members are part of the path; they begin with capital letters or name types.
    param = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part.replace("_", "").islower())
    shown = _shorten(first["input"])
    return ApiError(
        400, f"{param or 'the body'}: {first['msg']}, got {shown}", code="invalid_value", param=param or None
    )


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def _shorten(value: object) -> str:
    """A value in at most 80 characters; of what is large, only a part is looked at."""
    seen = _short.repr(value)
    return seen if len(seen) <= 80 else seen[:80] + "…"


def unsupported(param: str, seen: object, expected: str) -> ApiError:
    """A field that asks for what the endpoint cannot do."""
    return ApiError(400, f"{param}: got {_shorten(seen)}, expected {expected}", code="unsupported_value", param=param)


def too_long(limit: int, tokens: str) -> ApiError:
    """A prompt that leaves no room to answer, in words that programs look for."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} tokens. "
        "Please reduce the length of the messages."
    )
    return ApiError(400, message, code="context_length_exceeded", param="messages")
