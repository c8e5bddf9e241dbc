"""The endpoint as programs see it, through the real ``openai`` client."""

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from roll.agentic.tools.dialects import dialect
from roll.configs.agent import AgentConfig
from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, FinishReason, GenerateRequest
from roll.rollout.endpoint import server as bodies
from roll.rollout.endpoint.errors import ApiError, PortTakenError
from roll.rollout.endpoint.sampling import bytes_of
from roll.rollout.endpoint.server import Endpoint
from roll.rollout.endpoint.session import History, Policy, Session, Wanted
from roll.rollout.router import EngineUnavailableError
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import EpisodeEnd, RolloutGroup, Trajectory
from tests.support.chat_families import family_tokenizer
from tests.support.examples import examples
from tests.support.said_engine import (
    EPISODE,
    LIMITS,
    PARAMS,
    RENDERER,
    TOKENIZER,
    Engine,
    client,
    new_session,
    rows_of,
    serving,
)

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


def test_a_conversation_with_tools_is_one_row_of_what_was_sampled():
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


def test_streams_choices_and_logprobs_are_those_of_the_api():
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


def test_a_token_tells_its_bytes_where_it_is_part_of_a_character():
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


def test_tool_calls_arrive_in_a_stream():
    async def program(policy: openai.AsyncOpenAI) -> Any:
        async with policy.chat.completions.stream(model="m", messages=[USER], tools=[TOOL]) as stream:  # type: ignore[list-item]
            return await stream.get_final_completion()

    _, final = play(Engine([f"Let me see. {CALL}"]), program)
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 17, "b": 3}


def test_what_a_program_changes_is_a_row_of_its_own_and_is_counted():
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
        "rewritten_pictures": 0,
        "tool_calls": 0,
        "malformed_calls": 0,
        "refused": 0,
    }
    prompts = [prompt + ids for prompt, ids in engine.log]
    assert rows_of(session) == [prompts[1], *prompts[2:]]
    assert prompts[2][: len(prompts[0])] == prompts[0], "what is as it was is not rendered again"


def test_examples_of_the_program_are_no_rewriting():
    messages = [USER, {"role": "assistant", "content": "51"}, {"role": "user", "content": "2*3="}]

    async def program(policy: openai.AsyncOpenAI) -> None:
        await policy.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]

    session, _ = play(Engine(["6"]), program)
    assert session.counts["rewritten"] == 0 and session.counts["rows"] == 1
    assert session.turns[0].prompt_ids.tolist() == RENDERER.prompt(messages).tolist()


def test_plain_completions_go_on_with_what_was_sampled():
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


def test_wrong_requests_are_answered_as_the_api_does():
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}

    async def program(policy: openai.AsyncOpenAI) -> None:
        assert await refusal(policy, temperature="hot") == (400, "invalid_value", "temperature")
        assert await refusal(policy, messages=[]) == (400, "invalid_value", "messages")
        assert await refusal(policy, messages=[{"role": "boss", "content": ""}]) == (
            400,
            "invalid_value",
            "messages.0.role",
        )
        assert await refusal(policy, messages=[USER, image]) == (
            400,
            "invalid_image",
            "messages.1.content.0.image_url",
        )
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
            none = await http.post("chat/completions", content=b"[]")
            vast = await http.post("completions", json={"prompt": [10**30]})
            own = [await http.post(name, json={"action": 1, "reward": "much"}) for name in ("step", "reward")]
        assert [each.status_code for each in (broken, half, odd, none, much, wrong)] == [400, 400, 400, 400, 413, 405]
        assert [each.json()["error"]["param"] for each in (vast, *own)] == ["prompt", "action", "reward"]
        assert broken.json()["error"]["code"] == "invalid_json"
        assert none.json()["error"]["message"] == "the body: Input should be an object, got []"

    session, _ = play(Engine(["x"]), program)
    assert not session.turns and session.counts["refused"] == 17


async def test_a_key_opens_its_episode_alone_and_only_until_it_ends(caplog):
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


def test_more_than_a_session_may_have_at_once_is_refused_and_the_rest_goes_on():
    engine = Engine(["x"], seconds=0.3)

    async def program(policy: openai.AsyncOpenAI) -> list[Any]:
        asks = [policy.chat.completions.create(model="m", messages=[USER]) for _ in range(20)]  # type: ignore[list-item]
        return await asyncio.gather(*asks, return_exceptions=True)

    session, answers = play(engine, program, max_parallel_requests=3)
    late = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert len(late) == 17 and len(session.turns) == 3 and session.counts["refused"] == 17
    assert len({request.params.seed for request in engine.requests}) == 3, "equal prompts get answers of their own"


def test_calls_beyond_the_last_are_refused_for_good():
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
def test_what_is_far_too_long_is_refused_before_it_is_tokenised(path, body, monkeypatch):
    async def program(policy: openai.AsyncOpenAI) -> httpx.Response:
        async with httpx.AsyncClient(base_url=str(policy.base_url), headers=policy.auth_headers) as http:
            return await http.post(path, json=body, timeout=60)

    for name in ("prompt", "words"):
        monkeypatch.delattr(ChatRenderer, name)
    session, answer = play(Engine(["x"]), program)
    assert answer.status_code == 400 and "maximum context length is 2000 tokens" in answer.text
    assert session.cut_off and session.counts["refused"] == 1


def test_a_program_that_no_longer_waits_has_its_request_given_up():
    engine = Engine(["x"], seconds=60)

    async def program(policy: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.APITimeoutError):
            await policy.chat.completions.create(model="m", messages=[USER], timeout=0.3)  # type: ignore[list-item]
        while not engine.given_up:
            await asyncio.sleep(0.01)

    session, _ = play(engine, program)
    assert engine.given_up == 1 and not session.turns


async def test_requests_under_way_when_the_episode_ends_are_given_up():
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


def test_an_engine_that_dies_ends_the_episode_with_its_error():
    class Dying(Engine):
        async def generate(self, request: GenerateRequest) -> Completion:
            raise EngineUnavailableError("engine worker 0 died")

    async def program(policy: openai.AsyncOpenAI) -> None:
        assert await refusal(policy) == (500, "engine_failed", None)

    session, _ = play(Dying(["x"]), program)
    with pytest.raises(EngineUnavailableError, match="worker 0"):
        session.failure.result()


def test_sampling_is_the_runs_unless_requests_may_choose():
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


async def test_a_port_that_is_taken_is_named():
    async with serving() as endpoint:
        port = int(endpoint.url.rpartition(":")[2].removesuffix("/v1"))
        with pytest.raises(PortTakenError, match=f"agent.port: got {port}, expected a free port of 127.0.0.1"):
            Endpoint(port)


ADD_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
ADD_CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1.0}}\n</tool_call>'
TEXTS = ["a", "<think>b</think>c", ADD_CALL, "<tool_call>{", " "]


class Asynchronous(Engine):
    """Answers in any order, under weights that change in between."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(["-"])
        self.chance = chance
        self.sampled: list[Completion] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        for _ in range(self.chance.randrange(4)):
            await asyncio.sleep(0)
            self.version += self.chance.random() < 0.3
        ids = TOKENIZER.encode(self.chance.choice(TEXTS)) + [TOKENIZER.eos_token_id] * (self.chance.random() < 0.7)
        versions = np.sort([self.chance.randint(0, self.version) for _ in ids])
        logprobs = np.array([-self.chance.random() for _ in ids], dtype=np.float32)
        completion = Completion(request.request_id, np.array(ids), logprobs, FinishReason.STOP, versions)
        self.log.append((request.prompt_ids.tolist(), ids))
        self.sampled.append(completion)
        return completion


async def harness(session: Any, chance: random.Random) -> None:
    """Goes on with one of its conversations, changes it, or begins another, some of them side by side."""
    conversations: list[list[dict[str, Any]]] = [[{"role": "user", "content": "q"}]]

    async def ask() -> None:
        messages = [dict(message) for message in chance.choice(conversations)]
        match chance.randrange(7):
            case 0:  # compaction
                messages = [{"role": "user", "content": "in short: q"}]
            case 1 if len(messages) > 1:  # an edited message
                chance.choice(messages)["content"] = "edited"
            case 2 if len(messages) > 2:  # a retry
                messages = messages[:-2]
            case 3:  # a sub-agent
                messages = [{"role": "system", "content": "help"}, {"role": "user", "content": "q"}]
        tools = [ADD_TOOL] if chance.random() < 0.7 else []
        stop = ("c",) if chance.random() < 0.2 else ()
        for answer in await session.chat(messages, tools, Wanted(n=chance.choice([1, 1, 2]), stop=stop)):
            said = answer.turn.as_openai()
            follow = {"role": "tool", "content": "2"} if answer.turn.calls else {"role": "user", "content": "more"}
            conversations.append([*messages, said, follow])

    for _ in range(chance.randrange(1, 6)):
        await asyncio.gather(*(ask() for _ in range(chance.randrange(1, 4))))


def test_results_have_the_names_of_their_tools_where_the_template_writes_them():
    """Clients send ids alone; gpt-oss reads who answers."""
    renderer, calls = ChatRenderer(family_tokenizer("gpt_oss")), []
    said = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 1}<|call|>'

    async def generate(request: GenerateRequest) -> Completion:
        ids = np.array(renderer.tokenizer.encode(said, add_special_tokens=False))
        calls.append(renderer.decode_raw(request.prompt_ids))
        return Completion(
            request.request_id, ids, np.zeros(len(ids), np.float32), FinishReason.STOP, np.zeros(len(ids))
        )

    async def run() -> None:
        policy = Policy(renderer, dialect("harmony"), LIMITS)
        session = Session(AgentConfig(command=["true"]), policy, generate, PARAMS, EPISODE)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
        (answer,) = await session.chat(messages, [ADD_TOOL], Wanted())
        (call,) = answer.turn.calls
        messages += [answer.turn.as_openai(), {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        await session.chat(messages, [ADD_TOOL], Wanted())
        assert session.counts["rows"] == 1

    asyncio.run(run())
    assert calls[1].endswith(
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant'
    )


@examples(60)
@given(seed=st.integers(0, 2**32))
def test_rows_are_the_engines_own_log(seed):
    async def run() -> tuple[Any, Asynchronous]:
        chance = random.Random(seed)
        engine = Asynchronous(chance)
        session = new_session(engine)
        await harness(session, chance)
        return session, engine

    session, engine = asyncio.run(run())
    episode = Trajectory("sums", 0, 0, 0, tuple(session.turns), EpisodeEnd.TERMINATED, True, "", history=True)
    batch = groups_to_batch([RolloutGroup(0, "sums", (episode,))], ["sums"])
    assert batch.rollout_logprobs_T is not None and batch.rollout_versions_T is not None
    expected = sorted(
        (prompt, ids, completion.logprobs.tolist(), completion.versions.tolist())
        for (prompt, ids), completion in zip(engine.log, engine.sampled, strict=True)
    )
    found = []
    for tokens, mask, turns, logprobs, versions in zip(
        *(
            np.split(values.numpy(), np.cumsum(batch.lengths_B.numpy())[:-1])
            for values in (
                batch.tokens_T,
                batch.loss_mask_T,
                batch.turn_T,
                batch.rollout_logprobs_T,
                batch.rollout_versions_T,
            )
        ),
        strict=True,
    ):
        for turn in np.unique(turns[mask]):
            at = np.flatnonzero(mask & (turns == turn))
            start = at[0]
            found.append((tokens[:start].tolist(), tokens[at].tolist(), logprobs[at].tolist(), versions[at].tolist()))
    assert sorted(found) == expected, "each answer once, behind exactly what it was sampled from"
    assert session.counts["calls"] == len(expected) and session.counts["rows"] == len(batch.lengths_B)
    if batch.sample_weight_B is not None:
        assert abs(float(batch.sample_weight_B.sum()) - 1) < 1e-12, "together the weight of one episode"


async def test_what_a_session_sends_at_once_is_bounded(monkeypatch):
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


ASKING = b'[{"role":"user","content":"q"}]'
HOSTILE = {
    "messages": b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * 200_000) + b"]}",
    "no messages": b'{"messages":[' + b",".join([b"1"] * 1_000_000) + b"]}",
    "parts": b'{"messages":[{"role":"user","content":['
    + b",".join([b'{"type":"text","text":"a"}'] * 200_000)
    + b"]}]}",
    "nested": b'{"messages":' + ASKING + b',"metadata":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "keys": b'{"messages":' + ASKING + b"," + b",".join(b'"k%d":1' % i for i in range(200_000)) + b"}",
    "stops": b'{"messages":' + ASKING + b',"stop":[' + b",".join([b'"x"'] * 200_000) + b"]}",
    "number": b'{"messages":' + ASKING + b',"seed":' + b"9" * 300_000 + b"}",
    "text": b'{"messages":[{"role":"user","content":"' + b"ab " * 300_000 + b'"}]}',
    "escapes": b'{"messages":[{"role":"user","content":"' + b'\\"' * 300_000 + b'"}]}',
    "blank": b" " * 1_000_000 + b"{}",
    "backslashes": b"\\" * 1_000_000,
}


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_hostile_body_is_refused_in_the_providers_form_before_it_is_parsed(path, kind):
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


def test_the_shape_of_a_text_does_not_depend_on_its_pieces():
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


async def test_a_body_that_does_not_arrive_is_given_up(monkeypatch):
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


def test_headers_are_bounded():
    async def run() -> bytes:
        async with serving() as endpoint:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.url.split(":")[2].split("/")[0]))
            with contextlib.suppress(ConnectionError):
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 500_000)
                async with asyncio.timeout(20):
                    return await reader.read(12)
            return b""

    assert asyncio.run(run()) in (b"", b"HTTP/1.1 400")


LONG_BODY = {
    "words": [{"role": "user", "content": "a b " * 30_000}],
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


@pytest.mark.parametrize("kind", LONG_BODY)
async def test_a_long_conversation_is_compared_and_rendered_beside_the_event_loop(kind, monkeypatch):
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
                body = {"messages": [{"role": "user", "content": "q"}, *LONG_BODY[kind]]}
                told = await http.post(f"{endpoint.url}/chat/completions", json=body)
    assert told.status_code == 400 and threads["recall"] is not threading.main_thread()
    assert threads.get("prompt") is not threading.main_thread()


PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}


def play_api(engine: Engine, program: Any) -> tuple[Session, Any]:
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
def test_messages_of_anthropic(streams):
    engine = Engine([f"<think>hm</think>Let me see. {CALL}", "It is 51 END of it"])
    tool: Any = {"name": "multiply", "description": "Multiplies.", "input_schema": PARAMETERS}

    from anthropic import AsyncAnthropic  # seconds, in each process that collects tests

    async def program(url: str, key: str) -> Any:
        async with AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:

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

    session, last = play_api(engine, program)
    assert (last.content[0].text.strip(), last.stop_reason, last.stop_sequence) == ("It is 51", "stop_sequence", "END")
    assert last.usage.input_tokens == len(engine.log[1][0]) and last.usage.output_tokens == len(engine.log[1][1])
    assert_one_row(session, engine)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_responses_of_openai(streams, named):
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

    session, last = play_api(engine, program)
    assert (last.output_text, last.status) == ("It is 51", "completed")
    assert last.usage.input_tokens == len(engine.log[1][0]) and last.usage.output_tokens == len(engine.log[1][1])
    assert_one_row(session, engine)


def test_both_refuse_in_their_own_words():
    import anthropic

    async def program(url: str, key: str) -> None:
        long: Any = [{"role": "user", "content": "x" * LIMITS.sequence_length}]
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as claude:
            with pytest.raises(anthropic.BadRequestError, match="maximum context length") as full:
                await claude.messages.create(model="m", max_tokens=9, messages=long)
            assert full.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
            image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
            with pytest.raises(anthropic.BadRequestError, match=r"messages.0.content.0.source: null"):
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

    session, _ = play_api(Engine(["abc"]), program)
    assert session.counts["refused"] == 9 and len(session.turns) == 1
