"""Answers to prompts as a page: question, response with what tools said, the answer in it, the right one, the score."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll.report.page import render_page
from roll.rollout.types import Trajectory
from roll.tracking.files import read_json_lines, to_json, write_atomic

_LIST = "answers.jsonl"


def save_answers(trajectories: Sequence[Trajectory], folder: Path, step: int, *, scored: bool = True) -> Path:
    """Writes the page of an evaluation into ``folder``, and notes it for ``listed_answers``.

    Args:
        trajectories: episodes whose info has ``prompt_id`` and ``ground_truth``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"answers-{step:06d}.html"
    correct = sum(trajectory.success for trajectory in trajectories)
    title = f"Step {step}: " + (f"{correct} of {len(trajectories)} answers right" if scored else "answers")
    write_atomic(page, render_page("answers.html", title=title, answers=trajectories, scored=scored))
    records = {record["page"]: record for record in read_json_lines(folder / _LIST)}
    records[page.name] = {"page": page.name, "step": step, "answers": len(trajectories)}
    records[page.name] |= {"correct": correct} if scored else {}
    write_atomic(folder / _LIST, "".join(to_json(record) + "\n" for record in records.values()))
    return page


def listed_answers(folder: Path) -> list[dict[str, Any]]:
    """The pages of a run, newest first."""
    return sorted(read_json_lines(folder / _LIST), key=lambda record: record["step"], reverse=True)
