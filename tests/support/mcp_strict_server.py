"""A server that tells its tools page by page and refuses wrong arguments by errors of the protocol."""

import asyncio
from typing import Any

import mcp_types as types
from mcp import MCPError
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

PAGES = {None: ("wait", "more"), "more": ("city", None)}
SCHEMA = {"type": "object", "properties": {}}


async def list_tools(ctx: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    name, following = PAGES[params.cursor if params else None]
    return types.ListToolsResult(tools=[types.Tool(name=name, input_schema=SCHEMA)], next_cursor=following)


async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    if params.name == "city":
        code = (params.arguments or {}).get("code", types.INVALID_PARAMS)
        raise MCPError(code, "name: expected a city")
    await asyncio.sleep(0.5)
    return types.CallToolResult(content=[types.TextContent(type="text", text="waited")])


async def main() -> None:
    server = Server("strict", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
