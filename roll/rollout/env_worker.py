"""The Ray worker that runs episodes of environments."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.agentic.env import asks_judge, is_instant, make, wants_own_thread
from roll.configs.env import CustomEnvConfig
from roll.configs.tools import ToolsConfig
from roll.data.pictures import Pictures
from roll.data.prompts import Prompt
from roll.data.renderer import ChatRenderer
from roll.data.requests import GenerateFn, JudgeQuestion, SamplingParams
from roll.data.templates import ChatTemplate
from roll.rollout.call_threads import CallThreads
from roll.rollout.env_manager import ENV_MANAGERS, EnvManager, EpisodeSpec, LengthLimits
from roll.rollout.env_runner import EnvRunner, OneAtATime, checked_reset
from roll.rollout.errors import EnvError
from roll.rollout.plans import GroupSpec
from roll.rollout.reward_worker import Asking, WorkerClient
from roll.rollout.tokenization_audit import TokenCheck, TokenizationAudit
from roll.rollout.tool_box import ToolBox
from roll.rollout.types import Trajectory
from roll.rollout.workers import RolloutWorker
from roll.utils.memory import relax_gc

if TYPE_CHECKING:
    from roll.rollout.agents.episode import AgentPlayer


@dataclass(frozen=True)
class EnvWorkerContext:
    """Everything that an environment worker needs, as plain data."""

    envs: Mapping[str, CustomEnvConfig]
    """The tags of this manager."""
    tokenizer_path: str
    template: str | ChatTemplate
    params: SamplingParams
    limits: LengthLimits
    retries: int
    """Attempts at a failed episode before it is dropped, after the first."""
    tools: ToolsConfig | None = None
    """Tools that the policy may call in its episodes."""
    token_check: TokenCheck = "disable"
    """Mode of comparing trained rows with their conversations."""
    trust_remote_code: bool = False
    """True if Python files that come with the tokenizer may run."""
    pictures: Pictures | None = None
    """The policy's picture processor; ``None``: it takes none."""


@dataclass(frozen=True)
class Probed:
    """An environment that was built and reset before models are loaded."""

    tag: str
    problem: str | None = None
    """Why it cannot be, in a line."""
    shows_pictures: bool = False


class EnvironmentWorker(RolloutWorker):
    """Runs episodes of environments. ``train_env_manager.worker_cls`` may name a subclass."""

    def setup(self, context: EnvWorkerContext) -> None:
        from roll.models.tokenizer import load_tokenizer  # brings transformers

        self.context = context
        self.retries = context.retries
        trusts = context.trust_remote_code
        tokenizer = load_tokenizer(context.tokenizer_path, alone=True, trust_remote_code=trusts)
        self._pictures = context.pictures and context.pictures.with_tokenizer(tokenizer)
        renderer = ChatRenderer(tokenizer, context.template, self._pictures)
        self.managers: dict[str, EnvManager] = {
            tag: ENV_MANAGERS.get(config.env_manager_cls)(config, renderer, context.params, context.limits)
            for tag, config in context.envs.items()
        }
        self._watch = TokenizationAudit(renderer, context.token_check)
        for manager in self.managers.values():
            manager.watch = self._watch
        self._locks = {tag: OneAtATime() for tag, config in context.envs.items() if config.use_thread_lock}
        self._idle: defaultdict[str, list[EnvRunner]] = defaultdict(list)
        self._threads = CallThreads()
        self._tools: ToolBox | None = None
        if context.tools is not None:
            self._tools = ToolBox(context.tools, renderer, self._threads)
        self._agents = {
            tag: self._agent(config, renderer) for tag, config in context.envs.items() if config.agent is not None
        }
        relax_gc()

    def _agent(self, config: CustomEnvConfig, renderer: ChatRenderer) -> AgentPlayer:
        from roll.rollout.agents.episode import AgentPlayer  # brings the HTTP server

        assert config.agent is not None
        return AgentPlayer(config.agent, renderer, self.rank, self._watch)

    async def set_judge(self, workers: Sequence[Any]) -> None:
        """Whom environments ask from now on."""
        self.judge = WorkerClient[JudgeQuestion, str]("the judge", workers, "ask", (self.rank, self.world_size))

    async def _ask(self, question: JudgeQuestion) -> str:
        return await self.judge.send(question)  # the present one: workers are replaced

    async def probe(self, envs: Mapping[str, CustomEnvConfig], retries: int, seed: int) -> list[Probed]:
        """Builds and resets one environment of each tag, builds those that ask.

        It needs no ``setup``: a run asks before it spends time on models.
        """
        return list(await asyncio.gather(*(_probe(tag, envs[tag], retries, seed) for tag in envs)))

    async def play(self, spec: GroupSpec, episode: EpisodeSpec, generate: GenerateFn) -> Trajectory:
        """Plays with an environment that is idle, or a new one; one that failed is not used again."""
        manager, runner = self.managers[spec.tag], self._take_runner(spec.tag)
        healthy = False
        try:
            if spec.player is not None:
                playing = manager.run_episode(runner, spec.player(runner, manager.renderer), episode)
            elif (agent := self._agents.get(spec.tag)) is not None:
                playing = self._play_by(agent, runner, manager, generate, episode)
            elif self._tools is not None:
                partner, generate = await self._tools.equip(runner, spec.tag, generate)
                playing = manager.run_episode(partner, generate, episode)
            else:
                playing = manager.run_episode(runner, generate, episode)
            trajectory = await playing
            healthy = True
            return trajectory
        finally:
            if healthy:
                self._idle[spec.tag].append(runner)
            else:
                runner.close()

    async def _play_by(
        self, agent: AgentPlayer, env: EnvRunner, manager: EnvManager, generate: GenerateFn, episode: EpisodeSpec
    ) -> Trajectory:
        """Has a program play: its task is what a policy would see first."""
        observation, info = await env.reset(episode.env_seed)
        messages = manager.opening(observation, info, [])
        prompt = Prompt(
            f"{episode.tag}-{episode.env_seed}", episode.tag, tuple(messages), extra_info={"seed": episode.env_seed}
        )
        most = manager.config.max_steps
        return await agent.play(env, prompt, generate, manager.params, manager.limits, episode, max_steps=most)

    def _take_runner(self, tag: str) -> EnvRunner:
        if self._idle[tag]:
            return self._idle[tag].pop()
        config = self.context.envs[tag]
        asking = Asking(self._ask) if asks_judge(config.env_type) else None
        pictures = self._pictures if config.agent is None or config.agent.pictures else None
        return _runner(config, self._threads, self._locks.get(tag), asking, pictures)


def _runner(
    config: CustomEnvConfig,
    threads: CallThreads,
    lock: OneAtATime | None = None,
    asking: Asking | None = None,
    pictures: Pictures | None = None,
) -> EnvRunner:
    return EnvRunner(
        lambda: make(config.env_type, **config.env_config),
        config.step_timeout,
        lock,
        instant=is_instant(config.env_type, config.env_config),
        own_thread=wants_own_thread(config.env_type),
        threads=threads,
        asking=asking,
        pictures=pictures,
    )


async def _probe(tag: str, config: CustomEnvConfig, retries: int, seed: int) -> Probed:
    problem = None
    for _ in range(1 + retries):
        runner = _runner(config, CallThreads())
        try:
            if asks_judge(config.env_type):
                await runner.call("construction", lambda env: None)  # there is no judge yet
                return Probed(tag)
            observation, _ = await runner.call("reset", lambda env: checked_reset(env, seed))
            sees = config.agent is None or config.agent.pictures
            if not isinstance(observation, str) and not sees:
                return Probed(
                    tag,
                    f"custom_envs.{tag}: its observations have pictures, but its agent program gets text "
                    "(agent.pictures: false)",
                )
            return Probed(tag, shows_pictures=not isinstance(observation, str))
        except EnvError as error:
            problem = f"custom_envs.{tag}: {error}"
        finally:
            runner.close()
    return Probed(tag, problem)
