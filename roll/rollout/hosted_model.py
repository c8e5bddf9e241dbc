"""Models that a reward worker hosts beside its verifiers."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from roll.configs.judge import JudgeEngine
from roll.data.requests import Completion, GenerateRequest
from roll.distributed.strategy.base import States
from roll.distributed.strategy.generation.alone import generator_of


class HostedGenerator:
    """``roll.rewards.judge_model.HostedModel`` on one of the run's engines.

    Args:
        model: a folder in Hugging Face format, or a name on the hub.
        engine: see ``JudgeEngine``.

    Raises:
        ValueError: the model cannot be loaded, or an option does not fit it.
        MissingEngineError: the engine's package is not installed.
    """

    def __init__(self, model: str, engine: JudgeEngine, most: int, *, devices: int = 1) -> None:
        self._open = ExitStack()
        started = generator_of(
            model,
            engine.worker(devices),
            sequence_length=engine.max_length,
            max_running_requests=most,
            seed=0,  # every request brings its own
        )
        with ThreadPoolExecutor(max_workers=1) as beside:  # the caller may be in an event loop; engines run their own
            self._engine: Any = beside.submit(self._open.enter_context, started).result()

    async def generate(self, request: GenerateRequest) -> Completion:
        """See ``Generator.generate``."""
        completion: Completion = await self._engine.generate(request)
        return completion

    async def offload(self) -> None:
        """Takes weights and cache off the device; requests wait."""
        await asyncio.to_thread(self._engine.offload, States.WEIGHTS | States.CACHE)

    async def onload(self) -> None:
        """Takes them back."""
        await asyncio.to_thread(self._engine.onload, States.WEIGHTS | States.CACHE)

    async def close(self) -> None:
        """Ends the engine."""
        await asyncio.to_thread(self._open.close)
