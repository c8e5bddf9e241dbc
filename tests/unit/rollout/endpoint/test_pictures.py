"""Requests with pictures, through the clients of both providers: what is recorded, what is new, what is refused."""

import asyncio
import base64
import io
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from roll.agentic.tools.dialects import dialect
from roll.configs.agent import AgentConfig
from roll.data.columns import Item
from roll.data.identity import items_along
from roll.data.renderer import ChatRenderer
from roll.rollout.endpoint.session import Policy, Session
from roll.rollout.observations import for_programs
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import EpisodeEnd, RolloutGroup, Trajectory
from tests.support.said_engine import EPISODE, LIMITS, PARAMS, RENDERER, Engine, client, rows_of, serving

A, B = np.random.default_rng(0).integers(0, 256, (2, 32, 48, 3), np.uint8)
Program = Callable[[openai.AsyncOpenAI], Awaitable[Any]]


def encoded(pixels: np.ndarray, kind: str = "PNG", **keys: Any) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **keys)
    return base64.b64encode(buffer.getvalue()).decode()


def shown(data: str, kind: str = "png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


def play(renderer: ChatRenderer, engine: Engine, program: Program) -> tuple[Session, Any]:
    async def run() -> tuple[Session, Any]:
        policy = Policy(renderer, dialect("hermes"), LIMITS)
        session = Session(AgentConfig(command=["true"]), policy, engine.generate, PARAMS, EPISODE)
        async with serving() as endpoint, client(endpoint, session) as asked:
            return session, await program(asked)

    return asyncio.run(run())


async def ask(policy: openai.AsyncOpenAI, *messages: Any) -> Any:
    answer = await policy.chat.completions.create(model="m", messages=list(messages))
    return {"role": "assistant", "content": answer.choices[0].message.content}


def test_pictures_are_told_by_their_pixels_and_one_that_has_changed_is_a_row_of_its_own(sees):
    engine = Engine(["one", "two", "three"])

    async def program(policy: openai.AsyncOpenAI) -> None:
        words, more = {"type": "text", "text": "see:"}, {"role": "user", "content": [shown(encoded(B))]}
        first, again, lossy = (
            {"role": "user", "content": [words, shown(data)]}
            for data in (encoded(A), encoded(A, "BMP"), encoded(A, "JPEG"))
        )
        one = await ask(policy, first)
        two = await ask(policy, again, one, more)  # other bytes, the same pixels
        await ask(policy, lossy, one, more, two, {"role": "user", "content": "so?"})

    session, _ = play(sees, engine, program)
    assert session.counts | {"rows": 2, "rewritten": 1, "rewritten_pictures": 1, "refused": 0} == session.counts
    a, b = Item(A), Item(B)
    first, second, third = engine.requests
    part = [{"type": "text", "text": "see:"}, {"type": "image", "image": a}]
    assert first.prompt_ids.tolist() == sees.prompt([{"role": "user", "content": part}]).tolist()
    assert [request.items for request in (first, second)] == [(a,), (a, b)]
    assert a not in third.items and b in third.items
    assert [item for _, item in items_along(third.prompt_ids, third.items)] == list(third.items)
    assert [turn.items for turn in session.turns] == [request.items for request in engine.requests]
    assert session.turns[1].observation == "[picture 48x32]"
    trajectory = Trajectory("sums", 5, 1, 11, tuple(session.turns), EpisodeEnd.TERMINATED, True, "", history=True)
    batch = groups_to_batch([RolloutGroup(5, "sums", (trajectory,))], ["sums"])
    assert batch.items_I == ((a, b), third.items)
    assert [row[:-1].tolist() for row in np.split(batch.tokens_T.numpy(), np.cumsum(batch.lengths_B)[:-1])] == [
        row[:-1] for row in rows_of(session)
    ]


def test_results_of_tools_show_pictures_in_every_api(sees):
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    schema: Any = {"type": "object", "properties": {}}

    async def by_chat(policy: Any) -> None:
        tools = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": schema}}]
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Look."}]}]
        (choice,) = (await policy.chat.completions.create(model="m", messages=messages, tools=tools)).choices
        content = [{"type": "text", "text": "it:"}, shown(encoded(A))]
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": content}
        await policy.chat.completions.create(model="m", messages=[*messages, choice.message, result], tools=tools)

    async def by_responses(policy: Any) -> None:
        tools = [{"type": "function", "name": "look", "description": "d", "parameters": schema}]
        first = await policy.responses.create(model="m", input="Look.", tools=tools)
        picture = {"type": "input_image", "image_url": shown(encoded(A))["image_url"]["url"]}
        output = [{"type": "input_text", "text": "it:"}, picture]
        result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": output}
        await policy.responses.create(model="m", input=[result], previous_response_id=first.id, tools=tools)

    async def by_messages(policy: Any) -> None:
        from anthropic import AsyncAnthropic

        source = {"type": "base64", "media_type": "image/png", "data": encoded(A)}
        content = [{"type": "text", "text": "it:"}, {"type": "image", "source": source}]
        url = str(policy.base_url).removesuffix("/v1/")
        async with AsyncAnthropic(base_url=url, api_key=policy.api_key, max_retries=0) as claude:
            tool = {"name": "look", "description": "d", "input_schema": schema}
            keys: Any = {"model": "m", "max_tokens": 300, "tools": [tool]}
            messages: list[Any] = [{"role": "user", "content": "Look."}]
            first = await claude.messages.create(messages=messages, **keys)
            result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": content}  # type: ignore[union-attr]
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            await claude.messages.create(messages=messages, **keys)

    rows = []
    for program in (by_chat, by_responses, by_messages):
        session, _ = play(sees, Engine([call, "seen"]), program)
        assert session.counts | {"rows": 1, "rewritten": 0, "tool_calls": 1} == session.counts
        assert session.turns[1].items == (Item(A),)
        rows += rows_of(session)
    assert rows[0] == rows[1] == rows[2] and min(rows[0]) < 0


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "not fetched from addresses"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "no folder of pictures is known here"),
        (shown(base64.b64encode(b"<svg></svg>").decode()), "SVG, which has no pixels"),
        (shown(encoded(A)[:400]), "unreadable"),
        ({"type": "image_url", "image_url": {}}, "null, expected a picture"),
        ({"type": "input_audio", "input_audio": {}}, "sound is not supported"),
    ],
)
def test_what_is_no_picture_is_refused_with_its_place(sees, part, reason):
    async def program(policy: openai.AsyncOpenAI) -> Any:
        with pytest.raises(openai.BadRequestError, match=reason) as refused:
            await ask(policy, {"role": "user", "content": [{"type": "text", "text": "?"}, part]})
        return refused.value

    session, error = play(sees, Engine(["never"]), program)
    assert str(error.param).startswith("messages.0.content.1") and session.counts["refused"] == 1


def test_who_shows_pictures_and_to_whom(sees):
    async def program(policy: openai.AsyncOpenAI) -> None:
        user = {"role": "user", "content": [shown(encoded(A))]}
        with pytest.raises(openai.BadRequestError, match="pictures of users and tools"):
            await ask(policy, {**user, "role": "system"}, user)
        if policy is not None and seen is RENDERER:
            with pytest.raises(openai.BadRequestError, match="the policy takes no pictures"):
                await ask(policy, user)

    for seen in (sees, RENDERER):
        play(seen, Engine(["never"]), program)


def test_a_program_gets_the_pixels_that_the_policy_gets(sees):
    (item,) = (sees.pictures.item(np.repeat(A, 9, axis=0)),)  # type: ignore[union-attr]
    (sent,) = for_programs([{"type": "image", "image": item}])
    assert sees.pictures.item(sent["image_url"]["url"]) == item  # type: ignore[union-attr]
