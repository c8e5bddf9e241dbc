"""Finished groups in a checkpoint: arrays as safetensors and the rest as JSON, so that reading them runs no code.

Arrays with one kind of number lie one behind the other in one tensor. In the JSON, ``[kind, start, end]`` stands for
each of them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from roll.data.requests import Completion, FinishReason
from roll.rollout.types import Collected, EpisodeEnd, RolloutGroup, Trajectory, Turn

_ARRAYS, _REST = "rollouts.safetensors", "rollouts.json"

Arrays: TypeAlias = Mapping[str, np.ndarray]
"""The flat tensors by kind of number."""


def save_groups(folder: Path, finished: Collected) -> None:
    """Writes the groups into ``folder``, which is made."""
    from safetensors.numpy import save_file

    writer = _Writer()
    rest = writer.plain(finished)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({kind: np.concatenate(parts) for kind, parts in writer.parts.items()}, folder / _ARRAYS)
    (folder / _REST).write_text(json.dumps(rest), encoding="utf-8")


def load_groups(folder: Path) -> Collected:
    """Groups that ``save_groups`` has written, equal in every field; none where it has written nothing."""
    from safetensors.numpy import load_file

    if not (folder / _REST).exists():
        return Collected([], [])
    arrays = load_file(folder / _ARRAYS)
    rest = json.loads((folder / _REST).read_text(encoding="utf-8"))
    return Collected(**{name: [_group(group, arrays) for group in groups] for name, groups in rest.items()})


@dataclass
class _Writer:
    parts: defaultdict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    """By kind of number."""
    lengths: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def plain(self, value: Any) -> Any:
        """The value as JSON can hold it."""
        if is_dataclass(value):
            return {entry.name: self.plain(getattr(value, entry.name)) for entry in fields(value)}
        if isinstance(value, tuple | list):
            return [self.plain(item) for item in value]
        if isinstance(value, bytes):
            value = np.frombuffer(value, dtype=np.uint8)
        return self._add(value) if isinstance(value, np.ndarray) else value

    def _add(self, array: np.ndarray) -> list[str | int]:
        kind = array.dtype.name
        start = self.lengths[kind]
        self.parts[kind].append(array)
        self.lengths[kind] += len(array)
        return [kind, start, self.lengths[kind]]


def _array(place: Sequence[Any], arrays: Arrays) -> np.ndarray:
    kind, start, end = place
    return arrays[kind][start:end]


def _group(saved: dict[str, Any], arrays: Arrays) -> RolloutGroup:
    baseline = saved["baseline"]
    parts = {
        "trajectories": tuple(_trajectory(trajectory, arrays) for trajectory in saved["trajectories"]),
        "errors": tuple(saved["errors"]),
        "baseline": None if baseline is None else _trajectory(baseline, arrays),
    }
    return RolloutGroup(**{**saved, **parts})


def _trajectory(saved: dict[str, Any], arrays: Arrays) -> Trajectory:
    parts = {
        "turns": tuple(_turn(turn, arrays) for turn in saved["turns"]),
        "end": EpisodeEnd(saved["end"]),
        "frames": tuple(
            frame if isinstance(frame, str) else _array(frame, arrays).tobytes() for frame in saved["frames"]
        ),
    }
    return Trajectory(**{**saved, **parts})


def _turn(saved: dict[str, Any], arrays: Arrays) -> Turn:
    completion = saved["completion"]
    sampled = {name: _array(completion[name], arrays) for name in ("token_ids", "logprobs", "versions")}
    experts = completion.get("experts")
    completion = {
        **completion,
        **sampled,
        "finish_reason": FinishReason(completion["finish_reason"]),
        "experts": None if experts is None else _array(experts, arrays),
    }
    parts = {"prompt_ids": _array(saved["prompt_ids"], arrays), "completion": Completion(**completion)}
    return Turn(**{**saved, **parts})
