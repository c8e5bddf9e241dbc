"""Imports under test: what has become of each key, and the configuration that ``roll train`` would read."""

import tempfile
from collections.abc import Iterable, Sequence
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig

from roll.configs.compose import compose_config
from roll.configs.loader import load_composed
from roll.configs.pipeline import PipelineConfig
from roll.extras.importers import reading
from roll.extras.importers.convert import convert, report
from roll.extras.importers.draft import Kind
from roll.preflight.choices import CHECKS

FILES = Path(__file__).parent / "files"
ROLL = {path.stem: path for path in (FILES / "roll" / "run").iterdir()}
GIVEN = {
    "roll": ROLL["rlvr"],
    "verl": FILES / "run_verl.sh",
    "verl_sft": FILES / "run_verl_sft.sh",
    "chatlearn": FILES / "chatlearn.yaml",
    "mindspeed": FILES / "mindspeed.yaml",
}
"""A whole run of each system."""

DROPPED, DERIVED, TO_DO, IMPOSSIBLE, UNKNOWN = Kind.DROPPED, Kind.DERIVED, Kind.TO_DO, Kind.IMPOSSIBLE, Kind.UNKNOWN
LOST = {IMPOSSIBLE, UNKNOWN}

_compose = reading._composed
_composed: dict[tuple[Path, str], DictConfig] = {}


def _compose_once(file: Path, content: dict[str, Any], entries: list[Any]) -> DictConfig:
    """The tree of a file of ``files`` is made once, not for each row about it."""
    if not file.is_relative_to(FILES):
        return _compose(file, content, entries)
    key = file, str((content, entries))
    if key not in _composed:
        _composed[key] = _compose(file, content, entries)
    return _composed[key]


class Import:
    """The result of an import; ``found["a.b", "c"]`` are values of the configuration."""

    def __init__(self, system: str, file: Path, words: Sequence[str], variables: dict[str, str] | None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reading, "_composed", _compose_once)
            self.result = convert(system, [file], words, CHECKS, variables=variables)
        self.text, self.schema, self.exit_code = self.result.text, self.result.schema, self.result.exit_code
        self.outcomes = self.result.outcomes
        self.kinds = {(key, each.kind) for each in self.outcomes for key in each.key.split(", ")}
        self.notes = {key: each.note for each in self.outcomes for key in each.key.split(", ")}
        self.remarks = " ".join(self.result.notes)

    @property
    def lost(self) -> set[str]:
        """Keys of theirs that the result does not say."""
        return {each.key for each in self.outcomes if each.kind in LOST}

    @property
    def written(self) -> Any:
        """What the result says, as YAML."""
        return yaml.safe_load(self.text)

    @cached_property
    def config(self) -> PipelineConfig:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "mine.yaml").write_text(self.text)
            return load_composed(self.schema, "mine", compose_config("mine", Path(folder), ()))

    def __getitem__(self, keys: str | tuple[str, ...]) -> Any:
        return self._at(keys) if isinstance(keys, str) else tuple(map(self._at, keys))

    def _at(self, key: str) -> Any:
        def inside(node: Any, part: str) -> Any:
            if isinstance(node, dict):
                return node.get(part)
            return node[int(part)] if part.isdigit() else getattr(node, part)

        return reduce(inside, key.split("."), self.config)

    def check(self, expected: dict[str, Any], kinds: dict[str, Kind]) -> None:
        """Values of the configuration, and what has become of keys of theirs."""
        assert {key: self[key] for key in expected} == expected
        assert kinds.items() <= self.kinds


def imported(
    system: str,
    *words: str,
    file: Path | None = None,
    text: str = "",
    variables: dict[str, str] | None = None,
    lost: Iterable[str] | None = None,
) -> Import:
    """A run of a system, its usual one unless there is a file or a text, with further words.

    Args:
        lost: where given, the keys that the result does not say, or kinds by key of which those are lost; nothing else
            is wrong with it.
    """
    if isinstance(lost, dict):
        lost = {key for key, kind in lost.items() if kind in LOST}
    if text:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / GIVEN[system].name).write_text(text)
            return imported(system, *words, file=Path(folder) / GIVEN[system].name, lost=lost)
    found = Import(system, file or GIVEN[system], words, variables)
    if lost is not None:
        assert found.lost == set(lost) and not found.result.problems, report(found.result)
        assert found.exit_code == bool(found.lost)
    return found
