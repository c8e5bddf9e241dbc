"""The endpoint as programs see it, through the real ``openai`` client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, GenerateRequest
from roll.rollout.endpoint.errors import PortTakenError
from roll.rollout.endpoint.sampling import bytes_of
from roll.rollout.endpoint.server import Endpoint
from roll.rollout.endpoint.session import Session
from roll.rollout.router import EngineUnavailableError
from tests.support.said_engine import LIMITS, RENDERER, TOKENIZER, Engine, client, new_session, rows_of, serving

USER = {"role": "user", "content": "17*3="}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 3}}\n</tool_call>'

Program = Callable[[openai.AsyncOpenAI], Awaitable[Any]]


def play(engine: Engine, program: Program, **keys: Any) -> tuple[Session, Any]:
    """An episode: the session when it is over, and what the program returned."""

    async def run() -> tuple[Session, Any]:
        session = new_session(engine, **keys)
        async with serving() as endpoint, client(endpoint, session) as policy:
            return session, await program(policy)

    return asyncio.run(run())


def refused(error: openai.APIStatusError) -> tuple[int, str | None, str | None]:
    assert isinstance(error.body, dict) and {"message", "type", "param", "code"} == error.body.keys()
    return error.status_code, error.code, error.param


def new_client(url: str, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)


async def refusal(policy: openai.AsyncOpenAI, **keys: Any) -> tuple[int, str | None, str | None]:
    with pytest.raises(openai.APIStatusError) as caught:
        await policy.chat.completions.create(**{"model": "gpt", "messages": [USER], **keys})
    return refused(caught.value)


def test_a_conversation_with_tools_is_one_row_of_what_was_sampled() -> None:
    engine = Engine([CALL, "<think>easy</think>It is <answer>51</answer>"])

    async def program(policy: openai.AsyncOpenAI) -> Any:
        messages: list[Any] = [USER]
        first = await policy.chat.completions.create(model="gpt", messages=messages, tools=[TOOL])  # type: ignore[list-item]
        (call,) = first.choices[0].message.tool_calls or ()
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "51"}]
        second = await policy.chat.completions.create(model="gpt", messages=messages, tools=[TOOL])  # type: ignore[list-item]
        return first, call, second

    session, (first, call, second) = play(engine, program)
    assert first.choices[0].finish_reason == "tool_calls" and first.choices[0].message.content is None
    assert (call.function.name, json.loads(call.function.arguments)) == ("multiply", {"a": 17, "b": 3})
    assert second.choices[0].message.content == "It is <answer>51</answer>"
    assert second.choices[0].message.reasoning_content == "easy" and second.choices[0].finish_reason == "stop"
    (_, first_ids), (second_prompt, second_ids) = engine.log
    assert second.usage.prompt_tokens == len(second_prompt) and second.usage.completion_tokens == len(second_ids)
    assert rows_of(session) == [second_prompt + second_ids]
    assert second_prompt[: len(engine.log[0][0]) + len(first_ids)] == engine.log[0][0] + first_ids
    assert "<tool_response>\n51\n</tool_response>" in TOKENIZER.decode(second_prompt)
    assert session.counts | {"calls": 2, "rows": 1, "rewritten": 0, "refused": 0} == session.counts
    assert [turn.action for turn in session.turns] == ["multiply", None]


def test_streams_choices_and_logprobs_are_those_of_the_api() -> None:
    engine = Engine(["first", CALL, "third STOP rest"], end=False)

    async def program(policy: openai.AsyncOpenAI) -> Any:
        whole = await policy.chat.completions.create(model="m", messages=[USER], n=2, logprobs=True)  # type: ignore[list-item]
        chunks = [
            chunk
            async for chunk in await policy.chat.completions.create(  # type: ignore[call-overload]
                model="m",
                messages=[USER],
                tools=[TOOL],
                stream=True,
                stream_options={"include_usage": True},
                stop=["STOP"],
            )
        ]
        return whole, chunks

    session, (whole, chunks) = play(engine, program)
    assert [choice.message.content for choice in whole.choices] == ["first", CALL], "no tools, no calls"
    tokens = whole.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == "first"
    assert [token.logprob for token in tokens] == session.turns[0].completion.logprobs.tolist()
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert said == "third" or said == "third "
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [None, "stop"]
    assert chunks[-1].usage.completion_tokens == len(engine.log[-1][1])
    assert engine.requests[0].params.seed != engine.requests[1].params.seed
    assert engine.requests[2].params.stop == ("STOP",)
    assert len(rows_of(session)) == 3


def test_a_token_tells_its_bytes_where_it_is_part_of_a_character() -> None:
    async def program(policy: openai.AsyncOpenAI) -> Any:
        return await policy.chat.completions.create(model="m", messages=[USER], logprobs=True)  # type: ignore[list-item]

    _, whole = play(Engine(["a\u2603\U0001f40d\u00e9"]), program)
    tokens = whole.choices[0].logprobs.content
    said = bytes(byte for token in tokens for byte in token.bytes).decode()
    assert said.startswith("a\u2603\U0001f40d\u00e9") and any(token.token == "\ufffd" for token in tokens)
    pieces = {"<unk>": 0, "<0xE2>": 1, "hidden": 2}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(pieces, "<unk>")), unk_token="<unk>")
    renderer = ChatRenderer(tokenizer, "qwen2_5")
    assert [bytes_of(renderer, token, "\ufffd") for token in (1, 0)] == [[0xE2], list(b"<unk>")]
    assert bytes_of(renderer, 2, "\u2603") == [0xE2, 0x98, 0x83]
    pieces["\u4e00"] = 3
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(pieces, "<unk>")))
    assert bytes_of(ChatRenderer(other, "qwen2_5"), 3, "\ufffd") is None


def test_tool_calls_arrive_in_a_stream() -> None:
    async def program(policy: openai.AsyncOpenAI) -> Any:
        async with policy.chat.completions.stream(model="m", messages=[USER], tools=[TOOL]) as stream:  # type: ignore[list-item]
            return await stream.get_final_completion()

    _, final = play(Engine([f"Let me see. {CALL}"]), program)
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 17, "b": 3}


def test_what_a_program_changes_is_a_row_of_its_own_and_is_counted() -> None:
    engine = Engine(["one", "two", "three", "four", "five"])

    async def program(policy: openai.AsyncOpenAI) -> None:
        async def ask(*messages: Any, **keys: Any) -> dict[str, Any]:
            answer = await policy.chat.completions.create(model="m", messages=list(messages), **keys)
            return {"role": "assistant", "content": answer.choices[0].message.content}

        one = await ask(USER)
        more = {"role": "user", "content": "more"}
        two = await ask(USER, {"role": "assistant", "content": " one \n"}, more)  # white space is no change
        await ask(USER, one, more, {"role": "assistant", "content": "2"}, more)  # the answer was edited
        await ask({"role": "system", "content": "brief"}, USER, one, more, two, more)  # so was what stands before
        await ask(USER, one, more, two, more, tools=[TOOL])

    session, _ = play(engine, program)
    assert session.counts == {
        "calls": 5,
        "rows": 4,
        "rewritten": 3,
        "rewritten_answer": 1,
        "rewritten_history": 1,
        "rewritten_tools": 1,
        "tool_calls": 0,
        "malformed_calls": 0,
        "refused": 0,
    }
    prompts = [prompt + ids for prompt, ids in engine.log]
    assert rows_of(session) == [prompts[1], *prompts[2:]]
    assert prompts[2][: len(prompts[0])] == prompts[0], "what is as it was is not rendered again"


def test_examples_of_the_program_are_no_rewriting() -> None:
    messages = [USER, {"role": "assistant", "content": "51"}, {"role": "user", "content": "2*3="}]

    async def program(policy: openai.AsyncOpenAI) -> None:
        await policy.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]

    session, _ = play(Engine(["6"]), program)
    assert session.counts["rewritten"] == 0 and session.counts["rows"] == 1
    assert session.turns[0].prompt_ids.tolist() == RENDERER.prompt(messages).tolist()


def test_plain_completions_go_on_with_what_was_sampled() -> None:
    engine = Engine(["bcd", "fgh", "x"])

    async def program(policy: openai.AsyncOpenAI) -> Any:
        first = await policy.completions.create(model="m", prompt="a", logprobs=0, max_tokens=10)
        text = "a" + first.choices[0].text + "e"
        await policy.completions.create(model="m", prompt=text, max_tokens=2)
        ids = TOKENIZER.encode("ids")
        last = await policy.completions.create(model="m", prompt=[ids], seed=3)
        return first, last

    session, (first, last) = play(engine, program)
    assert first.choices[0].text == "bcd" and first.choices[0].logprobs.text_offset[:3] == [0, 1, 2]
    assert [TOKENIZER.decode(prompt) for prompt, _ in engine.log] == ["a", "abcde", "ids"]
    assert session.turns[1].completion.finish_reason == "length"
    assert last.usage.prompt_tokens == 3
    assert len(rows_of(session)) == 3, "the token that ended the first answer is not part of the second prompt"


def test_wrong_requests_are_answered_as_the_api_does() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}

    async def program(policy: openai.AsyncOpenAI) -> None:
        assert await refusal(policy, temperature="hot") == (400, "invalid_value", "temperature")
        assert await refusal(policy, messages=[]) == (400, "invalid_value", "messages")
        assert await refusal(policy, messages=[{"role": "boss", "content": ""}]) == (
            400,
            "invalid_value",
            "messages.0.role",
        )
        assert await refusal(policy, messages=[USER, image]) == (400, "unsupported_value", "messages.1.content.0.type")
        assert await refusal(policy, tool_choice="required") == (400, "unsupported_value", "tool_choice")
        assert await refusal(policy, response_format={"type": "json_object"}) == (
            400,
            "unsupported_value",
            "response_format",
        )
        assert await refusal(policy, top_logprobs=2, logprobs=True) == (400, "unsupported_value", "top_logprobs")
        assert await refusal(policy, n=9) == (400, "invalid_value", "n")
        long = [{"role": "user", "content": "x" * LIMITS.sequence_length}]
        assert await refusal(policy, messages=long) == (400, "context_length_exceeded", "messages")
        with pytest.raises(openai.NotFoundError) as caught:
            await policy.embeddings.create(model="m", input="x")
        assert refused(caught.value) == (404, "unknown_url", None)
        with pytest.raises(openai.NotFoundError):
            await policy.models.retrieve("gpt")
        assert [model.id async for model in policy.models.list()] == ["policy"]
        async with httpx.AsyncClient(base_url=str(policy.base_url), headers=policy.auth_headers) as http:
            broken = await http.post("chat/completions", content=b"{")
            half = await http.post(
                "chat/completions", content=rb'{"messages": [{"role": "user", "content": "\ud800"}]}'
            )
            odd = await http.post("chat/completions", content=b'{"messages": [{"role": "user", "content": "\xff"}]}')
            much = await http.post("chat/completions", content=b" " * (33 << 20))
            wrong = await http.get("chat/completions")
            vast = await http.post("completions", json={"prompt": [10**30]})
            own = [await http.post(name, json={"action": 1, "reward": "much"}) for name in ("step", "reward")]
        assert [each.status_code for each in (broken, half, odd, much, wrong)] == [400, 400, 400, 413, 405]
        assert [each.json()["error"]["param"] for each in (vast, *own)] == ["prompt", "action", "reward"]
        assert broken.json()["error"]["code"] == "invalid_json"

    session, _ = play(Engine(["x"]), program)
    assert not session.turns and session.counts["refused"] == 16


async def test_a_key_opens_its_episode_alone_and_only_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="uvicorn")
    caplog.set_level("DEBUG", logger="roll")
    async with serving() as endpoint, contextlib.AsyncExitStack() as stack:
        sessions = [new_session(Engine(["x"])) for _ in range(2)]
        with endpoint.open(sessions[0]) as mine, endpoint.open(sessions[1]) as other:
            assert mine != other and len(mine) >= 43
            by_path = endpoint.url.replace("/v1", f"/s/{mine}/v1")
            policy = await stack.enter_async_context(new_client(by_path, "sk-whatever"))
            await policy.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
            assert [len(session.turns) for session in sessions] == [1, 0]
            for key in ("sk-1", mine[:-1], mine + "x"):
                wrong = await stack.enter_async_context(new_client(endpoint.url, key))
                with pytest.raises(openai.AuthenticationError) as caught:
                    await wrong.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
                assert refused(caught.value)[1] in ("invalid_api_key", "missing_api_key")
        with pytest.raises(openai.APIStatusError) as ended:
            await policy.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
        assert refused(ended.value)[:2] == (410, "episode_ended")
        assert (endpoint.count_turned_away(), endpoint.count_turned_away()) == (4, 0)
        assert [len(session.turns) for session in sessions] == [1, 0]
        assert mine not in caplog.text and other not in caplog.text


def test_more_than_a_session_may_have_at_once_is_refused_and_the_rest_goes_on() -> None:
    engine = Engine(["x"], seconds=0.3)

    async def program(policy: openai.AsyncOpenAI) -> list[Any]:
        asks = [policy.chat.completions.create(model="m", messages=[USER]) for _ in range(20)]  # type: ignore[list-item]
        return await asyncio.gather(*asks, return_exceptions=True)

    session, answers = play(engine, program, max_parallel_requests=3)
    late = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert len(late) == 17 and len(session.turns) == 3 and session.counts["refused"] == 17
    assert len({request.params.seed for request in engine.requests}) == 3, "equal prompts get answers of their own"


def test_calls_beyond_the_last_are_refused_for_good() -> None:
    async def program(policy: openai.AsyncOpenAI) -> None:
        await policy.chat.completions.create(model="m", messages=[USER], n=2)  # type: ignore[list-item]
        assert await refusal(policy) == (403, "max_calls_exceeded", None)

    session, _ = play(Engine(["x"]), program, max_calls=2)
    assert len(session.turns) == 2 and session.end == "truncated"


LONG = "ab " * 100_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("chat/completions", {"messages": [USER], "tools": [{"function": {"name": "a", "description": LONG}}]}),
        ("chat/completions", {"messages": [USER] * LIMITS.sequence_length}),
        ("completions", {"prompt": LONG}),
        ("responses", {"input": LONG}),
        ("messages", {"max_tokens": 9, "messages": [{"role": "user", "content": LONG}]}),
    ],
    ids=["words", "tool", "messages", "completion", "response", "anthropic"],
)
def test_what_is_far_too_long_is_refused_before_it_is_tokenised(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def program(policy: openai.AsyncOpenAI) -> httpx.Response:
        async with httpx.AsyncClient(base_url=str(policy.base_url), headers=policy.auth_headers) as http:
            return await http.post(path, json=body, timeout=60)

    for name in ("prompt", "words"):
        monkeypatch.delattr(ChatRenderer, name)
    session, answer = play(Engine(["x"]), program)
    assert answer.status_code == 400 and "maximum context length is 2000 tokens" in answer.text
    assert session.cut_off and session.counts["refused"] == 1


def test_a_program_that_no_longer_waits_has_its_request_given_up() -> None:
    engine = Engine(["x"], seconds=60)

    async def program(policy: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.APITimeoutError):
            await policy.chat.completions.create(model="m", messages=[USER], timeout=0.3)  # type: ignore[list-item]
        while not engine.given_up:
            await asyncio.sleep(0.01)

    session, _ = play(engine, program)
    assert engine.given_up == 1 and not session.turns


async def test_requests_under_way_when_the_episode_ends_are_given_up() -> None:
    engine = Engine(["x"], seconds=60)

    session = new_session(engine)
    async with serving() as endpoint:
        with endpoint.open(session) as key:
            policy = new_client(endpoint.url, key)
            asking = asyncio.create_task(refusal(policy))
            while not engine.requests:
                await asyncio.sleep(0.01)
        assert await asking == (410, "episode_ended", None)
        await policy.close()
    assert engine.given_up == 1 and not session.turns


def test_an_engine_that_dies_ends_the_episode_with_its_error() -> None:
    class Dying(Engine):
        async def generate(self, request: GenerateRequest) -> Completion:
            raise EngineUnavailableError("engine worker 0 died")

    async def program(policy: openai.AsyncOpenAI) -> None:
        assert await refusal(policy) == (500, "engine_failed", None)

    session, _ = play(Dying(["x"]), program)
    with pytest.raises(EngineUnavailableError, match="worker 0"):
        session.failure.result()


def test_sampling_is_the_runs_unless_requests_may_choose() -> None:
    async def program(policy: openai.AsyncOpenAI) -> None:
        for seed in (1, 1, 2, None):
            await policy.chat.completions.create(  # type: ignore[call-overload]
                model="m", messages=[USER], temperature=0.5, top_p=0.9, seed=seed, max_completion_tokens=7
            )

    run, request = Engine(["x"]), Engine(["x"])
    play(run, program)
    play(request, program, sampling="request")
    assert {(each.params.temperature, each.params.top_p) for each in run.requests} == {(1.0, 1.0)}
    assert {(each.params.temperature, each.params.top_p) for each in request.requests} == {(0.5, 0.9)}
    assert {each.params.max_new_tokens for each in run.requests} == {7}
    one, again, two, none = (each.params.seed for each in run.requests)
    assert one == again and len({one, two, none}) == 3


async def test_a_port_that_is_taken_is_named() -> None:
    async with serving() as endpoint:
        port = int(endpoint.url.rpartition(":")[2].removesuffix("/v1"))
        with pytest.raises(PortTakenError, match=f"agent.port: got {port}, expected a free port of 127.0.0.1"):
            Endpoint(port)
