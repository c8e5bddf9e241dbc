"""The grid worlds: rules, boards, rewards, experts, against searches that share no code with the library's."""

import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from roll.agentic.env.frozen_lake import FrozenLakeEnv
from roll.agentic.env.sokoban import SokobanEnv
from roll.agentic.env.sokoban_boards import Board
from tests.support.tags import answer

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
SHORT = {"max_solution": 4, "num_walls": 4}


def find(text: str, symbols: str) -> list[tuple[int, int]]:
    return [(r, c) for r, line in enumerate(text.split("\n")) for c, symbol in enumerate(line) if symbol in symbols]


def playing(board: str, **config) -> SokobanEnv:
    env = SokobanEnv(**config)
    env.reset(seed=0, options={"board": board})
    return env


def dealt(count: int, **config) -> Iterator[tuple[SokobanEnv, str]]:
    """An environment with each of its first boards, and that board as text."""
    env = SokobanEnv(**config)
    for seed in range(count):
        yield env, env.reset(seed=seed)[0]


def read(text: str):
    """Player, boxes, targets and walls of a drawn board, as sets of (row, column)."""
    (player,) = find(text, "PS")
    return player, *(frozenset(find(text, symbols)) for symbols in ("X√", "O√S", "#"))


def oracle_move(player, boxes, walls, move):
    ahead = (player[0] + move[0], player[1] + move[1])
    beyond = (ahead[0] + move[0], ahead[1] + move[1])
    if ahead in walls or (ahead in boxes and (beyond in walls or beyond in boxes)):
        return player, boxes
    return ahead, (boxes - {ahead}) | {beyond} if ahead in boxes else boxes


def oracle_length(player, boxes, targets, walls) -> int | None:
    """Fewest moves to solve the board: plain forward breadth-first search."""
    frontier, seen, depth = [(player, boxes)], {(player, boxes)}, 0
    while frontier:
        if any(boxes == targets for _, boxes in frontier):
            return depth
        depth += 1
        found = {oracle_move(p, b, walls, move) for p, b in frontier for move in MOVES.values()} - seen
        seen |= found
        frontier = list(found)
    return None


# ---- rules of Sokoban


def test_a_box_is_pushed_into_a_free_cell():
    env = playing("######\n#____#\n#PX_O#\n#____#\n#____#\n######")
    observation, reward, terminated, truncated, info = env.step(answer("Right"))
    assert observation == "######\n#____#\n#_PXO#\n#____#\n#____#\n######"
    assert (reward, terminated, truncated) == (-0.1, False, False)
    assert info["action"] == "Right" and info["action_is_valid"] and info["action_is_effective"]


@pytest.mark.parametrize(
    "board",
    [
        "######\n#P___#\n#X___#\n#____#\n#___O#\n######",  # up: the border
        "######\n#__O_#\n#_#__#\n#_X__#\n#_P__#\n######",  # up: a wall behind the box
        "######\n#O_O_#\n#_X__#\n#_X__#\n#_P__#\n######",  # up: a box behind the box
    ],
)
def test_a_blocked_move_changes_nothing_and_is_valid_but_not_effective(board):
    env = playing(board)
    key = env.board.hash
    observation, reward, _, _, info = env.step(answer("Up"))
    assert observation == board and info["state_key"] == key
    assert info["action_is_valid"] and not info["action_is_effective"]
    assert (reward, info["penalty"]) == (-0.1, 0.0)


def test_a_box_goes_onto_a_target_and_off_again():
    env = playing("#######\n#_____#\n#PXO__#\n#_X_O_#\n#_____#\n#######")
    observation, reward, terminated, _, _ = env.step(answer("Right"))
    assert observation.split("\n")[2] == "#_P√__#" and not terminated
    assert reward == pytest.approx(-0.1 + 1.0)
    observation, reward, *_ = env.step(answer("Right"))
    assert observation.split("\n")[2] == "#__SX_#"
    assert reward == pytest.approx(-0.1 - 1.0)
    observation, *_ = env.step(answer("Left"))
    assert observation.split("\n")[2] == "#_POX_#"


def test_solving_pays_and_ends_the_episode_also_at_the_step_limit():
    board = "######\n#____#\n#PXO_#\n#____#\n#____#\n######"
    env = playing(board, reward_scale=0.1)
    observation, reward, terminated, truncated, info = env.step(answer("Right"))
    assert "√" in observation and terminated and not truncated and info["success"]
    assert reward == info["task_reward"] == pytest.approx(0.1 * (-0.1 + 1.0 + 10.0))
    with pytest.raises(RuntimeError, match="reset"):
        env.step(answer("Right"))
    env = playing("######\n#PXO_#\n#____#\n#_X__#\n#_O__#\n######")
    _, _, terminated, _, info = env.step(answer("Right"))
    assert not terminated and not info["success"]
    assert playing(board, max_steps=1).step(answer("Right"))[2:4] == (True, False)
    assert playing(board, max_steps=1).step(answer("Up"))[2:4] == (False, True)


def test_play_agrees_with_the_oracle_on_random_moves():
    env = SokobanEnv(dim_room=[8, 7], num_boxes=3, max_steps=60, max_solution=8, show_coordinates=True)
    for seed in range(30):
        text, _ = env.reset(seed=seed)
        player, boxes, targets, walls = read(text.rsplit("\n", 1)[0])
        for index in range(60):
            name = list(MOVES)[(seed * 7 + index * index + index // 5) % 4]
            moved, pushed = oracle_move(player, boxes, walls, MOVES[name])
            text, reward, terminated, truncated, info = env.step(answer(name))
            grid, coordinates = text.rsplit("\n", 1)
            assert read(grid) == (moved, pushed, targets, walls)
            listed = [("P", [moved]), ("X", sorted(pushed)), ("O", sorted(targets))]
            assert coordinates == "".join(f"{letter}({r},{c})" for letter, cells in listed for r, c in cells)
            assert info["action_is_effective"] == (moved != player)
            gained = len(pushed & targets) - len(boxes & targets)
            assert reward == pytest.approx(-0.1 + gained + 10.0 * (pushed == targets))
            assert terminated == info["success"] == (pushed == targets)
            player, boxes = moved, pushed
            if terminated or truncated:
                break


# ---- texts that hold no action


@pytest.mark.parametrize("text", ["", "Up", "<answer>Jump</answer>", "<answer>Up", "<answer></answer>"])
@pytest.mark.parametrize(
    ("world", "config", "task_reward", "penalty"),
    [
        (SokobanEnv, {"max_steps": 2, "format_penalty": -0.5, "reward_scale": 0.1}, -0.01, -0.05),
        (FrozenLakeEnv, {"max_steps": 6, "format_penalty": -0.25, "is_slippery": True}, 0.0, -0.25),
    ],
)
def test_an_invalid_action_keeps_the_state_costs_the_penalty_and_counts_a_step(
    world, config, task_reward, penalty, text
):
    env = world(**config)
    first, start = env.reset(seed=3)
    for steps_left in reversed(range(config["max_steps"])):
        observation, reward, terminated, truncated, info = env.step(text)
        assert observation == first and info["state_key"] == start["state_key"]
        assert info["action"] is None and not info["action_is_valid"] and not info["action_is_effective"]
        assert (info["task_reward"], info["penalty"]) == (pytest.approx(task_reward), pytest.approx(penalty))
        assert reward == info["task_reward"] + info["penalty"]
        assert (terminated, truncated) == (False, steps_left == 0)


def test_equal_states_have_equal_keys_and_there_is_none_before_reset():
    env = playing("######\n#____#\n#_P__#\n#__X_#\n#__O_#\n######")
    start = env.step("nothing")[4]["state_key"]
    up = env.step(answer("Up"))[4]["state_key"]
    assert up != start
    assert env.step(answer("Down"))[4]["state_key"] == start
    with pytest.raises(RuntimeError, match="reset"):
        SokobanEnv().step(answer("Up"))


# ---- boards of Sokoban


@pytest.mark.parametrize(
    ("config", "num_seeds"),
    [
        (SHORT, 300),
        ({"min_solution": 7, "max_solution": 9}, 60),
        ({"num_boxes": 2, "min_solution": 2, "max_solution": 9}, 30),
        ({"dim_room": (6, 7), "num_boxes": 3, "num_walls": 8, "min_solution": 3, "max_solution": 7}, 15),
        ({"dim_room": (10, 10), "min_solution": 5, "max_solution": 9}, 25),
    ],
)
def test_boards_are_solvable_with_an_optimal_length_in_the_asked_range(config, num_seeds):
    lengths = set()
    for env, text in dealt(num_seeds, **config):
        length = oracle_length(*read(text))
        assert env.solution_length() == length
        lengths.add(length)
    assert lengths == set(range(config.get("min_solution", 1), config["max_solution"] + 1))


@pytest.mark.parametrize("num_boxes", [1, 2, 3, 4])
@pytest.mark.parametrize("side", [6, 8, 10])
def test_every_size_has_its_boxes_and_is_made_within_a_second(num_boxes, side):
    env = SokobanEnv(dim_room=(side, side), num_boxes=num_boxes, max_steps=100)
    for seed in range(3):
        start = time.process_time()
        text, _ = env.reset(seed=seed)
        assert time.process_time() - start < 1.0
        _, boxes, targets, _ = read(text)
        assert len(boxes) == len(targets) == num_boxes
        assert [len(line) for line in text.split("\n")] == [side] * side
        assert env.solution_length()


def test_an_unreachable_difficulty_is_a_clear_error_within_a_second():
    env = SokobanEnv(min_solution=60, max_solution=70, max_steps=100)
    start = time.process_time()
    with pytest.raises(ValueError, match=r"6x6.*min_solution=60.*lower min_solution"):
        env.reset(seed=0)
    assert time.process_time() - start < 1.0


def test_search_depth_bounds_the_length():
    assert all(oracle_length(*read(text)) <= 2 for _, text in dealt(40, search_depth=2, max_steps=50))


def test_the_same_seed_gives_the_same_board_in_another_process():
    config = {"num_boxes": 2, "split": "train", "max_solution": 6}
    code = (
        "import roll.agentic.env as envs, sys\n"
        f"env = envs.make('sokoban', **{config!r})\n"
        "for seed in (0, 1, 2**40): sys.stdout.write(env.reset(seed=seed)[0] + env.board.hash)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    env = SokobanEnv(**config)
    here = "".join(env.reset(seed=seed)[0] + env.board.hash for seed in (0, 1, 2**40))
    for hash_seed in ("1", "2"):
        other = {"PYTHONHASHSEED": hash_seed, "PYTHONUTF8": "1"}
        run = subprocess.run([sys.executable, "-c", code], env=other, capture_output=True, encoding="utf-8", check=True)
        assert run.stdout == here


def test_seeds_give_different_boards_and_layouts_the_same_in_every_version():
    boards = [env.board for env, _ in dealt(1000, **SHORT)]
    assert boards[0].hash == "0927097a05cfef20"
    assert len({board.hash for board in boards}) > 950
    shared = sum(a.layout_bytes == b.layout_bytes for a, b in pairwise(boards))
    assert shared < 10


def test_without_a_seed_boards_differ_and_follow_the_last_seed():
    env = SokobanEnv()
    env.reset(seed=5)
    first = [env.reset()[0] for _ in range(5)]
    env.reset(seed=5)
    assert [env.reset()[0] for _ in range(5)] == first
    assert len(set(first)) > 1


def test_train_and_eval_share_no_board_and_the_hash_decides():
    splits = ("train", "eval")
    hashes = {split: {env.board.hash for env, _ in dealt(2500, split=split, **SHORT)} for split in splits}
    assert not hashes["train"] & hashes["eval"]
    for split in splits:
        assert {int(board_hash, 16) / 2**64 < 0.1 for board_hash in hashes[split]} == {split == "eval"}
    assert len(hashes["eval"]) > 1900 and len(hashes["train"]) > 2300


@pytest.mark.parametrize("split", ["train", "eval"])
def test_train_and_eval_have_the_same_lengths(split):
    lengths = [env.solution_length() for env, _ in dealt(1000, split=split, **SHORT)]
    assert all(0.2 < lengths.count(length) / 1000 < 0.3 for length in (1, 2, 3, 4))


def test_all_split_draws_from_both():
    boards = [env.board for env, _ in dealt(1000, holdout_fraction=0.3, max_solution=4)]
    assert 240 < sum(int(board.hash, 16) / 2**64 < 0.3 for board in boards) < 360


# ---- Sokoban's expert


@pytest.mark.parametrize("config", [{"max_solution": 8}, {"num_boxes": 2, "max_solution": 10, "dim_room": (7, 7)}])
def test_expert_actions_solve_in_the_optimal_length(config):
    for seed, (env, text) in enumerate(dealt(25, **config)):
        steps, terminated = 0, False
        while not terminated:
            actions = env.expert_actions()
            _, _, terminated, _, _ = env.step(answer(actions[(seed + steps) % len(actions)]))
            steps += 1
        assert steps == oracle_length(*read(text))
        assert env.expert_actions() == []


def test_expert_names_all_optimal_actions_also_off_the_path():
    for seed, (env, text) in enumerate(dealt(8, num_boxes=2, max_solution=4, max_steps=30, num_walls=2)):
        for index in range(4):
            player, boxes, targets, walls = read(text)
            length = oracle_length(player, boxes, targets, walls)
            rest = {
                name: oracle_length(*oracle_move(player, boxes, walls, move), targets, walls)
                for name, move in MOVES.items()
            }
            best = [name for name in MOVES if length and rest[name] == length - 1]
            assert sorted(env.expert_actions()) == sorted(best)
            assert env.solution_length() == length
            text, _, terminated, _, _ = env.step(answer(list(MOVES)[(seed + 3 * index) % 4]))
            if terminated:
                break


def test_a_lost_board_has_no_expert_action_and_is_given_up_within_a_second():
    lost = "######\n#X___#\n#_P__#\n#__O_#\n#____#\n######"
    env = playing(lost)
    assert oracle_length(*read(lost)) is None
    assert env.expert_actions() == [] and env.solution_length() is None
    env = playing(
        "##########\n#X_______#\n#_P__X___#\n#____O___#\n#__X_____#\n#__O__X__#\n#_____O__#\n#________#\n#_______O#\n##########"
    )
    start = time.process_time()
    assert env.expert_actions() == []
    assert time.process_time() - start < 1.0


# ---- symbols of Sokoban


def test_grid_vocab_alone_or_grid_lookup_chooses_the_symbols():
    vocab = {"W": "wall", ".": "empty", "T": "target", "@": "player", "B": "box", "+": "player on target"}
    env = SokobanEnv(grid_vocab=vocab)
    env.reset(options={"board": "WWWWWW\nW....W\nW@BT.W\nW....W\nW....W\nWWWWWW"})
    observation, *_ = env.step(answer("Down"))
    assert observation == "WWWWWW\nW....W\nW.BT.W\nW@...W\nW....W\nWWWWWW"
    assert "@: player" in env.env_instruction and "√: box on target" in env.env_instruction
    env = SokobanEnv(grid_lookup={0: "~", 4: "C"}, grid_vocab={"C": "a crate"})
    text, _ = env.reset(seed=0)
    assert text.startswith("~~~~~~\n~") and "C" in text and "X" not in text
    assert "C: a crate" in env.env_instruction and "~: wall" in env.env_instruction


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"grid_vocab": {"W": "wal"}}, 'grid_vocab: got "wal"'),
        ({"grid_vocab": {"_": "wall"}}, "grid_vocab: got .* distinct"),
        ({"grid_lookup": {9: "W"}}, "grid_lookup: got 9, expected codes from 0 to 6"),
        ({"grid_lookup": {0: "ab"}}, "grid_lookup: got .* distinct"),
        ({"grid_lookup": {0: "W"}, "grid_vocab": {"Z": "zebra"}}, r'grid_vocab: got \["Z"\]'),
    ],
)
def test_wrong_symbols_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        SokobanEnv(**config)


def test_the_instruction_can_be_replaced():
    assert SokobanEnv(env_instruction="Sokoban").env_instruction == "Sokoban"


@pytest.mark.parametrize(
    ("board", "message"),
    [
        ("######\n#PX__#\n######", "1 players, 1 boxes and 0 targets"),
        ("######\n#PXO__\n######", "opening in the border"),
        ("######\n#PXO#\n######", "rows of"),
        ("######\n#PXQ_#\n######", "'Q' in row 1"),
        ("######\n#P√__#\n######", "not solved yet"),
    ],
)
def test_a_given_board_is_checked(board, message):
    with pytest.raises(ValueError, match=message):
        Board.parse(board)


# ---- the frozen lake


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
            if after in free and after not in ways:
                ways[after] = [*ways[cell], name]
                queue.append(after)
    return None


@pytest.mark.parametrize(("size", "p"), [(4, 0.8), (8, 0.8), (8, 0.6), (8, 0.5)])
def test_every_lake_is_crossed_by_its_expert_on_a_shortest_way_and_the_goal_pays(size, p):
    env = FrozenLakeEnv(size=size, p=p, max_steps=100, reward_scale=2.0, step_penalty=-0.1)
    for seed in range(20):
        text, _ = env.reset(seed=seed)
        assert [len(line) for line in text.split("\n")] == [size] * size
        assert text[0] == "P" and text[-1] == "G"
        for left in range(len(way_to(text, "G")), 0, -1):
            assert len(way_to(text, "G")) == left
            name = env.expert_actions()[-1]
            text, reward, terminated, truncated, info = env.step(answer(name))
            assert info["action"] == name and info["action_is_effective"]
        assert terminated and not truncated and info["success"] and text[-1] == "√"
        assert reward == pytest.approx(2.0 * (1.0 - 0.1))
        assert env.expert_actions() == [], "silent at the end"


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


def test_the_shore_stops_the_player():
    env = FrozenLakeEnv()
    text, start = env.reset(seed=0)
    after, reward, terminated, _, info = env.step(answer("Up"))
    assert after == text and info["state_key"] == start["state_key"] and not terminated and reward == 0.0
    assert info["action_is_valid"] and not info["action_is_effective"]


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


def test_symbols_of_the_lake_can_be_changed_and_too_few_steps_for_the_way_are_refused():
    env = FrozenLakeEnv(grid_lookup={0: "@"}, grid_vocab={"@": "you"})
    text, _ = env.reset(seed=0)
    assert text[0] == "@" and "@: you" in env.env_instruction
    with pytest.raises(ValueError, match="max_steps: got 10, expected at least 14"):
        FrozenLakeEnv(size=8)
