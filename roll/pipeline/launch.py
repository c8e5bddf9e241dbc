"""Runs a checked configuration, up to the exit code: Ray, clusters, stacks when a call hangs, and clean-up."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar, cast

import torch

from roll.algorithms.quantities import Quantity
from roll.configs.engines.card import kind_of
from roll.configs.pipeline import PipelineConfig
from roll.configs.problems import ConfigErrors
from roll.configs.resuming import Rows
from roll.configs.rl import VAL_INFER
from roll.configs.worker import WorkerConfig
from roll.distributed.cluster.cluster import Cluster, Placement, Worker, create_placement, discover_nodes
from roll.distributed.cluster.errors import ClusterError, PlacementError, RaySessionError
from roll.distributed.cluster.hangs import StallWatch, explained
from roll.distributed.cluster.ray_session import dead_daemons, ray_session
from roll.distributed.cluster.resources import plan_placement
from roll.pipeline.cli import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, EXIT_USAGE, report
from roll.pipeline.profiling import nsight_options
from roll.pipeline.programs import Program
from roll.pipeline.roles import Roles
from roll.pipeline.session import RunFailedError, RunSession, StoppedByWatchError
from roll.pipeline.start import RunContext, start_of
from roll.pipeline.workers import InferWorker, ScoreWorker, TrainWorker
from roll.preflight.choices import role_requests
from roll.preflight.models import (
    describe_adapter,
    quantised_generators,
    trusted_code,
    untested_options,
    untried_models,
)
from roll.preflight.templates import describe_template
from roll.tracking.checkpointer import CheckpointError
from roll.tracking.display import NOTED
from roll.utils.memory import keep_freed_memory, relax_gc
from roll.utils.registry import UnknownNameError, import_path, plugin_variables
from roll.utils.signals import Interrupted, SignalGuard

logger = logging.getLogger(__name__)

STACKS = "stacks.txt"
"""What every process did when a call took too long or nothing moved, in the folder of logs."""

ConfigT = TypeVar("ConfigT", bound=PipelineConfig)
WorkerClasses = Mapping[str, type[Worker]]

MODEL_WORKERS: WorkerClasses = {
    "actor_train": TrainWorker,
    "actor_infer": InferWorker,
    VAL_INFER: InferWorker,
    "critic": TrainWorker,
    "reference": ScoreWorker,
    "teacher": ScoreWorker,
}

EXPECTED_ERRORS = (
    CheckpointError,
    ClusterError,
    RaySessionError,
    RunFailedError,
    UnknownNameError,
    OSError,
    ValueError,
)
"""Errors that a user can cause, shown without a traceback; anything else is a bug and shows one."""


Body = Callable[[ConfigT, RunContext], None]


def launch(
    config: ConfigT,
    program: Program,
    body: Body[ConfigT],
    workers: WorkerClasses,
    *,
    needs: tuple[Quantity, ...],
    notes: Sequence[str] = (),
    started: float | None = None,
    data: Mapping[str, Rows] | None = None,
) -> int:
    """Starts the clusters of a configuration and runs ``body`` with them.

    Args:
        body: the pipeline's own part; what the run starts from is found or made while the clusters come up.
        workers: classes by kind of cluster; clusters without one have their place but are not started.
        needs: what the losses take from the trained model's distributions.
        notes: lines to show first, such as the batch arithmetic in words.
        data: the datasets that were read, by the section that names them.

    Returns:
        The process's exit code: 0, 1 (failed), 2 (this cluster cannot hold the roles, or the run to resume had other
        data), 3 (stopped by a watch), 130, 143 or 129 (interrupted).
    """
    try:
        session = RunSession(config, started or time.time(), data)
        if session.is_finished:
            session.display.note(
                f"run {config.exp_name} is finished at step {config.max_steps} ({session.resume_path}): nothing to do"
            )
            return EXIT_OK
        with SignalGuard() as signals, session, signals.named():
            for warnings in (trusted_code, untried_models, quantised_generators, untested_options):
                for line in warnings(config):
                    logger.warning("%s", line)
            for line in (*notes, *describe_adapter(config)):
                session.display.note(line)
            with ExitStack() as stack:
                thread = stack.enter_context(ThreadPoolExecutor(1))
                start = thread.submit(start_of, config, program)
                template = thread.submit(describe_template, config)
                with session.phase("start"):
                    logs = session.folder.logs / "workers"
                    stack.enter_context(
                        ray_session(
                            ray_options(config), config.system_envs, log_dir=logs, on_daemon_death=signals.stop_for
                        )
                    )
                clusters = stack.enter_context(start_clusters(config, session, workers))
                path = session.folder.logs / STACKS
                watch = StallWatch(clusters, path, config.stall_timeout, signals.stop_for, session.display.doing)
                stack.enter_context(watch)
                for line in template.result():
                    session.display.note(line)
                relax_gc()  # finished groups wait in this process
                keep_freed_memory()
                roles = Roles(config, clusters, needs)
                body(config, RunContext(program, session, signals, clusters, roles, start.result()))
    except Interrupted as stop:
        return stop.exit_code
    except ConfigErrors as errors:
        sys.stderr.write(report(errors, config.exp_name))
        return EXIT_USAGE
    except PlacementError as error:
        logger.error("%s", error)
        return EXIT_USAGE
    except StoppedByWatchError as error:
        logger.error("%s", error)
        return EXIT_STOPPED
    except EXPECTED_ERRORS as error:
        logger.error("%s: %s", type(error).__name__, error)
        return EXIT_FAILED
    return EXIT_OK


def ray_options(config: PipelineConfig) -> dict[str, object]:
    """``ray_init`` as arguments of ``ray.init``."""
    options = config.ray_init.model_dump(exclude_none=True)
    if "object_store_memory_mb" in options:
        options["object_store_memory"] = options.pop("object_store_memory_mb") << 20
    return options


@contextmanager
def start_clusters(
    config: PipelineConfig, session: RunSession, workers: WorkerClasses
) -> Iterator[Mapping[str, Cluster]]:
    """Places and starts the workers of all roles; they are gone when the block is left.

    Raises:
        PlacementError: the Ray cluster has too few devices.
    """
    plan = plan_placement(role_requests(config), discover_nodes())
    if any(node.kind == "cpu" for node in plan.nodes):
        torch.set_num_threads(1)  # workers have all cores: a second thread of the driver would wait for theirs to pause
    for line in plan.describe():  # as wide as a terminal, which would wrap it behind a record's date and level
        session.display.note(line)
        logger.info("%s", line, extra=NOTED)
    placement = create_placement(plan)
    clusters: dict[str, Cluster] = {}
    try:
        with explained(clusters, session.folder.logs / STACKS):
            with session.phase("start workers"):
                for name in config.clusters:
                    if kind_of(name) not in workers:
                        continue
                    clusters[name] = _cluster(config, name, placement, workers, session.folder.profile)
                    clusters[name].launch()
                for cluster in clusters.values():
                    cluster.wait_ready()
            yield clusters
    finally:
        if not dead_daemons():  # without its head, Ray would wait for a minute and then end this process
            for cluster in clusters.values():
                cluster.shutdown()
            placement.remove()


def _cluster(config: PipelineConfig, name: str, placement: Placement, workers: WorkerClasses, profile: Path) -> Cluster:
    worker = config.clusters[name]
    return Cluster(
        name,
        _worker_class(name, worker, workers[kind_of(name)]),
        placement,
        system_envs={**config.system_envs, **plugin_variables(config.plugins), **worker.system_envs},
        rpc_timeout=config.rpc_timeout,
        nsight=nsight_options(config.profiler, name, worker.num_workers, profile) if name in config.roles else None,
    )


def _worker_class(role: str, worker: WorkerConfig, default: type[Worker]) -> type[Worker]:
    if worker.worker_cls is None:
        return default
    chosen = import_path(worker.worker_cls, f"{role}.worker_cls")
    if not (isinstance(chosen, type) and issubclass(chosen, default)):
        raise UnknownNameError(f"{role}.worker_cls: {worker.worker_cls} is not a subclass of {default.__name__}")
    return cast(type[Worker], chosen)
