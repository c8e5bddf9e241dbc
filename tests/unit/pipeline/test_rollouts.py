"""What a run tells of the groups that it takes."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll.data.requests import Completion, FinishReason
from roll.pipeline.rollouts import take
from roll.rollout.admission import Admission
from roll.rollout.types import Collected, EpisodeEnd, RolloutGroup, Trajectory, Turn

SESSION: Any = SimpleNamespace(display=SimpleNamespace(progress=lambda *_: None))


def group(number: int, errors: tuple[str, ...] = (), **info: int) -> RolloutGroup:
    ids = np.ones(1, dtype=np.int64)
    said = Completion("r", ids, np.zeros(1, dtype=np.float32), FinishReason.STOP, np.zeros(1, dtype=np.int64))
    turn = Turn(ids, said, "text", "asked", None, 0.0, 0.0, "s")
    episode = Trajectory("t", number, 0, 0, (turn,), EpisodeEnd.TERMINATED, False, "", True, dict(info))
    return RolloutGroup(number, "t", (episode,), errors=errors)


def taken(caplog: pytest.LogCaptureFixture, *groups: RolloutGroup) -> str:
    scheduler: Any = SimpleNamespace(take=lambda *_, **options: Collected(list(groups), []))
    with caplog.at_level(logging.WARNING):
        take(SESSION, scheduler, Admission(len(groups)), 1, "train on")
    return caplog.text


def test_failed_episodes_and_late_tools_are_told(caplog: pytest.LogCaptureFixture) -> None:
    late = group(0, tool_calls=3, call_timeouts=2)
    told = taken(caplog, late, group(1, ("broken: no disk",), tool_calls=4, call_timeouts=1), group(2))
    assert "broken: no disk" in told
    assert "3 of 7 tool calls took longer than their timeout" in told


def test_nothing_is_told_where_all_went_well(caplog: pytest.LogCaptureFixture) -> None:
    assert taken(caplog, group(0), group(1, tool_calls=2, call_timeouts=0)) == ""
