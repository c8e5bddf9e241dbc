"""Workers of the tests of clusters. A module of their own: what it imports, each of their processes does."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from roll.distributed.cluster.cluster import Worker
from roll.utils.progress import advance

if TYPE_CHECKING:
    import numpy as np

    from roll.data.columns import Item
    from roll.data.stored import Stored
    from roll.distributed.strategy.base import EngineNodes, StrategyContext

CALM_AT_IMPORT = gc.get_threshold()[0] > 10_000
"""Whether the collector looked seldom when this module was imported, as by default it does not."""


class Probe(Worker):
    """Says what it sees and fails on request."""

    def __init__(self, role: str, rank: int, world_size: int, env: dict[str, str], greeting: str = "") -> None:
        super().__init__(role, rank, world_size, env)
        if greeting == "fail":
            raise FileNotFoundError("no such greeting")
        self.greeting = greeting

    def pid(self) -> int:
        return os.getpid()

    def variables(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def calm(self) -> bool:
        return CALM_AT_IMPORT

    def torch_threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def leave(self, count: int) -> tuple[dict[str, Stored], Item]:
        """A column of so many tokens, this rank for each, and a picture of as many rows, in the object store."""
        import numpy as np
        import torch

        from roll.data.columns import Item
        from roll.data.stored import leave, store
        from roll.distributed.cluster.cluster import RayBlock

        self.picture = Item(np.full((count, 10, 3), self.rank, dtype=np.uint8))
        leave([self.picture], RayBlock.put)
        return store({"tokens_T": torch.full((count,), self.rank)}, torch.tensor([count]), RayBlock.put), self.picture

    def nap(self, seconds: float) -> tuple[float, float]:
        started = time.time()
        time.sleep(seconds)
        return started, time.time()

    def work(self, seconds: float) -> None:
        end = time.time() + seconds
        while time.time() < end:
            advance()
            time.sleep(0.01)

    def fail(self, key: str) -> None:
        raise KeyError(key)

    def ones(self, number: int) -> np.ndarray:
        import numpy as np

        return np.ones(number, np.uint8)

    def add(self, array: np.ndarray, number: int) -> tuple[float, bool]:
        return float(array.sum()) + number + self.rank, array.flags.writeable

    def exit(self, code: int) -> None:
        os._exit(code)

    def relay(self, handle: Any) -> None:
        import ray

        ray.get(handle.exit.remote(1))

    def join(self) -> float:
        import torch

        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
        one = torch.ones(1)
        torch.distributed.all_reduce(one)
        return one.item()

    def reduce_after(self, seconds: float) -> None:
        """The others wait for it in the collective."""
        import torch

        time.sleep(seconds)
        torch.distributed.all_reduce(torch.ones(1))

    def reduce_for_ever(self) -> None:
        import torch

        while True:
            torch.distributed.all_reduce(torch.ones(1))


class PlacedEngine:
    """An engine that says where it is, and fails as one does that has lost a part."""

    def __init__(self, context: StrategyContext) -> None:
        self.context = context

    def setup(self) -> None: ...

    def shutdown(self) -> None: ...

    async def generate(self, request: None) -> None:
        from roll.distributed.strategy.generation.engine_process import EngineStoppedError

        raise EngineStoppedError("the generation engine died")

    def place(self) -> tuple[int, int, EngineNodes | None]:
        return self.context.rank, self.context.world_size, self.context.nodes


class Meeting(Worker):
    """Calls that wait for one another."""

    met: asyncio.Event | None = None
    present = 0

    async def meet(self, number: int) -> int:
        self.met = self.met or asyncio.Event()
        self.present += 1
        if self.present == number:
            self.met.set()
        await self.met.wait()
        return self.present

    async def play(self, members: int) -> None:
        await asyncio.gather(*(asyncio.create_task(self.meet(99), name=f"member {n}") for n in range(members)))
