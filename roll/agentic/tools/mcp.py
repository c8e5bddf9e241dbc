"""Tools of servers that speak the Model Context Protocol, by the official client (``mcp``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from roll.agentic.tools.tool import Tool, ToolError
from roll.agentic.tools.types import ToolSchema
from roll.configs.tools import McpServerConfig

if TYPE_CHECKING:
    from mcp import Client

logger = logging.getLogger(__name__)


class McpServer:
    """One connection to a server, made again where it broke, for all episodes of a process.

    Args:
        name: in the configuration.
        config: where the server is.
    """

    def __init__(self, name: str, config: McpServerConfig) -> None:
        self.name = name
        self._config = config
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()
        self._lock = asyncio.Lock()

    async def tools(self) -> dict[str, Tool]:
        """The server's tools by name.

        Raises:
            ValueError: it cannot be reached, or has not what ``only`` asks for.
        """
        try:
            async with asyncio.timeout(self._config.timeout):
                listed = (await (await self._connected()).list_tools()).tools
        except Exception as error:  # the client, its transport and the program have many
            await self.close()
            reason = "it took too long" if isinstance(error, TimeoutError) else _first(error)
            raise ValueError(f"tools.servers.{self.name}: cannot be reached: {reason}") from error
        there = {tool.name: ToolSchema(tool.name, tool.description or "", tool.input_schema) for tool in listed}
        missing = set(self._config.only or ()) - there.keys()
        if missing:
            raise ValueError(
                f"tools.servers.{self.name}.only: seen {', '.join(sorted(missing))}, expected tools of the server: "
                f"{', '.join(there) or 'it has none'}"
            )
        wanted = there if self._config.only is None else {name: there[name] for name in self._config.only}
        return {name: McpTool(self, schema) for name, schema in wanted.items()}

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Calls a tool; the answer is all of its text.

        Raises:
            ToolError: the tool says that it failed.
            Exception: the server did not answer.
        """
        try:
            result = await (await self._connected()).call_tool(name, arguments)
        except Exception:
            await self.close()  # the next call finds a new connection
            raise
        text = "\n".join(block.text if block.type == "text" else f"[{block.type}]" for block in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """Gives up the connection, and the program with it."""
        task, self._task, self._client = self._task, None, None
        if task is not None:
            self._leave.set()
            with contextlib.suppress(Exception):
                await task

    async def _connected(self) -> Client:
        async with self._lock:
            if self._client is None or self._task is None or self._task.done():
                self._leave = asyncio.Event()
                ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
                self._task = asyncio.create_task(self._hold(ready, self._leave))
                self._client = await ready
            return self._client

    async def _hold(self, ready: asyncio.Future[Client], leave: asyncio.Event) -> None:
        """Opens and closes the connection in one task, as its library wants it."""
        from mcp import Client, StdioServerParameters

        config = self._config
        try:
            server: Any = config.url
            if config.command is not None:
                program, *arguments = config.command
                server = StdioServerParameters(command=program, args=arguments, env=config.env or None, cwd=config.cwd)
            async with Client(server, read_timeout_seconds=config.timeout) as client:
                ready.set_result(client)
                await leave.wait()
        except BaseException as error:
            if ready.done():
                logger.warning("tools.servers.%s: the connection ended: %s", self.name, _first(error))
            else:
                ready.set_exception(error if isinstance(error, Exception) else ConnectionError(str(error)))


class McpTool(Tool):
    """A tool of a server."""

    def __init__(self, server: McpServer, schema: ToolSchema) -> None:
        self.schema = schema
        self._server = server
        self._name = schema.name

    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        return await self._server.call(self._name, arguments)


def _first(error: BaseException) -> str:
    """The first cause in a group of exceptions, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
