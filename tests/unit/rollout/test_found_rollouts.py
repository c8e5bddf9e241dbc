"""Rollouts that a run has kept, and those that another takes in place of playing."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll.data.requests import Completion, FinishReason
from roll.pipeline.rollouts import read_rollouts, write_rollouts
from roll.pipeline.session import RunFailedError
from roll.rollout.admission import Admission
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.types import Collected, EpisodeEnd, RolloutGroup, Trajectory, Turn


class Plan:
    num_slots = 4


def group(number: int) -> RolloutGroup:
    completion = Completion(
        "r", np.arange(3) + number, np.full(3, -0.5, np.float32), FinishReason.STOP, np.zeros(3, np.int64)
    )
    turn = Turn(np.arange(2), completion, "left", "seen", "left", 1.0, 0.0, "state")
    trajectory = Trajectory("A", number, 0, 5, (turn,), EpisodeEnd.TERMINATED, True, "", True)
    return RolloutGroup(number, "A", (trajectory,))


def scheduler() -> RolloutScheduler:
    nobody: Any = SimpleNamespace(world_size=0)
    return RolloutScheduler(Plan(), nobody, lambda error: None, 1.0)  # type: ignore[arg-type]


def test_kept_rollouts_are_taken_as_if_they_had_been_played(tmp_path):
    steps = {1: Collected([group(0), group(2)], [group(1)]), 2: Collected([group(3), group(4)], [])}
    for step, collected in steps.items():
        write_rollouts(str(tmp_path), step, collected)
    lines = (tmp_path / "step-00001" / "episodes.jsonl").read_text().splitlines()
    read = [json.loads(line) for line in lines]
    assert [(each["group_id"], each["trained"]) for each in read] == [(0, True), (2, True), (1, False)]

    admission, player = Admission(2), scheduler()
    for step, collected in steps.items():
        found = player.take_found(admission, step, read_rollouts(str(tmp_path), step))
        assert [each.group_id for each in found.groups] == [each.group_id for each in collected.groups]
        tokens = found.groups[0].trajectories[0].turns[0].completion.token_ids
        assert np.array_equal(tokens, np.arange(3) + found.groups[0].group_id)
        counts = player.commit(admission)
    assert counts == {"trained": 4, "settled": 1, "waiting": 0} and admission.next_draw == 5
    with pytest.raises(RunFailedError, match="no rollouts of step 3"):
        read_rollouts(str(tmp_path), 3)


@pytest.mark.parametrize("numbers", [[0], [0, 1, 2], [1, 2]])
def test_rollouts_of_other_batches_are_refused(numbers):
    with pytest.raises(ValueError, match=r"expected 2 from 0 on"):
        scheduler().take_found(Admission(2), 1, Collected([group(number) for number in numbers], []))
