"""Recording of what PyTorch does in one process from one call to another, as a trace; on a GPU its memory too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRACE_SUFFIX, MEMORY_SUFFIX = ".trace.json.gz", ".memory.pickle"
_MEMORY_EVENTS = 200_000
"""Last allocations whose history a snapshot has."""


@dataclass(frozen=True)
class RecordingOptions:
    """Options of a recording, see ``roll.configs.profiling``."""

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
            profile_memory=options.memory,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),  # engines compute in threads of theirs
        )
        self._profile.start()

    def stop(self, stem: Path) -> list[Path]:
        """Ends it and writes the files ``<stem>.trace.json.gz``, which Perfetto and Chrome show, and the memory's."""
        import torch

        self._profile.stop()
        stem.parent.mkdir(parents=True, exist_ok=True)
        files = [stem.with_name(stem.name + TRACE_SUFFIX)]
        self._profile.export_chrome_trace(str(files[0]))
        if self._snapshots:
            files.append(stem.with_name(stem.name + MEMORY_SUFFIX))
            torch.cuda.memory._dump_snapshot(str(files[1]))
            torch.cuda.memory._record_memory_history(enabled=None)
        return files
