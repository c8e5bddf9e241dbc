"""A web server on loopback, whose replies are given or made from what is asked, and which keeps what it was asked."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    status: int = 200
    body: str | bytes = ""
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    piece: int = 0
    """So many bytes every tenth of a second, not all at once."""


def in_json(answer: Any) -> Reply:
    """A reply in JSON."""
    return Reply(body=json.dumps(answer))


Replying = Callable[[str, Any], Reply]
"""Makes a reply of a path and of the JSON that was sent (None: nothing was); where it raises, the connection breaks."""


class Server(ThreadingHTTPServer):
    """Answers requests in order from a list, the last for ever."""

    daemon_threads = True

    def __init__(self, replies: list[Reply | Replying]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies = replies
        self.lock = threading.Lock()
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[Any] = []
        self.times: list[float] = []
        self.in_flight = self.most_in_flight = 0
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is part of the tests."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        size = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(size)) if size else None
        with server.lock:
            reply = server.replies[min(len(server.bodies), len(server.replies) - 1)]
            server.bodies.append(body)
            server.paths.append(self.path)
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            server.times.append(time.monotonic())
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
        reply = reply if isinstance(reply, Reply) else reply(self.path, body)
        time.sleep(reply.delay)
        with server.lock:
            server.in_flight -= 1
        content = reply.body if isinstance(reply.body, bytes) else reply.body.encode()
        self.send_response(reply.status)
        for name, value in {"Content-Length": str(len(content)), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        size = reply.piece or max(len(content), 1)
        for start in range(0, len(content), size):
            self.wfile.write(content[start : start + size])
            time.sleep(0.1 if reply.piece else 0)

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        """Keeps the test's output clean."""


@contextmanager
def serving(*replies: Reply | Replying) -> Iterator[Server]:
    with Server(list(replies)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
