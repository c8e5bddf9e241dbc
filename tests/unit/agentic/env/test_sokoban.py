"""Sokoban: rules, boards, rewards, against a search that shares no code with the library's."""

import subprocess
import sys
import time
from itertools import pairwise

import pytest

from roll.agentic.env.sokoban import SokobanEnv
from roll.agentic.env.sokoban_boards import Board

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}


def answer(name: str) -> str:
    return f"<answer>{name}</answer>"


def playing(board: str, **config) -> SokobanEnv:
    env = SokobanEnv(**config)
    env.reset(seed=0, options={"board": board})
    return env


def read(text: str):
    """Player, boxes, targets and walls of a drawn board, as sets of (row, column)."""
    cells = {(r, c): symbol for r, line in enumerate(text.split("\n")) for c, symbol in enumerate(line)}
    pick = lambda symbols: frozenset(cell for cell, symbol in cells.items() if symbol in symbols)  # noqa: E731
    (player,) = pick("PS")
    return player, pick("X√"), pick("O√S"), pick("#")


def oracle_move(player, boxes, walls, move):
    ahead = (player[0] + move[0], player[1] + move[1])
    beyond = (ahead[0] + move[0], ahead[1] + move[1])
    if ahead in walls or (ahead in boxes and (beyond in walls or beyond in boxes)):
        return player, boxes
    return ahead, (boxes - {ahead}) | {beyond} if ahead in boxes else boxes


def oracle_length(text: str) -> int | None:
    """Fewest moves to solve the board: plain forward breadth-first search."""
    player, boxes, targets, walls = read(text)
    frontier, seen, depth = [(player, boxes)], {(player, boxes)}, 0
    while frontier:
        if any(boxes == targets for _, boxes in frontier):
            return depth
        depth += 1
        found = {oracle_move(p, b, walls, move) for p, b in frontier for move in MOVES.values()} - seen
        seen |= found
        frontier = list(found)
    return None


# ---- rules


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
    env = playing("######\n#____#\n#PXO_#\n#____#\n#____#\n######", reward_scale=0.1)
    observation, reward, terminated, truncated, info = env.step(answer("Right"))
    assert "√" in observation and terminated and not truncated and info["success"]
    assert reward == info["task_reward"] == pytest.approx(0.1 * (-0.1 + 1.0 + 10.0))
    with pytest.raises(RuntimeError, match="reset"):
        env.step(answer("Right"))
    env = playing("######\n#PXO_#\n#____#\n#_X__#\n#_O__#\n######")
    _, _, terminated, _, info = env.step(answer("Right"))
    assert not terminated and not info["success"]
    board = "######\n#____#\n#PXO_#\n#____#\n#____#\n######"
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
def test_an_invalid_action_keeps_the_state_costs_the_penalty_and_counts_a_step(text):
    env = SokobanEnv(max_steps=2, format_penalty=-0.5, reward_scale=0.1)
    first, start = env.reset(seed=3)
    for last in (False, True):
        observation, reward, terminated, truncated, info = env.step(text)
        assert observation == first and info["state_key"] == start["state_key"]
        assert info["action"] is None and not info["action_is_valid"] and not info["action_is_effective"]
        assert (info["task_reward"], info["penalty"]) == (pytest.approx(-0.01), pytest.approx(-0.05))
        assert reward == info["task_reward"] + info["penalty"]
        assert (terminated, truncated) == (False, last)


def test_equal_states_have_equal_keys_and_there_is_none_before_reset():
    env = playing("######\n#____#\n#_P__#\n#__X_#\n#__O_#\n######")
    start = env.step("nothing")[4]["state_key"]
    up = env.step(answer("Up"))[4]["state_key"]
    assert up != start
    assert env.step(answer("Down"))[4]["state_key"] == start
    with pytest.raises(RuntimeError, match="reset"):
        SokobanEnv().step(answer("Up"))


# ---- boards


@pytest.mark.parametrize(
    ("config", "num_seeds"),
    [
        ({"max_solution": 4, "num_walls": 4}, 300),
        ({"min_solution": 7, "max_solution": 9}, 60),
        ({"num_boxes": 2, "min_solution": 2, "max_solution": 9}, 30),
        ({"dim_room": (6, 7), "num_boxes": 3, "num_walls": 8, "min_solution": 3, "max_solution": 7}, 15),
        ({"dim_room": (10, 10), "min_solution": 5, "max_solution": 9}, 25),
    ],
)
def test_boards_are_solvable_with_an_optimal_length_in_the_asked_range(config, num_seeds):
    env = SokobanEnv(**config)
    lengths = set()
    for seed in range(num_seeds):
        text, _ = env.reset(seed=seed)
        length = oracle_length(text)
        assert length is not None and config.get("min_solution", 1) <= length <= config["max_solution"]
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
    env = SokobanEnv(search_depth=2, max_steps=50)
    assert all(oracle_length(env.reset(seed=seed)[0]) <= 2 for seed in range(40))


def test_the_same_seed_gives_the_same_board_in_another_process():
    config = {"num_boxes": 2, "split": "train", "max_solution": 6}
    code = (
        "import roll.agentic.env as envs, sys\n"
        f"env = envs.make('sokoban', **{config!r})\n"
        "for seed in (0, 1, 2**40): sys.stdout.write(env.reset(seed=seed)[0] + env.board.hash)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    run = lambda hash_seed: subprocess.run(  # noqa: E731
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": hash_seed, "PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    env = SokobanEnv(**config)
    here = "".join(env.reset(seed=seed)[0] + env.board.hash for seed in (0, 1, 2**40))
    assert run("1").stdout == run("2").stdout == here


def test_seeds_give_different_boards_and_layouts_the_same_in_every_version():
    env = SokobanEnv(max_solution=4, num_walls=4)
    env.reset(seed=0)
    assert env.board.hash == "0927097a05cfef20"
    boards = []
    for seed in range(1000):
        env.reset(seed=seed)
        boards.append(env.board)
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
    hashes = {}
    for split in ("train", "eval"):
        env = SokobanEnv(split=split, max_solution=4, num_walls=4)
        hashes[split] = set()
        for seed in range(2500):
            env.reset(seed=seed)
            hashes[split].add(env.board.hash)
    assert not hashes["train"] & hashes["eval"]
    assert all(
        (int(board_hash, 16) / 2**64 < 0.1) == (split == "eval") for split in hashes for board_hash in hashes[split]
    )
    assert len(hashes["eval"]) > 1900 and len(hashes["train"]) > 2300


def test_train_and_eval_have_the_same_lengths():
    shares = {}
    for split in ("train", "eval"):
        env = SokobanEnv(split=split, max_solution=4, num_walls=4)
        lengths = []
        for seed in range(1000):
            env.reset(seed=seed)
            lengths.append(env.solution_length())
        shares[split] = [lengths.count(length) / 1000 for length in (1, 2, 3, 4)]
    assert all(0.2 < share < 0.3 for split in shares for share in shares[split])


def test_all_split_draws_from_both():
    env = SokobanEnv(holdout_fraction=0.3, max_solution=4)
    held_out = 0
    for seed in range(1000):
        env.reset(seed=seed)
        held_out += int(env.board.hash, 16) / 2**64 < 0.3
    assert 240 < held_out < 360


# ---- expert


@pytest.mark.parametrize("config", [{"max_solution": 8}, {"num_boxes": 2, "max_solution": 10, "dim_room": (7, 7)}])
def test_expert_actions_solve_in_the_optimal_length(config):
    env = SokobanEnv(**config)
    for seed in range(25):
        text, _ = env.reset(seed=seed)
        length, steps, terminated = oracle_length(text), 0, False
        while not terminated:
            actions = env.expert_actions()
            _, _, terminated, _, _ = env.step(answer(actions[(seed + steps) % len(actions)]))
            steps += 1
        assert steps == length
        assert env.expert_actions() == []


def test_expert_names_all_optimal_actions_also_off_the_path():
    env = SokobanEnv(num_boxes=2, max_solution=4, max_steps=30, num_walls=2)
    for seed in range(8):
        text, _ = env.reset(seed=seed)
        for index in range(4):
            player, boxes, _, walls = read(text)
            length = oracle_length(text)
            best = []
            for name, move in MOVES.items():
                after = drawn(text, *oracle_move(player, boxes, walls, move))
                rest = oracle_length(after)
                if length and rest is not None and rest == length - 1:
                    best.append(name)
            assert sorted(env.expert_actions()) == sorted(best)
            assert env.solution_length() == length
            text, _, terminated, _, _ = env.step(answer(list(MOVES)[(seed + 3 * index) % 4]))
            if terminated:
                break


def drawn(text, player, boxes):
    _, _, targets, walls = read(text)

    def symbol(cell):
        on = cell in targets
        if cell in walls:
            return "#"
        if cell == player:
            return "S" if on else "P"
        return ("√" if on else "X") if cell in boxes else "O" if on else "_"

    rows = text.split("\n")
    return "\n".join("".join(symbol((r, c)) for c in range(len(rows[0]))) for r in range(len(rows)))


def test_a_lost_board_has_no_expert_action_and_is_given_up_within_a_second():
    env = playing("######\n#X___#\n#_P__#\n#__O_#\n#____#\n######")
    assert oracle_length("######\n#X___#\n#_P__#\n#__O_#\n#____#\n######") is None
    assert env.expert_actions() == [] and env.solution_length() is None
    env = playing(
        "##########\n#X_______#\n#_P__X___#\n#____O___#\n#__X_____#\n#__O__X__#\n#_____O__#\n#________#\n#_______O#\n##########"
    )
    start = time.process_time()
    assert env.expert_actions() == []
    assert time.process_time() - start < 1.0


# ---- symbols


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
