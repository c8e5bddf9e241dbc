"""``roll export``: a checkpoint in, a model folder out. Needs neither Ray nor a GPU."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roll.pipeline.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from roll.tracking.checkpointer import (
    CONFIG_FILE,
    POLICY,
    Checkpointer,
    CheckpointError,
    Saved,
    find_damage,
    find_saved,
)

_CARD = "README.md"
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]i?)?B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Job:
    """Model to export, and the form in which it is written."""

    model: str
    """A run's folder, a checkpoint, or a model's folder; see ``find_saved``."""
    output: Path
    role: str = POLICY
    dtype: str | None = None
    merge_adapter: bool = False
    base: str | None = None
    max_shard_size: str = "4GiB"
    overwrite: bool = False
    trust_remote_code: bool = False


def run(job: Job) -> int:
    """Writes the folder, which appears when it is whole.

    Returns:
        0; 1 when it could not be written; 2 for a wrong command line, checkpoint or model.
    """
    from roll.distributed.strategy.training.merging import export_folder

    folder = job.output.absolute()
    unfinished = folder.parent / f".{folder.name}.unfinished"
    try:
        saved = find_saved(job.model, job.role)
        _check(job, saved)
        shutil.rmtree(unfinished, ignore_errors=True)
        exported = export_folder(_export(job, saved), unfinished)
        _write_card(saved, unfinished)
        if job.output.exists():
            shutil.rmtree(job.output)
        unfinished.replace(job.output)
    except (CheckpointError, ValueError) as error:
        sys.stderr.write(f"roll export: {error}\n")
        return EXIT_USAGE
    except OSError as error:
        sys.stderr.write(f"roll export: {job.output}: {error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for note in exported.notes:
        sys.stderr.write(f"roll export: {note}\n")
    size, files = exported.num_bytes / 1e9, f"{exported.num_files} file{'s' * (exported.num_files > 1)}"
    sys.stdout.write(f"{job.output}: {exported.num_tensors:,} tensors, {size:,.2f} GB in {files}\n")
    return 0


def _check(job: Job, saved: Saved) -> None:
    if job.output.exists() and not job.overwrite and (not job.output.is_dir() or any(job.output.iterdir())):
        raise ValueError(f"-o {job.output}: it exists already, expected a new folder, or --overwrite")
    model = Path(saved.model)
    if job.output.resolve() in (Path.cwd(), model.resolve(), *model.resolve().parents):
        raise ValueError(f"-o {job.output}: got the working folder or the folder of what is exported, expected another")
    if saved.checkpoint is not None and (damage := find_damage(saved.checkpoint)) is not None:
        raise ValueError(f"{saved.checkpoint} cannot be used: {damage}")
    if job.role not in (POLICY, model.name) and model.is_dir():
        raise ValueError(f"--role {job.role}: got {job.model}, a plain model, expected a run or a checkpoint")
    if saved.checkpoint is None and not model.is_dir():
        raise ValueError(f"{job.model}: no such folder, expected a run's, a checkpoint or a model's")


def _export(job: Job, saved: Saved) -> Any:
    from roll.distributed.strategy.training.checkpoint import resume_folder
    from roll.distributed.strategy.training.merging import Export
    from roll.models.loading import DTYPES

    model = Path(saved.model)
    return Export(
        model,
        None if saved.checkpoint is None else resume_folder(saved.checkpoint, model.name),
        dtype=None if job.dtype is None else DTYPES[job.dtype],
        merge=job.merge_adapter,
        base=job.base,
        config_kwargs=_config_kwargs(saved, model.name),
        max_file_bytes=num_bytes(job.max_shard_size),
        trust_remote_code=job.trust_remote_code,
    )


def _write_card(saved: Saved, folder: Path) -> None:
    """Writes README.md: of a run's model its card, beside that of the model that the run started from; else its own."""
    from roll.pipeline.programs import program_of, schemas
    from roll.report.card import BASE_CARD, model_card

    own = Path(saved.model) / _CARD
    if saved.run is None or saved.checkpoint is None:
        if own.is_file():
            shutil.copy2(own, folder / _CARD)
        return
    values = yaml.safe_load((saved.run / CONFIG_FILE).read_text(encoding="utf-8"))
    role, pipeline = Path(saved.model).name, program_of(values)
    if pipeline is None:  # the configuration of another version
        return
    base = str((values.get("reward_pretrain") if role == "critic" else None) or values.get("pretrain") or "?")
    card = Path(base).expanduser() / _CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else None
    if text is not None:
        shutil.copy2(card, folder / BASE_CARD)
    adapter = (folder / "adapter_config.json").is_file()
    kind = "critic" if role == "critic" else "adapter" if adapter else "scores" if "reward_loss" in values else "policy"
    if kind == "scores" and _is_own_classifier(folder):
        kind = "scores with pictures"
    step = Checkpointer.step_of(saved.checkpoint)
    written = model_card(saved.run, pipeline, schemas()[pipeline], step, kind, base, text)
    (folder / _CARD).write_text(written, encoding="utf-8")


def _is_own_classifier(folder: Path) -> bool:
    """Tells whether Transformers has no class of a classifier's name, see ``classifier_class``."""
    import transformers

    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return not any(hasattr(transformers, name) for name in content["architectures"])


def _config_kwargs(saved: Saved, role: str) -> dict[str, Any]:
    """Values that the run replaced in the configuration of the model that it started from."""
    if saved.run is None:
        return {}
    section = yaml.safe_load((saved.run / CONFIG_FILE).read_text(encoding="utf-8")).get(role) or {}
    kwargs: dict[str, Any] = (section.get("model_args") or {}).get("model_config_kwargs") or {}
    return kwargs


def num_bytes(size: str) -> int:
    """Bytes of a size such as ``500MB`` (powers of 1000) or ``4GiB`` (of 1024).

    Raises:
        ValueError: it is none.
    """
    found = _SIZE.fullmatch(size.strip())
    unit = (found["unit"] or "").upper() if found else ""
    count = int(float(found["number"]) * (1024 if unit.endswith("I") else 1000) ** _POWERS[unit[:1]]) if found else 0
    if count < 1:
        raise ValueError(f"--max-shard-size: got {size!r}, expected a size such as 500MB or 4GiB")
    return count
