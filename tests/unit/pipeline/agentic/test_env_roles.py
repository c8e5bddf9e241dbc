"""The environment managers of a run, their workers in this process."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll.configs.agentic import MANAGERS, AgenticConfig
from roll.configs.loader import load_config
from roll.pipeline.agentic import AgenticRolloutWorkers
from roll.pipeline.session import RunFailedError
from roll.pipeline.start import Start
from roll.rollout.env_worker import EnvironmentWorker
from roll.utils.signals import SignalGuard

CONFIGS = Path(__file__).parents[3] / "integration" / "config"


class Local:
    """Two workers that answer at once (what a ``Cluster`` does through Ray)."""

    world_size = 2

    def __init__(self) -> None:
        self.workers = [EnvironmentWorker("envs", rank, self.world_size, {}) for rank in range(self.world_size)]

    def submit(self, method: str, *args: Any) -> list[Any]:
        return [asyncio.run(getattr(worker, method)(*args)) for worker in self.workers]

    def gather(self, refs: list[Any], *, call: str) -> list[Any]:
        return refs


def roles(*overrides: str) -> AgenticRolloutWorkers:
    config = load_config(AgenticConfig, "small", CONFIGS, overrides)
    clusters = {name: Local() for name in MANAGERS}
    models, start = SimpleNamespace(on_replaced=[]), Start("/no/model")
    run: Any = SimpleNamespace(clusters=clusters, roles=models, start=start, signals=SignalGuard())
    return AgenticRolloutWorkers(config, run)


def test_every_environment_is_tried_before_anything_is_set_up():
    roles().probe()
    mute = roles("custom_envs.Counting.env_type=tests.support.faults:MuteEnv")
    with pytest.raises(RunFailedError) as caught:
        mute.probe()
    line = "custom_envs.Counting: MuteEnv.reset returned observation None (NoneType), expected text, or a list of parts"
    assert str(caught.value) == line, "told once, though each worker finds it"


def test_evaluations_alone_are_recorded_twice_as_many_as_are_shown():
    envs = roles("num_renders=3")
    assert [scheduler.plan.spec(5).record for scheduler in (envs.train, envs.val, envs.val_greedy)] == [
        False,
        True,
        False,
    ]
    assert not envs.val.plan.spec(6).record
