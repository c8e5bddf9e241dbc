"""Rollouts that continue while the policy trains: their age, idle times, recording, replay and checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path

from roll.algorithms.correction import mismatch_by_lag
from roll.algorithms.shaping import with_old_policy
from roll.configs.rl import RLConfig
from roll.data.batch import Batch
from roll.distributed.cluster.errors import ClusterError
from roll.distributed.strategy.base import Metrics
from roll.pipeline.roles import Roles
from roll.pipeline.session import RunFailedError
from roll.rollout.admission import Admission
from roll.rollout.metrics import overlap_metrics
from roll.rollout.schedule import step_record
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.types import Collected
from roll.tracking.run import RunFolder

logger = logging.getLogger(__name__)


class Overlap:
    """All that a step does because rollouts overlap with training (``async_generation_ratio``).

    Args:
        rollouts: plays the training groups.
        admission: which of them start, and which a step takes.
        folder: gets the schedule.
    """

    def __init__(
        self, config: RLConfig, roles: Roles, rollouts: RolloutScheduler, admission: Admission, folder: RunFolder
    ) -> None:
        self._config = config
        self._replicas = roles.rollout_replicas
        self._rollouts = rollouts
        self._admission = admission
        self._folder = folder
        # The trainer is idle while it neither scores, trains nor sends weights, the generator while nothing is asked.
        self._idle = {"trainer": roles.actor.cluster, "generator": roles.infer}

    def start_step(self) -> None:
        """Starts to count the seconds in which workers are idle."""
        for cluster in self._idle.values():
            cluster.submit("take_idle_s")

    def idle_metrics(self) -> Metrics:
        """``async/idle_<who>_s`` since ``start_step``, means over the workers; none of a role with a dead worker."""
        pending = {name: cluster.submit("take_idle_s") for name, cluster in self._idle.items()}
        metrics: Metrics = {}
        for name, refs in pending.items():
            try:
                seconds: list[float] = self._idle[name].gather(refs, call="take_idle_s")
            except ClusterError as error:
                logger.debug("no idle seconds: %s", error)
                continue
            metrics[f"async/idle_{name}_s"] = sum(seconds) / len(seconds)
        return metrics

    def record(self, collected: Collected) -> None:
        """Writes a line of ``schedule.jsonl``: what the step has taken."""
        self._folder.log_schedule(step_record(self._admission, collected))

    def lag_metrics(self, batch: Batch, version: int) -> Metrics:
        """See ``overlap_metrics``."""
        return overlap_metrics(batch, self._admission, version)

    def mismatch_metrics(self, batch: Batch) -> Metrics:
        """See ``mismatch_by_lag``; nothing with ``bypass``, where both columns are the sampler's."""
        correction = self._config.train_infer_correction
        if correction.bypass:
            return {}
        return mismatch_by_lag(with_old_policy(batch), self._admission.step - 1, correction)

    def before_update(self, version: int) -> None:
        """Waits for what has to be sampled before new weights come: all of it, or what the replayed run had."""
        if (last := self._replicas.version) == version:
            return
        if (replay := self._rollouts.replay) is not None:
            num_tokens = replay.num_tokens(last)
            self._replicas.prepare()  # on shared devices the tokens that are due are sampled in this turn
            self._rollouts.wait_until(lambda: sum(self._replicas.cluster.call("num_recorded", last)) >= num_tokens)
        elif not self._config.partial_rollout:
            self._replicas.drain()

    def finished(self) -> Collected:
        """Groups that wait for a step, for a checkpoint."""
        return self._rollouts.finished(self._admission)

    @staticmethod
    def save(path: Path, finished: Collected) -> None:
        if finished.groups or finished.rejected:
            finished.save(path / "resume")

    def restore(self, path: Path, done_steps: int) -> None:
        """Takes up the groups of a checkpoint, and leaves out of a replay what was played before it.

        Raises:
            RunFailedError: the replay needs weights that are gone.
        """
        self._rollouts.restore(self._admission, Collected.load(path / "resume"))
        if (replay := self._rollouts.replay) is None:
            return
        played = set(range(self._admission.next_draw)).difference(self._admission.again)
        self._rollouts.replay = replay = replay.without(played)
        if (first := replay.first_version) is not None and first < done_steps:
            raise RunFailedError(
                f"replay_schedule: groups taken after step {done_steps} were sampled with weights of version {first}, "
                "which no longer exist; start over, or from a step at which the recorded run was resumed"
            )
