"""Rows with answers: what was asked in an episode that a run has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.data.files.rows import DataError, Problems
from roll.data.questions import Answer, AnswerColumns, read_responses


def test_an_episodes_question_is_the_whole_conversation(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    turns = [{"observation": "1+1", "text": "2"}, {"observation": "Sure?", "text": "Yes"}]
    info = {"ground_truth": "2", "conversation": json.dumps(messages)}
    file, problems = tmp_path / "eval-00001.jsonl", Problems()
    file.write_text(json.dumps({"turns": turns, "info": info, "group_id": 0, "tag": "sums"}) + "\n")
    (found,) = read_responses([str(file)], AnswerColumns(), problems, without="scores")
    problems.raise_any()
    said = [{"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"}]
    assert list(found.messages) == [*messages, *said] and found.prompt == "Sure?"


def test_what_is_wrong_with_a_row_of_somebody_elses_is_told_with_its_place(tmp_path: Path) -> None:
    file, problems = tmp_path / "answers.jsonl", Problems()
    turns = [{"observation": "1+1", "text": "2"}]
    rows = [
        {"prompt": "1+1", "solution": "2", "answers": [{"text": "2", "num_tokens": "many"}]},
        {"turns": turns, "info": {"conversation": "[{"}, "group_id": 0, "tag": "sums"},
        {"prompt": "1+1", "solution": "2", "answers": [{"text": "2", "num_tokens": 3.0}]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = read_responses([str(file)], AnswerColumns(), problems, without="scores")
    assert found.answers == (Answer("2", 3),)
    with pytest.raises(DataError, match=r"jsonl:1: .*num_tokens.*'many'.*\n.*jsonl:2: info.conversation.*JSON"):
        problems.raise_any()
