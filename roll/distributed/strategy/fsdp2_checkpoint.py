"""Checkpoints of a trainer, in safetensors and JSON only (nothing in them can run code).

``model*.safetensors``, ``config.json`` … is a Hugging Face model folder; ``value_head.safetensors`` belongs to a
critic; ``optimizer/state*.safetensors`` holds Adam's moments, and the float32 weights when the model is stored in fewer
bits; ``trainer.json`` the counters; ``rng.safetensors`` one torch generator state per rank. Tensors are written whole
under Hugging Face names, gathered one at a time, so any number of ranks can read what any number wrote.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from roll.distributed.strategy.fsdp2_weights import Weights, whole_parameters
from roll.distributed.strategy.optim import ADAM_STATE
from roll.models.heads import VALUE_HEAD_FILE, load_value_head
from roll.models.loading import Head, copy_tokenizer, load_causal_lm, load_trunk, save_config, to_hf_weights

logger = logging.getLogger(__name__)

OPTIMIZER_FOLDER = "optimizer"
TRAINER_FILE = "trainer.json"
RNG_FILE = "rng.safetensors"
MASTER = "master"
MODEL_PREFIX = "model."
HEAD_PREFIX = "value_head."
MAX_FILE_BYTES = 4 * 2**30


@dataclass
class TrainerState:
    """What a trainer counts."""

    optimizer_steps: int = 0
    """Optimizer steps taken: the position in the learning-rate schedule."""
    total_optimizer_steps: int = 1
    """Horizon of the schedule."""


class SafetensorsWriter:
    """Streams tensors into ``stem.safetensors``, or several numbered files with an index when they are large."""

    def __init__(self, folder: Path, stem: str, max_bytes: int = MAX_FILE_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"{stem}*.safetensors*"):
            stale.unlink()
        self._folder, self._stem, self._max_bytes = folder, stem, max_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a copy of ``tensor``; writes a file whenever enough has gathered."""
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self._flush()
        self._pending[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        self._pending_bytes += tensor.nbytes

    def finish(self) -> None:
        """Writes the rest and gives the files their final names."""
        self._flush()
        count = len(self._files)
        index: dict[str, str] = {}
        for number, names in enumerate(self._files, start=1):
            suffix = "" if count == 1 else f"-{number:05d}-of-{count:05d}"
            file = f"{self._stem}{suffix}.safetensors"
            self._part(number).rename(self._folder / file)
            index |= dict.fromkeys(names, file)
        if count > 1:
            content = {"metadata": {"total_size": self._total_bytes}, "weight_map": index}
            (self._folder / f"{self._stem}.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")

    def _flush(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not self._pending:
            return
        self._files.append(list(self._pending))
        try:
            save_file(self._pending, self._part(len(self._files)), metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{self._folder}: cannot write {self._stem} ({error})") from error
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"{self._stem}-part{number:05d}.safetensors"


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
        failed = torch.tensor([float(self.error is not None)])
        if dist.is_initialized() and dist.get_world_size() > 1:
            failed = all_gather(failed).flatten()
        if self.error is not None:
            raise OSError(f"checkpoint {path}: {self.error}") from self.error
        if failed.any():
            raise OSError(f"checkpoint {path}: rank 0 could not write it")


def save_checkpoint(
    path: Path,
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    state: TrainerState,
    *,
    dtype: torch.dtype,
    tokenizer_from: str,
) -> None:
    """Writes a checkpoint into ``path`` (collective; only rank 0 writes).

    Args:
        path: folder; made if need be.
        weights: the parameters.
        optimizer: over ``weights.local``.
        state: the counters.
        dtype: number format of the Hugging Face weights.
        tokenizer_from: model folder whose tokenizer files are copied.

    Raises:
        OSError: on every rank, when rank 0 cannot write (a full disk).
    """
    result = _FirstError()
    if _rank() == 0:
        result.attempt(lambda: path.mkdir(parents=True, exist_ok=True))
    _stream(result, path, "model", hf_weights(weights, dtype))
    if weights.scorer.value_head is not None:
        _stream(result, path, VALUE_HEAD_FILE.removesuffix(".safetensors"), _head_weights(weights))
    _stream(result, path / OPTIMIZER_FOLDER, "state", _optimizer_tensors(weights, optimizer, dtype))
    _stream(result, path, RNG_FILE.removesuffix(".safetensors"), _rng_states(weights.device))
    if _rank() == 0:
        result.attempt(lambda: _write_rest(path, weights, state, dtype, tokenizer_from))
    result.agree(path)


def load_checkpoint(path: Path, weights: Weights, optimizer: torch.optim.Optimizer) -> TrainerState:
    """Restores what ``save_checkpoint`` wrote, whatever the number of ranks then (collective).

    Raises:
        ValueError: a part is missing or belongs to another model.
    """
    file = path / TRAINER_FILE
    if not file.is_file():
        raise ValueError(f"checkpoint {path}: no {TRAINER_FILE}; expected a folder written by save()")
    state = TrainerState(**json.loads(file.read_text()))
    stored = _StoredTensors(path / OPTIMIZER_FOLDER)
    head: Head = "lm" if weights.scorer.value_head is None else "value"
    if MASTER in stored.kinds:
        fill_weights(weights, lambda name: stored.get(f"{_hf_name(name)}.{MASTER}"))
    else:
        load_weights(path, weights, head)
    for name, share in weights.local.items():
        for kind in ADAM_STATE:
            moment = weights.broadcast(name, stored.get(f"{_hf_name(name)}.{kind}") if _rank() == 0 else None)
            optimizer.state[share][kind].copy_(moment)
        optimizer.state[share]["step"].fill_(state.optimizer_steps)
    _restore_rng(path / RNG_FILE, weights.device)
    return state


def load_weights(path: Path, weights: Weights, head: Head, config_kwargs: Mapping[str, Any] | None = None) -> None:
    """Fills the parameters from a model folder that rank 0 reads (collective)."""
    whole: dict[str, Tensor] = {}
    if _rank() == 0:
        model = (load_causal_lm if head == "lm" else load_trunk)(
            str(path), dtype=torch.float32, config_kwargs=config_kwargs
        )
        whole = {MODEL_PREFIX + name: parameter.detach() for name, parameter in model.named_parameters()}
        if head == "value":
            value_head = load_value_head(model.config.get_text_config().hidden_size, path)
            whole |= {HEAD_PREFIX + name: parameter.detach() for name, parameter in value_head.named_parameters()}
    fill_weights(weights, whole.__getitem__)


def fill_weights(weights: Weights, read: Callable[[str], Tensor]) -> None:
    """Sets all parameters from whole tensors that rank 0 reads by name (collective)."""
    for name in weights.local:
        weights.fill(name, read(name) if _rank() == 0 else None)


def hf_weights(weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The language model's weights under Hugging Face names, tied ones once (collective)."""
    for name, whole in whole_parameters(weights):
        if name.startswith(MODEL_PREFIX):
            yield from to_hf_weights(weights.scorer.model, name.removeprefix(MODEL_PREFIX), whole.to(dtype)).items()


def all_gather(row: Tensor) -> Tensor:
    """Every rank's ``row``, stacked in order of rank (collective)."""
    rows = row.new_zeros((dist.get_world_size(), len(row)))
    rows[dist.get_rank()] = row
    dist.all_reduce(rows)
    return rows


class _StoredTensors:
    """Tensors by name from all safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._folder = folder
        self._files: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened = safe_open(file, framework="pt")
            self._files |= dict.fromkeys(opened.keys(), opened)
        self.kinds = {name.rpartition(".")[2] for name in self._files}
        if not self._files:
            raise ValueError(f"checkpoint {folder}: no safetensors in it; expected the optimizer's state")

    def get(self, name: str) -> Tensor:
        if name not in self._files:
            raise ValueError(f"checkpoint {self._folder}: no tensor {name!r}; it belongs to another model")
        return cast(Tensor, self._files[name].get_tensor(name))


def _stream(result: _FirstError, folder: Path, stem: str, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Writes tensors on rank 0. Goes through all of them even after an error: the other ranks take part in each."""
    if _rank() != 0:
        for _ in tensors:
            pass
        return
    writer: list[SafetensorsWriter] = []
    result.attempt(lambda: writer.append(SafetensorsWriter(folder, stem)))
    for name, tensor in tensors:
        result.attempt(lambda name=name, tensor=tensor: writer[0].add(name, tensor))  # type: ignore[misc]
    result.attempt(lambda: writer[0].finish())


def _head_weights(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    for name, whole in whole_parameters(weights):
        if name.startswith(HEAD_PREFIX):
            yield name.removeprefix(HEAD_PREFIX), whole


def _optimizer_tensors(
    weights: Weights, optimizer: torch.optim.Optimizer, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name, share in weights.local.items():
        for kind in ADAM_STATE:
            yield f"{_hf_name(name)}.{kind}", weights.whole(name, optimizer.state[share][kind])
        if dtype != torch.float32:
            yield f"{_hf_name(name)}.{MASTER}", weights.whole(name, share)


def _rng_states(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    for kind, state in states.items():
        several = dist.is_initialized() and dist.get_world_size() > 1
        for rank, row in enumerate(all_gather(state) if several else [state]):
            yield f"{kind}.{rank}", row


def _restore_rng(file: Path, device: torch.device) -> None:
    from safetensors.torch import load_file

    states = load_file(file)
    if f"cpu.{_rank()}" not in states:
        logger.info("checkpoint %s has no generator state for rank %d; it keeps its own", file.parent, _rank())
        return
    torch.set_rng_state(states[f"cpu.{_rank()}"])
    if device.type == "cuda" and f"cuda.{_rank()}" in states:
        torch.cuda.set_rng_state(states[f"cuda.{_rank()}"], device)


def _write_rest(path: Path, weights: Weights, state: TrainerState, dtype: torch.dtype, tokenizer_from: str) -> None:
    save_config(weights.scorer.model, path, dtype)
    copy_tokenizer(Path(tokenizer_from), path)
    (path / TRAINER_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n")


def _hf_name(name: str) -> str:
    return name.removeprefix(MODEL_PREFIX)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
