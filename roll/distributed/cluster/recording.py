"""Recordings of PyTorch's work and memory."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.utils.memory import resident_bytes

TRACE_SUFFIX, MEMORY_SUFFIX = ".trace.json.gz", ".memory.pickle"
_MEMORY_EVENTS = 200_000
"""Last allocations whose history a snapshot has."""
_INTERVAL_S = 0.005
"""Between two looks at the resident memory."""
_START, _EVENTS = '"baseTimeNanoseconds": ', '"traceEvents": ['
"""Lines of a trace: what its times count from, and what its events follow."""


@dataclass(frozen=True)
class RecordingOptions:
    """Options of a recording, see ``roll.configs.pipeline``."""

    shapes: bool = False
    stacks: bool = False
    memory: bool = False


class Recording:
    """A recording of all threads of this process, under way from its making to ``stop``, on one thread."""

    def __init__(self, options: RecordingOptions) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        gpu = torch.cuda.is_available()
        self._snapshots = options.memory and gpu
        if self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self._profile: Any = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])],
            record_shapes=options.shapes,
            with_stack=options.stacks,
            # Engines compute in threads of theirs. PyTorch (2.13) records no allocations beside this option.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._resident = ResidentMemory() if options.memory else None
        self._profile.start()

    def stop(self, stem: Path) -> list[Path]:
        """Ends it and writes the files ``<stem>.trace.json.gz``, which Perfetto and Chrome show, and the memory's."""
        import torch

        self._profile.stop()
        stem.parent.mkdir(parents=True, exist_ok=True)
        files = [stem.with_name(stem.name + TRACE_SUFFIX)]
        if self._resident is None:
            self._profile.export_chrome_trace(str(files[0]))
        else:
            with tempfile.TemporaryDirectory(dir=stem.parent) as folder:
                plain = Path(folder) / "trace.json"
                self._profile.export_chrome_trace(str(plain))
                _compress(plain, files[0], self._resident.stop())
        if self._snapshots:
            files.append(stem.with_name(stem.name + MEMORY_SUFFIX))
            torch.cuda.memory._dump_snapshot(str(files[1]))
            torch.cuda.memory._record_memory_history(enabled=None)
        return files


class ResidentMemory:
    """Samples of this process's resident memory, from the making to ``stop``, or until nobody holds this."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, int]] = []
        ended = threading.Event()
        self._thread = threading.Thread(
            target=_sample, args=(self._samples, ended), name="resident-memory", daemon=True
        )
        self._end = weakref.finalize(self, ended.set)
        self._thread.start()

    def stop(self) -> list[tuple[int, int]]:
        """Ends it and returns the samples: nanoseconds since 1970, bytes."""
        self._end()
        self._thread.join()
        return self._samples


def _sample(samples: list[tuple[int, int]], ended: threading.Event) -> None:
    while (resident := resident_bytes()) is not None:
        samples.append((time.time_ns(), resident))
        if ended.wait(_INTERVAL_S):
            return


def _compress(trace: Path, target: Path, samples: list[tuple[int, int]]) -> None:
    """Compresses a trace, with a counter of these samples in it; a line at a time, since traces are large."""
    start_ns = 0
    with trace.open(encoding="utf-8") as source, gzip.open(target, "wt", encoding="utf-8") as file:
        for line in source:
            file.write(line)
            if line.lstrip().startswith(_START):
                start_ns = int(line.strip().removeprefix(_START).rstrip(","))
            elif line.strip() == _EVENTS:
                file.writelines(f"{_counter(*sample, start_ns)},\n" for sample in samples)


def _counter(moment_ns: int, size: int, start_ns: int) -> str:
    event = {"ph": "C", "name": "resident memory", "pid": os.getpid(), "ts": (moment_ns - start_ns) / 1000}
    return json.dumps({**event, "args": {"MiB": round(size / 2**20, 1)}})
