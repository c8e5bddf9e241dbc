"""Rows of a reward model: the score stands behind what the verifier's classifier would read it at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.configs.data import DataArguments
from roll.configs.reward_training import RewardColumns
from roll.data.conversations import Conversations
from roll.data.files.rows import DataError
from roll.data.renderer import ChatRenderer
from roll.data.scored_answers import load_scored
from roll.models.tiny import make_tokenizer

RENDERER = ChatRenderer(make_tokenizer())


def load(path: Path, rows: list[dict[str, Any]], *, in_steps: bool) -> Conversations:
    file = path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataArguments(file_name=str(file), prompt="ask", response="answer")
    return load_scored(data, RewardColumns(), in_steps=in_steps, renderer=RENDERER, max_tokens=60)


def before_scores(data: Conversations) -> list[str]:
    """Text of the first row up to each score."""
    tokens, mask = data.batch.tokens_T, data.batch.loss_mask_T
    return [RENDERER.tokenizer.decode(tokens[:index]) for index in mask[: data.batch.lengths_B[0]].nonzero()[:, 0]]


def test_a_score_stands_behind_the_whole_conversation_or_behind_each_step(tmp_path: Path) -> None:
    data = load(tmp_path, [{"ask": "a?", "answer": "b", "score": -1.5}], in_steps=False)
    talk = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    assert before_scores(data) == [RENDERER.tokenizer.apply_chat_template(talk, tokenize=False)]
    assert data.batch.returns_T[data.batch.loss_mask_T].tolist() == [-1.5]
    data = load(tmp_path, [{"ask": "a?", "steps": ["x ", "y"], "step_labels": [True, 0.25]}], in_steps=True)
    head = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n"
    assert before_scores(data) == [head + "x ", head + "x y<|im_end|>\n"]
    assert data.batch.returns_T[data.batch.loss_mask_T].tolist() == [1.0, 0.25]


def test_a_step_that_spells_a_control_token_is_letters(tmp_path: Path) -> None:
    row = {"ask": "a?", "steps": ["x <|im_end|>", "y"], "step_labels": [True, False]}
    data = load(tmp_path, [row], in_steps=True)
    head = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n"
    assert before_scores(data) == [head + "x <|im_end|>", head + "x <|im_end|>y<|im_end|>\n"]
    end = RENDERER.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert data.batch.tokens_T.tolist().count(end) == 2, "the ends of both turns"
    with pytest.raises(DataError, match=r"data.jsonl:1: .*a control token is cut in two"):
        load(tmp_path, [row | {"steps": ["x <|im", "_end|>"]}], in_steps=True)


def test_rows_without_scores_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.jsonl:1: column 'score': 'good', expected a number"):
        load(tmp_path, [{"ask": "a", "answer": "b", "score": "good"}], in_steps=False)
    with pytest.raises(DataError, match=r"data.jsonl:1: column 'score': inf, expected a finite number"):
        load(tmp_path, [{"ask": "a", "answer": "b", "score": "inf"}], in_steps=False)
    with pytest.raises(DataError, match=r"data.jsonl:1: column 'steps': half of a surrogate pair at character 2"):
        load(tmp_path, [{"ask": "a", "steps": ["x", "\ud800"], "step_labels": [1, 1]}], in_steps=True)
    rows = [{"ask": "a", "steps": ["x", "y"], "step_labels": [1]}, {"ask": "a", "steps": [], "step_labels": []}]
    with pytest.raises(
        DataError, match=r"expected a list of 2, one per step[\s\S]*data.jsonl:2.*expected a list of texts"
    ):
        load(tmp_path, rows, in_steps=True)
