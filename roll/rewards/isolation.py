"""Rule verifiers in child processes that can be killed: a slow regular expression or a symbolic bomb costs one sample.

The parent side is ``RulePool``; ``python -m roll.rewards.isolation`` is a child (``roll.utils.children``). It is no
sandbox: verifiers are trusted, the texts that they read are not, and texts travel as data only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, cast

from roll.rewards.types import RewardError, RewardTimeoutError, RuleVerifier, Sample, Verdict
from roll.utils.children import ChildError, ChildPool, ChildTimeoutError, serve, words_of
from roll.utils.registry import import_path, importable_path

MAX_ANSWER_CHARS = 1000
_GRACE_S = 2.0
"""Seconds beyond the time limit after which a process is killed whose samples should have kept to it by themselves."""


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
        raise ValueError(f"verifier: seen {path}, expected a class at the top of a module that can be imported")
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

    async def check(self, verifier: int, sample: Sample, timeout: float) -> Verdict:
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
    ) -> list[Verdict | RewardError]:
        """Judges several samples in one call, in the next free child; those that it could not judge are errors.

        Args:
            timeout: seconds of the call, or of each sample where these are judged ``side_by_side``.
            side_by_side: see ``Batching``.

        Raises:
            RewardError: as ``check``, for the call as a whole.
        """
        request = {"verifier": verifier, "samples": [_sample_json(sample) for sample in samples], "timeout": timeout}
        try:
            reply = await self._pool.ask(request, timeout + _GRACE_S if side_by_side else timeout)
        except ChildTimeoutError as error:
            raise RewardTimeoutError(str(error)) from error
        except ChildError as error:
            raise RewardError(str(error)) from error
        if "error" in reply:
            raise RewardError(reply["error"])
        return [_outcome(each) for each in reply["verdicts"]]

    async def close(self) -> None:
        """Kills the children. Checks under way end with a ``RewardError``."""
        await self._pool.close()


def _sample_json(sample: Sample) -> dict[str, Any]:
    values = {field.name: getattr(sample, field.name) for field in fields(sample)}
    values["extra_info"] = dict(sample.extra_info)
    values["messages"] = [dict(message) for message in sample.messages]
    return values


def _build(specs: Sequence[Mapping[str, Any]]) -> partial[dict[str, Any]]:
    verifiers = []
    for spec in specs:
        cls = cast(type[RuleVerifier], import_path(spec["path"], "verifier"))
        verifiers.append(cls(cls.config_class.model_validate(spec["args"])))
    return partial(_check, verifiers)


def _check(verifiers: Sequence[RuleVerifier], request: Mapping[str, Any]) -> dict[str, Any]:
    samples = [Sample(**{**values, "messages": tuple(values["messages"])}) for values in request["samples"]]
    outcomes = verifiers[request["verifier"]].check_all(samples, request["timeout"])
    if len(outcomes) != len(samples):
        raise TypeError(f"check_all returned {len(outcomes)} verdicts for {len(samples)} samples")
    return {"verdicts": [_told(outcome) for outcome in outcomes]}


def _told(outcome: Verdict | RewardError) -> dict[str, Any]:
    """A child's account of a sample, as JSON; ``_outcome`` reads it."""
    if isinstance(outcome, RewardError):
        return {"error": words_of(outcome, RewardError), "timeout": isinstance(outcome, RewardTimeoutError)}
    if not isinstance(outcome, Verdict):
        raise TypeError(f"check returned {type(outcome).__name__}, expected a Verdict")
    return {
        "score": float(outcome.score),
        "correct": bool(outcome.correct),
        "answer": None if outcome.answer is None else str(outcome.answer)[:MAX_ANSWER_CHARS],
        "parts": {str(name): float(value) for name, value in outcome.parts.items()},
        "notes": {str(name): str(text)[:MAX_ANSWER_CHARS] for name, text in outcome.notes.items()},
        "seeks_answer": bool(outcome.seeks_answer),
    }


def _outcome(told: Mapping[str, Any]) -> Verdict | RewardError:
    if "error" not in told:
        return Verdict(**told)
    return RewardTimeoutError(told["error"]) if told["timeout"] else RewardError(told["error"])


if __name__ == "__main__":
    serve(_build, plain=RewardError)
