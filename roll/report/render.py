"""Pages for people: episodes to watch (HTML and a GIF), the answers of an evaluation, and the index of a run.

Their templates lie next to this file; all foreign text in them is escaped.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from roll.configs.base import Config
from roll.data.requests import FinishReason
from roll.report import sections
from roll.report.curve import learning_curve_svg, round_above
from roll.report.gif import render_episode_gif
from roll.rollout.types import EpisodeEnd, Frame, Trajectory
from roll.tracking.run import read_json_lines, to_json, write_atomic

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


_ENDINGS = {
    EpisodeEnd.TERMINATED: "the environment ended the episode",
    EpisodeEnd.TRUNCATED: "out of turns",
    EpisodeEnd.CONTEXT_FULL: "out of context",
}
_SMALL = 200
"""Pixels of a picture's width, below which a page shows each of them as a square."""
_EPISODES_FILE = "episodes.jsonl"
_TONES = {"completed": "good", "failed": "bad", "stopped": "bad"}
_SUCCESS = {"training": "rollout/success", "held-out": "eval/success"}
_LOSSES = {
    "loss_curve.svg": ("Loss by training step, nats per token", {"training": "sft/loss", "held-out": "eval/loss"}),
    "reward_loss_curve.svg": ("Loss by training step", {"training": "rm/loss", "held-out": "eval/loss"}),
    "distillation_curve.svg": (
        "Divergence from teacher, nats per token",
        {"training": "distill/divergence", "held-out": "eval/divergence"},
    ),
    "preference_loss_curve.svg": ("Loss by training step", {"training": "dpo/loss", "held-out": "eval/loss"}),
}
"""By file: the title, and the metrics; drawn where the first of them was measured."""
_SHOWN_METRICS = (
    "rollout/success",
    "rollout/reward",
    "rollout/env_errors",
    "actor/loss",
    "eval/success",
    "eval/loss",
    "eval/token_accuracy",
)


def save_renders(trajectories: Sequence[Trajectory], folder: Path, step: int, limit: int) -> list[Path]:
    """Renders up to ``limit`` episodes of ``step`` into ``folder``, solved and unsolved ones in turn.

    Returns:
        The HTML pages; beside each lies a GIF of the same name. ``episodes.jsonl`` lists them for ``render_index``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pages, records = [], {record["page"]: record for record in _listed_episodes(folder)}
    for trajectory in choose_episodes(trajectories, limit):
        tag = re.sub(r"[^A-Za-z0-9_.-]+", "-", trajectory.tag).strip(".-") or "episode"
        stem = f"step-{step:06d}-{tag}-g{trajectory.group_id}-m{trajectory.member}"
        page = folder / f"{stem}.html"
        write_atomic(page, render_episode_html(trajectory))
        render_episode_gif(trajectory, folder / f"{stem}.gif")
        pages.append(page)
        records[page.name] = {
            "page": page.name,
            "step": step,
            "tag": trajectory.tag,
            "success": trajectory.success,
            "score": trajectory.score,
            "turns": len(trajectory.turns),
        }
    write_atomic(folder / _EPISODES_FILE, "".join(to_json(record) + "\n" for record in records.values()))
    return pages


def choose_episodes(trajectories: Sequence[Trajectory], limit: int) -> list[Trajectory]:
    """Up to ``limit`` episodes, solved and unsolved ones in turn, one of every group before the second of any.

    Of a tag with pictures, only the recorded episodes are chosen.
    """
    pictured = {trajectory.tag for trajectory in trajectories if trajectory.frames}
    seen: dict[int, int] = {}
    ranked = []
    for trajectory in trajectories:
        if trajectory.frames or trajectory.tag not in pictured:
            rank = seen.setdefault(trajectory.group_id, 0)
            seen[trajectory.group_id] += 1
            ranked.append((rank, trajectory))
    ranked.sort(key=lambda pair: pair[0])
    solved = [trajectory for _, trajectory in ranked if trajectory.success]
    unsolved = [trajectory for _, trajectory in ranked if not trajectory.success]
    chosen: list[Trajectory] = []
    while len(chosen) < limit and (solved or unsolved):
        prefer, other = (solved, unsolved) if len(chosen) % 2 == 0 else (unsolved, solved)
        chosen.append((prefer or other).pop(0))
    return chosen


def render_episode_html(trajectory: Trajectory) -> str:
    """One self-contained page: picture, the model's words, action and rewards turn by turn, with a small player.

    Keys: left and right arrow step, the space bar plays and pauses. Without JavaScript all turns are listed.
    """
    observations = [*(turn.observation for turn in trajectory.turns), trajectory.final_observation]
    return render_page(
        "episode.html",
        title=f"{trajectory.tag} · group {trajectory.group_id} · member {trajectory.member}",
        episode=trajectory,
        frames=[_scene(frame) for frame in trajectory.frames or observations],
        scores=list(itertools.accumulate(turn.reward for turn in trajectory.turns)),
        ending=_ENDINGS[trajectory.end],
    )


def _scene(frame: Frame) -> Mapping[str, str]:
    if isinstance(frame, bytes):
        width = int.from_bytes(frame[16:20], "big")
        return {"png": base64.b64encode(frame).decode("ascii"), "kind": "small" if width < _SMALL else ""}
    return {"png": "", "text": shortened(frame)}


def render_index(
    run_dir: Path,
    folder: Path | None = None,
    logs: Path | None = None,
    schema: type[Config] | None = None,
    output: Path | None = None,
    forecast: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the page of a run, ``index.html`` beside the renders: how it went, its metrics, settings and episodes.

    It shows all without other files, but links the pages and GIFs beside it. ``learning_curve.svg`` is written too when
    ``metrics.jsonl`` knows of any success, ``loss_curve.svg`` when it knows of a loss of imitation.

    Args:
        run_dir: a run's folder, or one that ``save_renders`` filled.
        logs: folder of the log files, where they are not in the run's.
        schema: class of its configuration.
        output: another file for the page.
        forecast: of ``roll plan``: see ``sections.forecast``.
    """
    folder = folder or (run_dir / "renders" if (run_dir / "renders").is_dir() else run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    metrics = read_json_lines(run_dir / "metrics.jsonl")
    records = sorted(_listed_episodes(folder), key=lambda record: -record["step"])
    summary = _summary(run_dir)
    phases = [name for name in summary.get("seconds", {}) if name not in ("start", "start workers", "setup")]
    index = output or folder / "index.html"
    page = render_page(
        "index.html",
        title=f"{run_dir.name} · report",
        name=run_dir.name,
        base="" if index.parent == folder else f"{os.path.relpath(folder, index.parent)}/",
        run=_run_state(run_dir, logs or run_dir / "logs", metrics),
        diagnosis=sections.findings(run_dir),
        watches=list(summary.get("watches", {}).values()),
        evaluations=sections.evaluations(metrics),
        chosen=sections.episodes(run_dir),
        tokens=sections.tokens(run_dir),
        areas=sections.areas(metrics),
        times=sections.times(metrics, phases),
        timeline=sections.timeline(run_dir),
        forecast=sections.forecast(metrics, forecast),
        position=sections.data_position(metrics, summary),
        settings=sections.settings(run_dir, schema),
        versions=summary.get("versions", {}),
        curves=_curves(metrics, folder),
        answers=listed_answers(folder),
        episodes=[(step, list(group)) for step, group in itertools.groupby(records, lambda record: record["step"])],
    )
    write_atomic(index, page)
    return index


def _run_state(run_dir: Path, logs: Path, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """State of the run, and after an error all that is known of it; ``None`` for a folder that is no run's."""
    if not (summary := _summary(run_dir)):
        return None
    status = summary.get("status", "running")
    chips = {"steps": summary.get("steps", 0)}
    if "wall_s" in summary:
        chips["minutes"] = f"{summary['wall_s'] / 60:.1f}"
    if "learned" in summary:
        chips["ended"] = "as learned"
    facts = dict(_facts(logs, summary, metrics)) if "error" in summary else {}
    tone = _TONES.get(status, "")
    return {"status": status, "tone": tone, "chips": chips, "error": summary.get("error"), "facts": facts}


def _summary(run_dir: Path) -> dict[str, Any]:
    """``summary.json``, empty where there is none."""
    path = run_dir / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _facts(logs: Path, summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    if seconds := summary.get("seconds"):
        yield "seconds", ", ".join(f"{phase} {spent:.1f}" for phase, spent in seconds.items())
    last = metrics[-1] if metrics else {}
    yield from (
        (f"{name} at step {last['step']}", f"{last[name]:.3f}") for name in _SHOWN_METRICS if last.get(name) is not None
    )
    if "checkpoint" in summary:
        yield "to continue from", str(summary["checkpoint"])
    traceback = logs / "traceback.txt"
    if traceback.exists():
        yield "where it failed", str(traceback)
    yield "what was said", str(logs / "roll.log")


def _curves(metrics: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, str]]:
    """Success and loss by step, for wide and narrow windows; the wide ones are also left in ``folder`` as files."""
    curves = []
    if success := _series(metrics, _SUCCESS):
        curves.append(("learning_curve.svg", partial(learning_curve_svg, success)))
    for name, (title, named) in _LOSSES.items():
        if "training" in (loss := _series(metrics, named)):
            top = round_above(max(value for points in loss.values() for _, value in points))
            drawn = partial(learning_curve_svg, loss, title=title, y_range=(0.0, top), percent=False)
            curves.append((name, drawn))
    for name, draw in curves:
        write_atomic(folder / name, draw())
    return [{"wide": draw(), "narrow": draw(width=360, height=300)} for _, draw in curves]


def _series(metrics: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> dict[str, list[tuple[float, float]]]:
    """(step, value) pairs by label, of the metrics that were measured."""
    found = {label: sections.numbers(metrics, name) for label, name in names.items()}
    return {label: points for label, points in found.items() if points}


def _listed_episodes(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_json_lines(folder / _EPISODES_FILE) if (folder / record["page"]).exists()]
