"""Pairs of an RL run's episodes: the best and the worst of each group whose scores differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.configs.data import DataArguments
from roll.data.files.rows import DataError
from roll.data.rollout_pairs import best_and_worst


def episode(group: int, score: float, text: str, turns: int = 1) -> dict[str, Any]:
    turn = {"observation": f"{group}?", "text": text}
    return {"tag": "sums", "group_id": group, "score": score, "info": {"ground_truth": "7"}, "turns": [turn] * turns}


def pairs(path: Path, episodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    file = path / "eval-00000.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in episodes))
    return list(best_and_worst(DataArguments(file_name=str(file), prompt="prompt"), seed=0))


def test_a_group_gives_its_best_and_its_worst(tmp_path: Path) -> None:
    scored = [(0, 0.5, "b"), (0, 1.0, "a"), (0, 0.0, "c"), (1, 1.0, "x"), (1, 1.0, "y"), (2, 0.0, "z")]
    asked = {"messages": [{"role": "user", "content": "0?"}], "prompt": "0?", "tag": "sums", "solution": "7"}
    assert pairs(tmp_path, [episode(*each) for each in scored]) == [
        asked | {"chosen": "a", "rejected": "c", "margin": 1.0}
    ]


def test_a_question_is_the_whole_conversation(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "0?"}]
    episodes = [episode(0, score, text) for score, text in ((1.0, "a"), (0.0, "b"))]
    for each in episodes:
        each["info"]["conversation"] = json.dumps(messages)
    (found,) = pairs(tmp_path, episodes)
    assert found["messages"] == messages and "prompt" not in found, "half of a question is none"


def test_what_is_no_answer_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"jsonl:2: an episode of 2 turns[\s\S]*jsonl:3: no episode of a run"):
        pairs(tmp_path, [episode(0, 1.0, "a"), episode(0, 0.0, "b", turns=2), {"prompt": "x"}])
    with pytest.raises(DataError, match=r"2 episodes of 2 groups, none with two different scores.* rollout_dump_dir"):
        pairs(tmp_path, [episode(0, 1.0, "a"), episode(1, 0.0, "b")])
    with pytest.raises(DataError, match=r"jsonl:1: column 'score': null, expected a number"):
        pairs(tmp_path, [episode(0, 1.0, "a") | {"score": None}])
    whole = episode(0, 1.0, "a")
    broken: list[dict[str, Any]] = [
        {"turns": [{"text": "a"}]},
        {"turns": ["a"]},
        {"group_id": [0]},
        {"info": {"conversation": "[{"}},
    ]
    with pytest.raises(DataError, match=r"4 problems[\s\S]*KeyError[\s\S]*TypeError[\s\S]*:3: no epis[\s\S]*JSON"):
        pairs(tmp_path, [whole | each for each in broken])
