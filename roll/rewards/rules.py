"""Verifiers of a response's form: pattern, length, and instructions that can be verified, after IFEval."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NoReturn

from pydantic import Field

from roll.configs.base import Config
from roll.configs.parsing import section_problems
from roll.configs.problems import ConfigErrors, ConfigProblem, pattern_problems
from roll.configs.schema import did_you_mean
from roll.rewards.types import ANSWER_CPU_S, RewardError, RewardResult, RuleVerifier, Sample


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
    """Checks that the whole response matches a pattern."""

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
    def wrong(cls, config: Config) -> RewardResult:
        assert isinstance(config, FormatConfig)
        return RewardResult(config.penalty, correct=False, seeks_answer=False)

    def check(self, sample: Sample) -> RewardResult:
        matches = self._pattern.fullmatch(sample.response) is not None
        score = self.config.score if matches else self.config.penalty
        return RewardResult(score=score, correct=matches, seeks_answer=False)


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
    """Penalises short responses: ``penalty`` up to ``min_tokens``, then rising linearly to 0.

    With a positive ``penalty`` short answers gain. Lengths are sampled tokens.
    """

    config_class: ClassVar[type[Config]] = LengthConfig
    config: LengthConfig
    cpu_seconds = ANSWER_CPU_S

    @classmethod
    def best_score(cls, config: Config) -> float:
        assert isinstance(config, LengthConfig)
        return max(config.penalty, 0.0)

    def check(self, sample: Sample) -> RewardResult:
        low, high = self.config.min_tokens, self.config.max_tokens
        missing = min(max(high - sample.num_tokens, 0) / (high - low), 1.0)
        return RewardResult(score=self.config.penalty * missing, correct=missing == 0, seeks_answer=False)


class Constraint(Config):
    """One instruction; ``kind`` says which."""

    kind: str = Field(description="Which instruction.")

    @abstractmethod
    def holds(self, sample: Sample) -> bool:
        """Tells whether the response, which is not blank, does what was asked."""


class CountConstraint(Constraint):
    """Number of something that the response has. The kinds are the keys of ``COUNTERS``."""

    min: int = Field(default=0, ge=0, description="At least so many.")
    max: int | None = Field(default=None, ge=0, description="At most so many; null is no bound.")

    def problems(self) -> Iterator[ConfigProblem]:
        if self.min == 0 and self.max is None:
            yield self.problem("min", "at least 1, or a bound in max", "max")
        yield from _crossed(self.min, self.max)

    def holds(self, sample: Sample) -> bool:
        count = COUNTERS[self.kind](sample.response)
        return self.min <= count and (self.max is None or count <= self.max)


def _crossed(low: int, high: int | None) -> Iterator[ConfigProblem]:
    if high is not None and high < low:
        yield ConfigProblem("max", high, f"at least min = {low}", involves=("min",))


def _num_sentences(text: str) -> int:
    parts = re.split(r"[.!?…]+[\"'”’»)\]*_]*(?:\s+|$)|[。！？]+[”’」』）]*|\n\s*\n", text)
    return sum(1 for part in parts if re.search(r"\w", part))


COUNTERS: dict[str, Callable[[str], int]] = {
    "num_words": lambda text: len(re.findall(r"\w+(?:['’-]\w+)*", text)),
    "num_sentences": _num_sentences,
    "num_paragraphs": lambda text: sum(1 for part in re.split(r"\n[^\S\n]*\n", text) if part.strip()),
    "num_chars": lambda text: len(text.strip()),
    "num_bullets": lambda text: len(re.findall(r"^[^\S\n]*[-*+•]\s+\S", text, re.MULTILINE)),
    "placeholders": lambda text: len(re.findall(r"\[[^\[\]\n]+\]", text)),
}
"""Kind -> what it counts. Paragraphs are separated by blank lines; placeholders look like ``[address]``."""


class KeywordsConstraint(Constraint):
    """Words that the response must have (``keywords_include``) or must not (``keywords_exclude``); case is ignored."""

    keywords: list[str] = Field(min_length=1, description="Words or phrases.")
    min_count: int = Field(
        default=1, ge=1, description="How often each keyword must occur; a forbidden one must occur less often."
    )
    whole_words: bool = Field(
        default=True, description="`car` is not in `cart`. Turn off for languages without blanks between words."
    )

    def problems(self) -> list[ConfigProblem]:
        return [] if all(word.strip() for word in self.keywords) else [self.problem("keywords", "words, none blank")]

    def holds(self, sample: Sample) -> bool:
        enough = [self._count(word, sample.response) >= self.min_count for word in self.keywords]
        return all(enough) if self.kind == "keywords_include" else not any(enough)

    def _count(self, word: str, text: str) -> int:
        pattern = re.escape(word.strip())
        return len(re.findall(rf"(?<!\w){pattern}(?!\w)" if self.whole_words else pattern, text, re.IGNORECASE))


class JsonConstraint(Constraint):
    """The response is one JSON value, alone or in a fenced block."""

    required_keys: list[str] = Field(default_factory=list, description="Keys that the object must have.")

    def holds(self, sample: Sample) -> bool:
        text = sample.response.strip()
        fenced = re.fullmatch(r"```(?:json|JSON)?\s*\n(.*)\n\s*```", text, re.DOTALL)
        try:
            value = json.loads(fenced[1] if fenced else text, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return False
        if not self.required_keys:
            return True
        return isinstance(value, dict) and all(key in value for key in self.required_keys)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


class EdgeConstraint(Constraint):
    """The first or last words of the response, blanks around it aside (``starts_with``, ``ends_with``)."""

    text: str = Field(min_length=1, description="The words.")
    ignore_case: bool = Field(default=False, description="Whether upper and lower case are the same.")

    def problems(self) -> list[ConfigProblem]:
        return [] if self.text.strip() else [self.problem("text", "words, not blank")]

    def holds(self, sample: Sample) -> bool:
        response, text = sample.response.strip(), self.text.strip()
        if self.ignore_case:
            response, text = response.casefold(), text.casefold()
        return response.startswith(text) if self.kind == "starts_with" else response.endswith(text)


class SimpleConstraint(Constraint):
    """Instructions without options. The kinds are the keys of ``TESTS``."""

    def holds(self, sample: Sample) -> bool:
        return TESTS[self.kind](sample.response)


TESTS: dict[str, Callable[[str], bool]] = {
    "lowercase": lambda text: not any(character.isupper() for character in text),
    "uppercase": lambda text: not any(character.islower() for character in text),
    "no_commas": lambda text: not re.search("[,，、،]", text),
    "title": lambda text: any(title.strip() for title in re.findall(r"<<([^<>\n]*)>>", text)),
}
"""Kind -> what must hold. A title looks like ``<<Spring>>``."""


class RegexConstraint(Constraint):
    """A regular expression that is found in the response, or that the whole of it matches."""

    pattern: str = Field(description="Regular expression; `.` matches line breaks too.")
    mode: Literal["search", "fullmatch"] = Field(default="search", description="Anywhere, or the whole response.")

    def problems(self) -> Iterator[ConfigProblem]:
        yield from pattern_problems("pattern", self.pattern, groups=0)

    def holds(self, sample: Sample) -> bool:
        pattern = re.compile(self.pattern, re.DOTALL)
        return (pattern.search if self.mode == "search" else pattern.fullmatch)(sample.response) is not None


class RepeatPromptConstraint(Constraint):
    """The response starts with the request, word for word; case and white space are ignored."""

    text: str | None = Field(default=None, description="What to repeat. null: the prompt.")

    def holds(self, sample: Sample) -> bool:
        text = sample.prompt if self.text is None else self.text
        if not text.strip():
            raise ValueError("repeat_prompt: got a blank prompt, expected text to repeat")
        return " ".join(sample.response.split()).casefold().startswith(" ".join(text.split()).casefold())


class SectionsConstraint(Constraint):
    """Numbered sections: lines that start with a word and a number, such as ``Section 1``."""

    splitter: str = Field(default="Section", min_length=1, description="The word.")
    min: int = Field(default=1, ge=0, description="At least so many sections.")
    max: int | None = Field(default=None, ge=0, description="At most so many; null is no bound.")

    def problems(self) -> Iterator[ConfigProblem]:
        if not self.splitter.strip():
            yield self.problem("splitter", "a word, not blank")
        yield from _crossed(self.min, self.max)

    def holds(self, sample: Sample) -> bool:
        pattern = rf"^[\s#*_]{{0,20}}{re.escape(self.splitter.strip())}\s+(?:\d+|[IVXLC]+)\b"
        count = len(re.findall(pattern, sample.response, re.MULTILINE | re.IGNORECASE))
        return self.min <= count and (self.max is None or count <= self.max)


CONSTRAINTS: dict[str, type[Constraint]] = {
    **dict.fromkeys(COUNTERS, CountConstraint),
    **dict.fromkeys(("keywords_include", "keywords_exclude"), KeywordsConstraint),
    "json": JsonConstraint,
    **dict.fromkeys(("starts_with", "ends_with"), EdgeConstraint),
    **dict.fromkeys(TESTS, SimpleConstraint),
    "regex": RegexConstraint,
    "repeat_prompt": RepeatPromptConstraint,
    "sections": SectionsConstraint,
}


def parse_constraints(rows: Any, key: str) -> tuple[list[Constraint], list[ConfigProblem]]:
    """Constraints, and what is wrong with the rest, keys starting with ``key``."""
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        return [], [ConfigProblem(key, rows, "a list of mappings with kind")]
    constraints, problems = [], []
    for number, row in enumerate(rows):
        base = f"{key}.{number}"
        # Columnar files give every mapping the keys of all, null where it had none.
        values = {k: v for k, v in row.items() if v is not None} if isinstance(row, Mapping) else {}
        kind = values.get("kind")
        if not isinstance(kind, str) or kind not in CONSTRAINTS:
            problems.append(_unknown_kind(base, kind, row))
            continue
        # Such files also turn integers into floats where a row has none, hence not strict.
        wrong = section_problems(CONSTRAINTS[kind], values, strict=False)
        problems += [problem.under(base) for problem in wrong]
        if not wrong:
            constraints.append(CONSTRAINTS[kind].model_validate(values))
    return constraints, problems


def _unknown_kind(base: str, kind: Any, row: Any) -> ConfigProblem:
    if not isinstance(kind, str):
        return ConfigProblem(base, row, "a mapping with kind")
    hint = did_you_mean(kind, list(CONSTRAINTS))
    return ConfigProblem(f"{base}.kind", kind, f"one of {', '.join(CONSTRAINTS)}", hint)


class InstructionConfig(Config):
    """``args`` of ``instruction``."""

    key: str = Field(
        default="constraints",
        min_length=1,
        description="Column with the row's constraints: a list of mappings with `kind` and that kind's own keys, or "
        "such a list as JSON text.",
    )
    constraints: list[dict[str, Any]] = Field(
        default_factory=list, description="Constraints of every row, in addition to its own."
    )
    strict: bool = Field(default=False, description="Score 1 if all are met, else 0. false: the share of those met.")

    def problems(self) -> list[ConfigProblem]:
        return parse_constraints(self.constraints, "constraints")[1]


class InstructionVerifier(RuleVerifier):
    """The share of the instructions that the response fulfils. A blank response fulfils none.

    ``parts`` has the share of each kind.
    """

    config_class: ClassVar[type[Config]] = InstructionConfig
    config: InstructionConfig
    cpu_seconds = ANSWER_CPU_S
    best = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._common, problems = parse_constraints(self.config.constraints, "constraints")
        if problems:
            raise ConfigErrors(problems)

    @classmethod
    def check_row(cls, config: Config, sample: Sample) -> None:
        assert isinstance(config, InstructionConfig)
        _constraints_of(config, sample)

    @classmethod
    def wrong(cls, config: Config) -> RewardResult:
        return replace(super().wrong(config), seeks_answer=False)

    def check(self, sample: Sample) -> RewardResult:
        """Raises ``RewardError`` when the row's constraints cannot be understood or there are none."""
        blank = not sample.response.strip()
        held: dict[str, list[bool]] = {}
        for constraint in [*self._common, *_constraints_of(self.config, sample)]:
            held.setdefault(constraint.kind, []).append(not blank and constraint.holds(sample))
        results = [result for of_kind in held.values() for result in of_kind]
        share = sum(results) / len(results)
        return RewardResult(
            score=float(all(results)) if self.config.strict else share,
            correct=all(results),
            parts={kind: sum(of_kind) / len(of_kind) for kind, of_kind in held.items()},
            seeks_answer=False,
        )


def _constraints_of(config: InstructionConfig, sample: Sample) -> list[Constraint]:
    """Constraints of a row's own.

    Raises:
        RewardError: they cannot be understood, or there are none.
    """
    key = f"extra_info.{config.key}"
    row = f" (row {sample.extra_info['id']})" if "id" in sample.extra_info else ""
    values = sample.extra_info.get(config.key)
    if values is None and config.constraints:
        return []
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except (ValueError, RecursionError) as error:
            raise RewardError(f"{key}{row}: got text that is no JSON ({error}), expected a list") from error
    constraints, problems = parse_constraints(values, key)
    if not problems and not constraints and not config.constraints:
        problems = [ConfigProblem(key, values, "at least one constraint")]
    if problems:
        raise RewardError("; ".join(map(str, problems)) + row)
    return constraints
