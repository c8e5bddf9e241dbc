"""What the page of a run shows beside its renders: every metric, times, evaluations, settings, and episodes to read."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from roll.configs.base import Config
from roll.configs.schema import settings_of
from roll.report.curve import chart_svg, stacked_svg, timeline_svg
from roll.report.diagnosis import diagnose
from roll.report.record import RunRecord, held_out
from roll.tracking.display import share_interval
from roll.tracking.run import TIMELINE, TOKENS, TRAINED, read_json_lines

Metrics = Sequence[Mapping[str, Any]]
T = TypeVar("T")

_AREAS = ("rollout", "eval", "kept", "reward", "actor", "critic", "async", "mismatch", "sft", "dpo", "rm", "distill")
"""In this order; others follow by name."""
_OPEN = ("rollout", "reward", "actor")
_COUNTS = ("episodes", "dropped", "env_errors")
"""Metrics of training and of evaluations that say only how many there were."""
_POINTS = 240
"""Of a curve; longer ones are means of neighbours."""
_BARS = 60
_OF_A_KIND = 3
"""Episodes that are shown of each kind."""
_DIFFERS = 0.1
"""Difference of the log-probs of trainer and generator that is marked."""
_TURNS, _LETTERS = 8, 3000
"""Of an episode, and of a text in it."""


def numbers(metrics: Metrics, name: str) -> list[tuple[float, float]]:
    """(step, value) pairs of a metric, where it was measured."""
    return [(record["step"], float(record[name])) for record in metrics if record.get(name) is not None]


def thinned(points: Sequence[tuple[float, float]], most: int = _POINTS) -> list[tuple[float, float]]:
    """At most so many points, each the mean of neighbours."""
    size = -(-len(points) // most)
    if size <= 1:
        return list(points)
    return [
        (statistics.fmean(x for x, _ in part), statistics.fmean(y for _, y in part)) for part in _batched(points, size)
    ]


def _batched(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (values[start : start + size] for start in range(0, len(values), size))


def areas(metrics: Metrics) -> list[dict[str, Any]]:
    """Charts of all metrics by the first part of their name; held-out values are dots in the chart of training's.

    Those that never change are named with their value instead.
    """
    names = list(dict.fromkeys(name for record in metrics for name in record if name != "step"))
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(name.partition("/")[0], []).append(name)
    ranked = sorted(grouped, key=lambda area: (_AREAS.index(area) if area in _AREAS else len(_AREAS), area))
    found = []
    for area in ranked:
        series = {name: points for name in grouped[area] if (points := numbers(metrics, name))}
        steady = {name for name, points in series.items() if len({value for _, value in points}) == 1}
        charts = [_chart(metrics, name, points) for name, points in series.items() if name not in steady]
        constant = [f"{name} {series[name][0][1]:.4g}" for name in series if name in steady]
        if series:
            found.append({"name": area, "open": area in _OPEN, "charts": charts, "constant": ", ".join(constant)})
    return found


def _chart(metrics: Metrics, name: str, points: Sequence[tuple[float, float]]) -> dict[str, str]:
    values = [value for _, value in points]
    area, _, what = name.partition("/")
    dots = numbers(metrics, f"eval/{what}") if area == "rollout" and what not in _COUNTS else []
    alone = area.startswith("eval")
    svg = chart_svg([] if alone else thinned(points), points if alone else dots)
    span = f"{min(values):.4g} to {max(values):.4g}"
    return {"name": name, "last": f"{values[-1]:.4g}", "span": span, "svg": svg}


def times(metrics: Metrics, phases: Iterable[str]) -> dict[str, Any] | None:
    """Seconds of the steps by phase: a drawing, and a row for each phase with its sum and share."""
    steps = [record for record in metrics if record["step"]]
    by_phase = {phase: [float(record.get(f"time/{phase}") or 0.0) for record in steps] for phase in phases}
    totals = {phase: sum(seconds) for phase, seconds in by_phase.items() if sum(seconds) > 0}
    if not totals:
        return None
    size = -(-len(steps) // _BARS)
    bars = {phase: [statistics.fmean(part) for part in _batched(by_phase[phase], size)] for phase in totals}
    labels = [int(part[0]["step"]) for part in _batched(steps, size)]
    whole = sum(totals.values())
    ranked = sorted(totals, key=lambda phase: -totals[phase])
    rows = [(phase, f"{totals[phase]:.1f} s", f"{totals[phase] / whole:.0%}") for phase in ranked]
    return {"svg": stacked_svg({phase: bars[phase] for phase in ranked}, labels), "rows": rows}


def timeline(run_dir: Path) -> dict[str, Any] | None:
    """Who worked in each phase: the newest step drawn by worker, and shares of the phases' time over all steps.

    The share of a role is the mean of its workers; where they differ, that of the one which worked least is told too.
    """
    records = [record for record in read_json_lines(run_dir / TIMELINE) if record["step"] and record["phases"]]
    if not records:
        return None
    newest = records[-1]
    svg = timeline_svg(newest["phases"], newest["workers"])
    seconds: dict[str, float] = {}
    busy: dict[str, dict[str, float]] = {}
    for record in records:
        for phase, begin, end in record["phases"]:
            seconds[phase] = seconds.get(phase, 0.0) + end - begin
            for worker, spans in record["workers"].items():
                of_worker = busy.setdefault(worker, {})
                inside = sum(max(0.0, min(until, end) - max(since, begin)) for since, until in spans)
                of_worker[phase] = of_worker.get(phase, 0.0) + inside
    phases = sorted((phase for phase in seconds if seconds[phase] > 0), key=lambda phase: -seconds[phase])
    by_role: dict[str, list[dict[str, float]]] = {}
    for worker, found in busy.items():
        by_role.setdefault(worker.partition("[")[0], []).append(found)
    table = [("", *phases)]
    for role, workers in by_role.items():
        shares = [[found.get(phase, 0.0) / seconds[phase] for found in workers] for phase in phases]
        table.append((role, *(_share(each) for each in shares)))
    return {"step": newest["step"], "svg": svg, "rows": table}


def _share(shares: Sequence[float]) -> str:
    least = f" ({min(shares):.0%})" if max(shares) - min(shares) > 0.05 else ""
    return f"{statistics.fmean(shares):.0%}{least}"


def forecast(metrics: Metrics, planned: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What ``roll plan`` expects beside what was measured: medians of all steps but the first, which warms up.

    Args:
        planned: ``device`` (its name) and ``seconds`` by phase; or ``problem``, why there is no plan.
    """
    if planned is None:
        return None
    if "problem" in planned:
        return {"rows": [], "words": planned["problem"]}
    steps = [record for record in metrics if record["step"]]
    steps = steps[1:] or steps
    rows = [("", "planned", "measured", "measured / planned", "planned tokens/s", "measured tokens/s")]
    for phase, seconds in planned["seconds"].items():
        found = [value for _, value in numbers(steps, f"time/{phase}")]
        rates = [value for _, value in numbers(steps, f"tokens_per_s/{phase}")]
        if not found or not seconds:
            continue
        took, rate = statistics.median(found), statistics.median(rates) if rates else None
        told = ("", "") if rate is None else (f"{rate * took / seconds:,.0f}", f"{rate:,.0f}")
        rows.append((phase, f"{seconds:.3g} s", f"{took:.3g} s", f"{took / seconds:.2g}", *told))
    words = f"The plan is for {planned['device']}; measured are medians over the steps after the first."
    return {"rows": rows, "words": words}


def data_position(metrics: Metrics, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How far the run is in its data: datasets, passes, what was drawn and what became of it, and what was repeated."""
    steps = [record for record in metrics if record["step"]]
    rows = [
        (f"{name} data", f"{each['rows']:,} rows, {each['samples']:,} of them used")
        for name, each in (summary.get("data") or {}).items()
        if "rows" in each
    ]
    if not steps:
        return rows
    last = steps[-1]
    rows += [("passes over the data", f"{last[name]:.3g}") for name in last if name.endswith("/epoch")]
    if repeated := [value for _, value in numbers(steps, "rollout/duplicate_prompts")]:
        rows.append(("prompts repeated within a step", f"{statistics.fmean(repeated):.1%} on average"))
    if episodes := [value for _, value in numbers(steps, "rollout/episodes")]:
        rows.append(("responses or episodes sampled", f"{sum(episodes):,.0f} in {len(episodes)} steps"))
    if dropped := sum(value for _, value in numbers(steps, "rollout/dropped")):
        rows.append(("lost to errors", f"{dropped:,.0f}"))
    if filtered := sum(value for _, value in numbers(steps, "rollout/filtered")):
        rows.append(("groups turned down by the filter", f"{filtered:,.0f}"))
    if draws := summary.get("draws"):
        told = {"trained": "trained on", "settled": "settled without training", "waiting": "waiting"}
        of = (summary.get("data") or {}).get("actor_train.data_args", {}).get("samples")
        rows.append(("prompts or starts drawn", f"{sum(draws.values()):,}{f', of {of:,} in the data' if of else ''}"))
        rows += [(f"of these {words}", f"{draws[name]:,}") for name, words in told.items() if name in draws]
    if (waiting := last.get("async/buffer_groups")) is not None:
        rows.append(("groups finished ahead of the last step", f"{waiting:g}"))
    return rows


def evaluations(metrics: Metrics) -> list[dict[str, Any]]:
    """A row for each evaluation, with the 95% interval of its success."""
    rows = []
    for record in metrics:
        if record.get("eval/success") is None:
            continue
        share, size = held_out(record)
        low, high = share_interval(share, size)
        others = [
            f"{name.removeprefix('eval/').replace('_', ' ')} {record[name]:.3g}"
            for name in ("eval/reward", "eval/valid_rate", "eval/response_tokens", "eval/cut_off")
            if record.get(name) is not None
        ]
        interval = f"{low:.1%} to {high:.1%} ({size})" if size else "?"
        rows.append(
            {"step": record["step"], "share": f"{share:.1%}", "interval": interval, "others": ", ".join(others)}
        )
    return rows


def findings(run_dir: Path) -> dict[str, Any] | None:
    """The diagnosis of a run that samples; ``None`` of another."""
    try:
        return diagnose(RunRecord.read(run_dir)).plain()
    except ValueError:
        return None


def settings(run_dir: Path, schema: type[Config] | None) -> dict[str, list[tuple[str, str]]]:
    """Keys and values of the configuration: those that differ from their defaults, and all others.

    Args:
        schema: the class of the configuration; without it, nothing is known of defaults.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        return {}
    found: dict[str, list[tuple[str, str]]] = {"changed": [], "default": []}
    for key, value, differs in settings_of(yaml.safe_load(path.read_text(encoding="utf-8")), schema):
        found["changed" if differs else "default"].append((key, json.dumps(value, ensure_ascii=False, default=str)))
    return found


def episodes(run_dir: Path) -> list[dict[str, Any]]:
    """Episodes to read, by kind: best, worst and cut ones, and those that training has changed.

    Of the newest evaluation whose episodes were written, else of the newest step.
    """
    folder = run_dir / "trajectories"
    evaluated, trained = sorted(folder.glob("eval-*.jsonl")), sorted(folder.glob(f"{TRAINED}*.jsonl"))
    files = evaluated or trained[-1:]
    newest = read_json_lines(files[-1]) if files else []
    ranked = sorted(newest, key=lambda each: -each["score"])
    cut = [each for each in newest if each["turns"] and each["turns"][-1]["finish_reason"] == "length"]
    kinds: dict[str, list[Any]] = {
        "best": [(None, each) for each in ranked[:_OF_A_KIND]],
        "worst": [(None, each) for each in ranked[_OF_A_KIND:][: -_OF_A_KIND - 1 : -1]],
        "cut off": [(None, each) for each in cut[:_OF_A_KIND]],
    }
    before = 0
    if len(evaluated) > 1:
        before = _step_of(evaluated[0])
        changed = list(_changed(read_json_lines(evaluated[0]), newest))
        for kind, success in (
            (f"right now, wrong at step {before}", True),
            (f"wrong now, right at step {before}", False),
        ):
            kinds[kind] = [pair for pair in changed if pair[1]["success"] is success][:_OF_A_KIND]
    source = "" if not files else f"{'evaluation' if evaluated else 'training'} of step {_step_of(files[-1])}"
    return [
        {"kind": kind, "source": source, "episodes": [_shown(was, each, before) for was, each in pairs]}
        for kind, pairs in kinds.items()
        if pairs
    ]


def tokens(run_dir: Path) -> dict[str, Any] | None:
    """Rows of the newest step whose tokens were written: every token with its shade and its figures in words."""
    files = sorted((run_dir / "trajectories").glob(f"{TOKENS}*.jsonl"))
    if not files:
        return None
    rows = read_json_lines(files[-1])
    sampled = [token for row in rows for token in row["tokens"] if isinstance(token, list)]
    largest = max((abs(token[3] or 0.0) for token in sampled), default=0.0) or 1.0
    shown = [{**row, "tokens": [_token(token, largest) for token in row["tokens"]]} for row in rows]
    return {"step": _step_of(files[-1]), "rows": shown}


def _token(token: str | list[Any], largest: float) -> dict[str, str]:
    """Text, colour and words of a token; of text that was given, only the text."""
    if isinstance(token, str):
        return {"text": _short(token), "style": "", "words": ""}
    text, sampled, trainer, advantage, reward, version = token
    pull = float(advantage or 0.0)
    moved = None if sampled is None or trainer is None else trainer - sampled
    parts = [
        f"{name} {value:+.4g}"
        for name, value in (("log-prob", sampled), ("of the trainer", trainer), ("advantage", advantage))
        if value is not None
    ]
    parts += [f"ratio {math.exp(min(50.0, moved)):.3g}"] if moved is not None else []
    parts += [f"reward {reward:+.3g}"] if reward else []
    parts += [f"sampled by version {version:g}"] if version is not None else []
    parts.append("is made likelier" if pull > 0 else "is made less likely" if pull < 0 else "teaches nothing")
    color = "31,138,77" if pull > 0 else "200,64,47"
    style = f"background:rgba({color},{0.65 * abs(pull) / largest:.2f})"
    if moved is not None and abs(moved) > _DIFFERS:
        style += ";text-decoration:underline wavy"
    return {"text": text, "style": style, "words": ", ".join(parts)}


def _step_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _changed(old: Metrics, new: Metrics) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Pairs of the same episode whose success differs."""
    earlier = {_place(each): each for each in old}
    for each in new:
        was = earlier.get(_place(each))
        if was is not None and was["success"] != each["success"]:
            yield was, each


def _place(episode: Mapping[str, Any]) -> tuple[Any, ...]:
    first = episode["turns"][0]["observation"] if episode["turns"] else ""
    return episode["tag"], episode["seed"], episode["member"], first


def _shown(was: Mapping[str, Any] | None, episode: Mapping[str, Any], step: int) -> dict[str, Any]:
    """An episode as texts; of an earlier one, its last response."""
    turns = [
        {
            "observation": _short(turn["observation"]),
            "text": _short(turn["text"]),
            "action": turn["action"],
            "reward": turn["task_reward"] + turn["penalty"],
            "tokens": turn["completion_tokens"],
            "reason": turn["finish_reason"],
        }
        for turn in episode["turns"]
    ]
    left_out = max(0, len(turns) - _TURNS)
    return {
        "tag": episode["tag"],
        "success": episode["success"],
        "score": episode["score"],
        "group": episode["group_id"],
        "member": episode["member"],
        "truth": episode["info"].get("ground_truth"),
        "count": len(turns),
        "left_out": left_out,
        "turns": turns[: _TURNS // 2] + turns[-_TURNS // 2 :] if left_out else turns,
        "was": None if was is None else [_short(turn["text"]) for turn in was["turns"][-1:]],
        "was_step": step,
    }


def _short(text: str) -> str:
    return text if len(text) <= _LETTERS else f"{text[:_LETTERS]}… ({len(text) - _LETTERS:,} more characters)"
