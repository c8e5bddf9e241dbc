"""The HTML pages of a run and of responses, from the templates next to this file; all foreign text is escaped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from roll.data.requests import FinishReason
from roll.rollout.types import EpisodeEnd, Trajectory
from roll.tracking.files import read_json_lines, to_json, write_atomic

MAX_SHOWN = 20_000
"""Characters of one text on a page: a browser shows them at once, and nobody reads more."""


def render_page(template: str, **values: Any) -> str:
    """A whole page. Every value is plain text, escaped where it is put; ``title`` is the browser's."""
    return _templates().get_template(template).render(**values)


def shortened(text: str) -> str:
    """The beginning of a very long text, and how much is left out."""
    left_out = len(text) - MAX_SHOWN
    return text if left_out <= 0 else f"{text[:MAX_SHOWN]}… ({left_out:,} more characters)"


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("roll.report"), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    environment.filters["shortened"] = shortened
    return environment


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
    answers = [{"episode": each, "before": _before(each), "end": ending(each)} for each in trajectories]
    write_atomic(page, render_page("answers.html", title=title, answers=answers, scored=scored))
    records = {record["page"]: record for record in read_json_lines(folder / _LIST)}
    records[page.name] = {"page": page.name, "step": step, "answers": len(trajectories)}
    records[page.name] |= {"correct": correct} if scored else {}
    write_atomic(folder / _LIST, "".join(to_json(record) + "\n" for record in records.values()))
    return page


def ending(trajectory: Trajectory) -> str:
    """Why the last answer ended: its finish reason, or the episode's end where no further turn had room."""
    if trajectory.end is EpisodeEnd.CONTEXT_FULL:
        return "sequence is full"
    reason = trajectory.turns[-1].completion.finish_reason
    return "cut at the length limit" if reason is FinishReason.LENGTH else reason.value


def _before(trajectory: Trajectory) -> list[Mapping[str, Any]]:
    """The messages before the question, from the system prompt on."""
    from roll.data.questions import CONVERSATION  # with torch, which pages of episodes do without

    conversation: list[Mapping[str, Any]] = json.loads(trajectory.info.get(CONVERSATION, "[]"))
    return [{"role": str(each.get("role", "")), "content": str(each.get("content", ""))} for each in conversation[:-1]]


def listed_answers(folder: Path) -> list[dict[str, Any]]:
    """The pages of a run, newest first."""
    return sorted(read_json_lines(folder / _LIST), key=lambda record: record["step"], reverse=True)
