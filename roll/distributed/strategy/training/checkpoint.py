"""Checkpoints of a trainer, in safetensors and JSON only (nothing in them can run code), whichever engine wrote them.

A role has two folders in a checkpoint. ``<role>/`` is a model and nothing else, which other programs open:
``config.json``, tokenizer files, ``model*.safetensors`` and a critic's ``value_head.safetensors``, or with LoRA what
peft calls an adapter. ``resume/<role>/`` is what else a resumed run needs: ``optimizer/state*.safetensors`` with Adam's
moments, and the float32 weights when the model is stored in fewer bits; ``trainer.json`` with the counters;
``rng.safetensors`` with one torch generator state per rank. Tensors are whole and have Hugging Face names, so any
number of ranks, in any layout and with any engine, can read what others wrote. They are gathered one at a time, each
where it is written: every rank writes a share of the files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from roll.distributed.strategy.training.agreement import all_gather, raise_on_all_ranks
from roll.distributed.strategy.training.optim import ADAM_STATE, MASTER
from roll.distributed.strategy.training.tensor_files import (
    BackgroundWriter,
    Piece,
    Reader,
    StoredTensors,
    piece_of,
    plan_files,
    write_index,
)
from roll.models.heads import VALUE_HEAD_FILE
from roll.models.loading import copy_companions
from roll.models.lora import ADAPTER_FILE

logger = logging.getLogger(__name__)

MODEL = "model"
ADAPTER = Path(ADAPTER_FILE).stem
VALUE_HEAD = Path(VALUE_HEAD_FILE).stem
OPTIMIZER = "optimizer/state"
"""What a checkpoint holds, by the stems of its files; the last in ``resume_folder``, the others in ``model_folder``."""

TRAINER_FILE = "trainer.json"
RNG_FILE = "rng.safetensors"
SINGLE = (ADAPTER, VALUE_HEAD, Path(RNG_FILE).stem)
"""Stems of what readers expect in one file."""

MODEL_PREFIX = "model."
HEAD_PREFIX = "value_head."
"""Parameters of the language model and of a critic's head, as a trainer's whole module names them."""

Tensors: TypeAlias = Mapping[str, Sequence[Piece]]
"""What is in the files of a folder, by their stems."""


@dataclass
class TrainerState:
    """What a trainer counts."""

    optimizer_steps: int = 0
    """Optimizer steps taken: the position in the learning-rate schedule."""
    total_optimizer_steps: int = 1
    """Horizon of the schedule."""


def model_folder(checkpoint: Path, role: str) -> Path:
    """Where a checkpoint has a role's model, alone."""
    return checkpoint / role


def resume_folder(checkpoint: Path, role: str) -> Path:
    """Where it has what else resumes the role."""
    return checkpoint / "resume" / role


class Trained(Protocol):
    """What a trainer changes, as whole tensors under the names of the Hugging Face module.

    A ``kind`` is one of Adam's moments or ``MASTER``, the float32 weights.
    """

    @property
    def device(self) -> torch.device: ...

    def tensors(self, kind: str) -> Sequence[Piece]:
        """All of a kind, in float32."""

    def fill(self, kind: str, read: Reader) -> None:
        """Sets all of a kind (collective)."""

    def load(self, path: Path) -> None:
        """Sets the weights to those of a model folder or an adapter's (collective)."""

    def set_steps(self, steps: int) -> None:
        """Tells Adam how many steps it has taken, for its bias correction."""


@dataclass(frozen=True)
class ModelFiles:
    """What a model folder is made of."""

    tensors: Tensors
    """By the stems of their files: ``MODEL`` under the names and in the number format of a Hugging Face checkpoint, or
    ``ADAPTER`` under those of a peft folder; ``VALUE_HEAD``. Nothing is written of what has no tensors."""
    write_config: Callable[[Path], None]
    """Writes ``config.json`` and its like into the folder; called on rank 0."""
    source: str
    """Model folder from which tokenizer files and generation defaults are copied."""


def hand_over_model(path: Path, files: ModelFiles, writer: BackgroundWriter) -> None:
    """Gathers a model and hands it to the ranks' writers, each a share; they make the folder if need be (collective).

    Raises:
        OSError: on every rank, when rank 0 cannot write what is no tensor.
    """

    def write_rest() -> None:
        files.write_config(path)
        copy_companions(Path(files.source), path)

    _hand_over(path, files.tensors, write_rest, writer)


def hand_over_resume(
    path: Path, optimizer: Sequence[Piece], state: TrainerState, device: torch.device, writer: BackgroundWriter
) -> None:
    """The same for what resumes training.

    Args:
        path: folder; made if need be.
        optimizer: see ``optimizer_tensors``.
        state: the counters.
        device: whose generator states are kept beside the CPU's.
        writer: this rank's.
    """

    def write_rest() -> None:
        (path / TRAINER_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n")

    _hand_over(path, {OPTIMIZER: optimizer, Path(RNG_FILE).stem: _rng_states(device)}, write_rest, writer)


def optimizer_tensors(trained: Trained, *, masters: bool) -> list[Piece]:
    """``<parameter>.exp_avg``, ``.exp_avg_sq``, and ``.master`` where the model is stored in fewer bits."""
    kinds = (*ADAM_STATE, MASTER) if masters else ADAM_STATE
    return [
        piece.renamed(lambda name, kind=kind: f"{name}.{kind}")  # type: ignore[misc]
        for kind in kinds
        for piece in trained.tensors(kind)
    ]


def restore_checkpoint(path: Path, role: str, trained: Trained, *, tensors: bool = True) -> TrainerState:
    """Restores what a trainer saved, whatever its ranks and engine (collective).

    Args:
        path: the checkpoint's folder.
        role: whose folders in it.
        trained: what is set.
        tensors: False leaves weights and moments as they are, which an engine then reads in a way of its own.

    Raises:
        ValueError: on every rank, when a part is missing or belongs to another model.
    """
    model, resume = model_folder(path, role), resume_folder(path, role)
    try:
        with raise_on_all_ranks():
            state = _read_state(model, resume)
        if tensors:
            _restore_tensors(model, resume, trained)
    except ValueError as error:
        raise ValueError(f"checkpoint {path}: {error}") from error
    trained.set_steps(state.optimizer_steps)
    with raise_on_all_ranks():
        _restore_rng(resume, trained.device)
    return state


def adapter_tensors(path: Path) -> StoredTensors:
    """What a checkpoint of a run with an adapter has beside ``OPTIMIZER``.

    Raises:
        ValueError: it is of a run without.
    """
    if not (path / ADAPTER_FILE).is_file():
        raise ValueError(f"no {ADAPTER_FILE}; expected a checkpoint of a run with lora_target")
    return StoredTensors(path)


def _restore_tensors(model: Path, resume: Path, trained: Trained) -> None:
    with raise_on_all_ranks():
        stored = StoredTensors((resume / OPTIMIZER).parent)
    if MASTER in stored.kinds:
        trained.fill(MASTER, stored.reader(MASTER))
    else:
        trained.load(model)
    for kind in ADAM_STATE:
        trained.fill(kind, stored.reader(kind))


def _read_state(model: Path, resume: Path) -> TrainerState:
    file = resume / TRAINER_FILE
    if file.is_file():
        return TrainerState(**json.loads(file.read_text()))
    if (model / TRAINER_FILE).is_file():
        raise ValueError(f"{TRAINER_FILE} in {model.name}: of an earlier version, which kept it beside the model")
    raise ValueError(f"no {TRAINER_FILE} in resume/{resume.name}; expected a folder written by save()")


def _restore_rng(path: Path, device: torch.device) -> None:
    """Gives this rank its generators' states of a checkpoint; a rank that it has none for keeps its own."""
    from safetensors.torch import load_file

    states = load_file(path / RNG_FILE)
    if f"cpu.{_rank()}" not in states:
        logger.info("checkpoint %s has no generator state for rank %d; it keeps its own", path, _rank())
        return
    torch.set_rng_state(states[f"cpu.{_rank()}"])
    if device.type == "cuda" and f"cuda.{_rank()}" in states:
        torch.cuda.set_rng_state(states[f"cuda.{_rank()}"], device)


def _hand_over(path: Path, tensors: Tensors, write_rest: Callable[[], None], writer: BackgroundWriter) -> None:
    rank, ranks = _rank(), dist.get_world_size() if dist.is_initialized() else 1
    plans = {stem: plan_files(stem, pieces, ranks, single=stem in SINGLE) for stem, pieces in tensors.items() if pieces}
    with raise_on_all_ranks():
        if rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            write_rest()
            for stem, files in plans.items():
                write_index(path, stem, files)
    for stem, files in plans.items():
        file_of = {id(piece): file for file in files for piece in file.pieces}
        for piece in tensors[stem]:
            file = file_of[id(piece)]
            whole = piece.gather(file.rank)
            if rank != file.rank:
                continue
            target = path / file.name
            if piece is file.pieces[0]:
                writer.begin(target, file.header())
            for name, outline in piece.outline.items():
                tensor = whole[name]
                assert (tensor.shape, tensor.dtype) == (outline.shape, outline.dtype), (name, tensor.shape, outline)
                writer.add(target, tensor, fresh=piece.fresh)


def _rng_states(device: torch.device) -> list[Piece]:
    """Every rank's generator states (collective)."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    several = dist.is_initialized() and dist.get_world_size() > 1
    rows = {
        f"{kind}.{rank}": row
        for kind, state in states.items()
        for rank, row in enumerate(all_gather(state) if several else [state])
    }
    return [piece_of(name, row.shape, row.dtype, lambda _, row=row: row) for name, row in rows.items()]  # type: ignore[misc]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
