"""Workers and environments that go wrong on request, for runs of the real pipeline.

A run finds this module by path (``worker_cls: tests.support.faults:GatedTrainWorker``) and its orders in the folder
that ``system_envs.ROLL_FAULTS`` names. ``gate(name)`` notes that a process has come to a point; a file ``hold-<name>``
makes it wait there, ``die-<name>`` makes it kill itself once, as ``kill -9`` would.

Like the library's, these workers can be imported without torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.agentic.env.base import StepResult, TextEnv
from roll.pipeline.workers import InferWorker, TrainWorker
from roll.rewards.types import RewardError, RewardResult, Sample
from roll.rollout.env_worker import EnvironmentWorker
from roll.rollout.plans import GroupSpec
from roll.rollout.prompt_worker import PromptWorker
from roll.rollout.reward_worker import RewardWorker
from roll.rollout.types import RolloutGroup
from tests.support.steps import usual_step

if TYPE_CHECKING:
    from roll.algorithms.types import TokenScores
    from roll.data.batch import Batch
    from roll.data.requests import GenerateRequest
    from roll.distributed.strategy.base import Metrics, States
    from roll.distributed.weights.buckets import WeightBucket
    from roll.distributed.weights.messages import Message, Payload, Reply
    from roll.distributed.weights.sender import Link
    from roll.utils.hashing import WrittenFile

FOLDER = "ROLL_FAULTS"


def folder() -> Path:
    return Path(os.environ[FOLDER])


def arrive(name: str) -> Path:
    """Notes the arrival, obeys ``die-<name>``, and returns the file that says whether to wait."""
    (folder() / f"at-{name}").write_text(str(os.getpid()))
    order = folder() / f"die-{name}"
    if order.exists():
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return folder() / f"hold-{name}"


def gate(name: str) -> None:
    hold = arrive(name)
    while hold.exists():
        time.sleep(0.05)


async def async_gate(name: str) -> None:
    hold = arrive(name)
    while hold.exists():
        await asyncio.sleep(0.05)


def log(file: str, **record: Any) -> None:
    """Adds a line of JSON to a file in the folder."""
    with (folder() / file).open("a") as lines:
        lines.write(json.dumps(record) + "\n")


class GatedTrainWorker(TrainWorker):
    """Gates ``<role>-<rank>-train-<n>`` and ``…-logprobs``; ``nan-<n>`` spoils the n-th call of ``train``.

    ``hold-<role>-<rank>-written`` makes a save in the background go on for ever.
    """

    calls = 0

    def train(self, batch: Batch, optimizer_steps: Sequence[Sequence[int]]) -> list[Metrics]:
        self.calls += 1
        gate(f"{self.role}-{self.rank}-train-{self.calls}")
        if (folder() / f"nan-{self.calls}").exists():
            batch = batch.replace(advantages_T=batch.loss_mask_T * float("nan"))
        return super().train(batch, optimizer_steps)

    def written(self) -> list[WrittenFile] | None:
        return None if arrive(f"{self.role}-{self.rank}-written").exists() else super().written()

    def logprobs(self, batch: Batch, adapter: bool = True) -> TokenScores:
        gate(f"{self.role}-{self.rank}-logprobs")
        return super().logprobs(batch, adapter)


class GatedInferWorker(InferWorker):
    """Gates ``<role>-<rank>-generate-<n>``, n counting the batches of requests from 1, restarts included.

    And ``<role>-<rank>-weights-<version>``, when the first bucket of an update is here, and ``<role>-<rank>-ready``.
    """

    calls = 0
    version = -1

    def setup(self, *args: Any) -> None:
        super().setup(*args)
        gate(f"{self.role}-{self.rank}-ready")

    async def receive_weights(self, message: Message, link: Link) -> Reply:
        from roll.distributed.weights.messages import BucketMessage, Open

        match message:
            case Open():
                self.version = message.version
            case BucketMessage(number=0):
                await async_gate(f"{self.role}-{self.rank}-weights-{self.version}")
        return await super().receive_weights(message, link)

    async def submit(self, client_id: str, requests: Sequence[GenerateRequest]) -> None:
        self.calls += 1
        await async_gate(f"{self.role}-{self.rank}-generate-{self.calls}")
        await super().submit(client_id, requests)


class MovedInferWorker(GatedInferWorker):
    """Logs in ``moves.jsonl`` how many requests it holds and tokens it has sampled when its devices go and come."""

    async def offload(self, what: States) -> None:
        await super().offload(what)
        self._log("offload")

    async def onload(self, what: States) -> None:
        self._log("onload")
        await super().onload(what)

    def _log(self, call: str) -> None:
        if hasattr(self, "strategy"):
            stats = self.strategy.stats()
            log("moves.jsonl", call=call, in_flight=stats["in_flight"], tokens=stats["generated_tokens"])


class FragileInferWorker(GatedInferWorker):
    """With ``die-partial`` it dies once as new weights come to requests in flight: it holds partial answers."""

    async def receive_weights(self, message: Message, link: Link) -> Reply:
        from roll.distributed.weights.messages import Open

        if isinstance(message, Open) and message.version > 0 and self.strategy.stats()["in_flight"]:
            arrive("partial")
        return await super().receive_weights(message, link)


class LateInferWorker(InferWorker):
    """Of several, the last takes new weights for those before."""

    async def _load_weights(self, payload: Payload, buckets: AsyncIterator[WeightBucket], version: int) -> None:
        late = self.rank == self.world_size - 1
        await super()._load_weights(payload, buckets, version - late)


class DamagedInferWorker(InferWorker):
    """Its last layer is not what it was sent."""

    async def _load_weights(self, payload: Payload, buckets: AsyncIterator[WeightBucket], version: int) -> None:
        await super()._load_weights(payload, buckets, version)
        model: Any = self.strategy._model  # type: ignore[attr-defined]
        weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
        weight.data = weight.data * 1.5


async def gated(
    who: str, spec: GroupSpec, run: Callable[[GroupSpec], Coroutine[Any, Any, RolloutGroup]]
) -> RolloutGroup:
    """A group, with a gate before it and one in its middle."""
    await async_gate(f"{who}-group-{spec.group_id}")
    playing = asyncio.create_task(run(spec))
    await asyncio.sleep(0.02)
    await async_gate(f"{who}-mid-{spec.group_id}")
    try:
        return await playing
    finally:
        playing.cancel()


class GatedEnvWorker(EnvironmentWorker):
    """Gates ``<role>-group-<group_id>`` before and ``<role>-mid-<group_id>`` in the middle of a group."""

    async def run_group(self, spec: GroupSpec) -> RolloutGroup:
        return await gated(self.role, spec, super().run_group)


class GatedPromptWorker(PromptWorker):
    """Gates ``<train or val>-group-<group_id>`` before and ``…-mid-<group_id>`` in the middle of a group.

    Logs the prompts that it is asked to have answered in ``played.jsonl``.
    """

    async def run_group(self, spec: GroupSpec) -> RolloutGroup:
        log("played.jsonl", what=spec.sampling, draw=spec.group_id, prompt=spec.prompt.id, size=spec.group_size)
        return await gated(spec.sampling, spec, super().run_group)


class GatedRewardWorker(RewardWorker):
    """Gate ``<role>-<rank>-score-<n>``, n counting the batches of answers from 1, restarts included."""

    calls = 0

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult | RewardError]:
        self.calls += 1
        await async_gate(f"{self.role}-{self.rank}-score-{self.calls}")
        return await super().score(samples)


class LoggingInferWorker(InferWorker):
    """Logs the prompts that it is asked to answer in ``requests.jsonl``."""

    async def submit(self, client_id: str, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            log("requests.jsonl", rank=self.rank, prompt=request.prompt_ids.tolist())
        await super().submit(client_id, requests)


class MuteEnv(TextEnv):
    """Never starts: it has no first observation."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return None, {}  # type: ignore[return-value]


class CountingEnv(TextEnv):
    """Three turns; every answer is valid and pays something that depends on it, so that there is much to learn.

    Args:
        name: under which it logs its turns in ``turns.jsonl``.
        step_seconds: how long a step takes.
        fault: ``raise``, ``sleep`` (for ever) or ``spin`` (a busy loop): what the second step does.
        fault_if: only while this file exists in the folder of faults; empty: always.
        padding: extra words of the observation while the file ``long`` exists.
    """

    num_turns = 3

    def __init__(
        self, name: str = "counting", step_seconds: float = 0.0, fault: str = "", fault_if: str = "", padding: int = 0
    ) -> None:
        self.name, self.step_seconds, self.fault, self.fault_if = name, step_seconds, fault, fault_if
        self.padding = padding

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.turn = 0
        self.target = int(self.np_random.integers(0, 16))
        return self._observation(), {"state_key": f"{self.target}/0"}

    def step(self, action: str) -> StepResult:
        self.turn += 1
        time.sleep(self.step_seconds)
        if self.turn == 2 and (not self.fault_if or (folder() / self.fault_if).exists()):
            self._go_wrong()
        self._log()
        reward = sum(ord(letter) % 16 == self.target for letter in action) - 0.1 * len(action)
        done = self.turn == self.num_turns
        ends = {"terminated": done, "success": done and reward > 0}
        return usual_step(self._observation(), action, f"{self.target}/{self.turn}", task_reward=reward, **ends)

    def _observation(self) -> str:
        too_long = " word" * self.padding if self.padding and (folder() / "long").exists() else ""
        return f"{self.target} {self.turn}{too_long}"

    def _go_wrong(self) -> None:
        if self.fault == "raise":
            raise RuntimeError("the floor gave way")
        while self.fault == "sleep":
            time.sleep(1)
        try:
            while self.fault == "spin":
                pass
        finally:
            arrive("spin-ended")

    def _log(self) -> None:
        if FOLDER in os.environ:
            log("turns.jsonl", name=self.name, turn=self.turn, time=time.time())
