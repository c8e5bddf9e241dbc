"""The Ray worker of a reward domain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from roll.configs.judge import JudgeEngine
from roll.configs.rewards import RewardConfig
from roll.distributed.cluster.worker import Worker
from roll.rewards.scorer import DomainScorer
from roll.rewards.types import RewardError, Sample, Verdict

if TYPE_CHECKING:
    from roll.distributed.strategy.base import States  # brings torch, which rules need not
    from roll.rewards.judge_model import HostedModel


class Hosted(Protocol):
    """Object that a worker holds, models perhaps in it."""

    async def offload(self) -> None: ...
    async def onload(self) -> None: ...
    async def close(self) -> None: ...


class HostingWorker(Worker):
    """Holds something that takes turns on the worker's devices with the run's other models, from ``setup`` on."""

    hosted: Hosted

    async def offload(self, what: States) -> None:
        """Takes its models off the device, if ``what`` has weights; nothing, before ``setup``."""
        if hasattr(self, "hosted") and type(what).WEIGHTS in what:
            await self.hosted.offload()

    async def onload(self, what: States) -> None:
        """Takes them back to the device; what waits for them goes on."""
        if hasattr(self, "hosted") and type(what).WEIGHTS in what:
            await self.hosted.onload()

    async def close(self) -> None:
        """Ends what it holds."""
        await self.hosted.close()


class RewardWorker(HostingWorker):
    """Scores answers. ``rewards.<name>.worker_cls`` may name a subclass."""

    hosted: DomainScorer

    async def setup(self, name: str, config: RewardConfig) -> None:
        """Builds the domain's verifiers."""

        def host(model: str, engine: JudgeEngine, most: int) -> HostedModel:
            from roll.rollout.hosted_model import HostedGenerator

            return HostedGenerator(model, engine, most, devices=config.num_gpus_per_worker)

        # Beside the event loop, as an engine brings minutes of work and loops of its own.
        self.hosted = await asyncio.to_thread(DomainScorer, name, config, config.num_processes, host=host)
        await self.hosted.start()

    async def score(self, samples: Sequence[Sample]) -> list[Verdict | RewardError]:
        """Judges answers side by side; those that could not be judged come back as errors."""
        return list(await asyncio.gather(*map(self._score, samples)))

    async def _score(self, sample: Sample) -> Verdict | RewardError:
        try:
            return await self.hosted.score(sample)
        except RewardError as error:
            return RewardError(str(error))  # without its causes, which may not survive the way between processes

    async def take_retries(self) -> int:
        """New attempts of verifiers since the last call."""
        return self.hosted.take_retries()
