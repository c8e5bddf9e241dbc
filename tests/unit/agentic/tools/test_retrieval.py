"""A retrieval server that is asked over HTTP, and what it may answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from roll.agentic.tools.search import RetrievalTool
from roll.agentic.tools.tool import TOOLS, ToolError


class Server(ThreadingHTTPServer):
    """Answers with ``answer``, and keeps what it was asked."""

    answer: Any = None
    status = 200
    asked: dict[str, Any]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/retrieve"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(self.server.answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def test_passages_are_numbered_in_their_order(server: Server) -> None:
    server.answer = {
        "result": [[{"document": {"contents": "Nile\nA river."}, "score": 2.5}, {"title": "Rhine", "text": "Another."}]]
    }
    tool = RetrievalTool(server.url, num_results=2)
    assert tool.call({"query": "rivers"}, {}) == "1. Nile\nA river.\n\n2. Rhine: Another."
    assert server.asked == {"queries": ["rivers"], "topk": 2, "return_scores": True}
    server.answer = {"result": [[]]}
    assert tool.call({"query": "rivers"}, {}) == "nothing found"
    assert TOOLS.get("retrieval") is RetrievalTool


@pytest.mark.parametrize("answer", [[], {"result": []}, {"result": [[{"document": {"words": 3}}]]}, "text"])
def test_an_answer_of_another_shape_says_so(server: Server, answer: Any) -> None:
    server.answer = answer
    with pytest.raises(ValueError, match="the server answered"):
        RetrievalTool(server.url).call({"query": "rivers"}, {})


def test_a_server_that_fails_is_no_empty_answer_and_senseless_arguments_are_refused(server: Server) -> None:
    server.status = 503
    with pytest.raises(httpx.HTTPStatusError):
        RetrievalTool(server.url).call({"query": "rivers"}, {})
    with pytest.raises(ToolError, match="expected some words"):
        RetrievalTool(server.url).call({"query": " "}, {})
    with pytest.raises(ValueError, match="expected http"):
        RetrievalTool("ftp://a/b")
    with pytest.raises(ValueError, match="1 to 20"):
        RetrievalTool("http://a/b", num_results=0)
