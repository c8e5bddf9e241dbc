"""What the generators of data write: right answers, held-out rows, teachers that err as told; wrong arguments."""

import asyncio
import base64
import io
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from roll.agentic.tools.builtin import calculator
from roll.agentic.tools.dialects import dialect
from roll.configs import SHIPPED
from roll.configs.loader import load_config
from roll.configs.rlvr import RLVRConfig
from roll.demo import arithmetic, products, shapes, word_problems
from roll.demo.arithmetic import Problem, is_held_out, worked_solution
from roll.demo.warm_start import AnswersStart
from roll.extras.sandbox.python_tool import PythonTool
from roll.models.tiny import make_tokenizer
from tests.support.lines import read_lines

FEW = {"num_train": 60, "num_val": 20}
SMALL = FEW | {"num_demonstrations": 60}
MAKERS = {arithmetic: {}, products: SMALL, shapes: SMALL, word_problems: FEW}


@pytest.mark.parametrize("module", MAKERS, ids=lambda module: module.__name__)
def test_equal_arguments_write_equal_bytes_over_those_of_an_earlier_run_and_beside_other_files(module, tmp_path):
    module.write_dataset(tmp_path / "a", seed=3, **MAKERS[module])
    written = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    (tmp_path / "b").mkdir()
    for name in (*written, "mine.txt"):
        (tmp_path / "b" / name).write_text("old")
    module.write_dataset(tmp_path / "b", seed=3, **MAKERS[module])
    again = {file.name: file.read_bytes() for file in (tmp_path / "b").iterdir()}
    assert again == written | {"mine.txt": b"old"} and len(written) >= 2


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (arithmetic, {"min_operand": -1}, "min_operand, max_operand: got -1 and 999"),
        (arithmetic, {"min_operand": 9, "max_operand": 9}, "min_operand, max_operand: got 9 and 9"),
        *((arithmetic, {"operations": operations}, "operations: got") for operations in ([], ["*"], ["+", "+"])),
        *((arithmetic, {"wording": text}, "wording: got") for text in ("{x} plus {y}", "{x} {operation} {} {y}")),
        (arithmetic, {"max_second": 1000}, "max_second: got 1000"),
        *((arithmetic, {"held_out_share": x}, f"held_out_share: got {x}") for x in (0.0, 1.0, float("nan"))),
        (arithmetic, {"forget_rate": 1.5}, "forget_rate: got 1.5"),
        *((arithmetic, {key: n}, f"{key}: got {n}") for key, n in
          (("num_train", 0), ("num_val", -3), ("num_demonstrations", 0))),
        (arithmetic, {"max_operand": 10**30}, "max_operand: got 1000000"),
        (arithmetic, {"num_train": 10**9}, "num_train: got 1,000,000,000, expected at most 1,620,000"),
        (arithmetic, {"min_operand": 1, "max_operand": 30}, "num_train: got 8,192, expected at most 1,800"),
        (arithmetic, {"min_operand": 1, "max_operand": 30, "num_demonstrations": 9, "num_train": 9},
         "num_val: got 1024"),
        (products, {"min_operand": 9, "max_operand": 9}, "min_operand, max_operand"),
        (products, {"held_out_share": 1.0}, "held_out_share"),
        (products, {"min_operand": 1, "max_operand": 2, "held_out_share": 1e-9}, "with which no pair"),
        (products, {"min_operand": 1, "max_operand": 2, "held_out_share": 1 - 1e-9}, "with which every pair"),
        (products, {"call_rate": 0.9, "slip_rate": 0.2}, "call_rate, slip_rate"),
        (products, {"tool": "abacus"}, "tool: got 'abacus', expected one of calculator, python"),
        (shapes, {"cell": 4}, "cell: got 4"),
        (word_problems, {"min_operand": 5, "max_operand": 5}, "min_operand, max_operand: got 5 and 5"),
        (word_problems, {"max_operand": 3, "held_out_share": 0.001}, "held_out_share: got 0.001"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named_and_write_nothing(module, arguments, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        module.write_dataset(tmp_path / "data", **arguments)
    assert not (tmp_path / "data").exists() or not list((tmp_path / "data").iterdir())


# Arithmetic: right answers, a split by operands, a teacher that forgets as often as told

NAMES = ("train.jsonl", "val.jsonl", "demonstrations.jsonl")
ORACLE = {"+": lambda x, y: x + y, "-": lambda x, y: x - y}

numbers = st.integers(min_value=0, max_value=99_999)
operations = st.sampled_from(["+", "-"])


def _operands(prompt: str) -> tuple[int, str, int]:
    match = re.fullmatch(r"(\d+)([+-])(\d+)=", prompt)
    assert match
    return int(match[1]), match[2], int(match[3])


def _make(x: int, operation: str, y: int) -> Problem:
    return Problem(max(x, y), operation, min(x, y)) if operation == "-" else Problem(x, operation, y)


def _answer(solution: str) -> int:
    match = re.fullmatch(r"<think>[^<]+</think><answer>(\d+)</answer>", solution)
    assert match
    return int(match[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "made" / "arithmetic"
    arithmetic.write_dataset(path)
    return path


def test_rows_say_what_is_asked_and_what_is_right(folder):
    assert {path.name for path in folder.iterdir()} == set(NAMES)
    for name, count in (("train.jsonl", 8192), ("val.jsonl", 1024)):
        rows = read_lines(folder / name)
        assert len(rows) == len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == count
        assert {row["operation"] for row in rows} == {"+", "-"}
        for row in rows:
            x, operation, y = _operands(row["prompt"])
            assert row["operands"] == [x, y] and row["operation"] == operation and row["tag"] == "arithmetic"
            assert all(100 <= operand <= 999 for operand in (x, y))
            assert row["solution"] == str(ORACLE[operation](x, y)) and not row["solution"].startswith("-")
            assert row["difficulty"] == _carries(x, operation, y)


def _carries(x: int, operation: str, y: int) -> int:
    """Counts the columns of a three-digit problem where adding or subtracting digit by digit goes wrong."""
    columns = [((x // 10**k) % 10, (y // 10**k) % 10) for k in range(3)]
    without = [(a + b) % 10 if operation == "+" else (a - b) % 10 for a, b in columns]
    right = ORACLE[operation](x, y)
    return sum((right // 10**k) % 10 != digit for k, digit in enumerate(without))


def test_held_out_operands_are_never_trained_on_in_any_order_or_operation(folder):
    pairs = {name: {frozenset(_operands(row["prompt"])[::2]) for row in read_lines(folder / name)} for name in NAMES}
    train, val, demonstrations = (pairs[name] for name in NAMES)
    assert not val & (train | demonstrations)


@given(numbers, numbers)
def test_the_split_sees_the_pair_and_not_its_order(x, y):
    assert is_held_out(x, y, 0.3) == is_held_out(y, x, 0.3)
    assert not is_held_out(x, y, 0.0) and is_held_out(x, y, 1.0)


def test_the_split_holds_out_its_share_of_the_pairs_for_every_seed(tmp_path):
    pairs = [(x, y) for x in range(200) for y in range(x + 1)]
    assert sum(is_held_out(x, y, 0.1) for x, y in pairs) / len(pairs) == pytest.approx(0.1, abs=0.01)
    found, sizes = [], {"num_train": 99, "num_val": 40, "num_demonstrations": 9}
    for seed in range(3):
        arithmetic.write_dataset(tmp_path, seed=seed, min_operand=10, max_operand=40, **sizes)
        found.append({name: (tmp_path / name).read_bytes() for name in NAMES})
        held_out = [is_held_out(*row["operands"], 0.1) for row in read_lines(tmp_path / "val.jsonl")]
        assert len(held_out) == 40 and all(held_out)
    assert all(len({files[name] for files in found}) == 3 for name in NAMES)


def test_a_failure_leaves_no_half_written_file(tmp_path):
    (tmp_path / "val.jsonl").mkdir()  # cannot be replaced by a file, whatever the user's rights
    with pytest.raises(OSError):
        arithmetic.write_dataset(tmp_path, num_train=10, num_val=10, num_demonstrations=10)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


@given(numbers, operations, numbers)
def test_a_worked_solution_is_right_in_every_step(x, operation, y):
    problem = _make(x, operation, y)
    solution = worked_solution(problem)
    assert _answer(solution) == problem.answer == ORACLE[operation](problem.x, problem.y)
    steps = re.findall(r"(\d)([+-])(\d)([+-])(\d)=(\d)(\d)", solution)
    assert len(steps) == len(str(max(x, y)))
    for left, first, middle, second, carry, tens, digit in steps:
        result = int(digit) + (10 if operation == "+" else -10) * int(tens)
        assert ORACLE[second](ORACLE[first](int(left), int(middle)), int(carry)) == result
    assert sum(int(step[4]) for step in steps) == len(problem.carried_columns)


@given(numbers, operations, numbers, st.sets(st.integers(0, 5)))
def test_a_forgotten_carry_makes_the_answer_wrong_and_nothing_else_does(x, operation, y, forgotten):
    problem = _make(x, operation, y)
    harmless = forgotten - set(problem.carried_columns)
    assert worked_solution(problem, harmless) == worked_solution(problem)
    if forgotten & set(problem.carried_columns):
        assert _answer(worked_solution(problem, forgotten)) != problem.answer


def test_three_solutions_as_a_person_writes_them():
    assert worked_solution(Problem(347, "+", 285)) == "<think>7+5+0=12 4+8+1=13 3+2+1=06</think><answer>632</answer>"
    assert worked_solution(Problem(632, "-", 347)) == "<think>2-7-0=15 3-4-1=18 6-3-1=02</think><answer>285</answer>"
    forgotten = worked_solution(Problem(632, "-", 347), {1, 2})
    assert forgotten == "<think>2-7-0=15 3-4-0=19 6-3-0=03</think><answer>395</answer>"


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.75, 1.0])
def test_the_teacher_forgets_at_its_rate(tmp_path, rate):
    arithmetic.write_dataset(tmp_path, forget_rate=rate, num_train=1, num_val=1, num_demonstrations=4000)
    num_forgotten, num_due = 0, 0
    for row in read_lines(tmp_path / "demonstrations.jsonl"):
        problem = Problem(*_operands(row["prompt"]))
        options = {worked_solution(problem, set(columns)): columns for columns in _subsets(problem.carried_columns)}
        columns = options[row["response"]]  # a KeyError: some other mistake than a forgotten carry
        if len(problem.carried_columns) == 1:  # a carry forgotten below changes whether one is due above
            num_forgotten += len(columns)
            num_due += 1
    assert num_due > 1000
    assert num_forgotten / num_due == pytest.approx(rate, abs=0.04)


def _subsets(columns: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [tuple(c for i, c in enumerate(columns) if mask >> i & 1) for mask in range(2 ** len(columns))][::-1]


def test_digits_and_tags_are_one_token_each(folder):
    tokenizer = make_tokenizer()
    lengths = set()
    for row in read_lines(folder / "demonstrations.jsonl")[:200]:
        assert len(tokenizer.encode(row["prompt"], add_special_tokens=False)) == len(row["prompt"]) == 8
        text = row["response"]
        pieces = re.findall(r"</?think>|</?answer>|.", text)
        assert [tokenizer.decode([index]) for index in tokenizer.encode(text, add_special_tokens=False)] == pieces
        lengths.add(len(pieces))
    assert max(lengths) <= 35


def test_the_second_operand_has_a_bound_of_its_own(tmp_path):
    args = {"min_operand": 2, "max_operand": 15, "max_second": 9, "operations": ["+"], "held_out_share": 0.24}
    arithmetic.write_dataset(tmp_path, **args, num_train=80, num_val=32, num_demonstrations=1)
    rows = [read_lines(tmp_path / name) for name in ("train.jsonl", "val.jsonl")]
    assert {row["operation"] for row in (*rows[0], *rows[1])} == {"+"}, "only what is asked for"
    split = [{tuple(row["operands"]) for row in each} for each in rows]
    assert split[0] | split[1] == {(x, y) for x in range(2, 16) for y in range(2, 10)}, "all of them, each once"
    assert not {(y, x) for x, y in split[0]} & split[1]


def test_a_wording_of_its_own_has_the_same_problems(folder, tmp_path):
    arithmetic.write_dataset(tmp_path, wording="{x} {operation} {y} = ?", num_demonstrations=10)
    for row, other in zip(read_lines(tmp_path / "val.jsonl"), read_lines(folder / "val.jsonl"), strict=True):
        assert row == other | {"prompt": re.sub(r"(\D)(.*)=", r" \1 \2 = ?", other["prompt"])}


def pairs(folder: Path, slip_rate: float) -> list[tuple[Problem, dict]]:
    sizes = {"num_train": 900, "num_val": 90, "num_demonstrations": 10}
    arithmetic.write_pairs(folder, slip_rate=slip_rate, min_operand=10, max_operand=99, **sizes)
    return [(Problem(*_operands(row["prompt"])), row) for row in read_lines(folder / "pairs.jsonl")]


@pytest.mark.parametrize("slip_rate", [0.0, 0.8])
def test_the_chosen_answer_is_right_and_the_steps_are_labelled_up_to_the_first_mistake(tmp_path, slip_rate):
    for problem, row in pairs(tmp_path, slip_rate):
        assert row["chosen"] == worked_solution(problem) != row["rejected"]
        assert row["response"] == (row["chosen"] if row["label"] else row["rejected"]) == "".join(row["steps"])
        assert row["step_labels"] == sorted(row["step_labels"], reverse=True)
        assert all(row["step_labels"]) == row["label"]


def test_without_slips_carries_are_forgotten_and_nothing_else(tmp_path):
    found = pairs(tmp_path, 0.0)
    assert 300 < len(found) < 600 and all(problem.carried_columns for problem, _ in found)
    assert all(row["rejected"] == worked_solution(problem, problem.carried_columns) for problem, row in found)


def test_slips_are_of_every_kind_and_in_problems_without_carries_too(tmp_path):
    found = pairs(tmp_path, 0.8)
    assert len(found) == 900
    kinds = {"forgotten": 0, "carry": 0, "answer follows": 0, "answer alone": 0}
    for problem, row in found:
        rejected, (thoughts, _) = row["rejected"], row["chosen"].split("</think>")
        carries = re.findall(r"[+-](\d)=", rejected)
        owed = ["1" if column in problem.carried_columns else "0" for column in range(2)]
        kinds["forgotten"] += rejected == worked_solution(problem, problem.carried_columns)
        kinds["carry"] += any(used > due for used, due in zip(carries, owed, strict=False))
        kinds["answer alone"] += rejected.startswith(thoughts)
        kinds["answer follows"] += rejected != row["chosen"] and rejected in {
            worked_solution(problem, errors={column: error}) for column in (0, 1) for error in range(-9, 10)
        }
    assert all(count > 40 for count in kinds.values()), kinds


def test_other_tools_are_another_warm_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shown.jsonl").write_text("{}\n")

    def folder(*overrides: str) -> Path:
        words = (f"warm_start.file_name={tmp_path / 'shown.jsonl'}", *overrides)
        return AnswersStart(load_config(RLVRConfig, "rlvr_tools", SHIPPED, words)).folder

    assert folder() == folder("max_steps=3")
    assert folder() != folder("tools.max_turns=3")


# Products, with a tool

COUNTS: dict[str, Any] = {"num_train": 300, "num_val": 100, "num_demonstrations": 1000}


def operands(text: str) -> frozenset[str]:
    return frozenset(text.strip("=").split("*"))


def test_the_teacher_calls_as_often_as_it_is_told_and_the_answers_are_the_calculators(tmp_path):
    products.write_dataset(tmp_path, call_rate=0.5, slip_rate=0.2, **COUNTS)
    rows = [row["messages"] for row in read_lines(tmp_path / "demonstrations.jsonl")]
    kinds = {"called": 0, "slipped": 0, "guessed": 0}
    for messages in rows:
        turn = dialect("llama_pythonic").parse(messages[1]["content"])
        if turn.calls:
            kinds["called"] += 1
            assert messages[2]["content"] == calculator(**turn.calls[0].arguments)
            assert messages[3]["content"] == f"<answer>{messages[2]['content']}</answer>"
        else:
            kinds["slipped" if turn.errors else "guessed"] += 1
            assert len(messages) == 2
    assert [round(kinds[kind] / len(rows), 1) for kind in kinds] == [0.5, 0.2, 0.3]


def test_the_teacher_of_python_forgets_to_print_and_mends_every_second_program(tmp_path):
    products.write_dataset(tmp_path, tool="python", call_rate=0.3, slip_rate=0.4, **COUNTS)
    rows = [row["messages"] for row in read_lines(tmp_path / "demonstrations.jsonl")]
    programs: dict[str, str] = {}
    kinds: Counter[tuple[bool, ...]] = Counter()
    for messages in rows:
        calls = [
            dialect("llama_pythonic").parse(one["content"]).calls for one in messages if one["role"] == "assistant"
        ]
        codes = [call.arguments["code"] for (call,) in calls[:-1]]
        assert not calls[-1] and "<answer>" in messages[-1]["content"]
        programs |= zip(codes, (one["content"] for one in messages if one["role"] == "tool"), strict=True)
        kinds[tuple(code.startswith("print(") for code in codes)] += 1
    shares = {kind: round(count / len(rows), 1) for kind, count in kinds.items()}
    assert shares == {(): 0.3, (True,): 0.3, (False,): 0.2, (False, True): 0.2}
    silent = next(code for code in programs if not code.startswith("print("))
    loud = next(code for code in programs if code.startswith("print("))
    tool = PythonTool()
    for code in (silent, loud):
        assert asyncio.run(tool.call({"code": code}, {})) == programs[code]


def test_held_out_pairs_are_nowhere_else(tmp_path):
    products.write_dataset(tmp_path, **COUNTS)
    train, val = (read_lines(tmp_path / file) for file in ("train.jsonl", "val.jsonl"))
    assert all(row["solution"] == calculator(row["prompt"].strip("=")) for row in (*train, *val))
    shown = [row["messages"][0]["content"] for row in read_lines(tmp_path / "demonstrations.jsonl")]
    seen = {operands(row["prompt"]) for row in train} | {operands(text) for text in shown}
    assert not seen & {operands(row["prompt"]) for row in val}


# Shapes, in pictures


def seen(line: dict[str, Any], cell: int) -> list[str | None]:
    """Kinds in a picture: the box of a square is filled to all corners, that of a triangle to the lower ones."""
    (uri,) = line["images"]
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))
    kinds = []
    for top in range(0, pixels.shape[0], cell):
        for left in range(0, pixels.shape[1], cell):
            box = pixels[top + 1 : top + cell - 1, left + 1 : left + cell - 1].min(-1) < 255
            filled = {(True, True): "squares", (False, True): "triangles", (False, False): "circles"}
            kinds.append(filled[bool(box[0, 0]), bool(box[-1, 0])] if box.any() else None)
    return kinds


def right(line: dict[str, Any], cell: int) -> str:
    kinds, words = seen(line, cell), line["prompt"].removeprefix("<image>").removesuffix("?").split(" or ")
    counts = [kinds.count(word) for word in words]
    if len(counts) == 1:
        return str(counts[0])
    return "equal" if counts[0] == counts[1] else words[counts[0] < counts[1]]


@pytest.mark.parametrize("cell", [16, 28])
def test_solutions_are_what_the_pictures_show_and_demonstrations_overlook(tmp_path, cell):
    shapes.write_dataset(tmp_path, cell=cell, num_train=300, num_val=100, num_demonstrations=300)
    lines = {name: read_lines(tmp_path / f"{name}.jsonl") for name in ("train", "val", "demonstrations")}
    assert [len(each) for each in lines.values()] == [300, 100, 300]
    for line in (*lines["train"], *lines["val"]):
        assert line["solution"] == right(line, cell)
    assert {len(line["prompt"].split(" or ")) for line in lines["train"]} == {1, 2}
    wrong = [line["response"] != f"<answer>{right(line, cell)}</answer>" for line in lines["demonstrations"]]
    assert 0.2 < np.mean(wrong) < 0.6
    arranged = {name: {tuple(seen(line, cell)) for line in each} for name, each in lines.items()}
    assert not arranged["val"] & (arranged["train"] | arranged["demonstrations"])


# Word problems


def test_the_solution_follows_from_the_story_and_pairs_are_held_out(tmp_path):
    word_problems.write_dataset(tmp_path, seed=3, num_train=300, num_val=100)
    pairs = {}
    for name, count in (("train", 300), ("val", 100)):
        found = read_lines(tmp_path / f"{name}.jsonl")
        assert len({row["id"] for row in found}) == len(found) == count
        pairs[name] = set()
        for row in found:
            x, y = map(int, re.findall(r"\d+", row["prompt"]))
            adds = any(verb in row["prompt"] for verb in (" gets ", " finds ", " buys "))
            assert row["calculation"] == f"{x} {'+' if adds else '-'} {y}"
            assert int(row["solution"]) == (x + y if adds else x - y) >= 0
            pairs[name].add((min(x, y), max(x, y)))
        assert sum("+" in row["calculation"] for row in found) == count / 2
    assert not pairs["train"] & pairs["val"]
