"""Memory that a sender and its receivers share: of the host, reused from bucket to bucket, or of a GPU.

Fresh pages cost several times as much as the copy into them, so a segment goes back to its pool when no reader needs
it any more: at once with an engine that copies what it loads, at the next update with one whose model it became. On
Linux a segment has no name in any file system: it is gone when its last process is, however that ends.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

_numbers = itertools.count()


@dataclass(frozen=True)
class SharedMemory:
    """Bytes at the start of a segment, as described to the processes that read them."""

    segment: str
    path: str


class Segment:
    """Some shared memory, seen from the process that writes it."""

    def __init__(self, capacity: int) -> None:
        self.id = f"{os.getpid()}-{next(_numbers)}"
        self._fd, self.path = _create(capacity)
        self.array = np.frombuffer(mmap.mmap(self._fd, capacity), dtype=np.uint8)
        """uint8 [capacity]. Pages that were never written take no memory."""
        self.used = 0
        """Bytes at its start that were ever written."""
        self.readers: set[str] = set()
        """Readers that hold what was written last."""
        self._close = weakref.finalize(self, _remove, self._fd, self.path)

    @property
    def place(self) -> SharedMemory:
        return SharedMemory(self.id, self.path)

    def close(self) -> None:
        """Gives the memory up; readers keep theirs."""
        self._close()


class SegmentPool:
    """The segments of one sender."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}  # by address

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(segment.id for segment in self._segments.values())

    def allocate(self, num_bytes: int, at_least: int = 0) -> np.ndarray:
        """uint8 [num_bytes] in a segment that nobody reads; a new one has room for ``at_least`` bytes."""
        free = (s for s in self._segments.values() if not s.readers and len(s.array) >= num_bytes)
        segment = min(free, key=lambda s: len(s.array), default=None)
        if segment is None:
            segment = Segment(max(num_bytes, at_least, mmap.PAGESIZE))
            self._segments[_address(segment.array)] = segment
        segment.readers = {_WRITER}
        segment.used = max(segment.used, num_bytes)
        return segment.array[:num_bytes]

    def find(self, data: object) -> Segment | None:
        """The segment that an array of ``allocate`` lies in."""
        return self._segments.get(_address(data)) if isinstance(data, np.ndarray) else None

    def hand_over(self, segment: Segment, readers: Iterable[str]) -> None:
        """Written: it belongs to the readers, and to those that it has already, until each has released it."""
        segment.readers = segment.readers - {_WRITER} | set(readers)

    def release(self, ids: Iterable[str], reader: str) -> None:
        by_id = {segment.id: segment for segment in self._segments.values()}
        for name in ids:
            if name in by_id:
                by_id[name].readers.discard(reader)

    def abandon_unwritten(self) -> None:
        """Takes back what was allocated for an update that ended before it was handed over."""
        for segment in self._segments.values():
            segment.readers.discard(_WRITER)

    def reclaim(self, holding: Mapping[str, Collection[str]]) -> None:
        """Takes back what readers never released: an update failed, or one died and was replaced.

        Args:
            holding: what each reader, by name, does still read. Those of other readers stay as they are.
        """
        for segment in self._segments.values():
            segment.readers -= {reader for reader, ids in holding.items() if segment.id not in ids}

    def trim(self, num_segments: int = 4, num_bytes: int = 1 << 30) -> None:
        """Gives up free segments beyond that number and beyond that many bytes; by default few stay, or little."""
        kept = total = 0

        def fits(segment: Segment) -> bool:
            nonlocal kept, total
            if not segment.readers:
                kept, total = kept + 1, total + segment.used
            return bool(segment.readers) or kept <= num_segments or total <= num_bytes

        self._keep(fits)

    def _keep(self, wanted: Callable[[Segment], bool]) -> None:
        for address, segment in list(self._segments.items()):
            if not wanted(segment):
                del self._segments[address]
                segment.close()


class SegmentReader:
    """The segments of a sender, seen from a process that reads them."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}
        self._reading: dict[int, str] = {}
        self._released: list[str] = []

    def read(self, place: SharedMemory, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes], read-only, without a copy; released when nothing refers to it any more.

        Raises:
            OSError: the sender's memory cannot be reached: it has ended, or lives in another container.
        """
        segment = place.segment
        if num_bytes == 0:
            self._released.append(segment)
            return np.empty(0, dtype=np.uint8)
        if segment not in self._maps:
            with Path(place.path).open("rb") as file:
                self._maps[segment] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        array = np.frombuffer(self._maps[segment], dtype=np.uint8, count=num_bytes)
        number = next(_numbers)
        self._reading[number] = segment
        weakref.finalize(array, self._let_go, number).atexit = False
        return array

    @property
    def holding(self) -> tuple[str, ...]:
        """Segments that something still refers to."""
        return tuple(self._reading.values())

    def take_released(self) -> tuple[str, ...]:
        """Segments released since the last call."""
        released = tuple(self._released)
        del self._released[: len(released)]
        return released

    def forget_all_but(self, ids: Iterable[str]) -> None:
        self._maps = {name: self._maps[name] for name in ids if name in self._maps}

    def _let_go(self, number: int) -> None:
        self._released.append(self._reading.pop(number))


_WRITER = "the writer"


def _create(capacity: int) -> tuple[int, str]:
    """A file in memory: its descriptor, and the path at which processes of the same user open it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("roll-weights")
        path = f"/proc/{os.getpid()}/fd/{fd}"
    else:
        fd, path = tempfile.mkstemp(prefix="roll-weights-")
    os.ftruncate(fd, capacity)
    return fd, path


def _remove(fd: int, path: str) -> None:
    os.close(fd)
    if not path.startswith("/proc/"):
        Path(path).unlink(missing_ok=True)


def _address(array: object) -> int:
    assert isinstance(array, np.ndarray)
    return int(array.__array_interface__["data"][0])


_VARYING = (3, 7, 8, 9, 11, 12, 13, 14)
"""Positions of the arguments of ``rebuild_cuda_tensor`` that differ between blocks of bytes, but for the device."""

Handle: TypeAlias = tuple[Any, ...]
"""Length, then what CUDA and PyTorch need to open the memory: numbers, bytes and truth values."""


EXPANDABLE = "expandable_segments:True"
"""In ``PYTORCH_CUDA_ALLOC_CONF``: another kind of memory, whose handle is a file descriptor of its process."""


def without_expandable_segments(settings: str) -> str:
    """The same settings of PyTorch's allocator but for that one."""
    return settings.replace(EXPANDABLE, EXPANDABLE.replace("True", "False"))


def allocator_settings() -> str:
    """Those that PyTorch's allocator has; of PyTorch 2.11, which does not tell them, those of the environment."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return str(torch._C._accelerator_getAllocatorSettings())
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((os.environ[name] for name in names if name in os.environ), "")


@contextlib.contextmanager
def plain_gpu_memory() -> Iterator[None]:
    """Memory that is allocated inside has a plain CUDA IPC handle, whatever the allocator's settings.

    That of expandable segments can be opened only with the right to trace other processes, which containers seldom
    give, and several times as slowly. With the setting off, PyTorch takes no block that lies in one.
    """
    settings = allocator_settings()
    if EXPANDABLE not in settings:
        yield
        return
    # As a whole: PyTorch resets every setting that is not named.
    torch._C._accelerator_setAllocatorSettings(without_expandable_segments(settings))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def own_copy(data: Tensor) -> Tensor:
    """A copy to share on: memory that came from another process cannot be handed on."""
    with plain_gpu_memory():
        return data.clone()


def share_on_gpu(data: Tensor) -> Handle:
    """Handle for one receiver to open ``data``, uint8 [num_bytes]. Once per receiver: each gives its share back."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(data)
    return (len(data), *(arguments[position] for position in _VARYING))


def open_on_gpu(handle: Handle, device: int) -> Tensor:
    """The sender's bytes; their memory is kept for as long as anything here refers to it.

    Args:
        device: index of the GPU among those that this process sees.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor
    from torch.storage import TypedStorage

    num_bytes, offset, memory, size, start, *counter_and_event = handle
    place = (TypedStorage, torch.uint8, device, memory, size, start)
    needs_grad = False
    tensor: Tensor = rebuild_cuda_tensor(
        Tensor, torch.Size([num_bytes]), (1,), offset, *place, needs_grad, *counter_and_event
    )
    return tensor


def collect_on_gpu() -> None:
    """Frees the blocks that all receivers have given back."""
    torch.cuda.ipc_collect()
