"""A server of tools, as a user has one: ``python tests/support/mcp_server.py [port]``."""

import base64
import io
import os
import sys
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp_types import ImageContent, TextContent
from PIL import Image

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise ValueError(why)


@server.tool(structured_output=False)
def draw(grey: int) -> list[Any]:
    """A grey picture of 16 by 16 pixels, with words."""
    buffer = io.BytesIO()
    Image.new("L", (16, 16), grey).save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return [TextContent(type="text", text="drawn"), ImageContent(type="image", data=data, mime_type="image/png")]


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def variable(name: str) -> str:
    """An environment variable of the server."""
    return os.environ.get(name, "")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
