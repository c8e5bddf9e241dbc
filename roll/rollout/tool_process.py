"""A tool whose calls run in separate processes (``isolation: process``).

A child builds the tool once and forks for every call. What the fork allocates, changes or starts is gone with it: it is
killed at its end or its timeout, and so is all that comes from it. ``python -m roll.rollout.tool_process`` is a child.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import inspect
import io
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, NoReturn

from roll.agentic.tools.tool import Tool, ToolError, content_of, make_tool
from roll.configs.tools import ToolConfig
from roll.utils.children import (
    MAX_REPLY_BYTES,
    ChildError,
    ChildPool,
    Reply,
    die_with_parent,
    encode,
    ending,
    serve,
)
from roll.utils.foreign import describe_error

_GRACE_S = 30.0
"""Seconds that a child gets beyond the call's time to end it; only one that hangs itself takes them."""
_LOOK_S = 0.05
_BYTES_PER_CHAR = 12
_PICTURE_BYTES = 32 << 20
"""Of a result's pictures, as base64."""
_PR_SET_CHILD_SUBREAPER = 36


class ToolProcessError(RuntimeError):
    """A call raised, or ended its process."""


class ProcessTool(Tool):
    """A tool in child processes.

    Args:
        entry: what it is, its time, its memory, and how many calls run at once.
        inner: the same tool in this process, of which nothing but the schema is used.
        max_chars: of a longer result the beginning and the end come back, together one more than these.
        pictures: results may have some.
    """

    times_itself = True

    def __init__(self, name: str, entry: ToolConfig, inner: Tool, max_chars: int, *, pictures: bool = False) -> None:
        self.schema = inner.schema
        self._timeout = entry.timeout
        setup = {
            "name": name,
            "tool": entry.tool,
            "args": entry.args,
            "memory_mb": entry.memory_mb,
            "max_chars": max_chars,
        }
        longest = MAX_REPLY_BYTES + _BYTES_PER_CHAR * (max_chars + 2) + _PICTURE_BYTES * pictures
        self._pool = ChildPool(
            "roll.rollout.tool_process", setup, entry.processes, what="tool", max_reply_bytes=longest
        )

    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> Any:
        """See ``Tool``; ``state`` is JSON.

        Raises:
            ToolError: the tool refuses.
            TimeoutError: it took longer than its timeout, from when it began.
            ToolProcessError: it raised or its process ended.
        """
        request = {"arguments": arguments, "state": state, "timeout": self._timeout}
        try:
            reply = await self._pool.ask(request, self._timeout + _GRACE_S)
        except ChildError as error:
            if isinstance(error, TimeoutError):
                raise
            raise ToolProcessError(str(error)) from error
        if reply.get("late"):
            raise TimeoutError
        if "error" in reply:
            raise ToolProcessError(reply["error"])
        state.clear()
        state.update(reply["state"])
        if "refused" in reply:
            raise ToolError(reply["refused"])
        if isinstance(reply["result"], str):
            return reply["result"]
        return [
            {**part, "image": base64.b64decode(part["image"])} if part["type"] == "image" else part
            for part in reply["result"]
        ]

    async def close(self) -> None:
        """Kills the processes."""
        await self._pool.close()


# What follows runs in a child.


def _build(setup: Mapping[str, Any]) -> partial[Reply]:
    if sys.platform == "linux":  # what a call leaves behind becomes a child of this process
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    tool = make_tool(setup["name"], setup["tool"], setup["args"])
    return partial(_answer, tool, setup["memory_mb"] << 20, setup["max_chars"])


def _answer(tool: Tool, memory: int, max_chars: int, request: Mapping[str, Any]) -> Reply:
    """Runs a call in a fork, and ends that."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _run(tool, memory, max_chars, request, writing)
    os.close(writing)
    try:
        line, status = _wait(pid, reading, time.monotonic() + request["timeout"])
    finally:
        os.close(reading)
        _end_all(pid)
    if line.endswith(b"\n"):
        reply: Reply = json.loads(line)
        return reply
    if status is None:
        return {"late": True}
    return {"error": f"its process died ({ending(os.waitstatus_to_exitcode(status))})"}


def _wait(pid: int, reading: int, deadline: float) -> tuple[bytes, int | None]:
    """Output of the fork up to a line's end, and its status if it ended without one; neither: it took too long."""
    line, pipe = bytearray(), select.poll()  # which knows descriptors above 1,023 too
    pipe.register(reading, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        part = os.read(reading, 1 << 16) if pipe.poll(1000 * min(left, _LOOK_S)) else b""
        line += part
        if line.endswith(b"\n"):
            break
        if not part:  # its own children may hold the pipe open
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:  # it may have written since the look at the pipe
                while pipe.poll(0) and (part := os.read(reading, 1 << 16)):
                    line += part
                return bytes(line), status
    return bytes(line), None


def _end_all(pid: int) -> None:
    """Kills the fork and what it has started: whose parent died is a child of this process, and so comes up in turn."""
    pids = [pid]
    while pids:
        for each in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(each, 0)
        pids = list(_children())


def _children() -> Iterator[int]:
    for file in glob("/proc/self/task/*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, Path(file).read_text().split())


def _run(tool: Tool, memory: int, max_chars: int, request: Mapping[str, Any], writing: int) -> NoReturn:
    """The fork: calls the tool, writes the reply, ends."""
    try:
        die_with_parent()
        _limit_memory(memory)
        reply = _call(tool, dict(request["arguments"]), dict(request["state"]), max_chars)
        data = memoryview(encode(reply))
        while data:
            data = data[os.write(writing, data) :]
    finally:
        os._exit(1)


def _call(tool: Tool, arguments: dict[str, Any], state: dict[str, Any], max_chars: int) -> Reply:
    try:
        result = tool.call(arguments, state)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        content = content_of(result)
        written: Any
        if isinstance(content, str):
            written = _shortened(content, max_chars)
        else:
            written = [_written(part, max_chars) for part in content]
        reply: Reply = {"result": written, "state": state}
    except ToolError as error:
        reply = {"refused": str(error), "state": state}
    except (Exception, SystemExit) as error:  # a user's tool may raise anything
        return {"error": describe_error(error)}  # the policy reads it: no path of this machine
    try:
        encode(state)
    except (TypeError, ValueError) as error:
        return {"error": f"its state is not JSON, which isolation: process needs: {error}"}
    return reply


def _shortened(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars // 2 + 1] + text[-(max_chars // 2 + 1) :]


def _written(part: Mapping[str, Any], max_chars: int) -> dict[str, Any]:
    """A part as JSON: bytes of a picture's file are base64, pixels those of a PNG."""
    if part["type"] == "text":
        return {"type": "text", "text": _shortened(part["text"], max_chars)}
    data = part["image"]
    if not isinstance(data, bytes):
        from PIL import Image

        image, buffer = data if hasattr(data, "save") else Image.fromarray(data), io.BytesIO()
        image.save(buffer, "PNG", compress_level=1)
        data = buffer.getvalue()
    return {"type": "image", "image": base64.b64encode(data).decode()}


async def _awaited(result: Any) -> Any:
    return await result


def _limit_memory(more: int) -> None:
    """Lets this process allocate so many bytes beyond what it has."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        used = int(next(line for line in lines if line.startswith("VmData:")).split()[1]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (used + more, used + more))


if __name__ == "__main__":
    serve(_build)
