"""Sokoban boards with a known optimal solution length, and the exact search that finds it.

Sets of cells are bits of one integer: cell ``row * stride + column`` with ``stride = width + 1``, the extra column
being the line break of the drawn board. The border is wall, so no shift ever leaves the board.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from roll.agentic.env.base import Split, in_split, stable_hash

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
"""Kinds of cell, in the order of ``grid_lookup``'s codes."""

SYMBOLS = {
    "wall": "#",
    "floor": "_",
    "target": "O",
    "box on target": "√",
    "box": "X",
    "player": "P",
    "player on target": "S",
}

_TOTAL_BUDGET = 100_000
"""Box arrangements expanded before a search, or the making of one board, gives up: about a quarter of a second."""

_LAYOUT_BUDGET = 20_000
"""The share of it that one layout may use up."""

_PATIENCE = 1_000
"""Cost of layouts too small for the drawn length after which a shorter one is drawn."""

_LAYOUT_COST = 10
"""Cost of starting a layout, in expanded arrangements."""

_PICKS_PER_LAYOUT = 16


@dataclass(frozen=True)
class Board:
    """A position: walls, targets, boxes and the player."""

    height: int
    width: int
    floor: int
    """Cells without a wall, as bits."""
    targets: int
    boxes: int
    player: int
    """A cell's number."""

    @property
    def stride(self) -> int:
        """Distance between a cell and the one below it."""
        return self.width + 1

    @cached_property
    def hash(self) -> str:
        """Names the position; the same in every process."""
        return stable_hash(self.layout_bytes + b"%x:%d" % (self.boxes, self.player))

    @cached_property
    def layout_bytes(self) -> bytes:
        """Parts that do not change during an episode, as input to the hash."""
        return b"%d:%d:%x:%x:" % (self.height, self.width, self.floor, self.targets)

    def drawn(self, symbols: Sequence[str]) -> list[str]:
        """One character per cell number, line breaks included."""
        floor, targets, boxes, player = self.floor, self.targets, self.boxes, self.player
        cells = [symbols[cell_kind(n, floor, targets, boxes, player)] for n in range(self.height * self.stride)]
        cells[self.width :: self.stride] = ["\n"] * self.height
        return cells[:-1]

    @classmethod
    def parse(cls, text: str, symbols: Sequence[str] = tuple(SYMBOLS.values())) -> Board:
        """Reads a drawn board.

        Raises:
            ValueError: not an unsolved rectangle with a wall around it, one player, and as many boxes as targets.
        """
        rows = text.strip().split("\n")
        height, width = len(rows), len(rows[0])
        kinds: dict[int, int] = {}
        for row, line in enumerate(rows):
            for column, symbol in enumerate(line):
                if symbol not in symbols:
                    raise ValueError(f"board: got {symbol!r} in row {row}, expected one of {' '.join(symbols)}")
                kinds[row * (width + 1) + column] = list(symbols).index(symbol)
        if any(len(line) != width for line in rows):
            raise ValueError(f"board: got rows of {sorted({len(line) for line in rows})} cells, expected equal lengths")

        def bits(*wanted: int) -> int:
            return sum(1 << cell for cell, kind in kinds.items() if kind in wanted)

        floor, player = bits(*range(FLOOR, PLAYER_ON_TARGET + 1)), bits(PLAYER, PLAYER_ON_TARGET)
        targets, boxes = bits(TARGET, BOX_ON_TARGET, PLAYER_ON_TARGET), bits(BOX, BOX_ON_TARGET)
        if floor & ~_cells_mask(_inner_cells(height, width)):
            raise ValueError("board: got an opening in the border, expected walls all around")
        if player.bit_count() != 1 or not boxes or boxes.bit_count() != targets.bit_count():
            raise ValueError(
                f"board: got {player.bit_count()} players, {boxes.bit_count()} boxes and {targets.bit_count()} "
                "targets, expected one player and as many boxes as targets, at least one"
            )
        if boxes == targets:
            raise ValueError("board: got every box on a target, expected a board that is not solved yet")
        return cls(height, width, floor, targets, boxes, player.bit_length() - 1)


def cell_kind(cell: int, floor: int, targets: int, boxes: int, player: int) -> int:
    """Kind of the cell, one of seven; the sets are bits."""
    bit = 1 << cell
    if cell == player:
        return PLAYER_ON_TARGET if targets & bit else PLAYER
    if boxes & bit:
        return BOX_ON_TARGET if targets & bit else BOX
    if targets & bit:
        return TARGET
    return FLOOR if floor & bit else WALL


class BackwardSearch:
    """For one layout, every position by its distance (in moves) from the solved one: breadth-first, backwards.

    A level maps each arrangement of boxes to the set of players' cells first reached there, so that one step of the
    search handles all players' cells of an arrangement at once. Levels are made when they are asked for.

    Args:
        floor: cells without a wall, as bits.
        targets: as bits.
        stride: distance between a cell and the one below it.
        budget: expanded arrangements after which the search stops.
    """

    def __init__(self, floor: int, targets: int, stride: int, budget: int = _TOTAL_BUDGET) -> None:
        self.floor = floor
        self.budget = budget
        self.expanded = 0
        self._exhausted = False
        self._shifts = (1, stride)
        self._seen = {targets: floor & ~targets}
        self.levels = [dict(self._seen)]

    def extend(self, depth: int) -> int:
        """Searches up to ``depth`` moves; returns the deepest complete level that is not empty."""
        while len(self.levels) <= depth and not self._exhausted:
            level = self._next_level() if self.expanded + len(self.levels[-1]) <= self.budget else {}
            if level:
                self.levels.append(level)
            else:
                self._exhausted = True
        return min(depth, len(self.levels) - 1)

    def distance(self, boxes: int, player: int) -> int | None:
        """Fewest moves that solve the position; ``None`` if none do, or if the budget ends first."""
        bit = 1 << player
        while not self._seen.get(boxes, 0) & bit:
            depth = len(self.levels)
            if self.extend(depth) < depth:
                return None
        return next(depth for depth, level in enumerate(self.levels) if level.get(boxes, 0) & bit)

    def _next_level(self) -> dict[int, int]:
        """The predecessors of the last level that no earlier level holds."""
        level: dict[int, int] = {}
        small, large = self._shifts
        for boxes, players in self.levels[-1].items():
            open_cells = self.floor & ~boxes
            walked = (players << small | players >> small | players << large | players >> large) & open_cells
            self._add(level, boxes, walked)
            # The reverse of a push: the player steps away from a box, which follows to the cell the player leaves.
            for shift in self._shifts:
                pulling = players & (boxes >> shift) & (open_cells << shift)
                while pulling:
                    bit = pulling & -pulling
                    pulling ^= bit
                    self._add(level, boxes ^ bit ^ (bit << shift), bit >> shift)
                pulling = players & (boxes << shift) & (open_cells >> shift)
                while pulling:
                    bit = pulling & -pulling
                    pulling ^= bit
                    self._add(level, boxes ^ bit ^ (bit >> shift), bit << shift)
        self.expanded += len(self.levels[-1])
        return level

    def _add(self, level: dict[int, int], boxes: int, players: int) -> None:
        seen = self._seen.get(boxes, 0)
        new = players & ~seen
        if new:
            self._seen[boxes] = seen | new
            level[boxes] = level.get(boxes, 0) | new


@dataclass(frozen=True)
class BoardSpec:
    """Demands on a generated board."""

    height: int
    width: int
    num_boxes: int
    num_walls: int
    """Most walls inside the border; each board draws its number."""
    min_solution: int
    max_solution: int
    """Bounds of the optimal solution's length, in moves."""
    split: Split = "all"
    holdout_fraction: float = 0.1
    """Share of all positions that may be boards of the eval split."""


def generate_board(rng: random.Random, spec: BoardSpec) -> Board:
    """Draws a length, walls and targets, then a position at that distance from the solved one.

    The length is uniform in the asked range, in every split, unless hardly any layout reaches the drawn one; then it is
    drawn again among those that a layout reaches. With several boxes, only positions with the most boxes off their
    targets are drawn.

    Raises:
        ValueError: no such board was found within the search budget.
    """
    inner = _inner_cells(spec.height, spec.width)
    room = _cells_mask(inner)
    wanted = rng.randint(spec.min_solution, spec.max_solution)
    budget, patience = _TOTAL_BUDGET, _PATIENCE
    while budget > 0:
        # The larger of two draws: there are few rooms with few walls, and their boards would keep coming back.
        num_walls = max(rng.randint(0, spec.num_walls), rng.randint(0, spec.num_walls))
        cells = rng.sample(inner, num_walls + spec.num_boxes)
        targets = _cells_mask(cells[num_walls:])
        search = BackwardSearch(room & ~_cells_mask(cells[:num_walls]), targets, spec.width + 1, _LAYOUT_BUDGET)
        deepest = search.extend(wanted)
        cost = _LAYOUT_COST + search.expanded
        budget -= cost
        if deepest < wanted:
            patience -= cost
            if patience > 0 or deepest < spec.min_solution:
                continue
            wanted, patience = rng.randint(spec.min_solution, deepest), _PATIENCE
        # The length stays for the next layout if no position here is in the split: another draw would favour lengths
        # of which there are many positions.
        board = _draw_position(rng, spec, search, targets, wanted)
        if board is not None:
            return board
    raise ValueError(
        f"no {spec.height}x{spec.width} board with num_boxes={spec.num_boxes}, num_walls={spec.num_walls} and "
        f"split={spec.split!r} found whose optimal solution has min_solution={spec.min_solution} to "
        f"max_solution={spec.max_solution} moves; lower min_solution, or change the room"
    )


def _draw_position(
    rng: random.Random, spec: BoardSpec, search: BackwardSearch, targets: int, distance: int
) -> Board | None:
    """A position of the split at the distance; ``None`` if some draws find none."""
    level = search.levels[distance]
    fewest = min((boxes & targets).bit_count() for boxes in level)
    candidates = [(boxes, players) for boxes, players in level.items() if (boxes & targets).bit_count() == fewest]
    total = sum(players.bit_count() for _, players in candidates)
    for _ in range(_PICKS_PER_LAYOUT):
        boxes, player = _nth_position(candidates, rng.randrange(total))
        board = Board(spec.height, spec.width, search.floor, targets, boxes, player)
        if in_split(board.hash, spec.split, spec.holdout_fraction):
            return board
    return None


def _nth_position(candidates: list[tuple[int, int]], index: int) -> tuple[int, int]:
    for boxes, players in candidates:
        count = players.bit_count()
        if index < count:
            for _ in range(index):
                players &= players - 1
            return boxes, (players & -players).bit_length() - 1
        index -= count
    raise AssertionError("index beyond the candidates")


def _inner_cells(height: int, width: int) -> list[int]:
    return [row * (width + 1) + column for row in range(1, height - 1) for column in range(1, width - 1)]


def _cells_mask(cells: Sequence[int]) -> int:
    return sum(1 << cell for cell in cells)
