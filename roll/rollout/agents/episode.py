"""An episode that an agent program plays: its session, its end, its reward."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from roll.agentic.tools.dialects import dialect
from roll.configs.agent import AgentConfig
from roll.data.prompts import Prompt
from roll.data.renderer import ChatRenderer
from roll.data.requests import GenerateFn, SamplingParams
from roll.rollout.agents.calls import FunctionProgram, ServiceProgram
from roll.rollout.agents.process import ProcessProgram
from roll.rollout.agents.task import AgentError, AgentExitError, AgentProgram, AgentTask
from roll.rollout.endpoint.server import Endpoint
from roll.rollout.endpoint.session import Policy, Session
from roll.rollout.env_manager import EpisodeSpec, Limits
from roll.rollout.prompt_env import PromptEnv, ScoreFn
from roll.rollout.types import AGENT, VALID_UNKNOWN, EpisodeEnd, Trajectory

PROGRAMS: Mapping[str, Callable[[AgentConfig], AgentProgram]] = {
    "process": ProcessProgram,
    "python": FunctionProgram,
    "url": ServiceProgram,
}
"""By ``agent.type``."""


_LOOK_S = 0.05


class AgentPlayer:
    """Has an agent program play prompts, in the event loop of a rollout worker.

    Args:
        config: the section ``agent``.
        renderer: messages to token ids.
        limits: token budgets; of them the longest sequence bounds a conversation.
        rank: of the worker, whose endpoint listens at ``agent.port + rank``.

    Raises:
        PortTakenError: something else listens there.
        UnknownNameError: there is no such program or dialect.
    """

    def __init__(self, config: AgentConfig, renderer: ChatRenderer, limits: Limits, rank: int) -> None:
        self._config = config
        self._policy = Policy(renderer, dialect(config.dialect), limits)
        self._program = PROGRAMS[config.type](config)
        self.endpoint = Endpoint(config.port + rank if config.port else 0)

    async def play(
        self, prompt: Prompt, score: ScoreFn, generate: GenerateFn, params: SamplingParams, episode: EpisodeSpec
    ) -> Trajectory:
        """Plays one episode.

        A program that ends with an error behind a limit (``max_calls``, the context) has been cut off, which is the
        policy's doing: its last words are judged.

        Raises:
            AgentError: the program crashed, hung, asked nothing of the policy, or gave no reward where it should.
            Exception: what made an answer impossible, such as an engine's death.
        """
        env = PromptEnv(prompt, score)
        _observation, info = await env.reset(episode.env_seed)
        await self.endpoint.start()
        session = Session(self._config, self._policy, env.watch(generate), params, episode)
        with self.endpoint.open(session) as key:
            try:
                answer = await self._run(AgentTask.of(prompt, self.endpoint.url, key), session)
            except AgentExitError:
                if session.end is None:
                    raise
                answer = None
        if not session.turns:
            long = session.end is EpisodeEnd.CONTEXT_FULL
            told = f"its first prompt does not fit in sequence_length {self._policy.limits.sequence_length}"
            raise AgentError(told if long else "the agent program asked nothing of the policy")
        info |= await self._judge(env, session, answer)
        last = session.turns[-1]
        judged = replace(last, action=info["action"], task_reward=info["task_reward"], penalty=info["penalty"])
        return Trajectory(
            tag=episode.tag,
            group_id=episode.group_id,
            member=episode.member,
            seed=episode.env_seed,
            turns=(*session.turns[:-1], judged),
            end=session.end or EpisodeEnd.TERMINATED,
            success=bool(info["success"]),
            final_observation="" if answer is None else answer,
            history=True,
            info={key: value for key, value in info.items() if isinstance(value, bool | int | float | str)}
            | {f"{AGENT}{name}": count for name, count in session.counts.items()},
        )

    async def _run(self, task: AgentTask, session: Session) -> str | None:
        """The program, to its end or that of its time, of which the policy's answers take none."""
        start, limit = time.monotonic(), self._config.timeout
        running = asyncio.create_task(self._program.run(task))
        try:
            waiting: set[asyncio.Future[Any]] = {running, session.failure}
            while not any(each.done() for each in waiting):
                left = limit - (time.monotonic() - start - session.generating_s)
                if left <= 0:
                    raise AgentError(f"the agent took longer than agent.timeout={limit:g} s")
                await asyncio.wait(waiting, timeout=max(left, _LOOK_S), return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                session.failure.result()
            return running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)  # what it has started is gone then

    async def _judge(self, env: PromptEnv, session: Session, answer: str | None) -> dict[str, Any]:
        """What a step of an environment says of its end."""
        if self._config.reward == "verifiers":
            return (await env.step(session.turns[-1].text if answer is None else answer))[-1]
        if session.reward is None:
            raise AgentError("the agent program posted no reward to /v1/reward (agent.reward: call)")
        success = session.reward > 0 if session.success is None else session.success
        judged = {"action": None, "task_reward": session.reward, "penalty": 0.0, "success": success}
        return judged | {"prompt_id": env.prompt.id, VALID_UNKNOWN: True}
