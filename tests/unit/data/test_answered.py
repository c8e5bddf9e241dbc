"""Rows with answers: what was asked in an episode that a run has written."""

from __future__ import annotations

import json
from pathlib import Path

from roll.data.answered import AnswerColumns, read_answered
from roll.data.files.rows import Problems


def test_an_episodes_question_is_the_whole_conversation(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    turns = [{"observation": "1+1", "text": "2"}, {"observation": "Sure?", "text": "Yes"}]
    info = {"ground_truth": "2", "conversation": json.dumps(messages)}
    file, problems = tmp_path / "eval-00001.jsonl", Problems()
    file.write_text(json.dumps({"turns": turns, "info": info, "group_id": 0, "tag": "sums"}) + "\n")
    (found,) = read_answered([str(file)], AnswerColumns(), problems, without="scores")
    problems.raise_any()
    said = [{"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"}]
    assert list(found.messages) == [*messages, *said] and found.prompt == "Sure?"
