"""The environment managers of a run: their clusters and the schedulers that collect from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from roll.agentic.env import path_of
from roll.agentic.env_manager import Limits
from roll.agentic.types import SamplingParams
from roll.configs.agentic import MANAGERS, AgenticConfig
from roll.configs.env import EnvManagerConfig
from roll.distributed.executor.cluster import Cluster
from roll.distributed.executor.errors import WorkerDiedError
from roll.distributed.scheduler.rollout_scheduler import GroupPlan, RolloutScheduler
from roll.pipeline.agentic.env_worker import EnvWorkerContext
from roll.pipeline.roles import Roles

logger = logging.getLogger(__name__)


class EnvRoles:
    """Training and validation environments.

    Args:
        config: the run's configuration.
        clusters: started clusters by role name.
        roles: the model roles; their generating workers answer the environments' requests.
        tokenizer_path: folder with the policy's tokenizer.
        on_tick: called at least once a second during rollouts; may raise to stop.
    """

    def __init__(
        self,
        config: AgenticConfig,
        clusters: Mapping[str, Cluster],
        roles: Roles,
        tokenizer_path: str,
        on_tick: Callable[[], None],
    ) -> None:
        self._config = config
        self._roles = roles
        self._clusters = {name: clusters[name] for name in MANAGERS}
        self._contexts = {name: _worker_context(config, getattr(config, name), tokenizer_path) for name in MANAGERS}
        self._restarts = 0
        self._on_tick = on_tick
        extra = config.max_additional_running_prompts if config.is_use_additional_prompts else 0
        self.train = self.scheduler("train_env_manager", "train", extra_groups=extra)
        self.val = self.scheduler("val_env_manager", "val")
        self.val_greedy = self.scheduler("val_env_manager", "val", greedy=True)

    def scheduler(self, name: str, seed_name: str, *, extra_groups: int = 0, **plan: Any) -> RolloutScheduler:
        """A scheduler over one manager's workers; ``seed_name`` separates its episodes from everybody else's.

        Args:
            name: ``train_env_manager`` or ``val_env_manager``.
            seed_name: part of the seeds of its groups.
            extra_groups: see ``RolloutScheduler``.
            **plan: fields of ``GroupPlan`` that differ from the manager's configuration.
        """
        manager: EnvManagerConfig = getattr(self._config, name)
        defaults = GroupPlan(
            tags=tuple(manager.tags),
            slots_per_tag=tuple(manager.groups_per_tag.values()),
            group_size=manager.group_size,
            redundancy=manager.group_size_redundancy,
            seed=self._config.seed,
            name=seed_name,
        )
        return RolloutScheduler(
            replace(defaults, **plan),
            self._clusters[name],
            self.recover,
            self._config.rpc_timeout,
            extra_groups,
            self._on_tick,
        )

    def begin_setup(self) -> None:
        """Starts building the environment managers in their workers and returns at once."""
        self._setup = {name: cluster.submit("setup", self._contexts[name]) for name, cluster in self._clusters.items()}

    def wait_ready(self) -> None:
        """Waits for ``begin_setup`` and connects the workers to the engines."""
        for name, cluster in self._clusters.items():
            cluster.gather(self._setup[name], call="setup")
        self._connect()

    def recover(self, error: BaseException) -> None:
        """Brings dead generating and environment workers back.

        Raises:
            WorkerDiedError: ``max_worker_restarts`` is used up.
            BaseException: ``error`` itself, when nothing is dead.
        """
        clusters = [self._roles.infer, *self._clusters.values()]
        dead = [(cluster, rank) for cluster in clusters for rank, alive in enumerate(cluster.alive()) if not alive]
        if not dead:
            raise error
        self._restarts += len(dead)
        if self._restarts > (limit := self._config.max_worker_restarts):
            cluster, rank = dead[0]
            reason = f"max_worker_restarts={limit} {'is' if limit else 'allows no restart; it is'} used up ({error})"
            raise WorkerDiedError(cluster.name, rank, "the rollout", Cluster.current_step, reason) from error
        for cluster, rank in dead:
            logger.warning("%s rank %d died in a rollout and is replaced: %s", cluster.name, rank, error)
            self._restart(cluster, rank)
        self._connect()

    def _restart(self, cluster: Cluster, rank: int) -> None:
        if cluster is self._roles.infer:
            self._roles.restart_generator(rank)
        else:
            cluster.restart(rank)
            cluster.call_rank(rank, "setup", self._contexts[cluster.name])

    def _connect(self) -> None:
        for cluster in self._clusters.values():
            cluster.call("set_engines", self._roles.infer.handles)


def _worker_context(config: AgenticConfig, manager: EnvManagerConfig, tokenizer_path: str) -> EnvWorkerContext:
    sampling = config.sampling(manager)
    assert sampling.max_new_tokens is not None, "AgenticConfig.sampling fills it in"
    return EnvWorkerContext(
        # Registered names are known in this process only.
        envs={
            tag: env.model_copy(update={"env_type": path_of(env.env_type)})
            for tag, env in config.played_envs(manager).items()
        },
        tokenizer_path=tokenizer_path,
        template=config.actor_train.data_args.template,
        params=SamplingParams(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature if sampling.do_sample else 0.0,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            stop=tuple(sampling.stop_strings or ()),
        ),
        limits=Limits(config.prompt_length, config.sequence_length),
        retries=manager.env_retries,
    )
