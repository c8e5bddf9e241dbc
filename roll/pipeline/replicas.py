"""Generating workers: copies of the policy that have one version of its weights, and what to do when one dies."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

from roll.configs.pipeline import PipelineConfig
from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.errors import WorkerDiedError
from roll.distributed.strategy.base import States, StrategyContext
from roll.distributed.weights.sync import WeightSync
from roll.pipeline.offload_manager import OffloadManager

logger = logging.getLogger(__name__)


class RestartBudget:
    """Dead workers that a run may still replace."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spent = 0

    def spend(self, dead: Sequence[tuple[Cluster, int]], during: str, error: BaseException) -> None:
        """Counts the dead (cluster, rank) and says so.

        Raises:
            WorkerDiedError: there are more than may be replaced.
        """
        self._spent += len(dead)
        if self._spent > self._limit:
            cluster, rank = dead[0]
            limit = f"max_worker_restarts={self._limit} {'is' if self._limit else 'allows no restart; it is'} used up"
            raise WorkerDiedError(cluster.name, rank, during, Cluster.current_step, f"{limit} ({error})") from error
        for cluster, rank in dead:
            logger.warning("%s rank %d died in %s and is replaced: %s", cluster.name, rank, during, error)


class Replicas:
    """The generating workers of one role.

    Args:
        on_replaced: called after an update of weights in which some were replaced; they have other handles then.
        beside: clusters whose models score while these generate, and so are on their devices at the same time.
    """

    def __init__(
        self,
        cluster: Cluster,
        actor: Cluster,
        config: PipelineConfig,
        offload_manager: OffloadManager,
        restarts: RestartBudget,
        on_replaced: list[Callable[[], None]],
        beside: Sequence[str] = (),
    ) -> None:
        self.cluster = cluster
        self._actor = actor
        self._config = config
        self._offload_manager = offload_manager
        self._restarts = restarts
        self._on_replaced = on_replaced
        self._beside = dict.fromkeys(beside, States.WEIGHTS)

    def begin_setup(self, context: StrategyContext) -> None:
        """Starts to load the policy and returns at once; called again, it starts over."""
        self._context = context
        self._offload_manager.reserve(self.cluster.name)
        self._loading = self.cluster.submit("setup", context, self._continuous)

    def finish_setup(self, *, trains_between: bool) -> None:
        """Waits for ``begin_setup``; ``trains_between``: see ``WeightSync``."""
        self.cluster.gather(self._loading, call="setup")
        self._weights = WeightSync(
            self._actor,
            self.cluster,
            bucket_bytes=self._config.model_update_buffer_size_mb << 20,
            check=self._config.check_weight_update,
            adapter_only=self._context.lora is not None,
            trains_between=trains_between,
        )

    @property
    def version(self) -> int:
        """Version of the weights that they have; -1: those that they loaded at their start."""
        return self._weights.version

    def sync(self, version: int) -> None:
        """Sends them the actor's weights, see ``WeightSync``; they are then ready to generate.

        One that dies meanwhile is replaced.

        Raises:
            WorkerDiedError: ``max_worker_restarts`` is used up, or another worker died.
        """
        self._load_both()
        try:
            self._weights.sync(version)
        except WorkerDiedError as error:
            self._replace(error)
        self.prepare()

    def drain(self) -> None:
        """Waits until no request is in flight; new ones wait for the next update of weights."""
        self.prepare()
        for rank, ref in enumerate(self.cluster.submit("drain")):
            with contextlib.suppress(WorkerDiedError):  # the update replaces it
                self.cluster.gather([ref], call="drain", ranks=[rank])

    def prepare(self) -> None:
        """Gives them their devices, and those who score what they generate theirs."""
        self._offload_manager.load({self.cluster.name: States.ALL, **self._beside})

    def restart(self, ranks: Sequence[int]) -> None:
        """Starts dead ones anew with the weights that the others have.

        Raises:
            WorkerDiedError: as ``sync``.
        """
        for rank in ranks:
            self.cluster.restart(rank)
        self.prepare()  # a worker that loads its model takes all of its device's room
        for rank in ranks:
            self.cluster.call_rank(rank, "setup", self._context, self._continuous)
        self._load_both()
        try:
            self._weights.restore(*ranks)
        except WorkerDiedError as error:
            self._replace(error)
        self.prepare()

    @property
    def _continuous(self) -> bool:
        return self._config.generate_opt_level == 1

    def _replace(self, error: WorkerDiedError) -> None:
        """After an update in which some died."""
        if error.role != self.cluster.name:
            raise error
        dead = {error.rank, *(rank for rank, alive in enumerate(self.cluster.alive()) if not alive)}
        self._restarts.spend([(self.cluster, rank) for rank in sorted(dead)], "an update of weights", error)
        self.restart(sorted(dead))
        for tell in self._on_replaced:
            tell()

    def _load_both(self) -> None:
        """Sender and receivers of weights, and nothing more where they share devices: no cache of a generator."""
        self._offload_manager.load({self._actor.name: States.WEIGHTS, self.cluster.name: States.WEIGHTS})
