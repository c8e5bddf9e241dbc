"""The run: one loop, and the training step on one screen.

    sync weights → rollout → log-probs → reward shaping → advantages → train → checkpoint → track

A pipeline differs from another only in where its rollouts come from and in what it evaluates.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor

from roll.algorithms.advantages import advantage_metrics, compute_advantages, value_mask
from roll.algorithms.correction import mismatch_metrics
from roll.algorithms.kl import KlController
from roll.algorithms.losses import build_policy_loss, build_value_loss
from roll.algorithms.rewards import apply_kl_penalty, shape_rewards, whiten_token_rewards
from roll.algorithms.selection import drop_masked_episodes, select_for_policy
from roll.algorithms.statistics import RunningStats
from roll.configs.rl import RLConfig
from roll.data.batch import Batch
from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.errors import ClusterError, RpcTimeoutError, WorkerDiedError
from roll.distributed.strategy.base import Metrics
from roll.pipeline.model_cluster import ModelCluster, WithoutAdapter, plan_optimizer_steps
from roll.pipeline.roles import Roles
from roll.pipeline.session import RunFailedError, RunSession
from roll.tracking.checkpointer import Checkpointer, CheckpointError
from roll.tracking.rng import restore_rng_state, rng_state
from roll.utils.seeding import derive_seed
from roll.utils.signals import SignalGuard

logger = logging.getLogger(__name__)


SKIPPED = "/skipped_steps"
"""End of the names of the metrics that count optimizer steps with a NaN or infinite loss or gradient."""


class TrainingDivergedError(RunFailedError):
    """Too many optimizer steps in a row had a NaN or infinite loss."""


class RLPipeline(ABC):
    """Trains a policy. Subclasses bring the rollouts.

    Args:
        config: the run's configuration.
        session: its folder, display, trackers and checkpoints.
        roles: the model roles, set up with the starting weights.
        signals: holds back Ctrl-C while the state could not be saved.
    """

    def __init__(self, config: RLConfig, session: RunSession, roles: Roles, signals: SignalGuard) -> None:
        self.config = config
        self.session = session
        self.roles = roles
        self.signals = signals
        self.done_steps = 0
        self.saved_steps = 0
        self.intact = True
        """False while the trained state is half changed and must not be saved."""
        self.unreported: Metrics = {}
        """Metrics of the last finished step until they have been logged."""
        self.bad_steps = 0
        self.score_stats = RunningStats()
        self.kl_controller = KlController.from_config(config)

    @abstractmethod
    def rollout(self, step: int) -> tuple[Batch, Metrics]:
        """Collects the step's training batch under the current weights."""

    @abstractmethod
    def evaluate(self, name: str, step: int) -> Metrics:
        """Measures the policy on held-out data; ``name`` is ``before``, ``after`` or ``step``."""

    def run(self) -> None:
        """Trains to ``max_steps``, from a checkpoint if there is one to resume.

        Whatever ends it early, the steps done so far have been saved where that was possible.

        Raises:
            KeyboardInterrupt: the user asked to stop.
            TrainingDivergedError: ``max_bad_steps`` steps in a row could not be taken.
        """
        try:
            if self.session.resume_path is not None:
                self.resume(self.session.resume_path)
            else:
                self.roles.sync_weights(0)
                metrics = self.evaluate("before", 0) if self.config.val_before_train or self.config.eval_only else {}
                self.session.log_step(0, metrics | self.session.timer.step_metrics())
            if self.config.eval_only:
                return
            config = self.config
            self.session.display.start(
                config.max_steps, done_steps=self.done_steps, eval_steps=config.eval_steps, save_steps=config.save_steps
            )
            for step in range(self.done_steps + 1, self.config.max_steps + 1):
                Cluster.current_step = step
                self.step(step)
                self.after_step()
            with self.signals.deferred():
                self.session.checkpointer.wait()
        except (KeyboardInterrupt, Exception) as error:
            self.rescue(error)
            raise

    def step(self, step: int) -> None:
        """One step of reinforcement learning; its metrics are left in ``unreported``."""
        phase = self.session.phase
        with phase("sync"):
            if (step - 1) % self.config.actor_train.model_update_frequency == 0:
                self.roles.sync_weights(step - 1)
        with phase("rollout") as span:
            self.roles.prepare_rollout()
            batch, metrics = self.rollout(step)
            span.tokens = int(batch.loss_mask_T.sum())
        metrics |= self.roles.offload_manager.memory("rollout")
        with phase("logprobs") as span:
            steps = self.plan_training(batch, step)
            batch = self.score(batch, needs_old_logprobs=len(steps) > 1)
            span.tokens = batch.num_tokens
        with self.signals.deferred():  # a stop in here waits: half an update cannot be saved
            with phase("advantage"):
                batch, shaping_metrics = self.shape(batch)
            self.intact = False
            with phase("train") as span:
                train_metrics = self.train(batch, steps, step) | self.roles.offload_manager.memory("train")
                span.tokens = batch.num_tokens * self.config.ppo_epochs
            self.done_steps, self.unreported = step, metrics | shaping_metrics | train_metrics
            self.intact = True

    def plan_training(self, batch: Batch, step: int) -> list[Tensor]:
        """The rows of each optimizer step."""
        return plan_optimizer_steps(
            batch.num_sequences,
            self.config.optimizer_steps_per_epoch,
            self.config.ppo_epochs,
            seed=derive_seed(self.config.seed, "minibatches", step),
        )

    def score(self, batch: Batch, needs_old_logprobs: bool) -> Batch:
        """Adds the log-probabilities of the training engine and the reference, and the critic's values.

        Roles on different devices work at the same time, but for the KL over the vocabulary the actor needs what the
        reference returns.
        """
        config, roles = self.config, self.roles
        recompute = needs_old_logprobs or config.wants_old_logprobs
        actor = {"old_logprobs_T": roles.actor if recompute else None}
        others = {"ref_logprobs_T": roles.reference, "values_T": roles.critic}
        if not config.uses_full_kl:
            return _with_scores(batch, actor | others)
        batch = _with_scores(batch, others)
        if batch.ref_hidden_TH is None:
            raise ValueError(
                "kl_penalty: 'full', but the reference's strategy returns no hidden states; expected hf_infer or an "
                "fsdp2, deepspeed or megatron strategy, or an estimator such as k3"
            )
        batch = _with_scores(batch, actor)
        # Hidden states are large: they travel on to the trainer only if its loss reads them.
        return batch if config.use_kl_loss else batch.replace(ref_hidden_TH=None)

    def shape(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Normalises rewards, adds the KL penalty, computes advantages."""
        metrics = mismatch_metrics(batch)
        batch, mask_metrics = drop_masked_episodes(batch, self.config)
        metrics |= mask_metrics
        batch, reward_metrics = shape_rewards(batch, self.config, self.score_stats)
        metrics |= reward_metrics
        if self.config.add_token_level_kl:
            batch, kl_metrics = apply_kl_penalty(batch, self.config, self.kl_controller.coef)
            self.kl_controller.update(kl_metrics["reward/kl"], batch.num_sequences)
            metrics |= kl_metrics
        if self.config.whiten_rewards:
            batch = whiten_token_rewards(batch)
        batch = compute_advantages(batch, self.config)
        return batch, metrics | advantage_metrics(batch, self.config)

    def train(self, batch: Batch, steps: list[Tensor], step: int) -> Metrics:
        """Takes the optimizer steps of the actor and the critic, side by side where they have devices of their own."""
        policy_batch, selection_metrics = select_for_policy(
            batch, self.config, seed=derive_seed(self.config.seed, "selection", step)
        )
        # Masks may leave nothing, e.g. when every group is solved: that is no failed step.
        trains_actor = step > self.config.critic_warmup and bool(policy_batch.loss_mask_T.any())
        actor_refs = self.roles.actor.submit_train(policy_batch, steps) if trains_actor else []
        value_batch = batch.replace(loss_mask_T=value_mask(batch, self.config), ref_hidden_TH=None)
        critic = self.roles.critic if value_batch.loss_mask_T.any() else None
        critic_refs = critic.submit_train(value_batch, steps) if critic else []
        history = self.roles.actor.gather_train(actor_refs) if actor_refs else []
        critic_history = critic.gather_train(critic_refs) if critic else []
        self._count_bad_steps(history, critic_history)
        return _mean_metrics(history) | _mean_metrics(critic_history) | selection_metrics

    def after_step(self) -> None:
        """Evaluates, reports and saves when it is time to.

        Raises:
            TrainingDivergedError: see ``run``.
        """
        step, config = self.done_steps, self.config
        self.session.checkpointer.check()
        last = step == config.max_steps
        if last or (config.eval_steps and step % config.eval_steps == 0):
            with self.session.phase("sync"):
                self.roles.sync_weights(step)
            self.unreported |= self.evaluate("after" if last else "step", step)
        with self.signals.deferred():  # each step is reported once, also by a run that is stopped here and resumed
            self.session.log_step(step, self.unreported | self.session.timer.step_metrics())
            self.unreported = {}
        self._check_divergence()
        if last or step % config.save_steps == 0:
            self.save_checkpoint()
        self.session.write_summary()

    def save_checkpoint(self) -> None:
        """Saves the state after the last finished step, unless that was saved already."""
        if self.saved_steps == self.done_steps:
            return
        with self.session.phase("checkpoint"), self.signals.deferred():
            self.session.checkpointer.save(self.done_steps, self.roles.save, self.state_dict())
        self.saved_steps = self.done_steps
        self.session.summary["steps"] = self.done_steps

    def rescue(self, error: BaseException) -> None:
        """Saves the steps done so far before ``error`` ends the run, unless they are gone or half changed."""
        role = error.role if isinstance(error, WorkerDiedError | RpcTimeoutError) else None
        lost = isinstance(error, CheckpointError) or role in ("actor_train", "critic") or not self.intact
        try:
            if not lost:
                self.save_checkpoint()
            with self.signals.deferred():  # a save that goes on in the background is finished
                self.session.checkpointer.wait()
        except (CheckpointError, ClusterError) as second:
            logger.error("the steps after the last checkpoint could not be saved: %s", second)

    def resume(self, path: Path) -> None:
        """Takes up the run where ``path`` was saved."""
        with self.session.phase("resume"):
            self.intact = False
            self.roles.load(path)
            self.load_state_dict(Checkpointer.load_state(path))
            self.intact = True
            self.saved_steps = self.done_steps
            self.session.summary["checkpoint"] = str(path)
            self.roles.sync_weights(self.done_steps)
        logger.info("resumed from %s after step %d", path, self.done_steps)
        if self.config.eval_only:
            self.evaluate("after", self.done_steps)
        elif self.unreported:
            self.after_step()

    def state_dict(self) -> dict[str, Any]:
        """Everything outside the models that the next step depends on."""
        return {
            "step": self.done_steps,
            "unreported": self.unreported,
            "bad_steps": self.bad_steps,
            "score_stats": self.score_stats.state_dict(),
            "kl_controller": self.kl_controller.state_dict(),
            "rng": rng_state(),
            "eval": self.session.summary["eval"],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done_steps = state["step"]
        self.unreported = state["unreported"]
        self.bad_steps = state["bad_steps"]
        self.score_stats.load_state_dict(state["score_stats"])
        self.kl_controller.load_state_dict(state["kl_controller"])
        restore_rng_state(state["rng"])
        self.session.summary["eval"] = state["eval"]
        self.session.summary["steps"] = self.done_steps

    def _count_bad_steps(self, *histories: list[Metrics]) -> None:
        """Counts the optimizer steps in a row that some trained role had to skip."""
        for metrics in zip_longest(*histories, fillvalue={}):
            skipped = any(value for of_role in metrics for name, value in of_role.items() if name.endswith(SKIPPED))
            self.bad_steps = self.bad_steps + 1 if skipped else 0
        if self.bad_steps:
            logger.warning(
                "the loss or its gradient was not finite: %d optimizer steps in a row skipped", self.bad_steps
            )

    def _check_divergence(self) -> None:
        if self.bad_steps >= self.config.max_bad_steps:
            bad_steps, self.bad_steps = self.bad_steps, 0  # whoever resumes, with a change, has all tries again
            raise TrainingDivergedError(
                f"{bad_steps} optimizer steps in a row had a NaN or infinite loss or gradient "
                f"(max_bad_steps={self.config.max_bad_steps}); the weights are those before them"
            )


def set_losses(roles: Roles, config: RLConfig) -> None:
    """Gives the trained roles their losses."""
    roles.actor.call("set_loss", build_policy_loss, config, config.total_optimizer_steps)
    if roles.critic is not None:
        roles.critic.call("set_loss", build_value_loss, config)


def _with_scores(batch: Batch, roles: Mapping[str, ModelCluster | WithoutAdapter | None]) -> Batch:
    """The batch with the columns that each role computes, named by the first of them; the roles work side by side."""
    pending = {name: (role, role.submit_logprobs(batch)) for name, role in roles.items() if role is not None}
    columns: dict[str, Tensor | None] = {}
    for name, (role, submitted) in pending.items():
        scores = role.gather_scores(batch, *submitted)
        columns[name] = scores.values_T if name == "values_T" else scores.logprobs_T
        if name == "ref_logprobs_T":
            columns["ref_hidden_TH"] = scores.hidden_TH
        elif name == "old_logprobs_T":
            columns["kl_T"] = scores.kl_T
    return batch.replace(**columns)


def _mean_metrics(history: list[Metrics]) -> Metrics:
    """Means over the optimizer steps; what counts skipped steps is summed."""
    names = {name for metrics in history for name in metrics}
    result = {}
    for name in names:
        values = [metrics[name] for metrics in history if name in metrics]
        result[name] = sum(values) if name.endswith(SKIPPED) else sum(values) / len(values)
    return result
