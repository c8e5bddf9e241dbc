"""Tensors in safetensors files: read by name, and written by all ranks in parallel.

What is written is hashed on its way and never read back. Tensors are cut into files beforehand, which their shapes
allow: so every rank knows which are its to write, and a file's header is written first.
"""

from __future__ import annotations

import json
import math
import os
import queue
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import torch
from torch import Tensor

from roll.distributed.strategy.training.exchange import Slice, TensorForm, WeightShard, weight_shard
from roll.models.stored import StoredTensor
from roll.utils.hashing import Checksum, WrittenFile
from roll.utils.progress import advance

MAX_FILE_BYTES = 4 * 2**30
MIN_SHARE_BYTES = 32 * 2**20
"""Less is not worth a file of a further rank."""
SYNC_BYTES = 64 * 2**20
"""Written before they are sent on to the disk."""
CHUNK_BYTES = 512 * 2**10
"""Hashed, then written while they are in the processor's cache: so memory is read once."""
MAX_WAITING_BYTES = 256 * 2**20
"""Amount that may lie in memory, gathered but not yet written."""

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As the safetensors format calls them."""

Reader: TypeAlias = Callable[[str], StoredTensor]
"""A tensor by name, to be read."""

_PART = re.compile(r"(?P<name>.+)@(?P<start>\d+) of (?P<shape>[\d,]+)")
"""Name of the elements of a tensor from one on, by the tensor's name and shape."""


@dataclass
class PlannedFile:
    """A file and the rank that writes it."""

    name: str
    rank: int
    pieces: list[WeightShard]

    @property
    def outline(self) -> dict[str, TensorForm]:
        return {name: form for piece in self.pieces for name, form in piece.outline.items()}

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def header(self) -> bytes:
        """The file up to its first tensor: eight bytes that count the others, and JSON, padded to a multiple of 8."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, form in self.outline.items():
            start, end = end, end + form.nbytes
            kind = DTYPE_NAMES[form.dtype]
            entries[name] = {"dtype": kind, "shape": list(form.shape), "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def cut_at_ranks(pieces: Sequence[WeightShard], ranks: int) -> Sequence[WeightShard]:
    """The same tensors, in parts where ranks have blocks of rows, so that they need not be gathered to be written.

    ``StoredTensors`` joins the parts. What is too little for all ranks to write stays as it is.
    """
    if _num_writers(pieces, ranks) < ranks:
        return pieces
    return [part for piece in pieces for part in _parts(piece)]


def _parts(piece: WeightShard) -> list[WeightShard]:
    if piece.plain is None or len(piece.spreads[0].regions) < 2:
        return [piece]
    (spread,), ((name, form),) = piece.spreads, piece.plain.items()
    if any(region.sizes[1:] != spread.shape[1:] for region in spread.regions):
        return [piece]
    row, shape = math.prod(spread.shape[1:]), ",".join(map(str, form.shape))
    return [
        weight_shard(
            f"{name}@{region.offsets[0] * row} of {shape}",
            replace(spread, shape=region.sizes, regions=[Slice((0,) * len(region.sizes), region.sizes, region.ranks)]),
        )
        for region in spread.regions
    ]


def plan_files(
    stem: str, pieces: Sequence[WeightShard], ranks: int, *, single: bool = False, max_bytes: int = MAX_FILE_BYTES
) -> list[PlannedFile]:
    """Spreads pieces over the ranks by bytes, and each rank's over files; the same on all ranks.

    What few ranks have is written by one of these, if all ranks write.

    Args:
        ranks: how many may write; a rank is left out that would have less than ``MIN_SHARE_BYTES``.
        single: all in one file, whatever its size.
        max_bytes: of a file, unless one piece alone has more.

    Returns:
        ``stem.safetensors``, or several numbered files; each has its pieces in the order in which they were given.
    """
    writers = 1 if single else _num_writers(pieces, ranks)
    max_bytes = sum(piece.num_bytes for piece in pieces) if single else max_bytes
    files: list[PlannedFile] = []
    of_rank: list[PlannedFile | None] = [None] * writers
    loads, room = [0] * writers, [0] * writers
    for piece in pieces:
        candidates = piece.holders if writers == ranks and piece.holders else range(writers)
        rank, num_bytes = min(candidates, key=loads.__getitem__), piece.num_bytes
        loads[rank] += num_bytes
        file = of_rank[rank]
        if file is None or num_bytes > room[rank]:
            file, room[rank] = PlannedFile("", rank, []), max_bytes
            of_rank[rank] = file
            files.append(file)
        file.pieces.append(piece)
        room[rank] -= num_bytes
    for number, file in enumerate(files, start=1):
        suffix = "" if len(files) == 1 else f"-{number:05d}-of-{len(files):05d}"
        file.name = f"{stem}{suffix}.safetensors"
    return files


def _num_writers(pieces: Sequence[WeightShard], ranks: int) -> int:
    return max(1, min(ranks, sum(piece.num_bytes for piece in pieces) // MIN_SHARE_BYTES))


def write_index(folder: Path, stem: str, files: Sequence[PlannedFile]) -> None:
    """Writes ``stem.safetensors.index.json`` where there are several files."""
    if len(files) > 1:
        weight_map = {name: Path(file.name).name for file in files for name in file.outline}
        content = {"metadata": {"total_size": sum(file.num_bytes for file in files)}, "weight_map": weight_map}
        index = folder / f"{stem}.safetensors.index.json"
        index.parent.mkdir(parents=True, exist_ok=True)
        index.write_text(json.dumps(content, indent=2) + "\n")


class BackgroundWriter:
    """Writes this rank's files in a separate thread, while the caller gathers the next tensors.

    Args:
        max_waiting: bytes that may wait to be written; ``add`` then blocks.
    """

    def __init__(self, max_waiting: int = MAX_WAITING_BYTES) -> None:
        self._max_waiting = max_waiting
        self._queue: queue.SimpleQueue[tuple[Path, bytes | Tensor] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._changed = threading.Condition()
        self._result: Future[list[WrittenFile]] = Future()
        self._failed = False
        threading.Thread(target=self._run, name="checkpoint-writer", daemon=True).start()

    def begin(self, path: Path, header: bytes) -> None:
        """Starts a file; what is added to ``path`` follows its header."""
        self._queue.put((path, header))

    def add(self, path: Path, tensor: Tensor) -> None:
        """Hands a tensor over, to be written after those before it; it must not change until then."""
        tensor = tensor.detach().cpu().contiguous()
        limit = max(0, self._max_waiting - tensor.nbytes)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting <= limit or self._failed)
            if self._failed:
                return
            self._waiting += tensor.nbytes
        self._queue.put((path, tensor))

    def close(self) -> Future[list[WrittenFile]]:
        """Says that nothing follows; the result comes once all is on disk, or the first error."""
        self._queue.put(None)
        return self._result

    def _run(self) -> None:
        written: list[WrittenFile] = []
        try:
            with ThreadPoolExecutor(1) as syncer:
                file: _HashedFile | None = None
                while (item := self._queue.get()) is not None:
                    path, content = item
                    if file is None or file.path != path:
                        written += [] if file is None else [file.close()]
                        file = _HashedFile(path, syncer)
                    num_bytes = file.write(content)
                    del content, item
                    with self._changed:
                        self._waiting -= num_bytes
                        self._changed.notify_all()
                written += [] if file is None else [file.close()]
        except BaseException as error:  # raised where the result is waited for
            with self._changed:
                self._failed = True
                self._changed.notify_all()
            while self._queue.get() is not None:  # frees what nobody will write
                pass
            self._result.set_exception(error)
        else:
            self._result.set_result(written)


class _HashedFile:
    """A file whose checksum is computed while writing it, and which is on its way to the disk all the while.

    The system would keep gigabytes in memory until the end, and the disk would rest while tensors are gathered.
    """

    def __init__(self, path: Path, syncer: ThreadPoolExecutor) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._syncer = syncer
        self._unsynced = 0
        self._syncing: Future[None] | None = None
        self._checksum = Checksum()
        self._size = 0
        self._file: BinaryIO = path.open("wb", buffering=0)

    def write(self, content: bytes | Tensor) -> int:
        """Appends bytes; returns how many of a tensor's."""
        is_tensor = isinstance(content, Tensor)
        view = memoryview(content.view(-1).view(torch.uint8).numpy() if is_tensor else content)  # type: ignore[union-attr,arg-type]
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            self._checksum.update(chunk)
            advance()
            while len(chunk):
                chunk = chunk[self._file.write(chunk) :]
        self._size += len(view)
        self._unsynced += len(view)
        if self._unsynced >= SYNC_BYTES and (self._syncing is None or self._syncing.done()):
            self._syncing, self._unsynced = self._syncer.submit(os.fsync, self._file.fileno()), 0
        return len(view) if is_tensor else 0

    def close(self) -> WrittenFile:
        with self._file:
            if self._syncing is not None:
                self._syncing.result()
            os.fsync(self._file.fileno())
        return WrittenFile(str(self.path), self._size, self._checksum.hexdigest())


class StoredTensors:
    """A checkpoint's tensors by name, from the safetensors files of a folder.

    ``kinds``: the last parts of the names, such as ``exp_avg``.
    """

    def __init__(self, folder: Path, files: Sequence[Path] | None = None) -> None:
        """Opens the files.

        Raises:
            ValueError: there are none, or one is damaged.
        """
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        self._files: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")) if files is None else files:
            try:
                opened = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{file.name}: {error}; expected a whole safetensors file") from error
            self._files |= dict.fromkeys(opened.keys(), opened)
        self._parts: dict[str, list[re.Match[str]]] = {}
        for part in filter(None, map(_PART.fullmatch, self._files)):
            self._parts.setdefault(part["name"], []).append(part)
        self.kinds = {_PART.sub(r"\g<name>", name).rpartition(".")[2] for name in self._files}
        if not self._files:
            raise ValueError(f"no safetensors in {folder.name}; expected a trainer's")

    @property
    def forms(self) -> dict[str, TensorForm]:
        """Shape and number format of each tensor."""
        formats = {written: dtype for dtype, written in DTYPE_NAMES.items()}
        forms: dict[str, TensorForm] = {}
        for name, file in self._files.items():
            part = _PART.fullmatch(name)
            found, dtype = file.get_slice(name), formats.get(kind := file.get_slice(name).get_dtype())
            if dtype is None:
                raise ValueError(f"{name}: number format {kind}, expected one of {', '.join(formats)}")
            shape = map(int, part["shape"].split(",")) if part else found.get_shape()
            forms[part["name"] if part else name] = TensorForm(tuple(shape), dtype)
        return forms

    def get(self, name: str) -> Tensor:
        """Reads one tensor, as ``stored``."""
        return self.stored(name).whole()

    def stored(self, name: str) -> StoredTensor:
        """One tensor, to be read.

        Raises:
            ValueError: there is none of that name, or not all of it.
        """
        if name in self._files:
            shape = tuple(self._files[name].get_slice(name).get_shape())
            return StoredTensor(shape, [(math.prod(shape), partial(self._mapped, name))])
        if name not in self._parts:
            raise ValueError(f"no tensor {name!r} in {self._folder.name}; it belongs to another model")
        parts = sorted(self._parts[name], key=lambda part: int(part["start"]))
        sizes = [math.prod(self._files[part[0]].get_slice(part[0]).get_shape()) for part in parts]
        shape = tuple(int(size) for size in parts[0]["shape"].split(","))
        if (count := sum(sizes)) != math.prod(shape):
            raise ValueError(f"{name}: {count} elements in {self._folder.name}, expected {math.prod(shape)}")
        return StoredTensor(shape, [(n, partial(self._mapped, part[0])) for n, part in zip(sizes, parts, strict=True)])

    def _mapped(self, name: str) -> Tensor:
        return cast(Tensor, self._files[name].get_tensor(name))

    def reader(self, kind: str) -> Reader:
        """Reads what is stored of a parameter by the parameter's name."""
        return lambda name: self.stored(f"{name}.{kind}")
