"""Workers of several roles on Ray, as a run has them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from roll.distributed.cluster.cluster import Cluster, create_placement, discover_nodes
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.cluster.resources import RoleRequest, plan_placement
from tests.support.warm.start import warm_workers


@contextmanager
def launched(workers: Mapping[RoleRequest, type[Any]], **options: Any) -> Iterator[list[Cluster]]:
    """Clusters of workers of these classes, which begin to start at once, until the end of the block.

    Args:
        options: of all clusters.
    """
    placement = create_placement(plan_placement([*workers], discover_nodes()))
    clusters = [Cluster(request.name, worker, placement, **options) for request, worker in workers.items()]
    for cluster in clusters:
        cluster.launch()
    try:
        yield clusters
    finally:
        for cluster in clusters:
            cluster.shutdown()
        placement.remove()


@contextmanager
def local_clusters(workers: Mapping[RoleRequest, type[Any]], **options: Any) -> Iterator[list[Cluster]]:
    """The same on a Ray of their own with two CPUs."""
    options = {"system_envs": {"OMP_NUM_THREADS": "1"}, **options}
    session = ray_session({"num_cpus": 2, "object_store_memory": 2**27})
    with warm_workers(), session, launched(workers, **options) as clusters:
        yield clusters
