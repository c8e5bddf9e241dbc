"""Metrics that a run printed, counted again from the rows that it wrote.

Means over episodes and turns are counted from the episodes' JSON lines, without the code that printed them. Rewards and
advantages after shaping are computed from the saved rollouts, by the algorithm itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from roll.algorithms.shaping import Shaping, shape_rewards
from roll.configs.rl import RLConfig
from roll.rollout.metrics import kept_metrics, overlap_metrics
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import VALID_UNKNOWN, Collected
from roll.tracking.files import read_json_lines
from roll.tracking.run import TRAINED

Records = Sequence[Mapping[str, Any]]

_CLOSE = 1e-6
"""Relative error that sums in another order may have."""
_WHY = {
    "rollout_dump_dir": "need every step's rollouts: set rollout_dump_dir",
    "num_written_episodes": "need all episodes of an evaluation: set num_written_episodes: null",
    "trainer": "follow from the trainer's log-probs, values and masks of single tokens, which runs do not record",
    "measured": "are measured: time, memory, and attempts that failed and left no rows",
    "other": "are not counted again",
}
_MEASURED = ("time/", "tokens_per_s", "tflops", "mfu", "memory/", "async/idle", "async/buffer", "async/running")
_FAILED = ("dropped", "env_errors", "errors", "retries")
_TRAINER = ("actor/", "critic/", "mismatch/", "async/log_ratio", "async/truncated", "async/rejected", "global_seqlen/")


@dataclass(frozen=True)
class Wrong:
    """A figure that does not follow from the rows."""

    step: int
    metric: str
    printed: float | None
    counted: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.metric} is {self.printed!r}, the rows give {self.counted!r}"


@dataclass
class Verification:
    """What was counted again.

    Attributes:
        checked: figures by metric.
        wrong: those that differ.
        unchecked: metrics by why they could not be counted, see ``_WHY``.
    """

    checked: dict[str, int] = field(default_factory=dict)
    wrong: list[Wrong] = field(default_factory=list)
    unchecked: dict[str, list[str]] = field(default_factory=dict)

    def compare(self, step: int, printed: Mapping[str, Any], counted: Mapping[str, float]) -> None:
        """Compares the figures of a step that it has printed."""
        for name in counted.keys() & printed.keys():
            self.checked[name] = self.checked.get(name, 0) + 1
            value = printed[name]
            if value is None or not math.isclose(value, counted[name], rel_tol=_CLOSE, abs_tol=_CLOSE * 1e-2):
                self.wrong.append(Wrong(step, name, value, counted[name]))

    def text(self) -> str:
        """For the terminal."""
        lines = [f"{sum(self.checked.values()):,} figures of {len(self.checked)} metrics were counted again"]
        lines[0] += f"; {len(self.wrong)} differ:" if self.wrong else ": all follow from the rows on disk"
        lines += [f"  {each}" for each in sorted(self.wrong, key=lambda each: (each.step, each.metric))]
        for why, names in self.unchecked.items():
            lines += ["", f"{len(names)} metrics {_WHY[why]}:", f"  {', '.join(names)}"]
        return "\n".join(lines) + "\n"


def verify(run_dir: Path, config: RLConfig, rollouts: Path | None = None) -> Verification:
    """Counts again what a run's rows allow.

    Args:
        config: of the run.
        rollouts: its ``rollout_dump_dir``, where that has moved.
    """
    found = Verification()
    dumped = rollouts or (Path(config.rollout_dump_dir).expanduser() if config.rollout_dump_dir else None)
    shaping: Shaping | None = Shaping(config.parts)
    metrics = read_json_lines(run_dir / "metrics.jsonl")
    for printed in metrics:
        step = printed["step"]
        folder = dumped / f"step-{step:05d}" if dumped is not None else None
        if folder is not None and (folder / "episodes.jsonl").is_file():
            rows: Records = read_json_lines(folder / "episodes.jsonl")
            collected = Collected.load(folder)
            found.compare(step, printed, _of_rollouts(config, collected, shaping, step))
        else:
            rows = _rows(run_dir, f"{TRAINED}{step:05d}")
            if len(_grouped(rows)) >= config.num_written_groups and len(rows) != printed.get("rollout/episodes"):
                rows = []  # some of them
            shaping = shaping if step == 0 else None  # running statistics have missed a step
        if rows:
            found.compare(step, printed, counted(rows, "rollout") | _kept(rows) | _of_domains(rows, config))
        held_out, most = _rows(run_dir, f"eval-{step:05d}"), config.num_written_episodes
        if held_out and (most is None or len(held_out) < most or len(held_out) == printed.get("eval/episodes")):
            found.compare(step, printed, counted(held_out, "eval"))
    names = dict.fromkeys(name for printed in metrics for name in printed if name != "step")
    for name in names:
        if name not in found.checked:
            whole_area = any(each.startswith(name.partition("/")[0]) for each in found.checked)
            found.unchecked.setdefault(_why(name, whole_area), []).append(name)
    return found


def _why(name: str, counts_others: bool) -> str:
    """Why a metric cannot be counted; ``counts_others``: of the same area."""
    if name.startswith(_MEASURED) or name.rpartition("/")[2] in _FAILED:
        return "measured"
    if name.startswith("eval/") and not counts_others:
        return "num_written_episodes"
    if name.startswith(("rollout/", "kept/", "reward/", "async/l", "actor/advantage")) and not counts_others:
        return "rollout_dump_dir"
    return "trainer" if name.startswith(_TRAINER) else "other"


def _rows(run_dir: Path, name: str) -> Records:
    return read_json_lines(run_dir / "trajectories" / f"{name}.jsonl")


def counted(rows: Records, prefix: str) -> dict[str, float]:
    """Means over episodes and turns, and shares of groups, named as the run names them."""
    turns = [turn for row in rows for turn in row["turns"]]
    judged = [turn for row in rows if not row["info"].get(VALID_UNKNOWN) for turn in row["turns"]]
    parts = {name: [sum(turn[name] for turn in row["turns"]) for row in rows] for name in ("task_reward", "penalty")}
    scores = [task + penalty for task, penalty in zip(*parts.values(), strict=True)]
    values: dict[str, Sequence[float]] = {
        "success": [row["success"] for row in rows],
        "reward": scores,
        "turns": [len(row["turns"]) for row in rows],
        "context_full": [row["end"] == "context_full" for row in rows],
        **parts,
        "valid_rate": [turn["action"] is not None for turn in judged],
        "response_tokens": [turn["completion_tokens"] for turn in turns],
        "prompt_tokens": [turn["prompt_tokens"] for turn in turns],
        "cut_off": [turn["finish_reason"] == "length" for turn in turns],
    }
    groups = [group for group in _grouped(rows).values() if len(group) > 1]
    equal = [group for group in groups if len({row["score"] for row in group}) == 1]
    if groups:
        values["no_spread"] = [len(equal) / len(groups)]
        values["all_right"] = [sum(all(row["success"] for row in group) for group in equal) / len(groups)]
        values["all_wrong"] = [sum(not any(row["success"] for row in group) for group in equal) / len(groups)]
    return {f"{prefix}/{name}": statistics.fmean(each) for name, each in values.items() if each} | {
        f"{prefix}/episodes": float(len(rows)),
        f"{prefix}/tokens": float(sum(turn["completion_tokens"] for turn in turns)),
    }


def _grouped(rows: Records) -> dict[tuple[str, int], list[Mapping[str, Any]]]:
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["tag"], row["group_id"]), []).append(row)
    return groups


def _kept(rows: Records) -> dict[str, float]:
    """Of what was trained on, where groups are filtered."""
    kept = [row for row in rows if row["trained"]]
    if not kept:
        return {}
    return counted(kept, "kept") | {"kept/groups": float(len(_grouped(kept)))}


def _of_domains(rows: Records, config: RLConfig) -> dict[str, float]:
    """``reward/<domain>/…``: scores, accuracies, and the verifiers' own numbers."""
    domains: dict[str, str] = getattr(config, "domains", {})
    found: dict[str, list[float]] = {}
    for row in rows:
        if (domain := domains.get(row["tag"])) is None:
            continue
        own = {name: value for name, value in row["info"].items() if "/" in name and isinstance(value, int | float)}
        for name, value in {"score": row["score"], "accuracy": row["success"], **own}.items():
            found.setdefault(f"reward/{domain}/{name}", []).append(float(value))
    return {name: statistics.fmean(values) for name, values in found.items()}


def _of_rollouts(config: RLConfig, collected: Collected, shaping: Shaping | None, step: int) -> dict[str, float]:
    """Ages of the tokens, shaped rewards and, where they need no trained model, advantages."""
    if not collected.groups:
        return {}
    batch = groups_to_batch(collected.groups, config.tags, config.gdpo_reward_keys)
    finished = [*collected.groups, *collected.rejected]
    prompts = [tuple(group.trajectories[0].turns[0].prompt_ids) for group in finished if group.trajectories]
    found = {
        "rollout/duplicate_prompts": 1 - len(set(prompts)) / max(1, len(prompts)),
        "rollout/filtered": float(len(collected.rejected)),
        **kept_metrics(finished),
    }
    if config.overlaps:
        nothing_waits = cast(Any, SimpleNamespace(ready=[], running=[]))
        ages = overlap_metrics(batch, nothing_waits, step - 1)
        found |= {name: value for name, value in ages.items() if not name.startswith(_MEASURED)}
    if shaping is None or getattr(config, "online_dpo", None) is not None:
        return found
    try:
        return found | shaping(batch)[1]
    except ValueError:  # it needs columns of a model: a KL, values, a teacher's terms
        return found | shape_rewards(batch, config.reward, shaping.score_stats)[1]
