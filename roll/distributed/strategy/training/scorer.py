"""Log-probs for any engine: micro-batches, offloading, the process group."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from roll.algorithms.types import TokenScores
from roll.data.batch import Batch, placeholder
from roll.data.packing import take_micro_batch
from roll.distributed.strategy.base import RankInfo, States, StrategyContext
from roll.distributed.strategy.training.exchange import all_gather
from roll.models.own_forward import LAYOUTS, OwnForward
from roll.models.scoring import split_batch


@dataclasses.dataclass(frozen=True)
class MicroBatchLimits:
    """Bounds of a micro-batch, and its layout."""

    max_sequences: int | None
    max_tokens: int | None
    round_to: int
    packing: bool
    sharing: bool


class Scorer(ABC):
    """Computes log-probs with a model that the engine distributes over the role's workers.

    ``setup`` must set ``device`` and ``info``.
    """

    device: torch.device
    info: RankInfo
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
        return [self.forward(micro_batch, limits) for micro_batch in micro_batches]

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
            round_to=getattr(worker, f"sequence_length_round_in_{phase}"),
            packing=worker.use_sequence_packing,
            sharing=self.shares_prompts,
        )

    def _to_compare(self, batch: Batch, groups: list[Tensor], limits: MicroBatchLimits) -> dict[str, Batch]:
        if self.own_forward is None:
            return {}
        return self.own_forward.to_compare(batch, groups, packing=limits.packing, sharing=limits.sharing)

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
        dist.init_process_group(backend, init_method=address, rank=context.rank, world_size=context.world_size)
    elif alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if device.type == "cuda" and dist.is_initialized():
        # nccl makes a group's communicator in its first collective, in which every rank must take part. Weights travel
        # between some ranks only, and may be the first to be sent (Megatron has groups of its own for all else).
        dist.all_reduce(torch.zeros(1, device=device))
    return device


def take_all(batch: Batch, groups: list[Tensor], rounds: int) -> list[Batch]:
    """The micro-batches of so many rounds; those past the last group are empty."""
    return [take_micro_batch(batch, groups, index) for index in range(rounds)]
