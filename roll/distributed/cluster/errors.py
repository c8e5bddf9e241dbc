"""Failures between the driver and its workers, one class per kind that a caller can handle.

Every class hands its fields to ``Exception.__init__`` so that it survives the way through Ray's serialisation.
"""

from __future__ import annotations


class PlacementError(ValueError):
    """The roles do not fit on the cluster."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__(problems)
        self.problems = problems
        """Everything that is wrong, one line each: ``role: what it got, what it expected``."""

    def __str__(self) -> str:
        return "\n".join(self.problems)


class RaySessionError(ConnectionError):
    """No Ray cluster could be joined or started."""


class ClusterError(RuntimeError):
    """A worker, not the code it ran, failed. Catch this to restart workers or to stop with a checkpoint."""


class WorkerDiedError(ClusterError):
    """A worker's process is gone: killed, out of memory, crashed, or its node was lost."""

    def __init__(self, role: str, rank: int, call: str, step: int | None, reason: str) -> None:
        super().__init__(role, rank, call, step, reason)
        self.role = role
        self.rank = rank
        self.call = call
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} died in {self.call}{_at(self.step)}: {self.reason}"


class NodeLostError(WorkerDiedError):
    """A worker cannot be replaced, as its node is gone, and its devices with it."""


class RpcTimeoutError(ClusterError, TimeoutError):
    """Some workers did not reply in time; their processes may still be running."""

    def __init__(self, role: str, ranks: tuple[int, ...], call: str, step: int | None, seconds: float) -> None:
        super().__init__(role, ranks, call, step, seconds)
        self.role = role
        self.ranks = ranks
        self.call = call
        self.step = step
        self.seconds = seconds
        """Time that the caller waited."""

    def __str__(self) -> str:
        return f"{self.words} (rpc_timeout)"

    @property
    def words(self) -> str:
        """Message that tells who was asked for what, and for how long."""
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        return f"{self.role} {who}: {self.call}{_at(self.step)} has not returned in {self.seconds:.1f} s"


class StoreFullError(ClusterError):
    """Ray's object store on a node holds no more, and neither does the disk to which the rest goes."""

    def __init__(self, role: str, call: str, step: int | None, num_bytes: int | None, state: str) -> None:
        super().__init__(role, call, step, num_bytes, state)
        self.role, self.call, self.step, self.num_bytes, self.state = role, call, step, num_bytes, state

    def __str__(self) -> str:
        what = "what it returns" if self.num_bytes is None else f"its arguments, {self.num_bytes / 2**20:,.1f} MiB"
        return (
            f"{self.role}.{self.call}{_at(self.step)}: Ray's object store has no room for {what}. {self.state} It is "
            "filled by batches on their way to workers, and by finished rollouts that wait for their step. Set "
            "ray_init.object_store_memory_mb higher (below the size of /dev/shm), free disk space, or make steps "
            "smaller: rollout_batch_size, response_length, max_running_groups, async_generation_ratio"
        )


class RowsLostError(ClusterError):
    """Rows of a step are gone with the node or the process that held them."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"rows of this step are lost with the node or the process that held them: {self.reason} Resume from the "
            "last checkpoint, which has what was not trained on"
        )


class StallError(ClusterError):
    """No process of the run has done anything for ``stall_timeout`` seconds."""


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"
