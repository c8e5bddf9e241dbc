"""The SFT pipeline: one optimizer step after another on conversations, measured on others."""

from __future__ import annotations

import math

from roll.configs.sft import SFTConfig
from roll.data.batch import Batch
from roll.distributed.strategy.base import Metrics
from roll.pipeline.loop import TrainingLoop, mean_metrics
from roll.pipeline.model_cluster import ModelCluster
from roll.pipeline.prompt_roles import PromptRoles
from roll.pipeline.rlvr.metrics import accuracy_metrics, check_error_rates
from roll.pipeline.roles import Roles
from roll.pipeline.rollouts import MAX_WRITTEN, collect, keep_episodes
from roll.pipeline.session import RunSession
from roll.pipeline.sft.training import SupervisedTraining
from roll.report.answers import save_answers
from roll.rollout.metrics import rollout_metrics
from roll.utils.signals import SignalGuard

_OF_REWARDS = ("success", "reward", "task_reward", "penalty", "valid_rate")
"""Ends of the names of metrics that mean nothing where no verifier has judged."""


class SFTPipeline(TrainingLoop):
    """Trains a policy to imitate (see ``TrainingLoop``).

    Args:
        training: the optimizer steps; ``None`` with ``eval_only``.
        held_out: conversations whose likelihood is measured, if there are any.
        prompts: has held-out questions answered, if something generates.
    """

    config: SFTConfig

    def __init__(
        self,
        config: SFTConfig,
        session: RunSession,
        roles: Roles,
        signals: SignalGuard,
        training: SupervisedTraining | None,
        held_out: Batch | None,
        prompts: PromptRoles | None,
    ) -> None:
        super().__init__(config, session, roles, signals)
        self.training = training
        self.held_out = held_out
        self.prompts = prompts

    def step(self, step: int) -> None:
        assert self.training is not None, "eval_only takes no step"
        with self.signals.deferred():  # a stop in here waits: half an update cannot be saved
            with self.update(step), self.session.phase("train") as span:
                history = self.training.train(step, step)
                self.count_bad_steps(history)
                span.tokens = self.training.num_tokens(step)
            metrics = mean_metrics(history) | self.roles.offload_manager.memory("train")
            self.unreported = metrics | {"sft/epoch": self.training.epochs(step)}

    def evaluate(self, name: str, step: int) -> Metrics:
        """Measures the held-out conversations' likelihood, and has their last questions answered."""
        metrics: Metrics = {}
        if self.held_out is not None:
            with self.session.phase("eval"):
                metrics |= likelihood_metrics(self.roles.actor, self.held_out)
        if self.prompts is not None:
            with self.session.phase("eval answers"):
                metrics |= self._answer(self.prompts, step)
        if name != "step":
            shown = {
                "loss": "eval/loss",
                "perplexity": "eval/perplexity",
                "token_accuracy": "eval/token_accuracy",
                "accuracy": "eval/success",
            }
            self.session.summary["eval"][name] = {
                key: metrics[metric] for key, metric in shown.items() if metric in metrics
            } | {"episodes": int(metrics.get("eval/episodes", 0))}
        if metrics:
            said = [f"loss {metrics['eval/loss']:.4f}, perplexity {metrics['eval/perplexity']:.3f}"]
            shares = {"token accuracy": "eval/token_accuracy", "accuracy of answers": "eval/success"}
            said += [f"{words} {metrics[name]:.1%}" for words, name in shares.items() if name in metrics]
            self.session.display.note(f"evaluation {name} (step {step}): {', '.join(said)}")
        return metrics

    def _answer(self, prompts: PromptRoles, step: int) -> Metrics:
        assert prompts.val is not None, "a generator comes with held-out data"
        config = self.config
        scored = bool(config.rewards)
        groups = collect(self.session, prompts.val, prompts.num_val_prompts, step)
        episodes = keep_episodes(self.session, step, groups)
        save_answers(episodes[:MAX_WRITTEN], self.session.renders, step, scored=scored)
        metrics = rollout_metrics(groups, "eval")
        if scored:
            check_error_rates(groups, config)
            return metrics | accuracy_metrics(groups, config.num_val_samples, "eval")
        return {key: value for key, value in metrics.items() if not key.endswith(_OF_REWARDS)}


def likelihood_metrics(model: ModelCluster, batch: Batch) -> Metrics:
    """How likely the tokens with loss mask 1 are.

    ``eval/loss`` is their mean negative log-likelihood (nats), ``eval/perplexity`` its exponential, and
    ``eval/token_accuracy`` the share of them that are the model's first choice, given the tokens before.
    """
    scores, said_T = model.logprobs(batch), batch.loss_mask_T
    assert scores.logprobs_T is not None, "a language model scores"
    loss = -float(scores.logprobs_T[said_T].double().mean())
    metrics = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0)), "eval/tokens": float(said_T.sum())}
    if scores.hit_T is not None:  # an engine of one's own may not tell
        metrics["eval/token_accuracy"] = float(scores.hit_T[said_T].double().mean())
    return metrics
