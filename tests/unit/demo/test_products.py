"""The data of the tool demonstration."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

from roll.agentic.tools.builtin import calculator
from roll.agentic.tools.dialects import dialect
from roll.demo.products import write_dataset
from roll.extras.sandbox.python_tool import PythonTool

COUNTS: dict[str, Any] = {"num_train": 300, "num_val": 100, "num_demonstrations": 1000}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def operands(text: str) -> frozenset[str]:
    return frozenset(text.strip("=").split("*"))


def test_the_teacher_calls_as_often_as_it_is_told_and_the_answers_are_the_calculators(tmp_path):
    write_dataset(tmp_path, call_rate=0.5, slip_rate=0.2, **COUNTS)
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
    write_dataset(tmp_path, tool="python", call_rate=0.3, slip_rate=0.4, **COUNTS)
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
    write_dataset(tmp_path, **COUNTS)
    train, val = (read(tmp_path / file) for file in ("train.jsonl", "val.jsonl"))
    assert all(row["solution"] == calculator(row["prompt"].strip("=")) for row in (*train, *val))
    shown = [row["messages"][0]["content"] for row in read(tmp_path / "demonstrations.jsonl")]
    seen = {operands(row["prompt"]) for row in train} | {operands(text) for text in shown}
    assert not seen & {operands(row["prompt"]) for row in val}
