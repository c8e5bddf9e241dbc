"""What the generators of data write: right answers, held-out rows, teachers that err as told; wrong arguments."""

import asyncio
import base64
import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from roll.agentic.tools.builtin import calculator
from roll.agentic.tools.dialects import dialect
from roll.demo import arithmetic, products, shapes, word_problems
from roll.extras.sandbox.python_tool import PythonTool


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


FEW = {"num_train": 60, "num_val": 20}
SMALL = FEW | {"num_demonstrations": 60}
MAKERS = {arithmetic: {}, products: SMALL, shapes: SMALL, word_problems: FEW}


@pytest.mark.parametrize("module", MAKERS, ids=lambda module: module.__name__)
def test_equal_arguments_write_equal_bytes(module, tmp_path):
    for name in ("a", "b"):
        module.write_dataset(tmp_path / name, seed=3, **MAKERS[module])
    written = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    assert written == {file.name: file.read_bytes() for file in (tmp_path / "b").iterdir()} and len(written) >= 2


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


# Products, with a tool

COUNTS: dict[str, Any] = {"num_train": 300, "num_val": 100, "num_demonstrations": 1000}


def operands(text: str) -> frozenset[str]:
    return frozenset(text.strip("=").split("*"))


def test_the_teacher_calls_as_often_as_it_is_told_and_the_answers_are_the_calculators(tmp_path):
    products.write_dataset(tmp_path, call_rate=0.5, slip_rate=0.2, **COUNTS)
    rows = [row["messages"] for row in read(tmp_path / "demonstrations.jsonl")]
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
    rows = [row["messages"] for row in read(tmp_path / "demonstrations.jsonl")]
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
    train, val = (read(tmp_path / file) for file in ("train.jsonl", "val.jsonl"))
    assert all(row["solution"] == calculator(row["prompt"].strip("=")) for row in (*train, *val))
    shown = [row["messages"][0]["content"] for row in read(tmp_path / "demonstrations.jsonl")]
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
    lines = {name: read(tmp_path / f"{name}.jsonl") for name in ("train", "val", "demonstrations")}
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
        found = read(tmp_path / f"{name}.jsonl")
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
