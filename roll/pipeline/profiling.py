"""Recordings of single steps, see ``roll.configs.pipeline``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from roll.configs.pipeline import ProfilerConfig
from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.recording import RecordingOptions

logger = logging.getLogger(__name__)

TIMELINE_FILE = "ray_timeline.json"
NSIGHT_DEFAULTS = {"t": "cuda,cudnn,cublas,nvtx", "stop-on-exit": "true"}


class StepProfiler:
    """Has workers record the steps that are asked for.

    Args:
        folder: of the files, which all machines share.
    """

    def __init__(self, config: ProfilerConfig, clusters: Mapping[str, Cluster], folder: Path) -> None:
        self._config = config
        self._clusters = clusters
        self._folder = folder

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Records the block if the step is one of those. An error in it leaves no trace."""
        if step not in self._config.steps:
            yield
            return
        config = self._config
        chosen = [
            (cluster, rank)
            for name, cluster in self._clusters.items()
            for rank in config.profiled(name, cluster.world_size)
        ]
        options = RecordingOptions(config.shapes, config.stacks, config.memory)
        for cluster, rank in chosen:
            cluster.call_rank(rank, "start_recording", options)
        yield
        for cluster, rank in chosen:
            stem = self._folder / f"step-{step:05d}-{cluster.name}-{rank}"
            for file in cluster.call_rank(rank, "stop_recording", stem):
                logger.info("recorded step %d of %s[%d]: %s", step, cluster.name, rank, file)

    def close(self) -> None:
        """Writes Ray's timeline, if it is asked for."""
        if not self._config.ray_timeline:
            return
        import ray

        self._folder.mkdir(parents=True, exist_ok=True)
        ray.timeline(str(self._folder / TIMELINE_FILE))
        logger.info("Ray's timeline: %s", self._folder / TIMELINE_FILE)


def nsight_options(config: ProfilerConfig, role: str, world_size: int, folder: Path) -> dict[int, dict[str, str]]:
    """Options of ``nsys profile`` for the ranks of a role that run under it."""
    if config.nsight is None:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    given = config.nsight or NSIGHT_DEFAULTS
    # %p: of each process that it starts. Ray puts the file below its own folder, unless the path is whole.
    return {rank: {**given, "o": f"{folder}/{role}-{rank}-%p"} for rank in config.profiled(role, world_size)}
