"""The Ray worker that plays episodes: many environments, one event loop, one generation client."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.agentic.demonstrations import scripted_policy
from roll.agentic.env import make
from roll.agentic.env_manager import ENV_MANAGERS, EnvManager, EpisodeSpec, Limits
from roll.agentic.env_runner import EnvError, EnvRunner
from roll.agentic.types import RolloutGroup, SamplingParams, Trajectory
from roll.configs.env import CustomEnvConfig
from roll.data.renderer import ChatRenderer
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.rollout_scheduler import GroupSpec
from roll.distributed.scheduler.router import GenerationClient
from roll.utils.seeding import derive_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnvWorkerContext:
    """What an environment worker needs to play: everything is plain data."""

    envs: Mapping[str, CustomEnvConfig]
    """The tags that this manager plays."""
    tokenizer_path: str
    template: str
    params: SamplingParams
    limits: Limits
    retries: int
    """How often a failed episode is played again before it is dropped."""


class EnvironmentWorker(Worker):
    """Plays rollout groups. ``train_env_manager.worker_cls`` may name a subclass."""

    def setup(self, context: EnvWorkerContext) -> None:
        from transformers import AutoTokenizer

        self.context = context
        renderer = ChatRenderer(AutoTokenizer.from_pretrained(context.tokenizer_path), context.template)
        self.managers: dict[str, EnvManager] = {
            tag: ENV_MANAGERS.get(config.env_manager_cls)(config, renderer, context.params, context.limits)
            for tag, config in context.envs.items()
        }
        self._locks = {tag: threading.Lock() for tag, config in context.envs.items() if config.use_thread_lock}
        self._idle: defaultdict[str, list[EnvRunner]] = defaultdict(list)

    async def set_engines(self, engines: Sequence[Any]) -> None:
        """Where to send generation requests from now on."""
        self.client = GenerationClient(engines)

    async def run_group(self, spec: GroupSpec) -> RolloutGroup:
        """Plays all members of one group side by side.

        With redundancy, the first ``group_size`` to finish count and the others are cancelled. A member whose
        environment keeps failing is dropped and counted in the result.

        Raises:
            EngineUnavailableError: an engine worker died; play the group again once it is back.
            PromptTooLongError: the tag's first prompt never fits.
        """
        errors: list[str] = []
        tasks = [
            asyncio.create_task(self._run_member(spec, member, errors))
            for member in range(spec.group_size + spec.redundancy)
        ]
        finished: list[Trajectory] = []
        try:
            for task in asyncio.as_completed(tasks):
                trajectory = await task
                if trajectory is not None:
                    finished.append(trajectory)
                if len(finished) == spec.group_size:
                    break
        finally:
            for running in tasks:
                running.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finished.sort(key=lambda trajectory: trajectory.member)
        dropped = max(0, spec.group_size - len(finished))
        return RolloutGroup(spec.group_id, spec.tag, tuple(finished), dropped, tuple(errors))

    async def _run_member(self, spec: GroupSpec, member: int, errors: list[str]) -> Trajectory | None:
        episode = EpisodeSpec(
            tag=spec.tag,
            group_id=spec.group_id,
            member=member,
            env_seed=spec.env_seed,
            sampling_seed=derive_seed(spec.env_seed, "sampling", member),
            greedy=spec.greedy,
        )
        for _ in range(1 + self.context.retries):
            runner = self._take_runner(spec.tag)
            healthy = False
            try:
                trajectory = await self._play(runner, spec, episode)
                healthy = True
                return trajectory
            except EnvError as error:
                errors.append(f"{spec.tag} group {spec.group_id} member {member}: {error}")
                logger.warning("%s; playing the episode again", errors[-1])
            finally:
                if healthy:
                    self._idle[spec.tag].append(runner)
                else:
                    runner.close()
        return None

    async def _play(self, runner: EnvRunner, spec: GroupSpec, episode: EpisodeSpec) -> Trajectory:
        manager = self.managers[spec.tag]
        if spec.expert_share is None:
            return await manager.run_episode(runner, self.client.generate, episode)
        return await manager.run_episode(runner, scripted_policy(runner, manager.renderer, spec.expert_share), episode)

    def _take_runner(self, tag: str) -> EnvRunner:
        if self._idle[tag]:
            return self._idle[tag].pop()
        config = self.context.envs[tag]
        return EnvRunner(lambda: make(config.env_type, **config.env_config), config.step_timeout, self._locks.get(tag))
