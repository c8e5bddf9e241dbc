"""The Ray workers of reward domains and of the judge, the models they host, and how episodes reach them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from roll.configs.rewards import AskedModelConfig, JudgeEngine, RewardConfig
from roll.data.requests import JudgeQuestion, SamplingParams
from roll.distributed.cluster.cluster import Worker
from roll.rewards.scorer import DomainScorer
from roll.rewards.types import RewardError, RewardResult, Sample
from roll.rollout.router import EngineUnavailableError, own_order
from roll.utils.foreign import Fault

if TYPE_CHECKING:
    from roll.distributed.strategy.base import States
    from roll.rewards.judge import HostedJudge, HostedModel


class Hosted(Protocol):
    """An object that a worker hosts, which may contain models."""

    async def offload(self) -> None: ...
    async def onload(self) -> None: ...
    async def close(self) -> None: ...


class HostingWorker(Worker):
    """Hosts an object that shares the worker's devices with the run's other models, from ``setup`` on."""

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
    """Scores responses. ``rewards.<name>.worker_cls`` may name a subclass."""

    hosted: DomainScorer

    async def setup(self, name: str, config: RewardConfig) -> None:
        """Builds the domain's verifiers."""

        def host(model: str, engine: JudgeEngine, most: int, pictures: bool) -> HostedModel:
            from roll.distributed.strategy.generation.alone import HostedGenerator  # imports torch

            return HostedGenerator(model, engine, most, pictures, devices=config.num_gpus_per_worker)

        # Beside the event loop, as an engine brings minutes of work and loops of its own.
        self.hosted = await asyncio.to_thread(DomainScorer, name, config, config.num_processes, host=host)
        await self.hosted.start()

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult | RewardError]:
        """Judges answers side by side; those that could not be judged come back as errors."""
        return list(await asyncio.gather(*map(self._score, samples)))

    async def _score(self, sample: Sample) -> RewardResult | RewardError:
        try:
            with self.clock.work():
                return await self.hosted.score(sample)
        except RewardError as error:
            return RewardError(str(error))  # without its causes, which may not survive the way between processes

    async def take_retries(self) -> int:
        """New attempts of verifiers since the last call."""
        return self.hosted.take_retries()


AskFn: TypeAlias = Callable[[JudgeQuestion], Awaitable[str]]


class JudgeWorker(HostingWorker):
    """Answers questions of environments. ``judge.worker_cls`` may name a subclass."""

    hosted: HostedModel

    async def setup(self, config: AskedModelConfig) -> None:
        """Loads the model."""
        self._judge = await asyncio.to_thread(_judge, config)  # an engine brings loops of its own
        self.hosted = self._judge.model

    async def ask(self, questions: Sequence[JudgeQuestion]) -> list[str | RewardError]:
        """Answers side by side; a question that cannot be asked comes back as an error."""
        return list(await asyncio.gather(*map(self._ask, questions)))

    async def _ask(self, question: JudgeQuestion) -> str | RewardError:
        try:
            with self.clock.work():
                words, _ = await self._judge.ask(question)
        except RewardError as error:
            return RewardError(str(error))  # without its causes, which may not survive the way between processes
        return words


def _judge(config: AskedModelConfig) -> HostedJudge:
    from roll.distributed.strategy.generation.alone import HostedGenerator  # imports torch
    from roll.rewards.judge import HostedJudge

    host = partial(HostedGenerator, devices=config.num_gpus_per_worker)
    sampling = SamplingParams(max_new_tokens=config.max_tokens, temperature=config.temperature)
    return HostedJudge(config.model, config.engine, sampling, config.max_concurrency, host, pictures=config.pictures)


class Asking:
    """``TextEnv.ask`` of one environment: waits in its thread for the event loop.

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

    def __call__(self, question: JudgeQuestion) -> str:
        async def asked() -> str:
            return await self._ask(question)

        try:
            return asyncio.run_coroutine_threadsafe(asked(), self._loop).result()
        except Exception as error:
            self.failure = error
            raise


ItemT = TypeVar("ItemT")
ToldT = TypeVar("ToldT")


class WorkerClient(Generic[ItemT, ToldT]):
    """``send(item)`` for many concurrent episodes, over few remote calls.

    An item goes to the worker with the fewest in flight. Those that arrive in the same tick of the event loop travel
    in one call to each worker, and come back together.

    Args:
        name: of the workers, for messages.
        method: of the workers, from a list of items to a list of what is told of each, or an exception.
        share: see ``own_order``.
    """

    def __init__(self, name: str, workers: Sequence[Any], method: str, share: tuple[int, int] = (0, 1)) -> None:
        self.name = name
        self._order = own_order(len(workers), share)
        self._method = method
        self._workers = list(workers)
        self._in_flight = [0] * len(self._workers)
        self._outbox: list[tuple[ItemT, asyncio.Future[ToldT]]] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def send(self, item: ItemT) -> ToldT:
        """Sends one item; returns what a worker tells of it.

        Raises:
            EngineUnavailableError: the worker died.
            Exception: what it tells in place of an answer: a ``RewardError`` where it cannot judge or say anything.
        """
        future: asyncio.Future[ToldT] = asyncio.get_running_loop().create_future()
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((item, future))
        return await future

    def _flush(self) -> None:
        waiting, self._outbox = [entry for entry in self._outbox if not entry[1].done()], []
        shares: list[list[tuple[ItemT, asyncio.Future[ToldT]]]] = [[] for _ in self._workers]
        for entry in waiting:
            worker = min(self._order, key=self._in_flight.__getitem__)
            self._in_flight[worker] += 1
            shares[worker].append(entry)
        for worker, share in enumerate(shares):
            if share:
                task = asyncio.get_running_loop().create_task(self._send(worker, share))
                self._sending.add(task)  # the event loop itself only holds a weak reference
                task.add_done_callback(self._sending.discard)

    async def _send(self, worker: int, waiting: list[tuple[ItemT, asyncio.Future[ToldT]]]) -> None:
        outcomes: Sequence[ToldT | Exception] = ()
        try:
            with Fault() as fault:  # its death, or a bug in it: that belongs to all who wait for it
                outcomes = await getattr(self._workers[worker], self._method).remote([item for item, _ in waiting])
        finally:
            self._in_flight[worker] -= len(waiting)
        if (error := fault.error) is not None:
            from ray.exceptions import RayActorError  # half a second, which environments outside a run do without

            died = isinstance(error, RayActorError)
            failure = EngineUnavailableError(f"worker {worker} of {self.name} died: {error}") if died else error
            outcomes = [failure] * len(waiting)
        for (_, future), outcome in zip(waiting, outcomes, strict=True):
            if future.done():  # its episode was cancelled
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
