"""Sampling settings of requests to OpenAI's chat and completions API."""

from __future__ import annotations

import functools
import json
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from roll.data.columns import IntArray
from roll.data.renderer import ChatRenderer
from roll.rollout.endpoint.errors import ApiError, as_openai, unsupported
from roll.rollout.endpoint.session import Answer, Session, Wanted

MAX_STOPS = 64
"""Each is looked for after every token."""
_OFF: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("logit_bias", (None, {})),
    ("suffix", (None, "")),
    ("echo", (None, False)),
    ("best_of", (None, 1)),
    ("functions", (None, [])),
    ("audio", (None,)),
)


class StreamOptions(BaseModel):
    include_usage: bool = False


class ApiRequest(BaseModel, ABC):
    """A request of any of the APIs."""

    model: str = "policy"
    stream: bool | None = None

    error_body: ClassVar[Callable[[ApiError], dict[str, Any]]] = staticmethod(as_openai)
    """The API's form of an error."""

    @abstractmethod
    async def ask(self, session: Session) -> list[Answer]:
        """The policy's answers.

        Raises:
            ApiError: the request is refused.
        """

    @abstractmethod
    def whole(self, answers: Sequence[Answer], renderer: ChatRenderer) -> dict[str, Any]:
        """The answers as one object."""

    @abstractmethod
    def events(self, answers: Sequence[Answer], renderer: ChatRenderer) -> Iterator[str]:
        """The answers as a stream."""


class SamplingRequest(ApiRequest):
    """Fields that both APIs have. Provider-only fields are ignored."""

    n: int | None = Field(default=None, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    functions: list[Any] | None = None
    audio: Any = None

    def wanted(self, max_new_tokens: int | None) -> Wanted:
        """The wish.

        Raises:
            ApiError: something cannot be done.
        """
        for name, allowed in _OFF:
            if (seen := getattr(self, name)) not in allowed:
                raise unsupported(name, seen, "nothing: the engines do not know it")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stop) > MAX_STOPS:
            raise unsupported("stop", f"{len(stop)} texts", f"at most {MAX_STOPS}")
        if "" in stop:
            raise unsupported("stop", stop, "texts that are not empty")
        return Wanted(self.n or 1, max_new_tokens, self.temperature, self.top_p, stop, self.seed)

    @property
    def wants_usage(self) -> bool:
        """Tells whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


def event(data: Mapping[str, Any], name: str | None = None) -> str:
    """A server-sent event."""
    text = json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"


DONE = "data: [DONE]\n\n"
"""The end of a stream of chunks."""


def head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """The fields that every object of an answer begins with."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Tokens of a request; its prompt counts once."""
    prompt, sampled = answers[0].prompt_tokens, sum(len(answer.completion.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def texts_of(renderer: ChatRenderer, ids: IntArray) -> list[str]:
    """The text of each token, special ones included."""
    return [str(renderer.tokenizer.decode([token])) for token in ids.tolist()]


def bytes_of(renderer: ChatRenderer, token: int, text: str) -> list[int] | None:
    """The bytes of a token with that text; ``None`` where it is a part of a character that the tokenizer hides."""
    if "\ufffd" not in text:
        return list(text.encode())
    piece = str(renderer.tokenizer.convert_ids_to_tokens(token))
    if fallback := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):  # SentencePiece
        return [int(fallback[1], 16)]
    letters = _bytes_by_letter()  # byte-level BPE
    return [letters[letter] for letter in piece] if all(letter in letters for letter in piece) else None


@functools.cache
def _bytes_by_letter() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
