"""Answers to prompts as a page: question, response, the answer found in it, the right one, and the score."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from roll.report.page import html_page
from roll.rollout.types import Trajectory
from roll.tracking.files import read_json_lines, to_json, write_atomic

_LIST = "answers.jsonl"


def save_answers(trajectories: Sequence[Trajectory], folder: Path, step: int) -> Path:
    """Writes the page of an evaluation into ``folder``, and notes it for ``answers_html``.

    Args:
        trajectories: one-turn episodes whose info has ``prompt_id`` and ``ground_truth``.
        folder: the run's renders.
        step: of the evaluation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"answers-{step:06d}.html"
    correct = sum(trajectory.success for trajectory in trajectories)
    title = f"Step {step}: {correct} of {len(trajectories)} answers right"
    rows = "".join(map(_row, trajectories))
    head = "<tr><th>prompt</th><th>response</th><th>answer</th><th>right answer</th><th>score</th></tr>"
    write_atomic(
        page, html_page(title, f'<h1>{title}</h1><div class="card"><table class="answers">{head}{rows}</table></div>')
    )
    records = {record["page"]: record for record in read_json_lines(folder / _LIST)}
    records[page.name] = {"page": page.name, "step": step, "correct": correct, "answers": len(trajectories)}
    write_atomic(folder / _LIST, "".join(to_json(record) + "\n" for record in records.values()))
    return page


def answers_html(folder: Path) -> str:
    """Links to the pages of a run, newest first; empty where there are none."""
    records = sorted(read_json_lines(folder / _LIST), key=lambda record: record["step"], reverse=True)
    links = "".join(map(_link, records))
    return f'<div class="card"><h2>Answers</h2><table class="rewards">{links}</table></div>' if links else ""


def _link(record: dict[str, Any]) -> str:
    when = f"step {record['step']}" if record["step"] else "before training"
    return (
        f'<tr><td><a href="{escape(record["page"])}">{when}</a></td>'
        f"<td>{record['correct']} of {record['answers']} shown are right</td></tr>"
    )


def _row(trajectory: Trajectory) -> str:
    turn = trajectory.turns[-1]
    tone = "good" if trajectory.success else "bad"
    answer = "—" if turn.action is None else escape(turn.action)
    truth = escape(str(trajectory.info.get("ground_truth", "")))
    name = escape(str(trajectory.info.get("prompt_id", "")))
    return (
        f'<tr><td title="{name}"><pre>{escape(turn.observation)}</pre></td><td><pre>{escape(turn.text)}</pre></td>'
        f'<td class="{tone}">{answer}</td><td>{truth}</td><td class="{tone}">{trajectory.score:+.2f}</td></tr>'
    )
