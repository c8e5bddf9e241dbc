"""A word game: guess the hidden word from hints about the letters of earlier guesses."""

from __future__ import annotations

import random
import string
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from gymnasium.spaces import Text
from pydantic import Field

from roll.agentic.env.base import Split, in_split, stable_hash
from roll.agentic.env.game import ActionEnvConfig, ActionParser, Game, Played
from roll.configs.problems import ConfigProblem

_LISTED = """
about above actor adult after again agent agree alarm album alive allow alone along among angle apple apron arena
argue armor aside audio avoid awake award bacon badge baker basic basin beach beard berry birch black blade blame
blank blast blend bless blind block bloom board boost booth brain brake brand brave bread break brick bride brief
bring broad broom brown brush build bunch cabin cable camel candy cargo carry catch cause chain chair chalk charm
chart cheap check cheek cheer chess chest chief child chime choir civic claim class clean clear clerk cliff climb
clock close cloth cloud clown coach coast coral couch count cover crack craft crane crate cream creek crest crisp
cross crowd crown crumb crust curve cycle daily dairy dance delay depth diary ditch dodge doubt dough draft drain
drama dream dress drift drink drive eager eagle early earth elbow elder empty enjoy enter equal event exact extra
fable faint faith false fancy favor feast fence ferry fever fiber field final flame flash fleet float flock floor
flour fluid flute focus forge found frame fresh front frost fruit ghost giant glass globe glory glove grace grain
grand grape graph grass great green greet group guard guess guest guide habit happy heart heavy hedge hinge hobby
honey horse hotel house human humor ideal image index inner issue jelly jewel joint judge juice knife knock label
large laser later laugh layer learn lemon level light limit linen liver local logic lucky lunch magic major maple
march match mayor medal melon mercy merit metal meter minor model money month motor mount mouse mouth movie music
nerve never night noble noise north novel nurse ocean offer olive onion orbit order other outer owner paint panel
paper party patch pause peace pearl penny phone photo piano piece pilot pitch place plain plane plant plate point
pound power press price pride prize proof proud pulse pupil queen quick quiet quilt radio raise ranch range rapid
ready reply ridge river roast robin robot rough round route royal ruler rural salad sauce scale scarf scene scope
score scout sense serve shade shape share sharp sheep shelf shell shine shirt shore short skill sleep slice slope
small smart smile smoke snack solid sound south space spare spark speak spice spoon sport staff stage stair stamp
stand steam steel stick stone storm story stove straw style sugar sunny sweet swing table teach thick thing think
tiger title toast token torch total touch tower track trade train treat trial trick truck trunk trust truth uncle
under union unity upper urban usual value vapor video virus visit vital vivid vocal voice wagon waste watch water
weigh wheat wheel where white whole woman world worry worth wound wrist write young youth
"""

WORDS = tuple(_LISTED.split())
"""In the order of the alphabet."""


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
    split: Split = Field(
        "all", description="Which words are hidden: train and eval share none. Any word can be guessed."
    )
    holdout_fraction: float = Field(0.2, gt=0, lt=1, description="Share of the words that belongs to the eval split.")
    show_history: bool = Field(True, description="Show all guesses with their marks, not only the last.")
    step_penalty: float = Field(0.0, le=0, description="Task reward of every step.")
    letter_reward: float = Field(
        0.0, ge=0, description="Task reward of each place whose letter is found for the first time."
    )
    solved_reward: float = Field(1.0, ge=0, description="Task reward of the right guess.")

    def problems(self) -> Iterator[ConfigProblem]:
        """Rules that pydantic cannot state."""
        yield from super().problems()
        words = self.all_words()
        lengths = sorted({len(word) for word in words})
        odd = [word for word in words if not word or set(word) - set(string.ascii_lowercase)]
        if odd or len(lengths) > 1:
            seen = odd[0] if odd else f"words of {' and '.join(map(str, lengths))} letters"
            yield self.problem("words", "words of one length, letters a to z", got=seen)
        elif len(set(words)) < len(words):
            twice = next(word for word, count in Counter(words).items() if count > 1)
            yield self.problem("words", "every word once", got=twice)
        elif not self.hidden_words():
            expected = f"at least one of {len(words)} words in the split {self.split}"
            yield self.problem("holdout_fraction", expected, "split", "words")

    def all_words(self) -> tuple[str, ...]:
        """Words that may be guessed."""
        return WORDS if self.words is None else tuple(self.words)

    def hidden_words(self) -> tuple[str, ...]:
        """Words that may be hidden, by ``split``."""
        split, share = self.split, self.holdout_fraction
        return tuple(word for word in self.all_words() if in_split(stable_hash(word.encode()), split, share))


class HiddenWordEnv(Game):
    """One hidden word per seed. Each guess is answered with a mark for each of its letters."""

    config: HiddenWordConfig
    config_class = HiddenWordConfig
    action_names = WORDS
    instant = True

    def __init__(self, **env_config: Any) -> None:
        super().__init__(**env_config)
        config = self.config
        self.action_names = config.all_words()
        if config.env_instruction is None:
            self.env_instruction = _instruction(self.action_names[0])
        self._hidden = config.hidden_words()
        self._parser = ActionParser(self.action_names, config.action_pattern)
        self._word = self._hidden[0]
        self._guesses: list[str] = []
        self._found: set[int] = set()
        longest = max(len(_START), 2 * (len(self._word) + 1) * config.max_steps)
        self.observation_space = Text(max_length=longest, charset=string.printable)

    def begin(self, seed: int, options: dict[str, Any]) -> None:
        """Hides the seed's word."""
        self._word = random.Random(seed).choice(self._hidden)
        self._guesses, self._found = [], set()

    def play(self, text: str) -> Played:
        """Guesses the word that the text names; a text without one tells nothing and costs a guess."""
        config = self.config
        guess = self._parser.parse(text)
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
        return Played(guess, config.reward_scale * reward, effective, success, success)

    def expert_actions(self) -> list[str]:
        """The words that fit everything that was told; empty when the word is found."""
        if self._word in self._guesses:
            return []
        told = [(guess, marks(guess, self._word)) for guess in dict.fromkeys(self._guesses)]
        return [word for word in self._hidden if all(marks(guess, word) == marked for guess, marked in told)]

    def observation(self) -> str:
        shown = self._guesses if self.config.show_history else self._guesses[-1:]
        return "\n".join(f"{guess} {marks(guess, self._word)}" for guess in shown) or _START

    def state_key(self) -> str:
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
