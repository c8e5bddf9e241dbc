"""Episodes that a person can watch: one HTML page and one GIF each, and an index of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from roll.report.answers import answers_html
from roll.report.board import TILE, Board, find_board, tile_svg
from roll.report.curve import learning_curve_svg
from roll.report.gif import render_episode_gif
from roll.report.page import PLAYER, html_page, shortened
from roll.rollout.types import EpisodeEnd, Trajectory, Turn
from roll.tracking.files import read_json_lines, to_json, write_atomic

__all__ = [
    "learning_curve_svg",
    "render_episode_gif",
    "render_episode_html",
    "render_index",
    "save_renders",
]

_ENDINGS = {
    EpisodeEnd.TERMINATED: "the environment ended the episode",
    EpisodeEnd.TRUNCATED: "out of turns",
    EpisodeEnd.CONTEXT_FULL: "out of context",
}
_EPISODES_FILE = "episodes.jsonl"


def render_episode_html(trajectory: Trajectory) -> str:
    """One self-contained page: board, the model's words, action and rewards turn by turn, with a small player.

    Keys: left and right arrow step, the space bar plays and pauses. Without JavaScript all turns are listed. All text
    of the model and the environment is escaped.
    """
    score, frames, dots = 0.0, [], []
    for number, turn in enumerate(trajectory.turns, start=1):
        score += turn.reward
        frames.append(_turn_html(turn, number, len(trajectory.turns), score))
        tone = "up" if turn.reward > 0 else "down" if turn.penalty < 0 else ""
        dots.append(f'<button class="dot {tone}" aria-label="turn {number}">{number}</button>')
    frames.append(_final_html(trajectory))
    mark = "✓" if trajectory.success else "✗"
    dots.append(f'<button class="dot {"up" if trajectory.success else "down"}" aria-label="end">{mark}</button>')
    controls = (
        '<div class="card"><div class="controls"><button id="first" aria-label="first">|◀</button>'
        '<button id="back" aria-label="back">◀</button><button id="play">▶ Play</button>'
        '<button id="next" aria-label="next">▶</button><button id="last" aria-label="last">▶|</button>'
        f'<div class="dots">{"".join(dots)}</div></div>'
        '<p class="hint">← → step · space plays and pauses</p></div>'
    )
    symbols = _symbols_svg(trajectory)
    head = f"<h1>{escape(trajectory.tag)}</h1>{_chips(trajectory)}"
    title = f"{trajectory.tag} · group {trajectory.group_id} · member {trajectory.member}"
    return html_page(title, f"{symbols}{head}{''.join(frames)}{controls}", PLAYER)


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
    """Up to ``limit`` episodes, solved and unsolved ones in turn, one of every group before the second of any."""
    seen: dict[int, int] = {}
    ranked = []
    for trajectory in trajectories:
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


def render_index(run_dir: Path) -> Path:
    """Writes ``index.html`` beside the renders: the learning curve and every episode, newest step first.

    ``learning_curve.svg`` is written too when ``metrics.jsonl`` knows of any success.

    Args:
        run_dir: a run's folder, or a folder that ``save_renders`` filled.
    """
    folder = run_dir / "renders" if (run_dir / "renders").is_dir() else run_dir
    parts = [f"<h1>{escape(run_dir.name)}</h1>", _curve_html(run_dir, folder)]
    parts.append(answers_html(folder))
    by_step: dict[int, list[dict[str, Any]]] = {}
    for record in _listed_episodes(folder):
        by_step.setdefault(record["step"], []).append(record)
    for step in sorted(by_step, reverse=True):
        cards = "".join(_card_html(record) for record in by_step[step])
        heading = f"Step {step}" if step else "Before training"
        parts.append(f'<h3>{heading}</h3><div class="episodes">{cards}</div>')
    index = folder / "index.html"
    write_atomic(index, html_page(f"{run_dir.name} · episodes", "".join(parts)))
    return index


def _turn_html(turn: Turn, number: int, total: int, score: float) -> str:
    action = (
        f'<div class="action">{escape(turn.action)}</div>'
        if turn.action is not None
        else '<div class="action none">no valid action</div>'
    )
    return (
        f'<section class="frame"><div>{_scene_html(turn.observation)}</div><div class="side">'
        f'<h2>Turn {number} of {total} · the model says</h2><pre class="said">{escape(shortened(turn.text))}</pre>'
        f'<h2>Action</h2>{action}<h2>Reward</h2><table class="rewards">'
        f"{_reward_row('task', turn.task_reward)}{_reward_row('format penalty', turn.penalty)}"
        f"{_reward_row('score so far', score)}</table></div></section>"
    )


def _final_html(trajectory: Trajectory) -> str:
    verdict = '<p class="verdict good">Solved</p>' if trajectory.success else '<p class="verdict bad">Not solved</p>'
    task = sum(turn.task_reward for turn in trajectory.turns)
    penalty = sum(turn.penalty for turn in trajectory.turns)
    return (
        f'<section class="frame"><div>{_scene_html(trajectory.final_observation)}</div><div class="side">'
        f"<h2>The end</h2>{verdict}<p>{_ENDINGS[trajectory.end]} after {len(trajectory.turns)} turns</p>"
        f'<h2>Reward of the episode</h2><table class="rewards">{_reward_row("task", task)}'
        f"{_reward_row('format penalty', penalty)}{_reward_row('score', trajectory.score)}</table></div></section>"
    )


def _scene_html(observation: str) -> str:
    """The board as tiles with the text around it below, or the text alone."""
    board = find_board(observation)
    if board is None:
        return f"<pre>{escape(shortened(observation))}</pre>"
    around = "\n".join(text for text in (board.before, board.after) if text)
    below = f'<pre class="around">{escape(around)}</pre>' if around else ""
    return _board_svg(board) + below


def _board_svg(board: Board) -> str:
    rows, columns = board.size
    cells = "".join(
        f'<use href="#{kind}" x="{x * TILE}" y="{y * TILE}"/>'
        for y, row in enumerate(board.cells)
        for x, kind in enumerate(row)
    )
    return f'<svg class="board" role="img" viewBox="0 0 {columns * TILE} {rows * TILE}">{cells}</svg>'


def _symbols_svg(trajectory: Trajectory) -> str:
    """Every kind of cell that occurs, drawn once."""
    texts = [*(turn.observation for turn in trajectory.turns), trajectory.final_observation]
    boards = [board for text in texts if (board := find_board(text)) is not None]
    kinds = sorted({kind for board in boards for row in board.cells for kind in row})
    symbols = "".join(f'<g id="{kind}">{tile_svg(kind)}</g>' for kind in kinds)
    return f'<svg width="0" height="0" style="position:absolute"><defs>{symbols}</defs></svg>'


def _chips(trajectory: Trajectory) -> str:
    tone, verdict = ("good", "solved") if trajectory.success else ("bad", "not solved")
    chips = [f'<b class="{tone}">{verdict}</b>', f"score <b>{trajectory.score:+.2f}</b>"]
    chips += [f"<b>{len(trajectory.turns)}</b> turns", f"group <b>{trajectory.group_id}</b>"]
    chips += [f"member <b>{trajectory.member}</b>", f"seed <b>{trajectory.seed}</b>"]
    return '<div class="chips">' + "".join(f'<span class="chip">{chip}</span>' for chip in chips) + "</div>"


def _reward_row(name: str, value: float) -> str:
    tone = "good" if value > 0 else "bad" if value < 0 else ""
    return f'<tr><td>{name}</td><td class="{tone}">{f"{value:+.2f}" if value else "0"}</td></tr>'


def _card_html(record: dict[str, Any]) -> str:
    tone, verdict = ("good", "solved") if record["success"] else ("bad", "not solved")
    page = escape(record["page"])
    return (
        f'<a class="episode" href="{page}"><img src="{page.removesuffix(".html")}.gif" alt="" loading="lazy">'
        f'<p><b class="{tone}">{verdict}</b> · {escape(record["tag"])} · score {record["score"]:+.2f} · '
        f"{record['turns']} turns</p></a>"
    )


def _curve_html(run_dir: Path, folder: Path) -> str:
    """The run's success by step, if its ``metrics.jsonl`` has any; also left in ``folder`` as a file."""
    records = read_json_lines(run_dir / "metrics.jsonl")
    names = {"training": "rollout/success", "held-out": "eval/success"}
    series = {
        label: [(record["step"], record[name]) for record in records if record.get(name) is not None]
        for label, name in names.items()
    }
    series = {label: points for label, points in series.items() if points}
    if not series:
        return ""
    curve = learning_curve_svg(series)
    write_atomic(folder / "learning_curve.svg", curve)
    return f'<div class="card curve">{curve}</div>'


def _listed_episodes(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_json_lines(folder / _EPISODES_FILE) if (folder / record["page"]).exists()]
