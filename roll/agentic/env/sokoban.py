"""Sokoban, as text or as a picture: push every box on a target."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
from gymnasium.spaces import Box, Text
from pydantic import Field

from roll.agentic.env.base import PICTURES, Observation, Split, picture, stable_hash
from roll.agentic.env.game import ActionParser, Game, Played, parse_config
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
from roll.agentic.env.sokoban_boards import SYMBOLS, BackwardSearch, Board, BoardSpec, cell_kind, generate_board
from roll.configs.problems import ConfigErrors, ConfigProblem
from roll.data.columns import UInt8Array

ACTIONS = ("Up", "Down", "Left", "Right")

_QUICK_MOVES = 40
"""Boxes times the longest solution: up to here the search for a board takes less than a millisecond on average."""

Side = Annotated[int, Field(ge=6, le=10)]


class SokobanConfig(GridConfig):
    """Keys of ``env_config`` for ``env_type: sokoban``."""

    dim_room: tuple[Side, Side] = Field((6, 6), description="Height and width, walls included.")
    num_boxes: int = Field(1, ge=1, le=4, description="Boxes, and as many targets.")
    num_walls: int | None = Field(
        None, ge=0, description="Most walls inside the border; null is a quarter of the inner cells."
    )
    min_solution: int = Field(1, ge=1, description="Fewest moves of the optimal solution.")
    max_solution: int | None = Field(
        None, ge=1, description="Most moves of the optimal solution; null is the smaller of search_depth and max_steps."
    )
    search_depth: int = Field(
        100, ge=1, description="How many moves the search for a board goes back from the solved one."
    )
    step_penalty: float = Field(-0.1, le=0, description="Task reward of every step.")
    box_reward: float = Field(
        1.0, ge=0, description="Task reward of pushing a box onto a target, and the penalty for pushing it off."
    )
    solved_reward: float = Field(10.0, ge=0, description="Task reward of the step that solves the board.")
    show_coordinates: bool = Field(False, description="Add a line such as P(2,3)X(3,3)O(4,1): (row,column) from 0.")
    grid_lookup: dict[int, str] | None = Field(
        None,
        description="Code -> symbol; 0 wall, 1 floor, 2 target, 3 box on target, 4 box, 5 player, 6 player on target.",
    )
    grid_vocab: dict[str, str] | None = Field(None, description="Symbol -> meaning, for the instruction.")
    split: Split = Field("all", description="Which boards are drawn: train and eval share none.")
    holdout_fraction: float = Field(0.1, gt=0, lt=1, description="Share of all boards that belongs to the eval split.")

    def problems(self) -> Iterator[ConfigProblem]:
        """Rules between keys."""
        yield from super().problems()
        yield from vocabulary_problems(SYMBOLS, self.grid_lookup, self.grid_vocab)
        low, high = self.solution_range()
        if low > high:
            limits = ("max_solution", "search_depth", "max_steps")
            yield self.problem("min_solution", f"at most {high}, the least of {', '.join(limits)}", *limits)
        if self.max_solution is not None and self.max_solution > min(self.search_depth, self.max_steps):
            expected = f"at most search_depth = {self.search_depth} and max_steps = {self.max_steps}"
            yield self.problem("max_solution", expected, "search_depth", "max_steps")
        inner = (self.dim_room[0] - 2) * (self.dim_room[1] - 2)
        if self.most_walls() + 2 * self.num_boxes + 1 > inner:
            most = inner - 2 * self.num_boxes - 1
            expected = f"at most {most} of the {inner} inner cells with {self.num_boxes} boxes"
            yield self.problem("num_walls", expected, "dim_room", "num_boxes", got=self.most_walls())

    def solution_range(self) -> tuple[int, int]:
        """Bounds of the optimal solution's length."""
        return self.min_solution, self.max_solution or min(self.search_depth, self.max_steps)

    def most_walls(self) -> int:
        """``num_walls`` with its default filled in."""
        height, width = self.dim_room
        return (height - 2) * (width - 2) // 4 if self.num_walls is None else self.num_walls


def _is_quick(env_config: Mapping[str, Any]) -> bool:
    """Tells whether boards are found in less than a millisecond, which long solutions with several boxes are not.

    On 10×10 boards with four boxes it takes 0.6 ms on average with solutions of up to 10 moves, 5 with up to 20.
    """
    try:
        config = parse_config(SokobanConfig, env_config)
    except ConfigErrors:
        return False
    return config.num_boxes * config.solution_range()[1] <= _QUICK_MOVES


class SokobanEnv(Game):
    """One board per episode; every seed has its own.

    ``reset(options={"board": text})`` plays a given board instead (drawn with the environment's symbols).
    """

    metadata = PICTURES
    render_mode = "rgb_array"
    config: SokobanConfig
    config_class = SokobanConfig
    action_names = ACTIONS
    instant = staticmethod(_is_quick)

    def __init__(self, **env_config: Any) -> None:
        super().__init__(**env_config)
        config = self.config
        vocabulary = build_vocabulary(SYMBOLS, config.grid_lookup, config.grid_vocab)
        if config.env_instruction is None:
            self.env_instruction = _instruction(None if config.is_drawn else vocabulary)
        self._symbols = vocabulary.symbols
        self._parser = ActionParser(ACTIONS, config.action_pattern)
        height, width = config.dim_room
        low, high = config.solution_range()
        self._spec = BoardSpec(
            height, width, config.num_boxes, config.most_walls(), low, high, config.split, config.holdout_fraction
        )
        scale = config.reward_scale
        self._step_reward = scale * config.step_penalty
        self._box_reward = scale * config.box_reward
        self._solved_reward = scale * config.solved_reward
        self.observation_space = Text(max_length=4096, charset="".join(self._symbols) + "\n(,)0123456789PXO")
        if config.is_drawn:
            self.observation_space = Box(0, 255, (height * config.tile_size, width * config.tile_size, 3), np.uint8)
        self._board: Board | None = None
        self._search: BackwardSearch | None = None

    def begin(self, seed: int, options: dict[str, Any]) -> None:
        """Starts with the seed's board.

        Raises:
            ValueError: no board of the asked difficulty was found, or ``options["board"]`` is not one.
        """
        if "board" in options:
            board = Board.parse(options["board"], self._symbols)
        else:
            board = generate_board(random.Random(seed), self._spec)
        self._board = board
        self._search = None
        self._floor, self._targets, self._boxes, self._player = board.floor, board.targets, board.boxes, board.player
        self._layout_bytes = board.layout_bytes
        self._deltas = {"Up": -board.stride, "Down": board.stride, "Left": -1, "Right": 1}
        self._num_boxes = board.boxes.bit_count()
        self._num_on_target = (board.boxes & board.targets).bit_count()
        self._cells = board.drawn(self._symbols)
        places = [f"({cell // board.stride},{cell % board.stride})" for cell in range(board.height * board.stride)]
        self._places = places
        self._target_places = _listed("O", board.targets, places)
        self._describe()

    def play(self, text: str) -> Played:
        """Plays the action that the text names; a text without one leaves the board as it is."""
        on_target = self._num_on_target
        name = self._parser.parse(text)
        effective = name is not None and self._move(self._deltas[name])
        reward = self._step_reward + self._box_reward * (self._num_on_target - on_target)
        solved = self._num_on_target == self._num_boxes
        if solved:
            reward += self._solved_reward
        return Played(name, reward, effective, solved, solved)

    def observation(self) -> Observation:
        return [picture(self._drawn(self.config.tile_size))] if self.config.is_drawn else self._text

    def render(self) -> UInt8Array:
        """The position as a picture, shape [height, width, 3]."""
        return self._drawn()

    def _drawn(self, side: int = PEOPLE_SIDE) -> UInt8Array:
        first, kinds = self._first_board, list(SYMBOLS)
        cells = [cell_kind(n, first.floor, first.targets, self._boxes, self._player) for n in range(len(self._cells))]
        stride = first.stride
        rows = [cells[row * stride : row * stride + first.width] for row in range(first.height)]
        return draw_grid([[kinds[cell] for cell in row] for row in rows], TILES, side)

    @property
    def board(self) -> Board:
        """The position as it is now."""
        first = self._first_board
        return Board(first.height, first.width, first.floor, first.targets, self._boxes, self._player)

    def expert_actions(self) -> list[str]:
        """All actions that an optimal solution may play next.

        Empty when the board is solved, cannot be solved any more, or is too far from solved for the search.
        """
        distance = self.solution_length()
        if not distance:
            return []
        nearer = self._solver().levels[distance - 1]
        successors = ((name, self._successor(delta)) for name, delta in self._deltas.items())
        return [name for name, (boxes, player) in successors if nearer.get(boxes, 0) >> player & 1]

    def solution_length(self) -> int | None:
        """Fewest moves that solve the board from here; ``None`` under the conditions of ``expert_actions``."""
        return self._solver().distance(self._boxes, self._player)

    @property
    def _first_board(self) -> Board:
        if self._board is None:
            raise RuntimeError("no board yet: call reset() first")
        return self._board

    def _solver(self) -> BackwardSearch:
        board = self._first_board
        if self._search is None:
            self._search = BackwardSearch(board.floor, board.targets, board.stride)
        return self._search

    def _successor(self, delta: int) -> tuple[int, int]:
        """Boxes and player after a move by ``delta``; the same as now if it is blocked."""
        target = self._player + delta
        bit = 1 << target
        if not self._boxes & bit:
            return self._boxes, target if self._floor & bit else self._player
        beyond = bit << delta if delta > 0 else bit >> -delta
        if beyond & self._floor & ~self._boxes:
            return self._boxes ^ bit ^ beyond, target
        return self._boxes, self._player

    def _move(self, delta: int) -> bool:
        boxes, player = self._successor(delta)
        left = self._player
        if player == left:
            return False
        self._player = player
        self._redraw(left)
        self._redraw(player)
        if boxes != self._boxes:
            self._boxes = boxes
            self._num_on_target = (boxes & self._targets).bit_count()
            self._redraw(player + delta)
        self._describe()
        return True

    def _redraw(self, cell: int) -> None:
        kind = cell_kind(cell, self._floor, self._targets, self._boxes, self._player)
        self._cells[cell] = self._symbols[kind]

    def _describe(self) -> None:
        """Renews what is derived from the position: its text and its key."""
        text = "".join(self._cells)
        if self.config.show_coordinates:
            boxes = _listed("X", self._boxes, self._places)
            text = f"{text}\nP{self._places[self._player]}{boxes}{self._target_places}"
        self._text = text
        self._key = stable_hash(self._layout_bytes + b"%x:%d" % (self._boxes, self._player))


def _listed(letter: str, cells: int, places: list[str]) -> str:
    """``X(1,2)X(3,3)`` for the cells of a bit set, in reading order."""
    parts = []
    while cells:
        bit = cells & -cells
        cells ^= bit
        parts.append(letter + places[bit.bit_length() - 1])
    return "".join(parts)


def _instruction(vocabulary: Vocabulary | None) -> str:
    """The rules; without a vocabulary the board is a picture."""
    board = (
        "The picture shows the board: walls of grey bricks, targets as red rings, boxes as brown crates, which are "
        "green on a target, and you in blue."
        if vocabulary is None
        else f"The board's symbols are {vocabulary.legend}."
    )
    return (
        "You are the player in Sokoban. Walk one cell at a time and push every box on a target; a box moves only when "
        f"the cell behind it is free, and it cannot be pulled. {board} "
        f"Answer with one of the moves {', '.join(ACTIONS)}, like this: <answer>Up</answer>"
    )


def _crate(edge: str, face: str, plank: str) -> tuple[Shape, ...]:
    return (
        Rect(2.5, 2.5, 19, 19, edge, 2.5),
        Rect(4.5, 4.5, 15, 15, face, 1),
        Polygon(((4.5, 4.5), (7.5, 4.5), (19.5, 16.5), (19.5, 19.5), (16.5, 19.5), (4.5, 7.5)), plank),
        Polygon(((19.5, 4.5), (16.5, 4.5), (4.5, 16.5), (4.5, 19.5), (7.5, 19.5), (19.5, 7.5)), plank),
    )


def _bricks(mortar: str, brick: str) -> tuple[Shape, ...]:
    full, halves = ((0.5, 11), (12.5, 11)), ((0, 5.5), (6.5, 11), (18.5, 5.5))
    rows: tuple[tuple[float, tuple[tuple[float, float], ...]], ...] = ((0.5, full), (8.5, halves), (16.5, full))
    bricks = (Rect(x, y, width, 7, brick) for y, spans in rows for x, width in spans)
    return (Rect(0, 0, UNITS, UNITS, mortar), *bricks)


_FLOOR: tuple[Shape, ...] = (Rect(0, 0, UNITS, UNITS, "#d9cfb8"), Rect(0.5, 0.5, 23, 23, "#ece4d2", 1.5))

TILES: Mapping[str, tuple[Shape, ...]] = {
    "wall": _bricks("#3b4458", "#5d6982"),
    "floor": _FLOOR,
    "target": (*_FLOOR, Circle(12, 12, 6.5, "#d9574a"), Circle(12, 12, 4.3, "#ece4d2"), Circle(12, 12, 2.1, "#d9574a")),
    "box on target": (*_FLOOR, *_crate("#1f6b43", "#63c08a", "#3d9c67")),
    "box": (*_FLOOR, *_crate("#7b4c1f", "#cd9150", "#a96d33")),
    "player": (*_FLOOR, *PLAYER),
    "player on target": (*_FLOOR, Circle(12, 12, 11, "#d9574a"), Circle(12, 12, 8.8, "#f6d9d3"), *PLAYER),
}
"""The kinds of cell that ``sokoban_boards.SYMBOLS`` lists -> their shapes."""
