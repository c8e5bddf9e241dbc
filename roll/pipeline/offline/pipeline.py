"""Optimizer steps on a fixed dataset, evaluated on held-out samples and responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from roll.algorithms.types import LossContext, LossFn, TokenScores
from roll.configs.offline import OfflineConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics
from roll.pipeline.loop import TrainingLoop, mean_metrics
from roll.pipeline.offline.training import OfflineTraining, Prepare
from roll.pipeline.prompts import PromptRolloutWorkers, accuracy_metrics, check_error_rates
from roll.pipeline.rollouts import MAX_SHOWN, collect, keep_episodes
from roll.pipeline.start import RunContext
from roll.report.page import save_answers
from roll.rollout.metrics import rollout_metrics
from roll.utils.hashing import derive_seed

_OF_REWARDS = ("success", "reward", "task_reward", "penalty", "valid_rate")
"""Ends of the names of metrics that mean nothing where no verifier has judged."""


@dataclass(frozen=True)
class Parts:
    """Parts that a pipeline is made of."""

    run: RunContext
    """Its roles are set up with the starting weights."""
    train: Batch | None
    """``None`` with ``eval_only``."""
    held_out: Batch | None
    """Samples that are measured, if there are any."""
    prompts: PromptRolloutWorkers | None
    """Has held-out questions answered, if something generates."""
    model_path: str
    """Folder of the starting weights."""
    teacher_path: str | None
    """Folder or hub name of the teacher, where there is one."""


class OfflinePipeline(TrainingLoop):
    """Trains on a fixed dataset (see ``TrainingLoop``).

    Args:
        build_loss: makes the loss of its further arguments, here and in the trainers.
        prepare: see ``OfflineTraining``.
    """

    config: OfflineConfig
    area: ClassVar[str]
    """Start of the names of the training metrics."""
    order: ClassVar[str] = ""
    """Name of the order of the samples, which separates it from others of the run's seed; else ``area``."""
    shown: ClassVar[Mapping[str, str]]
    """Metrics of ``measure_held_out`` that the run's summary keeps: the name there, and the metric."""
    words: ClassVar[Mapping[str, str]]
    """The same for people: the metric without ``eval/``, and a text with a place for its value."""

    def __init__(
        self,
        config: OfflineConfig,
        parts: Parts,
        build_loss: Callable[..., LossFn],
        *loss_args: Any,
        prepare: Prepare | None = None,
    ) -> None:
        super().__init__(config, parts.run.session, parts.run.roles, parts.run.signals)
        self.held_out, self.prompts = parts.held_out, parts.prompts
        self.loss = build_loss(*loss_args)
        self.training: OfflineTraining | None = None
        if parts.train is not None:
            self.training = OfflineTraining(
                self.roles.actor,
                parts.train,
                build_loss,
                *loss_args,
                batch_size=config.actor_train.global_train_batch_size,
                max_steps=config.max_steps,
                seed=derive_seed(config.seed, self.order or self.area),
                prepare=prepare,
            )

    def measure_held_out(self, batch: Batch) -> Metrics:
        """Metrics of the held-out samples, ``eval/…``: those of one optimizer step on all of them."""
        return self.as_one_step(self.roles.actor.logprobs(batch), batch)

    def as_one_step(self, scores: TokenScores, batch: Batch) -> Metrics:
        """The training metrics, ``eval/…``, of held-out samples as one optimizer step."""
        found = self.loss(scores, batch, LossContext.of(batch)).metrics
        return {name.replace(f"{self.area}/", "eval/"): float(value) for name, value in found.items()}

    def step(self, step: int) -> None:
        assert self.training is not None, "eval_only takes no step"
        with self.signals.deferred():  # a stop in here waits: half an update cannot be saved
            with self.update(step), self.session.phase("train") as span:
                history = self.training.train(step, step)
                self.count_bad_steps(history)
                self.utilisation.trained(span, self.training.batch(step), metrics=mean_metrics(history))
            metrics = mean_metrics(history) | self.roles.offload_manager.memory("train")
            self.unreported = metrics | {f"{self.area}/epoch": self.training.epochs(step)}

    def evaluate(self, name: str, step: int) -> Metrics:
        """Measures the held-out samples, and has their last questions answered."""
        metrics: Metrics = {}
        words = []
        if self.held_out is not None:
            with self.session.phase("eval"):
                metrics |= self.measure_held_out(self.held_out)
            words += [
                text.format(metrics[f"eval/{key}"]) for key, text in self.words.items() if f"eval/{key}" in metrics
            ]
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

    def _answer(self, prompts: PromptRolloutWorkers, step: int) -> Metrics:
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
