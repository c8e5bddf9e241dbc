"""Commands on the folders of runs: the page of one, how several differ, metrics counted again, an archive."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from roll.configs.base import Config
from roll.configs.problems import ConfigErrors
from roll.configs.rl import RLConfig
from roll.pipeline.programs import program_of, schemas
from roll.report.bundle import write_bundle
from roll.report.comparison import Comparison, Run
from roll.report.render import render_index, render_page
from roll.tracking.run import software_versions, write_atomic
from roll.utils.registry import extra


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
        run.resolve(),
        folder.resolve(),
        Path(logs).expanduser() if logs else None,
        schema_of(values),
        target,
        _forecast(run),
    )


def _forecast(run: Path) -> dict[str, Any]:
    """What ``roll plan`` says of the run on its machine, or why it does not."""
    summary = run / "summary.json"
    ran = json.loads(summary.read_text(encoding="utf-8")).get("versions", {}) if summary.is_file() else {}
    here = software_versions()
    if any(ran.get(part) != here.get(part) for part in ("cpu", "gpu")):
        there = ran.get("gpu") or ran.get("cpu") or "a machine that it did not record"
        return {"problem": f"The run was on {there}; roll report says what was planned when it is called there."}
    try:
        found: dict[str, Any] = extra("plan").forecast(run)
    except ConfigErrors as errors:
        return {"problem": f"There is no plan: {'; '.join(each.path for each in errors.problems)} cannot be read here."}
    return found


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


def compare(folders: Sequence[Path], output: Path | None = None) -> str:
    """How runs differ, in words; with ``output`` also as a page with their curves.

    Raises:
        ValueError: a folder is no run's.
    """
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    found = Comparison([Run.read(folder, name) for folder, name in zip(folders, names, strict=True)])
    if output is not None:
        write_atomic(output, _comparison_page(found))
    return found.text()


def _comparison_page(found: Comparison) -> str:
    head = ("", *(run.name for run in found.runs))
    parts = {
        "Settings that differ": found.settings,
        "Software and machines that differ": found.recorded("versions"),
        "Data that differ": found.recorded("data"),
    }
    tables = {name: [head, *((row.what, *row.values) for row in rows)] for name, rows in parts.items()}
    groups = ("", *(found.label(group) for group in found.groups))
    tables["At the end"] = [groups, *((name, *cells) for name, cells in found.figures())]
    lists = {
        "Beyond noise?": list(found.verdicts()),
        "Where they part": list(found.partings()),
        "Keys that differ without an effect on results": [", ".join(found.free)] if found.free else [],
    }
    title = " · ".join(run.name for run in found.runs)
    curves = list(found.curves())
    return render_page("compare.html", title=title, found=found, tables=tables, lists=lists, curves=curves)


def verify(run: Path, rollouts: Path | None = None) -> tuple[str, int]:
    """What a run printed against what its rows give, in words, and the number of figures that differ.

    Raises:
        ValueError: the folder is no run's, nothing can be counted again, or the run samples nothing.
    """
    from roll.report.verification import verify as count_again  # with torch

    values = configuration(run)
    schema = schema_of(values)
    if schema is None or not issubclass(schema, RLConfig):
        raise ValueError(f"{run}: got a run that samples nothing, expected one with rollouts")
    found = count_again(run, schema.model_validate(values), rollouts)
    if not found.checked:
        raise ValueError(f"{run}: nothing can be counted again; set rollout_dump_dir and num_written_episodes: null")
    return found.text(), len(found.wrong)


def bundle(run: Path, output: Path | None = None, *, rows: bool = True) -> str:
    """Packs a run into an archive; returns what is in it, in words.

    Raises:
        ValueError: the folder is no run's.
        OSError: the archive cannot be written.
    """
    logs = configuration(run).get("logging_dir")
    target = Path(f"{run.resolve().name}-bundle.zip") if output is None else output.expanduser()
    written = write_bundle(run, target, Path(logs).expanduser() if logs else None, rows=rows)
    lines = [f"{size:>12,} bytes  {name}" for name, size in written]
    return "\n".join([*lines, f"{target}: {target.stat().st_size:,} bytes; read it before you send it", ""])
