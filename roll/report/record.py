"""What a run has written of itself: its configuration, its metrics, and the newest responses that it sampled."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from roll.configs.algorithm import ADV_ESTIMATORS
from roll.tracking.files import read_json_lines
from roll.tracking.run import TRAINED

_GROUPS_READ = 4  # files of sampled training groups, the newest


@dataclass(frozen=True)
class RunRecord:
    """A run that trains a policy, as far as its folder tells.

    Attributes:
        config: resolved, nested.
        steps: metrics of each training step, in order; ``None`` for a value that was not finite.
        before, after: metrics of the first and the last evaluation; empty where there were not two.
        groups: the newest sampled training groups: for each response ``text`` (all turns), ``cut`` (by a length limit)
            and ``success``.
    """

    config: Mapping[str, Any]
    steps: Sequence[Mapping[str, float | None]]
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Sequence[Mapping[str, Any]]] = ()

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Reads a run's folder.

        Raises:
            ValueError: it is no run's, or the run trains no policy.
        """
        config_path, metrics_path = folder / "config.yaml", folder / "metrics.jsonl"
        if not (config_path.is_file() and metrics_path.is_file()):
            raise ValueError(f"got {folder}, expected a run's folder, with config.yaml and metrics.jsonl")
        config = yaml.safe_load(config_path.read_text(encoding="utf-8"))
        records = read_json_lines(metrics_path)
        steps = [record for record in records if record["step"] and "rollout/episodes" in record]
        if "actor_infer" not in config or not steps:
            found = f"{len(steps)} steps with rollouts" if "actor_infer" in config else "a run without actor_infer"
            raise ValueError(f"{folder}: got {found}, expected one that has sampled responses in at least one step")
        evaluated = [record for record in records if "eval/success" in record]
        first, last = (evaluated[0], evaluated[-1]) if len(evaluated) > 1 else ({}, {})
        files = sorted((folder / "trajectories").glob(f"{TRAINED}*.jsonl"))[-_GROUPS_READ:]
        groups = [group for path in files for group in _groups(read_json_lines(path))]
        return cls(config, steps, first, last, groups)

    def setting(self, path: str, default: Any = None) -> Any:
        """A key of the configuration, ``a.b.c``; ``default`` where it is missing or null."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None else value

    @property
    def compares(self) -> bool:
        """Its estimator compares the responses to a prompt; unknown of a user's own, which then does not."""
        known = ADV_ESTIMATORS.get(self.setting("adv_estimator", ""))
        return known is not None and known.compares

    @property
    def group_size(self) -> int:
        """Responses to a prompt, or episodes from a start."""
        return int(self.setting("num_return_sequences_in_group", self.setting("train_env_manager.group_size", 1)))

    def series(self, name: str) -> list[float]:
        """A metric over the steps that have it."""
        return [float(value) for step in self.steps if (value := step.get(name)) is not None]

    def early(self, name: str, count: int | None = None) -> float | None:
        """Its mean over the first ``count`` of these steps, or their first third; ``None``: no step has it."""
        values = self.series(name)
        return statistics.fmean(values[: count or _third(values)]) if values else None

    def late(self, name: str, default: float = math.nan, count: int | None = None) -> float:
        """Its mean over the last ``count`` of these steps, or their last third.

        Comparisons with the default, NaN, are false.
        """
        values = self.series(name)
        return statistics.fmean(values[-(count or _third(values)) :]) if values else default

    @property
    def evaluations(self) -> list[Mapping[str, Any]]:
        """Metrics of all evaluations, that before training too."""
        first = [self.before] if self.before and not self.before["step"] else []
        return [*first, *(step for step in self.steps if step.get("eval/success") is not None)]


def held_out(evaluation: Mapping[str, Any]) -> tuple[float, int]:
    """Success of an evaluation, and the number of independent trials that it is a share of."""
    return evaluation["eval/success"], int(evaluation.get("eval/prompts") or evaluation.get("eval/episodes") or 0)


def _third(values: Sequence[float]) -> int:
    return max(1, len(values) // 3)


def _groups(records: Iterable[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in records:
        turns = record["turns"]
        row = {
            "text": "\n".join(turn["text"] for turn in turns),
            "cut": any(turn["finish_reason"] == "length" for turn in turns),
            "success": record["success"],
        }
        groups.setdefault((record["tag"], record["group_id"]), []).append(row)
    return list(groups.values())
