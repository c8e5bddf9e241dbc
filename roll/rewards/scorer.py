"""Computes a domain's rewards: its verifiers, their timeouts and retries, and the weighted sum of scores."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import tenacity

from roll.configs.parsing import section_problems
from roll.configs.problems import ConfigErrors, ConfigProblem
from roll.configs.rewards import RewardConfig, VerifierConfig
from roll.configs.schema import did_you_mean
from roll.rewards import VERIFIERS
from roll.rewards.isolation import RulePool, RuleSpec, rule_spec
from roll.rewards.types import (
    Batching,
    OverBudgetError,
    RewardError,
    RewardResult,
    RewardTimeoutError,
    RuleVerifier,
    Sample,
    Verifier,
)
from roll.utils.foreign import describe_error
from roll.utils.progress import advance
from roll.utils.registry import UnknownNameError
from roll.utils.threads import MicroBatcher, time_limit

RETRY_WAIT = 0.1
"""Seconds before the second attempt; each further wait is twice as long, to at most ``MAX_RETRY_WAIT``."""
MAX_RETRY_WAIT = 5.0


def check_rewards(config: RewardConfig) -> Iterator[ConfigProblem]:
    """All that is wrong with a domain's verifiers, keys relative to it. Imports the verifiers' modules."""
    for number, verifier in enumerate(config.verifiers):
        base = f"verifiers.{number}"
        try:
            cls = VERIFIERS.get(verifier.name)
        except UnknownNameError as error:
            yield _unknown_verifier(f"{base}.name", verifier.name, error)
            continue
        if not (isinstance(cls, type) and issubclass(cls, Verifier)):
            yield ConfigProblem(f"{base}.name", verifier.name, "a subclass of roll.rewards.Verifier")
            continue
        found = section_problems(cls.config_class, verifier.args)
        yield from [problem.under(f"{base}.args") for problem in found]
        if not found:
            yield from _device_problems(f"{base}.args", cls.num_devices(cls.config_class(**verifier.args)), config)
        if issubclass(cls, RuleVerifier) and not found:
            yield from _spec_problems(f"{base}.name", cls)
            batching = _batching(cls, verifier)
            if batching is not None and batching.size > config.max_concurrency:
                involved = f"at most max_concurrency = {config.max_concurrency}: there are never more samples at a time"
                yield ConfigProblem(f"{base}.args.batch_size", batching.size, involved, involves=("max_concurrency",))
    for number in deciding(config.verifiers):
        if (weight := config.verifiers[number].weight) < 0:
            expected = "at least 0: this verifier decides whether a sample is solved"
            yield ConfigProblem(f"verifiers.{number}.weight", weight, expected)
    if not deciding(config.verifiers):
        expected = "at least one that may decide, not decides: false in all"
        yield ConfigProblem("verifiers", [verifier.name for verifier in config.verifiers], expected)


def _unknown_verifier(path: str, name: str, error: UnknownNameError) -> ConfigProblem:
    if ":" in name or "." in name:
        return ConfigProblem(path, name, "a class that can be imported", str(error))
    hint = did_you_mean(name, VERIFIERS.names()) or f"known: {', '.join(VERIFIERS.names())}"
    return ConfigProblem(path, name, "a registered verifier or package.module:Class", hint)


def _device_problems(path: str, needed: int, config: RewardConfig) -> Iterator[ConfigProblem]:
    """A verifier with more devices than its worker has. Without any, it takes processes on the CPU."""
    if config.device_mapping is not None and needed > config.num_gpus_per_worker:
        expected = f"at most num_gpus_per_worker = {config.num_gpus_per_worker}, the devices of one worker"
        involved = ("num_gpus_per_worker", "device_mapping")
        yield ConfigProblem(f"{path}.tensor_parallel_size", needed, expected, involves=involved)


def _spec_problems(path: str, cls: type[RuleVerifier]) -> Iterator[ConfigProblem]:
    try:
        rule_spec(cls, {})
    except ValueError as error:
        yield ConfigProblem(path, cls.__qualname__, "a class that a child process can import", str(error))


def _batching(cls: type[RuleVerifier], verifier: VerifierConfig) -> Batching | None:
    return cls.batching(cls.config_class(**verifier.args))


def best_reward(config: RewardConfig) -> float | None:
    """The highest reward of a domain, if its verifiers say what their best scores are."""
    total = 0.0
    for verifier in config.verifiers:
        cls = VERIFIERS.get(verifier.name)
        best = cls.best_score(cls.config_class(**verifier.args))
        if best is None or verifier.weight < 0:  # what is lowest there, nobody says
            return None
        total += verifier.weight * best
    return total


def sees(config: RewardConfig) -> bool:
    """Tells whether a verifier of a domain gets the pictures of prompts."""
    classes = [(VERIFIERS.get(verifier.name), verifier.args) for verifier in config.verifiers]
    return any(cls.sees(cls.config_class(**args)) for cls, args in classes)


def deciding(verifiers: Sequence[VerifierConfig]) -> list[int]:
    """Indices of the verifiers that decide whether a sample is solved: those that say so, else the first that does not
    deny it."""
    chosen = [i for i, verifier in enumerate(verifiers) if verifier.decides]
    return chosen or [i for i, verifier in enumerate(verifiers) if verifier.decides is None][:1]


def verifier_labels(verifiers: Sequence[VerifierConfig]) -> list[str]:
    """Names for metrics: ``math``, ``format``, ``format_2``; of a path, what stands behind the colon."""
    labels: list[str] = []
    for verifier in verifiers:
        base = verifier.name.rpartition(":")[2].rpartition(".")[2]
        label, number = base, 1
        while label in labels:
            number += 1
            label = f"{base}_{number}"
        labels.append(label)
    return labels


class DomainScorer:
    """Scores the samples of one reward domain.

    Args:
        context: further arguments for the constructors of the other verifiers that name them, e.g. a device.

    Raises:
        ValueError: a verifier does not exist or does not understand its ``args``.
    """

    def __init__(self, name: str, config: RewardConfig, num_processes: int = 1, **context: Any) -> None:
        if problems := [problem.under(f"rewards.{name}") for problem in check_rewards(config)]:
            raise ConfigErrors(problems)
        self.name = name
        self.config = config
        self._retries = 0
        self._labels = verifier_labels(config.verifiers)
        self._deciding = deciding(config.verifiers)
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._others: dict[int, Verifier] = {}
        self._rules: dict[int, int] = {}
        self._batches: dict[int, MicroBatcher[Sample, RewardResult | RewardError]] = {}
        specs: list[RuleSpec] = []
        gathered: dict[int, Batching] = {}
        for i, verifier in enumerate(config.verifiers):
            cls = VERIFIERS.get(verifier.name)
            if issubclass(cls, RuleVerifier):
                self._rules[i] = len(specs)
                if (batching := _batching(cls, verifier)) is not None:
                    gathered[i] = batching
                specs.append(rule_spec(cls, verifier.args))
            else:
                self._others[i] = cls(cls.config_class(**verifier.args), **_accepted(cls, context))
        self._pool = RulePool(specs, num_processes) if specs else None
        for i, batching in gathered.items():
            check = partial(self._check_all, i, batching.side_by_side)
            self._batches[i] = MicroBatcher(check, batching.size, batching.wait, num_processes)

    async def start(self) -> None:
        """Starts the child processes, and verifiers that take long, ahead of the first sample.

        Raises:
            RewardError: a verifier could not be built there.
            ValueError: a verifier cannot load what it needs.
        """
        try:
            if self._pool is not None:
                await self._pool.start()
            for verifier in self._others.values():
                await verifier.start()
        except RewardError as error:
            raise RewardError(f"rewards.{self.name}: {error}") from error

    async def score(self, sample: Sample) -> RewardResult:
        """All verifiers' say about a sample, as one verdict.

        ``parts`` has ``<verifier>/score`` and every verifier's own parts as ``<verifier>/<part>``, ``notes`` likewise.

        Raises:
            RewardError: a verifier failed in every attempt. All attempts of the others are over by then.
        """
        async with self._slots:
            verifiers = range(len(self.config.verifiers))
            results = await asyncio.gather(*(self._attempt(i, sample) for i in verifiers), return_exceptions=True)
        advance()
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise next((failure for failure in failures if not isinstance(failure, RewardError)), failures[0])
        return self._combine([result for result in results if isinstance(result, RewardResult)])

    def take_retries(self) -> int:
        """New attempts of verifiers since the last call."""
        retries, self._retries = self._retries, 0
        return retries

    async def offload(self) -> None:
        """Takes the verifiers' models off the device; samples wait for ``onload``."""
        await asyncio.gather(*(verifier.offload() for verifier in self._others.values()))

    async def onload(self) -> None:
        """Takes them back."""
        await asyncio.gather(*(verifier.onload() for verifier in self._others.values()))

    async def close(self) -> None:
        """Ends the child processes and whatever the verifiers hold."""
        if self._pool is not None:
            await self._pool.close()
        for batches in self._batches.values():
            await batches.close()
        for verifier in self._others.values():
            await verifier.close()

    async def _attempt(self, i: int, sample: Sample) -> RewardResult:
        attempts = self.config.retries + 1
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(attempts),
            wait=tenacity.wait_exponential(multiplier=RETRY_WAIT, max=MAX_RETRY_WAIT),
            retry=tenacity.retry_if_exception_type(Exception) & tenacity.retry_if_not_exception_type(OverBudgetError),
            before_sleep=self._count_retry,
            reraise=True,
        )
        instead = self.config.timeout_score
        try:
            async for attempt in retrying:
                with attempt:
                    # What failed in company is tried again alone: one sample must not cost the others theirs.
                    verdict = await self._judge(i, sample, alone=attempt.retry_state.attempt_number > 1)
            return verdict if instead is None else replace(verdict, parts={**verdict.parts, "timeout": 0.0})
        except OverBudgetError as error:
            verifier = self.config.verifiers[i]
            cls = cast(type[RuleVerifier], VERIFIERS.get(verifier.name))
            wrong = cls.wrong(cls.config_class(**verifier.args))
            return replace(wrong, parts={} if instead is None else {"timeout": 0.0}, over_budget=str(error))
        # A verifier may raise anything; the sample has no reward then, which the caller counts.
        except Exception as error:
            reason = str(error) if isinstance(error, RewardError) else describe_error(error)
            if instead is not None and isinstance(error, RewardTimeoutError):
                return RewardResult(instead, correct=False, parts={"timeout": 1.0}, seeks_answer=False)
            counted = "1 attempt" if attempts == 1 else f"{attempts} attempts"
            raise RewardError(f"rewards.{self.name}: {self._labels[i]} failed after {counted}: {reason}") from error

    def _count_retry(self, _: tenacity.RetryCallState) -> None:
        self._retries += 1

    async def _check_all(self, i: int, side_by_side: bool, samples: list[Sample]) -> list[RewardResult | RewardError]:
        assert self._pool is not None
        return await self._pool.check_all(self._rules[i], samples, self.config.timeout, side_by_side)

    async def _judge(self, i: int, sample: Sample, alone: bool) -> RewardResult:
        timeout = self.config.timeout
        if i in self._batches and not alone:
            outcome = await self._batches[i].submit(sample)
            if isinstance(outcome, RewardError):
                raise outcome
            return finite(outcome)
        if i in self._rules:
            assert self._pool is not None
            return finite(await self._pool.check(self._rules[i], sample, timeout))
        try:
            async with time_limit(timeout) as limit:
                verdict = await self._others[i].score(sample)
        except TimeoutError as error:
            if not limit.expired():
                raise  # the verifier's own
            raise RewardTimeoutError(f"took longer than {timeout:g} s") from error
        return finite(verdict)

    def _combine(self, verdicts: Sequence[RewardResult]) -> RewardResult:
        parts: dict[str, float] = {}
        notes: dict[str, str] = {}
        for label, verdict in zip(self._labels, verdicts, strict=True):
            parts[f"{label}/score"] = verdict.score
            parts |= {f"{label}/{part}": value for part, value in verdict.parts.items()}
            notes |= {f"{label}/{note}": text for note, text in verdict.notes.items()}
        chosen = [verdicts[i] for i in self._deciding]
        score = sum(spec.weight * one.score for spec, one in zip(self.config.verifiers, verdicts, strict=True))
        total = RewardResult(
            score=score,
            correct=all(verdict.correct for verdict in chosen),
            answer=next((verdict.answer for verdict in chosen if verdict.answer is not None), None),
            parts=parts,
            notes=notes,
            seeks_answer=any(verdict.seeks_answer for verdict in chosen),
            over_budget="; ".join(
                f"{label}: {verdict.over_budget}"
                for label, verdict in zip(self._labels, verdicts, strict=True)
                if verdict.over_budget
            ),
        )
        return finite(total)


def finite(verdict: RewardResult) -> RewardResult:
    """The verdict itself.

    Raises:
        RewardError: a number of it is NaN or infinite.
    """
    for what, value in {"score": verdict.score, **verdict.parts}.items():
        if not math.isfinite(value):
            raise RewardError(f"{what}: got {value}, expected a finite number")
    return verdict


def _accepted(cls: type[Verifier], context: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters
    return {name: value for name, value in context.items() if name in parameters}
