"""Tools of servers that speak the Model Context Protocol, by the official client (``mcp``)."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from roll.agentic.tools.tool import Tool, ToolError, ToolSchema
from roll.configs.tools import McpServerConfig
from roll.data.tool_messages import Content, joined, text_of

if TYPE_CHECKING:
    from mcp import Client

logger = logging.getLogger(__name__)


class McpServer:
    """One connection to a server, made again where it broke, for all episodes of a process."""

    def __init__(self, name: str, config: McpServerConfig) -> None:
        self.name = name
        self._config = config
        self._connection: _Connection | None = None

    async def tools(self) -> dict[str, Tool]:
        """The server's tools by name.

        Raises:
            ValueError: it cannot be reached, or has not what ``only`` asks for.
        """
        try:
            async with asyncio.timeout(self._config.start_timeout):
                listed = await _list(await self._connect().client())
        except Exception as error:  # the client, its transport and the program have many
            await self.close()
            reason = "it took too long" if isinstance(error, TimeoutError) else _first(error)
            raise ValueError(f"tools.servers.{self.name}: cannot be reached: {reason}") from error
        there = {tool.name: ToolSchema(tool.name, tool.description or "", tool.input_schema) for tool in listed}
        missing = set(self._config.only or ()) - there.keys()
        if missing:
            raise ValueError(
                f"tools.servers.{self.name}.only: got {', '.join(sorted(missing))}, expected tools of the server: "
                f"{', '.join(there) or 'it has none'}"
            )
        wanted = there if self._config.only is None else {name: there[name] for name in self._config.only}
        return {name: McpTool(self, schema) for name, schema in wanted.items()}

    async def call(self, name: str, arguments: dict[str, Any]) -> Content:
        """Calls a tool; the answer is all of its text and pictures.

        Raises:
            ToolError: the tool says that it failed, or the server that the arguments are wrong.
            Exception: the server did not answer, or with something else than a result.
        """
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS

        connection = self._connect()
        try:
            result = await (await connection.client()).call_tool(name, arguments)
        except Exception as error:
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                raise ToolError(str(error)) from error
            if _is_lost(error):
                await connection.close()  # the next call finds a new one
            if isinstance(error, ExceptionGroup):
                raise ConnectionError(_first(error)) from error
            raise
        content = joined(*[part for block in result.content for part in ("\n", _content(block))][1:])
        if result.is_error:
            raise ToolError(text_of(content))
        return content

    async def close(self) -> None:
        """Gives up the connection, also one that is still being made, and the program with it."""
        if self._connection is not None:
            await self._connection.close()

    def _connect(self) -> _Connection:
        """The connection, a new one if there is none or it is over."""
        if self._connection is None or self._connection.is_over:
            self._connection = _Connection(self.name, self._config)
        return self._connection


class _Connection:
    """A connection that a task of its own opens and closes, as the library wants it."""

    def __init__(self, name: str, config: McpServerConfig) -> None:
        self._name = name
        self._config = config
        self._leave = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    @property
    def is_over(self) -> bool:
        """Tells whether it was left, could not be made, or has ended by itself."""
        return self._leave.is_set() or self._task.done()

    async def client(self) -> Client:
        """Client of the server, once it is connected; whoever no longer waits for it leaves it to the others.

        Raises:
            Exception: the server cannot be reached.
        """
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        """Leaves the server, or gives up the attempt to reach it."""
        self._leave.set()
        if not self._ready.done():
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _hold(self) -> None:
        from mcp import Client

        longest = max(self._config.timeout, self._config.start_timeout)
        try:
            async with Client(_server(self._config), read_timeout_seconds=longest) as client:
                self._ready.set_result(client)
                await self._leave.wait()
        except BaseException as error:  # a cancellation too ends the wait of others for the connection
            if not self._ready.done():
                self._ready.set_exception(
                    error if isinstance(error, Exception) else ConnectionError("the connection was abandoned")
                )
                self._ready.exception()  # nobody may be waiting
            elif isinstance(error, Exception):
                logger.warning("tools.servers.%s: the connection ended: %s", self._name, _first(error))
            if not isinstance(error, Exception):
                raise


def _server(config: McpServerConfig) -> Any:
    """Address or program by which the library finds the server; a program's ``python`` is this one."""
    from mcp import StdioServerParameters

    if config.command is None:
        return config.url
    program, *arguments = config.command
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    return StdioServerParameters(command=program, args=arguments, env={"PATH": path, **config.env}, cwd=config.cwd)


class McpTool(Tool):
    """A tool of a server."""

    def __init__(self, server: McpServer, schema: ToolSchema) -> None:
        self.schema = schema
        self._server = server
        self._name = schema.name

    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> Content:
        return await self._server.call(self._name, arguments)


async def _list(client: Client) -> list[Any]:
    """All of a server's tools, which it may tell page by page."""
    tools: list[Any] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if (cursor := page.next_cursor) is None:
            return tools


def _content(block: Any) -> Content:
    """A block of a result; what is neither text nor a picture is named."""
    if block.type != "image":
        return str(block.text) if block.type == "text" else f"[{block.type}]"
    try:
        return [{"type": "image", "image": base64.b64decode(block.data, validate=True)}]
    except binascii.Error as error:
        raise ValueError(f"a picture whose data are no base64 ({error})") from error


def _is_lost(error: Exception) -> bool:
    """Tells whether the connection can no longer be used; calls of other episodes are under way in one that can."""
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR, REQUEST_TIMEOUT

    if isinstance(error, MCPError):  # INVALID_REQUEST and METHOD_NOT_FOUND: the session is not known there any more
        return error.code in (CONNECTION_CLOSED, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR, REQUEST_TIMEOUT)
    return not isinstance(error, RuntimeError | ValueError)  # those say that a result is not what was promised


def _first(error: BaseException) -> str:
    """The first cause in a group of exceptions, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
