"""An endpoint before an engine, and agents who ask it."""

import asyncio
import contextlib
import os
import textwrap
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai

from roll.agentic.tools.dialects import dialect
from roll.configs.agent import AgentConfig
from roll.configs.data import DataArguments
from roll.data.prompts import Prompt, load_prompts
from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, GenerateRequest, SamplingParams
from roll.rollout.agents.episode import AgentPlayer
from roll.rollout.endpoint.server import Endpoint
from roll.rollout.endpoint.session import Policy, Session
from roll.rollout.env_manager import EpisodeSpec, LengthLimits
from roll.rollout.prompt_worker import PromptEnv
from roll.rollout.router import EngineUnavailableError
from roll.rollout.types import Trajectory
from tests.support.rollouts import RENDERER, Engine, judge

LIMITS = LengthLimits(prompt_length=1900, sequence_length=2000)
EPISODE = EpisodeSpec("sums", 5, 1, env_seed=11, sampling_seed=13)
PARAMS = SamplingParams(max_new_tokens=300)


class Dying(Engine):
    async def generate(self, request: GenerateRequest) -> Completion:
        raise EngineUnavailableError("engine worker 0 died")


def new_session(engine: Engine, renderer: ChatRenderer = RENDERER, notation: str = "hermes", **keys: Any) -> Session:
    policy = Policy(renderer, dialect(notation), LIMITS)
    config = AgentConfig(**{"command": ["true"], **keys})
    return Session(config, policy, engine.generate, PARAMS, EPISODE)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Endpoint]:
    endpoint = Endpoint()
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.stop()


@contextlib.asynccontextmanager
async def client(endpoint: Endpoint, session: Session) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=endpoint.url, api_key="-", max_retries=0) as policy:
        with endpoint.open(session) as policy.api_key:
            yield policy


def rows_of(session: Session) -> list[list[int]]:
    """The rows that an episode is trained on, as ids."""
    rows: dict[int, list[int]] = {}
    for turn in session.turns:
        so_far = rows.get(turn.row, [])
        assert turn.prompt_ids[: len(so_far)].tolist() == so_far
        rows[turn.row] = [*turn.prompt_ids.tolist(), *turn.completion.token_ids.tolist()]
    return list(rows.values())


GOOD = "<answer>51</answer>"
PROMPT = Prompt("p1", "sums", ({"role": "user", "content": "17*3="},), ground_truth="51", extra_info={"level": 2})
ASK = """
import json, os, urllib.request

def ask(path, **body):
    key = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), key)
    return json.load(urllib.request.urlopen(request))

task = json.load(open(os.environ["ROLL_TASK"]))
answer = ask("/chat/completions", model="any", messages=task["messages"])["choices"][0]["message"]["content"]
"""
"""A program that asks once, without a client's long start."""


@contextlib.asynccontextmanager
async def player_of(**keys: Any) -> AsyncIterator[AgentPlayer]:
    player = AgentPlayer(AgentConfig(**keys).placed(), RENDERER, 0)
    try:
        yield player
    finally:
        await player.endpoint.stop()


async def play_with(player: AgentPlayer, engine: Engine, prompt: Prompt = PROMPT) -> Trajectory:
    return await player.play(PromptEnv(prompt, judge), prompt, engine.generate, PARAMS, LIMITS, EPISODE)


def play(engine: Engine, prompt: Prompt = PROMPT, **keys: Any) -> Trajectory:
    async def run() -> Trajectory:
        async with player_of(**keys) as player:
            return await play_with(player, engine, prompt)

    return asyncio.run(run())


def tasks(**keys: Any) -> Sequence[Prompt]:
    """The dataset that a configuration names."""
    args = DataArguments(**{"prompt": "prompt", "response": None, **keys})
    return load_prompts(args, renderer=None, prompt_length=None, allowed_tags=None, seed=0)


def script(program: str) -> list[str]:
    return ["python", "-c", textwrap.dedent(program)]


def marked(mark: str) -> list[str]:
    """Command lines of the processes that have ``mark`` in their environment or arguments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) == os.getpid():
                continue
            line = (folder / "cmdline").read_bytes()
            if mark.encode() in (folder / "environ").read_bytes() + line:
                found.append(line.decode())
        except OSError:
            continue
    return found
