"""Real servers of tools, on pipes and on loopback."""

import asyncio
import sys
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from roll.agentic.tools.mcp import McpServer
from roll.agentic.tools.tool import ToolError
from roll.configs.tools import McpServerConfig
from tests.support.mcp_http import SCRIPT, served
from tests.support.verifiers import closing

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")

EXAMPLE = Path(__file__).parents[4] / "examples" / "mcp_calculator.py"
COMMAND = [sys.executable, str(SCRIPT)]
STRICT = [sys.executable, str(SCRIPT.with_name("mcp_strict_server.py"))]


async def check(server: McpServer) -> None:
    tools = await server.tools()
    assert tools["variable"].schema.parameters["required"] == ["name"]
    assert await tools["add"].call({"a": 17, "b": 4}, {}) == "21"
    sums = await asyncio.gather(*(tools["add"].call({"a": n, "b": n}, {}) for n in range(8)))
    assert sums == [str(2 * n) for n in range(8)]
    for name, arguments, words in (
        ("fail", {"why": "no such city"}, "Error executing tool fail"),
        ("add", {"a": "x"}, "validation error"),
    ):
        with pytest.raises(ToolError, match=words):
            await tools[name].call(arguments, {})


def connected(**config: Any) -> AbstractAsyncContextManager[McpServer]:
    return closing(McpServer("sums", McpServerConfig(timeout=60, **config)))


async def test_a_server_on_pipes_is_called_and_when_it_died_started_again_with_its_variables():
    async with connected(command=COMMAND, env={"CITY": "Bern"}) as server:
        await check(server)
        tools = await server.tools()
        with pytest.raises(Exception, match=r"[Cc]losed"):
            await tools["die"].call({}, {})
        assert await tools["add"].call({"a": 1, "b": 2}, {}) == "3"
        assert await tools["variable"].call({"name": "CITY"}, {}) == "Bern"


async def test_a_server_on_loopback_is_called_and_when_it_went_away_named_by_the_cause():
    with served() as address:
        server = McpServer("sums", McpServerConfig(url=address, timeout=60))
        await check(server)
        with pytest.raises(ValueError, match="only: got subtract, expected tools of"):
            await McpServer("sums", McpServerConfig(url=address, only=["add", "subtract"], timeout=60)).tools()
        tools = await server.tools()
    try:
        for _ in range(2):
            with pytest.raises(Exception, match=r"Connection closed|ConnectError: ") as raised:
                await tools["add"].call({"a": 1, "b": 2}, {})
        assert "TaskGroup" not in str(raised.value)
    finally:
        await server.close()


async def test_the_example_is_a_server():
    async with connected(command=["python", str(EXAMPLE)]) as server:
        tool = (await server.tools())["calculator"]
        assert tool.schema.parameters["required"] == ["expression"]
        assert await tool.call({"expression": "12*34"}, {}) == "408"
        with pytest.raises(ToolError, match="Error executing tool calculator"):
            await tool.call({"expression": "12+34"}, {})


async def test_an_error_that_answers_one_call_leaves_the_connection_to_the_others():
    async with connected(command=STRICT) as server:
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


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"command": ["/no/such/program"]}, "servers.sums: cannot be reached: FileNotFoundError"),
        ({"command": [sys.executable, "-c", "print('hello')"]}, "servers.sums: cannot be reached"),
        ({"command": [sys.executable, "-c", "import time; time.sleep(60)"], "start_timeout": 0.5}, "it took too long"),
        ({"url": "http://127.0.0.1:9/mcp"}, "servers.sums: cannot be reached"),
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
    assert isinstance(outcome, ConnectionError) and "abandoned" in str(outcome)


async def cancel_connection(waiting: "asyncio.Task[Any]") -> None:
    (connection,) = (task for task in asyncio.all_tasks() if "_hold" in repr(task))
    connection.cancel()
    await asyncio.gather(waiting, return_exceptions=True)  # nobody waits for ever
    await asyncio.wait([connection])
    assert connection.cancelled()


async def test_a_connection_that_is_being_made_ends_as_cancelled_when_it_is_cancelled():
    waiting = asyncio.create_task(McpServer("sums", SILENT).call("add", {"a": 1, "b": 2}))
    await asyncio.sleep(0.2)
    await cancel_connection(waiting)


async def test_a_call_that_is_given_up_leaves_the_connection_to_the_others_until_that_is_cancelled():
    server = McpServer("sums", McpServerConfig(command=COMMAND, timeout=60))
    first, second = (asyncio.create_task(server.call("add", {"a": n, "b": n})) for n in (1, 2))
    await asyncio.sleep(0)
    first.cancel()
    given_up, answered = await asyncio.gather(first, second, return_exceptions=True)
    assert isinstance(given_up, asyncio.CancelledError) and answered == "4"
    await cancel_connection(second)
