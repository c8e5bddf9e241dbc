"""Types of rewards: samples, results, and the interface of verifiers.

A worked example: the dataset's row ``{"prompt": "47+85=", "response": "132", "tag": "arithmetic"}`` was answered with
``<think>…</think><answer>132</answer>``. The two make a ``Sample``; the verifier ``gsm8k`` returns
``RewardResult(score=1.0, correct=True, answer="132")``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from roll.configs.base import Config
from roll.data.columns import Item


@dataclass(frozen=True)
class Sample:
    """One response of the policy, and its prompt's data. Plain data: without pictures it crosses processes as JSON."""

    prompt: str
    """Text of the last user message."""
    response: str
    """Words of the policy, special tokens removed."""
    ground_truth: Any
    """The row's reference answer (the column ``data_args.response``), any JSON value; ``None`` where there is none."""
    data_source: str
    """The row's tag (domain)."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, JSON values."""
    messages: tuple[Mapping[str, str], ...] = ()
    """The whole conversation before the answer, as ``{"role": …, "content": …}``."""
    num_tokens: int = 0
    """Sampled tokens."""
    truncated: bool = False
    """The answer was cut off by the length limit."""
    pictures: tuple[Item, ...] = ()
    """Those of ``messages``, in the order of their marks ``<image>``, as the policy sees them. They are there only for
    domains with a verifier that ``sees``, and not in child processes."""


@dataclass(frozen=True)
class RewardResult:
    """The result of one verifier, or of a domain's weighted sum, for a sample."""

    score: float
    """Finite."""
    correct: bool
    """Tells whether it counts as solved (accuracy, pass@n)."""
    answer: str | None = None
    """The answer that was found in the response, normalised so that equal answers are equal strings (maj@n); ``None``
    where none was found."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers worth a metric, e.g. ``{"format": 1.0}``."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Further texts, which go into the episode's ``info`` beside the answer; no metric reads them."""
    seeks_answer: bool = True
    """False where the verifier looks for no answer (a judge, a number alone): nothing says whether one is there."""
    over_budget: str = ""
    """Reason why an answer that costs too much to judge counts as a wrong one; empty for all others."""

    @property
    def valid(self) -> bool | None:
        """Tells whether the response holds an answer; ``None`` where that is not known."""
        return self.answer is not None if self.seeks_answer else None


class RewardError(RuntimeError):
    """A verifier could not judge: it failed, timed out or returned no finite number. The sample has no reward."""


class SandboxUnavailableError(RuntimeError):
    """This machine has no way to isolate a program."""


class RewardTimeoutError(RewardError):
    """It took too long."""


class OverBudgetError(RewardError):
    """The response is too expensive to judge (``RuleVerifier.cpu_seconds``): it counts as wrong."""


ANSWER_CPU_S = 1.0
"""Seconds of CPU time within which the project's own rules judge an answer."""


class Verifier(ABC):
    """Scores the responses of one kind of task. One instance serves many concurrent calls in a reward worker.

    ``config_class`` holds the keys of ``args`` in the configuration; all checks of them are made before the run.
    """

    config_class: ClassVar[type[Config]] = Config
    best: ClassVar[float | None] = None
    """See ``best_score``."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def num_devices(cls, config: Config) -> int:
        """Devices that one takes, of its reward worker's."""
        return 1

    @classmethod
    def sees(cls, config: Config) -> bool | None:
        """Tells whether one gets the pictures of prompts; ``None``: it misses nothing without them."""
        return None

    @classmethod
    def check_row(cls, config: Config, sample: Sample) -> None:
        """Looks at a row before any answer is there, in microseconds.

        Args:
            sample: has no response.

        Raises:
            ValueError: no answer to this row can be scored, whatever it says.
        """
        return None

    @classmethod
    def best_score(cls, config: Config) -> float | None:
        """The highest score that one with these keys gives; ``None`` where nobody can say."""
        return cls.best

    async def start(self) -> None:
        """Does ahead of the first sample what takes long."""
        return None

    @abstractmethod
    async def score(self, sample: Sample) -> RewardResult:
        """Judges one sample.

        Raises:
            Exception: it could not tell; whoever asked tries again, then counts an error.
        """

    async def offload(self) -> None:
        """Leaves the device, until ``onload``; samples wait. For verifiers with a model."""
        return None

    async def onload(self) -> None:
        """Comes back to the device."""
        return None

    async def close(self) -> None:
        """Frees what the verifier holds (processes, connections)."""
        return None


@dataclass(frozen=True)
class Batching:
    """How samples are batched for a rule that judges several at once."""

    size: int
    """Samples of one call, at most."""
    wait: float
    """Seconds that a call which is not full waits for more."""
    side_by_side: bool = False
    """The samples of a call are judged each by itself and keep to the time limit by themselves."""


class RuleVerifier(Verifier):
    """A verifier that is a plain function of the sample.

    ``check`` runs in a child process that is killed when it takes too long: symbolic algebra and regular expressions
    may hang on a text that a policy wrote. So it must be at the top of an importable module. One that is better at
    many samples than at one says so by ``batching`` and overrides ``check_all``.
    """

    cpu_seconds: ClassVar[float | None] = None
    """CPU seconds that an answer may cost. One that needs more, or more memory or recursion than there is, counts as a
    wrong answer. ``None``: only the domain's ``timeout`` ends it, and the sample has no reward."""

    @classmethod
    def wrong(cls, config: Config) -> RewardResult:
        """RewardResult on a wrong answer."""
        return RewardResult(0.0, correct=False)

    @classmethod
    def tries_row(cls, config: Config, sample: Sample) -> bool:
        """Tells whether ``try_row`` may find something that ``check_row`` did not."""
        return False

    def try_row(self, sample: Sample) -> None:
        """Tries the reference answer in full, in a child process.

        Raises:
            ValueError: as ``check_row``.
        """
        type(self).check_row(self.config, sample)

    @classmethod
    def batching(cls, config: Config) -> Batching | None:
        """Tells how samples are gathered; ``None``: each is judged by itself."""
        return None

    def check_all(self, samples: Sequence[Sample], timeout: float) -> Sequence[RewardResult | RewardError]:
        """Judges several samples, in the child process; may take any time and raise anything.

        Args:
            timeout: seconds after which the process is killed, or, ``side_by_side``, seconds for each sample.

        Returns:
            For each sample a verdict, or why there is none.
        """
        return [self.check(sample) for sample in samples]

    @abstractmethod
    def check(self, sample: Sample) -> RewardResult:
        """Judges one sample; may take any time and raise anything."""

    async def score(self, sample: Sample) -> RewardResult:
        """Runs ``check`` in this process (tests; reward workers use ``roll.rewards.isolation``)."""
        return self.check(sample)
