"""Frozen lake: maps, moves, slips, rewards."""

import pytest

from roll.agentic.env.frozen_lake import FrozenLakeEnv

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}


def answer(name: str) -> str:
    return f"<answer>{name}</answer>"


def find(text: str, symbols: str) -> list[tuple[int, int]]:
    return [(r, c) for r, line in enumerate(text.split("\n")) for c, symbol in enumerate(line) if symbol in symbols]


def way_to(text: str, goal_symbol: str) -> list[str] | None:
    """Shortest names of moves to a cell with the symbol, over frozen cells."""
    (start,), goals = find(text, "P"), find(text, goal_symbol)
    free = set(find(text, "_PG")) | set(goals)
    ways: dict[tuple[int, int], list[str]] = {start: []}
    queue = [start]
    for cell in queue:
        if cell in goals:
            return ways[cell]
        for name, (down, right) in MOVES.items():
            after = (cell[0] + down, cell[1] + right)
            if after in free and after not in ways and cell not in goals:
                ways[after] = [*ways[cell], name]
                queue.append(after)
    return None


@pytest.mark.parametrize(("size", "p"), [(4, 0.8), (8, 0.8), (8, 0.5)])
def test_every_lake_can_be_crossed_and_the_goal_pays(size, p):
    env = FrozenLakeEnv(size=size, p=p, max_steps=100, reward_scale=2.0, step_penalty=-0.1)
    for seed in range(20):
        text, _ = env.reset(seed=seed)
        assert [len(line) for line in text.split("\n")] == [size] * size
        assert text[0] == "P" and text[-1] == "G"
        way = way_to(text, "G")
        assert way is not None
        for name in way:
            text, reward, terminated, truncated, info = env.step(answer(name))
            assert info["action"] == name and info["action_is_effective"]
        assert terminated and not truncated and info["success"] and text[-1] == "√"
        assert reward == pytest.approx(2.0 * (1.0 - 0.1))


def test_the_splits_share_no_lake():
    lakes = {
        split: {FrozenLakeEnv(split=split).reset(seed=seed)[0] for seed in range(300)}
        for split in ("train", "eval", "all")
    }
    assert not lakes["train"] & lakes["eval"]
    assert lakes["all"] & lakes["train"] and lakes["all"] & lakes["eval"]


def test_coordinates_are_those_of_the_map():
    env = FrozenLakeEnv(size=5, p=0.7, show_coordinates=True)
    text, _ = env.reset(seed=4)
    for name in ("", *way_to(text.rpartition("\n")[0], "G")[:3]):
        drawn, _, places = env.step(answer(name))[0].rpartition("\n")
        assert places == "".join(f"{symbol}({r},{c})" for symbol in "PGO" for r, c in find(drawn, symbol))


def test_a_hole_ends_the_episode_without_success():
    env = FrozenLakeEnv(hole_reward=-1.0, p=0.6)
    text, _ = env.reset(seed=1)
    way = way_to(text, "O")
    for name in way:
        text, reward, terminated, _, info = env.step(answer(name))
    assert terminated and not info["success"] and reward == -1.0
    assert len(find(text, "X")) == 1
    with pytest.raises(RuntimeError, match="reset"):
        env.step(answer("Up"))


def test_the_expert_plays_a_shortest_way_and_is_silent_at_the_end():
    env = FrozenLakeEnv(size=8, p=0.6, max_steps=64)
    for seed in range(20):
        text, _ = env.reset(seed=seed)
        way = way_to(text, "G")
        for left in range(len(way), 0, -1):
            assert len(way_to(text, "G")) == left
            text, *_ = env.step(answer(env.expert_actions()[-1]))
        assert text[-1] == "√" and env.expert_actions() == []


def test_the_shore_stops_the_player():
    env = FrozenLakeEnv()
    text, start = env.reset(seed=0)
    after, reward, terminated, _, info = env.step(answer("Up"))
    assert after == text and info["state_key"] == start["state_key"] and not terminated and reward == 0.0
    assert info["action_is_valid"] and not info["action_is_effective"]


def test_an_invalid_action_keeps_the_state_and_costs_the_penalty():
    env = FrozenLakeEnv(max_steps=6, is_slippery=True, format_penalty=-0.25)
    text, start = env.reset(seed=0)
    for last in (False, False, False, False, False, True):
        after, reward, terminated, truncated, info = env.step("Right")
        assert after == text and info["state_key"] == start["state_key"]
        assert (reward, info["penalty"], info["task_reward"]) == (-0.25, -0.25, 0.0)
        assert (terminated, truncated) == (False, last)


def test_slips_follow_the_seed_and_invalid_actions_do_not_use_them_up():
    def play(invalid: bool) -> list[str]:
        env = FrozenLakeEnv(is_slippery=True, size=8, p=1.0, max_steps=50)
        env.reset(seed=4)
        texts = []
        for name in ["Right", "Down"] * 8:
            if invalid:
                env.step("?")
            texts.append(env.step(answer(name))[0])
        return texts

    assert play(False) == play(False) == play(True)


def test_slips_go_to_either_side_and_never_back():
    env = FrozenLakeEnv(is_slippery=True, size=8, p=1.0, max_steps=1000)
    seen = []
    for seed in range(300):
        env.reset(seed=seed)
        for name in ("Down", "Down", "Right", "Right"):
            text = env.step(answer(name))[0]
        before = find(text, "P")[0]
        if 0 < before[0] < 7 and 0 < before[1] < 7:
            after = find(env.step(answer("Right"))[0], "P")[0]
            seen.append((after[0] - before[0], after[1] - before[1]))
    assert set(seen) == {(0, 1), (1, 0), (-1, 0)}
    assert all(0.2 < seen.count(move) / len(seen) < 0.47 for move in set(seen))


def test_seeds_give_different_lakes_and_the_same_seed_the_same():
    env = FrozenLakeEnv(size=6)
    lakes = [env.reset(seed=seed)[0] for seed in range(50)]
    assert len(set(lakes)) > 40
    assert lakes == [FrozenLakeEnv(size=6).reset(seed=seed)[0] for seed in range(50)]


def test_symbols_can_be_changed_and_too_few_steps_for_the_way_are_refused():
    env = FrozenLakeEnv(grid_lookup={0: "@"}, grid_vocab={"@": "you"})
    text, _ = env.reset(seed=0)
    assert text[0] == "@" and "@: you" in env.env_instruction
    with pytest.raises(ValueError, match="max_steps: got 10, expected at least 14"):
        FrozenLakeEnv(size=8)
