"""Bodies of requests that are never complete, or too much together."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from roll.rollout.endpoint import bodies
from tests.support.said_engine import Engine, client, new_session, serving


def test_what_a_session_sends_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that begins many long requests cannot fill the memory of the worker; another's go on."""
    monkeypatch.setattr(bodies, "MAX_BODY", 1000)

    async def run() -> None:
        async with serving() as endpoint:
            session, other = new_session(Engine(["x"])), new_session(Engine(["x"]))
            port = int(endpoint.url.split(":")[2].split("/")[0])

            async def begin(key: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
                writer.write(f"{head}Content-Length: 999\r\n\r\n".encode() + b" " * 400)
                return reader, writer

            async with asyncio.timeout(20):
                with endpoint.open(session) as key:
                    opened = [await begin(key), await begin(key)]
                    while session.receiving < 800:
                        await asyncio.sleep(0.001)
                    reader, last = await begin(key)
                    told = await reader.readuntil(b"}}")
                    assert told.startswith(b"HTTP/1.1 429") and b'"rate_limit_exceeded"' in told
                    async with client(endpoint, other) as policy:
                        await policy.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
                    for _, writer in [*opened, (reader, last)]:
                        writer.close()
                    while session.receiving:
                        await asyncio.sleep(0.001)
            assert session.counts["refused"] == 1 and len(other.turns) == 1

    asyncio.run(run())


def test_a_body_that_is_no_object_says_so() -> None:
    async def run() -> None:
        async with serving() as endpoint:
            with endpoint.open(new_session(Engine(["x"]))) as key:
                async with httpx.AsyncClient(headers={"x-api-key": key}) as http:
                    told = await http.post(f"{endpoint.url}/chat/completions", content=b"[]")
        assert told.status_code == 400
        assert told.json()["error"]["message"] == "the body: Input should be an object, seen []"

    asyncio.run(run())
