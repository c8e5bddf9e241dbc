"""``roll eval``: evaluates a saved model on held-out data, as its run would."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.configs.compose import compose_config
from roll.configs.problems import ConfigErrors
from roll.pipeline.cli import EXIT_USAGE, perform, report
from roll.pipeline.commands.progress import page
from roll.tracking.checkpointer import CONFIG_FILE, Checkpointer, CheckpointError, Saved, find_saved
from roll.tracking.redact import REDACTED
from roll.tracking.run import read_json_lines


def run(path: str, config: tuple[str, Path] | None, words: Sequence[str], started: float) -> int:
    """Evaluates, and prints the figures.

    Args:
        path: a run's folder, a checkpoint, or a model's folder; see ``find_saved``.
        config: name and folder; ``None``: the configuration of the run that saved the model.

    Returns:
        That of the run; 2 where nothing says how to evaluate.
    """
    try:
        saved = find_saved(path)
    except CheckpointError as error:
        sys.stderr.write(f"roll eval: {error}\n")
        return EXIT_USAGE
    if config is None and saved.run is None:
        lack = f"no {CONFIG_FILE} of a run next to it" if Path(path).expanduser().is_dir() else "no such folder here"
        sys.stderr.write(f"roll eval: {path}: {lack}; --config says how to evaluate a model that no run has saved\n")
        return EXIT_USAGE
    name, folder = config or (Path(CONFIG_FILE).stem, saved.run or Path())
    overrides = [*changes(saved, folder if config is None else None), *words]
    try:
        values = compose_config(name, folder, overrides).values
    except ConfigErrors as errors:
        sys.stderr.write(report(errors, name))
        return EXIT_USAGE
    for key in redacted(values):
        sys.stderr.write(f"{key} was not saved, as it is a secret: give it as {key}=… if the evaluation needs it\n")
    code = perform("train", name, folder, overrides, started=started)
    if code == 0:
        target = Path(values.get("output_dir", "output")).expanduser() / values["exp_name"]
        last = read_json_lines(target / "metrics.jsonl")[-1]
        figures = {name: value for name, value in last.items() if name.startswith("eval")}
        sys.stdout.write(f"\n{page(figures)}in {target}\n")
    return code


def changes(saved: Saved, run: Path | None) -> list[str]:
    """Changes that make a run's configuration one that evaluates a saved model, as ``key=value``.

    Args:
        run: the folder of the run, beside which the evaluation's is made; ``None``: where the configuration says.
    """
    values: dict[str, str] = {}
    if saved.checkpoint is not None:
        values["resume_from_checkpoint"] = str(saved.checkpoint)
        label = (
            f"{run.name if run else saved.checkpoint.parent.parent.name}_eval_{Checkpointer.step_of(saved.checkpoint)}"
        )
    else:
        values["pretrain"] = saved.model
        label = f"{Path(saved.model).name}_eval"
    values["exp_name"] = re.sub(r"[^\w.+-]", "_", label)
    if run is not None:
        values["output_dir"] = str(run.parent)
    quoted = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    fixed = ["eval_only=true", "checkpoint_config.load_contents=[model]", "logging_dir=null", "render_save_dir=null"]
    return [*fixed, *quoted]


def redacted(values: Any, path: str = "") -> Iterator[str]:
    """The keys whose values a run has not saved."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from redacted(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, str) and REDACTED in values:
        yield path
