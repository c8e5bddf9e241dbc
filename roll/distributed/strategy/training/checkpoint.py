"""Checkpoints of a trainer, in safetensors and JSON only (nothing in them can run code), whichever engine wrote them.

``model*.safetensors``, ``config.json`` … is a Hugging Face model folder; ``value_head.safetensors`` belongs to a
critic; ``optimizer/state*.safetensors`` holds Adam's moments, and the float32 weights when the model is stored in fewer
bits; ``trainer.json`` the counters; ``rng.safetensors`` one torch generator state per rank. Tensors are written whole
under Hugging Face names, gathered one at a time, so any number of ranks, in any layout and with any engine, can read
what others wrote.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from roll.distributed.strategy.training.agreement import raise_on_all_ranks
from roll.distributed.strategy.training.optim import ADAM_STATE, MASTER
from roll.distributed.strategy.training.tensor_files import Reader, SafetensorsWriter, StoredTensors
from roll.distributed.strategy.training.trainer import TrainerState, all_gather
from roll.models.heads import VALUE_HEAD_FILE
from roll.models.loading import copy_tokenizer
from roll.models.lora import ADAPTER_FILE

logger = logging.getLogger(__name__)

MODEL = "model"
ADAPTER = Path(ADAPTER_FILE).stem
VALUE_HEAD = Path(VALUE_HEAD_FILE).stem
OPTIMIZER = "optimizer/state"
"""What a checkpoint holds, by the stems of its files."""

TRAINER_FILE = "trainer.json"
RNG_FILE = "rng.safetensors"

MODEL_PREFIX = "model."
HEAD_PREFIX = "value_head."
"""Parameters of the language model and of a critic's head, as a trainer's whole module names them."""

Named: TypeAlias = Iterable[tuple[str, Tensor]]


class Trained(Protocol):
    """What a trainer changes, as whole tensors under the names of the Hugging Face module.

    A ``kind`` is one of Adam's moments or ``MASTER``, the float32 weights.
    """

    @property
    def device(self) -> torch.device: ...

    def tensors(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """One after the other, at least on rank 0 (collective: every rank must exhaust it)."""

    def fill(self, kind: str, read: Reader) -> None:
        """Sets all of a kind (collective)."""

    def load(self, path: Path) -> None:
        """Sets the weights to those of a model folder or an adapter's (collective)."""

    def set_steps(self, steps: int) -> None:
        """Tells Adam how many steps it has taken, for its bias correction."""


def save_checkpoint(
    path: Path,
    files: Mapping[str, Named],
    *,
    state: TrainerState,
    device: torch.device,
    write_config: Callable[[Path], None],
    tokenizer_from: str,
) -> None:
    """Writes a checkpoint into ``path`` (collective; only rank 0 writes).

    Every rank goes through all tensors, even after an error, because gathering them is collective too.

    Args:
        path: folder; made if need be.
        files: tensors by the stems of their files: ``MODEL`` under the names and in the number format of a Hugging Face
            checkpoint, or ``ADAPTER`` under those of a peft folder; ``VALUE_HEAD``; ``OPTIMIZER``, see
            ``optimizer_tensors``. Nothing is written of what has no tensors.
        state: the counters.
        device: whose generator states are kept beside the CPU's.
        write_config: writes ``config.json`` and its like into the folder; called on rank 0.
        tokenizer_from: model folder whose tokenizer files are copied.

    Raises:
        OSError: on every rank, when rank 0 cannot write (a full disk).
    """
    result = _FirstError()
    if _rank() == 0:
        result.attempt(lambda: path.mkdir(parents=True, exist_ok=True))
    for stem, tensors in {**files, Path(RNG_FILE).stem: _rng_states(device)}.items():
        _stream(result, path / stem, tensors)
    if _rank() == 0:
        result.attempt(lambda: _write_rest(path, state, write_config, tokenizer_from))
    result.agree(path)


def optimizer_tensors(trained: Trained, *, masters: bool) -> Iterator[tuple[str, Tensor]]:
    """``<parameter>.exp_avg``, ``.exp_avg_sq``, and ``.master`` where the model is stored in fewer bits."""
    for kind in (*ADAM_STATE, MASTER) if masters else ADAM_STATE:
        for name, tensor in trained.tensors(kind):
            yield f"{name}.{kind}", tensor


def restore_checkpoint(path: Path, trained: Trained, *, tensors: bool = True) -> TrainerState:
    """Restores what a trainer saved, whatever its ranks and engine (collective).

    Args:
        path: the checkpoint's folder.
        trained: what is set.
        tensors: False leaves weights and moments as they are, which an engine then reads in a way of its own.

    Raises:
        ValueError: on every rank, when a part is missing or belongs to another model.
    """
    try:
        with raise_on_all_ranks():
            state = _read_state(path)
        if tensors:
            _restore_tensors(path, trained)
    except ValueError as error:
        raise ValueError(f"checkpoint {path}: {error}") from error
    trained.set_steps(state.optimizer_steps)
    with raise_on_all_ranks():
        _restore_rng(path, trained.device)
    return state


def adapter_tensors(path: Path) -> StoredTensors:
    """What a checkpoint of a run with an adapter has beside ``OPTIMIZER``.

    Raises:
        ValueError: it is of a run without.
    """
    if not (path / ADAPTER_FILE).is_file():
        raise ValueError(f"no {ADAPTER_FILE}; expected a checkpoint of a run with lora_target")
    return StoredTensors(path)


def _restore_tensors(path: Path, trained: Trained) -> None:
    with raise_on_all_ranks():
        stored = StoredTensors((path / OPTIMIZER).parent)
    if MASTER in stored.kinds:
        trained.fill(MASTER, stored.reader(MASTER))
    else:
        trained.load(path)
    for kind in ADAM_STATE:
        trained.fill(kind, stored.reader(kind))


def _read_state(path: Path) -> TrainerState:
    file = path / TRAINER_FILE
    if not file.is_file():
        raise ValueError(f"no {TRAINER_FILE}; expected a folder written by save()")
    return TrainerState(**json.loads(file.read_text()))


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


class _FirstError:
    """Keeps rank 0's first I/O error until all ranks are through with their collectives."""

    def __init__(self) -> None:
        self.error: OSError | None = None

    def attempt(self, action: Callable[[], None]) -> None:
        if self.error is None:
            try:
                action()
            except OSError as error:
                self.error = error

    def agree(self, path: Path) -> None:
        """Raises on every rank if rank 0 failed (collective)."""
        with raise_on_all_ranks():
            if self.error is not None:
                raise OSError(f"checkpoint {path}: {self.error}") from self.error


def _stream(result: _FirstError, path: Path, tensors: Named) -> None:
    """Writes tensors on rank 0. Goes through all of them even after an error: the other ranks take part in each."""
    if _rank() != 0:
        for _ in tensors:
            pass
        return
    writer: list[SafetensorsWriter] = []
    result.attempt(lambda: writer.append(SafetensorsWriter(path.parent, path.name)))
    for name, tensor in tensors:
        result.attempt(lambda name=name, tensor=tensor: writer[0].add(name, tensor))  # type: ignore[misc]
    result.attempt(lambda: writer[0].finish())


def _rng_states(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    for kind, state in states.items():
        several = dist.is_initialized() and dist.get_world_size() > 1
        for rank, row in enumerate(all_gather(state) if several else [state]):
            yield f"{kind}.{rank}", row


def _write_rest(path: Path, state: TrainerState, write_config: Callable[[Path], None], tokenizer_from: str) -> None:
    write_config(path)
    copy_tokenizer(Path(tokenizer_from), path)
    (path / TRAINER_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
