"""A server of the Model Context Protocol with one tool, by the official package.

``roll train rlvr_mcp`` starts it on its pipes, once for each rollout worker. ``python examples/mcp_calculator.py 8000``
serves ``http://127.0.0.1:8000/mcp`` instead. See ``docs/agents.md``.
"""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def calculator(expression: str) -> int:
    """Multiplies two whole numbers, written 12*34."""
    x, y = map(int, expression.split("*"))
    return x * y


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
