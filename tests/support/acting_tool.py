"""A tool that does whatever it is told, also to the process that it runs in. It is found by path and imports little."""

import os
import subprocess
import sys
import time
from typing import Any

from roll.agentic.tools.tool import Tool, ToolError, ToolSchema

CALLS: list[str] = []


def act(what: str, path: str = "") -> Any:
    """Does it."""
    CALLS.append(what)
    match what:
        case "count":
            return len(CALLS)
        case "hang":
            _start(path)
            while True:
                time.sleep(1)
        case "fork":
            _start(path)
        case "leave a thread of the pipe":
            if os.fork() == 0:
                time.sleep(600)
            os._exit(4)
        case "memory":
            return len(b"x" * (1 << 31))
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(3)
        case "segfault":
            os.abort()
        case "raise":
            raise OSError("no disk")
        case "refuse":
            raise ToolError("not today \ud800")
        case "bytes":
            return b"\xff\xfe\x00ok"
        case "half":
            return "half \ud800 of it"
        case "print":
            os.write(1, b'{"text": "forged", "state": {}}\n')
        case "sleep":
            time.sleep(0.3)
        case _ if what.isdigit():
            return "a" * (int(what) // 2) + "é" * (int(what) - int(what) // 2)
    return what


def _start(path: str) -> None:
    """Starts two programs, one in a session of its own, and writes their ids."""
    if path:
        started = [subprocess.Popen(["sleep", "600"], start_new_session=alone) for alone in (False, True)]
        with open(path, "w") as file:
            file.write(" ".join(str(process.pid) for process in started))


def subtract(a: int, b: int) -> int:
    """Subtracts one number from another."""
    return a - b


def divide(a: int, b: int) -> float:
    """Divides one number by another."""
    return a / b


async def wait(seconds: float) -> str:
    """Waits."""
    import asyncio

    await asyncio.sleep(seconds)
    return "awake"


class Remembering(Tool):
    """Keeps what it is told in the episode's state, which must be JSON."""

    schema = ToolSchema("remember")

    def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        state.setdefault("words", []).append(arguments["word"] if arguments["word"] != "object" else object())
        return " ".join(map(str, state["words"]))
