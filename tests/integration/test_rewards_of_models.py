"""Runs whose rewards come from models and conversations: judges on their own devices, divided reward models, users."""

import os
import signal
from pathlib import Path

import pytest

from tests.integration.conftest import Run
from tests.support.judged_env import question, score
from tests.support.judges import WORDS, digit_model, greedy_words
from tests.support.lines import read_lines
from tests.unit.rewards.test_sharded_reward_model import make

pytestmark = pytest.mark.slow


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
    played = read_lines(episodes / "step-00001" / "episodes.jsonl")
    turns = [turn for episode in played for turn in episode["turns"]]
    assert {episode["tag"] for episode in played} == {"Judged"} and len(turns) == 8
    for turn in turns:
        words = greedy_words(judge, [{"role": "user", "content": question(turn["text"])}])
        assert turn["task_reward"] == pytest.approx(score(words))
    assert run.metrics[1]["rollout/dropped"] == 4 and run.metrics[1]["rollout/env_errors"] == 8
    assert "environment step asked the judge: judge: " in run.output
    assert not die.exists() and "reward_judge rank 0 died" in run.output
    run.assert_nothing_left()


def test_a_conversation_is_a_row_that_turns_and_answer_are_paid_in(rlvr, tmp_path):
    run = rlvr(
        "user={path: tests.support.users:Counting, max_turns: 2}",
        "sequence_length=120",
        "max_steps=1",
        "rewards.letters.verifiers.0.weight=0",
        f"rollout_dump_dir={tmp_path / 'episodes'}",
    ).ended()
    played = read_lines(tmp_path / "episodes" / "step-00001" / "episodes.jsonl")
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


def ranks(run: Run) -> list[int]:
    """Process ids of the parts of its reward model."""
    own = ((pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in run.processes())
    return [pid for pid, command in own if b"roll.rewards.reward_model" in command.split(b"\0")]


def test_a_run_scores_as_with_the_whole_model_and_outlives_a_part_of_it(rlvr, tmp_path):
    folder = make("Qwen2Config", tmp_path)

    def launched(devices: str, size: int, *orders: str) -> Run:
        verifier = f"{{name: reward_model, args: {{model_path: {folder}, tensor_parallel_size: {size}}}}}"
        return rlvr(
            f"rewards.letters.verifiers=[{verifier}]",
            f"rewards.letters.device_mapping={devices}",
            "rewards.letters.worker_cls=null",
            "rewards.letters.retries=1",
            output=f"of-{size}",
            orders=orders,
        )

    whole = launched("[0]", 1).ended()
    divided = launched("[0,1]", 2, "hold-train-group-6")
    divided.pid_at("train-group-6")
    first = ranks(divided)
    assert len(first) == 2
    os.kill(first[1], signal.SIGKILL)
    divided.release("hold-train-group-6")
    one, two = whole.metrics, divided.ended().metrics
    for step in (1, 2):
        assert two[step]["reward/letters/score"] == pytest.approx(one[step]["reward/letters/score"], abs=1e-4)
        assert two[step]["reward/letters/errors"] == 0
    assert sum(two[step]["reward/letters/retries"] for step in (1, 2)) > 0
    divided.assert_nothing_left()
