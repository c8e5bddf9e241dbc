"""Finds the board in an environment's text and says how its cells look.

Each kind of cell is a list of shapes on a 24 × 24 tile, drawn alike as SVG (the HTML page) and with Pillow (the GIF).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

TILE = 24
"""Side of a tile in its own units."""

_BLEED = TILE + 0.5
"""Grounds reach under the next tile, so that no seam shows between the two."""

_GLYPHS = frozenset("#_OX√PSGFH")
_SMALLEST = 3


@dataclass(frozen=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    color: str
    radius: float = 0


@dataclass(frozen=True)
class Circle:
    x: float
    y: float
    radius: float
    color: str


@dataclass(frozen=True)
class Polygon:
    points: tuple[tuple[float, float], ...]
    color: str


Shape: TypeAlias = Rect | Circle | Polygon


@dataclass(frozen=True)
class Board:
    """A rectangle of cells found in a text."""

    cells: tuple[tuple[str, ...], ...]
    """Kinds of cells (keys of ``TILES``), row by row."""
    before: str
    """The text above the board."""
    after: str
    """The text below it."""

    @property
    def size(self) -> tuple[int, int]:
        """(rows, columns)."""
        return len(self.cells), len(self.cells[0])


def find_board(text: str) -> Board | None:
    """The last block of at least 3 lines of equal length, at least 3 wide, made of board symbols only.

    Blanks between the symbols are allowed. Walls make it a Sokoban board, no walls a frozen lake: the two games use
    the same letters for different things.
    """
    lines = text.split("\n")
    rows = [_row(line) for line in lines]
    end = len(rows)
    while end > 0:
        start = end - 1
        while start > 0 and rows[start] and len(rows[start - 1]) == len(rows[start]):
            start -= 1
        block = rows[start:end]
        if len(block) >= _SMALLEST and len(block[0]) >= _SMALLEST and len(set("".join(block))) > 1:
            kinds = SOKOBAN if any("#" in row for row in block) else FROZEN_LAKE
            cells = tuple(tuple(kinds[glyph] for glyph in row) for row in block)
            return Board(cells, "\n".join(lines[:start]).strip(), "\n".join(lines[end:]).strip())
        end = start
    return None


def _row(line: str) -> str:
    """The line's symbols, blanks removed; empty when it is no row of a board."""
    symbols = "".join(line.split())
    return symbols if set(symbols) <= _GLYPHS else ""


SOKOBAN: Mapping[str, str] = MappingProxyType(
    {
        "#": "wall",
        "_": "floor",
        "O": "target",
        "X": "box",
        "√": "box_on_target",
        "P": "player",
        "S": "player_on_target",
        "G": "target",
        "F": "floor",
        "H": "floor",
    }
)
FROZEN_LAKE: Mapping[str, str] = MappingProxyType(
    {
        "#": "wall",
        "_": "ice",
        "F": "ice",
        "S": "ice",
        "O": "hole",
        "H": "hole",
        "G": "goal",
        "P": "skater",
        "X": "fallen",
        "√": "arrived",
    }
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
    return (Rect(0, 0, _BLEED, _BLEED, mortar), *bricks)


_FLOOR: tuple[Shape, ...] = (Rect(0, 0, _BLEED, _BLEED, "#d9cfb8"), Rect(0.5, 0.5, 23, 23, "#ece4d2", 1.5))
_TARGET = (*_FLOOR, Circle(12, 12, 6.5, "#d9574a"), Circle(12, 12, 4.3, "#ece4d2"), Circle(12, 12, 2.1, "#d9574a"))
_PLAYER: tuple[Shape, ...] = (
    Rect(5.5, 12, 13, 9.5, "#2563c9", 4.5),
    Circle(12, 8.5, 5.6, "#1b2a4a"),
    Circle(12, 9.3, 4.9, "#f3c79b"),
    Circle(10, 9.3, 0.9, "#1b2a4a"),
    Circle(14, 9.3, 0.9, "#1b2a4a"),
)
_ICE: tuple[Shape, ...] = (
    Rect(0, 0, _BLEED, _BLEED, "#b5d8ec"),
    Rect(0.5, 0.5, 23, 23, "#d6ecf8", 1.5),
    Polygon(((4, 10), (10, 4), (12, 4), (4, 12)), "#eef8fd"),
    Polygon(((13, 20), (20, 13), (20, 15), (15, 20)), "#eef8fd"),
)
_HOLE = (*_ICE, Circle(12, 12, 9, "#6f9fbe"), Circle(12, 12.8, 7.8, "#16324a"))
_GOAL = (*_ICE, Rect(7, 3.5, 2, 17.5, "#6b4a2b", 1), Polygon(((9, 4), (20, 8), (9, 12)), "#d9574a"))

TILES: Mapping[str, tuple[Shape, ...]] = MappingProxyType(
    {
        "wall": _bricks("#3b4458", "#5d6982"),
        "floor": _FLOOR,
        "target": _TARGET,
        "box": (*_FLOOR, *_crate("#7b4c1f", "#cd9150", "#a96d33")),
        "box_on_target": (*_FLOOR, *_crate("#1f6b43", "#63c08a", "#3d9c67")),
        "player": (*_FLOOR, *_PLAYER),
        "player_on_target": (*_FLOOR, Circle(12, 12, 11, "#d9574a"), Circle(12, 12, 8.8, "#f6d9d3"), *_PLAYER),
        "ice": _ICE,
        "hole": _HOLE,
        "goal": _GOAL,
        "skater": (*_ICE, *_PLAYER),
        "fallen": (*_HOLE, Circle(12, 13, 4.9, "#f3c79b"), Rect(5, 14, 14, 6, "#16324a", 3)),
        "arrived": (*_GOAL, *_PLAYER),
    }
)
"""Kind of cell → its shapes, back to front."""


def tile_svg(kind: str) -> str:
    """The shapes of a cell as SVG elements."""
    return "".join(_shape_svg(shape) for shape in TILES[kind])


def _shape_svg(shape: Shape) -> str:
    if isinstance(shape, Rect):
        rounding = f' rx="{shape.radius:g}"' if shape.radius else ""
        return (
            f'<rect x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}"{rounding} '
            f'fill="{shape.color}"/>'
        )
    if isinstance(shape, Circle):
        return f'<circle cx="{shape.x:g}" cy="{shape.y:g}" r="{shape.radius:g}" fill="{shape.color}"/>'
    points = " ".join(f"{x:g},{y:g}" for x, y in shape.points)
    return f'<polygon points="{points}" fill="{shape.color}"/>'
