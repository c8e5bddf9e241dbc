"""What of a generator is on its device, as it is told to leave and to come back."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, AsyncMock, call

import pytest
import torch

from roll.configs.worker import WorkerConfig
from roll.distributed.strategy.base import States, StrategyContext
from roll.distributed.strategy.generation.generator import Generator, ResidentStates
from roll.distributed.strategy.vllm.strategy import VllmStrategy
from tests.support.contract import buckets_of

BOTH = States.WEIGHTS | States.CACHE


def test_states_leave_and_come_back_once_the_cache_with_the_weights():
    states = ResidentStates()
    assert states.leave(States.WEIGHTS) == BOTH
    assert states.come_back(States.WEIGHTS) == States.WEIGHTS
    assert states.away == States.CACHE
    assert states.come_back(States.ALL) == States.CACHE
    assert not states.away
    states = ResidentStates()
    assert states.leave(States.CACHE) == States.CACHE
    assert states.leave(States.ALL) == States.WEIGHTS
    assert not states.leave(States.ALL)
    assert states.come_back(States.ALL) == BOTH
    assert not states.come_back(States.ALL)
    states = ResidentStates()
    assert not states.leave(States.GRADS | States.OPTIMIZER)
    assert not states.away


def done(*_: object) -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


async def load_weights(engine: Any, buckets: Any, plan: Any) -> None:
    async for _ in buckets:
        pass


def bare(**attributes: Any) -> Any:
    """A generator whose engine does nothing."""
    stubs = dict.fromkeys(Generator.__abstractmethods__, done) | {"load_weights": load_weights, "name": "bare"}
    engine = type("Bare", (Generator,), stubs | attributes)
    return engine(StrategyContext(WorkerConfig(), "actor_infer", "model"))


async def test_dropped_weights_are_never_used():
    engine = bare(drops_weights=True)
    engine.offload(States.CACHE)
    engine.onload(States.CACHE)  # the weights were there
    for _ in range(2):
        engine.offload(States.ALL)
        engine.onload(States.WEIGHTS)  # their memory, for an update
        await engine.update_weights(buckets_of({"w": torch.zeros(2)}), 1)
        engine.onload(States.CACHE)
    engine.offload(States.ALL)
    with pytest.raises(RuntimeError, match="actor_infer: its weights were dropped; expected an update"):
        engine.onload(States.ALL)
    engine = bare()
    engine.offload(States.ALL)
    engine.onload(States.ALL)


@pytest.mark.parametrize(
    ("drops", "leaving", "expected"),
    [
        (True, BOTH, [call.sleep(level=2, mode=ANY)]),
        (False, BOTH, [call.sleep(level=1, mode=ANY)]),
        (True, States.CACHE, [call.sleep(level=1, mode=ANY), call.wake_up(["weights"])]),
    ],
)
async def test_vllm_sleeps_at_level_2_where_an_update_follows(drops, leaving, expected):
    engine: Any = SimpleNamespace(_on_cpu=False, drops_weights=drops, _engine=AsyncMock())
    await VllmStrategy._sleep(engine, leaving)
    assert engine._engine.mock_calls == expected
