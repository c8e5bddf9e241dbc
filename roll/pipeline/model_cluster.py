"""A model role for the pipeline: computes log-probs of and trains on whole batches; takes turns on shared devices.

Nothing is moved on devices without memory of their own (CPU slots): host memory is where things would go.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ray
import torch
from torch import Tensor

from roll.algorithms.quantities import columns_read
from roll.algorithms.types import TokenScores, is_maximum
from roll.configs.algorithm import TrainInferCorrectionConfig
from roll.data.batch import Batch
from roll.data.stored import joined, leave, store
from roll.distributed.cluster.cluster import Cluster, RayBlock
from roll.distributed.cluster.errors import ClusterError
from roll.distributed.cluster.resources import NodeKind
from roll.distributed.strategy.base import Metrics, RankInfo, States, StrategyContext
from roll.models.loading import load_config
from roll.utils.hashing import WrittenFile

logger = logging.getLogger(__name__)

_NOTHING = States(0)
_WITH_MEMORY: tuple[NodeKind, ...] = ("gpu",)


class OffloadManager:
    """Moves states of the model roles on and off the devices.

    Whoever is about to use a role says so by ``load``. What shares a device with it makes room first; what is there
    stays until another role needs the room. A worker does its calls one after the other, so that a role which is still
    at work is moved when it has finished, and the driver waits for that.

    Args:
        clusters: the model roles, and rewards with models, by name; their workers have ``offload`` and ``onload``.
        kinds: nodes whose devices have memory of their own.
    """

    def __init__(self, clusters: Mapping[str, Cluster], kinds: Collection[NodeKind] = _WITH_MEMORY) -> None:
        self._clusters = clusters
        self._devices = {name: _devices(cluster, kinds) for name, cluster in clusters.items()}
        self._resident = dict.fromkeys(clusters, _NOTHING)

    def shares_devices(self, role: str, other: str) -> bool:
        """Tells whether the roles must take turns."""
        return role != other and bool(self._devices[role] & self._devices[other])

    def reserve(self, role: str) -> None:
        """Makes room for a role that is about to load its model, all of which is then on its devices."""
        self._make_room({role: _NOTHING})
        self._resident[role] = States.ALL

    def load(self, needs: Mapping[str, States]) -> None:
        """Sees to it that these roles have these states on their devices, all at the same time.

        Roles that share devices with one of them leave, and so does what one of them does not need itself when another
        of them needs the room.
        """
        self._make_room(needs)
        self._move("onload", {role: what & ~self._resident[role] for role, what in needs.items()})

    def memory(self, phase: str) -> Metrics:
        """Memory of every role after a phase, in GiB: ``memory/<role>/<phase>_<figure>``, the largest of its workers.

        Figures: ``allocated_gb`` by the worker's process on its GPUs and ``device_gb`` in use on them by anybody, or
        ``resident_gb`` of the process in host memory where it has no GPU. A role whose worker is dead has none.
        """
        pending = {name: cluster.submit("memory_gb") for name, cluster in self._clusters.items()}
        metrics: Metrics = {}
        for name, refs in pending.items():
            try:
                workers: list[Metrics] = self._clusters[name].gather(refs, call="memory_gb")
            except ClusterError as error:
                logger.debug("no memory figures: %s", error)
                continue
            for figure in workers[0].keys() & workers[-1].keys():
                metrics[f"memory/{name}/{phase}_{figure}"] = max(worker[figure] for worker in workers)
        return metrics

    def _make_room(self, needs: Mapping[str, States]) -> None:
        leaving = {
            role: resident & ~needs.get(role, _NOTHING)
            for role, resident in self._resident.items()
            if any(self.shares_devices(role, other) for other in needs)
        }
        self._move("offload", leaving)

    def _move(self, call: str, what: Mapping[str, States]) -> None:
        """All roles at the same time."""
        moving = {role: states for role, states in what.items() if states and self._devices[role]}
        pending = {role: self._clusters[role].submit(call, states) for role, states in moving.items()}
        for role, refs in pending.items():
            self._clusters[role].gather(refs, call=call)
            if call == "onload":
                self._resident[role] |= moving[role]
            else:
                self._resident[role] &= ~moving[role]
            logger.debug("%s %s: %s", role, call, moving[role])


def _devices(cluster: Cluster, kinds: Collection[NodeKind]) -> frozenset[int]:
    plan = cluster.placement.plan
    slots = plan.workers(cluster.name)
    return frozenset(device for slot in slots if plan.nodes[slot.node].kind in kinds for device in slot.devices)


_POLL_S = 0.2
_OF_ROLLOUTS = ("tokens_T", "rollout_logprobs_T", "experts_TE")
"""Columns over tokens that come from rollouts, and differ from token to token."""


def plan_optimizer_steps(num_rows: int, steps_per_epoch: int, epochs: int, seed: int) -> list[Tensor]:
    """Shuffles the rows anew in each epoch and cuts them into optimizer steps of nearly equal size; none is left out.

    Returns:
        For each optimizer step its rows, int64; fewer steps when there are fewer rows than steps.
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        rows
        for _ in range(epochs)
        for rows in torch.randperm(num_rows, generator=generator).tensor_split(steps_per_epoch)
        if len(rows)
    ]


def rows_trained_later(steps: Sequence[Tensor]) -> Tensor:
    """int64: the rows of all optimizer steps but the first: those whose policy has moved before they are trained."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *steps[1:]]).unique()


def steps_with_tokens(batch: Batch, steps: Sequence[Tensor]) -> list[Tensor]:
    """The optimizer steps that have something to learn from; masks may have left nothing of others."""
    has_loss_B = batch.loss_tokens_B > 0
    return [rows for rows in steps if has_loss_B[rows].any()]


def take_fetched() -> Metrics:
    """``memory/fetched_gb``: 10⁹ bytes of columns left in blocks that the driver has fetched since the last call."""
    num_bytes, RayBlock.fetched_bytes = RayBlock.fetched_bytes, 0
    return {"memory/fetched_gb": num_bytes / 1e9}


class Scorer(Protocol):
    """Computes a model's log-probs of the tokens of a batch."""

    def submit_logprobs(self, batch: Batch, rows: Tensor | None = None) -> Callable[[], TokenScores]:
        """Starts scoring and returns what waits for the scores: roles on other devices can work meanwhile.

        Args:
            rows: those to score; ``None`` is all. The others' scores are 0.
        """
        ...


class ModelCluster:
    """The cluster of one role that trains or computes log-probs, with its data-parallel layout.

    Args:
        offload_manager: each use of the role has it load what is needed. ``None``: all is on the devices.
        by_work: ranks get equal shares of the model's arithmetic, not of tokens.
    """

    def __init__(self, cluster: Cluster, offload_manager: OffloadManager | None = None, by_work: bool = False) -> None:
        self.cluster = cluster
        self._by_work = by_work
        self.linear: int | None = None
        """See ``Batch.split``; known from ``submit_setup`` on."""
        self._offload_manager = offload_manager
        self._ranks: list[RankInfo] = []
        self.reads = {"experts_TE", "rollout_logprobs_T"}
        """Columns over tokens, besides ids and loss mask, that its scores depend on, or are compared with."""
        self._correction: TrainInferCorrectionConfig | None = None

    def compare(self, correction: TrainInferCorrectionConfig, *, by_age: bool) -> None:
        """Has the ranks compare their log-probs with those of the rollouts as far as the configuration wants it.

        Args:
            correction: whose weights and rejections they compute, as far as they are on.
            by_age: apart for each version that sampled tokens.
        """
        if by_age:
            self.reads.add("rollout_versions_T")
        weight, filters = correction.is_weight, correction.enabled_filters
        if weight.enabled or filters:
            self._correction = correction
        if (weight.enabled and weight.weight_type == "segment") or any(f.agg_type == "segment" for f in filters):
            self.reads.add("turn_T")

    def load_states(self, what: States) -> None:
        """Takes states to the devices; see ``OffloadManager``."""
        if self._offload_manager is not None:
            self._offload_manager.load({self.cluster.name: what})

    def setup(self, context: StrategyContext) -> None:
        """Loads the model on all workers; called again, it starts over."""
        self.gather_setup(self.submit_setup(context))

    def submit_setup(self, context: StrategyContext) -> list[ray.ObjectRef]:
        """Starts loading and returns at once, so that roles load side by side."""
        if self._offload_manager is not None:
            self._offload_manager.reserve(self.cluster.name)
        if self._by_work:
            trusts = context.worker.model_args.trust_remote_code
            sizes = load_config(context.model_path, trust_remote_code=trusts).get_text_config()
            self.linear = 6 * int(sizes.hidden_size)
        self.reads.update(columns_read(context.needs))
        self.cluster.rendezvous()
        return self.cluster.submit_each("setup", [(context.at_rank(rank, self.size),) for rank in range(self.size)])

    def gather_setup(self, refs: list[ray.ObjectRef]) -> None:
        self._ranks = self.cluster.gather(refs, call="setup")

    @property
    def size(self) -> int:
        return self.cluster.world_size

    @property
    def dp_size(self) -> int:
        return self._ranks[0].dp_size

    def store(self, batch: Batch) -> Batch:
        """The batch, what rollouts say of each token in blocks: all roles read it there. Most of it already lies there.

        What does not, as after a resume, is put into blocks here, one for each rank and one for each picture.
        """
        leave((item for row in batch.items_I or () for item in row), RayBlock.put)
        columns = {name: each for name in _OF_ROLLOUTS if isinstance(each := vars(batch)[name], Tensor)}
        if not columns:
            return batch
        parts = [part for part in batch.split(self.dp_size, self.linear) if len(part)]
        blocks = []
        for part in parts:
            place = batch.token_index(part)
            own = {name: column.index_select(0, place) for name, column in columns.items()}
            blocks.append(store(own, batch.lengths_B[part], RayBlock.put))
        return batch.replace(
            **{
                name: joined([block[name] for block in blocks], batch.lengths_B, parts).with_value(column)
                for name, column in columns.items()
            }
        )

    def logprobs(self, batch: Batch) -> TokenScores:
        """Scores the batch, its rows spread over the data-parallel ranks."""
        return self.submit_logprobs(batch)()

    def submit_logprobs(
        self, batch: Batch, rows: Tensor | None = None, adapter: bool = True
    ) -> Callable[[], TokenScores]:
        """Starts scoring, see ``Scorer``."""
        return self._submit("logprobs", batch, rows, adapter)

    def probe_logprobs(self, batch: Batch) -> TokenScores:
        """Scores a batch that is none of the run's."""
        return self._submit("probe_logprobs", batch, None)()

    def _submit(self, call: str, batch: Batch, rows: Tensor | None, *args: Any) -> Callable[[], TokenScores]:
        parts = batch.split(self.dp_size, self.linear, rows)
        scored = batch.only(self.reads)
        shares = [ray.put(scored.select(part)) for part in parts]
        self.load_states(States.WEIGHTS)
        firsts = {rank.dp_rank: rank for rank in reversed(self._ranks)}
        each = [
            (call, shares[rank.dp_rank], rank is firsts[rank.dp_rank], self._correction, *args) for rank in self._ranks
        ]
        refs = self.cluster.submit_each("score", each)
        return partial(self._gather_scores, batch, parts, refs)

    def _gather_scores(self, batch: Batch, parts: list[Tensor], refs: list[ray.ObjectRef]) -> TokenScores:
        """Waits for the scores and puts them back into the batch's order."""
        results: list[TokenScores | None] = self.cluster.gather(refs, call="logprobs")
        shares = {rank.dp_rank: found for rank, found in zip(self._ranks, results, strict=True) if found is not None}
        return TokenScores.joined(batch.lengths_B, parts, [shares[dp_rank] for dp_rank in range(self.dp_size)])

    def submit_train(self, batch: Batch, steps: Sequence[Tensor]) -> list[ray.ObjectRef]:
        """Starts the optimizer steps; each step's rows are spread over the data-parallel ranks, see ``Batch.split``."""
        per_rank: list[list[Tensor]] = [[] for _ in range(self.dp_size)]
        for rows in steps:
            for dp_rank, part in enumerate(batch.split(self.dp_size, self.linear, rows)):
                per_rank[dp_rank].append(part)
        shares = [_own_rows(batch, rank_steps) for rank_steps in per_rank]
        refs = [(ray.put(own), local_steps) for own, local_steps in shares]
        self.load_states(States.ALL)
        return self.cluster.submit_each("train", [refs[rank.dp_rank] for rank in self._ranks])

    def gather_train(self, refs: list[ray.ObjectRef]) -> list[Metrics]:
        """Waits for ``submit_train``: each optimizer step's metrics; every rank reports the same, but for maxima."""
        ranks: list[list[Metrics]] = self.cluster.gather(refs, call="train")
        steps = zip(*ranks, strict=True)
        return [each[0] | {name: max(m[name] for m in each) for name in each[0] if is_maximum(name)} for each in steps]

    def train(self, batch: Batch, steps: Sequence[Tensor]) -> list[Metrics]:
        return self.gather_train(self.submit_train(batch, steps))

    def save(self, path: Path) -> list[WrittenFile]:
        """Writes the role's part of a checkpoint: ``<role>/``, a model folder, and ``resume/<role>/``."""
        self.load_states(States.WEIGHTS | States.OPTIMIZER)
        return [file for of_rank in self.cluster.call("save", path) for file in of_rank]

    def start_save(self, path: Path) -> Callable[[], list[WrittenFile]]:
        """The same, but returns as soon as the ranks have copied their shares to host memory.

        Returns:
            Waits for the end of the writing, which may fail with an ``OSError``; may be called in another thread,
            while the role trains on.
        """
        self.load_states(States.WEIGHTS | States.OPTIMIZER)
        self.cluster.call("start_save", path)

        def wait() -> list[WrittenFile]:
            while None in (told := self.cluster.call("written")):
                time.sleep(_POLL_S)
            if errors := [of_rank for of_rank in told if isinstance(of_rank, OSError)]:
                raise errors[0]  # no rank is writing any more
            return [file for of_rank in told for file in of_rank]

        return wait

    def save_model(self, folder: Path) -> None:
        """Writes the model alone."""
        self.load_states(States.WEIGHTS)
        self.cluster.call("save_model", folder)

    def load(self, path: Path) -> None:
        """Takes over the role's part of a checkpoint."""
        self.load_states(States.WEIGHTS | States.OPTIMIZER)
        self.cluster.call("load", path)

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.cluster.call(method, *args)


class BaseModelReference:
    """The reference of a LoRA run: the actor as it was before its adapter."""

    def __init__(self, actor: ModelCluster) -> None:
        self._actor = actor

    def submit_logprobs(self, batch: Batch, rows: Tensor | None = None) -> Callable[[], TokenScores]:
        return self._actor.submit_logprobs(batch, rows, adapter=False)


def _own_rows(batch: Batch, steps: Sequence[Tensor]) -> tuple[Batch, list[list[int]]]:
    """The rows that one rank needs, and its steps in terms of them."""
    rows, local = torch.cat(list(steps)).unique(return_inverse=True)
    return batch.select(rows), [part.tolist() for part in local.split([len(step) for step in steps])]
