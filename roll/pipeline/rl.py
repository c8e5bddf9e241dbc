"""Reinforcement learning: the training step on one screen.

    sync weights → rollout → log-probs → reward shaping → advantages → train → checkpoint → track

A pipeline differs from another only in where its rollouts come from and in what it evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from ray import ObjectRef
from torch import Tensor

from roll.algorithms.advantages import value_mask
from roll.algorithms.correction import MISMATCH, replay_metrics
from roll.algorithms.losses import VALUE_READS, build_policy_loss, build_value_loss, policy_reads
from roll.algorithms.preferences import build_preference_loss
from roll.algorithms.selection import informative_pairs, select_for_policy
from roll.algorithms.shaping import Shaping
from roll.configs.rl import RLConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics
from roll.pipeline.loop import TrainingLoop, mean_metrics
from roll.pipeline.model_cluster import (
    ModelCluster,
    plan_optimizer_steps,
    rows_trained_later,
    steps_with_tokens,
    take_fetched,
)
from roll.pipeline.overlap import Overlap
from roll.pipeline.probe import Probe
from roll.pipeline.roles import Roles
from roll.pipeline.rollout_workers import RolloutWorkers
from roll.pipeline.rollouts import GroupRules, StepRollouts
from roll.pipeline.session import RunFailedError
from roll.pipeline.start import RunContext
from roll.pipeline.teachers import TaggedTeachers
from roll.rollout.metrics import step_metrics
from roll.rollout.rows import groups_to_batch
from roll.rollout.scheduler import RolloutScheduler
from roll.tracking.checkpointer import Write
from roll.utils.hashing import WrittenFile, derive_seed


class RLPipeline(GroupRules, TrainingLoop):
    """Trains a policy. Subclasses provide the rollouts and their rules.

    Args:
        rollout_workers: run the rollouts; ``None``: a subclass has them from elsewhere.
    """

    config: RLConfig

    def __init__(self, config: RLConfig, run: RunContext, rollout_workers: RolloutWorkers | None) -> None:
        super().__init__(config, run.session, run.roles, run.signals)
        self.rollout_workers = rollout_workers
        self.parts = config.parts
        self.shaping = Shaping(self.parts)
        self.taken = StepRollouts(config, run.session, self)
        self.overlap: Overlap | None = None
        if rollout_workers is not None and config.overlaps and not config.eval_only:
            self.overlap = Overlap(config, run.roles, rollout_workers.train, self.taken.admission, run.session.folder)
        self.probe = None if config.probe == "off" else Probe(config, run.roles, run.start.model_path)

    @property
    def rollouts(self) -> RolloutScheduler:
        """Plays the training groups."""
        assert self.rollout_workers is not None, "nothing is played"
        return self.rollout_workers.train

    def run(self) -> None:
        try:
            super().run()
        finally:
            if not self.config.eval_only:
                self.rollouts.close()
        if not (self.config.eval_only or self.taken.admission.num_trained or self.learned):
            raise RunFailedError(
                f"dynamic sampling: no step found a group worth training on, so nothing was trained; {self.filter_hint}"
            )

    def step(self, step: int) -> None:
        """One step of reinforcement learning; its metrics are left in ``unreported``."""
        phase, overlap = self.session.phase, self.overlap
        if overlap is not None:
            overlap.start_step()
        with phase("sync"):
            if (step - 1) % self.config.actor_train.model_update_frequency == 0:
                self.publish(step - 1)
        with phase("rollout") as span:
            batch, metrics = self.rollout(step)
            self.utilisation.generated(span, self.taken.sampled_tokens, beside=overlap is not None)
        metrics |= self.roles.offload_manager.memory("rollout")
        if batch is None:
            with self.signals.deferred(), self.update(step):
                self.commit()
            self.unreported = metrics
            return
        batch, choice_metrics = self.choose(batch)
        metrics |= choice_metrics
        with phase("logprobs") as span:
            if self.probe is not None:
                metrics |= self.probe.check(step - 1)
            steps = self.plan_training(batch, step)
            metrics |= batch.balance(self.roles.actor.dp_size, self.roles.actor.linear)
            old_rows = self.rows_with_old_logprobs(batch, steps)
            batch = self.roles.score(batch, old_rows, self.config)
            self.utilisation.scored(span, batch, None if self.roles.others_score else old_rows)
            if vars(batch)["experts_TE"] is not None:
                metrics |= replay_metrics(batch)
        with self.signals.deferred():  # a stop in here waits: half an update cannot be saved
            with phase("advantage"):
                self.taken.write_scores(step, batch)
                lag_metrics = {} if overlap is None else overlap.mismatch_metrics(batch)
                batch, shaping_metrics = self.shaping(batch)
                if isinstance(self.roles.teacher, TaggedTeachers):
                    shaping_metrics |= self.roles.teacher.metrics(batch)
                if self.evaluates(step):
                    self.taken.write_tokens(step, batch)
            with self.update(step), phase("train") as span:
                train_metrics = self.train(batch, steps, step) | self.roles.offload_manager.memory("train")
                self.commit()
                learnt = step > self.config.critic_warmup
                self.utilisation.trained(span, batch, self.config.ppo_epochs, counts=learnt, metrics=train_metrics)
            if overlap is not None:
                metrics |= overlap.idle_metrics()
            # The mismatch of shaping is that of more rows than the one of training.
            self.unreported = metrics | train_metrics | lag_metrics | shaping_metrics | take_fetched()

    def after_step(self) -> None:
        super().after_step()
        step = self.done_steps
        if self.evaluates(step) or self.learned is not None:
            self.taken.explain(step, last=step == self.config.max_steps or self.learned is not None)

    def evaluates(self, step: int) -> bool:
        """A step after which the run evaluates, or would do so with held-out data."""
        config = self.config
        return step == config.max_steps or bool(config.eval_steps and step % config.eval_steps == 0)

    def publish(self, version: int) -> None:
        if self.overlap is not None:
            self.overlap.before_update(version)
        super().publish(version)

    def measure(self, name: str, step: int) -> Metrics:
        metrics = super().measure(name, step)
        return metrics if self.probe is None else metrics | self.probe.check(step)

    def rollout(self, step: int) -> tuple[Batch | None, Metrics]:
        """Takes the step's training batch: under the current weights, or those of ``async_generation_ratio`` ago.

        Returns:
            ``None`` in place of the batch where dynamic sampling has found no group to train on; and metrics.
        """
        self.roles.rollout_replicas.prepare()
        config, collected = self.config, self.taken.take(step, self.rollouts)
        if self.overlap is not None:
            self.overlap.record(collected)
        self.looks_learned = self.taken.look_at(step, collected)
        metrics = step_metrics(collected, filters=config.filters_groups) | self.more_metrics(collected)
        metrics |= self.roles.rollout_replicas.take_update_metrics()
        metrics["rollout/attained"] = self.attained([*collected.groups, *collected.rejected])
        if not collected.groups:
            return None, metrics
        batch = groups_to_batch(collected.groups, config.tags, config.gdpo_reward_keys)
        return batch, metrics if self.overlap is None else metrics | self.overlap.lag_metrics(batch, step - 1)

    def commit(self) -> None:
        """The groups of the step's rollout have been used."""
        self.session.summary["draws"] = self.rollouts.commit(self.taken.admission)

    def confirm(self, metrics: Metrics) -> str | None:
        """See ``TrainingLoop``: held-out episodes attain the share ``learned_share`` too."""
        return self.taken.confirm(self.done_steps, metrics.get("eval/attained"))

    def choose(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Chooses the part of the rollout that is scored and trained on: all of it."""
        return batch, {}

    def plan_training(self, batch: Batch, step: int) -> list[Tensor]:
        """The rows of each optimizer step; a batch that fell short makes fewer steps, not smaller ones."""
        samples = batch.samples if batch.pair_B is None else informative_pairs(batch)
        full, taken = self.config.groups_per_step, len(self.taken.admission.taken)
        drawn = plan_optimizer_steps(
            len(samples),
            max(1, self.config.optimizer_steps_per_epoch * taken // full),
            self.config.ppo_epochs,
            seed=derive_seed(self.config.seed, "minibatches", step),
        )
        return [samples[numbers].flatten() for numbers in drawn]

    def rows_with_old_logprobs(self, batch: Batch, steps: list[Tensor]) -> Tensor:
        """int64: the rows that the actor scores before the update; in the others the old policy is the current one."""
        config = self.config
        if config.leaves_rollouts_unscored:
            return torch.empty(0, dtype=torch.int64)
        if config.wants_old_logprobs or (len(steps) > 1 and config.mixes_all_rows):
            return torch.arange(batch.num_sequences)
        return rows_trained_later(steps)

    def train(self, batch: Batch, steps: list[Tensor], step: int) -> Metrics:
        """Takes the optimizer steps of the actor and the critic, side by side where they have devices of their own."""
        policy_batch, metrics = select_for_policy(batch, self.parts, derive_seed(self.config.seed, "selection", step))
        # Masks may leave nothing of a step, e.g. when its groups are solved: that is no failed step.
        policy_steps = steps_with_tokens(policy_batch, steps) if step > self.config.critic_warmup else []
        if self.config.kl_loss_target is not None:
            coef, kl_metrics = self.shaping.steer_kl_loss(batch)
            metrics |= kl_metrics
            set_policy_loss(self.roles, self.config.model_copy(update={"kl_loss_coef": coef}))
        actor, critic = self.roles.actor, self.roles.critic
        policy_batch = policy_batch.only(actor.reads | policy_reads(self.parts))
        actor_refs = actor.submit_train(policy_batch, policy_steps) if policy_steps else []
        critic_refs = [] if critic is None else self.submit_values(critic, batch, steps)
        history = actor.gather_train(actor_refs) if actor_refs else []
        critic_history = critic.gather_train(critic_refs) if critic is not None and critic_refs else []
        self.count_bad_steps(history, critic_history)
        # Only in the first optimizer step is the policy that trains the one that sampled.
        first = {name: value for name, value in (history[0] if history else {}).items() if name in MISMATCH}
        rest = [{name: value for name, value in each.items() if name not in MISMATCH} for each in history]
        return first | mean_metrics(rest) | mean_metrics(critic_history) | metrics

    def submit_values(self, critic: ModelCluster, batch: Batch, steps: list[Tensor]) -> list[ObjectRef]:
        """Starts the optimizer steps of the critic; nothing, where no step has a value to learn."""
        batch = batch.with_loss_mask(value_mask(batch, self.parts.advantage)).only(VALUE_READS)
        steps = steps_with_tokens(batch, steps)
        return critic.submit_train(batch, steps) if steps else []

    def snapshot(self) -> tuple[Write, dict[str, Any]]:
        with self.rollouts.halted():  # one cut through all draws
            write_models, state = super().snapshot()
            if (overlap := self.overlap) is None:
                return write_models, state
            finished = overlap.finished()

        def write(path: Path) -> Callable[[], Iterable[WrittenFile]] | None:
            overlap.save(path, finished)
            return write_models(path)

        return write, state

    def restore(self, path: Path) -> None:
        super().restore(path)
        if self.overlap is not None:
            self.overlap.restore(path, self.done_steps)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self.shaping.state_dict() | self.taken.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if not self.config.eval_only:  # else it may be a model that a run of any pipeline has saved
            self.shaping.load_state_dict(state)
            self.taken.load_state_dict(state)


def set_policy_loss(roles: Roles, config: RLConfig) -> None:
    roles.actor.call("set_loss", build_policy_loss, config, config.total_optimizer_steps)


def set_losses(roles: Roles, config: RLConfig) -> None:
    """Gives the trained roles their losses."""
    if (pairs := getattr(config, "online_dpo", None)) is not None:
        roles.actor.call("set_loss", build_preference_loss, pairs)
        return
    set_policy_loss(roles, config)
    if roles.critic is not None:
        roles.critic.call("set_loss", build_value_loss, config)
