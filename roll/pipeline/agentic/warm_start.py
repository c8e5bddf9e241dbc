"""The warm start of the tiny model by scripted play: half optimal, half random (see ``roll.pipeline.warm_start``)."""

from __future__ import annotations

from typing import Any

from roll.configs.agentic import AgenticConfig
from roll.data.batch import Batch
from roll.pipeline.agentic.env_roles import EnvRoles
from roll.pipeline.warm_start import WarmStartError
from roll.rollout.metrics import rollout_metrics
from roll.rollout.trajectory import groups_to_batch
from roll.rollout.types import RolloutGroup


def recipe(config: AgenticConfig) -> dict[str, Any]:
    """What the warm start depends on beside the model."""
    return {
        "warm_start": config.warm_start.model_dump(mode="json"),
        "tags": {tag: config.custom_envs[tag].model_dump(mode="json") for tag in config.train_env_manager.tags},
    }


class ScriptedTeacher:
    """Demonstrates play in the training environments (a ``Teacher``).

    Args:
        config: the run's configuration.
        envs: the environment managers, being set up.
    """

    def __init__(self, config: AgenticConfig, envs: EnvRoles) -> None:
        self.config = config
        self.settings = config.warm_start
        self.min_valid = config.warm_start.min_valid
        self.envs = envs
        self._measuring = envs.scheduler("train_env_manager", "warm start measurement", group_size=1, redundancy=0)

    def demonstrations(self) -> Batch:
        """Scripted turns; each episode starts from a board of its own.

        Raises:
            WarmStartError: no episode could be played.
        """
        self.envs.wait_ready()
        manager = self.config.train_env_manager
        scheduler = self.envs.scheduler(
            "train_env_manager",
            "demonstrations",
            group_size=1,
            redundancy=0,
            slots_per_tag=tuple(groups * manager.group_size for groups in manager.groups_per_tag.values()),
            expert_share=self.settings.expert_share,
        )
        groups: list[RolloutGroup] = []
        turns = 0
        while turns < self.settings.demonstrations:
            num_groups = scheduler.plan.num_slots
            played = scheduler.collect(range(len(groups), len(groups) + num_groups), num_groups).groups
            groups += played
            if not any(group.trajectories for group in played):
                raise WarmStartError(f"no demonstration could be played: {played[-1].errors[-1]}")
            turns += sum(len(trajectory.turns) for group in played for trajectory in group.trajectories)
        return groups_to_batch(groups, list(self.config.custom_envs))

    def measure(self, num_episodes: int) -> tuple[float, float]:
        groups = self._measuring.collect(range(num_episodes), num_episodes).groups
        metrics = rollout_metrics(groups, "measured")
        return metrics["measured/success"], metrics["measured/valid_rate"]
