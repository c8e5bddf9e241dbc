"""Errors and words of a user's code, as text that is safe to keep."""

from __future__ import annotations

MAX_WORDS = 500
"""Characters of a foreign exception's message that are repeated."""


def describe_error(error: BaseException) -> str:
    """``Type: message`` of a foreign exception as text that any file takes, even if its ``__str__`` raises."""
    try:
        message = clean_text(str(error))
    except Exception as fault:  # a user's exception may do anything
        message = f"(its message cannot be read: {type(fault).__name__})"
    return f"{type(error).__name__}: {message if len(message) <= MAX_WORDS else message[:MAX_WORDS] + '…'}"


def clean_text(text: str) -> str:
    """``text`` with lone surrogates, which no file and no tokenizer takes, spelt as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
