"""Classifiers on a reward worker's devices: on one, or split over several by tensor parallelism.

They take turns there with the run's other models. One that is divided has a process for each device.

The worker's side is ``ShardedClassifier``; ``python -m roll.rewards.device_classifiers`` is a rank, a child of the
worker (``roll.utils.children``). All ranks get the same rows and compute together; the worker watches them, so that one
that dies or hangs ends the batch and not the run. What a rank needs to find the others is on loopback, in memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from roll.rewards.classifiers import Classifier, Padding, RewardModelConfig, load_classifier, logits_of
from roll.rewards.types import RewardError
from roll.utils.children import START_TIMEOUT, Child, ChildError, Reply, encode, serve

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)


class HeldClassifier(Classifier):
    """A model that processes one batch, or moves, at a time, in the order of the calls."""

    def __init__(self, sizes: PreTrainedConfig) -> None:
        self._padding = Padding(sizes)
        self._turn = asyncio.Lock()
        self._there = asyncio.Event()
        self._there.set()

    async def forward(self, rows: list[list[int]]) -> list[list[float]]:
        pad_id = self._padding.of(rows)
        await self._there.wait()  # nothing awaits between here and the lock, which keeps the order
        async with self._turn:
            return await self._pass(rows, pad_id)

    async def offload(self) -> None:
        self._there.clear()
        async with self._turn:
            await self._move(there=False)

    async def onload(self) -> None:
        async with self._turn:
            await self._move(there=True)
        self._there.set()

    @abstractmethod
    async def _pass(self, rows: list[list[int]], pad_id: int) -> list[list[float]]:
        """See ``forward``."""

    @abstractmethod
    async def _move(self, *, there: bool) -> None:
        """Takes the model to its devices, or off them."""


class LocalClassifier(HeldClassifier):
    """A model in a thread of this process, whole on one device."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        super().__init__(model.config)
        self.model: PreTrainedModel = model.to(device)  # type: ignore[arg-type]
        self._device = device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-model")

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)

    async def _pass(self, rows: list[list[int]], pad_id: int) -> list[list[float]]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, logits_of, self.model, rows, pad_id, self._device)

    async def _move(self, *, there: bool) -> None:
        place = self._device if there else "cpu"
        await asyncio.get_running_loop().run_in_executor(self._thread, move, self.model, place)


def move(model: PreTrainedModel, place: torch.device | str) -> None:
    """Moves a model; a GPU that it leaves gets its memory back."""
    import torch

    model.to(place)  # type: ignore[arg-type]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


LOAD_TIMEOUT = 3600.0
"""Seconds for reading the weights."""
PASS_TIMEOUT = 600.0
"""Seconds for one batch, or for a move."""
_GRACE = 1.0
"""Seconds in which the others may say what is wrong too: the rank that died need not be the first to be heard."""
_MAX_REPLY_BYTES = 1 << 24
_HOST = "127.0.0.1"


class RankError(Exception):
    """What a rank sends instead of a result."""


class ShardedClassifier(HeldClassifier):
    """The worker's side. Use it in one event loop, whose thread the ranks die with.

    Ranks are started, all of them, by the first batch, and again by the next one after any of them was lost.
    """

    def __init__(self, config: RewardModelConfig, sizes: PreTrainedConfig) -> None:
        super().__init__(sizes)
        self._size = config.tensor_parallel_size
        args = config.model_dump(mode="json")
        self._ranks = [
            Child(
                "roll.rewards.device_classifiers",
                {"rank": rank, "size": self._size, "args": args},
                what="reward model",
                max_reply_bytes=_MAX_REPLY_BYTES,
            )
            for rank in range(self._size)
        ]
        self._loaded = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that run."""
        return [rank.pid for rank in self._ranks if rank.pid is not None]

    async def start(self) -> None:
        async with self._turn:
            await self._load()

    async def close(self) -> None:
        """Kills the ranks. A batch that runs ends with a ``RewardError``."""
        await asyncio.gather(*(rank.close() for rank in self._ranks))

    async def _pass(self, rows: list[list[int]], pad_id: int) -> list[list[float]]:
        await self._load()
        try:
            replies = await self._ask(self._ranks, {"do": "forward", "rows": rows, "pad_id": pad_id}, PASS_TIMEOUT)
        except RankError as error:
            raise RewardError(f"{error}; the next batch restarts all of them") from error
        logits: list[list[float]] = replies[0]["logits"]
        return logits

    async def _move(self, *, there: bool) -> None:
        if not self._loaded:
            return  # nothing is on the devices
        try:
            await self._ask(self._ranks, {"do": "move", "there": there}, PASS_TIMEOUT)
        except (RankError, RewardError) as error:
            logger.warning("%s; the next batch restarts all of them", error)

    async def _load(self) -> None:
        """Starts the ranks, unless they run."""
        if self._loaded:
            return
        try:
            await asyncio.gather(*(rank.start() for rank in self._ranks))
        except ChildError as error:
            await self._stop()
            raise RewardError(str(error)) from error
        try:
            [opened] = await self._ask(self._ranks[:1], {"do": "open"}, START_TIMEOUT)
            await self._ask(self._ranks, {"do": "load", "port": opened["port"]}, LOAD_TIMEOUT)
        except RankError as error:
            raise ValueError(str(error)) from error
        self._loaded = True

    async def _ask(self, ranks: Sequence[Child], request: Mapping[str, Any], timeout: float) -> list[Reply]:
        """Has a request answered by all of some ranks. Any failure ends all, which could no longer work together.

        Raises:
            RankError: a rank failed at it.
            RewardError: a rank died, or took too long.
        """
        line = encode(request)
        asked = [asyncio.create_task(_reply(rank, line)) for rank in ranks]
        try:
            _, waiting = await asyncio.wait(asked, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
            if waiting:
                await asyncio.wait(waiting, timeout=_GRACE)
            failed = {i: task.exception() for i, task in enumerate(asked) if task.done() and task.exception()}
            late = [i for i, task in enumerate(asked) if not task.done()]
            if not failed and not late:
                return [task.result() for task in asked]
            # A rank that lost its peer fails too; the one that died is the reason.
            for i, error in sorted(failed.items(), key=lambda each: isinstance(each[1], RankError)):
                kind = RankError if isinstance(error, RankError) else RewardError
                raise kind(f"rank {i} of the {self._size} of the reward model: {error}") from error
            names = ", ".join(map(str, late))
            raise RewardError(f"rank {names} of the {self._size} of the reward model took longer than {timeout:g} s")
        except BaseException:
            await self._stop()
            await asyncio.gather(*asked, return_exceptions=True)
            raise

    async def _stop(self) -> None:
        """Kills the ranks, and waits until what they had is free."""
        self._loaded = False
        await asyncio.gather(*(rank.stop() for rank in self._ranks))


async def _reply(rank: Child, line: bytes) -> Reply:
    reply = await rank.ask(line)
    if "error" in reply:
        raise RankError(reply["error"])
    return reply


class _Rank:
    """A rank: answers what ``ShardedClassifier`` asks."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._rank, self._size = int(setup["rank"]), int(setup["size"])
        self._config = RewardModelConfig.model_validate(setup["args"])
        own = {"RANK": self._rank, "LOCAL_RANK": self._rank, "WORLD_SIZE": self._size, "LOCAL_WORLD_SIZE": self._size}
        os.environ.update({name: str(value) for name, value in own.items()})
        if self._config.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Transformers would take a GPU wherever there is one
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopback)
        self._store: Any = None
        self._model: Any = None
        self._device: Any = None

    def __call__(self, request: Mapping[str, Any]) -> Reply:
        match request["do"]:
            case "open":
                return {"port": self._open()}
            case "load":
                self._load(request["port"])
                return {}
            case "forward":
                logits = logits_of(self._model, request["rows"], request["pad_id"], self._device)
                return {"logits": logits} if self._rank == 0 else {}
            case "move":
                move(self._model, self._device if request["there"] else "cpu")
                return {}
            case other:
                raise AssertionError(other)

    def _open(self) -> int:
        """Opens the store where the ranks meet, on a port that the system chooses."""
        import torch.distributed as dist

        listener = socket.create_server((_HOST, 0))
        port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(
            _HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=LOAD_TIMEOUT),
            master_listen_fd=listener.detach(),
        )
        return port

    def _load(self, port: int) -> None:
        import torch
        import torch.distributed as dist
        from transformers.distributed import DistributedConfig
        from transformers.utils.logging import set_verbosity_error

        from roll.models.tensor_parallel import check_even

        on_gpu = self._config.device != "cpu" and torch.cuda.is_available()
        self._device = torch.device("cuda", self._rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(max(1, torch.get_num_threads() // self._size))
        limit = timedelta(seconds=LOAD_TIMEOUT)
        if self._store is None:
            self._store = dist.TCPStore(_HOST, port, is_master=False, timeout=limit)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=self._store, rank=self._rank, world_size=self._size, timeout=limit
        )
        set_verbosity_error()  # it warns of every part that stays whole
        self._model = load_classifier(self._config, DistributedConfig(tp_size=self._size)).to(self._device)
        check_even(self._model, self._size, f"tensor_parallel_size: {self._size}")


if __name__ == "__main__":
    serve(_Rank, plain=ValueError)
