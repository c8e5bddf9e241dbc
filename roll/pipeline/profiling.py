"""What steps cost: seconds by phase, memory, recordings of single steps, tokens per second, and MFU.

Model FLOPs are those that the mathematics asks for: a forward and a backward pass over the tokens, without what
recomputation and padding add (Chowdhery et al. 2022, PaLM, appendix B), and of prompts that sequences share once. They
are counted as `roll plan` does.
"""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from roll.configs.pipeline import PipelineConfig, ProfilerConfig
from roll.data.batch import Batch
from roll.data.packing import SharedPrompts
from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.errors import ClusterError
from roll.distributed.cluster.recording import RecordingOptions
from roll.models.shapes import ModelShape, compute_bytes, samples_flops, training_factor
from roll.preflight.models import model_config
from roll.tracking.run import RunFolder
from roll.utils.gpus import known_gpu
from roll.utils.memory import free_bytes


@dataclass
class Span:
    """One timed stretch of a phase; the caller sets ``tokens`` once it knows how many were worked on."""

    seconds: float = 0.0
    since: float | None = None
    """``time.perf_counter`` when the work on the tokens began, if that was before the phase and beside others."""
    worked: float = 0.0
    """Seconds of the work on the tokens; those of the phase without ``since``."""
    tokens: int = 0
    flops: float = 0.0
    """Operations that the model asks for."""
    devices: int = 0
    """That worked on them; 0: nobody counted."""
    peak: float | None = None
    """Operations per second of such a device at most, if that is known."""


class PhaseTimer:
    """Adds up seconds and tokens by phase, for the step and for the whole run.

    >>> timer = PhaseTimer()
    >>> with timer.phase("rollout") as span:
    ...     span.tokens = 640
    >>> sorted(timer.step_metrics())
    ['time/rollout', 'tokens_per_s/rollout']
    """

    def __init__(self) -> None:
        self._step: dict[str, Span] = {}
        self._total: dict[str, Span] = {}
        self._spans: list[tuple[str, float, float]] = []

    @contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[Span]:
        """Times the block, whether it ends well or by an exception."""
        span = Span(tokens=tokens)
        begin, started = time.time(), time.perf_counter()
        try:
            yield span
        finally:
            ended = time.perf_counter()
            self._spans.append((name, begin, begin + ended - started))
            span.seconds = ended - started
            span.worked = ended - (started if span.since is None else span.since)
            for spans in (self._step, self._total):
                entry = spans.setdefault(name, Span())
                entry.seconds += span.seconds
                entry.worked += span.worked
                entry.tokens += span.tokens
                entry.flops += span.flops
                entry.devices, entry.peak = span.devices or entry.devices, span.peak or entry.peak

    def step_metrics(self) -> dict[str, float]:
        """Metrics since the last call, which starts the next step.

        ``time/<phase>`` (seconds), ``tokens_per_s/<phase>`` and ``tokens_per_s_per_device/<phase>``; where operations
        were counted ``tflops_per_device/<phase>``, and as a share of the device's peak ``mfu/<phase>``.
        """
        metrics = {f"time/{name}": span.seconds for name, span in self._step.items()}
        metrics |= {f"tokens_per_s/{name}": _rate(span) for name, span in self._step.items() if span.tokens}
        for name, span in self._step.items():
            if span.devices and span.worked > 0:
                each = span.worked * span.devices
                metrics[f"tokens_per_s_per_device/{name}"] = span.tokens / each
                if span.flops:
                    metrics[f"tflops_per_device/{name}"] = span.flops / each / 1e12
                    metrics |= {f"mfu/{name}": span.flops / each / span.peak} if span.peak else {}
        self._step = {}
        return metrics

    def take_spans(self) -> list[tuple[str, float, float]]:
        """Phases since the last call, with their begin and end in seconds of the epoch."""
        spans, self._spans = self._spans, []
        return spans

    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds of the whole run."""
        return {name: span.seconds for name, span in self._total.items()}

    def tokens_per_s(self) -> dict[str, float]:
        """Tokens per second of the whole run, of the phases that counted tokens."""
        return {name: _rate(span) for name, span in self._total.items() if span.tokens}


def host_memory() -> tuple[float, dict[str, float]]:
    """Memory of this process and its living descendants.

    Returns:
        Their peak in MB (10^6 bytes), and metrics: ``memory/host_gb``, what they have now and do not share (in 10^9
        bytes), and ``memory/host_free_gb``, what the machine or container has left. The peak is the sum of every
        process's own high-water mark: an upper bound, since pages that processes share count in each and the peaks need
        not coincide. Without /proc it is that of this process and of the largest child that has ended, and there are
        no metrics.
    """
    if not Path("/proc/self/status").exists():
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes there, KiB elsewhere
        usages = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usages) * unit / 1e6, {}
    children: dict[int, list[int]] = {}
    sizes_kib: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended between the listing and the reading, or is not ours
        pid = int(fields["Pid"])
        children.setdefault(int(fields["PPid"]), []).append(pid)
        sizes_kib[pid] = (int(fields.get("VmHWM", "0 kB").split()[0]), int(fields.get("RssAnon", "0 kB").split()[0]))
    family = [int(Path("/proc/self").resolve().name)]
    for pid in family:  # grows while it is walked
        family.extend(children.get(pid, []))
    peak, own = (sum(sizes_kib.get(pid, (0, 0))[which] for pid in family) * 1024 for which in (0, 1))
    return peak / 1e6, {"memory/host_gb": own / 1e9, "memory/host_free_gb": free_bytes() / 1e9}


_MOST_RANKS = 16
"""Workers of a role whose work is written."""


def record_timeline(timer: PhaseTimer, folder: RunFolder, clusters: Mapping[str, Cluster], step: int) -> None:
    """Writes a line of ``timeline.jsonl``: the phases since the last one, and when each worker worked meanwhile."""
    phases = timer.take_spans()
    pending = {name: cluster.submit("take_spans") for name, cluster in clusters.items()}
    workers: dict[str, list[tuple[float, float]]] = {}
    start = min((begin for _, begin, _ in phases), default=time.time())
    for name, refs in pending.items():
        try:
            spans = clusters[name].gather(refs, call="take_spans")
        except ClusterError as error:  # a worker that died; who needs it says so
            logger.debug("no timeline of %s: %s", name, error)
            continue
        for rank in range(0, len(spans), -(-len(spans) // _MOST_RANKS)):
            places = [(round(begin - start, 3), round(end - start, 3)) for begin, end in spans[rank]]
            workers[f"{name}[{rank}]"] = [place for place in places if place[1] > 0]
    told = [(name, round(begin - start, 3), round(end - start, 3)) for name, begin, end in phases]
    folder.log_timeline({"step": step, "start": round(start, 3), "phases": told, "workers": workers})


def _rate(span: Span) -> float:
    return span.tokens / span.worked if span.worked > 0 else 0.0


logger = logging.getLogger(__name__)

TIMELINE_FILE = "ray_timeline.json"
NSIGHT_DEFAULTS = {"t": "cuda,cudnn,cublas,nvtx", "stop-on-exit": "true"}


class StepProfiler:
    """Has workers record the configured steps.

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


class Utilisation:
    """Notes on the spans of a step what was worked on, and on how many devices."""

    def __init__(self, config: PipelineConfig, trainer: Cluster, generator: Cluster | None = None) -> None:
        self._config = config
        self._trainer = trainer
        self._generator = generator
        self._last_batch: float | None = None
        """``time.perf_counter`` when the last of the rollouts that go on beside training had its batch."""

    def generated(self, span: Span, tokens: int, *, beside: bool = False) -> None:
        """A rollout of so many sampled tokens.

        Args:
            beside: rollouts go on beside training, so that what counts is the time since the batch before.
        """
        span.tokens = tokens
        if beside:
            span.since, self._last_batch = self._last_batch, time.perf_counter()
        if self._generator is not None:
            span.devices = num_devices(self._generator)

    def scored(self, span: Span, batch: Batch, rows: Tensor | None) -> None:
        """Rows of a batch that a model has scored, which may be none; ``None``: all."""
        span.tokens = batch.num_tokens if rows is None else int(batch.lengths_B[rows].sum())
        span.devices = num_devices(self._trainer) if span.tokens else 0

    def trained(
        self,
        span: Span,
        batch: Batch,
        passes: int = 1,
        *,
        counts: bool = True,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """A batch that was trained on.

        Args:
            counts: False where the policy took no optimizer step.
            metrics: of the policy's optimizer steps, which say how many of the tokens were computed: fewer than there
                are where prompts are shared. Without them all were.
        """
        span.tokens, span.devices = batch.num_tokens * passes, num_devices(self._trainer)
        if self._shape is None or not counts:
            return
        squares = float(batch.lengths_B.double().square().sum())
        loss_tokens = int(batch.loss_mask_T.sum())
        tokens = float(batch.num_tokens)
        if (share := _computed_share(metrics or {})) < 1:
            saved, squares_of_all = _repeated_prompts(batch)
            squares -= squares_of_all * min(1.0, (1 - share) * tokens / saved if saved else 0.0)
            tokens *= share
        one = samples_flops(self._shape, tokens, squares, loss_tokens)
        factor = training_factor(adapter=bool(self._config.actor_train.model_args.lora_targets))
        span.flops, span.peak = passes * factor * one, self._peak

    @cached_property
    def _shape(self) -> ModelShape | None:
        """Sizes of the policy, if they are known on this machine."""
        sizes = model_config(self._config, "actor_train")
        try:
            return None if sizes is None else ModelShape.of(sizes.to_dict())
        except ValueError:
            return None

    @cached_property
    def _peak(self) -> float | None:
        """FLOP/s of a device at most; ``None`` where it is not known."""
        if (given := self._config.profiler.peak_tflops) is not None:
            return given * 1e12
        name: str | None = self._trainer.call_rank(0, "device_name")
        device = None if name is None else known_gpu(name)
        if device is None or self._shape is None:
            if name is not None:
                logger.info("no mfu: the peak of %s is not known; profiler.peak_tflops sets it", name)
            return None
        return device.flops if compute_bytes(self._config.actor_train, self._shape) == 2 else device.fp32_flops


def _computed_share(metrics: Mapping[str, float]) -> float:
    """Tokens that the policy computed, in parts of those that there are."""
    for name, computed in metrics.items():
        area = name.removesuffix("/computed_tokens")
        if area not in (name, "critic") and (present := metrics.get(f"{area}/num_tokens")):
            return computed / present
    return 1.0


def _repeated_prompts(batch: Batch) -> tuple[float, float]:
    """Tokens of prompts that another row begins with too, and the sum of the squares of their lengths."""
    shared = SharedPrompts.expected(batch)
    every, once = shared.lengths_G[shared.prompt_B].double(), shared.lengths_G.double()
    return float(every.sum() - once.sum()), float(every.square().sum() - once.square().sum())


def num_devices(cluster: Cluster) -> int:
    """Devices that the workers of a role have, each counted once."""
    return len({device for slot in cluster.slots for device in slot.devices})
