"""The Ray worker of the judge that environments ask, and the way to it from the thread of an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from roll.configs.judge import AskedModelConfig
from roll.data.requests import Question, SamplingParams
from roll.rewards.types import RewardError
from roll.rollout.reward_worker import HostingWorker

if TYPE_CHECKING:
    from roll.rewards.judge_model import HostedJudge, HostedModel  # brings transformers

AskFn: TypeAlias = Callable[[Question], Awaitable[str]]


class JudgeWorker(HostingWorker):
    """Answers questions of environments. ``judge.worker_cls`` may name a subclass."""

    hosted: HostedModel

    async def setup(self, config: AskedModelConfig) -> None:
        """Loads the model."""
        self._judge = await asyncio.to_thread(_judge, config)  # an engine brings loops of its own
        self.hosted = self._judge.model

    async def ask(self, questions: Sequence[Question]) -> list[str | RewardError]:
        """Answers side by side; a question that cannot be asked comes back as an error."""
        return list(await asyncio.gather(*map(self._ask, questions)))

    async def _ask(self, question: Question) -> str | RewardError:
        try:
            words, _ = await self._judge.ask(question)
        except RewardError as error:
            return RewardError(str(error))  # without its causes, which may not survive the way between processes
        return words


def _judge(config: AskedModelConfig) -> HostedJudge:
    from roll.rewards.judge_model import HostedJudge
    from roll.rollout.hosted_model import HostedGenerator

    host = partial(HostedGenerator, devices=config.num_gpus_per_worker)
    sampling = SamplingParams(max_new_tokens=config.max_tokens, temperature=config.temperature)
    return HostedJudge(config.model, config.engine, sampling, config.max_concurrency, host)


class Asking:
    """``TextEnv.ask`` of one environment: waits in its thread for what an event loop does.

    Args:
        ask: sends a question to the judge; it runs in the event loop of the next ``listen``.
    """

    def __init__(self, ask: AskFn) -> None:
        self._ask = ask
        self.failure: Exception | None = None
        """Exception that asking has raised, whatever the environment made of it: its answer is worth nothing then."""

    def listen(self) -> None:
        """Answers from the running event loop from now on."""
        self._loop = asyncio.get_running_loop()

    def __call__(self, question: Question) -> str:
        async def asked() -> str:
            return await self._ask(question)

        try:
            return asyncio.run_coroutine_threadsafe(asked(), self._loop).result()
        except Exception as error:
            self.failure = error
            raise
