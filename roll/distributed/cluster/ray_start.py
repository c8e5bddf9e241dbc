"""How a local Ray cluster is started otherwise than ``ray.init`` would: with more time, and with less beside it."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

from roll.distributed.replaced import replaced

_STARTED_TOO_SLOWLY = (
    "timed out during startup",  # the node does not register
    "Timed out waiting for file",  # the head does not say at which port it listens
    "Failed to start GCS",  # the head does not answer there
    "Failed to connect to GCS",  # or no longer
)
"""In the messages of the plain exceptions that ``ray.init`` raises."""


def started_too_slowly(error: BaseException) -> bool:
    """Tells whether ``ray.init`` failed because its processes took too long, which a second try may mend."""
    return any(words in str(error) for words in _STARTED_TOO_SLOWLY)


def patience(seconds: float) -> AbstractContextManager[None]:
    """Lets Ray's node take so long to register with its head; Ray itself gives up after 30 s."""
    from ray._private import services

    ask = services.get_node
    deadline = time.monotonic() + seconds

    def ask_until(*args: Any, **options: Any) -> Any:
        while True:
            try:
                return ask(*args, **options)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    return replaced(services, get_node=ask_until)


def bare_node() -> AbstractContextManager[None]:
    """Leaves out what Ray starts beside its head and node and this library does not use.

    The autoscaler's monitor, the reader of log files (whose output nobody asks for) and the dashboard's server, for
    whose start ``ray.init`` waits, are a Python process each: they would take seconds from the start of a run.
    """
    from ray._private.node import Node

    def start_api_server(node: Any, **options: Any) -> None:
        node._webui_url = ""  # what Ray notes of a server without a page

    def start_nothing(node: Any) -> None:
        pass

    return replaced(
        Node, start_api_server=start_api_server, start_log_monitor=start_nothing, start_monitor=start_nothing
    )
