"""Questions that an environment of one turn reads from files, and who scores their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.configs.problems import ConfigErrors
from roll.data.files.rows import DataError
from roll.extras.worlds.single_turn import QuestionsConfig, SingleTurnEnv, read_questions

ROWS = [
    {"meta": {"question": "1/2 + 1/4?"}, "answer": "3/4"},
    {"meta": {"question": "2 + 3?"}, "answer": 5},
]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return str(path)


def env(file: str, **keys: Any) -> SingleTurnEnv:
    return SingleTurnEnv(dataset={"file_name": file, "prompt": "meta.question"}, **keys)


def test_the_seed_picks_a_question_the_same_in_every_environment(file: str) -> None:
    asked = {seed: env(file).reset(seed=seed)[0] for seed in range(20)}
    assert set(asked.values()) == {"1/2 + 1/4?", "2 + 3?"}
    assert asked == {seed: env(file).reset(seed=seed)[0] for seed in range(20)}


def test_a_process_reads_the_files_once(file: str) -> None:
    config = QuestionsConfig(file_name=file, prompt="meta.question")
    first = read_questions(config)
    Path(file).unlink()
    assert read_questions(config.model_copy()) is first
    assert "/" in first.charset


@pytest.mark.parametrize(
    ("scorer", "said", "score"),
    [
        ("math", r"It is \boxed{0.75}.", 1.0),
        ("math", r"It is \boxed{\frac{2}{4}}.", 0.0),
        ("words", "<answer>the 3/4.</answer>", 1.0),
        ("exact", "3/4", 1.0),
        ("contains", "surely 3/4", 1.0),
    ],
)
def test_scorers(file: str, scorer: str, said: str, score: float) -> None:
    game = env(file, scorer=scorer)
    game.reset(seed=0, options={"prompt": "1/2 + 1/4?", "answer": "3/4"})
    assert game.step(said)[4]["task_reward"] == score


def test_all_rows_that_hold_no_question_are_told_and_there_is_one_source(tmp_path: Path, file: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n{"prompt": ["a"], "answer": 1}\n{"prompt": "b"}\n', encoding="utf-8")
    with pytest.raises(DataError) as caught:
        SingleTurnEnv(dataset={"file_name": str(path)})
    first, second = caught.value.problems
    assert ":2" in first and "expected a text or a number" in first
    assert ":3" in second and "no column 'answer'" in second
    with pytest.raises(ConfigErrors, match="one source of questions"):
        env(file, items=[{"prompt": "a", "answer": "b"}])
    with pytest.raises(ConfigErrors, match="a dataset"):
        SingleTurnEnv()
