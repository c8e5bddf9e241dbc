"""Datasets of preferences: pairs stay pairs, labels are labels, and what is wrong is told by file and line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.configs.data import DataArguments
from roll.configs.preference import MarginColumns
from roll.data.conversations import Conversations, encode_talk
from roll.data.files.rows import DataError
from roll.data.left_out import LeftOut
from roll.data.preferences import load_preferences
from roll.data.renderer import ChatRenderer
from roll.models.tiny import make_tokenizer

RENDERER = ChatRenderer(make_tokenizer())


def load(path: Path, rows: list[dict[str, Any]], *, label: str | None = None, **options: Any) -> Conversations:
    file = path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {key: options.pop(key) for key in ("prompt", "messages", "response") if key in options} or {"prompt": "ask"}
    return load_preferences(
        DataArguments(file_name=str(file), **keys),
        MarginColumns(margin=options.pop("margin", None)),
        label=label,
        encode=encode_talk(RENDERER),
        left_out=LeftOut(RENDERER),
        **{"max_tokens": 40, **options},
    )


def said(data: Conversations) -> list[str]:
    """What each row's loss counts, without the token that ends it."""
    lengths = data.batch.lengths_B.tolist()
    rows = zip(data.batch.tokens_T.split(lengths), data.batch.loss_mask_T.split(lengths), strict=True)
    return [RENDERER.tokenizer.decode(tokens[mask][:-1]) for tokens, mask in rows]


def test_columns_messages_and_conversations_say_the_same(tmp_path: Path) -> None:
    ask = {"role": "user", "content": "a?"}
    answers = [{"role": "assistant", "content": text} for text in ("good", "bad")]
    rows = {
        "prompt": ({"ask": "a?", "chosen": "good", "rejected": "bad"}, {"prompt": "ask"}),
        "messages": ({"ask": [ask], "chosen": [answers[0]], "rejected": "bad"}, {"messages": "ask"}),
        "whole": ({"chosen": [ask, answers[0]], "rejected": [ask, answers[1]]}, {"messages": "chosen"}),
    }
    found = [load(tmp_path, [row], **keys) for row, keys in rows.values()]
    for data in found:
        assert said(data) == ["good", "bad"]
        assert data.batch.pair_B.tolist() == [0, 0] and data.batch.preferred_B.tolist() == [True, False]
        assert torch.equal(data.batch.tokens_T, found[0].batch.tokens_T)
        assert [question.messages for question in data.questions] == [(ask,)]
    assert str(found[0].report).startswith("1 pairs, 9 of ")


def test_with_one_side_of_a_pair_goes_the_other(tmp_path: Path) -> None:
    rows = [
        {"ask": "a", "chosen": "yes", "rejected": "n" * 90},
        {"ask": "b", "chosen": "one", "rejected": "two"},
        {"ask": "c", "chosen": "y" * 90, "rejected": "z"},
        {"ask": "d", "chosen": "three", "rejected": "four"},
    ]
    data = load(tmp_path, rows, overflow="drop")
    assert said(data) == ["one", "two", "three", "four"]
    assert data.batch.pair_B.tolist() == [0, 0, 1, 1]
    assert [question.messages[-1]["content"] for question in data.questions] == ["b", "d"]


def test_labelled_answers_need_no_pair(tmp_path: Path) -> None:
    rows = [{"ask": "a", "response": text, "label": label} for text, label in (("x", True), ("y", 0), ("z", "true"))]
    data = load(tmp_path, rows, label="label", prompt="ask", response="response")
    assert data.batch.pair_B is None and data.batch.preferred_B.tolist() == [True, False, True]
    with pytest.raises(DataError, match=r"data.jsonl:1: column 'label': 'maybe', expected true or false"):
        load(tmp_path, [rows[0] | {"label": "maybe"}], label="label", prompt="ask", response="response")


def test_what_is_too_long_says_which_side(tmp_path: Path) -> None:
    rows = [{"ask": "a", "chosen": "y", "rejected": "n" * 90}, {"ask": "a" * 90, "chosen": "y", "rejected": "n"}]
    with pytest.raises(DataError) as error:
        load(tmp_path, rows)
    places = [problem.rpartition("data.jsonl:")[2].rpartition(": ")[0] for problem in error.value.problems]
    assert places == ["1: column 'rejected'", "2: column 'chosen'", "2: column 'rejected'"]


@pytest.mark.parametrize(
    ("margin", "words"),
    [
        (-1, "-1, expected 0 or more"),
        (math.inf, "inf, expected a finite"),
        (1e300, "1e\\+300, expected a finite number"),
        (10**400, "inf, expected a finite number"),
        (None, "null, expected a number"),
    ],
)
def test_a_margin_is_a_number_that_a_loss_can_take(tmp_path: Path, margin: float | None, words: str) -> None:
    row = {"ask": "a", "chosen": "x", "rejected": "y", "margin": margin}
    with pytest.raises(DataError, match=f"data.jsonl:1: column 'margin': {words}"):
        load(tmp_path, [row], margin="margin")
    assert load(tmp_path, [row | {"margin": 0.5}], margin="margin").batch.target_B.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("row", "keys", "words"),
    [
        ({"ask": "a", "chosen": "x"}, {}, "no column 'rejected'"),
        ({"ask": "a", "chosen": "x", "rejected": "x"}, {}, "the same answer, expected two"),
        ({"ask": "a", "chosen": None, "rejected": "x"}, {}, "column 'chosen': null, expected the text of an answer"),
        ({"ask": "a", "chosen": " ", "rejected": "x"}, {}, "column 'chosen': ' ', expected the text of an answer"),
        (
            {
                side: [{"role": "user", "content": side}, {"role": "assistant", "content": side}]
                for side in ("chosen", "rejected")
            },
            {"messages": "chosen"},
            "differ before their last answers",
        ),
    ],
)
def test_rows_that_are_no_pair_are_told(tmp_path: Path, row: dict[str, Any], keys: dict[str, str], words: str) -> None:
    with pytest.raises(DataError, match=f"data.jsonl:1: .*{words}"):
        load(tmp_path, [row], **keys)
