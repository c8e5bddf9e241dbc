"""The Ray workers of the model roles: each holds one strategy and adds what the pipeline calls.

Importing this module does not import torch: Ray imports the class of a worker wherever it is called from, which is in
the processes that play episodes, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import traceback
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from roll.data.columns import Records
from roll.data.requests import Completion, GenerateRequest
from roll.data.stored import hold, unread
from roll.distributed.cluster.cluster import NODE_VERDICT_S, Worker
from roll.distributed.strategy import make_strategy, strategy_class
from roll.distributed.strategy.generation.engine_process import EngineStoppedError
from roll.rollout.router import GenerationError, Outcomes
from roll.utils.memory import freeze_startup_objects

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from roll.algorithms.types import LossFn, TokenScores
    from roll.configs.algorithm import TrainInferCorrectionConfig
    from roll.data.batch import Batch
    from roll.distributed.strategy.base import (
        GenerateStrategy,
        Metrics,
        RankInfo,
        ScoreStrategy,
        States,
        StrategyContext,
        TrainStrategy,
    )
    from roll.distributed.weights.buckets import WeightBucket
    from roll.distributed.weights.messages import Message, Payload, Reply
    from roll.distributed.weights.sender import Link, TransferRequest, TransferResult, WeightSender
    from roll.utils.hashing import WrittenFile


logger = logging.getLogger(__name__)

_POLL_S = 1.0


class ScoreWorker(Worker):
    """Computes log-probs of batches: the reference, and the base of every model role."""

    strategy: ScoreStrategy
    _loaded = False

    def preload(self, strategy_name: str) -> None:
        """Imports what ``setup`` will need, which takes seconds."""
        strategy_class(strategy_name)
        importlib.import_module("transformers.modeling_utils")

    def setup(self, context: StrategyContext) -> RankInfo:
        """Builds the strategy and loads its model. Called again, it starts over from ``context``."""
        if hasattr(self, "strategy"):
            self.strategy.shutdown()
        self.strategy = make_strategy(context)
        self.context = context
        info = self.strategy.setup()
        self._loaded = True
        freeze_startup_objects()
        return info

    def offload(self, what: States) -> None:
        """Moves states off the device; nothing, if there are none because ``setup`` failed."""
        if self._loaded:
            self.strategy.offload(what)

    def onload(self, what: States) -> None:
        """Takes states back to the device."""
        self.strategy.onload(what)

    def device_name(self) -> str | None:
        """Name of its GPU; ``None`` on a CPU."""
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else None

    def score(
        self, call: str, batch: Batch, tells: bool, correction: TrainInferCorrectionConfig | None, *args: Any
    ) -> TokenScores | None:
        """Calls ``logprobs`` or ``probe_logprobs``, and leaves the scores in the object store of this node.

        Args:
            batch: its columns may be stored.
            tells: false returns nothing: another rank has the same share.
            correction: the scores are to have its weights and rejections, where the batch has log-probs to compare
                with.
        """
        from roll.algorithms.correction import compared
        from roll.distributed.cluster.cluster import RayBlock

        with self.clock.work():
            batch = batch.fetched()
            scores: TokenScores = getattr(self, call)(batch, *args)
            if not tells:
                return None
            batch = compared(batch.replace(old_logprobs_T=scores.logprobs_T), correction)
            found = {name: getattr(batch, name) for name in ("mismatch_BVK", "importance_T", "rejected_T")}
            scores = replace(scores, **found)
            return scores.stored(batch.lengths_B, RayBlock.put)

    def logprobs(self, batch: Batch, adapter: bool = True) -> TokenScores:
        """Scores a share; ``adapter`` False leaves out the actor's LoRA adapter."""
        if adapter:
            return self.strategy.logprobs(batch)
        return cast("TrainStrategy", self.strategy).logprobs(batch, adapter=False)

    def probe_logprobs(self, batch: Batch) -> TokenScores:
        """As ``logprobs``, but these micro-batches are not those that are compared with the model's own forward."""
        from roll.utils.foreign import replaced

        compares = hasattr(self.strategy, "own_forward")
        with replaced(self.strategy, own_forward=None) if compares else contextlib.nullcontext():
            return self.strategy.logprobs(batch)

    def shows(self, what: str, *args: Any) -> Any:
        """What the strategy shows of its model by a method of this name (collective); ``None`` where it has none.

        See ``roll.distributed.strategy.evidence``.
        """
        method = getattr(self.strategy, what, None)
        return None if method is None else method(*args)

    def take_idle_s(self) -> float:
        """Seconds since the last call in which it neither scored, trained nor sent weights."""
        return self.clock.take_idle_s()


class TrainWorker(ScoreWorker):
    """Trains: the actor and the critic."""

    strategy: TrainStrategy

    def setup(self, context: StrategyContext) -> RankInfo:
        self._sender: WeightSender | None = None
        return super().setup(context)

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
        with self.clock.work():
            batch = batch.fetched()
            return [self.strategy.train_step(batch.select(rows), self.loss_fn) for rows in optimizer_steps]

    def send_weights(self, order: TransferRequest) -> TransferResult | None:
        """Exports and sends; every rank must take part. Returns what this one delivered, if it serves any receiver.

        Raises:
            WeightTransferError: a receiver refused the update.
            RpcTimeoutError: a receiver gave no answer in time.
        """
        if self._sender is not None and not (order.deltas and order.keeper == self.context.rank):
            self._sender.forget(order)
        export = getattr(self.strategy, "export_adapter" if order.payload == "adapter" else "export_weights")
        buckets: Iterator[WeightBucket] = export(order.bucket_bytes, tuple(order.receivers), check=order.check)
        with self.clock.work():
            try:
                if self.context.rank in order.receivers:
                    return self._send(order, buckets)
            finally:
                for _ in buckets:  # other ranks wait for this one in every gather, also when sending failed
                    pass
        return None

    def resend_weights(self, order: TransferRequest) -> TransferResult:
        """Sends the buckets that the last update of this kind has kept; for the rank that keeps them alone."""
        from roll.distributed.weights.buckets import with_checksum

        assert self._sender is not None
        kept = self._sender.kept(order)
        return self._send(order, map(with_checksum, kept) if order.check else kept)

    def _send(self, order: TransferRequest, buckets: Iterable[WeightBucket]) -> TransferResult:
        if self._sender is None:
            from roll.distributed.weights.sender import WeightSender

            self._sender = WeightSender(self.context.rank, self.node_ip())
        return self._sender.send(order, buckets)

    def save(self, path: Path) -> list[WrittenFile]:
        """Writes the role's part of a checkpoint; returns what this rank wrote, but for small files."""
        with self.clock.work():
            return self.strategy.save(path)

    def start_save(self, path: Path) -> None:
        """Copies this rank's share of a checkpoint to host memory; ``written`` tells how its writing ended."""
        with self.clock.work():
            self._saving = self.strategy.start_save(path)

    def written(self) -> list[WrittenFile] | OSError | None:
        """Files that this rank wrote since ``start_save``, or why it could not; ``None`` while it is at it."""
        if not self._saving.done():
            return None
        error = self._saving.exception()
        return error if isinstance(error, OSError) else self._saving.result()

    def save_model(self, folder: Path) -> None:
        """Writes the model alone."""
        self.strategy.save_model(folder)

    def load(self, path: Path) -> None:
        self.strategy.load(path)


class InferWorker(Worker):
    """Generates: an asyncio actor around one engine."""

    strategy: GenerateStrategy

    _watches: Sequence[asyncio.Task[None]] = ()

    def setup(self, context: StrategyContext, continuous: bool = True, others: Sequence[ActorHandle] = ()) -> None:
        """Builds and starts the engine, or this node's part of one whose requests and weights another worker takes.

        Args:
            continuous: admit requests at any time (``generate_opt_level: 1``); otherwise a new batch starts only when
                the one before has finished (``0``).
            others: workers with the other parts of this engine; when one of them dies, this one does.
        """
        from roll.distributed.weights.receiver import WeightReceiver

        for watch in self._watches:
            watch.cancel()
        if hasattr(self, "strategy"):
            self.strategy.shutdown()
        self.strategy = make_strategy(context)
        self.strategy.setup()
        self._receiver = WeightReceiver(self._load_weights, self.node_ip())
        self._continuous = continuous
        self._waiting: list[tuple[str, GenerateRequest]] = []
        self._running: set[asyncio.Task[None]] = set()
        self._completions: defaultdict[str, list[Completion]] = defaultdict(list)
        self._errors: defaultdict[str, list[tuple[str, GenerationError]]] = defaultdict(list)
        self._arrived: dict[str, asyncio.Event] = {}
        self._watches = [asyncio.get_running_loop().create_task(self._die_with(each)) for each in others]
        freeze_startup_objects()

    async def wait(self) -> None:
        """Returns never: its caller gets Ray's error when this worker dies."""
        await asyncio.Event().wait()

    async def _die_with(self, other: ActorHandle) -> None:
        """Without a part an engine may hang for minutes, and then says something of a connection."""
        from ray.exceptions import RayError

        try:
            await other.wait.remote()
        except RayError as error:
            logger.error("%r ends, since a part of its engine is gone: %s", self, error)
            os.kill(os.getpid(), signal.SIGKILL)

    @contextlib.asynccontextmanager
    async def _with_all_parts(self) -> AsyncIterator[None]:
        """The block asks the engine, whose failure is held back if it has parts on other nodes.

        It fails at once where one is lost, but Ray may take a while to know; then this process ends (``_die_with``),
        and is replaced. Callers would take the failure for an error of the engine's own, and end the run.
        """
        try:
            yield
        except EngineStoppedError:
            if self._watches:
                await asyncio.sleep(NODE_VERDICT_S)
            raise

    async def submit(self, client_id: str, requests: Iterable[GenerateRequest]) -> None:
        """Takes requests, which come as ``Records``; their results are fetched by ``poll``."""
        self._waiting += [(client_id, request) for request in requests]
        self._admit()

    async def poll(self, client_id: str) -> Outcomes:
        """Results since the last poll; waits up to a second for the first."""
        arrived = self._arrived.setdefault(client_id, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(arrived.wait(), _POLL_S)
        arrived.clear()
        return Outcomes(Records.of(Completion, self._completions.pop(client_id, [])), self._errors.pop(client_id, []))

    async def abort(self, request_id: str, submitted: None = None) -> None:
        """Stops the request; whoever made it no longer waits for a result.

        Args:
            submitted: what ``submit`` gave, so that this call does not overtake it on the way.
        """
        self._waiting = [entry for entry in self._waiting if entry[1].request_id != request_id]
        await self.strategy.abort(request_id)

    async def complete(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Answers of the engine itself, apart from those that clients wait for."""
        async with self._with_all_parts():
            return list(await asyncio.gather(*map(self.strategy.generate, requests)))

    async def shows(self, what: str, *args: Any) -> Any:
        """What the engine shows of its model by a method of this name; ``None`` where it has none.

        See ``roll.distributed.strategy.evidence``.
        """
        method = getattr(self.strategy, what, None)
        return None if method is None else await asyncio.to_thread(method, *args)

    async def drain(self) -> None:
        """Returns when no request is in flight; new ones wait for the next update of weights."""
        await self.strategy.drain()

    async def take_idle_s(self) -> float:
        """Seconds since the last call in which no request was in flight, and no weights came."""
        return self.clock.take_idle_s()

    async def num_recorded(self, version: int) -> int:
        """Tokens that a version has sampled so far of requests with ``recorded`` versions."""
        return int(cast(Any, self.strategy).num_recorded(version))  # only engines that replay are asked

    async def offload(self, what: States) -> None:
        """Moves states off the device; requests wait. Nothing, before ``setup``."""
        if hasattr(self, "strategy"):
            await asyncio.to_thread(self.strategy.offload, what)

    async def onload(self, what: States) -> None:
        """Takes states back to the device; requests go on. Nothing, before ``setup``."""
        if hasattr(self, "strategy"):
            await asyncio.to_thread(self.strategy.onload, what)

    async def receive_weights(self, message: Message, link: Link) -> Reply:
        """Takes part in an update, see ``roll.distributed.weights``."""
        return await self._receiver.handle(message, link)

    async def _load_weights(self, payload: Payload, buckets: AsyncIterator[WeightBucket], version: int) -> None:
        update = self.strategy.update_adapter if payload == "adapter" else self.strategy.update_weights
        with self.clock.work():
            async with self._with_all_parts():
                await update(buckets, version)

    def _admit(self) -> None:
        if not self._continuous and self._running:
            return
        waiting, self._waiting = self._waiting, []
        for client_id, request in waiting:
            task = asyncio.get_running_loop().create_task(self._run(client_id, request), name=request.request_id)
            self._running.add(task)
            task.add_done_callback(self._finished)

    async def _run(self, client_id: str, request: GenerateRequest) -> None:
        with self.clock.work():
            try:
                if unread(request.items):
                    await asyncio.to_thread(hold, request.items)
                async with self._with_all_parts():
                    completion = await self.strategy.generate(request)
                self._completions[client_id].append(completion)  # not before: a poll may have taken the list
            except Exception as error:  # belongs to the request's caller, who raises it
                failure = GenerationError(f"{self!r} could not generate: {type(error).__name__}: {error}")
                failure.add_note("".join(traceback.format_exception(error)))
                self._errors[client_id].append((request.request_id, failure))
        self._arrived.setdefault(client_id, asyncio.Event()).set()

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not self._running:
            self._admit()
