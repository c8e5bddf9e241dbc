"""The check in a process of its own, which an environment may end."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from roll.configs.problems import ConfigErrors
from roll.extras.env_check import check_env
from roll.extras.env_check.findings import Finding, Report
from roll.utils.children import ending


def check_in_child(env_type: str, env_config: Mapping[str, Any], tell: Callable[[str], None], **options: Any) -> Report:
    """``check_env`` in another process; where that one ends, the report says so.

    Raises:
        ValueError: what ``check_env`` refuses.
    """
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=_check, args=(theirs, env_type, env_config, options))
    child.start()
    theirs.close()
    tried: list[str] = []
    try:
        while True:
            said = ours.recv()
            if isinstance(said, Report):
                return said
            if isinstance(said, ValueError):
                raise said
            tried.append(said)
            tell(said)
    except EOFError:
        child.join()
        words = f"{ending(child.exitcode or 0)}; tried at that time: {tried[-1] if tried else 'the import'}"
        return Report(env_type, (Finding("ends-process", words),), tuple(tried), ())
    finally:
        child.kill()
        child.join()
        ours.close()


def _check(pipe: Connection, env_type: str, env_config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    try:
        pipe.send(check_env(env_type, env_config, tell=pipe.send, **options))
    except (ConfigErrors, ValueError) as error:
        pipe.send(ValueError(str(error)))
