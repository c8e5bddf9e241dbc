"""Takes secrets out of a configuration before it is written to disk, and out of texts before they are sent."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

REDACTED = "<redacted>"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = {"password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey"}
_SECRET_PAIRS = {("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("auth", "key")}
# A singular "token" closing a name is a secret unless the word before says that it is a token of text.
_TEXT_TOKENS = {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop", "start", "end", "think", "image"}
_TEXT_TOKENS |= {"special", "added", "new", "next", "per", "first", "last"}
_URL_LOGIN = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_KNOWN_FORMS = re.compile(
    r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abprs]-|AIza|AKIA|wandb_v\d_)[A-Za-z0-9_-]{16,}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
"""Keys of services, JSON web tokens, private keys."""
_ASSIGNED = re.compile(
    r"""(?<![\w.-])(?P<name>[A-Za-z][\w.-]{0,80})"""
    r"""(?P<sign>\\*["']?\s*[:=]\s*\\*["']?)(?P<value>[^\s"'\\,;&}]{4,})"""
)
_AUTHORIZATION = re.compile(r"(?i)\b(authorization\W{1,5}|bearer\s+|basic\s+)(?:bearer\s+|basic\s+)?[\w.~+/=-]{8,}")
_SHORTEST_SECRET = 8
"""Shorter values of secret variables are not hunted for inside other strings: "1" or "true" would match anywhere."""


def redact(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which secrets read ``<redacted>``.

    Hidden are the values of keys that name a secret (``wandb_api_key``, ``HF_TOKEN``, ``password``; not
    ``max_tokens`` or ``pad_token``), logins inside URLs, and, wherever they turn up, those same values and the values
    of the process's environment variables with such names.
    """
    needles = _needles(_secret_values(mapping))
    return {key: _clean(value, is_secret_name(str(key)), needles) for key, value in mapping.items()}


def redact_text(text: str) -> str:
    """A text, such as a log, in which secrets read ``<redacted>``.

    Hidden are the values of this process's environment variables whose names say so, keys of well-known services,
    private keys, logins inside URLs and HTTP headers, and what follows such a name and ``=`` or ``:``.
    """
    for needle in _needles(()):
        text = text.replace(needle, REDACTED)
    text = _KNOWN_FORMS.sub(REDACTED, text)
    text = _AUTHORIZATION.sub(lambda found: f"{found[1]}{REDACTED}", text)
    text = _URL_LOGIN.sub(REDACTED, text)
    return _ASSIGNED.sub(
        lambda found: f"{found['name']}{found['sign']}{REDACTED}" if is_secret_name(found["name"]) else found[0], text
    )


def _needles(values: Iterable[str]) -> list[str]:
    """Secrets that are searched for anywhere: these, and those of the environment."""
    known = {*values, *(value for name, value in os.environ.items() if is_secret_name(name))}
    return sorted((value for value in known if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)


def is_secret_name(name: str) -> bool:
    """Tells whether a key or an environment variable of this name holds a secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    if _SECRET_WORDS & set(words) or any(pair in _SECRET_PAIRS for pair in itertools.pairwise(words)):
        return True
    return words[-1] == "token" and (len(words) == 1 or words[-2] not in _TEXT_TOKENS)


def _secret_values(value: Any, hidden: bool = False) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secret_values(item, hidden or is_secret_name(str(key)))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secret_values(item, hidden)
    elif isinstance(value, str) and hidden:
        yield value


def _clean(value: Any, hidden: bool, needles: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _clean(item, hidden or is_secret_name(str(key)), needles) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item, hidden, needles) for item in value]
    if value is None or isinstance(value, bool) or value == "":
        return value  # an unset secret and a switch such as use_auth_token tell nothing
    if hidden:
        return REDACTED
    if not isinstance(value, str):
        return value
    for needle in needles:
        value = value.replace(needle, REDACTED)
    return _URL_LOGIN.sub(REDACTED, value)
