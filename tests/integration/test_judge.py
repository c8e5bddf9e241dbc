"""A run whose environments ask a model on the run's own devices, and what it makes of a judge that dies or fails."""

import json

import pytest

from tests.support.judged_env import question, score
from tests.support.judges import WORDS, digit_model, greedy_words


@pytest.mark.slow
def test_rewards_are_what_the_judge_says_and_its_failures_are_none(launch, tmp_path):
    judge, episodes, die = digit_model(tmp_path / "judge"), tmp_path / "episodes", tmp_path / "die"
    die.touch()
    env = "{env_type: tests.support.judged_env:JudgedEnv, max_steps: 2, agent_system_template: '', env_config: %s}"
    run = launch(
        f"judge={{model: {judge}, max_tokens: {WORDS}, device_mapping: [0], system_envs: {{DIE_ONCE: {die}}}}}",
        "judge.worker_cls=tests.support.judged_env:DyingJudge",
        f"custom_envs.Judged={env % '{}'}",
        f"custom_envs.TooLong={env % '{padding: 300, catches: true}'}",
        "train_env_manager.tags=[Judged,TooLong]",
        "train_env_manager.worker_cls=null",
        "max_steps=1",
        f"rollout_dump_dir={episodes}",
    ).ended()
    played = [json.loads(line) for line in (episodes / "step-00001" / "episodes.jsonl").read_text().splitlines()]
    turns = [turn for episode in played for turn in episode["turns"]]
    assert {episode["tag"] for episode in played} == {"Judged"} and len(turns) == 8
    for turn in turns:
        words = greedy_words(judge, [{"role": "user", "content": question(turn["text"])}])
        assert turn["task_reward"] == pytest.approx(score(words))
    assert run.metrics[1]["rollout/dropped"] == 4 and run.metrics[1]["rollout/env_errors"] == 8
    assert "environment step asked the judge: judge: " in run.output
    assert not die.exists() and "reward_judge rank 0 died" in run.output
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_conversation_is_a_row_that_turns_and_answer_are_paid_in(rlvr, tmp_path):
    run = rlvr(
        "user={path: tests.support.users:Counting, max_turns: 2}",
        "sequence_length=120",
        "max_steps=1",
        "rewards.letters.verifiers.0.weight=0",
        f"rollout_dump_dir={tmp_path / 'episodes'}",
    ).ended()
    lines = (tmp_path / "episodes" / "step-00001" / "episodes.jsonl").read_text().splitlines()
    played = [json.loads(line) for line in lines]
    assert len(played) == 16
    for episode in played:
        first, second, last = episode["turns"]
        assert second["observation"] == f"{len(first['text'])} of letters"
        assert last["observation"] == f"{len(second['text'])} of letters"
        paid = [len(first["text"]) / 100, len(second["text"]) / 100, 0.0]
        assert [turn["task_reward"] for turn in episode["turns"]] == pytest.approx(paid)
        assert second["prompt_tokens"] > first["prompt_tokens"] + first["completion_tokens"]
    assert run.metrics[1]["rollout/dropped"] == 0 and "append-only" in run.output
    run.assert_nothing_left()
