"""The agentic pipeline: rollouts come from environments played by environment workers."""

from __future__ import annotations

from functools import partial

from roll.configs.agentic import AgenticConfig
from roll.distributed.strategy.base import Metrics
from roll.pipeline.agentic.env_roles import EnvRoles
from roll.pipeline.rl import RLPipeline
from roll.pipeline.rollouts import keep_episodes, passes_filter, play_held_out
from roll.report.render import save_renders
from roll.rollout.types import RolloutGroup


class AgenticPipeline(RLPipeline):
    """Trains a policy on environments (see ``RLPipeline``)."""

    config: AgenticConfig
    players: EnvRoles
    filter_hint = (
        "the environments are too easy or too hard for the policy: loosen train_env_manager.query_filter_config, or "
        "change them"
    )

    def wants(self, group: RolloutGroup) -> bool:
        return passes_filter(group, self.config.train_env_manager.query_filter_config)

    def most_tokens(self, tag: str) -> int:
        sampled = self.config.sampling(self.config.train_env_manager).max_new_tokens or self.config.response_length
        return min(sampled, self.config.custom_envs[tag].max_tokens_per_step or sampled)

    def evaluate(self, name: str, step: int) -> Metrics:
        """Plays the validation episodes, see ``play_held_out``."""
        manager, envs = self.config.val_env_manager, self.players
        greedy = None if self.config.sampling(manager).is_greedy else envs.val_greedy
        num_groups = self.config.val_batch_size // manager.group_size
        groups, metrics = play_held_out(self.session, name, step, num_groups, envs.val, greedy, self.check_groups)
        metrics["eval/attained"] = self.attained(groups)
        if name != "step":
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
