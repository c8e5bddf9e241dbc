"""Classifiers on devices of their reward worker, which take turns there with the run's other models."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from roll.rewards.classifiers import Classifier, Padding, logits_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


class HeldClassifier(Classifier):
    """A model that passes over one batch, or moves, at a time, in the order of the calls."""

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
