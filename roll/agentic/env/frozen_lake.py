"""Frozen lake, as text or as a picture: walk to the goal, not into a hole."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Text
from pydantic import Field

from roll.agentic.env.base import PICTURES, Observation, Split, in_split, picture, stable_hash
from roll.agentic.env.game import ActionParser, Game, Played
from roll.agentic.env.grid import (
    PEOPLE_SIDE,
    PLAYER,
    UNITS,
    Circle,
    GridConfig,
    Polygon,
    Rect,
    Shape,
    Vocabulary,
    build_vocabulary,
    draw_grid,
    vocabulary_problems,
)
from roll.configs.problems import ConfigProblem
from roll.data.columns import UInt8Array

SYMBOLS = {"player": "P", "floor": "_", "hole": "O", "goal": "G", "player in hole": "X", "player on goal": "√"}

_MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
ACTIONS = tuple(_MOVES)
"""Names of the moves. Neighbours in this circle are at right angles: the two ways in which a move may slip."""

_MAX_MAPS = 10_000

Cell = tuple[int, int]
"""Row and column, from 0 at the upper left."""


class FrozenLakeConfig(GridConfig):
    """Keys of ``env_config`` for ``env_type: frozen_lake``."""

    size: int = Field(4, ge=4, le=8, description="Rows and columns of the lake.")
    p: float = Field(0.8, ge=0.5, le=1, description="Share of cells that are frozen; the rest are holes.")
    is_slippery: bool = Field(
        False, description="A move goes in its direction or to either side, each with probability 1/3."
    )
    step_penalty: float = Field(0.0, le=0, description="Task reward of every step.")
    goal_reward: float = Field(1.0, ge=0, description="Task reward of reaching the goal.")
    hole_reward: float = Field(0.0, le=0, description="Task reward of falling into a hole.")
    show_coordinates: bool = Field(
        False, description="Add a line such as P(0,0)G(3,3)O(1,2)O(2,2): (row,column) from 0 of player, goal, holes."
    )
    grid_lookup: dict[int, str] | None = Field(
        None, description="Code -> symbol; 0 player, 1 floor, 2 hole, 3 goal, 4 player in hole, 5 player on goal."
    )
    grid_vocab: dict[str, str] | None = Field(None, description="Symbol -> meaning, for the instruction.")
    split: Split = Field("all", description="Which lakes are drawn: train and eval share none.")
    holdout_fraction: float = Field(0.2, gt=0, lt=1, description="Share of all lakes that belongs to the eval split.")

    def problems(self) -> Iterator[ConfigProblem]:
        """Rules that pydantic cannot state."""
        yield from super().problems()
        yield from vocabulary_problems(SYMBOLS, self.grid_lookup, self.grid_vocab)
        shortest = 2 * (self.size - 1)
        if self.max_steps < shortest:
            yield self.problem("max_steps", f"at least {shortest}, the shortest way across", "size")

    def in_split(self, holes: frozenset[Cell]) -> bool:
        """True for a lake of the asked split."""
        return in_split(stable_hash(repr((self.size, sorted(holes))).encode()), self.split, self.holdout_fraction)


class FrozenLakeEnv(Game):
    """One solvable lake per seed, from the upper left to the lower right corner; the slips follow the seed too."""

    metadata = PICTURES
    render_mode = "rgb_array"
    config: FrozenLakeConfig
    config_class = FrozenLakeConfig
    action_names = ACTIONS
    instant = True

    def __init__(self, **env_config: Any) -> None:
        super().__init__(**env_config)
        config = self.config
        vocabulary = build_vocabulary(SYMBOLS, config.grid_lookup, config.grid_vocab)
        if config.env_instruction is None:
            self.env_instruction = _instruction(None if config.is_drawn else vocabulary)
        self._symbols = dict(zip(SYMBOLS, vocabulary.symbols, strict=True))
        self._parser = ActionParser(ACTIONS, config.action_pattern)
        self._goal = (config.size - 1, config.size - 1)
        self._holes: frozenset[Cell] = frozenset()
        self._player = (0, 0)
        self._slips = random.Random(0)
        self.observation_space = Text(max_length=4096, charset="".join(vocabulary.symbols) + "\n(,)0123456789PGO")
        if config.is_drawn:
            self.observation_space = Box(0, 255, (config.size * config.tile_size,) * 2 + (3,), np.uint8)

    def begin(self, seed: int, options: dict[str, Any]) -> None:
        """Starts on the seed's lake."""
        self._slips = random.Random(seed)
        self._holes = _draw_holes(self._slips, self.config)
        self._player = (0, 0)

    def play(self, text: str) -> Played:
        """Walks as the text says; a text without an action leaves the player where it is."""
        config, before = self.config, self._player
        name = self._parser.parse(text)
        if name is not None:
            self._walk(name)
        success, fell = self._player == self._goal, self._player in self._holes
        reward = config.step_penalty + config.goal_reward * success + config.hole_reward * fell
        return Played(name, config.reward_scale * reward, self._player != before, success or fell, success)

    def render(self) -> UInt8Array:
        """The lake as a picture, shape [height, width, 3]."""
        return self._drawn()

    def _drawn(self, side: int = PEOPLE_SIDE) -> UInt8Array:
        cells = range(self.config.size)
        return draw_grid([[self._kind((row, column)) for column in cells] for row in cells], TILES, side)

    def expert_actions(self) -> list[str]:
        """All moves on shortest ways to the goal, as if none slipped; empty on the goal and in a hole."""
        distances = _distances(self._goal, self.config.size, self._holes)
        here = distances.get(self._player, 0)
        return [name for name in _MOVES if here and distances.get(_moved(self._player, name), here) < here]

    def _walk(self, name: str) -> None:
        if self.config.is_slippery:
            name = ACTIONS[(ACTIONS.index(name) + self._slips.choice((-1, 0, 1))) % 4]
        row, column = _moved(self._player, name)
        last = self.config.size - 1
        self._player = (min(max(row, 0), last), min(max(column, 0), last))

    def observation(self) -> Observation:
        if self.config.is_drawn:
            return [picture(self._drawn(self.config.tile_size))]
        cells = range(self.config.size)
        lines = ["".join(self._symbols[self._kind((row, column))] for column in cells) for row in cells]
        if self.config.show_coordinates:
            places = [("P", self._player), ("G", self._goal), *(("O", hole) for hole in sorted(self._holes))]
            lines.append("".join(f"{letter}({row},{column})" for letter, (row, column) in places))
        return "\n".join(lines)

    def _kind(self, cell: Cell) -> str:
        if cell == self._player:
            return "player in hole" if cell in self._holes else "player on goal" if cell == self._goal else "player"
        return "hole" if cell in self._holes else "goal" if cell == self._goal else "floor"

    def state_key(self) -> str:
        return stable_hash(repr((self.config.size, sorted(self._holes), self._player)).encode())


def _draw_holes(rng: random.Random, config: FrozenLakeConfig) -> frozenset[Cell]:
    """Draws holes until the goal can be reached and the lake is of the split.

    Raises:
        ValueError: that did not happen (practically impossible for ``p`` from 0.5 to 0.9).
    """
    size, p = config.size, config.p
    goal = (size - 1, size - 1)
    cells = [(row, column) for row in range(size) for column in range(size) if (row, column) not in ((0, 0), goal)]
    for _ in range(_MAX_MAPS):
        holes = frozenset(cell for cell in cells if rng.random() >= p)
        if goal in _distances((0, 0), size, holes) and config.in_split(holes):
            return holes
    raise ValueError(
        f"p: got {p}, but none of {_MAX_MAPS} lakes of size {size} can be crossed and belongs to {config.split}"
    )


def _distances(start: Cell, size: int, holes: frozenset[Cell]) -> dict[Cell, int]:
    """Fewest moves from ``start`` to each cell that can be reached over the ice."""
    distances, queue = {start: 0}, [start]
    for cell in queue:  # it grows meanwhile
        for name in _MOVES:
            near = _moved(cell, name)
            if min(near) >= 0 and max(near) < size and near not in holes and near not in distances:
                distances[near] = distances[cell] + 1
                queue.append(near)
    return distances


def _moved(cell: Cell, name: str) -> Cell:
    """The next cell, which may lie beyond the shore."""
    down, right = _MOVES[name]
    return cell[0] + down, cell[1] + right


def _instruction(vocabulary: Vocabulary | None) -> str:
    """The rules; without a vocabulary the lake is a picture."""
    lake = (
        "The picture shows the lake: the holes are dark, the goal is a red flag, and you are in blue."
        if vocabulary is None
        else f"The lake's symbols are {vocabulary.legend}."
    )
    return (
        "You are the player on a frozen lake. Walk one cell at a time to the goal and stay out of the holes. "
        f"{lake} "
        f"Answer with one of the moves {', '.join(ACTIONS)}, like this: <answer>Right</answer>"
    )


_ICE: tuple[Shape, ...] = (
    Rect(0, 0, UNITS, UNITS, "#b5d8ec"),
    Rect(0.5, 0.5, 23, 23, "#d6ecf8", 1.5),
    Polygon(((4, 10), (10, 4), (12, 4), (4, 12)), "#eef8fd"),
    Polygon(((13, 20), (20, 13), (20, 15), (15, 20)), "#eef8fd"),
)
_HOLE = (*_ICE, Circle(12, 12, 9, "#6f9fbe"), Circle(12, 12.8, 7.8, "#16324a"))
_GOAL = (*_ICE, Rect(7, 3.5, 2, 17.5, "#6b4a2b", 1), Polygon(((9, 4), (20, 8), (9, 12)), "#d9574a"))

TILES: Mapping[str, tuple[Shape, ...]] = {
    "player": (*_ICE, *PLAYER),
    "floor": _ICE,
    "hole": _HOLE,
    "goal": _GOAL,
    "player in hole": (*_HOLE, Circle(12, 13, 4.9, "#f3c79b"), Rect(5, 14, 14, 6, "#16324a", 3)),
    "player on goal": (*_GOAL, *PLAYER),
}
"""The kinds of cell that ``frozen_lake.SYMBOLS`` lists -> their shapes."""
