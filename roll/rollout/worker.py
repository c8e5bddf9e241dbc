"""The Ray worker that collects rollout groups, for any kind of episode: many at once in one event loop."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from roll.data.requests import GenerateFn
from roll.rollout.env_manager import EpisodeSpec
from roll.rollout.errors import EnvError
from roll.rollout.group_calls import GroupWorker
from roll.rollout.plans import GroupSpec
from roll.rollout.router import GenerationClient
from roll.rollout.types import RolloutGroup, Trajectory
from roll.utils.seeding import derive_seed

logger = logging.getLogger(__name__)

BASELINE_MEMBER = -1
"""The member that plays greedily for the others' baseline."""


class RolloutWorker(GroupWorker):
    """Runs the episodes of rollout groups. Subclasses define an episode."""

    retries = 0
    """Attempts at a failed episode before it is dropped, after the first."""

    async def set_engines(self, engines: Sequence[Any]) -> None:
        """Sets where generation requests are sent from now on."""
        self.client = GenerationClient(engines)

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
            return asyncio.create_task(self._run_member(spec, member, generate, errors))

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
