"""Finds a saved model: in a run's folder, a checkpoint, the folder of a role in it, or a model folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from roll.configs.pipeline import SMOLLM2
from roll.models.tokenizer import locate_model
from roll.tracking.checkpointer import Checkpointer
from roll.tracking.files import MANIFEST_FILE, CheckpointError

CONFIG_FILE = "config.yaml"
POLICY = "actor_train"


@dataclass(frozen=True)
class Saved:
    """The model that a user's path means."""

    model: str
    """Folder in Hugging Face format, or a name on the hub."""
    checkpoint: Path | None = None
    """The checkpoint that the model is in."""
    run: Path | None = None
    """The folder of the run that saved it, where its configuration is."""


def find_saved(path: str, role: str = POLICY) -> Saved:
    """The model that is meant by a path.

    Args:
        path: a run's folder (its newest whole checkpoint), a checkpoint, a model's folder, a name on the hub, or
            ``smollm2``.

    Raises:
        CheckpointError: the folder of a run without a whole checkpoint, or a model that cannot be made.
    """
    if path == SMOLLM2:
        try:
            return Saved(locate_model(path)[0])
        except ValueError as error:
            raise CheckpointError(str(error)) from error
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return Saved(path)
    if (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file():
        checkpoint = _newest(folder)
        return Saved(str(checkpoint / role), checkpoint, folder.resolve())
    if (folder / MANIFEST_FILE).is_file():
        return Saved(str(folder / role), folder.resolve(), _run_of(folder))
    if (folder.parent / MANIFEST_FILE).is_file():
        return Saved(str(folder), folder.parent.resolve(), _run_of(folder.parent))
    return Saved(str(folder))


def _newest(run: Path) -> Path:
    if (found := Checkpointer(run / "checkpoints").latest()) is not None:
        return found
    summary = run / "summary.json"  # they may be kept elsewhere
    named = json.loads(summary.read_text(encoding="utf-8")).get("checkpoint") if summary.is_file() else None
    if named is not None and (Path(named) / MANIFEST_FILE).is_file():
        return Path(named)
    raise CheckpointError(f"{run}: no complete checkpoint in it; expected one in {run / 'checkpoints'}")


def _run_of(checkpoint: Path) -> Path | None:
    run = checkpoint.resolve().parent.parent
    return run if (run / CONFIG_FILE).is_file() else None
