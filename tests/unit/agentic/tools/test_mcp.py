"""Real servers of tools, on pipes and on loopback."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll.agentic.tools.mcp import McpServer
from roll.agentic.tools.tool import ToolError
from roll.configs.tools import McpServerConfig
from tests.support.mcp_http import SCRIPT, served

pytest.importorskip("mcp", reason="mcp is not installed")

EXAMPLE = Path(__file__).parents[4] / "examples" / "mcp_calculator.py"
COMMAND = [sys.executable, str(SCRIPT)]
STRICT = [sys.executable, str(SCRIPT.with_name("mcp_strict_server.py"))]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as address:
        yield address


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
def test_the_tools_of_a_server_are_called(way, request):
    config: dict[str, Any] = {"command": COMMAND} if way == "pipes" else {"url": request.getfixturevalue("url")}
    seen = asyncio.run(use(McpServerConfig(**config, timeout=60)))
    assert seen["sum"] == "21" and seen["sums"] == [str(2 * n) for n in range(8)]
    assert "Error executing tool fail" in seen["fail"] and "validation error" in seen["add"]
    assert seen["variable"]["required"] == ["name"]


async def test_the_example_is_a_server():
    config = McpServerConfig(command=["python", str(EXAMPLE)], timeout=60)

    server = McpServer("sums", config)
    try:
        tool = (await server.tools())["calculator"]
        assert tool.schema.parameters["required"] == ["expression"]
        answers = [await tool.call({"expression": "12*34"}, {})]
        with pytest.raises(ToolError, match="Error executing tool calculator"):
            await tool.call({"expression": "12+34"}, {})
        assert answers == ["408"]
    finally:
        await server.close()


async def test_a_server_that_died_is_started_again_and_gets_its_variables():
    server = McpServer("sums", McpServerConfig(command=COMMAND, env={"CITY": "Bern"}, timeout=60))
    try:
        tools = await server.tools()
        with pytest.raises(Exception, match=r"[Cc]losed"):
            await tools["die"].call({}, {})
        assert [await tools["add"].call({"a": 1, "b": 2}, {}), await tools["variable"].call({"name": "CITY"}, {})] == [
            "3",
            "Bern",
        ]
    finally:
        await server.close()


async def test_an_error_that_answers_one_call_leaves_the_connection_to_the_others():
    server = McpServer("strict", McpServerConfig(command=STRICT, timeout=60))
    try:
        tools = await server.tools()
        assert list(tools) == ["wait", "city"], "of both pages"
        waiting = asyncio.ensure_future(tools["wait"].call({}, {}))
        await asyncio.sleep(0.1)
        with pytest.raises(ToolError, match="name: expected a city"):
            await tools["city"].call({"name": 1}, {})
        with pytest.raises(Exception, match="name: expected a city") as raised:
            await tools["city"].call({"code": -32050}, {})
        assert not isinstance(raised.value, ToolError), "not the policy's fault"
        assert await waiting == "waited"
    finally:
        await server.close()


async def test_a_server_that_went_away_is_named_by_the_cause():
    with served() as address:
        server = McpServer("sums", McpServerConfig(url=address, timeout=60))
        tools = await server.tools()
    try:
        for _ in range(2):
            with pytest.raises(Exception, match=r"Connection closed|ConnectError: ") as raised:
                await tools["add"].call({"a": 1, "b": 2}, {})
        assert "TaskGroup" not in str(raised.value)
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"command": ["/no/such/program"]}, "servers.sums: cannot be reached: FileNotFoundError"),
        ({"command": [sys.executable, "-c", "print('hello')"]}, "servers.sums: cannot be reached"),
        ({"command": [sys.executable, "-c", "import time; time.sleep(60)"], "start_timeout": 0.5}, "it took too long"),
        ({"url": "http://127.0.0.1:9/mcp"}, "servers.sums: cannot be reached"),
        ({"command": COMMAND, "only": ["add", "subtract"], "timeout": 60}, "only: got subtract, expected tools of"),
    ],
)
def test_a_server_that_is_none_says_so(config, words):
    with pytest.raises(ValueError, match=words):
        asyncio.run(McpServer("sums", McpServerConfig(**config)).tools())


SILENT = McpServerConfig(command=["python", "-c", "import time; time.sleep(600)"], start_timeout=600)


async def test_a_connection_that_is_being_made_is_given_up_at_once():
    server = McpServer("sums", SILENT)
    waiting = asyncio.create_task(server.call("add", {}))
    await asyncio.sleep(0.2)
    await asyncio.wait_for(server.close(), 60)
    (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(outcome, BaseException)
    assert isinstance(outcome, ConnectionError) and "abandoned" in str(outcome)


@pytest.mark.parametrize("config", [SILENT, McpServerConfig(command=COMMAND, timeout=60)], ids=["silent", "connected"])
async def test_a_connection_ends_as_cancelled_when_it_is_cancelled(config):
    server = McpServer("sums", config)
    waiting = asyncio.create_task(server.call("add", {"a": 1, "b": 2}))
    if config is SILENT:
        await asyncio.sleep(0.2)
    else:
        assert await waiting == "3"
    (connection,) = (task for task in asyncio.all_tasks() if "_hold" in repr(task))
    connection.cancel()
    await asyncio.gather(waiting, return_exceptions=True)  # nobody waits for ever
    await asyncio.wait([connection])
    assert connection.cancelled()


async def test_a_call_that_is_given_up_leaves_the_connection_to_the_others():
    server = McpServer("sums", McpServerConfig(command=COMMAND, timeout=60))
    first, second = (asyncio.create_task(server.call("add", {"a": n, "b": n})) for n in (1, 2))
    await asyncio.sleep(0)
    first.cancel()
    try:
        given_up, answered = await asyncio.gather(first, second, return_exceptions=True)
    finally:
        await server.close()
    assert isinstance(given_up, asyncio.CancelledError) and answered == "4"
