"""Pictures of grid worlds: each kind of cell is a list of shapes on a 24 × 24 tile, drawn with Pillow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageDraw

from roll.data.columns import UInt8Array

UNITS = 24
"""Side of a tile in the units of its shapes."""

_SCALE = 3  # tiles are drawn larger and shrunk: smooth edges


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


def draw_grid(cells: Sequence[Sequence[str]], tiles: Mapping[str, tuple[Shape, ...]], side: int = 48) -> UInt8Array:
    """A picture of a grid world, shape [rows · side, columns · side, 3].

    Args:
        cells: kinds of cells (keys of ``tiles``), row by row.
        tiles: kind of cell -> its shapes, back to front.
        side: of a tile, in pixels.
    """
    return np.concatenate([np.concatenate([_tile(tiles[kind], side) for kind in row], axis=1) for row in cells], axis=0)


@cache
def _tile(shapes: tuple[Shape, ...], side: int) -> UInt8Array:
    image = Image.new("RGB", (side * _SCALE, side * _SCALE))
    pen = ImageDraw.Draw(image)
    for shape in shapes:
        shape.draw(pen, side * _SCALE / UNITS)
    return np.asarray(image.resize((side, side), Image.Resampling.LANCZOS))
