"""One optimizer step after another on a fixed set of samples, measured on others and by answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from roll.algorithms.types import LossContext, LossFn, TokenScores
from roll.configs.offline import OfflineConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics
from roll.pipeline.loop import TrainingLoop, mean_metrics
from roll.pipeline.offline.training import OfflineTraining
from roll.pipeline.prompt_roles import PromptRoles
from roll.pipeline.rlvr.metrics import accuracy_metrics, check_error_rates
from roll.pipeline.roles import Roles
from roll.pipeline.rollouts import MAX_SHOWN, collect, keep_episodes
from roll.pipeline.session import RunSession
from roll.report.answers import save_answers
from roll.rollout.metrics import rollout_metrics
from roll.utils.signals import SignalGuard

_OF_REWARDS = ("success", "reward", "task_reward", "penalty", "valid_rate")
"""Ends of the names of metrics that mean nothing where no verifier has judged."""


class OfflinePipeline(TrainingLoop):
    """Trains on samples that are there before the run (see ``TrainingLoop``).

    Args:
        training: the optimizer steps; ``None`` with ``eval_only``.
        held_out: samples that are measured, if there are any.
        prompts: has held-out questions answered, if something generates.
    """

    config: OfflineConfig
    area: ClassVar[str]
    """Start of the names of the training metrics."""
    shown: ClassVar[Mapping[str, str]]
    """Metrics of ``measure_held_out`` that the run's summary keeps: the name there, and the metric."""

    def __init__(
        self,
        config: OfflineConfig,
        session: RunSession,
        roles: Roles,
        signals: SignalGuard,
        training: OfflineTraining | None,
        held_out: Batch | None,
        prompts: PromptRoles | None,
    ) -> None:
        super().__init__(config, session, roles, signals)
        self.training = training
        self.held_out = held_out
        self.prompts = prompts

    @abstractmethod
    def measure_held_out(self, batch: Batch) -> Metrics:
        """Metrics of the held-out samples, ``eval/…``."""

    @abstractmethod
    def said(self, metrics: Metrics) -> str:
        """The same in words."""

    def as_one_step(self, loss: LossFn, scores: TokenScores, batch: Batch) -> Metrics:
        """The training metrics, ``eval/…``, of held-out samples as one optimizer step."""
        found = loss(scores, batch, LossContext.of(batch)).metrics
        return {name.replace(f"{self.area}/", "eval/"): float(value) for name, value in found.items()}

    def step(self, step: int) -> None:
        assert self.training is not None, "eval_only takes no step"
        with self.signals.deferred():  # a stop in here waits: half an update cannot be saved
            with self.update(step), self.session.phase("train") as span:
                history = self.training.train(step, step)
                self.count_bad_steps(history)
                self.utilisation.trained(span, self.training.batch(step))
            metrics = mean_metrics(history) | self.roles.offload_manager.memory("train")
            self.unreported = metrics | {f"{self.area}/epoch": self.training.epochs(step)}

    def evaluate(self, name: str, step: int) -> Metrics:
        """Measures the held-out samples, and has their last questions answered."""
        metrics: Metrics = {}
        words = []
        if self.held_out is not None:
            with self.session.phase("eval"):
                metrics |= self.measure_held_out(self.held_out)
            words.append(self.said(metrics))
        if self.prompts is not None:
            with self.session.phase("eval answers"):
                metrics |= self._answer(self.prompts, step)
        if "eval/success" in metrics:
            words.append(f"accuracy of answers {metrics['eval/success']:.1%}")
        if name != "step":
            shown = {**self.shown, "success": "eval/success"}
            self.session.summary["eval"][name] = {
                key: metrics[metric] for key, metric in shown.items() if metric in metrics
            } | {"episodes": int(metrics.get("eval/episodes", 0))}
        if words:
            self.session.display.note(f"evaluation {name} (step {step}): {', '.join(words)}")
        return metrics

    def _answer(self, prompts: PromptRoles, step: int) -> Metrics:
        assert prompts.val is not None, "a generator comes with held-out data"
        config = self.config
        scored = bool(config.rewards)
        groups = collect(self.session, prompts.val, prompts.num_val_prompts, step)
        episodes = keep_episodes(self.session, step, groups)
        save_answers(episodes[:MAX_SHOWN], self.session.renders, step, scored=scored)
        metrics = rollout_metrics(groups, "eval")
        if scored:
            check_error_rates(groups, config)
            return metrics | accuracy_metrics(groups, config.num_val_samples, "eval")
        return {key: value for key, value in metrics.items() if not key.endswith(_OF_REWARDS)}
