"""Verifiers, and other things that are closed in an event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from roll.rewards.types import RewardResult, Sample


@asynccontextmanager
async def closing(thing: Any) -> AsyncIterator[Any]:
    try:
        yield thing
    finally:
        await thing.close()


def score_by(make: Callable[[], Any], samples: Iterable[Sample]) -> list[RewardResult]:
    """What a verifier, made in an event loop of its own, says of all samples at once."""

    async def run() -> list[RewardResult]:
        async with closing(make()) as verifier:
            return await asyncio.gather(*map(verifier.score, samples))

    return asyncio.run(run())
