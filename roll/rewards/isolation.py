"""Rule verifiers in child processes that can be killed: a slow regular expression or a symbolic bomb costs one sample.

The parent side is ``RulePool``; ``python -m roll.rewards.isolation`` is a child (``roll.utils.children``). It is no
sandbox: verifiers are trusted, the texts that they read are not, and texts travel as data only.

A verifier with ``cpu_seconds`` is stopped by a timer of the process's own CPU time, so a busy machine changes no
reward: an exception ends what runs as Python, and a second timer the process where a single call into C goes on.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, TypeVar, cast

from roll.rewards.types import OverBudgetError, RewardError, RewardResult, RewardTimeoutError, RuleVerifier, Sample
from roll.utils.children import ChildDiedError, ChildError, ChildPool, ChildTimeoutError, Reply, serve, words_of
from roll.utils.registry import import_path, importable_path

MAX_ANSWER_CHARS = 1000
_GRACE_S = 2.0
"""Seconds beyond the time limit after which a process is killed whose samples should have kept to it by themselves."""
_KILL_FACTOR = 1.6
"""CPU time at which a process ends that its exception has not reached, in multiples of ``cpu_seconds``."""

T = TypeVar("T")


@dataclass(frozen=True)
class RuleSpec:
    """Recipe with which a child builds one verifier."""

    path: str
    """``package.module:Class`` or ``file.py:Class`` of the ``RuleVerifier``."""
    args: Mapping[str, Any]
    """Values of its ``config_class``; JSON."""


def rule_spec(cls: type[RuleVerifier], args: Mapping[str, Any]) -> RuleSpec:
    """The specification of a class.

    Raises:
        ValueError: another process cannot import the class.
    """
    path = importable_path(cls)
    if cls.__module__ == "__main__" or "." in cls.__qualname__:
        raise ValueError(f"verifier: got {path}, expected a class at the top of a module that can be imported")
    return RuleSpec(path, dict(args))


class RulePool:
    """Child processes that run ``RuleVerifier.check``, each one sample at a time, under a hard timeout.

    See ``ChildPool`` for what becomes of a child that exceeds the timeout or dies, and of all with their parent.
    """

    def __init__(self, specs: Sequence[RuleSpec], num_processes: int = 1) -> None:
        setup = [asdict(spec) for spec in specs]
        self._pool = ChildPool("roll.rewards.isolation", setup, num_processes, what="verifier")

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that run."""
        return self._pool.pids

    async def start(self) -> None:
        """Starts all children, so that no sample waits for their imports; ``check`` starts those that do not run.

        Raises:
            RewardError: a child could not be started or a verifier not be built.
        """
        try:
            await self._pool.start()
        except ChildError as error:
            raise RewardError(str(error)) from error

    async def check(self, verifier: int, sample: Sample, timeout: float) -> RewardResult:
        """Judges a sample in the next free child.

        Args:
            timeout: seconds of the check itself; waiting for a free child does not count.

        Raises:
            RewardError: the check raised, took too long, returned no verdict, or killed its process.
        """
        [outcome] = await self.check_all(verifier, [sample], timeout)
        if isinstance(outcome, RewardError):
            raise outcome
        return outcome

    async def check_all(
        self, verifier: int, samples: Sequence[Sample], timeout: float, side_by_side: bool = False
    ) -> list[RewardResult | RewardError]:
        """Judges several samples in one call, in the next free child; those that it could not judge are errors.

        Args:
            timeout: seconds of the call, or of each sample where these are judged ``side_by_side``.
            side_by_side: see ``Batching``.

        Raises:
            RewardError: as ``check``, for the call as a whole.
        """
        request = {"verifier": verifier, "samples": [_sample_json(sample) for sample in samples], "timeout": timeout}
        reply = await self._ask(request, timeout + _GRACE_S if side_by_side else timeout)
        return [_outcome(each) for each in reply["verdicts"]]

    async def try_row(self, verifier: int, sample: Sample, timeout: float) -> str | None:
        """Tells why no answer to a row can be scored, see ``RuleVerifier.try_row``; ``None`` where one can.

        Raises:
            RewardError: it could not be tried.
        """
        request = {"verifier": verifier, "row": _sample_json(sample), "timeout": timeout}
        return cast("str | None", (await self._ask(request, timeout))["problem"])

    async def _ask(self, request: Mapping[str, Any], timeout: float) -> Reply:
        try:
            reply = await self._pool.ask(request, timeout)
        except ChildTimeoutError as error:
            raise RewardTimeoutError(str(error)) from error
        except ChildDiedError as error:
            if error.returncode == -signal.SIGPROF:
                raise OverBudgetError("took more CPU time than a response may take, and was killed") from error
            raise RewardError(str(error)) from error
        except ChildError as error:
            raise RewardError(str(error)) from error
        if "error" in reply:
            raise RewardError(reply["error"])
        return reply

    async def close(self) -> None:
        """Kills the children. Checks under way end with a ``RewardError``."""
        await self._pool.close()


def _sample_json(sample: Sample) -> dict[str, Any]:
    values = {field.name: getattr(sample, field.name) for field in fields(sample) if field.name != "pictures"}
    values["extra_info"] = dict(sample.extra_info)
    values["messages"] = [dict(message) for message in sample.messages]
    return values


def _build(specs: Sequence[Mapping[str, Any]]) -> partial[dict[str, Any]]:
    verifiers = []
    for spec in specs:
        cls = cast(type[RuleVerifier], import_path(spec["path"], "verifier"))
        verifiers.append(cls(cls.config_class.model_validate(spec["args"])))
    signal.signal(signal.SIGVTALRM, _stop)
    return partial(_answer, verifiers)


def _answer(verifiers: Sequence[RuleVerifier], request: Mapping[str, Any]) -> dict[str, Any]:
    verifier, timeout = verifiers[request["verifier"]], request["timeout"]
    if "row" in request:
        return {"problem": _row_problem(verifier, _sample_of(request["row"]), timeout)}
    samples = [_sample_of(values) for values in request["samples"]]
    if verifier.cpu_seconds is None:
        outcomes = verifier.check_all(samples, timeout)
    else:
        outcomes = [_bounded(verifier, sample, timeout) for sample in samples]
    if len(outcomes) != len(samples):
        raise TypeError(f"check_all returned {len(outcomes)} verdicts for {len(samples)} samples")
    return {"verdicts": [_told(outcome) for outcome in outcomes]}


def _sample_of(values: Mapping[str, Any]) -> Sample:
    return Sample(**{**values, "messages": tuple(values["messages"])})


# --- bounds on the CPU time of an answer ------------------------------------------------------------------------------


class _SpentError(BaseException):
    """The CPU time is used up. No ``Exception``: SymPy and verifiers catch those."""


def _stop(*_: object) -> None:
    raise _SpentError


def _within(seconds: float, function: Callable[..., T], *args: object) -> T:
    """Calls a function for so many seconds of CPU time at most.

    Raises:
        OverBudgetError: it took longer, or used up memory or the stack.
    """
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, _KILL_FACTOR * seconds)
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
            return function(*args)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _SpentError:
        # The timer may have run out within the first call of finally.
        signal.setitimer(signal.ITIMER_PROF, 0)
        raise OverBudgetError(f"took more than {seconds:g} s of CPU time") from None
    except (MemoryError, RecursionError) as error:
        raise OverBudgetError(f"ended in a {type(error).__name__}") from None


def _bounded(verifier: RuleVerifier, sample: Sample, timeout: float) -> RewardResult | RewardError:
    """A verdict, or whether the answer or the reference costs too much."""
    try:
        return _within(_cpu_seconds(verifier, timeout), verifier.check, sample)
    except OverBudgetError as error:
        problem = _row_problem(verifier, sample, timeout)
        return error if problem is None else RewardError(problem)


def _row_problem(verifier: RuleVerifier, sample: Sample, timeout: float) -> str | None:
    try:
        _within(_cpu_seconds(verifier, timeout), verifier.try_row, sample)
    except OverBudgetError as error:
        return f"the reference answer is too expensive: comparing it with itself {error}"
    except (ValueError, RewardError) as error:
        return str(error)
    return None


def _cpu_seconds(verifier: RuleVerifier, timeout: float) -> float:
    """Bound that an answer and then its reference reach before the parent's."""
    return min(verifier.cpu_seconds or timeout, timeout / 4)


def _told(outcome: RewardResult | RewardError) -> dict[str, Any]:
    """A child's account of a sample, as JSON; ``_outcome`` reads it."""
    if isinstance(outcome, RewardError):
        kind = next(name for name, cls in _ERRORS.items() if isinstance(outcome, cls))
        return {"error": words_of(outcome, RewardError), "kind": kind}
    if not isinstance(outcome, RewardResult):
        raise TypeError(f"check returned {type(outcome).__name__}, expected a RewardResult")
    return {
        "score": float(outcome.score),
        "correct": bool(outcome.correct),
        "answer": None if outcome.answer is None else str(outcome.answer)[:MAX_ANSWER_CHARS],
        "parts": {str(name): float(value) for name, value in outcome.parts.items()},
        "notes": {str(name): str(text)[:MAX_ANSWER_CHARS] for name, text in outcome.notes.items()},
        "seeks_answer": bool(outcome.seeks_answer),
    }


def _outcome(told: Mapping[str, Any]) -> RewardResult | RewardError:
    return _ERRORS[told["kind"]](told["error"]) if "error" in told else RewardResult(**told)


_ERRORS = {"timeout": RewardTimeoutError, "over_budget": OverBudgetError, "failed": RewardError}
"""By name on the wire, the most special first."""


if __name__ == "__main__":
    serve(_build, plain=RewardError)
