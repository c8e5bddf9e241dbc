"""The Responses API of OpenAI and the Messages API of Anthropic, through their real clients."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from roll.rollout.endpoint.session import Session
from tests.support.said_engine import LIMITS, TOKENIZER, Engine, new_session, rows_of, serving

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 3}}\n</tool_call>'
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}


def play(engine: Engine, program: Any) -> tuple[Session, Any]:
    """An episode of ``program(url, key)``."""

    async def run() -> tuple[Session, Any]:
        session = new_session(engine)
        async with serving() as endpoint:
            with endpoint.open(session) as key:
                return session, await program(endpoint.url.removesuffix("/v1"), key)

    return asyncio.run(run())


def assert_one_row(session: Session, engine: Engine) -> None:
    prompt, ids = engine.log[-1]
    assert rows_of(session) == [prompt + ids] and session.counts["rewritten"] == 0
    assert prompt[: len(engine.log[0][0] + engine.log[0][1])] == engine.log[0][0] + engine.log[0][1]
    assert "<tool_response>\n51\n</tool_response>" in TOKENIZER.decode(prompt)


@pytest.mark.parametrize("streams", [False, True])
def test_messages_of_anthropic(streams: bool) -> None:
    engine = Engine([f"<think>hm</think>Let me see. {CALL}", "It is 51 END of it"])
    tool: Any = {"name": "multiply", "description": "Multiplies.", "input_schema": PARAMETERS}

    async def program(url: str, key: str) -> Any:
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:

            async def ask(messages: list[Any]) -> Any:
                keys: Any = {"system": "Be brief.", "tools": [tool], "max_tokens": 200, "stop_sequences": ["END"]}
                if not streams:
                    return await client.messages.create(model="claude", messages=messages, **keys)
                async with client.messages.stream(model="claude", messages=messages, **keys) as stream:
                    return await stream.get_final_message()

            messages: list[Any] = [{"role": "user", "content": "17*3="}]
            first = await ask(messages)
            thought, _, use = first.content
            assert (thought.thinking, use.name, use.input) == ("hm", "multiply", {"a": 17, "b": 3})
            assert first.stop_reason == "tool_use"
            result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "51"}]}
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            return await ask(messages)

    session, last = play(engine, program)
    assert (last.content[0].text.strip(), last.stop_reason, last.stop_sequence) == ("It is 51", "stop_sequence", "END")
    assert last.usage.input_tokens == len(engine.log[1][0]) and last.usage.output_tokens == len(engine.log[1][1])
    assert_one_row(session, engine)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_responses_of_openai(streams: bool, named: bool) -> None:
    engine = Engine([f"<think>hm</think>Let me see. {CALL}", "It is 51"])
    tool: Any = {"type": "function", "name": "multiply", "description": "Multiplies.", "parameters": PARAMETERS}

    async def program(url: str, key: str) -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:

            async def ask(items: Any, **keys: Any) -> Any:
                keys |= {"instructions": "Be brief.", "tools": [tool], "input": items}
                if not streams:
                    return await client.responses.create(model="gpt", **keys)
                async with client.responses.stream(model="gpt", **keys) as stream:
                    return await stream.get_final_response()

            first = await ask("17*3=")
            thought, said, call = first.output
            assert (thought.type, said.content[0].text, call.name) == ("reasoning", "Let me see.", "multiply")
            assert json.loads(call.arguments) == {"a": 17, "b": 3}
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "51"}
            if named:
                return await ask([result], previous_response_id=first.id)
            plain = [item.model_dump(exclude_none=True) for item in first.output]
            return await ask([{"role": "user", "content": "17*3="}, *plain, result])

    session, last = play(engine, program)
    assert (last.output_text, last.status) == ("It is 51", "completed")
    assert last.usage.input_tokens == len(engine.log[1][0]) and last.usage.output_tokens == len(engine.log[1][1])
    assert_one_row(session, engine)


def test_both_refuse_in_their_own_words() -> None:
    async def program(url: str, key: str) -> None:
        long: Any = [{"role": "user", "content": "x" * LIMITS.sequence_length}]
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as claude:
            with pytest.raises(anthropic.BadRequestError, match="maximum context length") as full:
                await claude.messages.create(model="m", max_tokens=9, messages=long)
            assert full.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
            image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
            with pytest.raises(anthropic.BadRequestError, match=r"messages.0.content.0.type: got 'image'"):
                await claude.messages.create(model="m", max_tokens=9, messages=image)
            with pytest.raises(anthropic.NotFoundError) as unknown:
                await claude.messages.count_tokens(model="m", messages=image)
            assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
            assert unknown.value.body["type"] == "error"  # type: ignore[index]
            with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
                await claude.messages.create(model="m", max_tokens=0, messages=long)
        async with anthropic.AsyncAnthropic(base_url=url, api_key="sk-ant-none", max_retries=0) as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(model="m", max_tokens=9, messages=long)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            with pytest.raises(openai.NotFoundError, match="expected one of this episode"):
                await client.responses.create(model="m", input="x", previous_response_id="resp_1")
            search: Any = [{"type": "web_search"}]
            with pytest.raises(openai.BadRequestError, match=r"tools.0.type: got 'web_search'"):
                await client.responses.create(model="m", input="x", tools=search)
            asked: Any = {"background": True, "conversation": "conv_1", "prompt": {"id": "p"}, "top_logprobs": 2}
            for field, value in asked.items():
                with pytest.raises(openai.BadRequestError, match=f"{field}: got"):
                    await client.responses.create(model="m", input="x", **{field: value})
            cut = await client.responses.create(model="m", input="x", max_output_tokens=1)
            assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]

    session, _ = play(Engine(["abc"]), program)
    assert session.counts["refused"] == 9 and len(session.turns) == 1
