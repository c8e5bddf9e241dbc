"""One prompt, one answer, one score: the environment, its questions of a dataset, its scorers."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

from gymnasium.spaces import Text
from pydantic import BaseModel, ConfigDict, Field

from roll.agentic.env.base import stable_hash
from roll.agentic.env.game import ActionParser, EnvConfig, Game, Played
from roll.configs.base import Config
from roll.configs.data import DataArguments
from roll.configs.problems import ConfigProblem, pattern_problems
from roll.data.prompt_rows import RowError, lookup
from roll.data.reading import Reading
from roll.rewards.answers import ANSWER_TAG, after_thoughts, last_boxed, last_group
from roll.rewards.types import Sample
from roll.utils.registry import Registry, UnknownNameError, import_path

_KEPT = 8
"""Datasets that a process keeps."""


class Item(BaseModel):
    """A prompt and its answer."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    prompt: str
    answer: str


class QuestionsConfig(Config):
    """Files of questions, and their columns."""

    file_name: str | list[str] = Field(
        min_length=1, description="json, jsonl, csv, parquet or arrow files, a folder of them, globs."
    )
    prompt: str = Field("prompt", min_length=1, description="Column of the question; dotted if nested.")
    answer: str = Field("answer", min_length=1, description="Column of the answer: a text or a number.")

    @property
    def file_names(self) -> tuple[str, ...]:
        return (self.file_name,) if isinstance(self.file_name, str) else tuple(self.file_name)

    def problems(self) -> Iterator[ConfigProblem]:
        if not all(self.file_names):
            yield self.problem("file_name", "a file or folder")


@dataclass(frozen=True)
class Questions:
    """Questions in the order of their files."""

    items: Sequence[Item]

    @cached_property
    def charset(self) -> frozenset[str]:
        """Every character that a question may hold, and those that print."""
        return frozenset(string.printable).union(*(item.prompt for item in self.items))


def read_questions(config: QuestionsConfig) -> Questions:
    """The questions of the files, the same object each time.

    Raises:
        DataError: all files and rows that cannot be read, or that there is no row.
    """
    return _read(config.file_names, config.prompt, config.answer)


@lru_cache(maxsize=_KEPT)
def _read(files: tuple[str, ...], prompt: str, answer: str) -> Questions:
    reading = Reading(DataArguments(file_name=list(files)), seed=0)  # which draws nothing here
    items = list(reading.each(lambda row: Item(prompt=_text(row.values, prompt), answer=_text(row.values, answer))))
    reading.require(items)
    return Questions(items)


def _text(values: Mapping[str, Any], column: str) -> str:
    value = lookup(values, column)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(f"{column}: got {value!r:.60}, expected a text or a number")
    return str(value)


Scorer = Callable[[str, str], float]
"""``(what the model answered, the item's answer) -> score``; 1 is right, 0 is wrong."""

Generator = Callable[[int], tuple[str, str]]
"""``seed -> (prompt, answer)``, the same in every process."""


def _exact(given: str, answer: str) -> float:
    return float(given.strip() == _reference(answer))


def _contains(given: str, answer: str) -> float:
    """Whole words and numbers: 18 is not in 180, nor in 1.18 or -18."""
    words = _reference(answer)
    # Languages without spaces have no ends of words.
    begin = r"(?<![0-9A-Za-zÀ-ɏ])(?<!\d[.,])(?<!(?<!\w)-)" if words[0].isascii() and words[0].isalnum() else ""
    end = r"(?![0-9A-Za-zÀ-ɏ]|[.,]\d)" if words[-1].isascii() and words[-1].isalnum() else ""
    return float(re.search(f"{begin}{re.escape(words)}{end}", given) is not None)


def _reference(answer: str) -> str:
    if not answer.strip():
        raise ValueError(f"answer: got {answer!r}, expected one that is not blank")
    return answer.strip()


SCORERS: Registry[Scorer] = Registry("scorer")
SCORERS.register("exact", _exact)
SCORERS.register("contains", _contains)
SCORERS.register("math", "roll.extras.worlds.single_turn:mathematical")
SCORERS.register("words", "roll.extras.worlds.single_turn:same_words")


class SingleTurnConfig(EnvConfig):
    """Keys of ``env_config`` for ``env_type: single_turn``."""

    items: list[Item] = Field(default_factory=list, description="Prompts with their answers; the seed picks one.")
    generator: str | None = Field(
        None, description="package.module:function, seed -> (prompt, answer), instead of items."
    )
    dataset: QuestionsConfig | None = Field(
        None, description="Files of questions instead of items; the seed picks one. Each worker reads them once."
    )
    scorer: str = Field(
        "exact",
        description="exact; contains; words (the same, ignoring case, punctuation and articles); math (as the "
        "verifier math); or package.module:function, (given, answer) -> score.",
    )
    answer_pattern: str | None = Field(
        None, description="Regular expression whose first group is the answer; null uses the whole text."
    )
    success_score: float = Field(1.0, description="The lowest score that counts as success.")

    def problems(self) -> Iterator[ConfigProblem]:
        """Rules between keys, and names that cannot be imported."""
        given = [key for key in ("items", "generator", "dataset") if getattr(self, key)]
        if len(given) > 1:
            yield self.problem(given[1], f"null with {given[0]}: one source of questions", given[0])
        if not given:
            yield self.problem("items", "at least one, or a generator or a dataset")
        yield from pattern_problems("answer_pattern", self.answer_pattern)
        for key, find in (("scorer", self.find_scorer), ("generator", self.find_generator)):
            try:
                find()
            except UnknownNameError as error:
                yield self.problem(key, "a name that is registered or can be imported", hint=str(error))

    def find_scorer(self) -> Scorer:
        """The function that ``scorer`` names."""
        return SCORERS.get(self.scorer)

    def find_generator(self) -> Generator | None:
        """The function that ``generator`` names."""
        return None if self.generator is None else cast(Generator, import_path(self.generator, "generator"))


class SingleTurnEnv(Game):
    """An episode of one step: the observation is the prompt, the score of the text is the task reward.

    ``reset(options={"prompt": …, "answer": …})`` plays that item instead of one that the seed picks.
    """

    config: SingleTurnConfig
    config_class = SingleTurnConfig

    def __init__(self, **env_config: Any) -> None:
        super().__init__(**env_config)
        config = self.config
        self._scorer = config.find_scorer()
        self._generator = config.find_generator()
        questions = Questions(config.items) if config.dataset is None else read_questions(config.dataset)
        self._items = questions.items
        self._parser = None if config.answer_pattern is None else ActionParser((), config.answer_pattern)
        self.observation_space = Text(min_length=0, max_length=1_000_000, charset=questions.charset)

    def begin(self, seed: int, options: dict[str, Any]) -> None:
        """Asks one question."""
        if options:
            self._item = Item(**options)
        elif self._generator is not None:
            prompt, answer = self._generator(seed)
            self._item = Item(prompt=prompt, answer=answer)
        else:
            self._item = random.Random(seed).choice(self._items)
        self._show("asked", self._item.prompt)

    def play(self, text: str) -> Played:
        """Scores the answer; a text in which ``answer_pattern`` finds none scores 0 and costs ``format_penalty``.

        Raises:
            ValueError: the scorer makes nothing of the item's answer, such as a blank one.
            TypeError: the scorer returned something that is no number.
        """
        given = text if self._parser is None else self._parser.answer(text)
        score = 0.0 if given is None else float(self._scorer(given, self._item.answer))
        self._show("answered", "")
        success = given is not None and score >= self.config.success_score
        return Played(given, self.config.reward_scale * score, given is not None, True, success)

    def _show(self, phase: str, text: str) -> None:
        self._text = text
        self._key = stable_hash("\x1f".join((phase, self._item.prompt, self._item.answer)).encode())


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_PUNCTUATION = re.compile(
    # A sign, a point or a stroke before a digit is a part of the number; so are those of C++ and C#.
    rf"((?<![a-z])[-+](?=\d)|[./:^,](?=\d)|(?<=\d)%|(?<=\w)[+#]+)|[{re.escape(string.punctuation)}]"
)


def mathematical(given: str, answer: str) -> float:
    """1.0 if the answer is mathematically the reference, else 0.0, as the verifier ``math`` finds and reads them.

    Raises:
        ValueError: the reference is no expression.
    """
    from roll.extras.maths.verifier import MathConfig, MathVerifier  # with SymPy

    sample = Sample(prompt="", response=given, ground_truth=answer, data_source="")
    return MathVerifier(MathConfig()).check(sample).score


def same_words(given: str, answer: str) -> float:
    """1.0 if both are the same words, else 0.0: exact match of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250).

    Case, punctuation, articles and spaces do not count, but for the signs of numbers: 1.5 is not 15. The answer stands
    in ``<answer>`` or ``\\boxed{}``, the last of them, or is the whole text after ``</think>``. A reference that is
    nothing else, such as "A", must be there itself.

    Raises:
        ValueError: the reference is blank.
    """
    if not answer.strip():
        raise ValueError(f"answer: got {answer!r}, expected some words")
    said = after_thoughts(given)
    found = last_group(ANSWER_TAG, said) or last_boxed(said) or said
    words = _words(answer)
    return float(_words(found) == words if words else found.strip().lower() == answer.strip().lower())


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", _PUNCTUATION.sub(r"\1", _THOUSANDS.sub("", text.lower()))).split()
