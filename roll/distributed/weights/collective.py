"""A process group of one sender and its receivers, separate from those of their engines.

``torch.distributed`` has one default group per process, which belongs to the engine; this one is made of the backend
itself. Its store listens on the sender's address only, which is loopback unless the Ray cluster has several nodes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from roll.distributed.weights.messages import Invitation

_POLL_S = 0.0005
_CHECK_S = 0.5
_numbers = itertools.count()


class BroadcastGroup:
    """One member's side. Rank 0 sends."""

    def __init__(self, invitation: Invitation, rank: int, store: Any, own_host: str) -> None:
        """Meets the other members: with gloo at once, with nccl in the first broadcast.

        Args:
            rank: 0 is the sender.
            own_host: the address at which this process listens (gloo).

        Raises:
            RuntimeError: some member did not come in time.
        """
        import torch.distributed as dist

        timeout, size = timedelta(seconds=invitation.timeout_s), invitation.world_size
        store = dist.PrefixStore(invitation.group, store)
        self.name = invitation.group
        self._store = store
        self._group: Any
        if invitation.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            with _errors_that_leave_the_process():
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timeout
            options._devices = [gloo.create_device(hostname=own_host)]
            self._group = gloo(store, rank, size, options)

    def broadcast(self, data: Tensor, check: Callable[[], None] = lambda: None) -> None:
        """Sends rank 0's uint8 ``data`` into everybody else's, which has the same length.

        Args:
            check: called now and then while it waits; may raise to give up.

        Raises:
            RuntimeError: a member is gone, or took too long.
        """
        work = self._group.broadcast(data, root=0)
        checked = time.monotonic()
        while not work.is_completed():
            time.sleep(_POLL_S)
            if time.monotonic() > checked + _CHECK_S:
                check()
                checked = time.monotonic()
        work.wait()
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()

    def close(self) -> None:
        """Leaves the group at once; the others notice with their next broadcast."""
        with contextlib.suppress(RuntimeError):  # whatever broke it has been reported
            self._group.abort()
        self._group = self._store = None


@contextlib.contextmanager
def _errors_that_leave_the_process() -> Iterator[None]:
    """A group that is made here aborts when a member is lost; by nccl's default, a trainer's process would end."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"  # clean up only
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def invite(host: str, backend: Any, world_size: int, timeout_s: float) -> tuple[Invitation, Any]:
    """Opens a store at ``host`` and says how to reach it."""
    import torch.distributed as dist

    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    group = f"weights-{os.getpid()}-{next(_numbers)}"
    return Invitation(group, host, port, backend, world_size, timeout_s), store


def join(invitation: Invitation, rank: int, own_host: str) -> BroadcastGroup:
    """Comes to where the sender has opened a store."""
    import torch.distributed as dist

    timeout = timedelta(seconds=invitation.timeout_s)
    store = dist.TCPStore(invitation.host, invitation.port, is_master=False, timeout=timeout)
    return BroadcastGroup(invitation, rank, store, own_host)
