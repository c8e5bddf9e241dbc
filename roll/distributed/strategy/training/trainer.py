"""Log-probs (``Scorer``), the optimizer step and the export of weights (``Trainer``), for any engine.

An engine brings the forward pass, the gradient and the optimizer. What is here is the same for all of them: the process
group, offloading, cutting a batch into micro-batches, the loss's denominators over all ranks, metrics, the learning
rate, skipped steps.

One optimizer step never depends on how its sequences are cut: a loss returns its share of the step's total, already
divided by counts over all ranks, and the gradient is the plain sum of all shares.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from roll.algorithms.types import LossContext, LossFn, TokenScores, add_metrics, is_maximum
from roll.data.batch import Batch, placeholder
from roll.data.packing import computed_tokens, padding_waste, take_micro_batch, worth_sharing
from roll.distributed.strategy.base import Metrics, RankInfo, States, StrategyContext
from roll.distributed.strategy.evidence import (
    FORMAT,
    TEMPERATURE,
    Sketch,
    config_settings,
    layer_outputs,
    sketched_export,
)
from roll.distributed.strategy.training.checkpoint import (
    ADAPTER,
    MODEL,
    BackgroundSaves,
    Contents,
    SourceFolder,
    Tensors,
    Trained,
    TrainerState,
    model_folder,
    optimizer_tensors,
    restore_checkpoint,
    resume_contents,
    resume_folder,
    write_contents,
)
from roll.distributed.strategy.training.exchange import (
    TensorForm,
    WeightShard,
    all_gather,
    gather,
    own_rank,
    raise_on_all_ranks,
)
from roll.distributed.strategy.training.optim import learning_rate, weight_decay
from roll.distributed.weights.buckets import (
    BucketOutline,
    WeightBucket,
    aligned,
    allocate,
    as_tensor,
    dtype_name,
    outline_of,
    pack,
)
from roll.distributed.weights.messages import Payload
from roll.models.loading import copy_companions, exact_float32, load_config
from roll.models.lora import write_adapter_config
from roll.models.own_forward import OwnForward
from roll.models.scoring import LAYOUTS, new_layouts, split_batch
from roll.utils.hashing import WrittenFile
from roll.utils.memory import paused_collector
from roll.utils.progress import advance


@dataclasses.dataclass(frozen=True)
class MicroBatchLimits:
    """Bounds of a micro-batch, and its layout."""

    max_sequences: int | None
    max_tokens: int | None
    max_pixels: int | None
    round_to: int
    packing: bool
    sharing: bool


class Scorer(ABC):
    """Computes log-probs with a model that the engine distributes over the role's workers.

    ``setup`` must set ``device`` and ``info``.
    """

    device: torch.device
    info: RankInfo
    _model_dtype: torch.dtype
    """The number format in which weights leave: exports and saved models."""
    shares_prompts = False
    """The model takes rows that hold a common prompt once, see ``data/shared_prompts.py``."""
    own_forward: OwnForward | None = None
    """Compares the first micro-batches with the model itself; ``None``: nothing is compared."""

    def __init__(self, context: StrategyContext) -> None:
        self.context = context
        self.area = {"lm": "actor", "value": "critic", "score": "reward_model"}[context.head]
        self._resident = States.ALL

    @abstractmethod
    def setup(self) -> RankInfo:
        """Joins the process group and loads the model; may be called once per object.

        Raises:
            ValueError: the model or an option cannot be used.
        """

    def shutdown(self) -> None:  # noqa: B027 (optional to override)
        """Frees what would outlive the object, such as an engine's process groups. The object is not used again."""

    @abstractmethod
    def forward(self, micro_batch: Batch, limits: MicroBatchLimits) -> TokenScores:
        """Scores of one micro-batch, flat [T], on the device; with gradient where it is enabled (collective)."""

    def forward_all(self, micro_batches: list[Batch], limits: MicroBatchLimits) -> list[TokenScores]:
        """Scores of all micro-batches without gradient (collective; engines with a schedule of their own override)."""
        scores = []
        for micro_batch in micro_batches:
            scores.append(self.forward(micro_batch, limits))
            advance()
        return scores

    @abstractmethod
    def move(self, what: States, device: torch.device) -> None:
        """Moves states between the device and host memory; called only when they are on the other side."""

    def without_adapter(self) -> contextlib.AbstractContextManager[object]:
        """Forward passes inside leave the LoRA adapter out (engines that train one override)."""
        raise ValueError(f"{self.context.role}: it has no LoRA adapter to leave out")

    def logprobs(self, batch: Batch, *, adapter: bool = True) -> TokenScores:
        """Scores this rank's share (collective; the share may be empty).

        Args:
            adapter: False scores with the model as it was before its LoRA adapter.

        Returns:
            Flat [T]: log-probabilities and entropies, or values of a critic; 0 where the loss mask is 0.
        """
        self._require(States.WEIGHTS)
        limits = self.limits("infer")
        groups = split_batch(batch, **dataclasses.asdict(limits))
        new = self._to_compare(batch, groups, limits)
        counts = self._gather_counts([len(groups), *(float(layout in new) for layout in LAYOUTS)])
        rounds = int(counts[:, 0].max())
        with torch.no_grad(), contextlib.nullcontext() if adapter else self.without_adapter():
            self._compare(batch, new, counts[:, 1:])
            parts = self.forward_all(take_all(batch, groups, max(1, rounds)), limits)
        return TokenScores.gathered(batch.num_tokens, map(batch.token_index, groups), parts)

    @property
    def number_format(self) -> torch.dtype:
        """In which the model computes."""
        return self._model_dtype

    def settings(self) -> dict[str, str]:
        """What it computes by, see ``evidence``."""
        context, args = self.context, self.context.worker.model_args
        config = load_config(context.model_path, args.model_config_kwargs, trust_remote_code=args.trust_remote_code)
        own = {FORMAT: dtype_name(self.number_format), TEMPERATURE: f"{context.temperature or 1.0:g}"}
        return config_settings(config) | own

    def pictures_seen(self, row: Batch) -> dict[str, Tensor]:
        """See ``evidence.pictures_seen`` (collective); none of an engine that takes no pictures."""
        return {}

    def layer_outputs(self, row: Batch) -> dict[str, Tensor]:
        """See ``evidence.layer_outputs``; every rank gets the same row (collective)."""
        return {} if self.own_forward is None else layer_outputs(self.own_forward, row)

    def offload(self, what: States) -> None:
        """Moves states to host memory; using them before ``onload`` is an error. On a CPU nothing moves."""
        if self.device.type != "cpu":
            self.move(what & self._resident, torch.device("cpu"))
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what PyTorch keeps for later, other processes on the device cannot have
        self._resident &= ~what

    def onload(self, what: States) -> None:
        """Brings states back to the device."""
        if self.device.type != "cpu":
            self.move(what & ~self._resident, self.device)
            torch.cuda.synchronize()
        self._resident |= what

    def limits(self, phase: str) -> MicroBatchLimits:
        """The layout of micro-batches; ``phase`` is ``train`` or ``infer``."""
        worker = self.context.worker
        dynamic = getattr(worker, f"use_dynamic_batching_in_{phase}")
        per_pass = worker.infer_batch_size if phase == "infer" else worker.training_args.per_device_train_batch_size
        return MicroBatchLimits(
            max_sequences=None if dynamic else per_pass,
            max_tokens=getattr(worker, f"max_tokens_per_microbatch_in_{phase}") if dynamic else None,
            max_pixels=getattr(worker, f"max_pixels_per_microbatch_in_{phase}"),
            round_to=getattr(worker, f"sequence_length_round_in_{phase}"),
            packing=worker.use_sequence_packing,
            sharing=self.shares_prompts,
        )

    def _to_compare(self, batch: Batch, groups: list[Tensor], limits: MicroBatchLimits) -> dict[str, Batch]:
        if self.own_forward is None:
            return {}
        known = self.own_forward.compared
        return new_layouts(batch, groups, known, packing=limits.packing, sharing=limits.sharing)

    def _compare(self, batch: Batch, new: dict[str, Batch], having: Tensor) -> None:
        """Compares micro-batches with the model's own scores (collective).

        Args:
            new: this rank's, by layout; where it has none, it takes part with an empty one.
            having: whether each rank (axis 0) has one of each of ``LAYOUTS``.

        Raises:
            ValueError: on every rank, where one finds a difference beyond the bound.
        """
        for layout, is_new in zip(LAYOUTS, having.any(0).tolist(), strict=True):
            if is_new:
                assert self.own_forward is not None
                self.own_forward.compare(new.get(layout) or placeholder(batch), layout)

    def _gather_counts(self, counts: list[float]) -> Tensor:
        """Every rank's counts, shape [ranks, len(counts)] (collective)."""
        row = torch.tensor(counts, dtype=torch.float64)
        return row[None] if self.context.world_size == 1 else all_gather(row)

    def _require(self, what: States) -> None:
        if missing := what & ~self._resident:
            raise RuntimeError(f"{self.context.role}: {missing} is offloaded; expected onload() before use")


def join_group(context: StrategyContext, *, alone: bool) -> torch.device:
    """Joins the role's process group, or finds it joined by an earlier strategy in this process.

    Args:
        alone: a lone worker gets a group too, for engines that need one.

    Returns:
        This process's GPU, made the current one, or the CPU.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", context.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        exact_float32()
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (context.rank, context.world_size):
            raise ValueError(
                f"{context.role}: this process is rank {dist.get_rank()} of {dist.get_world_size()} already, "
                f"expected rank {context.rank} of {context.world_size}"
            )
        return device
    # Both backends on a GPU: counts and offloaded shards travel through host memory.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if context.world_size > 1:
        address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        timeout = timedelta(seconds=context.timeout)
        dist.init_process_group(backend, address, timeout, rank=context.rank, world_size=context.world_size)
    elif alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.is_initialized():
        # nccl makes a group's communicator in its first collective, in which every rank must take part. Weights travel
        # between some ranks only, and may be the first to be sent (Megatron has groups of its own for all else). On a
        # CPU it costs nothing, and the tests find out there whether all ranks do what nccl needs.
        dist.all_reduce(torch.zeros(1, device=device))
    return device


def take_all(batch: Batch, groups: list[Tensor], rounds: int) -> list[Batch]:
    """The micro-batches of so many rounds; those past the last group are empty."""
    return [take_micro_batch(batch, groups, index) for index in range(rounds)]


logger = logging.getLogger(__name__)

_SKETCHED = 256
"""Size of a bucket of weights that are sketched, in MiB."""
_PACKERS = 2
"""Buckets in host memory that are packed at once."""


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket before it has values; the same in every export."""

    outline: BucketOutline
    pieces: tuple[WeightShard, ...]
    """Gathered for it: those whose first tensor lies in it. The last one's others may lie in the next buckets."""
    device: torch.device


@paused_collector()
def plan_buckets(pieces: Sequence[WeightShard], bucket_bytes: int) -> list[PlannedBucket]:
    """Buckets of at most ``bucket_bytes`` for tensors, in order; a larger tensor gets a bucket of its own.

    Raises:
        ValueError: no positive number of bytes.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes: {bucket_bytes}, expected a positive number of bytes")
    planned: list[PlannedBucket] = []
    named: list[tuple[str, TensorForm]] = []
    begun: list[WeightShard] = []
    size, device = 0, torch.device("cpu")

    def close() -> None:
        planned.append(PlannedBucket(outline_of(named), tuple(begun), device))

    for piece in pieces:
        for number, (name, form) in enumerate(piece.outline.items()):
            num_bytes = aligned(form.nbytes)
            if named and size + num_bytes > bucket_bytes:
                close()
                named, begun, size = [], [], 0
            if number == 0:
                begun.append(piece)
                device = piece.spreads[0].device
            named.append((name, form))
            size += num_bytes
    if named:
        close()
    return planned


def export(planned: Sequence[PlannedBucket], ranks: Collection[int], *, check: bool) -> Iterator[WeightBucket]:
    """Yields the buckets on some ranks and nothing on the others; all must exhaust the iterator (collective).

    Two buckets in host memory are packed at the same time, each by a thread, while the next ones are gathered; on
    another device one. No more than these are held.
    """
    if own_rank() not in ranks:
        for bucket in planned:
            gather(bucket.pieces, ranks)
        return
    whole: dict[str, Tensor] = {}
    begun: deque[Future[WeightBucket]] = deque()
    for bucket in planned:
        outline = bucket.outline
        data = allocate(outline.num_bytes, bucket.device)
        places = dict(outline.views(as_tensor(data)))
        whole |= gather(bucket.pieces, ranks, into=places)
        tensors = [whole.pop(name) for name in outline.names]
        packing = functools.partial(pack, outline, tensors, data, list(places.values()), check=check)
        if bucket.device.type == "cpu":
            begun.append(_packers().submit(packing))
            if len(begun) < _PACKERS:
                continue
        else:
            begun.append(Future())
            begun[-1].set_result(packing())
        del packing, tensors, places, data
        yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


@functools.cache
def _packers() -> ThreadPoolExecutor:
    """Copies and sums release the interpreter's lock."""
    return ThreadPoolExecutor(_PACKERS, thread_name_prefix="packer")


_SQUARE = "gradient's squared norm"


class Trainer(Scorer):
    """Takes optimizer steps. The methods without a body are the engine's."""

    _state: TrainerState
    _source: SourceFolder

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._saves = BackgroundSaves()
        self._pieces: dict[Payload, list[WeightShard]] = {}
        self._planned: dict[tuple[Payload, int], list[PlannedBucket]] = {}

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the loss's gradient to the step's; ``last`` of its micro-batches."""
        loss.backward()

    @abstractmethod
    def reduce_gradients(self) -> None:
        """After the last micro-batch: sums gradients over the ranks (plain sum, no mean)."""

    @abstractmethod
    def add_l2(self, coefficient: float) -> Tensor:
        """Adds the gradient of ``coefficient × Σ w²``; returns this rank's part of the penalty: all ranks' sum up."""

    @abstractmethod
    def square_norm(self) -> Tensor:
        """This rank's part of the gradient's squared norm, float64: the parts of all ranks add up to the whole."""

    @abstractmethod
    def apply_gradients(self, rate: float, norm: float) -> None:
        """Clips to ``context.max_grad_norm`` (0: not at all) and takes the optimizer's step."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forgets the gradients, after every step."""

    @abstractmethod
    def find_weights(self) -> list[WeightShard]:
        """The weights under Hugging Face names in the model's number format, tied ones once (collective)."""

    def find_adapter(self) -> list[WeightShard]:
        """The LoRA adapter in float32, under the names of a peft folder (collective; engines that train one override).

        Raises:
            ValueError: there is none.
        """
        raise ValueError(f"{self.context.role}: it has no LoRA adapter to export")

    @abstractmethod
    def reset_optimizer(self) -> None:
        """Forgets Adam's moments and starts the learning-rate schedule again."""

    @property
    @abstractmethod
    def trained(self) -> Trained:
        """Weights and moments that it changes, for checkpoints."""

    @abstractmethod
    def model_tensors(self) -> Tensors:
        """Those of the model as it is now, see ``saving.model_tensors``; not asked for with LoRA (collective)."""

    @abstractmethod
    def write_config(self, folder: Path) -> None:
        """Writes ``config.json`` and its like into a model's folder; called on rank 0, at any time later."""

    def save(self, path: Path) -> list[WrittenFile]:
        """Writes the role's part of a checkpoint, see ``checkpoint`` (collective).

        Args:
            path: the checkpoint's folder, on a file system that all ranks share.

        Returns:
            What this rank wrote, but for small files, on disk.

        Raises:
            OSError: on every rank, when one cannot write.
        """
        return self._finish(path, write_contents(self.contents(path)))

    def start_save(self, path: Path) -> Future[list[WrittenFile]]:
        """Copies this rank's share to host memory and returns; gathering and writing go on beside (collective).

        Returns:
            What ``save`` returns, or an ``OSError``, for this rank alone.
        """
        return self._saves.start(self.contents(path, copied=True))

    def save_model(self, folder: Path) -> None:
        """Writes the model alone; otherwise as ``save``."""
        self._require(States.WEIGHTS)
        self._finish(folder, write_contents([self.model_contents(folder)]))

    def load(self, path: Path) -> None:
        """Continues from a checkpoint that any number of ranks and any trainer has written (collective)."""
        self._require(States.WEIGHTS | States.OPTIMIZER)
        self._continue_from(restore_checkpoint(path, self.context.role, self.trained, self.context.loads), path)

    def contents(self, path: Path, *, copied: bool = False) -> list[Contents]:
        """The role's part of a checkpoint (collective).

        Args:
            copied: what is not in ``tensors`` is taken as it is now, in host memory.
        """
        self._require(States.WEIGHTS | States.OPTIMIZER)
        model = self.model_contents(model_folder(path, self.context.role))
        masters = self.context.lora is None and self._model_dtype != torch.float32
        saved = "optimizer" in self.context.saves
        optimizer = optimizer_tensors(self.trained, masters=masters) if saved else ()
        return [model, self._resume_contents(path, optimizer)]

    def model_contents(self, folder: Path) -> Contents:
        """The model as it is now: a Hugging Face model, or with LoRA an adapter as peft keeps it (collective)."""
        lora, source, scores = self.context.lora, self.context.model_path, self.context.head == "score"

        matrices = [] if lora is None else [name for piece in self.pieces("adapter") for name in piece.outline]

        def write_rest() -> None:
            if lora is None:
                self.write_config(folder)
            else:
                write_adapter_config(folder, lora, source, matrices, scores=scores)
            copy_companions(source, folder, self.context.tokenizer_path)

        tensors = self.model_tensors() if lora is None else {ADAPTER: self.pieces("adapter")}
        if lora is None:
            tensors = {**tensors, MODEL: [*tensors[MODEL], *self._source.kept]}
        return Contents(folder, tensors, write_rest)

    def _resume_contents(self, path: Path, optimizer: Sequence[WeightShard]) -> Contents:
        folder, generators = resume_folder(path, self.context.role), "rng" in self.context.saves
        return resume_contents(folder, optimizer, self._state, self.device if generators else None)

    def _finish(self, path: Path, written: Future[list[WrittenFile]]) -> list[WrittenFile]:
        """Waits until all ranks have written; returns what this one has (collective)."""
        with raise_on_all_ranks():
            try:
                return written.result()
            except OSError as error:
                raise OSError(f"checkpoint {path}: {error}") from error

    def pieces(self, payload: Payload) -> list[WeightShard]:
        """``find_weights`` or ``find_adapter``, looked up once (collective the first time)."""
        if payload not in self._pieces:
            self._pieces[payload] = self.find_weights() if payload == "weights" else self.find_adapter()
        return self._pieces[payload]

    def export_weights(
        self, bucket_bytes: int, ranks: Collection[int] = (0,), *, check: bool = True
    ) -> Iterator[WeightBucket]:
        """The weights under Hugging Face names in the model's number format, tied ones once, in buckets.

        Every rank must exhaust the iterator, which gathers a bucket at a time.

        Args:
            bucket_bytes: size of a bucket, unless one tensor is larger.
        """
        return self._export("weights", bucket_bytes, ranks, check)

    def export_adapter(
        self, bucket_bytes: int, ranks: Collection[int] = (0,), *, check: bool = True
    ) -> Iterator[WeightBucket]:
        """The LoRA adapter in float32 under the names of a peft folder; otherwise as ``export_weights``.

        Raises:
            ValueError: there is none.
        """
        return self._export("adapter", bucket_bytes, ranks, check)

    def sketches(self) -> dict[str, Sketch]:
        """Of the weights that it sends, with the adapter, if it trains one; on rank 0 alone (collective)."""
        lora, size, adapter = self.context.lora, _SKETCHED << 20, dict[str, Tensor]()
        if lora is not None:
            buckets = self.export_adapter(size, check=False)
            adapter = {
                name: matrix for bucket in buckets for name, matrix in bucket.outline.views(as_tensor(bucket.data))
            }
        return sketched_export(self.export_weights(size, check=False), adapter, lora)

    def _export(
        self, payload: Payload, bucket_bytes: int, ranks: Collection[int], check: bool
    ) -> Iterator[WeightBucket]:
        self._require(States.WEIGHTS)
        if (payload, bucket_bytes) not in self._planned:
            self._planned[payload, bucket_bytes] = plan_buckets(self.pieces(payload), bucket_bytes)
        return export(self._planned[payload, bucket_bytes], ranks, check=check)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps taken so far."""
        return self._state.optimizer_steps

    def train_step(self, batch: Batch, loss_fn: LossFn) -> Metrics:
        """Takes one optimizer step (collective).

        Args:
            batch: this rank's share of the step's sequences; may be empty.
            loss_fn: called once per micro-batch. Its metrics must have the same names every time.

        Returns:
            The loss's metrics summed over micro-batches and ranks (the same on every rank), and ``loss``,
            ``grad_norm`` before clipping, ``lr``, ``num_tokens``, ``computed_tokens`` (prompts that sequences share
            once), ``skipped_steps``; of this rank alone, ``padding_waste``, maxima (``…_max``) and the time. A step
            with a NaN or infinite loss or gradient, or without loss tokens, changes nothing and reports finite values.
        """
        start = time.perf_counter()
        self._require(States.ALL)
        limits = self.limits("train")
        groups = split_batch(batch, **dataclasses.asdict(limits))
        new = self._to_compare(batch, groups, limits)
        context, rounds, num_tokens, having = self._count(batch, len(groups), new)
        rate = learning_rate(self.context.worker.training_args, self._state.optimizer_steps, self._horizon)
        metrics = {f"{self.area}/lr": rate, f"{self.area}/num_tokens": num_tokens}
        if not limits.packing and not (limits.sharing and worth_sharing(batch)):
            metrics[f"{self.area}/padding_waste"] = padding_waste(batch.lengths_B, groups, limits.round_to)
        self._compare(batch, new, having)
        taken = False
        try:
            if context.num_tokens > 0:
                micro_batches = take_all(batch, groups, rounds)
                sums = self.accumulate(micro_batches, limits, loss_fn, context)
                own = [batch.select(group) for group in groups]  # the others are padding of the schedule
                sums[f"{self.area}/computed_tokens"] = float(computed_tokens(own, sharing=limits.sharing))
                metrics |= self._reduce(sums)
                loss, norm = metrics[self._loss_name], metrics[f"{self.area}/grad_norm"]
                if taken := math.isfinite(loss) and math.isfinite(norm):
                    self.apply_gradients(rate, norm)
                    self._state.optimizer_steps += 1
        finally:
            self.drop_gradients()
        if not taken:
            logger.warning("%s: optimizer step %d skipped: %s", self.context.role, self.optimizer_steps, metrics)
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        metrics[f"{self.area}/skipped_steps"] = float(not taken)
        return metrics | {f"time/{self.area}_train_step": time.perf_counter() - start}

    def accumulate(
        self, micro_batches: list[Batch], limits: MicroBatchLimits, loss_fn: LossFn, context: LossContext
    ) -> dict[str, float | Tensor]:
        """Forward and backward passes of a step (engines with a schedule of their own override).

        Returns:
            This rank's sums of the loss (under ``<area>/loss``) and its metrics, on the device; the same on all ranks
            that share the data (equal ``dp_rank``).
        """
        sums: dict[str, float | Tensor] = {}
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            self.before_forward(last=last)
            output = loss_fn(self.forward(micro_batch, limits), micro_batch, context)
            self.backward(output.loss, last=last)
            advance()
            add_metrics(sums, output.metrics | {self._loss_name: output.loss.detach()})
        return sums

    def before_forward(self, *, last: bool) -> None:
        """Called before each training micro-batch; ``last`` of its optimizer step."""

    @property
    def _loss_name(self) -> str:
        return f"{self.area}/loss"

    @property
    def weight_decay(self) -> float:
        """Of the next optimizer step, for what decays."""
        return weight_decay(self.context.worker.training_args, self._state.optimizer_steps, self._horizon)

    @property
    def _horizon(self) -> int:
        return self.context.total_optimizer_steps

    def _continue_from(self, state: TrainerState, path: Path) -> None:
        """Takes over the counters of a checkpoint; the schedule's horizon is this run's."""
        if state.total_optimizer_steps != self._horizon:
            logger.warning(
                "checkpoint %s: its learning-rate schedule spanned %d optimizer steps, this run's spans %d",
                path,
                state.total_optimizer_steps,
                self._horizon,
            )
        self._state = dataclasses.replace(state, total_optimizer_steps=self._horizon)

    def _count(
        self, batch: Batch, num_micro_batches: int, new: Collection[str]
    ) -> tuple[LossContext, int, float, Tensor]:
        """The loss's denominators, the micro-batches to run, and the tokens of the step, over all ranks.

        And which of ``LAYOUTS`` each rank has to compare.
        """
        loss_tokens_B = batch.loss_tokens_B.float()
        sample_weight_B = torch.ones(batch.num_sequences) if batch.sample_weight_B is None else batch.sample_weight_B
        longest = float((loss_tokens_B / sample_weight_B).max()) if batch.num_sequences else 0.0
        counts = self._gather_counts(
            [
                float(loss_tokens_B.sum()),
                float(sample_weight_B[loss_tokens_B > 0].sum()),
                float(batch.num_tokens),
                longest,
                float(num_micro_batches),
                *(float(layout in new) for layout in LAYOUTS),
            ]
        )
        tokens, sequences, all_tokens = (counts[:, :3].sum(0) / self._copies).tolist()
        longest, rounds = counts[:, 3:5].amax(0).tolist()
        context = LossContext(tokens, sequences, longest, self._state.optimizer_steps)
        return context, int(rounds), all_tokens, counts[:, 5:]

    def _reduce(self, sums: dict[str, float | Tensor]) -> Metrics:
        """Sums gradients and metrics over the ranks; adds the L2 penalty and the gradient's norm."""
        self.reduce_gradients()
        maxima = {name: float(value) for name, value in sums.items() if is_maximum(name)}
        columns = {name: value / self._copies for name, value in sums.items() if name not in maxima}
        if self.context.l2:
            columns[self._loss_name] += self.add_l2(self.context.l2)
        columns[_SQUARE] = self.square_norm()
        names = sorted(columns)
        totals = torch.stack([torch.as_tensor(columns[n], dtype=torch.float64, device=self.device) for n in names])
        if self.context.world_size > 1:
            dist.all_reduce(totals)
        metrics = dict(zip(names, totals.tolist(), strict=True))
        metrics[f"{self.area}/grad_norm"] = metrics.pop(_SQUARE) ** 0.5
        return metrics | maxima

    @property
    def _copies(self) -> int:
        """Ranks that work on the same data."""
        return self.info.world_size // self.info.dp_size
