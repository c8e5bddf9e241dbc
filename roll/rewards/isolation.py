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
from roll.utils.children import ChildError, ChildPool, ChildTimeoutError, serve
from roll.utils.registry import import_path

MAX_ANSWER_CHARS = 1000


@dataclass(frozen=True)
class RuleSpec:
    """Recipe with which a child builds one verifier."""

    path: str
    """``package.module:Class`` of the ``RuleVerifier``."""
    args: Mapping[str, Any]
    """Values of its ``config_class``; JSON."""


def rule_spec(cls: type[RuleVerifier], args: Mapping[str, Any]) -> RuleSpec:
    """The specification of a class.

    Raises:
        ValueError: another process cannot import the class.
    """
    path = f"{cls.__module__}:{cls.__qualname__}"
    if cls.__module__ == "__main__" or "." in cls.__qualname__:
        raise ValueError(f"verifier: seen {path}, expected a class at the top of a module that can be imported")
    return RuleSpec(path, dict(args))


class RulePool:
    """Child processes that run ``RuleVerifier.check``, each one sample at a time, under a hard timeout.

    See ``ChildPool`` for what becomes of a child that exceeds the timeout or dies, and of all with their parent.

    Args:
        specs: the verifiers that every child holds.
        num_processes: children, and samples that are checked at the same time.
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
            verifier: index into ``specs``.
            timeout: seconds of the check itself; waiting for a free child does not count.

        Raises:
            RewardError: the check raised, took too long, returned no verdict, or killed its process.
        """
        try:
            reply = await self._pool.ask({"verifier": verifier, "sample": _sample_json(sample)}, timeout)
        except ChildTimeoutError as error:
            raise RewardTimeoutError(str(error)) from error
        except ChildError as error:
            raise RewardError(str(error)) from error
        if "error" in reply:
            raise RewardError(reply["error"])
        return Verdict(**reply["verdict"])

    async def close(self) -> None:
        """Kills the children. Checks under way end with a ``RewardError``."""
        await self._pool.close()


def _sample_json(sample: Sample) -> dict[str, Any]:
    values = {field.name: getattr(sample, field.name) for field in fields(sample)}
    values["extra_info"] = dict(sample.extra_info)
    values["messages"] = [dict(message) for message in sample.messages]
    return values


def _build_all(specs: Sequence[Mapping[str, Any]]) -> partial[dict[str, Any]]:
    return partial(_check, [_build(RuleSpec(**spec)) for spec in specs])


def _build(spec: RuleSpec) -> RuleVerifier:
    cls = cast(type[RuleVerifier], import_path(spec.path, "verifier"))
    return cls(cls.config_class.model_validate(dict(spec.args)))


def _check(verifiers: Sequence[RuleVerifier], request: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(request["sample"])
    values["messages"] = tuple(values["messages"])
    verdict = verifiers[request["verifier"]].check(Sample(**values))
    if not isinstance(verdict, Verdict):
        raise TypeError(f"check returned {type(verdict).__name__}, expected a Verdict")
    told = {
        "score": float(verdict.score),
        "correct": bool(verdict.correct),
        "answer": None if verdict.answer is None else str(verdict.answer)[:MAX_ANSWER_CHARS],
        "parts": {str(name): float(value) for name, value in verdict.parts.items()},
        "notes": {str(name): str(text)[:MAX_ANSWER_CHARS] for name, text in verdict.notes.items()},
        "seeks_answer": bool(verdict.seeks_answer),
    }
    return {"verdict": told}


if __name__ == "__main__":
    serve(_build_all, plain=RewardError)
