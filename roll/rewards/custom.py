"""The verifier that calls a user's own function: a plain one, an asynchronous one, or one that takes a whole list."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, cast

from pydantic import Field

from roll.configs.arguments import argument_problems
from roll.configs.base import Config
from roll.configs.problems import NOTHING, ConfigProblem
from roll.rewards.answers import check_plain
from roll.rewards.types import Batching, RewardError, RewardResult, RewardTimeoutError, RuleVerifier, Sample
from roll.utils.foreign import Fault, describe_fault
from roll.utils.registry import UnknownNameError, import_path

BATCH_SIZE = 16
"""Samples of one call, or asynchronous calls at a time, where ``batch_size`` says nothing."""

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_LISTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_ANSWERS = ("answer", "pred")


class CustomConfig(Config):
    """``args`` of ``custom``."""

    path: str = Field(
        min_length=1,
        description="package.module:function or folder/file.py:function, called as `compute_score(data_source=…, "
        "solution_str=…, ground_truth=…, extra_info=…)`; an `async def` is awaited, several at once. Returns a "
        "number, or a mapping with `score`, optionally `correct` (or `acc`) and `answer` (or `pred`); further "
        "numbers become metrics, everything else is stored as text with the response.",
    )
    batch: bool = Field(
        default=False,
        description="The function takes lists, `compute_score(data_sources=…, solution_strs=…, ground_truths=…, "
        "extra_infos=…)`, and returns a list of the same length.",
    )
    batch_size: int | None = Field(
        default=None,
        ge=1,
        description=f"Samples of one call with `batch`; concurrent calls of an asynchronous function in one child "
        f"process. null: {BATCH_SIZE}.",
    )
    batch_wait: float = Field(
        default=0.02, ge=0, le=10, description="Seconds that an incomplete batch waits for more samples."
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Further keyword arguments.")
    success_score: float = Field(
        default=1.0, description="The lowest score that counts as solved, unless the function says `correct`."
    )

    def problems(self) -> list[ConfigProblem]:
        try:
            function = import_path(self.path, "function")
        except UnknownNameError as error:
            expected = "package.module:function or folder/file.py:function that can be imported"
            return [self.problem("path", expected, hint=str(error))]
        if not callable(function):
            return [self.problem("path", "a function", hint=f"it is {type(function).__name__}")]
        if self.batch_size is not None and not self.batch and not _is_async(function):
            expected = "null: a plain function is called for each sample"
            return [self.problem("batch_size", expected, "batch", "path", hint="batch: true, or an async def")]
        names = _LISTS if self.batch else _ARGUMENTS
        try:
            inspect.signature(function).bind(**dict.fromkeys(names), **self.kwargs)
        except TypeError as error:
            known = ", ".join([*names, *self.kwargs])
            return [self.problem("path", f"a function of {known}", "kwargs", "batch", hint=str(error))]
        except ValueError:  # built-in functions have no signature to look at
            return []
        wrong = argument_problems(function, self.kwargs)
        return [problem.under("kwargs") for problem in wrong if problem.got is not NOTHING]


class CustomVerifier(RuleVerifier):
    """A user's function. ``extra_info`` is the row's other columns."""

    config_class: ClassVar[type[Config]] = CustomConfig
    config: CustomConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._function = cast(Callable[..., Any], import_path(self.config.path, "function"))
        self._runner = asyncio.Runner()  # one event loop for all calls: a function may keep a client between them

    @classmethod
    def check_row(cls, config: Config, sample: Sample) -> None:
        check_plain(sample.ground_truth)

    @classmethod
    def batching(cls, config: Config) -> Batching | None:
        """Lists for a function of lists; asynchronous calls side by side."""
        assert isinstance(config, CustomConfig)
        size = config.batch_size or BATCH_SIZE
        if config.batch:
            return Batching(size, config.batch_wait)
        side_by_side = _is_async(import_path(config.path, "function"))
        return Batching(size, 0.0, side_by_side=True) if side_by_side else None

    def check(self, sample: Sample) -> RewardResult:
        """Raises ``RewardError`` when the function returns no finite number."""
        if self.config.batch:
            [outcome] = self._check_list([sample])
            if isinstance(outcome, RewardError):
                raise outcome
            return outcome
        return self._verdict(self._finished(self._call(sample)))

    def check_all(self, samples: Sequence[Sample], timeout: float) -> Sequence[RewardResult | RewardError]:
        """Raises ``RewardError`` when a function of lists does not return one result for each sample."""
        if self.config.batch:
            return self._check_list(samples)
        if _is_async(self._function):
            return self._runner.run(self._check_side_by_side(samples, timeout))
        return super().check_all(samples, timeout)

    def _call(self, sample: Sample) -> Any:
        return self._function(
            data_source=sample.data_source,
            solution_str=sample.response,
            ground_truth=sample.ground_truth,
            extra_info=dict(sample.extra_info),
            **self.config.kwargs,
        )

    def _check_list(self, samples: Sequence[Sample]) -> list[RewardResult | RewardError]:
        results = self._finished(
            self._function(
                data_sources=[sample.data_source for sample in samples],
                solution_strs=[sample.response for sample in samples],
                ground_truths=[sample.ground_truth for sample in samples],
                extra_infos=[dict(sample.extra_info) for sample in samples],
                **self.config.kwargs,
            )
        )
        if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != len(samples):
            length = f" of {len(results)}" if isinstance(results, Sequence) else ""
            seen = f"{type(results).__name__}{length}"
            raise RewardError(f"{self.config.path} returned a {seen}, expected a list of {len(samples)} results")
        return [self._verdict_or_error(result) for result in results]

    async def _check_side_by_side(self, samples: Sequence[Sample], timeout: float) -> list[RewardResult | RewardError]:
        return list(await asyncio.gather(*(self._check_within(sample, timeout) for sample in samples)))

    async def _check_within(self, sample: Sample, timeout: float) -> RewardResult | RewardError:
        with Fault() as fault:
            async with asyncio.timeout(timeout) as limit:
                result = await self._call(sample)
        if fault.error is None:
            return self._verdict_or_error(result)
        if limit.expired():
            return RewardTimeoutError(f"took longer than {timeout:g} s")
        return RewardError(describe_fault(fault.error))

    def _verdict_or_error(self, result: Any) -> RewardResult | RewardError:
        try:
            return self._verdict(result)
        except RewardError as error:
            return error

    def _verdict(self, result: Any) -> RewardResult:
        if not isinstance(result, Mapping):
            score = self._number(result, "a result")
            return RewardResult(score=score, correct=score >= self.config.success_score, seeks_answer=False)
        if "score" not in result:
            raise RewardError(f"{self.config.path} returned the keys {', '.join(map(str, result))}, expected score")
        rest = {str(name): value for name, value in result.items()}
        score = self._number(rest.pop("score"), "score")
        correct = _pop_first(rest, ("correct", "acc"))
        seeks_answer = not rest.keys().isdisjoint(_ANSWERS)
        answer = _pop_first(rest, _ANSWERS)
        rest = {name: value for name, value in rest.items() if value is not None}
        parts = {name: float(value) for name, value in rest.items() if _is_finite(value)}
        return RewardResult(
            score=score,
            correct=score >= self.config.success_score if correct is None else self._flag(correct),
            answer=None if answer is None else str(answer),
            parts=parts,
            notes={name: _as_text(value) for name, value in rest.items() if name not in parts},
            seeks_answer=seeks_answer,
        )

    def _finished(self, result: Any) -> Any:
        """A result, awaited if it has to be."""
        return self._runner.run(_awaited(result)) if inspect.isawaitable(result) else result

    def _number(self, value: Any, what: str) -> float:
        if not _is_finite(value):
            shown = repr(value)[:100]
            raise RewardError(f"{self.config.path} returned {shown} as {what}, expected a finite number")
        return float(value)

    def _flag(self, value: Any) -> bool:
        if isinstance(value, str) or value != value:  # every text is true, and so is NaN
            raise RewardError(f"{self.config.path} returned {repr(value)[:100]} as correct, expected true or false")
        return bool(value)


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _as_text(value: Any) -> str:
    """Text of what a function told beside its numbers; anything can be shown."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)


def _pop_first(values: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Takes all ``names`` out; the first that is not null."""
    found = [values.pop(name, None) for name in names]
    return next((value for value in found if value is not None), None)
