"""Datasets of conversations: columns, lengths, what is wrong with a row, and what is reported."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from roll.configs.data import DataArguments
from roll.data.conversations import Conversations, Scoring, check_conversations, load_conversations
from roll.data.files.rows import DataError
from roll.data.reading import Reading
from roll.data.renderer import ChatRenderer
from roll.models.tiny import make_tokenizer

RENDERER = ChatRenderer(make_tokenizer())
TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "Up"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "Down"},
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, columns: dict[str, Any], **options: Any) -> Conversations:
    args = DataArguments(file_name=str(path), **columns)
    return load_conversations(args, renderer=RENDERER, **{"max_tokens": 64, **options})


def said(data: Conversations, row: int) -> str:
    """What a row's mask is 1 on, as text."""
    one = data.batch.select([row])
    return str(RENDERER.tokenizer.decode(one.tokens_T[one.loss_mask_T]))


def test_questions_with_answers_and_conversations_are_read_from_every_format(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    pairs = load(write(tmp_path / "pairs.jsonl", [{"q": "a", "r": "Up"}]), {"prompt": "q", "response": "r"})
    assert said(pairs, 0) == "Up<|im_end|>"
    rows = [{"talk": TALK}, {"talk": TALK[:2]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "talks.parquet")
    for path in (write(tmp_path / "talks.jsonl", rows), tmp_path / "talks.parquet"):
        talks = load(path, {"messages": "talk", "system_prompt": "S"})
        assert [said(talks, row) for row in (0, 1)] == ["Up<|im_end|>Down<|im_end|>", "Up<|im_end|>"]
        assert said(load(path, {"messages": "talk"}, last_only=True), 0) == "Down<|im_end|>"
        assert [question.messages[-1]["content"] for question in talks.questions] == ["b", "a"]
        assert talks.questions[0].messages[0]["role"] == "system"
    tokens = pairs.batch.select([0]).tokens_T.tolist()
    assert tokens == [*RENDERER.prompt(TALK[:1]).tolist(), *RENDERER.tokenizer.encode("Up<|im_end|>")]


def test_everything_wrong_with_the_rows_is_told_by_line(tmp_path: Path) -> None:
    bad = write(
        tmp_path / "bad.jsonl",
        [
            {"talk": TALK},
            {"talk": TALK[:3]},
            {"talk": [TALK[0], {**TALK[1], "weight": 0}]},
            {"talk": [*TALK[:3], {"role": "assistant", "content": " "}]},
            {"talks": TALK},
            {"talk": [{"role": "user", "content": "x" * 80}, TALK[1]]},
        ],
    )
    with pytest.raises(DataError) as caught:
        load(bad, {"messages": "talk"})
    told = "\n".join(caught.value.problems)
    assert caught.value.count == 5
    for line, words in (
        (2, "talk[2]: the last message is of the user, expected the assistant"),
        (3, "nothing to learn: weight or train or training or loss leaves out all of the assistant's"),
        (4, "talk[3].content: empty, expected an answer"),
        (5, "no column 'talk'"),
        (6, "88 tokens, expected at most sequence_length = 64 (see sample_overflow)"),
    ):
        assert f"{bad}:{line}: " in told and words in told, told
    pairs = write(tmp_path / "pairs.jsonl", [{"q": "a"}, {"q": "a", "r": 3}])
    with pytest.raises(DataError, match=r"pairs.jsonl:1: no column 'r'.*\n.*pairs.jsonl:2: column 'r': 3, expected"):
        load(pairs, {"prompt": "q", "response": "r"})


@pytest.mark.parametrize(("overflow", "kept"), [("drop", 1), ("truncate", 2)])
def test_what_is_too_long_is_left_out_or_cut_and_counted(tmp_path: Path, overflow: str, kept: int) -> None:
    rows = [
        {"q": "a", "r": "Up"},
        {"q": "a", "r": "z" * 100},
        {"q": "y" * 100, "r": "Up"},  # a cut leaves nothing to imitate
    ]
    path = write(tmp_path / "long.jsonl", rows)
    data = load(path, {"prompt": "q", "response": "r"}, overflow=overflow)
    report = data.report
    assert (report.samples, report.overlong, report.silent) == (kept, 2, int(overflow == "truncate"))
    assert report.rows == 3 and report.longest == 108 and data.batch.lengths_B.max() <= 64
    assert "2 over 64 tokens " + {"drop": "dropped", "truncate": "cut"}[overflow] in str(report)
    with pytest.raises(DataError, match="no conversations: all 3 are longer than sequence_length = 4"):
        load(path, {"prompt": "q", "response": "r"}, overflow=overflow, max_tokens=4)


def test_rows_behind_the_checked_ones_may_pass_the_filter(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "response": "2", "source": source} for source in ("a", "a", "b")]
    columns = {"prompt": "prompt", "response": "response", "dataset_filter": {"source": "b"}}
    args = DataArguments(file_name=str(write(tmp_path / "data.jsonl", rows)), **columns)
    assert check_conversations(Reading(args, seed=0, head=2), None) == (Counter(), False)
    with pytest.raises(DataError, match="left out all 2 rows"):
        args = args.model_copy(update={"file_name": str(write(tmp_path / "data.jsonl", rows[:2]))})
        check_conversations(Reading(args, seed=0, head=9), None)


def test_held_out_questions_bring_what_rewards_need(tmp_path: Path) -> None:
    row = {"q": "a", "r": "Up", "solution": "7", "tag": "sums", "level": 3}
    path = write(tmp_path / "val.jsonl", [row])
    (question,) = load(path, {"prompt": "q", "response": "r"}, scoring=Scoring(["sums"], "solution")).questions
    assert (question.tag, question.ground_truth, question.extra_info["level"]) == ("sums", "7", 3)
    with pytest.raises(DataError, match="tag 'sums', expected one of chess"):
        load(path, {"prompt": "q", "response": "r"}, scoring=Scoring(["chess"], "solution"))
