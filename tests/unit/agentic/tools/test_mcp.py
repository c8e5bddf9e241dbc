"""Real servers of tools, on pipes and on loopback."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll.agentic.tools.mcp import McpServer
from roll.agentic.tools.tool import ToolError
from roll.configs.tools import McpServerConfig

pytest.importorskip("mcp", reason="mcp is not installed")

SCRIPT = Path(__file__).parents[3] / "support" / "mcp_server.py"
COMMAND = [sys.executable, str(SCRIPT)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    process.terminate()
    process.wait()


async def use(config: McpServerConfig) -> dict[str, Any]:
    server = McpServer("sums", config)
    try:
        tools = await server.tools()
        seen: dict[str, Any] = {name: tool.schema.parameters for name, tool in tools.items()}
        seen["sum"] = await tools["add"].call({"a": 17, "b": 4}, {})
        many = [tools["add"].call({"a": n, "b": n}, {}) for n in range(8)]
        seen["sums"] = await asyncio.gather(*many)
        for name, arguments in (("fail", {"why": "no such city"}), ("add", {"a": "x"})):
            with pytest.raises(ToolError) as raised:
                await tools[name].call(arguments, {})
            seen[name] = str(raised.value)
        return seen
    finally:
        await server.close()


@pytest.mark.parametrize("way", ["pipes", "http"])
def test_the_tools_of_a_server_are_called(way: str, request: pytest.FixtureRequest) -> None:
    config: dict[str, Any] = {"command": COMMAND} if way == "pipes" else {"url": request.getfixturevalue("url")}
    seen = asyncio.run(use(McpServerConfig(**config, timeout=60)))
    assert seen["sum"] == "21" and seen["sums"] == [str(2 * n) for n in range(8)]
    assert "Error executing tool fail" in seen["fail"] and "validation error" in seen["add"]
    assert seen["variable"]["required"] == ["name"]


def test_a_server_that_died_is_started_again_and_gets_its_variables() -> None:
    async def play() -> list[Any]:
        server = McpServer("sums", McpServerConfig(command=COMMAND, env={"CITY": "Bern"}, timeout=60))
        try:
            tools = await server.tools()
            with pytest.raises(Exception, match=r"[Cc]losed"):
                await tools["die"].call({}, {})
            return [await tools["add"].call({"a": 1, "b": 2}, {}), await tools["variable"].call({"name": "CITY"}, {})]
        finally:
            await server.close()

    assert asyncio.run(play()) == ["3", "Bern"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"command": ["/no/such/program"]}, "servers.sums: cannot be reached: FileNotFoundError"),
        ({"command": [sys.executable, "-c", "print('hello')"]}, "servers.sums: cannot be reached"),
        ({"command": [sys.executable, "-c", "import time; time.sleep(60)"], "timeout": 0.5}, "it took too long"),
        ({"url": "http://127.0.0.1:9/mcp"}, "servers.sums: cannot be reached"),
        ({"command": COMMAND, "only": ["add", "subtract"], "timeout": 60}, "only: seen subtract, expected tools of"),
    ],
)
def test_a_server_that_is_none_says_so(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        asyncio.run(McpServer("sums", McpServerConfig(**config)).tools())
