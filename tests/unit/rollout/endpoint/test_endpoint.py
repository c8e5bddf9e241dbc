"""The endpoint as programs see it, through the clients of OpenAI and of Anthropic: words, tools and pictures."""

import asyncio
import base64
import contextlib
import functools
import io
import json
import random
import threading
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from roll.data.columns import Item
from roll.data.identity import items_along
from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, FinishReason, GenerateRequest
from roll.rollout.endpoint import server as bodies
from roll.rollout.endpoint.errors import ApiError, PortTakenError
from roll.rollout.endpoint.sampling import bytes_of
from roll.rollout.endpoint.server import Endpoint
from roll.rollout.endpoint.session import History, Session, Wanted
from roll.rollout.observations import for_programs
from roll.rollout.router import EngineUnavailableError
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import EpisodeEnd, RolloutGroup, Trajectory
from tests.support.chat_families import family_tokenizer
from tests.support.examples import examples
from tests.support.rollouts import RENDERER, TOKENIZER, Engine
from tests.support.said_engine import LIMITS, Dying, client, new_session, rows_of, serving
from tests.support.talks import SYSTEM, says, system, user

USER = user("17*3=")
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
MULTIPLY: dict[str, Any] = {"name": "multiply", "description": "Multiplies."}
TOOL: dict[str, Any] = {"type": "function", "function": {**MULTIPLY, "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 3}}\n</tool_call>'
A, B = np.random.default_rng(0).integers(0, 256, (2, 32, 48, 3), np.uint8)


@contextlib.asynccontextmanager
async def playing(
    engine: Engine, renderer: ChatRenderer = RENDERER, **keys: Any
) -> AsyncIterator[tuple[Session, openai.AsyncOpenAI]]:
    """An episode: its session, and a client that asks its policy."""
    session = new_session(engine, renderer, **keys)
    async with serving() as endpoint, client(endpoint, session) as policy:
        yield session, policy


def new_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0)


def claude(policy: openai.AsyncOpenAI) -> Any:
    """Anthropic's client for the same episode."""
    from anthropic import AsyncAnthropic  # seconds, in each process that collects tests

    url = str(policy.base_url).removesuffix("/v1/")
    return AsyncAnthropic(base_url=url, api_key=policy.api_key, max_retries=0)


def plain_http(policy: openai.AsyncOpenAI) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=str(policy.base_url), headers=policy.auth_headers, timeout=60)


async def ask(policy: openai.AsyncOpenAI, *messages: Any, **keys: Any) -> Any:
    return await policy.chat.completions.create(**{"model": "m", "messages": list(messages) or [USER], **keys})


async def reply(policy: openai.AsyncOpenAI, *messages: Any, **keys: Any) -> dict[str, Any]:
    """The words of the answer, as the message that a program would send back."""
    return says((await ask(policy, *messages, **keys)).choices[0].message.content)


async def refusal(asked: Awaitable[Any]) -> tuple[int, str | None, str | None]:
    with pytest.raises(openai.APIStatusError) as caught:
        await asked
    error = caught.value
    assert isinstance(error.body, dict) and {"message", "type", "param", "code"} == error.body.keys()
    return error.status_code, error.code, error.param


def batch_of(session: Session) -> Any:
    episode = Trajectory("sums", 0, 0, 0, tuple(session.turns), EpisodeEnd.TERMINATED, True, "", history=True)
    return groups_to_batch([RolloutGroup(0, "sums", (episode,))], ["sums"])


def by_row(batch: Any, *columns: str) -> list[list[np.ndarray]]:
    """What the columns hold, for each row of the batch."""
    ends = np.cumsum(batch.lengths_B.numpy())[:-1]
    return [list(row) for row in zip(*(np.split(getattr(batch, name).numpy(), ends) for name in columns), strict=True)]


def encoded(pixels: np.ndarray, kind: str = "PNG") -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return base64.b64encode(buffer.getvalue()).decode()


def shown(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


# ---- one conversation in every API: each calls the tool and answers it with 51 and perhaps a picture, and returns
# what was heard first (thought, words, call) and how many tokens the last answer is said to have cost.

WORDS = {"type": "text", "text": "51"}
Heard = tuple[str | None, str | None, str, Any]


async def by_chat(policy: openai.AsyncOpenAI, streams: bool, picture: str | None) -> tuple[Heard, tuple[int, int]]:
    async def listen(*messages: Any, **options: Any) -> Any:
        if not streams:
            return await ask(policy, *messages, tools=[TOOL])
        keys: Any = {"model": "m", "tools": [TOOL], **options}
        async with policy.chat.completions.stream(messages=list(messages), **keys) as stream:
            return await stream.get_final_completion()

    first = await listen(SYSTEM, USER)
    assert (first.usage is None) == streams, "a stream tells it only to those who ask"
    (choice,) = first.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    content = [WORDS, shown(picture)] if picture else "51"
    result = {"role": "tool", "tool_call_id": call.id, "content": content}
    last = await listen(SYSTEM, USER, choice.message, result, stream_options={"include_usage": True})
    assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("It is 51 END", "stop")
    thought = getattr(choice.message, "reasoning_content", None)
    heard = thought, choice.message.content, call.function.name, json.loads(call.function.arguments)
    return heard, (last.usage.prompt_tokens, last.usage.completion_tokens)


async def by_messages(policy: openai.AsyncOpenAI, streams: bool, picture: str | None) -> tuple[Heard, tuple[int, int]]:
    keys: Any = {"model": "m", "system": "Be brief.", "max_tokens": 200, "stop_sequences": ["END"]}
    keys["tools"] = [{**MULTIPLY, "input_schema": PARAMETERS}]
    async with claude(policy) as anthropic:

        async def listen(*messages: Any) -> Any:
            if not streams:
                return await anthropic.messages.create(messages=list(messages), **keys)
            async with anthropic.messages.stream(messages=list(messages), **keys) as stream:
                return await stream.get_final_message()

        first = await listen(USER)
        *before, use = first.content
        assert first.stop_reason == "tool_use"
        source = {"type": "base64", "media_type": "image/png", "data": picture}
        content = [WORDS, {"type": "image", "source": source}] if picture else [WORDS]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": content}
        last = await listen(USER, says(first.content), user([result]))
    told = last.content[0].text.strip(), last.stop_reason, last.stop_sequence
    assert told == ("It is 51", "stop_sequence", "END")
    thought, words = [before[0].thinking, before[1].text] if before else [None, None]
    return (thought, words, use.name, use.input), (last.usage.input_tokens, last.usage.output_tokens)


async def by_responses(
    policy: openai.AsyncOpenAI, streams: bool, picture: str | None, *, named: bool = False
) -> tuple[Heard, tuple[int, int]]:
    """``named`` sends what is new and the name of the response before it."""
    keys: Any = {"model": "m", "instructions": "Be brief."}
    keys["tools"] = [{"type": "function", **MULTIPLY, "parameters": PARAMETERS}]

    async def listen(items: Any, **more: Any) -> Any:
        if not streams:
            return await policy.responses.create(input=items, **keys, **more)
        async with policy.responses.stream(input=items, **keys, **more) as stream:
            return await stream.get_final_response()

    first = await listen("17*3=")
    *before, call = first.output
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{picture}"}
    output = [{"type": "input_text", "text": "51"}, image] if picture else "51"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
    if named:
        last = await listen([result], previous_response_id=first.id)
    else:
        last = await listen([USER, *(item.model_dump(exclude_none=True) for item in first.output), result])
    assert (last.output_text, last.status) == ("It is 51 END", "completed")
    assert [item.type for item in before] == ["reasoning", "message"][: len(before)]
    thought, words = [before[0].content[0].text, before[1].content[0].text] if before else [None, None]
    heard = thought, words, call.name, json.loads(call.arguments)
    return heard, (last.usage.input_tokens, last.usage.output_tokens)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("said", "thought", "words", "picture"),
    [(f"<think>hm</think>Let me see. {CALL}", "hm", "Let me see.", None), (CALL, None, None, encoded(A))],
    ids=["words", "picture"],
)
async def test_a_conversation_with_tools_is_one_row_of_what_was_sampled_in_every_api(
    said, thought, words, picture, streams, sees
):
    rows = []
    for talk in (by_chat, by_messages, by_responses, functools.partial(by_responses, named=True)):
        engine = Engine(said, "It is 51 END")
        async with playing(engine, sees if picture else RENDERER) as (session, policy):
            heard, usage = await talk(policy, streams, picture)
        assert heard == (thought, words, "multiply", {"a": 17, "b": 3})
        (first_prompt, first_ids), (prompt, ids) = engine.log
        assert usage == (len(prompt), len(ids))
        assert rows_of(session) == [prompt + ids]
        assert prompt[: len(first_prompt + first_ids)] == first_prompt + first_ids
        assert session.counts | {"calls": 2, "rows": 1, "rewritten": 0, "tool_calls": 1, "refused": 0} == session.counts
        assert [turn.action for turn in session.turns] == ["multiply", None]
        if picture:
            assert session.turns[1].items == (Item(A),) and min(prompt) < 0
        else:
            assert "<tool_response>\n51\n</tool_response>" in TOKENIZER.decode(prompt)
        rows.append(prompt + ids)
    assert rows == [rows[0]] * 4


async def test_streams_choices_and_logprobs_are_those_of_the_api():
    engine = Engine("first", CALL, "third STOP rest", ends=False)
    async with playing(engine) as (session, policy):
        whole = await ask(policy, n=2, logprobs=True)
        keys: Any = {"tools": [TOOL], "stop": ["STOP"], "stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await ask(policy, **keys)]
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


async def test_a_token_tells_its_bytes_where_it_is_part_of_a_character():
    async with playing(Engine("a\u2603\U0001f40d\u00e9")) as (_, policy):
        tokens = (await ask(policy, logprobs=True)).choices[0].logprobs.content
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


async def test_what_a_program_changes_is_a_row_of_its_own_and_is_counted():
    engine = Engine("one", "two", "three", "four", "five")
    more = user("more")
    async with playing(engine) as (session, policy):
        one = await reply(policy, USER)
        two = await reply(policy, USER, says(" one \n"), more)  # white space is no change
        await reply(policy, USER, one, more, says("2"), more)  # the answer was edited
        await reply(policy, system("brief"), USER, one, more, two, more)  # so was what stands before
        await reply(policy, USER, one, more, two, more, tools=[TOOL])
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


async def test_examples_of_the_program_are_no_rewriting():
    messages = [USER, says("51"), user("2*3=")]
    async with playing(Engine("6")) as (session, policy):
        await ask(policy, *messages)
    assert session.counts["rewritten"] == 0 and session.counts["rows"] == 1
    assert session.turns[0].prompt_ids.tolist() == RENDERER.prompt(messages).tolist()


async def test_plain_completions_go_on_with_what_was_sampled():
    engine = Engine("bcd", "fgh", "x")
    async with playing(engine) as (session, policy):
        first = await policy.completions.create(model="m", prompt="a", logprobs=0, max_tokens=10)
        await policy.completions.create(model="m", prompt="a" + first.choices[0].text + "e", max_tokens=2)
        last = await policy.completions.create(model="m", prompt=[TOKENIZER.encode("ids")], seed=3)
    assert first.choices[0].text == "bcd" and first.choices[0].logprobs.text_offset[:3] == [0, 1, 2]
    assert [TOKENIZER.decode(prompt) for prompt, _ in engine.log] == ["a", "abcde", "ids"]
    assert session.turns[1].completion.finish_reason == "length"
    assert last.usage.prompt_tokens == 3
    assert len(rows_of(session)) == 3, "the token that ended the first answer is not part of the second prompt"


async def test_wrong_requests_are_answered_as_the_api_does():
    image = user([{"type": "image_url", "image_url": {"url": "data:"}}])
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"temperature": "hot"}, "invalid_value", "temperature"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "boss", "content": ""}]}, "invalid_value", "messages.0.role"),
        ({"messages": [USER, image]}, "invalid_image", "messages.1.content.0.image_url"),
        ({"tool_choice": "required"}, "unsupported_value", "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "unsupported_value", "response_format"),
        ({"top_logprobs": 2, "logprobs": True}, "unsupported_value", "top_logprobs"),
        ({"n": 9}, "invalid_value", "n"),
        ({"messages": [user("x" * LIMITS.sequence_length)]}, "context_length_exceeded", "messages"),
    ]
    async with playing(Engine("x")) as (session, policy):
        for keys, code, place in wrong:
            assert await refusal(ask(policy, **keys)) == (400, code, place)
        assert await refusal(policy.embeddings.create(model="m", input="x")) == (404, "unknown_url", None)
        with pytest.raises(openai.NotFoundError):
            await policy.models.retrieve("gpt")
        assert [model.id async for model in policy.models.list()] == ["policy"]
        async with plain_http(policy) as http:
            contents = [
                b"{",
                rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
                b'{"messages": [{"role": "user", "content": "\xff"}]}',
                b"[]",
                b" " * (33 << 20),
            ]
            told = [await http.post("chat/completions", content=content) for content in contents]
            told.append(await http.get("chat/completions"))
            vast = await http.post("completions", json={"prompt": [10**30]})
            own = [await http.post(name, json={"action": 1, "reward": "much"}) for name in ("step", "reward")]
    assert [each.status_code for each in told] == [400, 400, 400, 400, 413, 405]
    assert [each.json()["error"]["param"] for each in (vast, *own)] == ["prompt", "action", "reward"]
    assert told[0].json()["error"]["code"] == "invalid_json"
    assert told[3].json()["error"]["message"] == "the body: Input should be an object, got []"
    assert not session.turns and session.counts["refused"] == 17


async def test_a_key_opens_its_episode_alone_and_only_until_it_ends(caplog):
    caplog.set_level("DEBUG", logger="uvicorn")
    caplog.set_level("DEBUG", logger="roll")
    async with serving() as endpoint, new_client(endpoint.url) as policy:
        sessions = [new_session(Engine("x")) for _ in range(2)]
        with endpoint.open(sessions[0]) as mine, endpoint.open(sessions[1]) as other:
            assert mine != other and len(mine) >= 43
            by_path = policy.copy(base_url=endpoint.url.replace("/v1", f"/s/{mine}/v1"), api_key="sk-whatever")
            await ask(by_path)
            assert [len(session.turns) for session in sessions] == [1, 0]
            for key in ("sk-1", mine[:-1], mine + "x"):
                status, code, _ = await refusal(ask(policy.copy(api_key=key)))
                assert status == 401 and code in ("invalid_api_key", "missing_api_key")
        assert (await refusal(ask(by_path)))[:2] == (410, "episode_ended")
        assert (endpoint.count_turned_away(), endpoint.count_turned_away()) == (4, 0)
        assert [len(session.turns) for session in sessions] == [1, 0]
        assert mine not in caplog.text and other not in caplog.text


async def test_more_than_a_session_may_have_at_once_is_refused_and_the_rest_goes_on():
    engine = Engine("x", seconds=0.3)
    async with playing(engine, max_parallel_requests=3) as (session, policy):
        answers = await asyncio.gather(*(ask(policy) for _ in range(20)), return_exceptions=True)
    late = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert len(late) == 17 and len(session.turns) == 3 and session.counts["refused"] == 17
    assert len({request.params.seed for request in engine.requests}) == 3, "equal prompts get answers of their own"


async def test_calls_beyond_the_last_are_refused_for_good():
    async with playing(Engine("x"), max_calls=2) as (session, policy):
        await ask(policy, n=2)
        assert await refusal(ask(policy)) == (403, "max_calls_exceeded", None)
    assert len(session.turns) == 2 and session.end == "truncated"


LONG = "ab " * 100_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [user(LONG)]}),
        ("chat/completions", {"messages": [USER], "tools": [{"function": {"name": "a", "description": LONG}}]}),
        ("chat/completions", {"messages": [USER] * LIMITS.sequence_length}),
        ("completions", {"prompt": LONG}),
        ("responses", {"input": LONG}),
        ("messages", {"max_tokens": 9, "messages": [user(LONG)]}),
    ],
    ids=["words", "tool", "messages", "completion", "response", "anthropic"],
)
async def test_what_is_far_too_long_is_refused_before_it_is_tokenised(path, body, monkeypatch):
    for name in ("prompt", "words"):
        monkeypatch.delattr(ChatRenderer, name)
    async with playing(Engine("x")) as (session, policy), plain_http(policy) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 400 and "maximum context length is 2000 tokens" in answer.text
    assert session.cut_off and session.counts["refused"] == 1


async def test_a_program_that_no_longer_waits_has_its_request_given_up():
    engine = Engine("x", seconds=60)
    async with playing(engine) as (session, policy):
        with pytest.raises(openai.APITimeoutError):
            await ask(policy, timeout=0.3)
        while not engine.given_up:
            await asyncio.sleep(0.01)
    assert engine.given_up == 1 and not session.turns


async def test_requests_under_way_when_the_episode_ends_are_given_up():
    engine = Engine("x", seconds=60)
    session = new_session(engine)
    async with serving() as endpoint, new_client(endpoint.url) as policy:
        with endpoint.open(session) as policy.api_key:
            asking = asyncio.create_task(refusal(ask(policy)))
            while not engine.requests:
                await asyncio.sleep(0.01)
        assert await asking == (410, "episode_ended", None)
    assert engine.given_up == 1 and not session.turns


async def test_an_engine_that_dies_ends_the_episode_with_its_error():
    async with playing(Dying(["x"])) as (session, policy):
        assert await refusal(ask(policy)) == (500, "engine_failed", None)
    with pytest.raises(EngineUnavailableError, match="worker 0"):
        session.failure.result()


@pytest.mark.parametrize(("keys", "sampling"), [({}, (1.0, 1.0)), ({"sampling": "request"}, (0.5, 0.9))])
async def test_sampling_is_the_runs_unless_requests_may_choose(keys, sampling):
    engine = Engine("x")
    async with playing(engine, **keys) as (_, policy):
        for seed in (1, 1, 2, None):
            await ask(policy, temperature=0.5, top_p=0.9, seed=seed, max_completion_tokens=7)
    asked = [request.params for request in engine.requests]
    assert {(each.temperature, each.top_p, each.max_new_tokens) for each in asked} == {(*sampling, 7)}
    one, again, two, none = (each.seed for each in asked)
    assert one == again and len({one, two, none}) == 3


async def test_a_port_that_is_taken_is_named():
    async with serving() as endpoint:
        port = httpx.URL(endpoint.url).port
        with pytest.raises(PortTakenError, match=f"agent.port: got {port}, expected a free port of 127.0.0.1"):
            Endpoint(port)


ADD_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
ADD_CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1.0}}\n</tool_call>'
TEXTS = ["a", "<think>b</think>c", ADD_CALL, "<tool_call>{", " "]


class Asynchronous(Engine):
    """Answers in any order, under weights that change in between."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__("-")
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


async def harness(engine: Asynchronous) -> Session:
    """Goes on with one of its conversations, changes it, or begins another, some of them side by side."""
    session, chance = new_session(engine), engine.chance
    conversations: list[list[dict[str, Any]]] = [[user("q")]]

    async def talk() -> None:
        messages = [dict(message) for message in chance.choice(conversations)]
        match chance.randrange(7):
            case 0:  # compaction
                messages = [user("in short: q")]
            case 1 if len(messages) > 1:  # an edited message
                chance.choice(messages)["content"] = "edited"
            case 2 if len(messages) > 2:  # a retry
                messages = messages[:-2]
            case 3:  # a sub-agent
                messages = [system("help"), user("q")]
        tools = [ADD_TOOL] if chance.random() < 0.7 else []
        stop = ("c",) if chance.random() < 0.2 else ()
        for answer in await session.chat(messages, tools, Wanted(n=chance.choice([1, 1, 2]), stop=stop)):
            said = answer.turn.as_openai()
            follow = {"role": "tool", "content": "2"} if answer.turn.calls else user("more")
            conversations.append([*messages, said, follow])

    for _ in range(chance.randrange(1, 6)):
        await asyncio.gather(*(talk() for _ in range(chance.randrange(1, 4))))
    return session


@examples(60)
@given(seed=st.integers(0, 2**32))
def test_rows_are_the_engines_own_log(seed):
    engine = Asynchronous(random.Random(seed))
    session = asyncio.run(harness(engine))
    batch = batch_of(session)
    expected = sorted(
        (prompt, ids, completion.logprobs.tolist(), completion.versions.tolist())
        for (prompt, ids), completion in zip(engine.log, engine.sampled, strict=True)
    )
    found = []
    columns = "tokens_T", "loss_mask_T", "turn_T", "rollout_logprobs_T", "rollout_versions_T"
    for tokens, mask, turns, logprobs, versions in by_row(batch, *columns):
        for turn in np.unique(turns[mask]):
            at = np.flatnonzero(mask & (turns == turn))
            found.append((tokens[: at[0]].tolist(), tokens[at].tolist(), logprobs[at].tolist(), versions[at].tolist()))
    assert sorted(found) == expected, "each answer once, behind exactly what it was sampled from"
    assert session.counts["calls"] == len(expected) and session.counts["rows"] == len(batch.lengths_B)
    if batch.sample_weight_B is not None:
        assert abs(float(batch.sample_weight_B.sum()) - 1) < 1e-12, "together the weight of one episode"


async def test_results_have_the_names_of_their_tools_where_the_template_writes_them():
    """Clients send ids alone; gpt-oss reads who answers."""
    renderer = ChatRenderer(family_tokenizer("gpt_oss"))
    said = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 1}<|call|>'
    engine = Engine(said, ends=False, renderer=renderer)
    session = new_session(engine, renderer, "harmony")
    (answer,) = await session.chat([user("q")], [ADD_TOOL], Wanted())
    (call,) = answer.turn.calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    await session.chat([user("q"), answer.turn.as_openai(), result], [ADD_TOOL], Wanted())
    assert session.counts["rows"] == 1
    assert renderer.decode_raw(engine.requests[1].prompt_ids).endswith(
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant'
    )


async def begin(endpoint: Endpoint, key: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request that says it has 999 bytes, of which these arrive."""
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(endpoint.url).port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    writer.write(f"{head}Content-Length: 999\r\n\r\n".encode() + body)
    return reader, writer


async def test_what_a_session_sends_at_once_is_bounded(monkeypatch):
    """A program that begins many long requests cannot fill the memory of the worker; another's go on."""
    monkeypatch.setattr(bodies, "MAX_BODY", 1000)
    async with asyncio.timeout(20), serving() as endpoint:
        session, other = new_session(Engine("x")), new_session(Engine("x"))
        with endpoint.open(session) as key:
            opened = [await begin(endpoint, key, b" " * 400) for _ in range(2)]
            while session.receiving < 800:
                await asyncio.sleep(0.001)
            reader, last = await begin(endpoint, key, b" " * 400)
            told = await reader.readuntil(b"}}")
            assert told.startswith(b"HTTP/1.1 429") and b'"rate_limit_exceeded"' in told
            async with client(endpoint, other) as policy:
                await ask(policy)
            for _, writer in [*opened, (reader, last)]:
                writer.close()
            while session.receiving:
                await asyncio.sleep(0.001)
        assert session.counts["refused"] == 1 and len(other.turns) == 1


async def test_a_body_that_does_not_arrive_is_given_up(monkeypatch):
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.2)
    async with asyncio.timeout(20), serving() as endpoint:
        with endpoint.open(new_session(Engine("x"))) as key:
            reader, writer = await begin(endpoint, key, b"{")
            told = await reader.readuntil(b"}}")
            writer.close()
            assert told.startswith(b"HTTP/1.1 408")


async def test_headers_are_bounded():
    async with asyncio.timeout(20), serving() as endpoint:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(endpoint.url).port)
        told = b""
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 500_000)
            told = await reader.read(12)
    assert told in (b"", b"HTTP/1.1 400")


def many(value: bytes, count: int = 200_000) -> bytes:
    return b",".join([value] * count)


ASKING = b'"messages":[{"role":"user","content":"q"}]'
HOSTILE = {
    "messages": b'{"messages":[' + many(b'{"role":"user","content":"a"}') + b"]}",
    "no messages": b'{"messages":[' + many(b"1", 1_000_000) + b"]}",
    "parts": b'{"messages":[{"role":"user","content":[' + many(b'{"type":"text","text":"a"}') + b"]}]}",
    "nested": b"{" + ASKING + b',"metadata":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "keys": b"{" + ASKING + b"," + b",".join(b'"k%d":1' % i for i in range(200_000)) + b"}",
    "stops": b"{" + ASKING + b',"stop":[' + many(b'"x"') + b"]}",
    "number": b"{" + ASKING + b',"seed":' + b"9" * 300_000 + b"}",
    "text": b'{"messages":[{"role":"user","content":"' + b"ab " * 300_000 + b'"}]}',
    "escapes": b'{"messages":[{"role":"user","content":"' + b'\\"' * 300_000 + b'"}]}',
    "blank": b" " * 1_000_000 + b"{}",
    "backslashes": b"\\" * 1_000_000,
}


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_hostile_body_is_refused_in_the_providers_form_before_it_is_parsed(path, kind):
    async with playing(Engine("x")) as (session, policy), plain_http(policy) as http:
        told = await http.post(path, content=HOSTILE[kind])
        assert told.status_code in (400, 413) and session.receiving == 0
    error = told.json()["error"]
    assert {"messages": {"type", "message"}}.get(path, {"message", "type", "param", "code"}) == error.keys()
    assert "got more than" in error["message"] or "nested more than" in error["message"] or "digits" in error["message"]


def test_the_shape_of_a_text_does_not_depend_on_its_pieces():
    """Strings, escapes and numbers may be cut anywhere; what stands in strings does not count."""
    text = rb'{"a\"[{,": [1, "x\\", {"b": "\\\"],{"}], "' + b"{[,1" * 50 + b'": 1.5}'
    bounds = bodies.Bounds(10**6, 10**6, 10**6)
    for size in (len(text), 1, 2, 3, 7):
        shape = bodies.Shape(bounds)
        for at in range(0, len(text), size):
            shape.feed(text[at : at + size])
        assert (shape._objects, shape._values, shape._depth) == (2, 2 + 1 + 3, 0)
    digits = bodies.Shape(bounds)
    with pytest.raises(ApiError, match="digits"):
        for _ in range(500):
            digits.feed(b"9")


LONG_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1" + ",1" * 40_000 + "]"}}
LONG_BODY = {
    "words": [user("a b " * 30_000)],
    "a call": [says(None, tool_calls=[LONG_CALL]), {"role": "tool", "tool_call_id": "c", "content": "r"}],
    "control tokens": [user("<|im_end|>" * 10_000)],
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
    async with playing(Engine("x")) as (_, policy):
        assert (await refusal(ask(policy, user("q"), *LONG_BODY[kind])))[0] == 400
    assert threads["recall"] is not threading.main_thread()
    assert threads.get("prompt") is not threading.main_thread()


async def test_both_refuse_in_their_own_words():
    import anthropic

    long = user("x" * LIMITS.sequence_length)
    async with playing(Engine("abc")) as (session, policy), claude(policy) as asked:
        keys: Any = {"model": "m", "max_tokens": 9, "messages": [long]}
        with pytest.raises(anthropic.BadRequestError, match="maximum context length") as full:
            await asked.messages.create(**keys)
        assert full.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        image = user([{"type": "image", "source": {}}])
        with pytest.raises(anthropic.BadRequestError, match=r"messages.0.content.0.source: null"):
            await asked.messages.create(**keys | {"messages": [image]})
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await asked.messages.count_tokens(model="m", messages=[image])
        assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        assert unknown.value.body["type"] == "error"  # type: ignore[index]
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await asked.messages.create(**keys | {"max_tokens": 0})
        with pytest.raises(anthropic.AuthenticationError):
            await asked.copy(api_key="sk-ant-none").messages.create(**keys)
        wrong: list[tuple[str, Any, type[openai.APIStatusError], str]] = [
            ("previous_response_id", "resp_1", openai.NotFoundError, "expected one of this episode"),
            ("tools", [{"type": "web_search"}], openai.BadRequestError, r"tools.0.type: got 'web_search'"),
            ("background", True, openai.BadRequestError, "background: got"),
            ("conversation", "conv_1", openai.BadRequestError, "conversation: got"),
            ("prompt", {"id": "p"}, openai.BadRequestError, "prompt: got"),
            ("top_logprobs", 2, openai.BadRequestError, "top_logprobs: got"),
        ]
        for field, value, kind, told in wrong:
            with pytest.raises(kind, match=told):
                await policy.responses.create(model="m", input="x", **{field: value})
        cut = await policy.responses.create(model="m", input="x", max_output_tokens=1)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert session.counts["refused"] == 9 and len(session.turns) == 1


# ---- pictures


async def test_pictures_are_told_by_their_pixels_and_one_that_has_changed_is_a_row_of_its_own(sees):
    engine = Engine("one", "two", "three")
    words = {"type": "text", "text": "see:"}
    first, again, lossy = (user([words, shown(encoded(A, kind))]) for kind in ("PNG", "BMP", "JPEG"))
    more = user([shown(encoded(B))])
    async with playing(engine, sees) as (session, policy):
        one = await reply(policy, first)
        two = await reply(policy, again, one, more)  # other bytes, the same pixels
        await reply(policy, lossy, one, more, two, user("so?"))
    assert session.counts | {"rows": 2, "rewritten": 1, "rewritten_pictures": 1, "refused": 0} == session.counts
    a, b = Item(A), Item(B)
    asked_first, asked_second, asked_third = engine.requests
    rendered = sees.prompt([user([words, {"type": "image", "image": a}])])
    assert asked_first.prompt_ids.tolist() == rendered.tolist()
    assert [asked_first.items, asked_second.items] == [(a,), (a, b)]
    assert a not in asked_third.items and b in asked_third.items
    assert [item for _, item in items_along(asked_third.prompt_ids, asked_third.items)] == list(asked_third.items)
    assert [turn.items for turn in session.turns] == [request.items for request in engine.requests]
    assert session.turns[1].observation == "[picture 48x32]"
    batch = batch_of(session)
    assert batch.items_I == ((a, b), asked_third.items)
    assert [tokens[:-1].tolist() for (tokens,) in by_row(batch, "tokens_T")] == [row[:-1] for row in rows_of(session)]


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
async def test_what_is_no_picture_is_refused_with_its_place(sees, part, reason):
    async with playing(Engine("never"), sees) as (session, policy):
        with pytest.raises(openai.BadRequestError, match=reason) as refused:
            await ask(policy, user([{"type": "text", "text": "?"}, part]))
    assert str(refused.value.param).startswith("messages.0.content.1") and session.counts["refused"] == 1


async def test_who_shows_pictures_and_to_whom(sees):
    picture = [shown(encoded(A))]
    for renderer in (sees, RENDERER):
        async with playing(Engine("never"), renderer) as (_, policy):
            with pytest.raises(openai.BadRequestError, match="pictures of users and tools"):
                await ask(policy, system(picture), user(picture))
    async with playing(Engine("never")) as (_, policy):
        with pytest.raises(openai.BadRequestError, match="the policy takes no pictures"):
            await ask(policy, user(picture))


def test_a_program_gets_the_pixels_that_the_policy_gets(sees):
    item = sees.pictures.item(np.repeat(A, 9, axis=0))
    (sent,) = for_programs([{"type": "image", "image": item}])
    assert sees.pictures.item(sent["image_url"]["url"]) == item
