"""One prompt, one answer, one score."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

from gymnasium.spaces import Text
from pydantic import Field

from roll.agentic.env.actions import ActionParser
from roll.agentic.env.base import stable_hash
from roll.agentic.env.config import EnvConfig
from roll.agentic.env.game import Game, Played
from roll.configs.problems import ConfigProblem, pattern_problems
from roll.extras.worlds.questions import Item, Questions, QuestionsConfig, read_questions
from roll.utils.registry import Registry, UnknownNameError, import_path

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
        raise ValueError(f"answer: seen {answer!r}, expected one that is not blank")
    return answer.strip()


SCORERS: Registry[Scorer] = Registry("scorer")
SCORERS.register("exact", _exact)
SCORERS.register("contains", _contains)
SCORERS.register("math", "roll.extras.worlds.scorers:mathematical")
SCORERS.register("words", "roll.extras.worlds.scorers:same_words")


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
            yield self.problem(given[1], f"null beside {given[0]}: one source of questions", given[0])
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
