"""Environments by name and by path, and the check of their configuration."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env

import roll.agentic.env as envs
from roll.agentic.env.base import step_result
from roll.configs.problems import ConfigErrors
from roll.utils.registry import UnknownNameError


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
        return step_result(
            "right" if right else "wrong",
            task_reward=float(right),
            penalty=0.0,
            terminated=right,
            truncated=False,
            action=action,
            action_is_effective=right,
            success=right,
            state_key="end" if right else "start",
        )


class NotAnEnv:
    pass


def test_built_in_names_are_registered():
    assert {"sokoban", "frozen_lake", "single_turn", "gymnasium"} <= set(envs.registered())


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


def test_checking_loads_neither_torch_nor_transformers():
    code = (
        "import sys, roll.agentic.env as envs\n"
        "for name in ('sokoban', 'frozen_lake', 'single_turn', 'gymnasium'): envs.check_env_config(name, {})\n"
        "print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_path_of_a_class_in_a_file_is_what_another_process_can_make(tmp_path):
    file = tmp_path / "game.py"
    file.write_text(
        "from roll.agentic.env.frozen_lake import FrozenLakeEnv\n\n\nclass Game(FrozenLakeEnv):\n    pass\n"
    )
    assert envs.path_of(f"{file}:Game") == f"{file}:Game"
    code = f"import roll.agentic.env as envs\nprint(type(envs.make({envs.path_of(f'{file}:Game')!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Game"
