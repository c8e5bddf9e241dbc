"""Whatever a program does with its history, rows are what the engine was given and what it sampled."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from roll.agentic.tools.dialects import dialect
from roll.configs.agent import AgentConfig
from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, FinishReason, GenerateRequest
from roll.rollout.endpoint.session import Policy, Session, Wanted
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import EpisodeEnd, RolloutGroup, Trajectory
from tests.support.chat_families import family_tokenizer
from tests.support.examples import examples
from tests.support.said_engine import EPISODE, LIMITS, PARAMS, TOKENIZER, Engine, new_session

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1.0}}\n</tool_call>'
TEXTS = ["a", "<think>b</think>c", CALL, "<tool_call>{", " "]


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
        tools = [TOOL] if chance.random() < 0.7 else []
        stop = ("c",) if chance.random() < 0.2 else ()
        for answer in await session.chat(messages, tools, Wanted(n=chance.choice([1, 1, 2]), stop=stop)):
            said = answer.turn.as_openai()
            follow = {"role": "tool", "content": "2"} if answer.turn.calls else {"role": "user", "content": "more"}
            conversations.append([*messages, said, follow])

    for _ in range(chance.randrange(1, 6)):
        await asyncio.gather(*(ask() for _ in range(chance.randrange(1, 4))))


def test_results_have_the_names_of_their_tools_where_the_template_writes_them() -> None:
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
        (answer,) = await session.chat(messages, [TOOL], Wanted())
        (call,) = answer.turn.calls
        messages += [answer.turn.as_openai(), {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        await session.chat(messages, [TOOL], Wanted())
        assert session.counts["rows"] == 1

    asyncio.run(run())
    assert calls[1].endswith(
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant'
    )


@examples(60)
@given(seed=st.integers(0, 2**32))
def test_rows_are_the_engines_own_log(seed: int) -> None:
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
