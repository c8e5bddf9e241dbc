"""A server of tools, as a user has one: ``python tests/support/mcp_server.py [port]``."""

import os
import sys

from mcp.server.mcpserver import MCPServer

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
