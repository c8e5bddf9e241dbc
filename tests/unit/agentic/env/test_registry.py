"""Environments by name and by path, and the check of their configuration."""

import io
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import roll.agentic.env as envs
from roll.agentic.env import frozen_lake, sokoban, sokoban_boards
from roll.agentic.env.game import MAX_PARSED_CHARS, ActionParser
from roll.agentic.env.grid import draw_grid
from roll.configs.problems import ConfigErrors
from roll.rollout.env_runner import checked_frame
from roll.utils.registry import UnknownNameError
from tests.support.steps import usual_step


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(envs._ENVS, "_entries", dict(envs._ENVS._entries))


class GuessEnv(envs.TextEnv):
    """Say the secret word."""

    env_instruction = "Guess the word."

    def __init__(self, word: str, hint: str = "none") -> None:
        self.word, self.hint = word, hint

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return self.hint, {"state_key": "start"}

    def step(self, action: str):
        right = action == self.word
        ends = {"terminated": right, "success": right, "action_is_effective": right, "task_reward": float(right)}
        return usual_step("right" if right else "wrong", action, "end" if right else "start", **ends)


class NotAnEnv:
    pass


def test_a_registered_environment_is_made_by_name_and_by_path():
    path = f"{__name__}:GuessEnv"
    envs.register("guess-a-word", path)
    for name in ("guess-a-word", path):
        env = envs.make(name, word="apple", hint="a fruit")
        assert env.reset(seed=0)[0] == "a fruit"
        assert env.step("pear")[1] == 0.0
        observation, reward, terminated, _, info = env.step("apple")
        assert (observation, reward, terminated, info["success"]) == ("right", 1.0, True, True)
    assert "guess-a-word" in envs.registered()
    assert envs.path_of("guess-a-word") == path


def test_a_registered_class_has_a_path_for_other_processes_and_a_taken_name_is_refused():
    envs.register("guess-class", GuessEnv)
    assert envs.path_of("guess-class") == f"{__name__}:GuessEnv"
    assert envs.path_of("sokoban") == "roll.agentic.env.sokoban:SokobanEnv"
    envs.register("guess-local", lambda: GuessEnv("x"))
    with pytest.raises(ValueError, match="importable module"):
        envs.path_of("guess-local")
    with pytest.raises(ValueError, match="'sokoban' is already registered"):
        envs.register("sokoban", GuessEnv)


def test_every_action_name_is_an_action_and_gymnasium_accepts_a_plain_subclass():
    configs = {"gymnasium": {"env_id": "CliffWalking-v1", "success_return": -13}}
    counts = {"sokoban": 4, "frozen_lake": 4, "gymnasium": 4, "adventure": 9, "hidden_word": 452}
    for env_type, count in counts.items():
        env = envs.make(env_type, **configs.get(env_type, {}))
        for name in env.action_names:
            env.reset(seed=0)
            assert env.step(f"<answer>{name}</answer>")[4]["action"] == name
        assert len(env.action_names) == count
    assert GuessEnv("x").action_names == ()
    check_env(GuessEnv("apple"), skip_render_check=True)


def test_an_unknown_name_suggests_the_right_one():
    with pytest.raises(UnknownNameError, match="Did you mean 'sokoban'"):
        envs.make("socoban")
    with pytest.raises(ValueError, match="expected a subclass"):
        envs.make(f"{__name__}:NotAnEnv")


def test_make_reports_all_problems_at_once():
    with pytest.raises(ConfigErrors) as error:
        envs.make("sokoban", num_boxs=1, max_steps=0, dim_room=[6, 60])
    assert [problem.path for problem in error.value.problems] == ["max_steps", "dim_room.1", "num_boxs"]


@pytest.mark.parametrize(
    ("env_type", "config", "problems"),
    [
        ("sokoban", {"dim_room": [6, 6], "num_boxes": 1, "search_depth": 30, "max_steps": 10}, []),
        ("frozen_lake", {"is_slippery": True}, []),
        ("frozenlake", {}, ["Did you mean 'frozen_lake'"]),
        ("no_such_module_here:Env", {}, ["cannot import module 'no_such_module_here'"]),
        (f"{__name__}:GuesEnv", {}, ["did you mean 'GuessEnv'"]),
        (f"{__name__}:NotAnEnv", {}, ["expected a subclass of roll.agentic.env.TextEnv"]),
        (f"{__name__}:GuessEnv", {"word": "x"}, []),
        (f"{__name__}:GuessEnv", {"word": "x", "hnt": 1}, ["hnt: got 1, expected no such key (did you mean hint?)"]),
        (f"{__name__}:GuessEnv", {}, ["word: got nothing"]),
        ("sokoban", {"num_box": 1}, ["num_box: got 1, expected no such key (did you mean num_boxes?)"]),
        ("sokoban", {"num_boxes": 9}, ["num_boxes: got 9, expected int, at least 1, at most 4"]),
        ("sokoban", {"dim_room": [6, 11]}, ["dim_room.1: got 11, expected int, at least 6, at most 10"]),
        ("sokoban", {"dim_room": [6]}, ["dim_room.1: got nothing"]),
        ("sokoban", {"format_penalty": 0.5}, ["format_penalty: got 0.5, expected float, at most 0"]),
        ("sokoban", {"split": "test"}, ['split: got "test", expected one of: train, eval, all']),
        ("sokoban", {"action_pattern": "(up"}, ['action_pattern: got "(up"']),
        ("sokoban", {"min_solution": 12}, ["min_solution: got 12, expected at most 10"]),
        ("sokoban", {"max_solution": 12}, ["max_solution: got 12, expected at most search_depth = 100 and"]),
        ("sokoban", {"num_walls": 15}, ["num_walls: got 15, expected at most 13"]),
        ("sokoban", {"num_boxes": 9, "colour": "red", "max_steps": "many"}, ["num_boxes", "colour", "max_steps"]),
        ("sokoban", {3: 4}, ["3"]),
        (None, {}, ["env_type"]),
        ("sokoban", None, ["env_config"]),
    ],
)
def test_problems_are_named_without_raising(env_type, config, problems):
    found = envs.check_env_config(env_type, config)
    assert len(found) == len(problems), found
    for problem in problems:
        assert any(problem in str(line) for line in found), found


def test_a_module_that_raises_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "module_that_raises.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = envs.check_env_config("module_that_raises:Env", {})
    assert "RuntimeError: no licence" in problem.hint


def test_the_path_of_a_class_in_a_file_is_what_another_process_can_make(tmp_path):
    file = tmp_path / "game.py"
    file.write_text(
        "from roll.agentic.env.frozen_lake import FrozenLakeEnv\n\n\nclass Game(FrozenLakeEnv):\n    pass\n"
    )
    assert envs.path_of(f"{file}:Game") == f"{file}:Game"
    code = f"import roll.agentic.env as envs\nprint(type(envs.make({envs.path_of(f'{file}:Game')!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Game"


ACTIONS = {"Up": 0, "Down": 1, "Turn left": 2}


@pytest.mark.parametrize(
    ("text", "action", "pattern"),
    [
        ("<answer>Up</answer>", "Up", ()),
        ("<answer> up\n</answer>", "Up", ()),
        ("I think so. <answer>TURN LEFT</answer> Done.", "Turn left", ()),
        ("<answer>Up</answer> no, <answer>Down</answer>", "Down", ()),
        ("<answer>Up</answer> no, <answer>Jump</answer>", None, ()),
        *((text, None, ()) for text in ("<answer>Up Down</answer>", "<answer></answer>", "<answer>Up", "Up", "")),
        ("<ANSWER>Up</ANSWER>", None, ()),
        ("x" * 10 * MAX_PARSED_CHARS + "<answer>Up</answer>", "Up", ()),
        ("<answer>Up</answer>" + "x" * MAX_PARSED_CHARS, None, ()),
        ("go", None, (r"go(?: (Up))?",)),
        ("MOVE: down", "Down", (r"(?i)move:\s*(\w+)",)),
        ("<answer>Up</answer>", None, (r"(?i)move:\s*(\w+)",)),
    ],
)
def test_the_last_answer_at_the_end_of_a_text_counts_whatever_its_case(text, action, pattern):
    assert ActionParser(ACTIONS, *pattern).parse(text) == action


@pytest.mark.parametrize(
    ("actions", "pattern", "message"),
    [
        (ACTIONS, ["<answer>(.*"], 'action_pattern: got "<answer>\\(.*", expected a regular expression'),
        (ACTIONS, ["up|down"], "group"),
        ({"up": 0, "UP": 1}, [], "differ in more than case"),
    ],
)
def test_a_bad_pattern_names_the_key_and_names_that_differ_only_in_case_are_refused(actions, pattern, message):
    with pytest.raises(ValueError, match=message):
        ActionParser(actions, *pattern)


def test_a_long_text_against_a_slow_pattern_takes_bounded_time():
    start = time.process_time()
    assert ActionParser(ACTIONS).parse("<answer>" * 100_000) is None
    think = ActionParser(ACTIONS, r"<think>.*?</think>\s*<answer>(.*?)</answer>")
    assert think.parse("<think></think><answer>" * 10_000) is None
    assert time.process_time() - start < 20  # without a bound, hours


@given(st.text())
def test_any_text_is_parsed(text):
    assert ActionParser(ACTIONS).parse(text) in (*ACTIONS, None)


CORRIDOR = {"env_id": "tests.support.third_party_envs:Corridor-v0", "success_return": 1}


def picture(env: Any) -> np.ndarray:
    frame = checked_frame(env)
    assert isinstance(frame, bytes)
    return np.asarray(Image.open(io.BytesIO(frame)).convert("RGB")).astype(int)


@pytest.mark.parametrize(
    ("tiles", "symbols"), [(sokoban.TILES, sokoban_boards.SYMBOLS), (frozen_lake.TILES, frozen_lake.SYMBOLS)]
)
def test_every_kind_of_cell_looks_different(tiles, symbols):
    assert set(tiles) == set(symbols)
    drawn = [draw_grid([[kind]], tiles, side=24) for kind in symbols]
    assert all(tile.shape == (24, 24, 3) and tile.dtype == np.uint8 for tile in drawn)
    assert len({tile.tobytes() for tile in drawn}) == len(drawn)


@pytest.mark.parametrize(("env_type", "rows"), [("sokoban", 6), ("frozen_lake", 4)])
def test_a_grid_world_is_drawn_cell_by_cell_as_its_text_says(env_type, rows):
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


def test_a_recorded_picture_is_small_and_true_to_the_drawing():
    env = envs.make("sokoban")
    env.reset(seed=1)
    frame = checked_frame(env)
    assert isinstance(frame, bytes) and len(frame) < 12_000
    assert np.abs(picture(env) - env.render().astype(int)).mean() < 6
    assert checked_frame(env) is frame, "an equal picture is shared"


def test_a_gymnasium_environment_brings_its_own_picture():
    env = envs.make("gymnasium", **CORRIDOR, renderer="values")
    env.reset(seed=0)
    before = picture(env)
    env.step("<answer>1</answer>")
    assert before.shape == (20, 100, 3) and (picture(env) != before).any()
    dark = envs.make("gymnasium", **CORRIDOR, renderer="values", env_kwargs={"render_mode": None})
    dark.reset(seed=0)
    assert checked_frame(dark) is None, "asked for none"


def test_text_is_all_that_others_show():
    for env in (
        envs.make("gymnasium", **CORRIDOR),  # in its ansi form, which is the observation
        envs.make("single_turn", items=[{"prompt": "1+1=", "answer": 2}]),
    ):
        env.reset(seed=0)
        assert checked_frame(env) is None
