"""The verifier that calls a user's own function."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from typing import Any, ClassVar, cast

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem
from roll.rewards.types import RewardError, RuleVerifier, Sample, Verdict
from roll.utils.registry import UnknownNameError, import_path


class CustomConfig(Config):
    """``args`` of ``custom``."""

    path: str = Field(
        min_length=1,
        description="package.module:function or folder/file.py:function, called as `compute_score(data_source=…, "
        "solution_str=…, ground_truth=…, extra_info=…)`, and awaited if it is asynchronous. Returns a number, or a "
        "mapping with `score`, optionally `correct` (or `acc`) and `answer` (or `pred`); further numbers become "
        "metrics, texts are kept beside the answer.",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Further keyword arguments.")
    success_score: float = Field(
        default=1.0, description="The lowest score that counts as solved, unless the function says `correct`."
    )

    def problems(self) -> list[ConfigProblem]:
        try:
            function = import_path(self.path, "function")
        except (UnknownNameError, ImportError, SyntaxError) as error:
            expected = "package.module:function or folder/file.py:function that can be imported"
            return [self.problem("path", expected, hint=str(error))]
        if not callable(function):
            return [self.problem("path", "a function", hint=f"it is {type(function).__name__}")]
        try:
            inspect.signature(function).bind(**_ARGUMENTS, **self.kwargs)
        except TypeError as error:
            known = ", ".join([*_ARGUMENTS, *self.kwargs])
            return [self.problem("path", f"a function of {known}", "kwargs", hint=str(error))]
        except ValueError:  # built-in functions have no signature to look at
            return []
        return []


_ARGUMENTS: dict[str, Any] = dict.fromkeys(("data_source", "solution_str", "ground_truth", "extra_info"))
_ANSWERS = ("answer", "pred")


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


class CustomVerifier(RuleVerifier):
    """A user's function. ``extra_info`` is the row's other columns."""

    config_class: ClassVar[type[Config]] = CustomConfig
    config: CustomConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._function = cast(Callable[..., Any], import_path(self.config.path, "function"))

    def check(self, sample: Sample) -> Verdict:
        """Raises ``RewardError`` when the function returns no finite number."""
        result = self._function(
            data_source=sample.data_source,
            solution_str=sample.response,
            ground_truth=sample.ground_truth,
            extra_info=dict(sample.extra_info),
            **self.config.kwargs,
        )
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        if not isinstance(result, Mapping):
            score = self._number(result, "a result")
            return Verdict(score=score, correct=score >= self.config.success_score, seeks_answer=False)
        if "score" not in result:
            raise RewardError(f"{self.config.path} returned the keys {', '.join(map(str, result))}, expected score")
        rest = dict(result)
        score = self._number(rest.pop("score"), "score")
        correct = _pop_first(rest, ("correct", "acc"))
        seeks_answer = not rest.keys().isdisjoint(_ANSWERS)
        answer = _pop_first(rest, _ANSWERS)
        notes = {str(name): value for name, value in rest.items() if isinstance(value, str)}
        parts = {str(name): value for name, value in rest.items() if value is not None and str(name) not in notes}
        return Verdict(
            score=score,
            correct=score >= self.config.success_score if correct is None else bool(correct),
            answer=None if answer is None else str(answer),
            parts={name: self._number(value, name) for name, value in parts.items()},
            notes=notes,
            seeks_answer=seeks_answer,
        )

    def _number(self, value: Any, what: str) -> float:
        if not isinstance(value, Real) or not math.isfinite(value):
            shown = repr(value)[:100]
            raise RewardError(f"{self.config.path} returned {shown} as {what}, expected a finite number")
        return float(value)


def _pop_first(values: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Takes all ``names`` out; the first that is not null."""
    found = [values.pop(name, None) for name in names]
    return next((value for value in found if value is not None), None)
