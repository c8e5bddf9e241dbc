"""The RLVR pipeline: rollouts are answers to the prompts of a dataset."""

from __future__ import annotations

from collections.abc import Sequence

from roll.algorithms.pairing import best_and_worst
from roll.configs.rlvr import RLVRConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics
from roll.pipeline.prompt_roles import PromptRoles
from roll.pipeline.rl import RLPipeline
from roll.pipeline.rlvr.metrics import accuracy_metrics, check_error_rates, reward_metrics
from roll.pipeline.roles import Roles
from roll.pipeline.rollouts import MAX_SHOWN, collect, keep_episodes, passes_filter
from roll.pipeline.session import RunFailedError, RunSession
from roll.report.answers import save_answers
from roll.rollout.metrics import rollout_metrics
from roll.rollout.scheduler import RolloutScheduler, TooManyRejectedError
from roll.rollout.trajectory import groups_to_batch
from roll.rollout.types import Collected, RolloutGroup
from roll.utils.signals import SignalGuard


class RLVRPipeline(RLPipeline):
    """Trains a policy on prompts whose answers can be verified (see ``RLPipeline``).

    Args:
        prompts: the datasets, and the workers that have them answered and scored.
    """

    config: RLVRConfig

    def __init__(
        self, config: RLVRConfig, session: RunSession, roles: Roles, signals: SignalGuard, prompts: PromptRoles
    ) -> None:
        super().__init__(config, session, roles, signals)
        self.prompts = prompts

    @property
    def rollouts(self) -> RolloutScheduler:
        return self.prompts.train

    def rollout(self, step: int) -> tuple[Batch, Metrics]:
        self.session.first_rollout()
        collected = self._take(step)
        groups = collected.groups
        finished = [*groups, *collected.rejected]
        metrics = rollout_metrics(groups, "rollout") | reward_metrics(finished, self.config)
        metrics |= self.prompts.take_retries()
        metrics["rollout/filtered"] = float(len(collected.rejected))
        metrics["rollout/epoch"] = self.prompts.epoch_of(1 + max(group.group_id for group in finished))
        return groups_to_batch(groups, self.prompts.tags, self.config.gdpo_reward_keys), metrics

    def choose(self, batch: Batch) -> tuple[Batch, Metrics]:
        return super().choose(batch) if self.config.online_dpo is None else best_and_worst(batch)

    def evaluate(self, name: str, step: int) -> Metrics:
        """Answers the held-out prompts: the same ones each time, sampled; and greedily before and after."""
        if self.prompts.val is None:
            return {}
        with self.session.phase("eval"):
            groups = self._answer_validation(self.prompts.val, step)
        metrics = rollout_metrics(groups, "eval") | accuracy_metrics(groups, self.config.num_val_samples, "eval")
        if name != "step":
            greedy = rollout_metrics(self._answer_greedily(groups, step), "eval_greedy")
            metrics |= {key: value for key, value in greedy.items() if key.endswith(("success", "reward"))}
            self.session.summary["eval"][name] = {
                "accuracy": metrics["eval/success"],
                "accuracy_greedy": metrics["eval_greedy/success"],
                "reward": metrics["eval/reward"],
                "format_rate": metrics.get("eval/valid_rate"),
                "prompts": len(groups),
                "episodes": int(metrics["eval/episodes"]),
            } | {key.removeprefix("eval/"): value for key, value in metrics.items() if "@" in key}
        save_answers(keep_episodes(self.session, step, groups)[:MAX_SHOWN], self.session.renders, step)
        valid = metrics.get("eval/valid_rate")
        found = "" if valid is None else f"an answer found in {valid:.1%} of "
        self.session.display.note(
            f"evaluation {name} (step {step}): accuracy {metrics['eval/success']:.1%}, "
            f"{found}{metrics['eval/episodes']:.0f} responses to {len(groups)} prompts"
        )
        return metrics

    def _take(self, step: int) -> Collected:
        """The step's groups.

        Raises:
            RunFailedError: dynamic sampling found too few prompts worth training on, or too many answers could not be
                scored.
        """
        num_groups, domains = self.config.rollout_batch_size, self.config.domains

        def accept(group: RolloutGroup) -> bool:
            return passes_filter(group, self.config.rewards[domains[group.tag]].query_filter_config)

        try:
            return self.take(
                step,
                check=self._check_errors,
                accept=accept,
                max_groups=num_groups * self.config.max_filtered_batches,
            )
        except TooManyRejectedError as error:
            self._check_errors(error.groups)  # no answer could be scored: that is not for the data
            raise RunFailedError(
                f"dynamic sampling: {error} (max_filtered_batches={self.config.max_filtered_batches}); the prompts are "
                "too easy or too hard for the policy: loosen rewards.*.query_filter_config, or change the data"
            ) from error

    def _answer_greedily(self, groups: list[RolloutGroup], step: int) -> list[RolloutGroup]:
        """The held-out prompts answered greedily: ``groups``, where those were."""
        if self.config.val_sampling.is_greedy:
            return groups
        assert self.prompts.val_greedy is not None
        with self.session.phase("eval greedy"):
            return self._answer_validation(self.prompts.val_greedy, step)

    def _answer_validation(self, scheduler: RolloutScheduler, step: int) -> list[RolloutGroup]:
        return collect(self.session, scheduler, self.prompts.num_val_prompts, step, self._check_errors)

    def _check_errors(self, groups: Sequence[RolloutGroup]) -> None:
        check_error_rates(groups, self.config)
