"""A word game: guess the hidden word from what is told about the letters of earlier guesses."""

from __future__ import annotations

import random
import string
from collections import Counter
from functools import lru_cache
from typing import Any, Literal

from gymnasium.spaces import Text
from pydantic import Field

from roll.agentic.env.actions import ActionParser, pattern_problem
from roll.agentic.env.base import StepLimit, StepResult, TextEnv, stable_hash, step_result
from roll.agentic.env.config import ActionEnvConfig, parse_config
from roll.agentic.env.hidden_word_list import WORDS
from roll.configs.problems import ConfigProblem

HERE, ELSEWHERE, ABSENT = "+", "o", "."
"""Marks of a letter: at its place, in the word but at another place, not in the word (again)."""

_START = "No guess yet."


class HiddenWordConfig(ActionEnvConfig):
    """Keys of ``env_config`` for ``env_type: hidden_word``."""

    max_steps: int = Field(6, ge=1, description="Guesses after which the episode is truncated.")
    words: list[str] | None = Field(
        None,
        min_length=2,
        description="Words to hide and to guess, of one length, letters a to z; null: common English ones of five.",
    )
    split: Literal["train", "eval", "all"] = Field(
        "all", description="Which words are hidden: train and eval never share one. All of them may be guessed."
    )
    holdout_fraction: float = Field(0.2, gt=0, lt=1, description="Share of the words that belongs to the eval split.")
    show_history: bool = Field(True, description="Show all guesses with their marks, not the last alone.")
    step_penalty: float = Field(0.0, le=0, description="Task reward of every step.")
    letter_reward: float = Field(
        0.0, ge=0, description="Task reward of each place whose letter is found for the first time."
    )
    solved_reward: float = Field(1.0, ge=0, description="Task reward of the right guess.")

    def problems(self) -> list[ConfigProblem]:
        """Rules that pydantic cannot state."""
        found = [pattern_problem(self.action_pattern)]
        words = self.all_words()
        lengths = sorted({len(word) for word in words})
        odd = [word for word in words if not word or set(word) - set(string.ascii_lowercase)]
        if odd or len(lengths) > 1:
            seen = odd[0] if odd else f"words of {' and '.join(map(str, lengths))} letters"
            found.append(self.problem("words", "words of one length, letters a to z", seen=seen))
        elif len(set(words)) < len(words):
            twice = next(word for word, count in Counter(words).items() if count > 1)
            found.append(self.problem("words", "every word once", seen=twice))
        elif not self.hidden_words():
            expected = f"at least one of {len(words)} words in the split {self.split}"
            found.append(self.problem("holdout_fraction", expected, "split", "words"))
        return [problem for problem in found if problem]

    def all_words(self) -> tuple[str, ...]:
        """What may be guessed."""
        return WORDS if self.words is None else tuple(self.words)

    def hidden_words(self) -> tuple[str, ...]:
        """What may be hidden, by ``split``."""
        words = self.all_words()
        held_out = {word for word in words if int(stable_hash(word.encode()), 16) < self.holdout_fraction * 2**64}
        return tuple(word for word in words if self.split == "all" or (word in held_out) == (self.split == "eval"))


class HiddenWordEnv(TextEnv):
    """One hidden word per seed. Each guess is answered with a mark for each of its letters.

    Args:
        env_config: the keys of ``HiddenWordConfig``.
    """

    config_class = HiddenWordConfig
    action_names = WORDS
    instant = True

    def __init__(self, **env_config: Any) -> None:
        self.config = config = parse_config(HiddenWordConfig, env_config)
        self.action_names = config.all_words()
        self._hidden = config.hidden_words()
        self._parser = ActionParser(
            {word: index for index, word in enumerate(self.action_names)}, config.action_pattern
        )
        self._limit = StepLimit(config.max_steps)
        self._word = self._hidden[0]
        self._guesses: list[str] = []
        self._found: set[int] = set()
        told = _instruction(self.action_names[0])
        self.env_instruction = told if config.env_instruction is None else config.env_instruction
        longest = max(len(_START), 2 * (len(self._word) + 1) * config.max_steps)
        self.observation_space = Text(max_length=longest, charset=string.printable)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Hides the seed's word."""
        super().reset(seed=seed)
        drawn = seed if seed is not None else int(self.np_random.integers(2**62))
        self._word = random.Random(drawn).choice(self._hidden)
        self._guesses, self._found = [], set()
        self._limit.start()
        return self._observation(), {"state_key": self._key(), "success": False}

    def step(self, action: str) -> StepResult:
        """Guesses the word that the text names; a text without one tells nothing and costs a guess."""
        limit_reached = self._limit.count()
        config = self.config
        guess = self._parser.parse(action)
        effective = guess is not None and guess not in self._guesses
        reward = config.step_penalty
        if guess is not None:
            self._guesses.append(guess)
            places = {place for place, mark in enumerate(marks(guess, self._word)) if mark == HERE}
            reward += config.letter_reward * len(places - self._found)
            self._found |= places
        success = guess == self._word
        if success:
            reward += config.solved_reward
        if success or limit_reached:
            self._limit.stop()
        return step_result(
            self._observation(),
            task_reward=config.reward_scale * reward,
            penalty=config.reward_scale * config.format_penalty if guess is None else 0.0,
            terminated=success,
            truncated=limit_reached and not success,
            action=guess,
            action_is_effective=effective,
            success=success,
            state_key=self._key(),
        )

    def expert_actions(self) -> list[str]:
        """The words that fit everything that was told; empty when the word is found."""
        if self._word in self._guesses:
            return []
        told = [(guess, marks(guess, self._word)) for guess in dict.fromkeys(self._guesses)]
        return [word for word in self._hidden if all(marks(guess, word) == marked for guess, marked in told)]

    def _observation(self) -> str:
        shown = self._guesses if self.config.show_history else self._guesses[-1:]
        return "\n".join(f"{guess} {marks(guess, self._word)}" for guess in shown) or _START

    def _key(self) -> str:
        return stable_hash(" ".join((self._word, *self._guesses)).encode())


@lru_cache(maxsize=1 << 16)
def marks(guess: str, word: str) -> str:
    """A mark for each letter of the guess; a letter is marked at most as often as the word has it.

    >>> marks("erase", "creek")
    'o+..o'
    """
    left = Counter(letter for letter, tried in zip(word, guess, strict=True) if letter != tried)
    marked = []
    for letter, tried in zip(word, guess, strict=True):
        if letter == tried:
            marked.append(HERE)
        elif left[tried]:
            left[tried] -= 1
            marked.append(ELSEWHERE)
        else:
            marked.append(ABSENT)
    return "".join(marked)


def _instruction(example: str) -> str:
    return (
        f"Find the hidden word of {len(example)} letters. Each guess is answered with a mark for each of its letters: "
        f"{HERE} is at its place, {ELSEWHERE} is in the word at another place, {ABSENT} is not in the word (again). "
        f"Answer with a word, like this: <answer>{example}</answer>"
    )
