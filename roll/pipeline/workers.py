"""The Ray workers of the model roles: each holds one strategy and adds what the pipeline calls."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from roll.agentic.types import Completion, GenerateRequest
from roll.algorithms.types import LossFn, TokenScores
from roll.data.batch import Batch
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.router import GenerationError
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.base import (
    GenerateStrategy,
    Metrics,
    RankInfo,
    ScoreStrategy,
    StrategyContext,
    TrainStrategy,
    WeightBucket,
)

logger = logging.getLogger(__name__)

_POLL_S = 1.0


class ScoreWorker(Worker):
    """Scores batches: the reference, and the part that every model role shares."""

    strategy: ScoreStrategy

    def setup(self, context: StrategyContext) -> RankInfo:
        """Builds the strategy and loads its model. Called again, it starts over from ``context``."""
        self.strategy = STRATEGIES.get(context.worker.strategy_args.strategy_name)(context)
        self.context = context
        return self.strategy.setup()

    def logprobs(self, batch: Batch) -> TokenScores:
        return self.strategy.logprobs(batch)


class TrainWorker(ScoreWorker):
    """Trains: the actor and the critic."""

    strategy: TrainStrategy

    def set_loss(self, build: Callable[..., LossFn], *args: Any) -> None:
        """Fixes the loss: ``build(*args)`` runs here, so that only a function's name and its configuration travel."""
        self.loss_fn = build(*args)

    def train(self, batch: Batch, optimizer_steps: Sequence[Sequence[int]]) -> list[Metrics]:
        """Takes one optimizer step per entry of ``optimizer_steps``.

        Args:
            batch: this worker's share of the rollout batch.
            optimizer_steps: for each step the rows of ``batch`` in it; may be empty when other ranks hold its rows.

        Returns:
            The metrics of every optimizer step.
        """
        return [self.strategy.train_step(batch.select(rows), self.loss_fn) for rows in optimizer_steps]

    def export_weights(self, bucket_bytes: int) -> list[ray.ObjectRef]:
        """Puts the weights into the object store, bucket by bucket; other ranks than 0 only take part."""
        return [ray.put(bucket) for bucket in self.strategy.export_weights(bucket_bytes) if self.context.rank == 0]

    def save(self, path: Path) -> None:
        self.strategy.save(path)

    def load(self, path: Path) -> None:
        self.strategy.load(path)


class InferWorker(Worker):
    """Generates: an asyncio actor around one engine."""

    strategy: GenerateStrategy

    def setup(self, context: StrategyContext, continuous: bool = True) -> None:
        """Builds and starts the engine.

        Args:
            context: see ``StrategyContext``.
            continuous: admit requests at any time (``generate_opt_level: 1``); otherwise a new batch starts only when
                the one before has finished (``0``).
        """
        if hasattr(self, "strategy"):
            self.strategy.shutdown()
        self.strategy = STRATEGIES.get(context.worker.strategy_args.strategy_name)(context)
        self.strategy.setup()
        self._continuous = continuous
        self._waiting: list[tuple[str, GenerateRequest]] = []
        self._running: set[asyncio.Task[None]] = set()
        self._results: dict[str, list[tuple[str, Completion | GenerationError]]] = {}
        self._arrived: dict[str, asyncio.Event] = {}

    async def submit(self, client_id: str, requests: Sequence[GenerateRequest]) -> None:
        """Takes requests; their results are fetched by ``poll``."""
        self._waiting += [(client_id, request) for request in requests]
        self._admit()

    async def poll(self, client_id: str) -> list[tuple[str, Completion | GenerationError]]:
        """Results that finished since the last poll; waits up to a second for the first."""
        arrived = self._arrived.setdefault(client_id, asyncio.Event())
        try:
            await asyncio.wait_for(arrived.wait(), _POLL_S)
        except TimeoutError:
            return []
        arrived.clear()
        return self._results.pop(client_id, [])

    async def abort(self, request_id: str) -> None:
        """Stops the request; whoever made it no longer waits for a result."""
        self._waiting = [entry for entry in self._waiting if entry[1].request_id != request_id]
        await self.strategy.abort(request_id)

    async def update_weights(self, bucket_refs: Sequence[ray.ObjectRef], version: int) -> None:
        """Loads the buckets that a trainer exported."""

        async def buckets() -> AsyncIterator[WeightBucket]:
            for ref in bucket_refs:
                yield await ref

        await self.strategy.update_weights(buckets(), version)

    def _admit(self) -> None:
        if not self._continuous and self._running:
            return
        waiting, self._waiting = self._waiting, []
        for client_id, request in waiting:
            task = asyncio.get_running_loop().create_task(self._run(client_id, request))
            self._running.add(task)
            task.add_done_callback(self._finished)

    async def _run(self, client_id: str, request: GenerateRequest) -> None:
        outcome: Completion | GenerationError
        try:
            outcome = await self.strategy.generate(request)
        except Exception as error:  # belongs to the request's caller, who raises it
            outcome = GenerationError(f"{self!r} could not generate: {type(error).__name__}: {error}")
            outcome.add_note("".join(traceback.format_exception(error)))
        self._results.setdefault(client_id, []).append((request.request_id, outcome))
        self._arrived.setdefault(client_id, asyncio.Event()).set()

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not self._running:
            self._admit()
