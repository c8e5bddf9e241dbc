"""An episode as an animated GIF: board, the model's words and the reward, turn by turn."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from PIL import Image, ImageDraw, ImageFont

from roll.report.board import TILE, TILES, Board, Circle, Rect, Shape, find_board
from roll.rollout.types import Trajectory

Font: TypeAlias = ImageFont.FreeTypeFont | ImageFont.ImageFont

_WIDTH = 420
_MARGIN = 18
_SCALE = 2  # tiles are drawn twice as large and shrunk: smooth edges
_TURN_MS, _FINAL_MS = 1100, 3000
_LINES, _COLUMNS = 4, 48
_BACK, _PANEL, _INK, _DIM, _GOOD, _BAD = "#14171d", "#1f242d", "#e7e9ee", "#939baa", "#55c98a", "#f2705f"


@dataclass(frozen=True)
class _Frame:
    """What one picture shows."""

    observation: str
    heading: str
    said: str
    left: str
    left_color: str
    right: str


def render_episode_gif(trajectory: Trajectory, path: Path) -> None:
    """Writes the animation, one picture per turn and a last one, held longer, with the outcome."""
    frames = _frames(trajectory)
    boards = [find_board(frame.observation) for frame in frames]
    board_height = max(_board_height(board) for board in boards)
    tiles: dict[tuple[str, int], Image.Image] = {}
    pictures = [_draw(frame, board, board_height, tiles) for frame, board in zip(frames, boards, strict=True)]
    durations = [_TURN_MS] * (len(pictures) - 1) + [_FINAL_MS]
    palette = _palette(pictures)
    indexed = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    indexed[0].save(path, format="GIF", save_all=True, append_images=indexed[1:], duration=durations, loop=0)


def _palette(pictures: list[Image.Image]) -> Image.Image:
    """One palette for all pictures: with one each, still parts of the board would flicker."""
    chosen = [*pictures[:: max(1, len(pictures) // 6)], pictures[-1]]
    height = chosen[0].height
    sample = Image.new("RGB", (_WIDTH, height * len(chosen)))
    for index, picture in enumerate(chosen):
        sample.paste(picture, (0, index * height))
    return sample.quantize(colors=200, method=Image.Quantize.MEDIANCUT)


def _frames(trajectory: Trajectory) -> list[_Frame]:
    score, frames, total = 0.0, [], len(trajectory.turns)
    for number, turn in enumerate(trajectory.turns, start=1):
        score += turn.reward
        action, color = (turn.action, _INK) if turn.action is not None else ("no valid action", _BAD)
        penalty = f"  penalty {turn.penalty:+.2f}" if turn.penalty else ""
        reward = f"task {turn.task_reward:+.2f}{penalty}  score {score:+.2f}"
        frames.append(_Frame(turn.observation, f"turn {number}/{total}", turn.text, action, color, reward))
    outcome, color = ("solved", _GOOD) if trajectory.success else ("not solved", _BAD)
    last_words = trajectory.turns[-1].text if trajectory.turns else ""
    end = _Frame(
        trajectory.final_observation, f"the end · {trajectory.end}", last_words, outcome, color, f"score {score:+.2f}"
    )
    return [*frames, end]


def _draw(
    frame: _Frame, board: Board | None, board_height: int, tiles: dict[tuple[str, int], Image.Image]
) -> Image.Image:
    small, large = _font(13), _font(17)
    top = _MARGIN + 22
    said_top = top + board_height + 12
    said_height = 18 * _LINES + 16
    picture = Image.new("RGB", (_WIDTH, said_top + said_height + 46), _BACK)
    pen = ImageDraw.Draw(picture)
    pen.text((_MARGIN, 12), frame.heading, _DIM, font=small)
    if board is not None:
        _paste_board(picture, board, top, board_height, tiles)
    else:
        text = _clip(frame.observation, board_height // 18, _COLUMNS)
        pen.multiline_text((_MARGIN, top), text, _INK, font=small, spacing=4)
    pen.rounded_rectangle((_MARGIN, said_top, _WIDTH - _MARGIN, said_top + said_height), 8, _PANEL)
    pen.multiline_text((_MARGIN + 12, said_top + 8), _clip(frame.said, _LINES, _COLUMNS), _INK, font=small, spacing=4)
    base = said_top + said_height + 12
    pen.text((_MARGIN, base), _clip(frame.left, 1, 20), frame.left_color, font=large)
    pen.text((_WIDTH - _MARGIN - pen.textlength(frame.right, font=small), base + 3), frame.right, _DIM, font=small)
    return picture


def _paste_board(
    picture: Image.Image, board: Board, top: int, height: int, tiles: dict[tuple[str, int], Image.Image]
) -> None:
    rows, columns = board.size
    side = _tile_side(board)
    left = (_WIDTH - side * columns) // 2
    top += (height - side * rows) // 2
    for y, row in enumerate(board.cells):
        for x, kind in enumerate(row):
            if (kind, side) not in tiles:
                tiles[kind, side] = _tile(kind, side)
            picture.paste(tiles[kind, side], (left + x * side, top + y * side))


def _tile(kind: str, side: int) -> Image.Image:
    image = Image.new("RGB", (side * _SCALE, side * _SCALE))
    pen = ImageDraw.Draw(image)
    unit = side * _SCALE / TILE
    for shape in TILES[kind]:
        _draw_shape(pen, shape, unit)
    return image.resize((side, side), Image.Resampling.LANCZOS)


def _draw_shape(pen: ImageDraw.ImageDraw, shape: Shape, unit: float) -> None:
    if isinstance(shape, Rect):
        corner = ((shape.x + shape.width) * unit - 1, (shape.y + shape.height) * unit - 1)
        pen.rounded_rectangle((shape.x * unit, shape.y * unit, *corner), shape.radius * unit, shape.color)
    elif isinstance(shape, Circle):
        low = ((shape.x - shape.radius) * unit, (shape.y - shape.radius) * unit)
        high = ((shape.x + shape.radius) * unit - 1, (shape.y + shape.radius) * unit - 1)
        pen.ellipse((*low, *high), shape.color)
    else:
        pen.polygon([(x * unit, y * unit) for x, y in shape.points], shape.color)


def _tile_side(board: Board) -> int:
    return max(8, min(56, (_WIDTH - 2 * _MARGIN) // max(board.size)))


def _board_height(board: Board | None) -> int:
    return 18 * 12 if board is None else _tile_side(board) * board.size[0]


def _clip(text: str, lines: int, columns: int) -> str:
    """Wraps, drops what a font cannot draw, and marks with an ellipsis what does not fit."""
    text = text[: 2 * lines * columns + lines]
    printable = "".join(c if c.isprintable() or c == "\n" else "·" for c in text.replace("\t", " "))
    wrapped = [piece for line in printable.strip("\n").split("\n") for piece in textwrap.wrap(line, columns) or [""]]
    if len(wrapped) > lines:
        wrapped = [*wrapped[: lines - 1], wrapped[lines - 1][: columns - 1] + "…"]
    return "\n".join(wrapped)


def _font(size: int) -> Font:
    try:
        return ImageFont.truetype("DejaVuSans.ttf", size)  # where the system has it: more scripts than Pillow's own
    except OSError:
        return ImageFont.load_default(size)
