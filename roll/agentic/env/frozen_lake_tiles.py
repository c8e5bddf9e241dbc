"""The looks of the frozen lake."""

from __future__ import annotations

from collections.abc import Mapping

from roll.agentic.env.tiles import PLAYER, UNITS, Circle, Polygon, Rect, Shape

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
