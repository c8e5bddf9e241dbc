"""What a run has written of itself: its configuration, its metrics, and the newest responses that it sampled."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from roll.configs.algorithm import ADV_ESTIMATORS
from roll.tracking.run import TOKENS, TRAINED, read_json_lines

_SAMPLED, _EPISODES = "rollout/", "/episodes"
_MARK = re.compile(r"<\|[^|<>\n]{2,40}\|>|</?[a-z]+_of_[a-z]+>|\[/?INST\]|<｜[^｜<>\n]{2,40}｜>")
"""Control tokens of turns, as published chat templates write them."""
_GROUPS_READ = 4  # files of sampled training groups, the newest


@dataclass(frozen=True)
class RunRecord:
    """A run that trains a policy, as far as its folder tells.

    Attributes:
        config: resolved, nested.
        steps: metrics of each training step, in order; ``None`` for a value that was not finite.
        before, after: metrics of the first and the last evaluation; empty where there were not two.
        groups: the newest sampled training groups: for each response ``text`` (all turns), ``cut`` (by a length limit)
            and ``success``, and ``tag``.
        prompts, answers: as the model reads and writes them, with control tokens, of some rows of the newest step whose
            tokens were written.
        marks: control tokens of the turns in the model's own chat template; none if it has no template.
    """

    config: Mapping[str, Any]
    steps: Sequence[Mapping[str, float | None]]
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Sequence[Mapping[str, Any]]] = ()
    prompts: Sequence[str] = ()
    answers: Sequence[str] = ()
    marks: Sequence[str] = ()

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
        return cls(config, steps, first, last, groups, *_tokens(folder), _marks(folder, config))

    @property
    def tags(self) -> list[str]:
        """Of its environments or domains, if there are several."""
        names = (name.removeprefix(_SAMPLED) for name in self.steps[-1] if name.startswith(_SAMPLED))
        return sorted(name.removesuffix(_EPISODES) for name in names if name.endswith(_EPISODES))

    def of_tag(self, tag: str) -> RunRecord:
        """What is known of one tag alone: its metrics of the rollouts in the places of all, and its responses."""
        start = f"{_SAMPLED}{tag}/"
        steps = [
            {name: value for name, value in step.items() if not name.startswith(_SAMPLED)}
            | {_SAMPLED + name.removeprefix(start): value for name, value in step.items() if name.startswith(start)}
            for step in self.steps
        ]
        groups = [group for group in self.groups if group[0].get("tag") == tag]
        return replace(self, steps=steps, groups=groups, before={}, after={})

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
            "tag": record["tag"],
        }
        groups.setdefault((record["tag"], record["group_id"]), []).append(row)
    return list(groups.values())


def _tokens(folder: Path) -> tuple[list[str], list[str]]:
    """Prompts and answers of the rows that were written token by token last."""
    files = sorted((folder / "trajectories").glob(f"{TOKENS}*.jsonl"))
    rows = [row["tokens"] for path in files[-1:] for row in read_json_lines(path)]
    prompts = [row[0] for row in rows if row and isinstance(row[0], str)]
    return prompts, ["".join(token[0] for token in row if isinstance(token, list)) for row in rows]


def _marks(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Those of the chat template that came with the model: of its folder, else of the run's newest checkpoint."""
    saved = (config.get("checkpoint_config") or {}).get("output_dir") or folder / "checkpoints"
    places = [path / "actor_train" for path in sorted(Path(saved).expanduser().glob("checkpoint-*"))]
    for place in [Path(str(config.get("pretrain"))).expanduser(), *reversed(places)]:
        template, settings = place / "chat_template.jinja", place / "tokenizer_config.json"
        text = template.read_text(encoding="utf-8") if template.is_file() else ""
        if not text and settings.is_file():
            told = json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
            text = told if isinstance(told, str) else ""
        if text:
            return list(dict.fromkeys(_MARK.findall(text)))
    return []
