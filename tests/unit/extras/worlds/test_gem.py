"""Environments of the package gem, as it ships them."""

import random
from typing import Any

import pytest

import roll.agentic.env as envs
from roll.agentic.env.base import TextEnv

GUESS = "game:GuessTheNumber-v0-easy"


def game(**keys: Any) -> TextEnv:
    pytest.importorskip("gem.envs", reason="pip install 'roll-rl[gem]'")
    return envs.make(
        "gem", **{"env_id": GUESS, "env_kwargs": {"min_number": 1, "max_number": 20, "max_turns": 9}, **keys}
    )


def search(env: TextEnv, seed: int) -> tuple[int, float, bool]:
    """Halves what is left until the number is found: how many guesses, what was paid, whether that is success."""
    low, high = 1, 20
    env.reset(seed=seed)
    for count in range(1, 9):
        guess = (low + high) // 2
        text, reward, terminated, _, info = env.step(f"Perhaps \\boxed{{{guess}}}")
        if terminated:
            return count, reward, info["success"]
        low, high = (guess + 1, high) if "is higher" in text else (low, guess - 1)
    raise AssertionError


def test_a_game_is_won_and_the_seed_repeats_it_beside_others():
    game()  # its import draws numbers
    before = random.getstate()
    env = game()
    text, info = env.reset(seed=0)
    assert "between 1 and 20" in text and text.endswith("Enter your next guess.") and info["success"] is False
    played = [search(env, seed) for seed in range(5)]
    assert all((reward, success) == (1.0, True) for _, reward, success in played)
    assert len({count for count, _, _ in played}) > 1
    assert played == [search(game(), seed) for seed in range(5)]
    assert random.getstate() == before


def test_a_text_without_an_answer_is_not_told_and_steps_are_bounded():
    env = game(action_pattern="<answer>(.*?)</answer>", max_steps=2, reward_scale=2.0)
    first, start = env.reset(seed=1)
    same, reward, terminated, truncated, info = env.step("\\boxed{7}")
    assert (same, reward, terminated, truncated, info["action"]) == (first, -1.0, False, False, None)
    _, _, terminated, truncated, info = env.step("<answer>\\boxed{30}</answer>")
    assert (terminated, truncated, info["success"]) == (False, True, False)
    assert info["state_key"] != start["state_key"]


def test_a_question_has_one_answer():
    env = game(env_id="rg:letter_counting", env_kwargs={"size": 20, "seed": 4})
    question, _ = env.reset(seed=3)
    _, reward, terminated, truncated, info = env.step("I do not know")
    assert "times does the letter" in question and (terminated, truncated, info["success"]) == (True, False, False)
    assert reward < 1
