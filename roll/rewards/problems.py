"""What is wrong with a verifier's ``args``, in the words of the configuration's errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from roll.configs.base import Config
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.schema import expectation, locate, nearest, section_at


def args_problems(cls: type[Config], values: Mapping[str, Any], strict: bool = True) -> list[str]:
    """All mistakes as ``key: seen …, expected …``, keys relative to the section.

    Args:
        cls: the section's class.
        values: what was given.
        strict: ``"5"`` is no int.
    """
    try:
        config = cls.model_validate(dict(values), strict=strict)
    except ValidationError as error:
        return [str(_problem(cls, detail)) for detail in error.errors(include_url=False)]
    return config.problems()


def _problem(cls: type[Config], detail: Any) -> ConfigProblem:
    path, kind = detail["loc"], detail["type"]
    dotted = ".".join(map(str, path))
    if kind == "extra_forbidden":
        known = list((section_at(cls, path[:-1]) or cls).model_fields)
        near = nearest(str(path[-1]), known)
        hint = f"did you mean {near}?" if near else f"known here: {', '.join(known) or 'none'}"
        return ConfigProblem(dotted, detail["input"], "no such key", hint)
    field = locate(cls, path)
    expected = expectation(*field) if field else str(detail["msg"]).lower()
    return ConfigProblem(dotted, NOTHING if kind == "missing" else detail["input"], expected)
