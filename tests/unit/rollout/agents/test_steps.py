"""Environments that an agent program plays: it acts by the endpoint, and the environment says what that is worth."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from roll.agentic.env.base import StepResult, TextEnv
from roll.data.prompts import Prompt
from roll.rollout.agents.task import AgentTask
from roll.rollout.env_runner import EnvRunner
from roll.rollout.errors import EnvCrashError
from roll.rollout.metrics import rollout_metrics
from roll.rollout.types import EpisodeEnd, RolloutGroup, Trajectory
from tests.support.rollouts import Engine
from tests.support.said_engine import EPISODE, LIMITS, PARAMS, player_of
from tests.support.steps import usual_step
from tests.support.talks import user

FALLING = threading.Event()


class Stairs(TextEnv):
    """Two steps up pay a half each; other words cost a tenth."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.height = 0
        return "You stand below.", {}

    def step(self, action: str) -> StepResult:
        if action == "fall":
            raise ValueError("the stairs broke")
        if action == "fall later":
            FALLING.set()
            time.sleep(0.3)
            raise ValueError("the stairs broke later")
        up = action == "up"
        self.height += up
        pays = {"task_reward": 0.5 * up, "penalty": 0.0 if up else -0.1, "action_is_effective": up}
        ends = {"terminated": self.height == 2, "success": self.height == 2}
        said = f"You stand on step {self.height}."
        return usual_step(said, action if up else None, self.height, **pays, **ends)


Program = Callable[[AgentTask, httpx.AsyncClient], Awaitable[str | None]]
PROGRAM: list[Program] = []
"""The one that plays now."""


async def program(task: AgentTask) -> str | None:
    headers = {"Authorization": f"Bearer {task.api_key}"}
    async with httpx.AsyncClient(base_url=task.base_url, headers=headers) as client:
        return await PROGRAM[0](task, client)


def play(own: Program, *, max_steps: int | None = 5, reward: str = "task") -> Trajectory:
    async def run() -> Trajectory:
        PROGRAM[:] = [own]
        generate = Engine("up", "on").generate
        async with player_of(type="python", path=f"{__name__}:program", reward=reward, timeout=20) as player:
            with contextlib.closing(EnvRunner(Stairs, 10.0)) as env:
                observation, _ = await env.reset(0)
                task = Prompt("Stairs-0", "Stairs", (user(observation),), extra_info={"seed": 0})
                return await player.play(env, task, generate, PARAMS, LIMITS, EPISODE, max_steps=max_steps)

    return asyncio.run(run())


async def ask(task: AgentTask, client: httpx.AsyncClient) -> str:
    said = await client.post("/chat/completions", json={"model": "any", "messages": [*task.messages]})
    return str(said.json()["choices"][0]["message"]["content"])


async def act(client: httpx.AsyncClient, action: Any) -> Any:
    answer = await client.post("/step", json={"action": action})
    return answer.json() if answer.is_success else (answer.status_code, answer.json()["error"]["code"])


def test_each_step_pays_the_answer_before_it():
    told = []

    async def climb(task: AgentTask, client: httpx.AsyncClient) -> None:
        told.append(await act(client, await ask(task, client)))
        told.append(await act(client, await ask(task, client)))
        told.append(await act(client, "up"))
        told.append(await act(client, "up"))

    episode = play(climb)
    assert told[0] == {"observation": "You stand on step 1.", "reward": 0.5, "terminated": False, "truncated": False}
    assert told[2]["terminated"] and told[3] == (409, "environment_ended")
    first, second = episode.turns
    assert (first.action, first.task_reward, first.penalty) == ("up", 0.5, 0.0)
    assert (second.action, second.task_reward, second.penalty) == ("up", 0.5, -0.1), "of two steps"
    assert (episode.success, episode.end) == (True, EpisodeEnd.TERMINATED)
    assert episode.final_observation == "You stand on step 2."
    groups = [RolloutGroup(0, "Stairs", (episode,))]
    metrics = rollout_metrics(groups, "rollout")
    assert metrics["rollout/reward"] == pytest.approx(0.9) and "rollout/valid_rate" not in metrics
    plain = Trajectory("Board", 1, 0, 0, episode.turns, EpisodeEnd.TERMINATED, False, "", history=True)
    metrics = rollout_metrics([*groups, RolloutGroup(1, "Board", (plain,))], "rollout")
    assert metrics["rollout/agent/steps"] == 3 and metrics["rollout/agent/calls"] == 2, "of programs' episodes alone"
    assert metrics["rollout/valid_rate"] == 1


def test_the_answer_of_a_program_that_takes_no_step_is_one():
    async def words(task: AgentTask, client: httpx.AsyncClient) -> None:
        await ask(task, client)

    async def answer(task: AgentTask, client: httpx.AsyncClient) -> str:
        await ask(task, client)
        return "down"

    assert play(words).score == 0.5
    assert play(answer).score == -0.1 and not play(answer).success


def test_steps_beyond_the_last_are_refused_and_the_episode_is_truncated():
    told = []

    async def wait(task: AgentTask, client: httpx.AsyncClient) -> None:
        await ask(task, client)
        told.extend([await act(client, "wait") for _ in range(3)])

    episode = play(wait, max_steps=2)
    assert [step["truncated"] for step in told[:2]] == [False, True] and told[2] == (409, "environment_ended")
    assert (episode.end, episode.success, episode.score) == (EpisodeEnd.TRUNCATED, False, pytest.approx(-0.2))


def test_wrong_steps_are_refused():
    told = []

    async def wrong(task: AgentTask, client: httpx.AsyncClient) -> str:
        told.append(await act(client, 7))
        told.append(
            (await client.post("/step", json={"action": "up"}, headers={"Authorization": "Bearer x"})).status_code
        )
        return await ask(task, client)

    info = play(wrong).info
    assert told == [(400, "invalid_value"), 401]
    assert (info["agent_refused"], info["agent_turned_away"]) == (1, 1)
    told.clear()

    async def outside(task: AgentTask, client: httpx.AsyncClient) -> str:
        told.append(await act(client, "up"))
        return await ask(task, client)

    play(outside, max_steps=None)
    assert told == [(403, "no_environment")]


def test_an_environment_that_fails_ends_the_episode_without_a_reward():
    async def fall(task: AgentTask, client: httpx.AsyncClient) -> None:
        await ask(task, client)
        await act(client, "fall")
        await asyncio.sleep(60)

    with pytest.raises(EnvCrashError, match="environment step raised ValueError: the stairs broke"):
        play(fall)


@pytest.mark.parametrize(("first", "reward"), [(None, "task"), ("up", "task"), ("up", "call")])
def test_a_step_for_whose_failure_the_program_does_not_wait_is_a_failure_too(first, reward):
    under_way: list[asyncio.Future[Any]] = []
    FALLING.clear()

    async def leave(task: AgentTask, client: httpx.AsyncClient) -> str:
        await ask(task, client)
        if first is not None:
            await act(client, first)
        if reward == "call":
            await client.post("/reward", json={"reward": 1.0})
        under_way.append(asyncio.gather(act(client, "fall later"), return_exceptions=True))
        assert await asyncio.to_thread(FALLING.wait, 10)
        return "up"

    with pytest.raises(EnvCrashError, match="the stairs broke later"):
        play(leave, reward=reward)


def test_a_reward_of_the_programs_own_replaces_that_of_the_environment():
    async def post(task: AgentTask, client: httpx.AsyncClient) -> None:
        await act(client, await ask(task, client))
        assert (await client.post("/reward", json={"reward": 7.0})).is_success

    assert play(post, reward="call").score == 7.0
