"""Looks at finished runs: ``roll report`` writes the page of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from roll.configs.base import Config
from roll.pipeline.programs import program_of, schemas
from roll.report.render import render_index


def report(run: Path, output: Path | None = None) -> Path:
    """Writes the page of a run, by default beside its renders.

    Raises:
        ValueError: the folder is no run's.
    """
    values = configuration(run)
    renders, logs = values.get("render_save_dir"), values.get("logging_dir")
    folder = Path(renders).expanduser() if renders else run / "renders"
    target = None if output is None else output.expanduser().resolve()
    return render_index(
        run.resolve(), folder.resolve(), Path(logs).expanduser() if logs else None, schema_of(values), target
    )


def configuration(run: Path) -> dict[str, Any]:
    """The resolved configuration of a run.

    Raises:
        ValueError: the folder is no run's.
    """
    path = run / "config.yaml"
    if not path.is_file():
        raise ValueError(f"got {run}, expected a run's folder, with config.yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def schema_of(values: Mapping[str, Any]) -> type[Config] | None:
    """The class of a configuration."""
    name = program_of(values)
    return None if name is None else schemas()[name]
