"""The environment of one turn."""

import json
from pathlib import Path
from typing import Any

import pytest

from roll.configs.problems import ConfigErrors
from roll.data.files import DataError
from roll.extras.worlds.single_turn import QuestionsConfig, SingleTurnEnv, read_questions

ITEMS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+3=", "answer": "5"}, {"prompt": "4+4=", "answer": 8}]


def addition(seed: int) -> tuple[str, str]:
    return f"{seed}+1=", str(seed + 1)


def closeness(given: str, answer: str) -> float:
    return 1.0 / (1 + abs(int(given) - int(answer)))


def test_a_right_answer_pays_and_ends_and_a_wrong_one_pays_nothing():
    env = SingleTurnEnv(items=ITEMS[:1], reward_scale=0.5)
    assert env.reset(seed=0)[0] == "1+1="
    observation, reward, terminated, truncated, info = env.step(" 2\n")
    assert (observation, reward, terminated, truncated) == ("", 0.5, True, False)
    assert info["success"] and info["action"] == " 2\n" and info["penalty"] == 0.0
    with pytest.raises(RuntimeError, match="reset"):
        env.step("2")
    env = SingleTurnEnv(items=ITEMS[:1])
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step("3")
    assert reward == 0.0 and terminated and not info["success"] and info["action_is_valid"]


def test_the_answer_is_cut_out_by_the_pattern_and_its_absence_costs_the_penalty():
    env = SingleTurnEnv(items=ITEMS[:1], answer_pattern=r"<answer>(.*?)</answer>", format_penalty=-0.25)
    env.reset(seed=0)
    _, reward, _, _, info = env.step("It is <answer> 2 </answer>")
    assert reward == 1.0 and info["action"] == "2"
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step("2")
    assert (reward, info["penalty"], info["task_reward"]) == (-0.25, -0.25, 0.0)
    assert terminated and info["action"] is None and not info["action_is_valid"]


def test_scorers_are_found_by_path_like_generators():
    env = SingleTurnEnv(generator=f"{__name__}:addition", scorer=f"{__name__}:closeness", success_score=0.5)
    assert env.reset(seed=41)[0] == "41+1="
    _, reward, _, _, info = env.step("43")
    assert reward == 0.5 and info["success"]


def test_the_seed_picks_the_item_with_a_key_of_its_own_and_options_override_it():
    env = SingleTurnEnv(items=ITEMS)
    prompts = [env.reset(seed=seed)[0] for seed in range(50)]
    assert set(prompts) == {item["prompt"] for item in ITEMS}
    assert prompts == [env.reset(seed=seed)[0] for seed in range(50)]
    assert env.reset(seed=0, options={"prompt": "9-1=", "answer": "8"})[0] == "9-1="
    assert env.step("8")[4]["success"]
    keys = {env.reset(seed=seed)[1]["state_key"] for seed in range(50)}
    assert len(keys) == 3
    assert env.step("?")[4]["state_key"] not in keys


ROWS = [{"meta": {"question": "1/2 + 1/4?"}, "answer": "3/4"}, {"meta": {"question": "2 + 3?"}, "answer": 5}]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return str(path)


def env(file: str, **keys: Any) -> SingleTurnEnv:
    return SingleTurnEnv(dataset={"file_name": file, "prompt": "meta.question"}, **keys)


def test_a_process_reads_the_files_once(file):
    config = QuestionsConfig(file_name=file, prompt="meta.question")
    asked = {seed: env(file).reset(seed=seed)[0] for seed in range(20)}
    first = read_questions(config)
    Path(file).unlink()
    assert read_questions(config.model_copy()) is first
    assert asked == {seed: env(file).reset(seed=seed)[0] for seed in range(20)}, "the same in every environment"
    assert set(asked.values()) == {"1/2 + 1/4?", "2 + 3?"}
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
def test_scorers(file, scorer, said, score):
    game = env(file, scorer=scorer)
    game.reset(seed=0, options={"prompt": "1/2 + 1/4?", "answer": "3/4"})
    assert game.step(said)[4]["task_reward"] == score
    blank = SingleTurnEnv(items=[{"prompt": "x", "answer": " "}], scorer=scorer)
    blank.reset(seed=0)
    with pytest.raises(ValueError, match="got ' ', expected"):  # then nothing would be right
        blank.step("")


def test_all_rows_that_hold_no_question_are_told_and_there_is_one_source(tmp_path, file):
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
    with pytest.raises(ConfigErrors, match=r"items\.0\.answer: got nothing"):
        SingleTurnEnv(items=[{"prompt": "a"}])
