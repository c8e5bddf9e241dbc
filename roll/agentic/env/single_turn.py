"""One prompt, one answer, one score."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any, cast

from gymnasium.spaces import Text
from pydantic import BaseModel, ConfigDict, Field

from roll.agentic.env.actions import ActionParser, pattern_problem
from roll.agentic.env.base import StepLimit, StepResult, TextEnv, stable_hash, step_result
from roll.agentic.env.config import EnvConfig, parse_config
from roll.configs.problems import ConfigProblem
from roll.utils.registry import Registry, UnknownNameError, import_path

Scorer = Callable[[str, str], float]
"""``(what the model answered, the item's answer) -> score``; 1 is right, 0 is wrong."""

Generator = Callable[[int], tuple[str, str]]
"""``seed -> (prompt, answer)``, the same in every process."""


def _exact(given: str, answer: str) -> float:
    return float(given.strip() == answer.strip())


def _contains(given: str, answer: str) -> float:
    return float(answer.strip() in given)


SCORERS: Registry[Scorer] = Registry("scorer")
SCORERS.register("exact", _exact)
SCORERS.register("contains", _contains)


class Item(BaseModel):
    """A prompt and its answer."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    prompt: str
    answer: str


class SingleTurnConfig(EnvConfig):
    """Keys of ``env_config`` for ``env_type: single_turn``."""

    items: list[Item] = Field(default_factory=list, description="Prompts with their answers; the seed picks one.")
    generator: str | None = Field(
        None, description="package.module:function, seed -> (prompt, answer), in place of items."
    )
    scorer: str = Field("exact", description="exact, contains, or package.module:function, (given, answer) -> score.")
    answer_pattern: str | None = Field(
        None, description="Regular expression whose first group is the answer; null takes the whole text."
    )
    success_score: float = Field(1.0, description="The lowest score that counts as success.")

    def problems(self) -> list[ConfigProblem]:
        """Rules between keys, and names that cannot be imported."""
        found: list[ConfigProblem | None] = []
        if self.items and self.generator:
            found.append(self.problem("generator", f"null beside {len(self.items)} items: one of the two", "items"))
        if self.answer_pattern is not None:
            found.append(pattern_problem(self.answer_pattern, "answer_pattern"))
        for key, find in (("scorer", self.find_scorer), ("generator", self.find_generator)):
            try:
                find()
            except UnknownNameError as error:
                found.append(self.problem(key, "a name that is registered or can be imported", hint=str(error)))
        return [problem for problem in found if problem]

    def find_scorer(self) -> Scorer:
        """The function that ``scorer`` names."""
        return SCORERS.get(self.scorer)

    def find_generator(self) -> Generator | None:
        """The function that ``generator`` names."""
        return None if self.generator is None else cast(Generator, import_path(self.generator, "generator"))


class SingleTurnEnv(TextEnv):
    """An episode of one step: the observation is the prompt, the score of the text is the task reward.

    ``reset(options={"prompt": …, "answer": …})`` plays that item instead of one that the seed picks.

    Args:
        env_config: the keys of ``SingleTurnConfig``.
    """

    config_class = SingleTurnConfig

    def __init__(self, **env_config: Any) -> None:
        self.config = config = parse_config(SingleTurnConfig, env_config)
        self.env_instruction = config.env_instruction or ""
        self._scorer = config.find_scorer()
        self._generator = config.find_generator()
        self._parser = None if config.answer_pattern is None else ActionParser({}, config.answer_pattern)
        self._limit = StepLimit(1)
        self._item = Item(prompt="", answer="")
        charset = set(string.printable).union(*(item.prompt for item in config.items))
        self.observation_space = Text(min_length=0, max_length=1_000_000, charset=frozenset(charset))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Asks one question.

        Raises:
            ValueError: neither ``options`` nor the configuration has an item.
        """
        super().reset(seed=seed)
        drawn = seed if seed is not None else int(self.np_random.integers(2**62))
        if options:
            self._item = Item(**options)
        elif self._generator is not None:
            prompt, answer = self._generator(drawn)
            self._item = Item(prompt=prompt, answer=answer)
        elif self.config.items:
            self._item = random.Random(drawn).choice(self.config.items)
        else:
            raise ValueError(
                "items: got none, expected items, a generator, or reset(options={'prompt': …, 'answer': …})"
            )
        self._limit.start()
        return self._item.prompt, {"state_key": self._key("asked"), "success": False}

    def step(self, action: str) -> StepResult:
        """Scores the answer; a text in which ``answer_pattern`` finds none scores 0 and costs ``format_penalty``.

        Raises:
            TypeError: the scorer returned something that is no number.
        """
        self._limit.count()
        self._limit.stop()
        given = action if self._parser is None else self._parser.answer(action)
        score = 0.0 if given is None else float(self._scorer(given, self._item.answer))
        scale = self.config.reward_scale
        return step_result(
            "",
            task_reward=scale * score,
            penalty=scale * self.config.format_penalty if given is None else 0.0,
            terminated=True,
            truncated=False,
            action=given,
            action_is_effective=given is not None,
            success=given is not None and score >= self.config.success_score,
            state_key=self._key("answered"),
        )

    def _key(self, phase: str) -> str:
        return stable_hash("\x1f".join((phase, self._item.prompt, self._item.answer)).encode())
