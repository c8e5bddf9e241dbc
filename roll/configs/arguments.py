"""Open mappings of a configuration, which go to a class or function as its keyword arguments."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from roll.configs.base import Config
from roll.configs.problems import NOTHING, ConfigProblem, Words
from roll.configs.schema import did_you_mean

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def takes(
    *, passes_on: Callable[..., Any] | None = None, check: Callable[..., None] | None = None
) -> Callable[[FunctionT], FunctionT]:
    """Says more of a function's arguments than its signature does, for ``argument_problems``.

    Args:
        passes_on: gets what the function has as ``**options``.
        check: called with the given arguments, raises ``ValueError`` where they do not fit each other.
    """

    def decorate(function: FunctionT) -> FunctionT:
        if passes_on is not None:
            own = _signature(function)
            found = {**{p.name: p for p in _named(passes_on)}, **{p.name: p for p in _named(function)}}
            positional = [p for p in found.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
            others = [p for p in found.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
            function.__signature__ = own.replace(parameters=[*positional, *others])  # type: ignore[attr-defined]
        function.check_arguments = check  # type: ignore[attr-defined]
        return function

    return decorate


def argument_problems(function: Callable[..., Any], args: Mapping[str, Any], given: int = 0) -> list[ConfigProblem]:
    """Names and values that a class or function does not take, as far as its signature says.

    Args:
        args: JSON values, by keyword.
        given: number of leading arguments that it gets besides.
    """
    try:
        signature = _signature(function)
    except (TypeError, ValueError):  # some built-in ones have none
        return []
    parameters = {p.name: p for p in list(signature.parameters.values())[given:] if p.kind in _NAMED}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    problems = []
    for key, value in args.items():
        if key in parameters:
            problems += _value_problems(key, value, parameters[key].annotation)
        elif not takes_any:
            hint = did_you_mean(str(key), parameters) or f"known here: {', '.join(parameters) or 'none'}"
            problems.append(ConfigProblem(str(key), value, "no such key", hint))
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in args]
    problems += [ConfigProblem(key, NOTHING, "a value, since it has no default") for key in missing]
    check = getattr(function, "check_arguments", None)
    if check is not None and not problems and not any(plain_problems(args)):
        try:
            check(**args)
        except ValueError as error:
            problems.append(ConfigProblem("", Words("these values"), "values that fit together", str(error)))
    return problems


def plain_problems(value: Any, path: str = "") -> Iterator[ConfigProblem]:
    """Values inside that JSON cannot hold, and texts that no file, process or tokenizer takes."""
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield from plain_problems(key, path)
            yield from plain_problems(inside, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, inside in enumerate(value):
            yield from plain_problems(inside, f"{path}.{index}")
    elif isinstance(value, Config):
        yield from plain_problems({name: getattr(value, name) for name in type(value).model_fields}, path)
    elif isinstance(value, float) and not math.isfinite(value):
        yield ConfigProblem(path, str(value), "a finite number")
    elif isinstance(value, str):
        if "\0" in value:
            yield ConfigProblem(path, value, "text without the character NUL")
        elif not value.isascii() and value != value.encode("utf-8", "replace").decode("utf-8"):
            yield ConfigProblem(path, ascii(value), "text without lone surrogates")
    elif not isinstance(value, int | float | None):
        yield ConfigProblem(path, str(value), f"a JSON value, not {type(value).__name__}")


def none_problems(section: Config, path: str = "") -> Iterator[ConfigProblem]:
    """Texts ``None`` where null is meant: Python's spelling, which YAML reads as a word."""
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{path}.{name}" if path else name
        inside = value.items() if isinstance(value, dict) else ()
        for part, each in ((key, value), *((f"{key}.{one}", each) for one, each in inside)):
            if isinstance(each, Config):
                yield from none_problems(each, part)
        if value == "None" and type(None) in get_args(field.annotation):
            yield ConfigProblem(key, value, "null, as YAML spells it")


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:  # types that are imported for a type checker alone
        return inspect.signature(function)


def _named(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in _signature(function).parameters.values() if p.kind in _NAMED]


def _value_problems(key: str, value: Any, annotation: Any) -> list[ConfigProblem]:
    """Reasons why a JSON value is none of a type, as strict as JSON is: no ``true`` or ``99.5`` for an int."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str) or any(plain_problems(value)):
        return []  # what is not plain is told as such
    try:
        TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        told = dict.fromkeys(str(each["msg"]).removeprefix("Input should be ") for each in error.errors())
        expected = ", or ".join(told)
        return [ConfigProblem(key, value, expected[:1].lower() + expected[1:])]
    except (PydanticUserError, TypeError, ValueError):  # a type that pydantic has no rule for
        return []
    return []
