"""What it costs to keep thousands of episodes going: CPU of the driver per group, of a worker per turn; and batches.

A real Ray, scheduler, environment worker and generating worker play episodes of an environment that answers at once.
Only the engine, which answers at once too, and the tokenizer are stubs: what is measured is all that lies around them.

- *Groups*: ``--groups`` groups of one episode of one turn. The engine answers when it has the requests of all of them,
  so that they are in flight at the same time. CPU of the driver per group at most 0.3 ms.
- *Turns*: ``--envs`` environments of one worker, in groups of 8, play episodes of 8 turns. CPU of the worker per turn
  at most 100 µs. Environments that share threads and instant ones are held to it; those with a thread of their own
  are shown beside them.
- *Batch*: the training batch of 16,384 episodes of 8 turns, as rows of turns and of episodes, in at most 1.5 s.

All three are seconds of CPU, which other load on the machine changes by some tenths and not by factors.

    python benchmarks/scheduling.py [--groups 256 4096 16384] [--envs 256 1024 4096] [--rounds 3]

The best of ``--rounds`` counts. Exit code 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roll.agentic.env.base import Observation, StepResult, TextEnv, step_result
from roll.configs.env import CustomEnvConfig
from roll.configs.worker import StrategyArguments, WorkerConfig
from roll.data.columns import IntArray
from roll.data.requests import Completion, FinishReason, GenerateRequest, SamplingParams
from roll.distributed.cluster.cluster import Cluster, create_placement, discover_nodes
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.cluster.resources import RoleRequest, plan_placement
from roll.distributed.strategy.base import StrategyContext
from roll.models.tiny import make_tiny_model
from roll.pipeline.profiling import host_memory
from roll.pipeline.workers import InferWorker
from roll.rollout.env_manager import LengthLimits, StepEnvManager
from roll.rollout.env_worker import EnvironmentWorker, EnvWorkerContext
from roll.rollout.plans import GroupPlan
from roll.rollout.rows import groups_to_batch
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.types import EpisodeEnd, RolloutGroup, Trajectory, Turn
from roll.utils.memory import relax_gc

DRIVER_US_PER_GROUP, WORKER_US_PER_TURN, BATCH_S = 300, 100, 1.5
MEMBERS, TURNS, EPISODES = 8, 8, 16_384
HOLD_S = 120
"""The engine waits no longer for requests that do not come."""
PROMPT, ANSWER = np.arange(64), np.arange(16)
LOGPROBS, VERSIONS = np.zeros(16, dtype=np.float32), np.ones(16, dtype=np.int64)


class Shared(TextEnv):
    """Answers at once, and does not say so."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "Up", {"state_key": "0"}

    def step(self, action: str) -> StepResult:
        return step_result(
            "Up",
            task_reward=1.0,
            penalty=0.0,
            terminated=False,
            truncated=False,
            action=action,
            action_is_effective=True,
            success=True,
            state_key="0",
        )


class Instant(Shared):
    """Answers at once and says so."""

    instant = True


class Alone(Shared):
    """Wants a thread of its own."""

    own_thread = True


ENVS = {"shared": Shared, "instant": Instant, "alone": Alone}


class FixedPrompts(StepEnvManager):
    """The policy sees the same at every turn."""

    def prompt(self, observation: Observation, info: Mapping[str, Any], turns: list[Turn]) -> IntArray:
        return PROMPT


class Engine:
    """A ``GenerateStrategy`` that answers at once, or when it has as many requests as it is told to wait for."""

    def __init__(self, context: StrategyContext) -> None:
        self.hold(0)

    def hold(self, number: int) -> None:
        self.number, self.most, self.full = number, 0, asyncio.Event()

    def setup(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        self.most += 1
        if self.most == 1:
            asyncio.get_running_loop().call_later(HOLD_S, self.full.set)
        if self.most >= self.number:
            self.full.set()
        await self.full.wait()
        return Completion(request.request_id, ANSWER, LOGPROBS, FinishReason.STOP, VERSIONS)


class Generator(InferWorker):
    """Can be told to hold requests."""

    async def hold(self, number: int) -> int:
        """Returns how many have come since the last time."""
        strategy: Any = self.strategy
        most: int = strategy.most
        strategy.hold(number)
        return most


class Words:
    """A tokenizer and renderer without any cost."""

    def decode(self, ids: IntArray) -> str:
        return "Up"


class Player(EnvironmentWorker):
    """Tells what it has used."""

    def setup(self, context: EnvWorkerContext) -> None:
        super().setup(context)
        for manager in self.managers.values():
            manager.renderer = Words()  # type: ignore[assignment]

    async def used(self) -> dict[str, float]:
        return {**used(), "mb": host_memory()[0]}


def used() -> dict[str, float]:
    """Seconds of CPU, threads and MB of this process; the most of MB so far."""
    return {
        "cpu": time.process_time(),
        "threads": threading.active_count(),
        "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def context(folder: Path) -> EnvWorkerContext:
    make_tiny_model(folder / "tiny", seed=0)
    return EnvWorkerContext(
        envs={
            f"{name}-{turns}": CustomEnvConfig(
                env_type=f"scheduling:{env.__name__}", env_manager_cls="scheduling:FixedPrompts", max_steps=turns
            )
            for name, env in ENVS.items()
            for turns in (1, TURNS)
        },
        tokenizer_path=str(folder / "tiny"),
        template="native",
        params=SamplingParams(max_new_tokens=16),
        limits=LengthLimits(prompt_length=64, sequence_length=128),
        retries=0,
    )


class Bench:
    """The clusters, and what is played on them."""

    def __init__(self, envs: Cluster, infer: Cluster) -> None:
        self.envs, self.infer = envs, infer
        self._first = 0

    def play(self, kind: str, num_groups: int, group_size: int, turns: int, hold: int = 0) -> dict[str, float]:
        """Plays the groups at the same time; what they took."""
        plan = GroupPlan((f"{kind}-{turns}",), (num_groups,), group_size, 0, 0, "train")
        scheduler = RolloutScheduler(plan, self.envs, recover=_give_up, rpc_timeout=600.0)
        self.infer.call("hold", hold)
        before, worker_before, started = used(), self.envs.call("used")[0], time.perf_counter()
        groups = scheduler.collect(num_groups, self._first)
        seconds = time.perf_counter() - started
        after, worker_after = used(), self.envs.call("used")[0]
        self._first += num_groups
        num_turns = sum(len(trajectory.turns) for group in groups for trajectory in group.trajectories)
        if num_turns != num_groups * group_size * turns:
            raise SystemExit(f"{num_turns} turns of {num_groups * group_size * turns}: {groups[0].errors}")
        return {
            "seconds": seconds,
            "turns": num_turns,
            "driver": (after["cpu"] - before["cpu"]) * 1e6,
            "worker": (worker_after["cpu"] - worker_before["cpu"]) * 1e6,
            "threads": worker_after["threads"],
            "mb": worker_after["mb"],
            "driver_mb": after["mb"],
            "held": self.infer.call("hold", 0)[0],
        }

    def best(self, rounds: int, key: str, *args: Any) -> dict[str, float]:
        return min((self.play(*args) for _ in range(rounds)), key=lambda result: result[key])


def _give_up(error: BaseException) -> None:
    raise error


def batch_seconds(history: bool) -> float:
    """Seconds of CPU for the batch of as many episodes, each with its own arrays; one thread makes it."""

    def turn(number: int, prompt: IntArray) -> Turn:
        completion = Completion("", ANSWER.copy(), LOGPROBS.copy(), FinishReason.STOP, VERSIONS.copy())
        return Turn(prompt, completion, "Up", "Up", "Up", 1.0, 0.0, f"{number}")

    def episode(number: int) -> Trajectory:
        prompts = [np.resize(PROMPT, len(PROMPT) + 24 * n * history) for n in range(TURNS)]
        turns = tuple(turn(number * n, prompt) for n, prompt in enumerate(prompts))
        return Trajectory("A", number // MEMBERS, number % MEMBERS, 0, turns, EpisodeEnd.TERMINATED, True, "", history)

    groups = [
        RolloutGroup(first // MEMBERS, "A", tuple(map(episode, range(first, first + MEMBERS))))
        for first in range(0, EPISODES, MEMBERS)
    ]
    started = time.process_time()
    groups_to_batch(groups, ["A"])
    return time.process_time() - started


class Report:
    """Prints figures beside their limits."""

    missed: list[str]

    def __init__(self) -> None:
        self.missed = []

    def line(self, label: str, value: float, unit: str, limit: float | None, more: str = "") -> None:
        ratio = "" if limit is None else f"{value / limit:6.2f} of the limit of {limit:g}"
        if limit is not None and value > limit:
            self.missed.append(f"{label}: {value:,.2f} {unit}, limit {limit:g}")
        print(f"{label:44} {value:10,.2f} {unit:9} {ratio:28} {more}", flush=True)


def measure(bench: Bench, report: Report, groups: Sequence[int], envs: Sequence[int], rounds: int) -> None:
    bench.play("shared", 8, 8, TURNS)  # what is imported and made once
    for number in groups:
        best = bench.best(rounds, "driver", "shared", number, 1, 1, number)
        report.line(
            f"driver CPU, {number:,} groups in flight",
            best["driver"] / number,
            "us/group",
            DRIVER_US_PER_GROUP,
            f"{best['seconds']:.2f} s, worker {best['worker'] / number:.0f} us/group, {best['threads']:.0f} threads, "
            f"{best['mb']:.0f} MB, driver {best['driver_mb']:.0f} MB",
        )
        if best["held"] < number:
            report.missed.append(f"only {best['held']:,.0f} of {number:,} groups were in flight at the same time")
    for kind in ENVS:
        for number in envs:
            best = bench.best(rounds, "worker", kind, number // MEMBERS, MEMBERS, TURNS)
            report.line(
                f"worker CPU, {number:,} environments, {kind}",
                best["worker"] / best["turns"],
                "us/turn",
                None if kind == "alone" else WORKER_US_PER_TURN,
                f"{best['turns'] / best['seconds']:,.0f} turns/s, driver {best['driver'] / best['turns']:.0f} us/turn, "
                f"{best['threads']:.0f} threads, {best['mb']:.0f} MB",
            )
    for history, what in ((False, "rows of turns"), (True, "rows of episodes")):
        seconds = min(batch_seconds(history) for _ in range(rounds))
        report.line(f"batch of {EPISODES:,} episodes, {what}", seconds, "s of CPU", BATCH_S)


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[256, 4_096, 16_384])
    parser.add_argument("--envs", type=int, nargs="+", default=[256, 1_024, 4_096])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory() as folder, ray_session({"num_cpus": 2, "object_store_memory": 2**28}):
        roles = [RoleRequest(role, None, world_size=1) for role in ("envs", "infer")]
        placement = create_placement(plan_placement(roles, discover_nodes()))
        clusters = Cluster("envs", Player, placement), Cluster("infer", Generator, placement)
        for cluster in clusters:
            cluster.start()
        envs, infer = clusters
        strategy = StrategyArguments(strategy_name="scheduling:Engine")
        infer.call("setup", StrategyContext(WorkerConfig(strategy_args=strategy), "infer", ""))
        envs.call("setup", context(Path(folder)))
        envs.call("set_engines", infer.handles)
        relax_gc()  # as a run's driver does
        measure(Bench(envs, infer), report, args.groups, args.envs, args.rounds)
        for cluster in clusters:
            cluster.shutdown()
        placement.remove()
    for problem in report.missed:
        print(f"missed: {problem}")
    return int(bool(report.missed))


if __name__ == "__main__":
    sys.exit(main())
