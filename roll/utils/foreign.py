"""Code that is not ours: its exceptions, as text that is safe to keep, and its attributes, replaced for a while."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

MAX_WORDS = 500
"""Characters of a foreign exception's message that are repeated."""

_NOT_THE_USERS = (
    "<",  # code without a file
    f"{Path(__file__).parents[1]}{os.sep}",
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""Beginnings of the files of this package, of Python and of installed packages."""


class Fault:
    """Catches any ``Exception``: the ``with`` block ends there, and ``error`` is it (``None``: nothing was raised).

    For code that may raise anything and must not end its caller (an environment, a tool, a chat template, a tracker),
    and for work whose failure is handed to those who wait for it. Errors that one knows are caught by their types.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None


def describe_error(error: BaseException) -> str:
    """``Type: message`` of a foreign exception as text that any file takes, even if its ``__str__`` raises."""
    message = ""
    with Fault() as fault:
        message = clean_text(str(error))
    if fault.error is not None:
        message = f"(its message cannot be read: {type(fault.error).__name__})"
    return f"{type(error).__name__}: {message if len(message) <= MAX_WORDS else message[:MAX_WORDS] + '…'}"


def describe_fault(error: BaseException) -> str:
    """``describe_error`` and the last line of a user's own code on the way: ``KeyError: 'x' (/home/a/mine.py:12)``."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    return f"{describe_error(error)} ({own[-1].filename}:{own[-1].lineno})" if own else describe_error(error)


def clean_text(text: str) -> str:
    """``text`` with lone surrogates, which no file and no tokenizer takes, spelt as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Gives a module, a class or an object other attributes."""
    previous = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in previous.items():
            setattr(owner, name, value)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables."""
    previous = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in previous.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
