"""Verifiers of a response's form and length."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem, pattern_problems
from roll.rewards.types import ANSWER_CPU_S, RuleVerifier, Sample, Verdict


class FormatConfig(Config):
    """``args`` of ``format``."""

    pattern: str | None = Field(
        default=None,
        description="Regular expression that the whole response must match (`.` matches line breaks too). null: "
        "`<think>…</think>`, then `<answer>…</answer>`, each exactly once, with nothing around them.",
    )
    score: float = Field(default=1.0, allow_inf_nan=False, description="Score of a response that matches.")
    penalty: float = Field(default=0.0, le=0, allow_inf_nan=False, description="Score of one that does not.")

    def problems(self) -> Iterator[ConfigProblem]:
        yield from pattern_problems("pattern", self.pattern, groups=0)


_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"
THINK_ANSWER = rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*"
"""The format of DeepSeek-R1-Zero (Guo et al. 2025, https://arxiv.org/abs/2501.12948)."""


class FormatVerifier(RuleVerifier):
    """Tells whether the whole response has a form."""

    config_class: ClassVar[type[Config]] = FormatConfig
    config: FormatConfig
    cpu_seconds = ANSWER_CPU_S

    @classmethod
    def best_score(cls, config: Config) -> float:
        assert isinstance(config, FormatConfig)
        return max(config.score, config.penalty)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._pattern = re.compile(self.config.pattern or THINK_ANSWER, re.DOTALL)

    @classmethod
    def wrong(cls, config: Config) -> Verdict:
        assert isinstance(config, FormatConfig)
        return Verdict(config.penalty, correct=False, seeks_answer=False)

    def check(self, sample: Sample) -> Verdict:
        matches = self._pattern.fullmatch(sample.response) is not None
        score = self.config.score if matches else self.config.penalty
        return Verdict(score=score, correct=matches, seeks_answer=False)


class LengthConfig(Config):
    """``args`` of ``length``."""

    min_tokens: int = Field(ge=0, description="Responses of at most this many tokens get the whole penalty.")
    max_tokens: int = Field(ge=1, description="Responses of this many tokens or more get none.")
    penalty: float = Field(
        default=-0.5, allow_inf_nan=False, description="Score of the shortest; that of the longest is 0."
    )

    def problems(self) -> Iterator[ConfigProblem]:
        if self.max_tokens <= self.min_tokens:
            yield self.problem("max_tokens", f"more than min_tokens = {self.min_tokens}", "min_tokens")


class LengthVerifier(RuleVerifier):
    """Lowers the score of short answers: ``penalty`` up to ``min_tokens``, from there in a straight line to 0.

    With a positive ``penalty`` short answers gain. Lengths are sampled tokens.
    """

    config_class: ClassVar[type[Config]] = LengthConfig
    config: LengthConfig
    cpu_seconds = ANSWER_CPU_S

    @classmethod
    def best_score(cls, config: Config) -> float:
        assert isinstance(config, LengthConfig)
        return max(config.penalty, 0.0)

    def check(self, sample: Sample) -> Verdict:
        low, high = self.config.min_tokens, self.config.max_tokens
        missing = min(max(high - sample.num_tokens, 0) / (high - low), 1.0)
        return Verdict(score=self.config.penalty * missing, correct=missing == 0, seeks_answer=False)
