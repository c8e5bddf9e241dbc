"""Runs games of the package ``textarena``: alone, or against players that are functions."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field

from roll.agentic.env.base import stable_hash
from roll.agentic.env.game import AdaptedEnvConfig, AdaptedGame, Played
from roll.configs.problems import ConfigProblem
from roll.extras.worlds.own_random import OwnRandom
from roll.utils.registry import Registry, UnknownNameError

if TYPE_CHECKING:
    import textarena

Opponent = Callable[[str, random.Random], str]
"""``(what it sees, its own random numbers) -> what it says``."""

_LISTED = re.compile(r"(?:available|valid|legal|possible)[^\n:]*moves[^\n:]*:([^\n]*)", re.IGNORECASE)
_MAX_TOLD = 4096
"""Characters, of a text's end, that a game is told: Python reads no longer numbers, and games raise."""


def _random_move(seen: str, rng: random.Random) -> str:
    """One of the moves that the game lists.

    Raises:
        ValueError: it lists none.
    """
    lists = _LISTED.findall(seen)
    moves = re.findall(r"\[[^\[\]\n]+\]", lists[-1]) if lists else []
    if not moves:
        raise ValueError("opponent: the game lists no moves to choose from, expected package.module:function")
    return rng.choice(moves)


OPPONENTS: Registry[Opponent] = Registry("opponent")
OPPONENTS.register("random", _random_move)


class TextArenaConfig(AdaptedEnvConfig):
    """Keys of ``env_config`` for ``env_type: textarena``."""

    env_id: str = Field(description="Name of a game, for textarena.make.")
    env_kwargs: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for textarena.make.")
    num_players: int = Field(1, ge=1, description="Players of the game.")
    player: int = Field(0, ge=0, description="The policy's number among them.")
    opponent: str | None = Field(
        None,
        description="The other players: random (among the moves that the game lists), package.module:function or "
        "folder/file.py:function, (observation, random.Random) -> text.",
    )
    show_history: bool = Field(
        True,
        description="true: observations as the game's own wrappers show them; false: what is new, for conversations.",
    )
    success_reward: float = Field(1.0, description="The lowest reward at the end that counts as success.")

    def problems(self) -> Iterator[ConfigProblem]:
        """Finds a missing package, an unknown game, and broken rules between keys."""
        yield from super().problems()
        yield from self.id_problems(self.env_id, "textarena", "a game of textarena")
        if self.player >= self.num_players:
            yield self.problem("player", f"a number below num_players = {self.num_players}", "num_players")
        if (self.num_players > 1) != (self.opponent is not None):
            expected = "the other players" if self.num_players > 1 else "null with one player"
            yield self.problem("opponent", expected, "num_players")
        try:
            self.find_opponent()
        except UnknownNameError as error:
            expected = "random, package.module:function or folder/file.py:function"
            yield self.problem("opponent", expected, hint=str(error))

    def find_opponent(self) -> Opponent | None:
        """The function that ``opponent`` names."""
        return None if self.opponent is None else OPPONENTS.get(self.opponent)


class TextArenaEnv(AdaptedGame):
    """A game: its texts are the observations, and its final reward is the reward.

    A game draws from Python's own random numbers, which a process has once: calls of games follow one another, each
    with the numbers of its own episode.

    Raises:
        ValueError: the game needs data that is not there.
    """

    config: TextArenaConfig
    config_class = TextArenaConfig

    def __init__(self, **env_config: Any) -> None:
        super().__init__(**env_config)
        config = self.config
        self._opponent = config.find_opponent()
        self._own_random = OwnRandom()
        self._rng = random.Random(0)
        with self._own_random.take():
            self._new = _made(config)
        self._game: Any = self._new

    def begin(self, seed: int, options: dict[str, Any]) -> None:
        """Starts a game; whoever moves before the policy does so.

        Raises:
            RuntimeError: the game is over before the policy's first move.
        """
        self._rng = random.Random(seed)
        self._game = copy.deepcopy(self._new)
        with self._own_random.take():
            self._game.reset(num_players=self.config.num_players, seed=seed)
        if self._others():
            raise RuntimeError(f"{self.config.env_id} ended before the first move of player {self.config.player}")
        self._key = ""
        self._observe()

    def play(self, text: str) -> Played:
        """Tells the game what was said, and has the others play until it is the policy's turn again.

        Raises:
            RuntimeError: the game ended without a reward, or by a move of an opponent that is not allowed.
        """
        before = self._refusals()
        said = self.said(text)
        over = False
        if said is not None:
            with self._own_random.take():
                over = bool(self._game.step(said[-_MAX_TOLD:])[0])
        refused = said is None or self._refusals() > before
        over = over or self._others()
        reward = self._reward() if over else 0.0
        if over:
            self._text = self._ending()
            self._key = stable_hash(f"{self._key}\n{self._text}".encode())
        elif said is not None:
            self._observe()
        success = over and reward >= self.config.success_reward
        return Played(None if refused else said, self.config.reward_scale * reward, not refused, over, success)

    def _others(self) -> bool:
        """Moves of the other players; True when the game is over."""
        over = False
        while not over and self._state.current_player_id != self.config.player:
            assert self._opponent is not None, "TextArenaConfig.problems"
            with self._own_random.take():
                _, seen = self._game.get_observation()
            said = self._opponent(_told(seen, self._state.role_mapping), self._rng)
            with self._own_random.take():
                over = bool(self._game.step(said)[0])
        return over

    def _observe(self) -> None:
        with self._own_random.take():
            game = self._game if self.config.show_history else _inside(self._game)
            _, seen = game.get_observation()
        own = None if self.config.show_history else self.config.player
        self._text = _told(seen, self._state.role_mapping, own)
        self._key = stable_hash((self._text if self.config.show_history else f"{self._key}\n{self._text}").encode())

    def _refusals(self) -> tuple[bool, int]:
        """Tells whether a move that is not allowed ended the game for the policy, and how many it has made in a row."""
        ended = bool(self._state.game_info[self.config.player].get("invalid_move"))
        return ended, int(getattr(self._state, "error_count", 0))

    def _reward(self) -> float:
        rewards, info = self._game.close()
        if not rewards or self.config.player not in rewards:
            raise RuntimeError(f"{self.config.env_id} ended without a reward for player {self.config.player}")
        for number, told in info.items():
            if number != self.config.player and told.get("invalid_move"):
                raise RuntimeError(
                    f"opponent {self.config.opponent} lost by a move that is not allowed: {self._ending()}"
                )
        return cast(float, rewards[self.config.player])

    def _ending(self) -> str:
        return str(self._state.game_info[self.config.player].get("reason") or "The game is over.")

    @property
    def _state(self) -> Any:
        return self._game.state


def _made(config: TextArenaConfig) -> textarena.Env:
    import textarena

    try:
        return cast("textarena.Env", textarena.make(config.env_id, **config.env_kwargs))
    except LookupError as error:  # of nltk
        wanted = re.search(r"nltk\.download\('(\w+)'\)", str(error))
        name = wanted[1] if wanted else "its data"
        raise ValueError(f"env_id: {config.env_id} needs data of NLTK: python -m nltk.downloader {name}") from error


def _inside(game: Any) -> Any:
    while hasattr(game, "env"):
        game = game.env
    return game


def _told(seen: Any, names: dict[int, str], own: int | None = None) -> str:
    """A text, or messages as lines of which those of player ``own`` are left out."""
    if isinstance(seen, str):
        return seen.strip("\n")
    messages = cast("Sequence[tuple[int, str, Any]]", seen or ())
    lines = [
        text if sender < 0 else f"[{names.get(sender, f'Player {sender}')}] {text}"
        for sender, text, _ in messages
        if sender != own
    ]
    return "\n".join(lines).strip("\n")
