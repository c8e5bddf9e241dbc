"""Checkpoints of a trainer, in safetensors and JSON only (nothing in them can run code), whichever engine wrote them.

A role has two folders in a checkpoint. ``<role>/`` is a model and nothing else, which other programs open:
``config.json``, tokenizer files, ``model*.safetensors`` and a critic's ``value_head.safetensors``, or with LoRA what
peft calls an adapter. ``resume/<role>/`` is what else a resumed run needs: ``optimizer/state*.safetensors`` with Adam's
moments, and the float32 weights when the model is stored in fewer bits; ``trainer.json`` with the counters;
``rng.safetensors`` with one torch generator state per rank. Tensors have Hugging Face names, so any number of ranks, in
any layout and with any engine, can read what others wrote. They are gathered one at a time, each where it is written:
every rank writes a share of the files. Where ranks have blocks of rows of the optimizer's tensors, each writes its own
as they are. In the background the same is done with copies of what the ranks had, over a process group of its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from roll.configs.pipeline import PARTS
from roll.distributed.strategy.training.agreement import raise_on_all_ranks
from roll.distributed.strategy.training.optim import MASTER
from roll.distributed.strategy.training.pieces import (
    Piece,
    Region,
    TensorForm,
    own_rank,
)
from roll.distributed.strategy.training.tensor_files import (
    Reader,
    StoredTensors,
)
from roll.models.adapter_files import ADAPTER_FILE
from roll.models.heads import VALUE_HEAD_FILE

SHARDS_FOLDER = "shards"
"""Folder of a checkpoint's shards, with the configuration and the tokenizer of their model beside them."""


class StoredShards:
    """Whole tensors by name from the shards that ranks have written (PyTorch's distributed checkpoint, safetensors).

    ``forms``: shape and number format of each.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the headers of the files.

        Raises:
            ValueError: there are none, or one is damaged.
        """
        from safetensors import SafetensorError
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        try:
            found: Any = HuggingFaceStorageReader(str(folder)).read_metadata()
        except SafetensorError as error:
            raise ValueError(f"{folder}: {error}; expected whole safetensors files") from error
        if not found.storage_data:
            raise ValueError(f"no safetensors in {folder}; expected the shards of a trainer")
        self._folder = folder
        self._parts: dict[str, list[tuple[torch.Size, torch.Size, str]]] = {}
        for index, part in found.storage_data.items():
            self._parts.setdefault(index.fqn, []).append((index.offset, part.shape, part.relative_path))
        self.forms = {
            name: TensorForm(tuple(entry.size), entry.properties.dtype)
            for name, entry in found.state_dict_metadata.items()
        }

    def get(self, name: str) -> Tensor:
        """Joins one tensor.

        Raises:
            ValueError: a part of it is missing.
        """
        from safetensors import safe_open

        form, parts = self.forms[name], self._parts[name]
        if (seen := sum(shape.numel() for _, shape, _ in parts)) != torch.Size(form.shape).numel():
            raise ValueError(f"{name}: {seen} elements in {self._folder}, expected a tensor of shape {form.shape}")
        whole = torch.empty(form.shape, dtype=form.dtype)
        for offsets, sizes, path in parts:
            with safe_open(path, framework="pt") as file:
                Region(tuple(offsets), tuple(sizes), ()).cut(whole).copy_(file.get_tensor(name))
        return whole


logger = logging.getLogger(__name__)

MODEL = "model"
ADAPTER = Path(ADAPTER_FILE).stem
VALUE_HEAD = Path(VALUE_HEAD_FILE).stem
OPTIMIZER = "optimizer/state"
"""Stems of a checkpoint's files; the last is in ``resume_folder``, the others are in ``model_folder``."""

UNTRAINED = "untrained/tensors"
"""Stem of what a model folder has beside parameters, in the folder of a sharded checkpoint's shards."""

TRAINER_FILE = "trainer.json"
RNG_FILE = "rng.safetensors"
SINGLE = (ADAPTER, VALUE_HEAD, Path(RNG_FILE).stem)
"""Stems of what readers expect in one file."""

MODEL_PREFIX = "model."
HEAD_PREFIX = "value_head."
"""Parameters of the language model and of a critic's head, as a trainer's whole module names them."""


@dataclass
class TrainerState:
    """Counters of a trainer."""

    optimizer_steps: int = 0
    """Optimizer steps taken: the position in the learning-rate schedule."""
    total_optimizer_steps: int = 1
    """Horizon of the schedule."""


def model_folder(checkpoint: Path, role: str) -> Path:
    """Folder in which a checkpoint has a role's model, alone."""
    return checkpoint / role


def resume_folder(checkpoint: Path, role: str) -> Path:
    """Folder in which it has what else resumes the role."""
    return checkpoint / "resume" / role


class Trained(Protocol):
    """Weights and moments that a trainer changes, under the names of the Hugging Face module.

    A ``kind`` is one of the optimizer's moments or ``MASTER``, the float32 weights.
    """

    @property
    def device(self) -> torch.device: ...
    @property
    def kinds(self) -> Sequence[str]:
        """Of the optimizer's state."""

    def tensors(self, kind: str) -> Sequence[Piece]:
        """All of a kind, in float32; a parameter may have none of it."""

    def fill(self, kind: str, read: Reader) -> None:
        """Sets all of a kind (collective)."""

    def load(self, path: Path) -> None:
        """Sets the weights to those of a model folder or an adapter's (collective)."""

    def set_steps(self, steps: int) -> None:
        """Tells Adam how many steps it has taken, for its bias correction."""


def restore_checkpoint(
    path: Path, role: str, trained: Trained, parts: Collection[str] = PARTS, *, tensors: bool = True
) -> TrainerState:
    """Restores what a trainer saved, whatever its ranks and engine (collective).

    Args:
        parts: of the checkpoint that are taken; moments that are not stay as they are, in their first step.
        tensors: False leaves weights and moments as they are, which an engine then reads in a way of its own.

    Raises:
        ValueError: on every rank, when a part is missing or belongs to another model.
    """
    model, resume = model_folder(path, role), resume_folder(path, role)
    try:
        with raise_on_all_ranks():
            state = _read_state(model, resume)
            if tensors and not model.is_dir() and (resume / SHARDS_FOLDER).is_dir():
                words = "the strategy that wrote them, or in pretrain the folder that `roll export` makes of it"
                raise ValueError(f"it holds shards of {role}; expected {words}")
            files = {"rng": resume / RNG_FILE} | ({"optimizer": (resume / OPTIMIZER).parent} if tensors else {})
            if absent := [part for part, file in files.items() if part in parts and not file.exists()]:
                rest = ", ".join(part for part in PARTS if part in parts and part not in absent)
                words = f"it was saved without {' and '.join(absent)}"
                raise ValueError(f"{words}; expected checkpoint_config.load_contents: [{rest}]")
        if tensors:
            _restore_tensors(model, resume, trained, optimizer="optimizer" in parts)
    except ValueError as error:
        raise ValueError(f"checkpoint {path}: {error}") from error
    trained.set_steps(state.optimizer_steps if "optimizer" in parts else 0)
    if "rng" in parts:
        with raise_on_all_ranks():
            _restore_rng(resume, trained.device)
    return state


def adapter_tensors(path: Path, names: Collection[str]) -> StoredTensors:
    """Opens what a checkpoint of a run with an adapter has beside ``OPTIMIZER``.

    Args:
        names: of all tensors that are trained.

    Raises:
        ValueError: it is of a run without, or has more than these.
    """
    if not (path / ADAPTER_FILE).is_file():
        raise ValueError(f"no {ADAPTER_FILE}; expected a checkpoint of a run with lora_target")
    stored = StoredTensors(path, [path / ADAPTER_FILE])
    if others := sorted(stored.forms.keys() - set(names)):
        raise ValueError(f"{ADAPTER_FILE}: got {others[0]}, expected no other layers than lora_target means")
    return stored


def _restore_tensors(model: Path, resume: Path, trained: Trained, *, optimizer: bool) -> None:
    if not optimizer:
        trained.load(model)
        return
    with raise_on_all_ranks():
        stored = StoredTensors((resume / OPTIMIZER).parent)
        masters = {name for name in stored.forms if name.endswith(f".{MASTER}")}
        if stored.kinds - {MASTER} != set(trained.kinds):
            found, expected = (", ".join(sorted(set(kinds) - {MASTER})) for kinds in (stored.kinds, trained.kinds))
            words = f"its optimizer has {found}; expected {expected}, those of training_args.optimizer here"
            raise ValueError(f"{words}; checkpoint_config.load_contents without optimizer restarts it")
    own = {f"{name}.{MASTER}" for piece in trained.tensors(MASTER) for name in piece.outline}
    if not masters or masters - own:  # what was trained and is frozen now is in the model's folder
        trained.load(model)
    if masters:
        trained.fill(MASTER, stored.reader(MASTER))
    for kind in trained.kinds:
        trained.fill(kind, stored.reader(kind))


def _read_state(model: Path, resume: Path) -> TrainerState:
    file = resume / TRAINER_FILE
    if file.is_file():
        return TrainerState(**json.loads(file.read_text()))
    if (model / TRAINER_FILE).is_file():
        raise ValueError(f"{TRAINER_FILE} in {model.name}: of an earlier version, which stored it next to the model")
    raise ValueError(f"no {TRAINER_FILE} in resume/{resume.name}; expected a folder written by save()")


def _restore_rng(path: Path, device: torch.device) -> None:
    """Gives this rank its generators' states of a checkpoint; a rank that it has none for keeps its own."""
    from safetensors.torch import load_file

    states = load_file(path / RNG_FILE)
    if f"cpu.{own_rank()}" not in states:
        logger.info("checkpoint %s has no generator state for rank %d; it keeps its own", path, own_rank())
        return
    torch.set_rng_state(states[f"cpu.{own_rank()}"])
    if device.type == "cuda" and f"cuda.{own_rank()}" in states:
        torch.cuda.set_rng_state(states[f"cuda.{own_rank()}"], device)
