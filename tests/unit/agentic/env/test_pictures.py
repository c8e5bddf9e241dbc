"""Every environment of the library can be shown to a person."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

import roll.agentic.env as envs
from roll.agentic.env import frozen_lake, sokoban, sokoban_boards
from roll.agentic.env.grid import draw_grid
from roll.rollout.env_runner import checked_frame

CORRIDOR = {"env_id": "tests.support.third_party_envs:Corridor-v0", "success_return": 1}


def picture(env: Any) -> np.ndarray:
    frame = checked_frame(env)
    assert isinstance(frame, bytes)
    return np.asarray(Image.open(io.BytesIO(frame)).convert("RGB")).astype(int)


@pytest.mark.parametrize(
    ("tiles", "symbols"),
    [(sokoban.TILES, sokoban_boards.SYMBOLS), (frozen_lake.TILES, frozen_lake.SYMBOLS)],
)
def test_every_kind_of_cell_looks_different(tiles: Any, symbols: Any) -> None:
    assert set(tiles) == set(symbols)
    drawn = [draw_grid([[kind]], tiles, side=24) for kind in symbols]
    assert all(tile.shape == (24, 24, 3) and tile.dtype == np.uint8 for tile in drawn)
    assert len({tile.tobytes() for tile in drawn}) == len(drawn)


@pytest.mark.parametrize(("env_type", "rows"), [("sokoban", 6), ("frozen_lake", 4)])
def test_a_grid_world_is_drawn_cell_by_cell_as_its_text_says(env_type: str, rows: int) -> None:
    env = envs.make(env_type)
    text, _ = env.reset(seed=3)
    for action in ("Up", "Down", "Left", "Right"):
        tiles = {}
        view = env.render()
        assert view.shape == (48 * rows, 48 * rows, 3)
        for y, line in enumerate(text.split("\n")):
            for x, symbol in enumerate(line):
                cell = view[48 * y : 48 * y + 48, 48 * x : 48 * x + 48].tobytes()
                assert tiles.setdefault(symbol, cell) == cell, "one look per symbol"
        assert len(set(tiles.values())) == len(tiles)
        text, _, terminated, truncated, _ = env.step(f"<answer>{action}</answer>")
        if terminated or truncated:
            break


def test_a_recorded_picture_is_small_and_true_to_the_drawing() -> None:
    env = envs.make("sokoban")
    env.reset(seed=1)
    frame = checked_frame(env)
    assert isinstance(frame, bytes) and len(frame) < 12_000
    assert np.abs(picture(env) - env.render().astype(int)).mean() < 6
    assert checked_frame(env) is frame, "an equal picture is shared"


def test_a_gymnasium_environment_brings_its_own_picture() -> None:
    env = envs.make("gymnasium", **CORRIDOR, renderer="values")
    env.reset(seed=0)
    before = picture(env)
    env.step("<answer>1</answer>")
    assert before.shape == (20, 100, 3) and (picture(env) != before).any()
    dark = envs.make("gymnasium", **CORRIDOR, renderer="values", env_kwargs={"render_mode": None})
    dark.reset(seed=0)
    assert checked_frame(dark) is None, "asked for none"


def test_text_is_all_that_others_show() -> None:
    for env in (
        envs.make("gymnasium", **CORRIDOR),  # in its ansi form, which is the observation
        envs.make("single_turn", items=[{"prompt": "1+1=", "answer": 2}]),
    ):
        env.reset(seed=0)
        assert checked_frame(env) is None
