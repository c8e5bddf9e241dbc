"""The looks of Sokoban."""

from __future__ import annotations

from collections.abc import Mapping

from roll.agentic.env.tiles import PLAYER, UNITS, Circle, Polygon, Rect, Shape


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
