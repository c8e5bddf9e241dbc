"""Reinforcement learning: the training step on one screen.

    sync weights → rollout → log-probs → reward shaping → advantages → train → checkpoint → track

A pipeline differs from another only in where its rollouts come from and in what it evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from roll.algorithms.advantages import advantage_metrics, compute_advantages
from roll.algorithms.correction import MISMATCH, mismatch_by_lag, mismatch_metrics, replay_metrics
from roll.algorithms.distillation import (
    clip_metrics,
    no_advantages,
    teacher_advantages,
    teacher_metrics,
    teacher_rewards,
)
from roll.algorithms.gae import value_mask
from roll.algorithms.kl import KlController
from roll.algorithms.losses import build_policy_loss, build_value_loss
from roll.algorithms.pairing import telling_pairs
from roll.algorithms.rewards import apply_kl_penalty, mean_kl, shape_rewards, whiten_token_rewards
from roll.algorithms.selection import drop_masked_episodes, select_for_policy
from roll.algorithms.statistics import RunningStats
from roll.configs.divergence import DivergenceConfig
from roll.configs.rl import RLConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics
from roll.pipeline.idleness import Idleness
from roll.pipeline.loop import TrainingLoop, mean_metrics
from roll.pipeline.model_cluster import Scorer, plan_optimizer_steps, rows_trained_later, steps_with_tokens
from roll.pipeline.roles import Roles
from roll.pipeline.rollout_roles import RolloutRoles
from roll.pipeline.rollouts import (
    Remarks,
    describe_failure,
    read_rollouts,
    remarks_on,
    take,
    write_rollouts,
    write_samples,
)
from roll.pipeline.session import RunFailedError
from roll.pipeline.start import Launched
from roll.pipeline.tagged_teachers import TaggedTeachers
from roll.pipeline.teaching import TEACHER_COLUMNS, with_teacher
from roll.rollout.admission import Admission
from roll.rollout.metrics import mean, overlap_metrics, sampled_tokens, step_metrics
from roll.rollout.rows import groups_to_batch
from roll.rollout.schedule import step_record
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.types import Collected, RolloutGroup
from roll.tracking.checkpointer import Write
from roll.utils.checksums import WrittenFile
from roll.utils.seeding import derive_seed

_DOUBT = 10
"""Steps between two evaluations of whether all is learned, where none are asked for by ``eval_steps``."""


class RLPipeline(TrainingLoop):
    """Trains a policy. Subclasses bring the rollouts, which ``players`` play."""

    config: RLConfig
    filter_hint: ClassVar[str] = "loosen the filter of groups, or change the data"
    """Advice where dynamic sampling turns down too many groups."""

    def __init__(self, config: RLConfig, run: Launched, players: RolloutRoles) -> None:
        super().__init__(config, run.session, run.roles, run.signals)
        self.players = players
        self.score_stats = RunningStats()
        self.parts = config.parts
        self.kl_controller = KlController.of(self.parts.kl.reward)
        self.kl_loss_controller = KlController.of(self.parts.kl.loss)
        self.admission = Admission(
            config.groups_per_step,
            config.groups_ahead,
            config.window,
            last_step=config.max_steps if config.overlaps else None,
        )
        """Choice of the groups that the next steps take."""
        self.idleness = Idleness(run.roles.actor.cluster, run.roles.infer) if config.overlaps else None
        self.remarks = Remarks()
        self.doubted = 0
        """The last step whose evaluation did not agree that all is learned."""
        self._seems = ""
        """Words of why the last step looked as if all was learned."""
        self.sampled_tokens = 0
        """Those of the step's rollouts."""

    @property
    def rollouts(self) -> RolloutScheduler:
        """Plays the training groups."""
        return self.players.train

    def rollout(self, step: int) -> tuple[Batch | None, Metrics]:
        """Takes the step's training batch: under the current weights, or those of ``async_generation_ratio`` ago.

        Returns:
            ``None`` in place of the batch where dynamic sampling has found no group to train on; and metrics.
        """
        config, collected = self.config, self.take(step)
        metrics = step_metrics(collected, filters=self.config.filters_groups) | self.more_metrics(collected)
        metrics["rollout/attained"] = self.attained([*collected.groups, *collected.rejected])
        if not collected.groups:
            return None, metrics
        return groups_to_batch(collected.groups, config.tags, config.gdpo_reward_keys), metrics

    def more_metrics(self, collected: Collected) -> Metrics:
        """Metrics of a step's rollouts beside those of every pipeline."""
        return {}

    def best_reward(self, tag: str) -> float | None:
        """The best reward of an episode; ``None`` where that is not known."""
        return None

    def most_tokens(self, tag: str) -> int:
        """The most tokens of one answer in training."""
        return self.config.response_length

    def attained(self, groups: Sequence[RolloutGroup]) -> float:
        """Mean reward as a share of the best possible; where that is not known a success counts as 1."""
        best = {group.tag: self.best_reward(group.tag) for group in groups}
        return mean(
            episode.score / highest if (highest := best[group.tag]) else episode.success
            for group in groups
            for episode in group.trajectories
        )

    def wants(self, group: RolloutGroup) -> bool:
        """Tells whether dynamic sampling keeps a group: each, here."""
        return True

    def check_groups(self, groups: Sequence[RolloutGroup]) -> None:
        """Raises where too much went wrong in the groups that a step or an evaluation has finished."""

    def take(self, step: int) -> Collected:
        """Takes the step's groups, see ``roll.pipeline.rollouts.take``, and notes which they were.

        Raises:
            RunFailedError: dynamic sampling found too few groups worth training on, or see ``check_groups``.
        """
        config = self.config
        self.session.summary.setdefault("first_rollout_s", self.session.elapsed())
        max_batches = config.max_filtered_batches if self.config.filters_groups else None
        if (source := config.rollout_replay_dir) is not None:
            collected = self.rollouts.take_found(self.admission, step, read_rollouts(source, step), max_batches)
        else:
            collected = take(
                self.session,
                self.rollouts,
                self.admission,
                step,
                "train on",
                self.check_groups,
                accept=self.wants,
                max_batches=max_batches,
                goes_on=self._all_wrong,
            )
        if not collected.groups and self._all_wrong(collected.rejected):
            raise RunFailedError(
                f"dynamic sampling: none of {len(collected.rejected)} groups is worth training on "
                f"(max_filtered_batches={config.max_filtered_batches}): "
                f"{describe_failure(collected.rejected, self.most_tokens)}; {self.filter_hint}"
            )
        if config.rollout_dump_dir is not None:
            write_rollouts(config.rollout_dump_dir, step, collected)
        if (count := config.num_written_groups) > 0:
            self.session.aside(partial(write_samples, self.session.folder, step, collected, count))
        if config.overlaps:
            self.session.folder.log_schedule(step_record(self.admission, collected))
        self._look_at(step, collected)
        return collected

    def _all_wrong(self, groups: Sequence[RolloutGroup]) -> bool:
        """Tells whether there are episodes and none is a success, nor are their rewards near the best possible."""
        episodes = [episode for group in groups for episode in group.trajectories]
        enough = self.config.learned_share or 1.0
        return bool(episodes) and not any(each.success for each in episodes) and self.attained(groups) < enough

    def _look_at(self, step: int, collected: Collected) -> None:
        """Remarks what is wrong with the rollouts of a step, and looks whether there is anything left to learn."""
        config, finished = self.config, [*collected.groups, *collected.rejected]
        self.sampled_tokens = sampled_tokens(finished)
        short = len(collected.groups) < config.groups_per_step
        compares = not config.filters_groups and config.estimator.compares
        for kind, text in remarks_on(step, collected, config.groups_per_step, self.most_tokens, compares=compares):
            self.remarks.make(kind, text)
        self.looks_learned = (
            short
            and config.learned_share is not None
            and self.attained(finished) >= config.learned_share
            and (not self.doubted or step - self.doubted >= (config.eval_steps or _DOUBT))
        )
        if self.looks_learned:
            self._seems = f"{self.attained(finished):.1%} attained in all that step {step} sampled"

    def confirm(self, metrics: Metrics) -> str | None:
        """See ``TrainingLoop``: held-out episodes attain the share ``learned_share`` too."""
        enough, found = self.config.learned_share, metrics.get("eval/attained")
        step = self.done_steps
        if found is not None and enough is not None and found >= enough:
            return f"learned: {self._seems}, {found:.1%} held out (learned_share={enough:g})"
        self.doubted = step
        if found is not None:
            self.session.display.note(f"{self._seems}, but {found:.1%} held out: the run goes on")
        return None

    def publish(self, version: int) -> None:
        replicas = self.roles.rollout_replicas
        if (last := replicas.version) != version:
            if (replay := self.rollouts.replay) is not None:
                num_tokens = replay.num_tokens(last)
                replicas.prepare()  # on shared devices the tokens that are due are sampled in this turn
                self.rollouts.wait_until(lambda: sum(replicas.cluster.call("num_recorded", last)) >= num_tokens)
            elif not self.config.partial_rollout:
                replicas.drain()
        super().publish(version)

    def run(self) -> None:
        try:
            super().run()
        finally:
            if not self.config.eval_only:
                self.rollouts.close()
        if not (self.config.eval_only or self.admission.num_trained or self.learned):
            raise RunFailedError(
                f"dynamic sampling: no step found a group worth training on, so that nothing was trained; "
                f"{self.filter_hint}"
            )

    def step(self, step: int) -> None:
        """One step of reinforcement learning; its metrics are left in ``unreported``."""
        phase = self.session.phase
        if self.idleness is not None:
            self.idleness.start()
        with phase("sync"):
            if (step - 1) % self.config.actor_train.model_update_frequency == 0:
                self.publish(step - 1)
        with phase("rollout") as span:
            self.roles.rollout_replicas.prepare()
            batch, metrics = self.rollout(step)
            self.utilisation.generated(span, self.sampled_tokens, beside=self.config.overlaps)
            if self.config.overlaps and batch is not None:
                metrics |= overlap_metrics(batch, self.admission, step - 1)
        metrics |= self.roles.offload_manager.memory("rollout")
        if batch is None:
            with self.signals.deferred(), self.update(step):
                self.session.summary["draws"] = self.rollouts.commit(self.admission)
            self.unreported = metrics
            return
        batch, choice_metrics = self.choose(batch)
        metrics |= choice_metrics
        with phase("logprobs") as span:
            steps = self.plan_training(batch, step)
            metrics |= batch.balance(self.roles.actor.dp_size, self.roles.actor.linear)
            old_rows = self.rows_with_old_logprobs(batch, steps)
            batch = self.score(batch, old_rows)
            self.utilisation.scored(span, batch, None if self.roles.others_score else old_rows)
            metrics |= replay_metrics(batch)
        with self.signals.deferred():  # a stop in here waits: half an update cannot be saved
            with phase("advantage"):
                batch, shaping_metrics = self.shape(batch)
            with self.update(step), phase("train") as span:
                train_metrics = self.train(batch, steps, step) | self.roles.offload_manager.memory("train")
                self.session.summary["draws"] = self.rollouts.commit(self.admission)
                learnt = step > self.config.critic_warmup
                passes = self.config.ppo_epochs
                self.utilisation.trained(span, batch, passes, counts=learnt, metrics=train_metrics)
            if self.idleness is not None:
                metrics |= self.idleness.metrics()
            self.unreported = metrics | train_metrics | shaping_metrics  # whose mismatch is that of more rows

    def choose(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Chooses the part of the rollout that is scored and trained on: all of it."""
        return batch, {}

    def plan_training(self, batch: Batch, step: int) -> list[Tensor]:
        """The rows of each optimizer step; a batch that fell short makes fewer steps, not smaller ones."""
        samples = batch.samples if batch.pair_B is None else telling_pairs(batch)
        full, taken = self.config.groups_per_step, len(self.admission.taken)
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

    def score(self, batch: Batch, old_rows: Tensor) -> Batch:
        """Adds the log-probabilities of the training engine and the reference, and the critic's values.

        Roles on different devices work at the same time, but for the KL over the vocabulary the actor needs what the
        reference returns.
        """
        config, roles = self.config, self.roles
        if config.actor_train.router_replay.mode == "R3" and batch.experts_TE is None:
            raise ValueError(
                "actor_train.router_replay.mode: R3, but the rollouts hold no experts; expected disable or R2"
            )
        if config.bypasses_old_logprobs:
            batch = batch.replace(old_logprobs_T=batch.rollout_logprobs_T)
        actor = {"old_logprobs_T": roles.actor if len(old_rows) else None}
        others = {"ref_logprobs_T": roles.reference, "teacher_logprobs_T": roles.teacher, "values_T": roles.critic}
        if 0 < len(old_rows) < batch.num_sequences:
            batch = batch.replace(
                fresh_B=torch.ones(batch.num_sequences, dtype=torch.bool).index_fill(0, old_rows, False)
            )
        if not config.uses_full_kl:
            return _with_scores(batch, actor | others, old_rows, config.divergence)
        batch = _with_scores(batch, others, old_rows, config.divergence)
        if batch.ref_hidden_TH is None:
            raise ValueError(
                "kl_penalty: 'full', but the reference's strategy returns no hidden states; expected hf_infer or an "
                "fsdp2, deepspeed or megatron strategy, or an estimator such as k3"
            )
        batch = _with_scores(batch, actor, old_rows)
        # Hidden states are large: they travel on to the trainer only if its loss reads them.
        kl = self.parts.kl.loss
        in_loss = kl is not None and kl.penalty == "full"
        return batch if in_loss else batch.replace(ref_hidden_TH=None)

    def shape(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Normalises rewards, adds the KL penalty, computes advantages; an error on the way has changed no state."""
        scored, score_stats = _with_old_policy(batch), copy(self.score_stats)
        bypass = self.config.bypasses_old_logprobs  # both columns are then the sampler's
        metrics = {} if bypass else mismatch_metrics(scored)
        if self.config.overlaps and not bypass:
            metrics |= mismatch_by_lag(scored, self.admission.step - 1, self.parts.correction)
        batch, mask_metrics = drop_masked_episodes(batch, self.parts.selection)
        metrics |= mask_metrics
        batch, reward_metrics = shape_rewards(batch, self.parts.reward, score_stats)
        metrics |= reward_metrics
        if (kl := self.parts.kl.reward) is not None:
            batch, kl_metrics = apply_kl_penalty(batch, kl.penalty, self.kl_controller.coef)
            metrics |= kl_metrics
        taught = None if self.roles.teacher is None else self.config.opd_form
        if taught is not None:
            metrics |= clip_metrics(batch, self.config)
            if self.config.teacher_temperature == self.config.scoring_temperature:  # else the two are not comparable
                metrics |= teacher_metrics(batch)
            if isinstance(self.roles.teacher, TaggedTeachers):
                metrics |= self.roles.teacher.metrics(batch)
        if taught == "reward":
            batch = teacher_rewards(batch, self.config)
        if self.parts.reward.whiten:
            batch = whiten_token_rewards(batch)
        batch = (
            compute_advantages(batch, self.parts.advantage)
            if self.config.estimates_advantages
            else no_advantages(batch)
        )
        if taught == "advantage":
            batch = teacher_advantages(batch, self.config)
        metrics |= advantage_metrics(batch, self.parts.advantage)
        self.score_stats = score_stats
        if kl is not None:
            self.kl_controller.update(metrics["reward/kl"], len(batch.rows_with_loss))
        return batch, metrics

    def train(self, batch: Batch, steps: list[Tensor], step: int) -> Metrics:
        """Takes the optimizer steps of the actor and the critic, side by side where they have devices of their own."""
        policy_batch, selection_metrics = select_for_policy(
            batch, self.parts, seed=derive_seed(self.config.seed, "selection", step)
        )
        # Masks may leave nothing of a step, e.g. when its groups are solved: that is no failed step.
        policy_steps = steps_with_tokens(policy_batch, steps) if step > self.config.critic_warmup else []
        if self.config.kl_loss_target is not None:
            selection_metrics |= self._steer_kl_loss(batch)
        actor_refs = self.roles.actor.submit_train(policy_batch, policy_steps) if policy_steps else []
        unread = dict.fromkeys(("ref_hidden_TH", "experts_TE", *TEACHER_COLUMNS))
        value_batch = batch.replace(**unread).with_loss_mask(value_mask(batch, self.parts.advantage))
        value_steps = steps_with_tokens(value_batch, steps)
        critic = self.roles.critic if value_steps else None
        critic_refs = critic.submit_train(value_batch, value_steps) if critic else []
        history = self.roles.actor.gather_train(actor_refs) if actor_refs else []
        critic_history = critic.gather_train(critic_refs) if critic else []
        self.count_bad_steps(history, critic_history)
        # Only in the first optimizer step is the policy that trains the one that sampled.
        first = {name: value for name, value in (history[0] if history else {}).items() if name in MISMATCH}
        rest = [{name: value for name, value in each.items() if name not in MISMATCH} for each in history]
        return first | mean_metrics(rest) | mean_metrics(critic_history) | selection_metrics

    def _steer_kl_loss(self, batch: Batch) -> Metrics:
        """Trains this step with the coefficient as it is, and adapts it to the KL before the step."""
        config, controller, term = self.config, self.kl_loss_controller, self.parts.kl.loss
        assert term is not None
        kl = mean_kl(_with_old_policy(batch), term.penalty)
        metrics = {"actor/kl": kl, "actor/kl_loss_coef": controller.coef}
        current = config.model_copy(update={"kl_loss_coef": controller.coef})
        self.roles.actor.call("set_loss", build_policy_loss, current, config.total_optimizer_steps)
        controller.update(kl, len(batch.rows_with_loss))
        return metrics

    def snapshot(self) -> tuple[Write, dict[str, Any]]:
        with self.rollouts.halted():  # one cut through all draws
            write_models, state = super().snapshot()
            finished = self.rollouts.finished(self.admission) if self.config.overlaps else Collected([], [])
        if not (finished.groups or finished.rejected):
            return write_models, state

        def write(path: Path) -> Callable[[], Iterable[WrittenFile]] | None:
            finished.save(path / "resume")
            return write_models(path)

        return write, state

    def restore(self, path: Path) -> None:
        super().restore(path)
        if self.config.eval_only:
            return
        if self.config.overlaps:
            self.rollouts.restore(self.admission, Collected.load(path / "resume"))
        if (replay := self.rollouts.replay) is not None:
            played = set(range(self.admission.next_draw)).difference(self.admission.again)
            self.rollouts.replay = replay = replay.without(played)
            if (first := replay.first_version) is not None and first < self.done_steps:
                raise RunFailedError(
                    f"replay_schedule: of what is played after step {self.done_steps}, something was sampled with "
                    f"weights of version {first}, now gone; start anew, or from where the recorded run was resumed"
                )

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "score_stats": self.score_stats.state_dict(),
            "kl_controller": self.kl_controller.state_dict(),
            "kl_loss_controller": self.kl_loss_controller.state_dict(),
            "rollouts": self.admission.state_dict(keeps_groups=self.config.overlaps),
            "doubted": self.doubted,
            "seems": self._seems,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.config.eval_only:  # of a model that a run of any pipeline has saved
            return
        self.score_stats.load_state_dict(state["score_stats"])
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.kl_loss_controller.load_state_dict(state.get("kl_loss_controller", self.kl_loss_controller.state_dict()))
        self.admission.load_state_dict(state["rollouts"], keeps_groups=self.config.overlaps)
        self.doubted, self._seems = state.get("doubted", 0), state.get("seems", "")


def set_losses(roles: Roles, config: RLConfig) -> None:
    """Gives the trained roles their losses."""
    roles.actor.call("set_loss", build_policy_loss, config, config.total_optimizer_steps)
    if roles.critic is not None:
        roles.critic.call("set_loss", build_value_loss, config)


def _with_old_policy(batch: Batch) -> Batch:
    """The rows whose ``old_logprobs_T`` are known."""
    return batch if batch.fresh_B is None else batch.select((~batch.fresh_B).nonzero()[:, 0])


def _with_scores(
    batch: Batch,
    roles: Mapping[str, Scorer | None],
    old_rows: Tensor,
    divergence: DivergenceConfig | None = None,
) -> Batch:
    """The batch with the columns that each role computes, named by the first of them; the roles work side by side.

    Experts are chosen for the policy that trains alone: other models have routers of their own.
    """
    unrouted = batch.replace(experts_TE=None)
    pending = {
        name: role.submit_logprobs(*((batch, old_rows) if name == "old_logprobs_T" else (unrouted, None)))
        for name, role in roles.items()
        if role is not None
    }
    columns: dict[str, Tensor | None] = {}
    for name, wait in pending.items():
        scores = wait()
        if name == "teacher_logprobs_T":
            batch = with_teacher(batch, scores, divergence)
            continue
        columns[name] = scores.values_T if name == "values_T" else scores.logprobs_T
        if name == "ref_logprobs_T":
            columns["ref_hidden_TH"] = scores.hidden_TH
        elif name == "old_logprobs_T":
            columns["kl_T"] = scores.kl_T
            columns["squares_T"] = scores.squares_T
            if scores.experts_TE is not None:
                columns["experts_TE"] = scores.experts_TE
    return batch.replace(**columns)
