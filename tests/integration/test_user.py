"""A run over conversations: the user's turns are in the rows, their rewards on top of the verifiers'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.conftest import Rlvr


@pytest.mark.slow
def test_a_conversation_is_a_row_that_turns_and_answer_are_paid_in(rlvr: Rlvr, tmp_path: Path) -> None:
    run = rlvr(
        "user={path: tests.support.users:Counting, max_turns: 2}",
        "sequence_length=120",
        "max_steps=1",
        "rewards.letters.verifiers.0.weight=0",
        f"rollout_dump_dir={tmp_path / 'episodes'}",
    )
    assert run.wait() == 0, run.output
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
