"""What a step of 64 nodes costs the driver: CPU, memory, bytes through its process, and time to the first micro-batch.

- *Plans*: placement of 512 trainers, 1,024 generators and 64 rollout workers, with every worker's environment, in at
  most 1 s of CPU; routes of weights in at most 0.2 s.
- *Stubs*: ``RLPipeline.step`` itself with 512 trainers, 512 references, 1,024 generators and 64 rollout workers as
  coroutines of one thread beside the driver's. Only models are stubs; what crosses a process boundary over Ray is
  pickled. Two lengths of rows give the cost of a row and of a token, and these that of 16,384 rows of 8,192 tokens.
- *Nodes* (``--nodes 4``): the same step over Ray on four nodes of this machine, with eight workers.

Through the driver's process pass at most 5 % of what the rows are in the object store.

Seconds are CPU seconds of the driver's thread, which other load on the machine changes by some tenths and not by
factors. "First" is the driver's CPU from the arrival of the last group to the first call to score, and to train.

With ``--experts`` and ``--kept`` answers come with the experts of each token (``router_replay: R3``) and with kept sets
of that many ids, which a rank fetches too.

    python benchmarks/scale.py [--rows 16384] [--lengths 256 1024] [--nodes 4] [--experts 0] [--kept 0]

Exit code 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import ray
import torch

from roll.algorithms.types import LossFn, TokenScores
from roll.configs.loader import load_config
from roll.configs.rlvr import RLVRConfig
from roll.data.batch import Batch
from roll.data.columns import UNKNOWN, Item, Records
from roll.data.kept_sets import kept_item
from roll.data.requests import Completion, FinishReason, GenerateFn, GenerateRequest
from roll.distributed.cluster.cluster import Cluster, create_placement, discover_nodes
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.cluster.resources import NodeInfo, RoleRequest, plan_placement
from roll.distributed.strategy.base import Metrics, RankInfo
from roll.distributed.weights.sender import plan_routes
from roll.models.tiny import make_tiny_model
from roll.pipeline.model_cluster import ModelCluster
from roll.pipeline.profiling import PhaseTimer, Span, host_memory
from roll.pipeline.rl import RLPipeline
from roll.pipeline.roles import Roles
from roll.pipeline.workers import TrainWorker
from roll.rollout.env_manager import EpisodeSpec
from roll.rollout.plans import GroupPlan, GroupSpec
from roll.rollout.router import Outcomes
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.types import EpisodeEnd, Trajectory, Turn
from roll.rollout.workers import RolloutWorker
from roll.utils.memory import relax_gc

PLACEMENT_S, ROUTES_S, SHARE = 1.0, 0.2, 0.05
TRAINERS, GENERATORS, ROLLOUT_WORKERS, MEMBERS = 512, 1_024, 64, 8
FULL_ROWS, FULL_LENGTH = 16_384, 8_192
LEAST = 8_192
"""Tokens of a rank's share from which larger ones can be forecast: short columns are not sent as runs."""
PROMPT_SHARE = 8
"""A prompt is this part of a row."""
VOCABULARY = 151_936
TEXT = "abcd"
"""Of a token."""
OWN_BYTES = 20
"""Of a token in the store: id, text, and the log-probs of generator, trainer and reference."""
RAY_LENGTH = 2_048
"""Of a row over Ray: what a call returns travels with its answer, through the driver, below 100 kB."""


# --- what crosses a process boundary


@dataclass
class Meter:
    """Bytes into and out of the driver's process, and CPU of its thread at the moments that count."""

    sent: int = 0
    received: int = 0
    moments: dict[str, float] = field(default_factory=dict)

    def moment(self, name: str, *, first: bool = False) -> None:
        if not (first and name in self.moments):
            self.moments[name] = time.thread_time()


@dataclass(frozen=True)
class Packed:
    """A value as Ray has it in its store: a stream, and arrays beside it, which are read without a copy."""

    stream: bytes
    arrays: list[bytes]

    @classmethod
    def of(cls, value: Any) -> Packed:
        arrays: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
        return cls(stream, [array.raw().tobytes() for array in arrays])

    def value(self) -> Any:
        return pickle.loads(self.stream, buffers=self.arrays)

    @property
    def num_bytes(self) -> int:
        return len(self.stream) + sum(map(len, self.arrays))


_NOTHING = Packed.of(None)


class Store:
    """Stands in for Ray's object store: what the driver puts there and gets passes through its process."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.held: list[Packed] = []
        self._lock = threading.Lock()

    def put(self, value: Any) -> Key:
        packed = Packed.of(value)
        if threading.current_thread() is threading.main_thread():
            self.meter.sent += packed.num_bytes
        key = self.reserve()
        self.held[key.number] = packed
        return key

    def reserve(self) -> Key:
        """For what a worker is going to put there."""
        with self._lock:
            self.held.append(_NOTHING)
            return Key(len(self.held) - 1)

    def get(self, keys: Sequence[Key]) -> list[Any]:
        found = [self.held[key.number] for key in keys]
        if threading.current_thread() is threading.main_thread():
            self.meter.received += sum(packed.num_bytes for packed in found)
        return [packed.value() for packed in found]


@dataclass(frozen=True)
class Key:
    """Stands in for ``ray.ObjectRef`` of what is in the store."""

    number: int


class Loop:
    """The thread that all stubs live in."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="stubs", daemon=True).start()

    def start(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)


@dataclass(frozen=True, eq=False)
class Ref:
    """Stands in for ``ray.ObjectRef`` of a call."""

    done: Future[Packed]

    def future(self) -> Future[Packed]:
        return self.done


class Handle:
    """Stands in for an actor's handle, as the driver has it."""

    def __init__(self, worker: Any, loop: Loop, store: Store) -> None:
        self._worker, self._loop, self._store, self._meter = worker, loop, store, store.meter

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._remote, method))

    def _remote(self, method: str, *args: Any) -> Any:
        own = Packed.of(args)
        self._meter.sent += own.num_bytes
        if method != "finished_groups":
            return Ref(self._loop.start(self._call(method, own)))
        blocks = [self._store.reserve() for _ in range(2)]
        return Ref(self._loop.start(self._call(method, own, blocks))), *blocks

    async def _call(self, method: str, own: Packed, blocks: Sequence[Key] = ()) -> Packed:
        given: list[Any] = own.value()
        given = [ray.get([arg])[0] if isinstance(arg, Key) else arg for arg in given]  # type: ignore[arg-type]
        result = getattr(self._worker, method)(*given)
        result = await result if asyncio.iscoroutine(result) else result
        if blocks:
            result, *arrays = result
            for block, each in zip(blocks, arrays, strict=True):
                self._store.held[block.number] = Packed.of(each)
        return Packed.of(result)


class NearHandle:
    """The handle of a worker for those in the same thread: how these two exchange is not the driver's concern."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._worker, method)
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(call(*args)))


class StubCluster:
    """Stands in for ``Cluster``."""

    def __init__(self, name: str, workers: Sequence[Any], loop: Loop, store: Store) -> None:
        self.name, self._meter = name, store.meter
        self.world_size = len(workers)
        self.whereabouts: dict[int, Any] = {}
        self.slots = [SimpleNamespace(devices=(rank,)) for rank in range(len(workers))]
        self.handles = [Handle(worker, loop, store) for worker in workers]

    def submit_each(self, method: str, per_rank_args: Sequence[tuple[Any, ...]]) -> list[Ref]:
        self._meter.moment(f"first {method}", first=True)
        return [getattr(handle, method).remote(*args) for handle, args in zip(self.handles, per_rank_args, strict=True)]

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.gather(self.submit_each(method, [args] * self.world_size), call=method)

    def gather(self, refs: Sequence[Ref], *, call: str) -> list[Any]:
        return [self.result(ref.future(), rank=rank, call=call) for rank, ref in enumerate(refs)]

    def result(self, future: Future[Packed], *, rank: int, call: str) -> Any:
        packed = future.result()
        if call.startswith("run_group"):
            self._meter.moment("last group")
        self._meter.received += packed.num_bytes
        return packed.value()


# --- the workers


@dataclass(frozen=True)
class Extras:
    """What answers come with."""

    experts: int = 0
    """Of a token, in all layers."""
    kept: int = 0
    """Ids of a kept set."""


class Generator:
    """An engine that answers at once."""

    def __init__(self, length: int, extras: Extras) -> None:
        self.asked = 0
        self._waiting: defaultdict[str, list[Completion]] = defaultdict(list)
        self._ids, self._logprobs, self._versions = answer(length)
        self._experts: np.ndarray | None = None
        self._kept: tuple[Item, ...] = ()
        if extras.experts:
            self._experts = np.arange(length * extras.experts, dtype=np.int16).reshape(length, -1) * 37 % 128
            self._experts[-1] = UNKNOWN
        if extras.kept:
            others = np.arange(1, extras.kept) * 83
            sets = [np.append(token, (token + others) % VOCABULARY) for token in self._ids]
            self._kept = (kept_item(length - len(sets), sets),)

    def another(self) -> Generator:
        """One with the same answers."""
        found = copy(self)
        found._waiting = defaultdict(list)
        return found

    def completion(self, request_id: str) -> Completion:
        return Completion(
            request_id, self._ids, self._logprobs, FinishReason.STOP, self._versions, self._experts, self._kept
        )

    async def submit(self, client_id: str, requests: Records[GenerateRequest]) -> None:
        found = [self.completion(request.request_id) for request in requests]
        self.asked += len(found)
        self._waiting[client_id] += found

    async def poll(self, client_id: str) -> Outcomes:
        return Outcomes(Records.of(Completion, self._waiting.pop(client_id, [])), [])


def ids(size: int) -> np.ndarray:
    """Token ids of a large vocabulary."""
    return np.arange(size) * 997 % VOCABULARY


def answer(length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, log-probs and versions of an answer in a row of that length."""
    size = length - length // PROMPT_SHARE
    return ids(size), log_probs(size), np.zeros(size, dtype=np.int64)


def log_probs(size: int) -> np.ndarray:
    """Numbers that differ from token to token."""
    return -np.arange(1, size + 1, dtype=np.float32) / size


class Player(RolloutWorker):
    """Episodes of one turn."""

    def set_length(self, length: int, extras: Extras, *, alone: bool) -> None:
        """Args:
        alone: answers itself, without engines.
        """
        self._prompt = ids(length // PROMPT_SHARE)
        self._engine = Generator(length, extras) if alone else None

    def generate_fn(self, spec: GroupSpec) -> GenerateFn:
        return super().generate_fn(spec) if self._engine is None else self._answer

    async def _answer(self, request: GenerateRequest) -> Completion:
        assert self._engine is not None
        return self._engine.completion(request.request_id)

    async def play(self, spec: GroupSpec, episode: EpisodeSpec, generate: GenerateFn) -> Trajectory:
        request = GenerateRequest(f"{episode.group_id}/{episode.member}", self._prompt.copy())
        completion = await generate(request)
        text, reward = TEXT * len(completion.token_ids), float(episode.member % 3 == 0)
        question = TEXT * len(self._prompt)
        turn = Turn(request.prompt_ids, completion, text, question, "", reward, 0.0, str(episode.group_id))
        ended = EpisodeEnd.TERMINATED
        return Trajectory(
            spec.tag, spec.group_id, episode.member, spec.env_seed, (turn,), ended, bool(reward), "", history=True
        )


class Model:
    """Knows the log-probs of tokens at once, and does not train."""

    def logprobs(self, batch: Batch) -> TokenScores:
        return TokenScores(torch.from_numpy(log_probs(batch.num_tokens)) * batch.loss_mask_T)

    def train_step(self, batch: Batch, loss_fn: LossFn) -> Metrics:
        assert batch.tokens_T is not None and batch.old_logprobs_T is not None and batch.ref_logprobs_T is not None
        return {"actor/loss": 0.0, "actor/grad_norm": 1.0}


class Scores(TrainWorker):
    """A trainer or reference without a model."""

    def place(self) -> RankInfo:
        self.strategy: Any = Model()
        self.loss_fn: Any = None
        return RankInfo(self.rank, self.world_size, self.rank, self.world_size)


# --- the step


class Session:
    """What a step needs of a run's session; times the CPU of its phases."""

    def __init__(self, config: RLVRConfig, folder: Path) -> None:
        self.config, self.summary = config, dict[str, Any]()
        self.display = SimpleNamespace(progress=lambda *_: None, note=lambda _: None)
        self.folder = SimpleNamespace(profile=folder, trajectories=folder)
        self.timer = PhaseTimer()
        self.cpu: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[Span]:
        started = time.thread_time()
        with self.timer.phase(name) as span:
            yield span
        self.cpu[name] += time.thread_time() - started

    def elapsed(self) -> float:
        return 0.0

    def aside(self, work: Callable[[], object]) -> None:
        work()


class Step(RLPipeline):
    """``RLPipeline`` without evaluation."""

    def evaluate(self, name: str, step: int) -> Metrics:
        return {}


def configuration(folder: Path, rows: int, length: int, trainers: int) -> RLVRConfig:
    """GRPO with a KL loss: both the policy before the update and the reference score every row."""
    make_tiny_model(folder / "tiny", seed=0)
    devices = f"[{','.join(map(str, range(trainers)))}]"
    optimizer_steps = 4
    overrides = {
        "pretrain": folder / "tiny",
        "output_dir": folder,
        "rollout_batch_size": rows // MEMBERS,
        "prompt_length": length // PROMPT_SHARE,
        "response_length": length - length // PROMPT_SHARE,
        "sequence_length": length,
        "num_gpus_per_node": min(8, trainers),
        "actor_train.device_mapping": devices,
        "actor_infer.device_mapping": devices,
        "reference.device_mapping": devices,
        "reference.strategy_args.strategy_name": "hf_infer",
        "actor_train.training_args.per_device_train_batch_size": 1,
        "actor_train.training_args.gradient_accumulation_steps": rows // trainers // optimizer_steps,
        "use_kl_loss": "true",
        "kl_loss_coef": 0.01,
        "num_written_groups": 0,
        "probe": "off",
        "profiler.peak_tflops": 989,
    }
    return load_config(RLVRConfig, "rlvr_math", overrides=[f"{key}={value}" for key, value in overrides.items()])


@dataclass(frozen=True)
class Cost:
    """What one step cost the driver."""

    cpu: Mapping[str, float]
    """Seconds by phase."""
    sent: int
    received: int
    first: Mapping[str, float]
    """Seconds of CPU from the last group to the first call, by its name."""

    @property
    def seconds(self) -> float:
        return sum(self.cpu.values())

    @property
    def bytes(self) -> int:
        return self.sent + self.received


def run_step(config: RLVRConfig, meter: Meter, folder: Path, players: Any, scorers: Mapping[str, Any]) -> Cost:
    """Runs one step over the clusters."""
    roles: Any = SimpleNamespace(
        actor=ModelCluster(scorers["actor_train"]),
        reference=ModelCluster(scorers["reference"]),
        critic=None,
        teacher=None,
        others_score=True,
        clusters={},
        offload_manager=SimpleNamespace(memory=lambda phase: {}),
        rollout_replicas=SimpleNamespace(prepare=lambda: None, take_update_metrics=dict),
        sync_weights=lambda version: None,
    )
    roles.score = partial(Roles.score, roles)
    for model in (roles.actor, roles.reference):
        model.gather_setup(model.cluster.submit_each("place", [()] * model.size))
    groups = config.groups_per_step
    plan = GroupPlan((config.tags[0],), (groups,), MEMBERS, 0, 0, "train")
    scheduler = RolloutScheduler(plan, players, recover=_give_up, rpc_timeout=600.0)
    session = Session(config, folder)
    run = SimpleNamespace(session=session, roles=roles, signals=SimpleNamespace(deferred=nullcontext))
    step = Step(config, run, SimpleNamespace(train=scheduler))  # type: ignore[arg-type]
    step.taken.__dict__["_num_ids"] = VOCABULARY  # the tokenizer here has fewer
    meter.sent, meter.received, meter.moments = 0, 0, {}
    step.step(1)
    if step.unreported["rollout/episodes"] != groups * MEMBERS or "actor/loss" not in step.unreported:
        raise SystemExit(f"not a whole step: {step.unreported}")
    last = meter.moments.get("last group", 0.0)
    first = {what: meter.moments.get(f"first {what}", 0.0) - last for what in ("score", "train")}
    return Cost(dict(session.cpu), meter.sent, meter.received, first)


def _give_up(error: BaseException) -> None:
    raise error


# --- the parts of the benchmark


class Report:
    """Prints figures with their limits."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def line(self, label: str, value: float, unit: str, limit: float | None = None, more: str = "") -> None:
        if limit is not None and value > limit:
            self.missed.append(f"{label}: {value:,.3f} {unit}, limit {limit:g}")
        bound = "" if limit is None else f"(limit {limit:g})"
        print(f"{label:52} {value:12,.3f} {unit:11} {bound:14} {more}", flush=True)


def plans(report: Report) -> None:
    """Placement and routes, colocated and apart."""
    for what, first, num_nodes in (("colocated", 0, 128), ("apart", TRAINERS, 192)):
        nodes = [NodeInfo(f"node-{number}", "gpu", 8, 64.0) for number in range(num_nodes)]
        roles = [
            RoleRequest("actor_train", tuple(range(TRAINERS))),
            RoleRequest("actor_infer", tuple(range(first, first + GENERATORS))),
            RoleRequest("rollout", None, world_size=ROLLOUT_WORKERS),
        ]
        started = time.thread_time()
        plan = plan_placement(roles, nodes)
        cpus = [plan.cpus_on(node) for node in range(num_nodes)]
        threads = [plan.threads(slot, 64) for slots in plan.slots.values() for slot in slots]
        placed = time.thread_time()
        routes = plan_routes(plan, plan.workers("actor_train"), plan.workers("actor_infer"))
        routed = time.thread_time()
        assert len(cpus) == num_nodes and len(threads) == TRAINERS + GENERATORS + ROLLOUT_WORKERS
        report.line(f"placement, {what}", placed - started, "s of CPU", PLACEMENT_S, f"{num_nodes} nodes")
        report.line(f"routes of weights, {what}", routed - placed, "s of CPU", ROUTES_S, f"{len(routes)} senders")


def stubs(folder: Path, rows: int, lengths: Sequence[int], extras: Extras, report: Report) -> None:
    """Steps of the stubs."""
    with pretended_store() as store:
        stub_step(folder, store, 4 * TRAINERS, lengths[0], extras)  # what is imported and made once
        costs = []
        for length in lengths:
            cost, asked = stub_step(folder, store, rows, length, extras)
            describe(f"{rows:,} rows of {length} tokens", cost, rows * length, report)
            costs.append(cost)
    report.line("generators without a request", asked.count(0), "", 0 if rows >= GENERATORS else None)
    report.line("requests of the busiest generator", max(asked) * GENERATORS / rows, "x the mean", 2.0)
    full(costs[0], costs[-1], rows, lengths, report)


def stub_step(folder: Path, store: Store, rows: int, length: int, extras: Extras) -> tuple[Cost, list[int]]:
    """Cost of a step, and the requests that each generator got."""
    loop = Loop()
    engine = Generator(length, extras)
    generators = [engine.another() for _ in range(GENERATORS)]
    near = [NearHandle(generator) for generator in generators]
    players = [Player("rollout", rank, ROLLOUT_WORKERS, {}) for rank in range(ROLLOUT_WORKERS)]
    for player in players:
        player.set_length(length, extras, alone=False)
        loop.start(player.set_engines(near)).result()
    scorers = {
        name: StubCluster(name, [Scores(name, rank, TRAINERS, {}) for rank in range(TRAINERS)], loop, store)
        for name in ("actor_train", "reference")
    }
    config = configuration(folder, rows, length, TRAINERS)
    cost = run_step(config, store.meter, folder, StubCluster("rollout", players, loop, store), scorers)
    store.held.clear()
    return cost, [generator.asked for generator in generators]


@contextmanager
def pretended_store() -> Iterator[Store]:
    """``ray.put`` and ``ray.get`` without Ray."""
    store = Store(Meter())
    with patch.multiple(ray, put=store.put, get=store.get):
        yield store


def describe(label: str, cost: Cost, tokens: int, report: Report) -> None:
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in cost.cpu.items() if seconds >= 0.005)
    report.line(f"{label}: driver", cost.seconds, "s of CPU", None, phases)
    for what, seconds in cost.first.items():
        report.line(f"  last group to first {what}", seconds, "s of CPU")
    report.line("  bytes in", cost.received / tokens, "B/token")
    report.line("  bytes out", cost.sent / tokens, "B/token")


def full(short: Cost, long: Cost, rows: int, lengths: Sequence[int], report: Report) -> None:
    """The step of 64 nodes, if a row and a token cost there what they cost here."""
    more = rows * (lengths[-1] - lengths[0])

    def at_full(a: float, b: float) -> float:
        per_token = (b - a) / more
        per_row = max(0.0, a / rows - per_token * lengths[0])
        return FULL_ROWS * (per_row + per_token * FULL_LENGTH)

    per_token = (long.seconds - short.seconds) / more
    print(f"forecast for {FULL_ROWS:,} rows of {FULL_LENGTH:,} tokens:")
    report.line("  driver", at_full(short.seconds, long.seconds), "s of CPU", None, f"{per_token * 1e9:.0f} ns a token")
    for what in long.first:
        report.line(f"  last group to first {what}", at_full(short.first[what], long.first[what]), "s of CPU")
    through = at_full(short.bytes, long.bytes)
    report.line("  through its process", through / 2**30, "GiB", None, f"{through / FULL_ROWS:,.0f} bytes a row")
    report.line("  the same beside the rows'", through / (FULL_ROWS * FULL_LENGTH * OWN_BYTES), "", SHARE)
    report.line("  memory of the benchmark so far", host_memory()[0] / 1024, "GiB")


def over_ray(folder: Path, num_nodes: int, report: Report) -> None:
    """One step over Ray, with one rollout worker and one trainer on each node."""
    from ray.cluster_utils import Cluster as Machines

    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # a busy machine takes its time
    machines = Machines()
    for _ in range(num_nodes):
        machines.add_node(num_cpus=2, object_store_memory=2**28, include_dashboard=False)
    meter = Meter()
    with ray_session({"address": machines.address}), counted_by_ray(meter):
        names = ("rollout", "actor_train")
        roles = [RoleRequest(name, None, world_size=num_nodes, num_cpus=0.1) for name in names]
        placement = create_placement(plan_placement(roles, discover_nodes()))
        players, trainers = Cluster("rollout", Player, placement), Cluster("actor_train", Scores, placement)
        for cluster in (players, trainers):
            cluster.launch()
        for cluster in (players, trainers):
            cluster.wait_ready()
        players.call("set_length", RAY_LENGTH, Extras(), alone=True)
        rows = 64 * MEMBERS
        config = configuration(folder, rows, RAY_LENGTH, num_nodes)
        cost = run_step(config, meter, folder, players, {"actor_train": trainers, "reference": trainers})
        share = cost.bytes / (rows * RAY_LENGTH * OWN_BYTES)
        report.line(
            f"bytes over {num_nodes} Ray nodes beside the rows'", share, "", SHARE, f"{cost.bytes / rows:,.0f} a row"
        )
        for cluster in (players, trainers):
            cluster.shutdown()
        placement.remove()
    machines.shutdown()


@contextmanager
def counted_by_ray(meter: Meter) -> Iterator[None]:
    """Counts what this process packs for Ray and unpacks from it."""
    from ray._private.serialization import SerializationContext as Context

    serialize, deserialize = Context.serialize, Context.deserialize_objects

    def count_sent(self: Any, value: Any) -> Any:
        packed = serialize(self, value)
        meter.sent += packed.total_bytes
        return packed

    def count_received(self: Any, found: Any, *args: Any, **kwargs: Any) -> Any:
        meter.received += sum(len(data) for data, *_ in found if data is not None)
        return deserialize(self, found, *args, **kwargs)

    with patch.multiple(Context, serialize=count_sent, deserialize_objects=count_received):
        yield


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=FULL_ROWS)
    parser.add_argument("--lengths", type=int, nargs=2, default=[256, 1024])
    parser.add_argument("--nodes", type=int, default=4, help="Ray nodes on this machine; 0: none")
    parser.add_argument("--experts", type=int, default=0, help="Experts of a token that answers come with")
    parser.add_argument("--kept", type=int, default=0, help="Ids of the kept set of a token; 0: none")
    args = parser.parse_args()
    short, long = args.lengths
    if not -(-LEAST * TRAINERS // args.rows) <= short < long:
        least = f"ascending, from {-(-LEAST * TRAINERS // args.rows):,} on with --rows {args.rows:,}"
        parser.error(f"--lengths: got {short} {long}, expected {least}: {TRAINERS} ranks get {LEAST:,} tokens each")
    torch.set_num_threads(1)
    relax_gc()  # as a run's driver does
    report = Report()
    plans(report)
    with tempfile.TemporaryDirectory() as name:
        stubs(Path(name), args.rows, args.lengths, Extras(args.experts, args.kept), report)
        if args.nodes:
            over_ray(Path(name), args.nodes, report)
    for problem in report.missed:
        print(f"missed: {problem}")
    return int(bool(report.missed))


if __name__ == "__main__":
    sys.exit(main())
