"""Where the pictures of a step are: memory by groups of processes, and bytes through the driver, step after step.

Prompts with pictures are answered several times, scored and trained on. Files, rollout workers, scheduler, batch, Ray
and its object store are those of a run; generator and trainers only look at the pictures they get. ``--copied`` is the
same with pictures copied for each row (each answer's differ in one byte, and travel with rows and requests as values).

"Heap" is what belongs to the processes alone (anonymous memory), the largest of a step; "store" what lies in Ray's
object store, which all processes of a node map. "Through the driver" is what its process packs for Ray and unpacks.

    python benchmarks/pictures.py [--prompts 64 --side 1024 --store-gb 6] [--copied]

Exit code 1 when memory grows: a figure of the second half of the steps above that of the first by more than a tenth of
the pictures' bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import ray
import torch
from PIL import Image
from scale import Meter, Report, counted_by_ray

from roll.algorithms.types import LossFn, TokenScores
from roll.data.batch import Batch
from roll.data.columns import Item
from roll.data.pictures import Pictures, Source
from roll.data.prompts import Prompt, PromptSampler
from roll.data.requests import Completion, FinishReason, GenerateFn, GenerateRequest, SamplingParams
from roll.data.row_pictures import replaced
from roll.data.stored import hold
from roll.distributed.cluster.cluster import Cluster, create_placement, discover_nodes
from roll.distributed.cluster.ray_session import ray_session
from roll.distributed.cluster.resources import RoleRequest, plan_placement
from roll.distributed.strategy.base import Metrics, RankInfo
from roll.models.tiny import make_tiny_model
from roll.pipeline.model_cluster import ModelCluster
from roll.pipeline.workers import InferWorker, TrainWorker
from roll.rollout.admission import Admission
from roll.rollout.env_manager import EpisodeSpec, LengthLimits
from roll.rollout.plans import GroupSpec
from roll.rollout.prompt_worker import PromptPlan, PromptSpec, PromptWorker, PromptWorkerContext
from roll.rollout.rows import groups_to_batch
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.types import Trajectory

PATCH = 16
"""Pixels of a patch's side; a token is two by two of them."""
ANSWER = 16
"""Tokens of an answer."""
ROLES = {"rollout": 2, "actor_infer": 1, "actor_train": 2}
"""Processes of each."""
_SAMPLE_S = 0.5


def look_at(items: Sequence[Item]) -> None:
    """Reads every byte."""
    for item in items:
        assert item.data.sum() > 0


# --- the workers


class Looks:
    """A generator that looks at the pictures and says the same each time."""

    def setup(self) -> None:
        """Nothing."""

    async def generate(self, request: GenerateRequest) -> Completion:
        look_at(request.items)
        ids = np.arange(ANSWER) + (request.params.seed or 0) % 7
        zeros = np.zeros(ANSWER)
        return Completion(request.request_id, ids, zeros.astype(np.float32), FinishReason.STOP, zeros.astype(np.int64))


class Generator(InferWorker):
    """Without a model."""

    def start(self) -> None:
        with patch("roll.pipeline.workers.make_strategy", lambda _: Looks()):
            self.setup(None)  # type: ignore[arg-type]


class Player(PromptWorker):
    """Answers are not scored; ``copied`` gives each its own pictures."""

    def start(self, context: PromptWorkerContext, copied: bool) -> None:
        self.setup(context)
        self._copied = copied
        if copied:
            patch("roll.rollout.router.heavy", lambda items: []).start()

    async def play(self, spec: GroupSpec, episode: EpisodeSpec, generate: GenerateFn) -> Trajectory:
        assert isinstance(spec, PromptSpec)
        if self._copied:
            own = replaced(spec.prompt.messages, lambda item: changed(item, episode.member))  # type: ignore[arg-type]
            spec = replace(spec, prompt=replace(spec.prompt, messages=own))
        return await super().play(spec, episode, generate)


def changed(item: Item, member: int) -> Item:
    """A copy with another first byte."""
    data = item.data.copy()
    data[0, 0, 0] = member
    return Item(data)


class Model:
    """Looks at pictures, and at whether they are what their rows were made of."""

    def logprobs(self, batch: Batch) -> TokenScores:
        for items in distinct_of(batch):
            look_at(items)
        return TokenScores(torch.zeros(batch.num_tokens))

    def train_step(self, batch: Batch, loss_fn: LossFn) -> Metrics:
        for items in distinct_of(batch):
            look_at(items)
            assert Item(items[0].data).hash == items[0].hash
        return {"actor/loss": 0.0}


def distinct_of(batch: Batch) -> dict[tuple[Item, ...], None]:
    """The different pictures of rows."""
    assert batch.items_I is not None
    return dict.fromkeys(batch.items_I)


class Trainer(TrainWorker):
    """Without a model."""

    def start(self) -> RankInfo:
        self.strategy: Any = Model()
        self.loss_fn: Any = None
        return RankInfo(self.rank, self.world_size, self.rank, self.world_size)


# --- what is measured


@dataclass
class Watch:
    """Memory of groups of processes, in bytes, while steps run."""

    pids: Mapping[str, Sequence[int]]
    store_bytes: int
    steps: list[dict[str, int]] = field(default_factory=list)
    """The largest of each step."""

    @contextmanager
    def step(self) -> Iterator[None]:
        most: defaultdict[str, int] = defaultdict(int)
        done = threading.Event()

        def look() -> None:
            while True:
                for name, size in self.sizes().items():
                    most[name] = max(most[name], size)
                if done.wait(_SAMPLE_S):
                    return

        thread = threading.Thread(target=look)
        thread.start()
        yield
        done.set()
        thread.join()
        self.steps.append(dict(most))

    def sizes(self) -> dict[str, int]:
        free = ray.available_resources().get("object_store_memory", self.store_bytes)
        heaps = {name: sum(map(heap, pids)) for name, pids in self.pids.items()}
        return {**heaps, "store": self.store_bytes - int(free)}


def heap(pid: int) -> int:
    """Anonymous memory of a process; a page that n processes share counts 1/n."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == "Pss_Anon:")


# --- the run


def make_prompts(folder: Path, count: int, pictures: int, side: int) -> list[Prompt]:
    """Prompts about pictures that no two share, in files."""
    draw = np.random.default_rng(0)

    def picture(name: str) -> dict[str, Any]:
        coarse = Image.fromarray(draw.integers(1, 256, (side // 16, side // 16, 3), dtype=np.uint8))
        path = folder / f"{name}.jpg"
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(path, quality=90)
        return {"type": "image", "image": Source(path, name)}

    prompts = []
    for number in range(count):
        shown = [picture(f"{number}-{index}") for index in range(pictures)]
        content = [*shown, {"type": "text", "text": "What?"}]
        prompts.append(Prompt(f"p{number}", "A", ({"role": "user", "content": content},)))
    return prompts


def make_model(path: Path, side: int) -> Path:
    """A folder with a tokenizer and a picture processor that leaves such pictures as they are."""
    make_tiny_model(path, seed=0, pictures=True)
    file = path / "preprocessor_config.json"
    entries = json.loads(file.read_text())
    entries |= {"patch_size": PATCH, "size": {"shortest_edge": 1024, "longest_edge": side * side}}
    file.write_text(json.dumps(entries))
    return path


def measure(args: argparse.Namespace, answers: int, steps: int) -> tuple[Watch, list[int]]:
    """Memory of each step, and what passes through the driver."""
    meter, through = Meter(), []
    with tempfile.TemporaryDirectory() as name, ray_session({"object_store_memory": int(args.store_gb * 2**30)}):
        folder = Path(name)
        prompts = make_prompts(folder, 2 * args.prompts, args.pictures, args.side)
        model = make_model(folder / "model", args.side)
        length = args.pictures * (args.side // (2 * PATCH)) ** 2 + 200
        limits = {"train": LengthLimits(length, length + ANSWER)}
        params = {"train": SamplingParams(max_new_tokens=ANSWER)}
        shown = Pictures(model)
        context = PromptWorkerContext(str(model), "native", params, limits, {}, spread=False, pictures=shown)
        placement = create_placement(
            plan_placement(
                [RoleRequest(role, None, world_size=n, num_cpus=0.1) for role, n in ROLES.items()], discover_nodes()
            )
        )
        kinds: list[tuple[str, type[Any]]] = [("rollout", Player), ("actor_infer", Generator), ("actor_train", Trainer)]
        clusters = {role: Cluster(role, kind, placement) for role, kind in kinds}
        for cluster in clusters.values():
            cluster.launch()
        for cluster in clusters.values():
            cluster.wait_ready()
        players, actor = clusters["rollout"], ModelCluster(clusters["actor_train"])
        clusters["actor_infer"].call("start")
        actor.gather_setup(actor.cluster.submit("start"))
        players.call("start", context, args.copied)
        players.call("set_engines", clusters["actor_infer"].handles)
        pids = {role: [at.pid for at in cluster.whereabouts.values()] for role, cluster in clusters.items()}
        watch = Watch({"driver": [_own_pid()], **pids}, int(args.store_gb * 2**30))
        plan = PromptPlan(PromptSampler(prompts, seed=0), answers, args.prompts, 0, "train")
        scheduler, admission = RolloutScheduler(plan, players, _give_up, rpc_timeout=600.0), Admission(args.prompts)
        with counted_by_ray(meter):
            for number in range(1, steps + 1):
                meter.sent = meter.received = 0
                with watch.step():
                    run_step(scheduler, admission, actor, number, copied=args.copied)
                through.append(meter.sent + meter.received)
                print(number, {name: f"{size / 1e6:,.0f}" for name, size in watch.steps[-1].items()}, flush=True)
        for cluster in clusters.values():
            cluster.shutdown()
        placement.remove()
    return watch, through


def run_step(
    scheduler: RolloutScheduler, admission: Admission, actor: ModelCluster, number: int, *, copied: bool
) -> None:
    """Rollouts, scores, training."""
    groups = scheduler.take(admission, number).groups
    if copied:
        items = [item for group in groups for item in group.items]
        hold(items)
        for item in items:
            vars(item)["data"] = item.data.copy()
        del items
    batch = groups_to_batch(groups, ["A"])
    del groups
    if not copied:
        batch = actor.store(batch)
    batch = batch.replace(old_logprobs_T=actor.logprobs(batch).as_they_are["logprobs_T"])
    actor.train(batch, [torch.arange(batch.num_sequences)])
    scheduler.commit(admission)


def _own_pid() -> int:
    return int(Path("/proc/self").readlink().name)


def _give_up(error: BaseException) -> None:
    raise error


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--pictures", type=int, default=4, help="of a prompt")
    parser.add_argument("--side", type=int, default=512, help="pixels of a picture's side, a multiple of 32")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--store-gb", type=float, default=2.0, help="size of the object store")
    parser.add_argument("--copied", action="store_true", help="pictures are copied for each row")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report()
    distinct = args.prompts * args.pictures * args.side**2 * 3
    report.line("distinct pictures of a step", distinct / 1e6, "MB", None, f"{args.answers} answers to each")
    watch, through = measure(args, args.answers, args.steps)
    _, fewer = measure(args, max(1, args.answers // 4), 2)
    for name in watch.steps[0]:
        first, second = (max(step[name] for step in half) for half in halves(watch.steps))
        limit = (first + 0.1 * distinct) / 1e6
        report.line(f"{name}, largest of the last steps", second / 1e6, "MB", limit, f"{first / 1e6:,.0f} before")
    report.line("through the driver in a step", max(through[1:]) / 1e6, "MB")
    report.line(f"  with {max(1, args.answers // 4)} answers", fewer[-1] / 1e6, "MB")
    for problem in report.missed:
        print(f"missed: {problem}")
    return int(bool(report.missed))


def halves(steps: Sequence[dict[str, int]]) -> tuple[Sequence[dict[str, int]], Sequence[dict[str, int]]]:
    """The first steps, but for the very first, and the others."""
    middle = 1 + len(steps) // 2
    return steps[1:middle], steps[middle:] or steps[1:]


if __name__ == "__main__":
    sys.exit(main())
