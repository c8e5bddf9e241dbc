"""Finding the program in a response: replies as models write them, and texts that would take long to read."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from roll.extras.sandbox.code_blocks import Asked, extract_code

REPLIES = [json.loads(line) for line in Path(__file__).with_name("code_replies.jsonl").read_text().splitlines()]


def test_there_are_many_replies():
    assert len(REPLIES) >= 100 and len({reply["name"] for reply in REPLIES}) == len(REPLIES)


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: reply["name"])
def test_the_program_of_a_reply_is_found(reply):
    asked = Asked(frozenset(reply["asked"]), reply["input"])
    found = extract_code(reply["response"], reply.get("where", "fence"), asked, finished=reply.get("finished", True))
    assert (found and found.strip()) == (reply["program"] and reply["program"].strip())


RIGHT, WRONG = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a - b\n"


@pytest.mark.parametrize(
    "blocks",
    [
        [RIGHT, WRONG],
        [RIGHT, RIGHT, WRONG],
        [f"def plus(a, b):\n    return a + b\n\n{RIGHT}", f"{WRONG}\nplus(1, 2)\n"],
        [RIGHT, f"class Solution:\n    {WRONG.replace(chr(10), chr(10) + '    ')}\n"],
        [RIGHT, "add = max\n", WRONG],
    ],
)
def test_of_several_candidates_the_last_counts(blocks):
    text = "\nor\n".join(f"```python\n{block}```" for block in blocks)
    assert "return a - b" in extract_code(text, "fence", Asked(frozenset({"add"}))).rpartition("def add")[2]
    bare = f"{RIGHT}\nIn any case:\n```python\n{WRONG}```\nor else\n\n{RIGHT}"
    assert extract_code(bare, "fence", Asked(frozenset({"add"}))) == WRONG


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "`",
            "~",
            "```\n",
            "```python\n",
            "~~~\n",
            '"""\n',
            "'''",
            "# ",
            "\\",
            RIGHT,
            " ",
            "\t\n",
            ">>> x\n",
            "- ",
            "> ",
        ),
        *("for in :", "import a, ", "a = ", "a[", "@a(", "</a>", "<answer>", '```python\n"""\n```\n', "```a` ", "\r"),
        *("```python\n  x\n```\n", "```python\nimport a\n```\n", "```python\ndef f():\n  pass\n```\n", "````\n```\n"),
    ],
    ids=repr,
)
def test_no_text_takes_long_to_read(piece):
    text = piece * (50_000 // len(piece))
    started = time.process_time()
    for asked in (Asked(frozenset({"add"})), Asked(input=True)):
        extract_code(f"{text}!", "fence", asked, finished=True)
    assert time.process_time() - started < 2
