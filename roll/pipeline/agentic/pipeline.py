"""The agentic pipeline: rollouts come from environments played by environment workers."""

from __future__ import annotations

import itertools
import logging

from roll.agentic.metrics import rollout_metrics
from roll.agentic.trajectory import groups_to_batch
from roll.agentic.types import RolloutGroup
from roll.configs.agentic import AgenticConfig
from roll.data.batch import Batch
from roll.distributed.scheduler.rollout_scheduler import RolloutScheduler
from roll.distributed.strategy.base import Metrics
from roll.pipeline.agentic.env_roles import EnvRoles
from roll.pipeline.base import RLPipeline
from roll.pipeline.roles import Roles
from roll.pipeline.session import RunSession
from roll.tracking.render import save_renders
from roll.utils.signals import SignalGuard

logger = logging.getLogger(__name__)


class AgenticPipeline(RLPipeline):
    """Trains a policy on environments (see ``RLPipeline``).

    Args:
        envs: the training and validation environment managers.
    """

    config: AgenticConfig

    def __init__(
        self, config: AgenticConfig, session: RunSession, roles: Roles, signals: SignalGuard, envs: EnvRoles
    ) -> None:
        super().__init__(config, session, roles, signals)
        self.envs = envs

    def rollout(self, step: int) -> tuple[Batch, Metrics]:
        num_groups = self.config.rollout_batch_size // self.config.train_env_manager.group_size
        first_group_id = (step - 1) * self.envs.train.group_ids_per_batch(num_groups)
        self.session.first_rollout()
        groups = self._collect(self.envs.train, first_group_id, num_groups)
        self._check_any_played(groups, "train on")
        metrics = rollout_metrics(groups, "rollout")
        return groups_to_batch(groups, list(self.config.custom_envs)), metrics

    def evaluate(self, name: str, step: int) -> Metrics:
        """Plays the validation episodes: the same boards each time, sampled; and greedily before and after."""
        with self.session.phase("eval"):
            groups = self._play_validation(greedy=False)
        metrics = rollout_metrics(groups, "eval")
        if name != "step":
            with self.session.phase("eval greedy"):
                greedy = rollout_metrics(self._play_validation(greedy=True), "eval_greedy")
            metrics |= {f"{area}": value for area, value in greedy.items() if area.endswith(("success", "reward"))}
            self.session.summary["eval"][name] = {
                "success": metrics["eval/success"],
                "success_greedy": metrics["eval_greedy/success"],
                "valid_rate": metrics["eval/valid_rate"],
                "reward": metrics["eval/reward"],
                "episodes": int(metrics["eval/episodes"]),
                "distinct_starts": len({t.turns[0].state_key for group in groups for t in group.trajectories}),
            }
        self._show(name, step, groups, metrics)
        return metrics

    def _play_validation(self, *, greedy: bool) -> list[RolloutGroup]:
        scheduler = self.envs.val_greedy if greedy else self.envs.val
        num_groups = self.config.val_batch_size // self.config.val_env_manager.group_size
        groups = self._collect(scheduler, 0, num_groups)
        self._check_any_played(groups, "evaluate")
        return groups

    def _collect(self, scheduler: RolloutScheduler, first_group_id: int, num_groups: int) -> list[RolloutGroup]:
        """Collects groups and shows how many have come in."""
        arrived = itertools.count(1)
        progress = self.session.display.progress
        return scheduler.collect(first_group_id, num_groups, lambda _: progress(next(arrived), num_groups, "groups"))

    @staticmethod
    def _check_any_played(groups: list[RolloutGroup], what: str) -> None:
        """Tells of failed environments.

        Raises:
            ValueError: nothing is left of the whole batch.
        """
        last_errors = {group.tag: group.errors[-1] for group in groups if group.errors}
        summary = "\n".join(last_errors.values())
        if not any(group.trajectories for group in groups):
            raise ValueError(f"no episode to {what}: all {len(groups)} groups were dropped; last errors:\n{summary}")
        if last_errors:
            logger.warning("environments failed (rollout/env_errors counts them); last errors:\n%s", summary)

    def _show(self, name: str, step: int, groups: list[RolloutGroup], metrics: Metrics) -> None:
        """Keeps what a person may want to look at: some episodes in full, some to watch."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        self.session.folder.write_trajectories(f"eval-{step:05d}", trajectories[:64])
        save_renders(trajectories, self.session.renders, step, self.config.num_renders)
        self.session.display.note(
            f"evaluation {name} (step {step}): success {metrics['eval/success']:.1%}, "
            f"valid actions {metrics['eval/valid_rate']:.1%} on {len(trajectories)} held-out episodes"
        )
