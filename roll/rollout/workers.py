"""Workers that collect rollout groups, and how groups travel between them and the driver.

A worker runs many groups at once in one event loop; subclasses say what an episode is. A remote call costs each end
some tenths of a millisecond, as much as many a group, so groups are started and fetched many at a time, as arrays.
Tokens, their log-probs, experts and kept sets, texts and pictures stay in the object store until somebody reads them
(``roll.data.stored``). A conversation is there once: the prompts of its earlier turns are its beginnings, and what a
turn says of the experts of a token is what its row knew first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import ray

from roll.data.columns import (
    Compact,
    ExpertArray,
    IntArray,
    Item,
    Records,
    columns_of,
    compact,
    continued,
    distinct,
    join,
    unknown,
)
from roll.data.identity import identity
from roll.data.kept_sets import KeptFigures
from roll.data.requests import Completion, GenerateFn
from roll.data.stored import TEXTS, Arrays, Block, Held, Piece, pack_texts
from roll.distributed.cluster.cluster import Cluster, RayBlock, Worker
from roll.rollout.env_manager import EpisodeSpec
from roll.rollout.errors import EnvError
from roll.rollout.plans import GroupSpec
from roll.rollout.router import GenerationClient
from roll.rollout.types import (
    EXPERTS,
    KEPT,
    LOGPROBS,
    TOKENS,
    Figures,
    RolloutGroup,
    Routed,
    Trajectory,
    Turn,
    figures_of,
)
from roll.utils.hashing import derive_seed


@dataclass(frozen=True)
class FlatGroups:
    """Groups on their way to the driver: what it reads of all of them, and two blocks of the rest."""

    groups: Records[RolloutGroup]
    """Without their episodes."""
    members: list[tuple[int, bool]]
    """Number of trajectories of each, and whether a baseline follows them."""
    episodes: Records[Trajectory]
    """Without their turns and last texts."""
    num_turns: list[int]
    turns: Records[Turn]
    """Without texts, what the model was given, and what it answered."""
    shown: list[tuple[str, ...]]
    """Hashes of each turn's pictures."""
    completions: Records[Completion]
    """Of each turn, without tokens and what is told of each, but for the versions."""
    places: list[tuple[int, int, int]]
    """Where each turn's row, answer and end lie in the columns of the block."""
    text_ends: list[int]
    """Where the texts end in the block: of each turn the observation and the answer, then the last of each episode."""
    figures: list[Figures]
    """Of each turn."""
    routed: list[Routed | None]
    """Of each turn; ``None``: it tells no experts."""
    kept: list[tuple[tuple[str, KeptFigures], ...]]
    """Of each turn the hashes and figures of its kept sets, which lie in the block end to end."""
    block: Block
    """Of columns along prompts and answers, kept sets, and texts."""
    pictures: Block
    """Of the pictures, by hash."""

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup]) -> FlatGroups:
        """The blocks are held."""
        episodes = [episode for group in groups for episode in group.episodes]
        layout = _Layout()
        for trajectory in episodes:
            layout.add(trajectory)
        turns = [turn for trajectory in episodes for turn in trajectory.turns]
        completions = [turn.completion for turn in turns]
        logprobs = np.zeros(layout.length, dtype=np.float32)
        for completion, (_, middle, end) in zip(completions, layout.places, strict=True):
            if len(completion.logprobs) != end - middle:
                raise ValueError(f"Completion.logprobs: got {len(completion.logprobs)}, expected {end - middle}")
            logprobs[middle:end] = completion.logprobs
        of_turns = (text for turn in turns for text in (turn.observation, turn.text))
        texts, text_ends = pack_texts(chain(of_turns, (trajectory.final_observation for trajectory in episodes)))
        tokens = join(layout.tokens, columns_of(Completion)["token_ids"])
        pictures: dict[str, Item] = {}
        block: dict[str, np.ndarray | Compact] = {TOKENS: compact(tokens), LOGPROBS: compact(logprobs), TEXTS: texts}
        experts, routed = layout.experts(completions)
        if experts is not None:
            block[EXPERTS] = compact(experts)
        if sets := [item.data for completion in completions for item in completion.kept]:
            block[KEPT] = np.concatenate(sets)
        return cls(
            groups=Records.of(RolloutGroup, groups, leave=("trajectories", "baseline")),
            members=[(len(group.trajectories), group.baseline is not None) for group in groups],
            episodes=Records.of(Trajectory, episodes, leave=("turns", "final_observation")),
            num_turns=[len(trajectory.turns) for trajectory in episodes],
            turns=Records.of(Turn, turns, leave=("prompt_ids", "completion", "observation", "text", "items")),
            shown=[tuple(item.hash for item in distinct(turn.items, pictures)) for turn in turns],
            completions=Records.of(Completion, completions, leave=("token_ids", "logprobs", "experts", "kept")),
            places=layout.places,
            text_ends=text_ends,
            figures=[*map(figures_of, turns)],
            routed=routed,
            kept=[tuple((item.hash, KeptFigures.of(item)) for item in completion.kept) for completion in completions],
            block=Held(block),
            pictures=Held({content_hash: item.data for content_hash, item in pictures.items()}),
        )

    def __iter__(self) -> Iterator[RolloutGroup]:
        return self.read({})

    def read(self, pictures: MutableMapping[str, Item]) -> Iterator[RolloutGroup]:
        """The groups.

        Args:
            pictures: those that are known by hash, to which the others are added; a block need not be kept for them.
        """
        observations, answers, last = self._texts()
        completions = self.completions.read(
            token_ids=(Piece(self.block, TOKENS, middle, end) for _, middle, end in self.places),
            logprobs=(Piece(self.block, LOGPROBS, middle, end) for _, middle, end in self.places),
            experts=self._experts(),
            kept=self._kept(),
        )
        prompts = (
            Piece(self.block, TOKENS, start, middle, figures)
            for (start, middle, _), figures in zip(self.places, self.figures, strict=True)
        )
        items = (tuple(self._picture(content_hash, pictures) for content_hash in shown) for shown in self.shown)
        turns = self.turns.read(
            prompt_ids=prompts, completion=completions, observation=observations, text=answers, items=items
        )
        episodes = self.episodes.read(
            turns=(tuple(islice(turns, count)) for count in self.num_turns), final_observation=last
        )
        trajectories, baselines = [], []
        for count, has_baseline in self.members:
            trajectories.append(tuple(islice(episodes, count)))
            baselines.append(next(episodes) if has_baseline else None)
        return self.groups.read(trajectories=trajectories, baseline=baselines)

    def _picture(self, content_hash: str, known: MutableMapping[str, Item]) -> Item:
        if (item := known.get(content_hash)) is None:
            item = known[content_hash] = Item.known(Piece(self.pictures, content_hash), content_hash)
        return item

    def _texts(self) -> tuple[list[Piece], list[Piece], list[Piece]]:
        """Observations and answers of the turns, and the last of each episode."""
        ends = self.text_ends
        texts = [Piece(self.block, TEXTS, *bounds) for bounds in zip([0, *ends], ends, strict=False)]
        of_turns = 2 * len(self.places)
        return texts[:of_turns:2], texts[1:of_turns:2], texts[of_turns:]

    def _experts(self) -> Iterator[Piece | None]:
        """Those of each turn: what its row knows of each of its tokens."""
        for (start, _, end), routed in zip(self.places, self.routed, strict=True):
            yield None if routed is None else Piece(self.block, EXPERTS, start, end, routed)

    def _kept(self) -> Iterator[tuple[Item, ...]]:
        """The kept sets of each turn."""
        start = 0
        for sets in self.kept:
            items = []
            for content_hash, figures in sets:
                piece = Piece(self.block, KEPT, start, start := start + figures.num_bytes, figures)
                items.append(Item.known(piece, content_hash))
            yield tuple(items)


class _Layout:
    """Lays the tokens of episodes end to end, row by row, so that what a row's turns share is there once."""

    def __init__(self) -> None:
        self.tokens: list[IntArray] = []
        self.places: list[tuple[int, int, int]] = []
        self.length = 0

    def add(self, trajectory: Trajectory) -> None:
        turns = trajectory.turns
        order: Sequence[int] = range(len(turns))
        if any(turn.row for turn in turns):
            order = sorted(order, key=lambda number: turns[number].row)
        base = len(self.places)
        self.places += [(0, 0, 0)] * len(turns)
        start, known = self.length, b""
        for number in order:
            prompt = np.asarray(turns[number].prompt_ids, dtype=np.int64)
            answer = np.asarray(turns[number].completion.token_ids, dtype=np.int64)
            if not known or identity(prompt[: self.length - start]) != known:
                start = self.length
            self.tokens += (prompt[self.length - start :], answer)
            middle = start + len(prompt)
            self.length = middle + len(answer)
            self.places[base + number] = (start, middle, self.length)
            known = identity(prompt) + identity(answer) if trajectory.history else b""

    def experts(self, completions: Sequence[Completion]) -> tuple[ExpertArray | None, list[Routed | None]]:
        """The experts of all tokens, as their rows know them first; and what each turn tells, if it has any."""
        found = [completion.experts for completion in completions]
        widths = {own.shape[1] for own in found if own is not None}
        if not widths:
            return None, [None] * len(found)
        (width,) = widths
        declared = columns_of(Completion)["experts"]
        values = unknown(self.length, (width,), declared)
        for (start, _, end), own in zip(self.places, found, strict=True):
            if own is not None:
                if len(own) != end - start:
                    raise ValueError(
                        f"Completion.experts: got {len(own)} entries, expected {end - start}, a token each"
                    )
                values[start:end] = continued(values[start:end], own.astype(values.dtype, copy=False), declared)
        known = np.append(0, (values != declared.unset).sum(1).cumsum())
        return values, [
            None if own is None else Routed(int(known[end - 1] - known[start]), width)
            for (start, _, end), own in zip(self.places, found, strict=True)
        ]


_POLL_S = 1.0


@dataclass(frozen=True)
class Series:
    """The groups that one caller has started since it last gave its groups up. None of the older ones count."""

    caller: str
    number: int


@dataclass(frozen=True)
class Finished:
    """Outcome of some groups."""

    groups: FlatGroups
    failed: list[int]
    """Those that raised: ``GroupWorker.failure`` raises it again."""


class _Playing:
    """The groups of a series that are under way, or finished and not fetched."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tasks: dict[int, asyncio.Task[RolloutGroup]] = {}
        self.finished: list[int] = []
        self.arrived = asyncio.Event()
        self.is_over = False

    def start(self, group_id: int, task: asyncio.Task[RolloutGroup]) -> None:
        self.tasks[group_id] = task
        task.add_done_callback(lambda _: self._arrive(group_id))

    def _arrive(self, group_id: int) -> None:
        if not self.is_over:
            self.finished.append(group_id)
            self.arrived.set()

    def end(self) -> None:
        self.is_over = True
        self.finished.clear()
        for task in self.tasks.values():
            task.cancel()
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody will look at it
        self.arrived.set()


class GroupWorker(Worker, ABC):
    """Plays groups. Subclasses say how."""

    def __init__(self, role: str, rank: int, world_size: int, env: Mapping[str, str]) -> None:
        super().__init__(role, rank, world_size, env)
        self._playing: dict[str, _Playing] = {}

    @abstractmethod
    async def run_group(self, spec: GroupSpec) -> RolloutGroup:
        """Plays one group."""

    async def start_groups(self, series: Series, specs: Sequence[GroupSpec]) -> None:
        """Begins to play groups; ``finished_groups`` brings them."""
        if (playing := self._of(series)) is not None:
            for spec in specs:
                playing.start(spec.group_id, asyncio.create_task(self._play(spec), name=f"group {spec.group_id}"))

    async def _play(self, spec: GroupSpec) -> RolloutGroup:
        with self.clock.work():
            return await self.run_group(spec)

    @ray.method(num_returns=3)
    async def finished_groups(self, series: Series) -> tuple[Finished, Arrays, Arrays]:
        """The groups that have finished since the last call; waits up to a second for the first.

        Returns:
            Their blocks apart, so that these belong to the caller and outlive this process.
        """
        groups: list[RolloutGroup] = []
        failed: list[int] = []
        if (playing := self._of(series)) is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(playing.arrived.wait(), _POLL_S)
            playing.arrived.clear()
            finished, playing.finished = playing.finished, []
            for group_id in finished:
                task = playing.tasks[group_id]
                if task.cancelled() or task.exception() is not None:
                    failed.append(group_id)
                else:
                    groups.append(playing.tasks.pop(group_id).result())
        flat = FlatGroups.of(groups)
        arrays, pictures = flat.block.fetch([flat.block, flat.pictures])
        return Finished(replace(flat, block=Held({}), pictures=Held({})), failed), arrays, pictures

    async def failure(self, series: Series, group_id: int) -> None:
        """Raises what the group raised."""
        if (playing := self._of(series)) is not None:
            await playing.tasks.pop(group_id)

    async def give_up(self, series: Series) -> None:
        """Ends the groups of the series, those included of which this worker has yet to hear."""
        self._of(Series(series.caller, series.number + 1))

    def _of(self, series: Series) -> _Playing | None:
        """Groups of the series that is played; ``None`` if it has been given up."""
        playing = self._playing.get(series.caller)
        if playing is None or playing.number < series.number:
            if playing is not None:
                playing.end()
            playing = self._playing[series.caller] = _Playing(series.number)
        return playing if playing.number == series.number else None


@dataclass(frozen=True)
class GroupCall:
    """A group under way."""

    group_id: int
    worker: int
    """Its rank."""
    started: float
    """``time.monotonic``."""

    @property
    def name(self) -> str:
        return f"run_group({self.group_id})"


@dataclass(frozen=True)
class _Answer:
    """A remote call is done."""

    series: Series
    worker: int
    group_id: int | None
    """The group of which it tells, if it is one."""
    future: Future[Any]
    blocks: Sequence[ray.ObjectRef]
    """Of the groups that have finished, and of their pictures."""


class GroupCalls:
    """Starts groups, each at the worker with the fewest, and fetches them."""

    def __init__(self, workers: Cluster) -> None:
        self.running: dict[int, GroupCall] = {}
        """By group, in the order of their start."""
        self.failed: int | None = None
        """The group of which the last error told."""
        self._workers = workers
        self._series = Series(uuid.uuid4().hex, 0)
        self._loads = [0] * workers.world_size
        self._outbox: defaultdict[int, list[GroupSpec]] = defaultdict(list)
        self._polled: set[int] = set()
        """Workers that have been asked for what is finished and have not answered."""
        self._pictures = WeakValueDictionary[str, Item]()
        """Those of all groups that still count, by hash."""
        self._answers: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()

    def start(self, spec: GroupSpec) -> None:
        """Starts a group with the next ``send``."""
        worker = self._loads.index(min(self._loads))
        self.running[spec.group_id] = GroupCall(spec.group_id, worker, time.monotonic())
        self._loads[worker] += 1
        self._outbox[worker].append(spec)

    def send(self) -> None:
        """Sends what was started to the workers."""
        outbox, self._outbox = self._outbox, defaultdict(list)
        for worker, specs in outbox.items():
            self._await(worker, self._workers.handles[worker].start_groups.remote(self._series, specs))
            self._poll(worker)

    def wait(self, seconds: float) -> Iterator[RolloutGroup | None]:
        """Groups that have finished, ``None`` for an interruption; waits for the first of them, and no longer.

        Raises:
            WorkerDiedError: a worker died.
            Exception: what a worker's own code raised. ``failed`` is the group.
        """
        end, has_waited = time.monotonic() + seconds, False
        with contextlib.suppress(queue.Empty):
            while True:
                answer = self._answers.get(timeout=0.0 if has_waited else max(0.0, end - time.monotonic()))
                if answer is None:
                    has_waited = True
                    yield None
                elif answer.series == self._series:  # others were given up
                    for group in self._take_in(answer):
                        has_waited = True
                        yield group

    def interrupt(self) -> None:
        """Ends a ``wait``, in any thread."""
        self._answers.put(None)

    def give_up(self) -> list[int]:
        """Ends everything that runs; returns its groups."""
        for worker in {call.worker for call in self.running.values()}:
            self._workers.handles[worker].give_up.remote(self._series)
        lost = list(self.running)
        self.running.clear()
        self._outbox.clear()
        self._polled.clear()
        self._loads = [0] * self._workers.world_size
        self._series = Series(self._series.caller, self._series.number + 1)
        return lost

    def _take_in(self, answer: _Answer) -> Iterator[RolloutGroup]:
        worker = answer.worker
        self.failed = answer.group_id
        if self.failed is None:  # the oldest has waited longest for it
            self.failed = next((call.group_id for call in self.running.values() if call.worker == worker), None)
        result = self._workers.result(answer.future, rank=worker, call=f"run_group({self.failed})")
        self.failed = None
        if not isinstance(result, Finished):  # nothing has gone wrong with the start of some
            return
        self._polled.discard(worker)
        for group_id in result.failed:
            ref: ray.ObjectRef = self._workers.handles[worker].failure.remote(self._series, group_id)
            self._await(worker, ref, group_id)
        place = self._workers.whereabouts.get(worker)
        block, pictures = (RayBlock(ref, None if place is None else place.node_id) for ref in answer.blocks)
        groups = list(replace(result.groups, block=block, pictures=pictures).read(self._pictures))
        if self._loads[worker] > len(groups):
            self._poll(worker)
        for group in groups:
            del self.running[group.group_id]
            self._loads[worker] -= 1
            yield group

    def _poll(self, worker: int) -> None:
        if worker not in self._polled:
            self._polled.add(worker)
            refs: list[ray.ObjectRef] = self._workers.handles[worker].finished_groups.remote(self._series)
            self._await(worker, refs[0], blocks=refs[1:])

    def _await(
        self, worker: int, ref: ray.ObjectRef, group_id: int | None = None, blocks: Sequence[ray.ObjectRef] = ()
    ) -> None:
        series = self._series
        ref.future().add_done_callback(lambda done: self._answers.put(_Answer(series, worker, group_id, done, blocks)))


logger = logging.getLogger(__name__)

BASELINE_MEMBER = -1
"""The member that is decoded greedily for the others' baseline."""


class RolloutWorker(GroupWorker):
    """Runs the episodes of rollout groups. Subclasses define an episode."""

    retries = 0
    """Attempts at a failed episode before it is dropped, after the first."""

    async def set_engines(self, engines: Sequence[Any]) -> None:
        """Sets where generation requests are sent from now on."""
        self.client = GenerationClient(engines, (self.rank, self.world_size))

    @abstractmethod
    async def play(self, spec: GroupSpec, episode: EpisodeSpec, generate: GenerateFn) -> Trajectory:
        """Plays one episode.

        Raises:
            EnvError: it failed and may be played again.
        """

    def generate_fn(self, spec: GroupSpec) -> GenerateFn:
        """Way of a group's members to the engines."""
        return self.client.generate

    async def run_group(self, spec: GroupSpec) -> RolloutGroup:
        """Plays all members of one group side by side.

        With redundancy, the first ``group_size`` to finish count and the others are cancelled. A member whose episode
        keeps failing is dropped and counted in the result; without its baseline a group is worth nothing and all of it
        is dropped.

        Raises:
            EngineUnavailableError: an engine worker died; play the group again once it is back.
        """
        errors: list[str] = []
        generate = self.generate_fn(spec)

        def start(member: int) -> asyncio.Task[Trajectory | None]:
            name = f"{spec.tag} group {spec.group_id} member {member}"
            return asyncio.create_task(self._run_member(spec, member, generate, errors), name=name)

        baseline = start(BASELINE_MEMBER) if spec.baseline else None
        numbers = range(spec.group_size + spec.redundancy)
        if spec.redundancy and spec.recorded:  # which of them were the first is known
            members = [start(member) for member in numbers if member in spec.recorded]
        else:
            members = [start(member) for member in numbers]
        finished: list[Trajectory] = []
        try:
            for task in asyncio.as_completed(members):
                trajectory = await task
                if trajectory is not None:
                    finished.append(trajectory)
                if len(finished) == spec.group_size:
                    break
            greedy = await baseline if baseline is not None else None
        finally:
            tasks = members if baseline is None else [*members, baseline]
            for running in tasks:
                running.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if spec.baseline and greedy is None:
            finished = []
        finished.sort(key=lambda trajectory: trajectory.member)
        dropped = max(0, spec.group_size - len(finished))
        return RolloutGroup(spec.group_id, spec.tag, tuple(finished), dropped, tuple(errors), greedy)

    async def _run_member(
        self, spec: GroupSpec, member: int, generate: GenerateFn, errors: list[str]
    ) -> Trajectory | None:
        episode = EpisodeSpec(
            tag=spec.tag,
            group_id=spec.group_id,
            member=member,
            env_seed=spec.env_seed,
            sampling_seed=derive_seed(spec.env_seed, "sampling", member),
            greedy=spec.greedy or member == BASELINE_MEMBER,
            record=spec.record and member == 0,
            recorded=spec.recorded.get(member, ()),
        )
        for _ in range(1 + self.retries):
            try:
                return await self.play(spec, episode, generate)
            except EnvError as error:
                errors.append(f"{spec.tag} group {spec.group_id} member {member}: {error}")
                logger.warning("%s", errors[-1])
        return None
