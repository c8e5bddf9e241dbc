"""Grid worlds: the symbols that draw one, and its picture, each kind of cell a list of shapes on a 24 × 24 tile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from pydantic import Field

from roll.agentic.env.game import ActionEnvConfig
from roll.configs.problems import ConfigErrors, ConfigProblem
from roll.data.columns import UInt8Array

if TYPE_CHECKING:
    from PIL import ImageDraw

PEOPLE_SIDE = 48
"""Pixels of a cell's side in a picture for people."""
UNITS = 24
"""Side of a tile in the units of its shapes."""


class GridConfig(ActionEnvConfig):
    """Adds the keys of grid worlds that can be shown as pictures."""

    render_mode: Literal["text", "rgb_array"] = Field(
        "text", description="What the policy gets: the grid as text, or, with rgb_array, as a picture."
    )
    tile_size: int = Field(32, ge=8, le=96, description="Pixels of a cell's side in the picture that the policy gets.")
    show_coordinates: bool = False

    @property
    def is_drawn(self) -> bool:
        """The policy gets pictures."""
        return self.render_mode == "rgb_array"

    def problems(self) -> Iterator[ConfigProblem]:
        """A line of text where there is none."""
        yield from super().problems()
        if self.is_drawn and self.show_coordinates:
            expected = "false with render_mode rgb_array, of which the policy gets the picture alone"
            yield self.problem("show_coordinates", expected, "render_mode")


_SCALE = 3  # tiles are drawn larger and shrunk, small ones more so: smooth edges


@dataclass(frozen=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    color: str
    radius: float = 0

    def draw(self, pen: ImageDraw.ImageDraw, unit: float) -> None:
        corner = ((self.x + self.width) * unit - 1, (self.y + self.height) * unit - 1)
        pen.rounded_rectangle((self.x * unit, self.y * unit, *corner), self.radius * unit, self.color)


@dataclass(frozen=True)
class Circle:
    x: float
    y: float
    radius: float
    color: str

    def draw(self, pen: ImageDraw.ImageDraw, unit: float) -> None:
        low = ((self.x - self.radius) * unit, (self.y - self.radius) * unit)
        high = ((self.x + self.radius) * unit - 1, (self.y + self.radius) * unit - 1)
        pen.ellipse((*low, *high), self.color)


@dataclass(frozen=True)
class Polygon:
    points: tuple[tuple[float, float], ...]
    color: str

    def draw(self, pen: ImageDraw.ImageDraw, unit: float) -> None:
        pen.polygon([(x * unit, y * unit) for x, y in self.points], self.color)


Shape: TypeAlias = Rect | Circle | Polygon

PLAYER: tuple[Shape, ...] = (
    Rect(5.5, 12, 13, 9.5, "#2563c9", 4.5),
    Circle(12, 8.5, 5.6, "#1b2a4a"),
    Circle(12, 9.3, 4.9, "#f3c79b"),
    Circle(10, 9.3, 0.9, "#1b2a4a"),
    Circle(14, 9.3, 0.9, "#1b2a4a"),
)


def draw_grid(
    cells: Sequence[Sequence[str]], tiles: Mapping[str, tuple[Shape, ...]], side: int = PEOPLE_SIDE
) -> UInt8Array:
    """A picture of a grid world, shape [rows · side, columns · side, 3].

    Args:
        cells: kinds of cells (keys of ``tiles``), row by row.
        tiles: kind of cell -> its shapes, back to front.
        side: of a tile, in pixels.
    """
    drawn = {kind: _tile(tiles[kind], side) for kind in {kind for row in cells for kind in row}}
    return np.concatenate([np.concatenate([drawn[kind] for kind in row], axis=1) for row in cells], axis=0)


@cache
def _tile(shapes: tuple[Shape, ...], side: int) -> UInt8Array:
    from PIL import Image, ImageDraw  # which play does not need

    scale = max(_SCALE, -(-_SCALE * UNITS // side))
    image = Image.new("RGB", (side * scale, side * scale))
    pen = ImageDraw.Draw(image)
    for shape in shapes:
        shape.draw(pen, side * scale / UNITS)
    return np.asarray(image.resize((side, side), Image.Resampling.LANCZOS))


@dataclass(frozen=True)
class Vocabulary:
    """One symbol per kind of cell."""

    symbols: tuple[str, ...]
    """In the order of the kinds (the codes of ``grid_lookup``)."""
    legend: str
    """``#: wall, _: floor, …`` for the instruction."""


def build_vocabulary(
    defaults: Mapping[str, str], grid_lookup: Mapping[int, str] | None, grid_vocab: Mapping[str, str] | None
) -> Vocabulary:
    """Resolves the two configuration keys that change symbols.

    Args:
        defaults: kind of cell -> symbol, in the order of the codes.
        grid_lookup: code -> symbol; codes left out keep their default.
        grid_vocab: symbol -> meaning. Beside ``grid_lookup`` it only words the legend; alone it also chooses the
            symbols, and then each meaning must be one of ``defaults``'s kinds (``empty`` is understood as ``floor``).

    Raises:
        ConfigErrors: an unknown code, kind or symbol, or symbols that are not distinct single characters.
    """
    kinds = list(defaults)
    symbols = dict(defaults)
    for code, symbol in (grid_lookup or {}).items():
        if not 0 <= code < len(kinds):
            raise _refused("grid_lookup", code, f"codes from 0 to {len(kinds) - 1} ({', '.join(kinds)})")
        symbols[kinds[code]] = symbol
    if grid_vocab and not grid_lookup:
        for symbol, meaning in grid_vocab.items():
            symbols[_kind(meaning, kinds)] = symbol
    if len(set(symbols.values())) < len(kinds) or any(len(s) != 1 or s.isspace() for s in symbols.values()):
        key = "grid_lookup" if grid_lookup else "grid_vocab"
        raise _refused(key, list(symbols.values()), "distinct single visible characters")
    foreign = set(grid_vocab or {}) - set(symbols.values())
    if foreign:
        raise _refused("grid_vocab", sorted(foreign), f"only symbols of {list(symbols.values())}")
    meanings = {symbol: kind for kind, symbol in symbols.items()} | dict(grid_vocab or {})
    return Vocabulary(tuple(symbols.values()), ", ".join(f"{symbol}: {text}" for symbol, text in meanings.items()))


def vocabulary_problems(
    defaults: Mapping[str, str], grid_lookup: Mapping[int, str] | None, grid_vocab: Mapping[str, str] | None
) -> Sequence[ConfigProblem]:
    """Reasons why ``build_vocabulary`` would refuse."""
    try:
        build_vocabulary(defaults, grid_lookup, grid_vocab)
    except ConfigErrors as errors:
        return errors.problems
    return ()


def _refused(key: str, seen: object, expected: str) -> ConfigErrors:
    return ConfigErrors([ConfigProblem(key, seen, expected)])


def _kind(meaning: str, kinds: list[str]) -> str:
    kind = "floor" if meaning == "empty" else meaning
    if kind not in kinds:
        raise _refused("grid_vocab", meaning, f"one of {', '.join(kinds)}")
    return kind
