"""From a checked configuration to an exit code: Ray, clusters, models, the run, and leaving nothing behind."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

from roll.configs.agentic import AgenticConfig
from roll.configs.batches import describe_batches
from roll.configs.rl import TINY
from roll.configs.worker import WorkerConfig
from roll.distributed.executor.cluster import Cluster
from roll.distributed.executor.errors import ClusterError, PlacementError, RaySessionError
from roll.distributed.executor.placement import create_placement, discover_nodes
from roll.distributed.executor.ray_session import ray_session
from roll.distributed.executor.resources import plan_placement
from roll.distributed.executor.worker import Worker
from roll.pipeline.agentic.env_roles import EnvRoles
from roll.pipeline.agentic.env_worker import EnvironmentWorker
from roll.pipeline.agentic.pipeline import AgenticPipeline
from roll.pipeline.agentic.warm_start import WarmStartError, ensure_init, ensure_warm
from roll.pipeline.base import TrainingDivergedError, set_losses
from roll.pipeline.checks import role_requests
from roll.pipeline.roles import Roles
from roll.pipeline.session import RunSession
from roll.pipeline.workers import InferWorker, ScoreWorker, TrainWorker
from roll.tracking.checkpointer import CheckpointError
from roll.utils.registry import UnknownNameError, import_path
from roll.utils.signals import Interrupted, SignalGuard

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

WORKERS: dict[str, type[Worker]] = {
    "actor_train": TrainWorker,
    "actor_infer": InferWorker,
    "critic": TrainWorker,
    "reference": ScoreWorker,
    "train_env_manager": EnvironmentWorker,
    "val_env_manager": EnvironmentWorker,
}

EXPECTED_ERRORS = (
    CheckpointError,
    ClusterError,
    RaySessionError,
    TrainingDivergedError,
    UnknownNameError,
    WarmStartError,
    FileNotFoundError,
    ValueError,
)
"""What a user can cause or must be told without a traceback; anything else is a bug and shows one."""


def run_agentic(config: AgenticConfig, started: float | None = None) -> int:
    """Runs the agentic pipeline to its end.

    Args:
        config: a checked configuration.
        started: ``time.time()`` at launch; now, if not given.

    Returns:
        The process's exit code: 0, 1 (failed), 2 (this cluster cannot hold the roles), 130 or 143 (interrupted).
    """
    try:
        with SignalGuard() as signals, RunSession(config, started or time.time()) as session:
            _run(config, session, signals)
    except Interrupted as stop:
        return stop.exit_code
    except PlacementError as error:
        logger.error("%s", error)
        return EXIT_USAGE
    except EXPECTED_ERRORS as error:
        logger.error("%s: %s", type(error).__name__, error)
        return EXIT_FAILED
    return EXIT_OK


def _run(config: AgenticConfig, session: RunSession, signals: SignalGuard) -> None:
    for line in describe_batches(config):
        session.display.note(line)
    tiny = config.pretrain == TINY
    model_path = str(ensure_init(config)) if tiny else config.pretrain
    with session.phase("start"):
        ray = ray_session(ray_options(config), config.system_envs, log_dir=session.folder.logs / "workers")
    with ray, start_clusters(config, session) as clusters:
        roles = Roles(config, clusters)
        envs = EnvRoles(config, clusters, roles, model_path, on_tick=signals.check)
        envs.begin_setup()
        if tiny:
            model_path = str(ensure_warm(config, session, roles, envs))
        with session.phase("setup"):
            roles.setup(model_path, config.reward_pretrain or model_path, config.total_optimizer_steps)
            set_losses(roles, config)
            envs.wait_ready()
        AgenticPipeline(config, session, roles, signals, envs).run()


def ray_options(config: AgenticConfig) -> dict[str, object]:
    """``ray_init`` as arguments of ``ray.init``."""
    options = config.ray_init.model_dump(exclude_none=True)
    if "object_store_memory_mb" in options:
        options["object_store_memory"] = options.pop("object_store_memory_mb") << 20
    return options


@contextmanager
def start_clusters(config: AgenticConfig, session: RunSession) -> Iterator[Mapping[str, Cluster]]:
    """Places and starts the workers of all roles; they are gone when the block is left.

    Raises:
        PlacementError: the Ray cluster has too few devices.
    """
    plan = plan_placement(role_requests(config), discover_nodes())
    for line in plan.describe():
        logger.info("%s", line)
    placement = create_placement(plan)
    clusters: dict[str, Cluster] = {}
    try:
        with session.phase("start workers"):
            for name, worker in config.clusters.items():
                clusters[name] = Cluster(
                    name,
                    _worker_class(name, worker),
                    placement,
                    system_envs={**config.system_envs, **worker.system_envs},
                    rpc_timeout=config.rpc_timeout,
                )
                clusters[name].launch()
            for cluster in clusters.values():
                cluster.wait_ready()
        yield clusters
    finally:
        for cluster in clusters.values():
            cluster.shutdown()
        placement.remove()


def _worker_class(role: str, worker: WorkerConfig) -> type[Worker]:
    if worker.worker_cls is None:
        return WORKERS[role]
    chosen = import_path(worker.worker_cls, f"{role}.worker_cls")
    if not (isinstance(chosen, type) and issubclass(chosen, WORKERS[role])):
        raise UnknownNameError(f"{role}.worker_cls: {worker.worker_cls} is no subclass of {WORKERS[role].__name__}")
    return cast(type[Worker], chosen)
