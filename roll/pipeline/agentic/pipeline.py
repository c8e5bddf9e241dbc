"""The agentic pipeline: rollouts come from environments played by environment workers."""

from __future__ import annotations

from functools import partial

from roll.configs.agentic import AgenticConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics
from roll.pipeline.agentic.env_roles import EnvRoles
from roll.pipeline.rl import RLPipeline
from roll.pipeline.roles import Roles
from roll.pipeline.rollouts import collect, keep_episodes, passes_filter
from roll.pipeline.session import RunFailedError, RunSession
from roll.report.render import save_renders
from roll.rollout.metrics import rollout_metrics
from roll.rollout.scheduler import RolloutScheduler, TooManyRejectedError
from roll.rollout.trajectory import groups_to_batch
from roll.rollout.types import Collected, RolloutGroup
from roll.utils.signals import SignalGuard


class AgenticPipeline(RLPipeline):
    """Trains a policy on environments (see ``RLPipeline``)."""

    config: AgenticConfig

    def __init__(
        self, config: AgenticConfig, session: RunSession, roles: Roles, signals: SignalGuard, envs: EnvRoles
    ) -> None:
        super().__init__(config, session, roles, signals)
        self.envs = envs

    @property
    def rollouts(self) -> RolloutScheduler:
        return self.envs.train

    def rollout(self, step: int) -> tuple[Batch, Metrics]:
        self.session.first_rollout()
        collected = self._take(step)
        metrics = rollout_metrics(collected.groups, "rollout")
        if self._filters:
            metrics["rollout/filtered"] = float(len(collected.rejected))
        parts = self.config.gdpo_reward_keys
        return groups_to_batch(collected.groups, list(self.config.custom_envs), parts), metrics

    @property
    def _filters(self) -> bool:
        return not self.config.train_env_manager.query_filter_config.keeps_all

    def _take(self, step: int) -> Collected:
        """The step's groups.

        Raises:
            RunFailedError: dynamic sampling found too few groups worth training on.
        """
        config = self.config
        if not self._filters:
            return self.take(step)
        limits, most = config.train_env_manager.query_filter_config, config.max_filtered_batches
        try:
            accept = partial(passes_filter, limits=limits)
            return self.take(step, accept=accept, max_groups=config.groups_per_step * most)
        except TooManyRejectedError as error:
            raise RunFailedError(
                f"dynamic sampling: {error} (max_filtered_batches={most}); the environments are too easy or too hard "
                "for the policy: loosen train_env_manager.query_filter_config, or change them"
            ) from error

    def evaluate(self, name: str, step: int) -> Metrics:
        """Plays the validation episodes: the same boards each time, sampled; and greedily before and after."""
        with self.session.phase("eval"):
            groups = self._play_validation(step, greedy=False)
        metrics = rollout_metrics(groups, "eval")
        if name != "step":
            greedy = rollout_metrics(self._play_greedily(groups, step), "eval_greedy")
            metrics |= {name: value for name, value in greedy.items() if name.endswith(("success", "reward"))}
            self.session.summary["eval"][name] = {
                "success": metrics["eval/success"],
                "success_greedy": metrics["eval_greedy/success"],
                "valid_rate": metrics.get("eval/valid_rate"),
                "reward": metrics["eval/reward"],
                "episodes": int(metrics["eval/episodes"]),
                "distinct_starts": len({t.turns[0].state_key for group in groups for t in group.trajectories}),
            }
        episodes = keep_episodes(self.session, step, groups)
        self.session.aside(partial(save_renders, episodes, self.session.renders, step, self.config.num_renders))
        valid = metrics.get("eval/valid_rate")  # of agent programs nobody knows
        self.session.display.note(
            f"evaluation {name} (step {step}): success {metrics['eval/success']:.1%}, "
            + ("" if valid is None else f"valid actions {valid:.1%} ")
            + f"on {metrics['eval/episodes']:.0f} held-out episodes"
        )
        return metrics

    def _play_greedily(self, groups: list[RolloutGroup], step: int) -> list[RolloutGroup]:
        """The validation episodes played greedily: ``groups``, where those were."""
        if self.config.sampling(self.config.val_env_manager).is_greedy:
            return groups
        with self.session.phase("eval greedy"):
            return self._play_validation(step, greedy=True)

    def _play_validation(self, step: int, *, greedy: bool) -> list[RolloutGroup]:
        scheduler = self.envs.val_greedy if greedy else self.envs.val
        num_groups = self.config.val_batch_size // self.config.val_env_manager.group_size
        return collect(self.session, scheduler, num_groups, step)
