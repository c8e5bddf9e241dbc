"""An episode as an animated GIF: picture, the model's text and the reward, turn by turn."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

from PIL import Image, ImageDraw, ImageFont

from roll.rollout.types import Frame, Trajectory

Font: TypeAlias = ImageFont.FreeTypeFont | ImageFont.ImageFont

MAX_PICTURES = 40
"""Of longer episodes, turns are left out evenly: the page has them all."""

_WIDTH = 420
_MARGIN = 18
_SCENE = 336  # most pixels of a scene's side
_LINE = 18
_TURN_MS, _FINAL_MS = 1100, 3000
_LINES, _COLUMNS = 4, 48
_COLORS = 128
_BACK, _PANEL, _INK, _DIM, _GOOD, _BAD = "#14171d", "#1f242d", "#e7e9ee", "#939baa", "#55c98a", "#f2705f"


@dataclass(frozen=True)
class _Scene:
    """Contents of one picture."""

    frame: Frame
    heading: str
    said: str
    left: str
    left_color: str
    right: str


def render_episode_gif(trajectory: Trajectory, path: Path) -> None:
    """Writes the animation, one picture per turn and a last one, held longer, with the outcome."""
    scenes = _scenes(trajectory)
    stride = -(-len(scenes) // MAX_PICTURES)
    scenes = [*scenes[:-1:stride], scenes[-1]]
    images = {frame: _decoded(frame) for frame in {scene.frame for scene in scenes} if isinstance(frame, bytes)}
    height = max((image.height for image in images.values()), default=12 * _LINE)
    # One palette for all pictures: with one each, still parts of the scene would flicker.
    strip = Image.new("RGB", (_WIDTH, _total_height(height) * len(scenes)), _BACK)
    for index, scene in enumerate(scenes):
        strip.paste(_draw(scene, images, height), (0, index * _total_height(height)))
    indexed = strip.quantize(_COLORS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    tops = range(0, strip.height, _total_height(height))
    pictures = [indexed.crop((0, top, _WIDTH, top + _total_height(height))) for top in tops]
    durations = [_TURN_MS] * (len(pictures) - 1) + [_FINAL_MS]
    pictures[0].save(path, format="GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0)


def _scenes(trajectory: Trajectory) -> list[_Scene]:
    score, scenes, total = 0.0, [], len(trajectory.turns)
    observations = [*(turn.observation for turn in trajectory.turns), trajectory.final_observation]
    frames = trajectory.frames or observations
    for number, turn in enumerate(trajectory.turns, start=1):
        score += turn.reward
        missing = "no valid action" if trajectory.knows_actions else ""
        action, color = (turn.action, _INK) if turn.action is not None else (missing, _BAD)
        penalty = f"  penalty {turn.penalty:+.2f}" if turn.penalty else ""
        reward = f"task {turn.task_reward:+.2f}{penalty}  score {score:+.2f}"
        scenes.append(_Scene(frames[number - 1], f"turn {number}/{total}", turn.text, action, color, reward))
    outcome, color = ("solved", _GOOD) if trajectory.success else ("not solved", _BAD)
    last_words = trajectory.turns[-1].text if trajectory.turns else ""
    end = _Scene(frames[-1], f"the end · {trajectory.end}", last_words, outcome, color, f"score {score:+.2f}")
    return [*scenes, end]


def _decoded(frame: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(frame)).convert("RGB")
    image.thumbnail((_SCENE, _SCENE))
    times = _SCENE // max(image.size)  # a small picture, such as a policy gets, keeps its pixels
    return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)


def _total_height(scene_height: int) -> int:
    return _MARGIN + 22 + scene_height + 12 + _LINE * _LINES + 16 + 46


def _draw(scene: _Scene, images: Mapping[bytes, Image.Image], height: int) -> Image.Image:
    small, large = _font(13), _font(17)
    top = _MARGIN + 22
    said_top = top + height + 12
    said_height = _LINE * _LINES + 16
    picture = Image.new("RGB", (_WIDTH, _total_height(height)), _BACK)
    pen = ImageDraw.Draw(picture)
    pen.text((_MARGIN, 12), scene.heading, _DIM, font=small)
    if isinstance(scene.frame, bytes):
        image = images[scene.frame]
        picture.paste(image, ((_WIDTH - image.width) // 2, top + (height - image.height) // 2))
    else:
        text = _clip(scene.frame, height // _LINE, _COLUMNS)
        pen.multiline_text((_MARGIN, top), text, _INK, font=_font(13, "DejaVuSansMono.ttf"), spacing=4)
    pen.rounded_rectangle((_MARGIN, said_top, _WIDTH - _MARGIN, said_top + said_height), 8, _PANEL)
    pen.multiline_text((_MARGIN + 12, said_top + 8), _clip(scene.said, _LINES, _COLUMNS), _INK, font=small, spacing=4)
    base = said_top + said_height + 12
    pen.text((_MARGIN, base), _clip(scene.left, 1, 20), scene.left_color, font=large)
    pen.text((_WIDTH - _MARGIN - pen.textlength(scene.right, font=small), base + 3), scene.right, _DIM, font=small)
    return picture


def _clip(text: str, lines: int, columns: int) -> str:
    """Wraps, drops what a font cannot draw, and marks with an ellipsis what does not fit."""
    shown = text[: 2 * lines * columns]
    printable = "".join(c if c.isprintable() or c == "\n" else "·" for c in shown.replace("\t", " "))
    wrapped = [piece for line in printable.strip("\n").split("\n") for piece in _wrapped(line, columns)]
    if len(wrapped) > lines:
        wrapped = [*wrapped[: lines - 1], wrapped[lines - 1][: columns - 1] + "…"]
    return "\n".join(wrapped)


def _wrapped(line: str, columns: int) -> list[str]:
    """Short lines stay as they are: blanks draw pictures in text worlds."""
    return [line] if len(line) <= columns else textwrap.wrap(line, columns) or [""]


@cache
def _font(size: int, name: str = "DejaVuSans.ttf") -> Font:
    try:
        return ImageFont.truetype(name, size)  # where the system has it: more scripts than Pillow's own
    except OSError:
        return ImageFont.load_default(size)
