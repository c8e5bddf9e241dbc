"""Episodes in full, as JSON lines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from roll.rollout.types import Trajectory
from roll.tracking.files import to_json, write_atomic
from roll.tracking.run import RunFolder
from roll.tracking.trackers import AnswerRow


def write_trajectories(folder: RunFolder, name: str, trajectories: Iterable[Trajectory]) -> Path:
    """Writes episodes in full to ``trajectories/<name>.jsonl``, one line each."""
    path = folder.trajectories / f"{name}.jsonl"
    write_atomic(path, "".join(to_json(trajectory_record(item)) + "\n" for item in trajectories))
    return path


def trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    """An episode as JSON values: text, actions and rewards per turn; token ids are counted, not listed."""
    turns = [
        {
            "observation": turn.observation,
            "text": turn.text,
            "action": turn.action,
            "task_reward": turn.task_reward,
            "penalty": turn.penalty,
            "prompt_tokens": len(turn.prompt_ids),
            "completion_tokens": len(turn.completion.token_ids),
            "finish_reason": turn.completion.finish_reason,
            "weight_version": turn.completion.weight_version,
        }
        for turn in trajectory.turns
    ]
    names = ("tag", "group_id", "member", "seed", "success", "score", "end", "final_observation", "info")
    return {name: getattr(trajectory, name) for name in names} | {"turns": turns}


def answer_row(trajectory: Trajectory) -> AnswerRow:
    """An episode as a row of a tracker's table."""
    turns = trajectory.turns
    said = [text for turn in turns for text in (turn.observation, turn.text)]
    return AnswerRow(
        tag=trajectory.tag,
        prompt=said[0] if said else "",
        answer="\n".join(said[1:]),
        score=float(trajectory.score),
        success=bool(trajectory.success),
    )
