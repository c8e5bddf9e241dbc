"""Games of the packages textarena and gem, as they ship them."""

import random
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

import roll.agentic.env as envs
from roll.agentic.env.base import TextEnv
from roll.extras.worlds import own_random

BOXED = (r"Perhaps \boxed{%d}", "is higher")
"""How gem is told a guess, and tells that the number is higher."""
NUMBERS = {"min_number": 1, "max_number": 20, "max_turns": 9}


def game(env_id: str, **keys: Any) -> TextEnv:
    pytest.importorskip("textarena", reason="pip install 'roll-rl[textarena]'")
    return envs.make("textarena", env_id=env_id, **keys)


def gem(env_id: str = "game:GuessTheNumber-v0-easy", **keys: Any) -> TextEnv:
    pytest.importorskip("gem.envs", reason="pip install 'roll-rl[gem]'")
    return envs.make("gem", **{"env_id": env_id, "env_kwargs": NUMBERS, **keys})


def search(env: TextEnv, seed: int, said: str = "[%d]", higher: str = r"higher\.$") -> tuple[int, float, Any]:
    """Halves what is left until the number is found: how many guesses, what was paid, the last info."""
    low, high = 1, 20
    env.reset(seed=seed)
    for count in range(1, 9):
        guess = (low + high) // 2
        text, reward, terminated, truncated, info = env.step(said % guess)
        assert not truncated and info["action"] == said % guess
        if terminated:
            return count, reward, info
        low, high = (guess + 1, high) if re.search(higher, text) else (low, guess - 1)
    raise AssertionError


def test_a_game_alone_is_won_and_pays_at_its_end():
    env = game("GuessTheNumber-v0")
    text, info = env.reset(seed=0)
    assert "between 1 and 20" in text and info["success"] is False
    played = [search(env, seed) for seed in range(6)]
    assert all(reward == 1.0 and info["success"] for _, reward, info in played)
    assert {count for count, _, _ in played} <= {1, 2, 3, 4, 5} and len({count for count, _, _ in played}) > 1
    assert played == [search(game("GuessTheNumber-v0"), seed) for seed in range(6)]


def test_what_the_game_refuses_is_no_action_and_what_it_ends_with_is_its_reward():
    env = game("GuessTheNumber-v0", reward_scale=2.0)
    env.reset(seed=1)
    assert env.step("[10]")[1] == 0.0
    text, reward, terminated, _, info = env.step("[ten]")
    assert (info["action"], reward, terminated) == (None, -1.0, False) and "invalid move" in text
    text, reward, terminated, _, info = env.step("I do not know")
    assert (info["action"], terminated, info["success"]) == (None, True, False)
    assert info["penalty"] == -1.0 and 0 < info["task_reward"] < 2.0 and reward == info["task_reward"] - 1.0
    assert text.startswith("Invalid Move")


def test_a_conversation_is_told_what_is_new_and_a_pattern_finds_the_move():
    env = game("GuessTheNumber-v0", show_history=False, action_pattern="<answer>(.*?)</answer>", max_steps=2)
    first, start = env.reset(seed=1)
    text, _, _, _, info = env.step("between [1] and [20] <answer>[7]</answer>")
    assert "You have to guess" in first and re.fullmatch(r"The target number is (higher|lower)\.", text)
    assert info["action"] == "[7]" and info["state_key"] != start["state_key"]
    same, _, terminated, truncated, info = env.step("no answer")
    assert (same, info["action"], terminated, truncated) == (text, None, False, True)


def test_games_side_by_side_draw_from_numbers_of_their_own():
    def play(env: TextEnv, between: Callable[[], object]) -> list[str]:
        seen = [env.reset(seed=5)[0]]
        for _ in range(8):
            between()
            text, _, terminated, _, _ = env.step("[hit]")
            seen.append(text)
            if terminated:
                break
        return seen

    other = game("Blackjack-v0")
    other.reset(seed=6)
    random.seed(0)
    before = random.getstate()
    alone = play(game("Blackjack-v0"), lambda: None)
    assert random.getstate() == before, "the process's own numbers are as they were"
    assert len(alone) > 3 and alone == play(game("Blackjack-v0"), lambda: other.reset(seed=9))


def test_a_game_against_a_random_player_is_won_and_lost():
    env = game("TicTacToe-v0", num_players=2, opponent="random", player=1)
    outcomes = set()
    for seed in range(12):
        text, _ = env.reset(seed=seed)
        assert "you will be 'X'" in text and text.count(" O ") == 1, "player 0 has moved"
        rng, terminated = random.Random(seed), False
        while not terminated:
            cells = re.findall(r"\[\d\]", text.rpartition("Available Moves")[2])
            text, reward, terminated, _, info = env.step(rng.choice(cells))
        outcomes.add((reward, info["success"]))
    assert {(1, True), (-1, False)} <= outcomes <= {(1, True), (-1, False), (0, False)}


def stubborn(seen: str, rng: random.Random) -> str:
    return "[99]"


def confused(seen: str, rng: random.Random) -> str:
    raise ConnectionError("the other model is away")


def test_a_game_that_the_opponent_spoils_is_a_failure_and_no_reward():
    env = game("TicTacToe-v0", num_players=2, opponent=f"{__name__}:stubborn")
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match=r"opponent .*:stubborn lost by a move that is not allowed: 99"):
        env.step("[4]")
    env = game("TicTacToe-v0", num_players=2, opponent=f"{__name__}:confused")
    env.reset(seed=0)
    with pytest.raises(ConnectionError, match="the other model is away"):
        env.step("[4]")
    env = game("Nim-v0", num_players=2, opponent="random")
    env.reset(seed=0)
    with pytest.raises(ValueError, match="opponent: the game lists no moves"):
        env.step("[0 1]")


class Stuck:
    """A game whose step does not come back."""

    come_back = threading.Event()

    def reset(self, num_players: int, seed: int) -> None:
        import textarena

        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed)
        self.state.reset()

    def get_observation(self) -> tuple[int, str]:
        return 0, "wait"

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.come_back.wait(30)
        return False, {}


def test_a_game_that_hangs_does_not_hold_up_the_others(monkeypatch):
    registration = pytest.importorskip("textarena.envs.registration", reason="pip install 'roll-rl[textarena]'")
    monkeypatch.setitem(registration.ENV_REGISTRY, "Stuck-v0", registration.EnvSpec("Stuck-v0", Stuck, None))
    monkeypatch.setattr(own_random, "_PATIENCE_S", 0.05)
    stuck = game("Stuck-v0")
    stuck.reset(seed=0)
    thread = threading.Thread(target=stuck.step, args=("go",))
    thread.start()
    try:
        assert search(game("GuessTheNumber-v0"), 3)[1] == 1.0 and thread.is_alive()
    finally:
        Stuck.come_back.set()
        thread.join()


def test_a_game_of_gem_is_won_and_the_seed_repeats_it_beside_others():
    gem()  # its import draws numbers
    before = random.getstate()
    env = gem()
    text, info = env.reset(seed=0)
    assert "between 1 and 20" in text and text.endswith("Enter your next guess.") and info["success"] is False
    played = [search(env, seed, *BOXED) for seed in range(5)]
    assert all(reward == 1.0 and info["success"] for _, reward, info in played)
    assert len({count for count, _, _ in played}) > 1
    assert played == [search(gem(), seed, *BOXED) for seed in range(5)]
    assert random.getstate() == before


def test_a_text_without_an_answer_is_not_told_to_gem_and_steps_are_bounded():
    env = gem(action_pattern="<answer>(.*?)</answer>", max_steps=2, reward_scale=2.0)
    first, start = env.reset(seed=1)
    same, reward, terminated, truncated, info = env.step("\\boxed{7}")
    assert (same, reward, terminated, truncated, info["action"]) == (first, -1.0, False, False, None)
    _, _, terminated, truncated, info = env.step("<answer>\\boxed{30}</answer>")
    assert (terminated, truncated, info["success"]) == (False, True, False)
    assert info["state_key"] != start["state_key"]


def test_a_question_of_gem_has_one_answer():
    env = gem("rg:letter_counting", env_kwargs={"size": 20, "seed": 4})
    question, _ = env.reset(seed=3)
    _, reward, terminated, truncated, info = env.step("I do not know")
    assert "times does the letter" in question and (terminated, truncated, info["success"]) == (True, False, False)
    assert reward < 1
