"""The clusters that run episodes: set up, connected to the engines, and replaced when they fail."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from roll.configs.pipeline import PipelineConfig
from roll.configs.rl import RLConfig
from roll.distributed.cluster.cluster import NODE_VERDICT_S
from roll.pipeline.session import RunFailedError
from roll.pipeline.start import RunContext
from roll.rewards.types import RewardError, SandboxUnavailableError
from roll.rollout.endpoint.errors import PortTakenError
from roll.rollout.plans import RolloutPlan
from roll.rollout.schedule import Schedule
from roll.rollout.scheduler import RolloutScheduler
from roll.utils.registry import UnknownNameError

_LOOK_S = 0.5
"""Between two looks at who is dead."""


class RolloutWorkers(ABC):
    """Workers that run episodes, and what they need besides the engines.

    Args:
        contexts: what each of their clusters is set up with.
    """

    train: RolloutScheduler
    """Runs the training groups, if the run trains."""

    def __init__(self, config: PipelineConfig, run: RunContext, contexts: Mapping[str, tuple[Any, ...]]) -> None:
        self._config = config
        self._clusters = {name: run.clusters[name] for name in contexts}
        self._contexts = contexts
        self._roles = run.roles
        self._on_tick = run.signals.check
        self._known_restarts = Counter[bool]()
        """Replaced workers that evaluations (True) and rollouts (False) have allowed for."""
        run.roles.on_replaced.append(self.connect)

    def make_scheduler(
        self, plan: RolloutPlan, cluster: str, *, trains: bool = False, evaluates: bool = False
    ) -> RolloutScheduler:
        """A scheduler over the workers of one cluster.

        Args:
            trains: its groups are trained on.
            evaluates: ``Roles.evaluation_replicas`` answer.
        """
        config, options = self._config, dict[str, Any]()
        if trains:
            assert isinstance(config, RLConfig)
            replay = None if config.replay_schedule is None else Schedule.read(Path(config.replay_schedule))
            options = {"beside": config.overlaps, "replay": replay, "max_running": config.max_running_groups}
        recover = partial(self.recover, evaluates=evaluates)
        return RolloutScheduler(plan, self._clusters[cluster], recover, config.rpc_timeout, self._on_tick, **options)

    def begin_setup(self) -> None:
        """Starts the set-up of the workers and returns at once."""
        for name in self._roles.scorers:
            self._roles.offload_manager.reserve(name)
        self._setup = {name: cluster.submit("setup", *self._contexts[name]) for name, cluster in self._clusters.items()}

    def wait_ready(self) -> None:
        """Waits for ``begin_setup`` and connects the workers to the engines.

        Raises:
            RunFailedError: a verifier, a tool or an agent program could not be set up.
        """
        try:
            for name, cluster in self._clusters.items():
                cluster.gather(self._setup[name], call="setup")
        except (PortTakenError, RewardError, SandboxUnavailableError, UnknownNameError) as error:
            raise RunFailedError(str(error)) from error
        self.connect()

    @abstractmethod
    def connect(self) -> None:
        """Tells the workers where the engines are."""

    def recover(self, error: BaseException, *, evaluates: bool) -> None:
        """Brings dead workers back, those that generate for them included, unless that has been done since.

        The others that generate are left to the update of weights that precedes their next work: the trainer's present
        weights may not be theirs.

        Raises:
            WorkerDiedError: ``max_worker_restarts`` is used up.
            BaseException: ``error`` itself, when nothing is, was or is soon found dead.
        """
        replicas = self._roles.evaluation_replicas if evaluates else self._roles.rollout_replicas
        clusters = [replicas.cluster, *self._clusters.values()]
        deadline = time.monotonic() + NODE_VERDICT_S
        while not (dead := [(cluster, *each) for cluster in clusters for each in cluster.dead().items()]):
            if self._num_restarts() != self._known_restarts[evaluates]:
                self._known_restarts[evaluates] = self._num_restarts()
                return
            if time.monotonic() > deadline:
                raise error
            self._on_tick()
            time.sleep(_LOOK_S)
        self._roles.restarts.spend(dead, "a rollout", error)
        for cluster, rank, _ in dead:
            if cluster is not replicas.cluster:
                cluster.restart(rank)
                cluster.call_rank(rank, "setup", *self._contexts[cluster.name])
        if generators := [rank for cluster, rank, _ in dead if cluster is replicas.cluster]:
            replicas.restart(generators)
        self.connect()
        self._known_restarts[evaluates] = self._num_restarts()

    def _num_restarts(self) -> int:
        generating = {self._roles.rollout_replicas.cluster, self._roles.evaluation_replicas.cluster}
        return sum(sum(cluster.restarts) for cluster in [*generating, *self._clusters.values()])
