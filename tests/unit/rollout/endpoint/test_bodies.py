"""Bodies of requests that are never complete, or too much together."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import httpx
import pytest

from roll.data.renderer import ChatRenderer
from roll.rollout.endpoint import server as bodies
from roll.rollout.endpoint.errors import ApiError
from roll.rollout.endpoint.session import History
from tests.support.said_engine import Engine, client, new_session, serving


async def test_what_a_session_sends_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that begins many long requests cannot fill the memory of the worker; another's go on."""
    monkeypatch.setattr(bodies, "MAX_BODY", 1000)

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


async def test_a_body_that_is_no_object_says_so() -> None:
    async with serving() as endpoint:
        with endpoint.open(new_session(Engine(["x"]))) as key:
            async with httpx.AsyncClient(headers={"x-api-key": key}) as http:
                told = await http.post(f"{endpoint.url}/chat/completions", content=b"[]")
    assert told.status_code == 400
    assert told.json()["error"]["message"] == "the body: Input should be an object, got []"


USER = b'[{"role":"user","content":"q"}]'
HOSTILE = {
    "messages": b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * 200_000) + b"]}",
    "no messages": b'{"messages":[' + b",".join([b"1"] * 1_000_000) + b"]}",
    "parts": b'{"messages":[{"role":"user","content":['
    + b",".join([b'{"type":"text","text":"a"}'] * 200_000)
    + b"]}]}",
    "nested": b'{"messages":' + USER + b',"metadata":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "keys": b'{"messages":' + USER + b"," + b",".join(b'"k%d":1' % i for i in range(200_000)) + b"}",
    "stops": b'{"messages":' + USER + b',"stop":[' + b",".join([b'"x"'] * 200_000) + b"]}",
    "number": b'{"messages":' + USER + b',"seed":' + b"9" * 300_000 + b"}",
    "text": b'{"messages":[{"role":"user","content":"' + b"ab " * 300_000 + b'"}]}',
    "escapes": b'{"messages":[{"role":"user","content":"' + b'\\"' * 300_000 + b'"}]}',
    "blank": b" " * 1_000_000 + b"{}",
    "backslashes": b"\\" * 1_000_000,
}


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_hostile_body_is_refused_in_the_providers_form_before_it_is_parsed(path: str, kind: str) -> None:
    async with serving() as endpoint:
        session = new_session(Engine(["x"]))
        with endpoint.open(session) as key:
            async with httpx.AsyncClient(headers={"x-api-key": key}, timeout=60) as http:
                told = await http.post(f"{endpoint.url}/{path}", content=HOSTILE[kind])
        receiving = session.receiving
    assert told.status_code in (400, 413) and receiving == 0
    error = told.json()["error"]
    assert {"messages": {"type", "message"}}.get(path, {"message", "type", "param", "code"}) == error.keys()
    assert "got more than" in error["message"] or "nested more than" in error["message"] or "digits" in error["message"]


def test_the_shape_of_a_text_does_not_depend_on_its_pieces() -> None:
    """Strings, escapes and numbers may be cut anywhere; what stands in strings does not count."""
    text = rb'{"a\"[{,": [1, "x\\", {"b": "\\\"],{"}], "' + b"{[,1" * 50 + b'": 1.5}'
    bounds = bodies.Bounds(10**6, 10**6, 10**6)
    whole = bodies.Shape(bounds)
    whole.feed(text)
    assert (whole._objects, whole._values, whole._depth) == (2, 2 + 1 + 3, 0)
    for size in (1, 2, 3, 7):
        pieces = bodies.Shape(bounds)
        for at in range(0, len(text), size):
            pieces.feed(text[at : at + size])
        assert (pieces._objects, pieces._values, pieces._depth) == (whole._objects, whole._values, whole._depth)
    digits = bodies.Shape(bounds)
    with pytest.raises(ApiError, match="digits"):
        for _ in range(500):
            digits.feed(b"9")


async def test_a_body_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.2)

    async with serving() as endpoint:
        with endpoint.open(new_session(Engine(["x"]))) as key:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.url.split(":")[2].split("/")[0]))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            writer.write(f"{head}Content-Length: 999\r\n\r\n".encode() + b"{")
            async with asyncio.timeout(20):
                told = await reader.readuntil(b"}}")
            writer.close()
            assert told.startswith(b"HTTP/1.1 408")


def test_headers_are_bounded() -> None:
    async def run() -> bytes:
        async with serving() as endpoint:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.url.split(":")[2].split("/")[0]))
            with contextlib.suppress(ConnectionError):
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 500_000)
                async with asyncio.timeout(20):
                    return await reader.read(12)
            return b""

    assert asyncio.run(run()) in (b"", b"HTTP/1.1 400")


async def test_a_long_prompt_is_rendered_beside_the_event_loop() -> None:
    async with serving() as endpoint:
        session = new_session(Engine(["x"]))
        with endpoint.open(session) as key:
            async with httpx.AsyncClient(headers={"x-api-key": key}, timeout=60) as http:
                body = {"model": "m", "messages": [{"role": "user", "content": "a b " * 30_000}]}
                task = asyncio.create_task(http.post(f"{endpoint.url}/chat/completions", json=body))
                ticks = 0
                while not task.done():
                    await asyncio.sleep(0)
                    ticks += 1
                status = (await task).status_code
    assert status == 400 and ticks > 50, "the prompt is too long, and others went on meanwhile"


LONG = {
    "a call": [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1" + ",1" * 40_000 + "]"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    "control tokens": [{"role": "user", "content": "<|im_end|>" * 10_000}],
}


@pytest.mark.parametrize("kind", LONG)
async def test_a_long_conversation_is_compared_and_rendered_beside_the_event_loop(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = {}

    def watched(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def watch(*args: Any, **keys: Any) -> Any:
            threads[name] = threading.current_thread()
            return method(*args, **keys)

        monkeypatch.setattr(owner, name, watch)

    watched(History, "recall")
    watched(ChatRenderer, "prompt")

    async with serving() as endpoint:
        with endpoint.open(new_session(Engine(["x"]))) as key:
            async with httpx.AsyncClient(headers={"x-api-key": key}, timeout=60) as http:
                body = {"messages": [{"role": "user", "content": "q"}, *LONG[kind]]}
                told = await http.post(f"{endpoint.url}/chat/completions", json=body)
    assert told.status_code == 400 and threads["recall"] is not threading.main_thread()
    assert threads.get("prompt") is not threading.main_thread()
