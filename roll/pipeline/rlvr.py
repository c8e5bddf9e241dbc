"""The RLVR pipeline: rollouts are responses to the prompts of a dataset."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from roll.algorithms.losses import policy_needs
from roll.algorithms.selection import best_and_worst
from roll.configs.batches import describe_batches
from roll.configs.rlvr import RLVRConfig
from roll.data.batch import Batch
from roll.data.prompts import PromptDataset
from roll.distributed.strategy.base import Metrics
from roll.pipeline.cli import EXIT_USAGE
from roll.pipeline.launch import launch
from roll.pipeline.programs import RLVR
from roll.pipeline.prompts import (
    Datasets,
    PromptRolloutWorkers,
    accuracy_metrics,
    check_error_rates,
    load_datasets,
    make_data,
    prompt_workers,
    reward_metrics,
)
from roll.pipeline.rl import RLPipeline, set_losses
from roll.pipeline.rollouts import MAX_SHOWN, keep_episodes, passes_filter, play_held_out
from roll.pipeline.start import RunContext
from roll.pipeline.teachers import PrivilegedTeacher, teacher_prompts
from roll.preflight.templates import policy_renderer
from roll.report.render import save_answers
from roll.rewards.scorer import best_reward
from roll.rollout.types import OVER_BUDGET, Collected, RolloutGroup, figures_of


class RLVRPipeline(RLPipeline):
    """Trains a policy on prompts whose answers can be verified (see ``RLPipeline``)."""

    config: RLVRConfig
    rollout_workers: PromptRolloutWorkers
    filter_hint = (
        "the prompts are too easy or too hard for the policy: loosen rewards.*.query_filter_config, or change the data"
    )

    def wants(self, group: RolloutGroup) -> bool:
        return passes_filter(group, self.config.rewards[self.config.domains[group.tag]].query_filter_config)

    def check_groups(self, groups: Sequence[RolloutGroup]) -> None:
        check_error_rates(groups, self.config)

    def best_reward(self, tag: str) -> float | None:
        return None if self.config.user is not None else best_reward(self.config.rewards[self.config.domains[tag]])

    def most_tokens(self, tag: str) -> int:
        return self.config.train_sampling.max_new_tokens or self.config.response_length

    def more_metrics(self, collected: Collected) -> Metrics:
        finished = [*collected.groups, *collected.rejected]
        self._tell_over_budget(finished)
        epoch = self.rollout_workers.epoch_of(1 + max(group.group_id for group in finished))
        prompts = [figures_of(group.trajectories[0].turns[0]).prompt for group in finished if group.trajectories]
        found = {"rollout/epoch": epoch, "rollout/duplicate_prompts": 1 - len(set(prompts)) / max(1, len(prompts))}
        return reward_metrics(finished, self.config) | self.rollout_workers.take_retries() | found

    def _tell_over_budget(self, groups: Sequence[RolloutGroup]) -> None:
        reasons = [t.info[OVER_BUDGET] for group in groups for t in group.trajectories if OVER_BUDGET in t.info]
        if reasons:
            self.session.display.note(
                f"{len(reasons)} responses are too expensive to judge and count as wrong; the last: {reasons[-1]}"
            )

    def choose(self, batch: Batch) -> tuple[Batch, Metrics]:
        return super().choose(batch) if self.config.online_dpo is None else best_and_worst(batch)

    def evaluate(self, name: str, step: int) -> Metrics:
        """Answers the held-out prompts, see ``play_held_out``."""
        prompts = self.rollout_workers
        if prompts.val is None:
            return {}
        greedy = None if self.config.val_sampling.is_greedy else prompts.val_greedy
        groups, metrics = play_held_out(
            self.session, name, step, prompts.num_val_prompts, prompts.val, greedy, self.check_groups
        )
        metrics |= accuracy_metrics(groups, self.config.num_val_samples, "eval")
        metrics["eval/attained"] = self.attained(groups)
        if name != "step":
            self.session.summary["eval"][name] = {
                "accuracy": metrics["eval/success"],
                "accuracy_greedy": metrics["eval_greedy/success"],
                "reward": metrics["eval/reward"],
                "format_rate": metrics.get("eval/valid_rate"),
                "prompts": len(groups),
                "episodes": int(metrics["eval/episodes"]),
            } | {key.removeprefix("eval/"): value for key, value in metrics.items() if "@" in key}
        self._tell_over_budget(groups)
        save_answers(keep_episodes(self.session, step, groups)[:MAX_SHOWN], self.session.renders, step)
        valid = metrics.get("eval/valid_rate")
        found = "" if valid is None else f"an answer found in {valid:.1%} of "
        self.session.display.note(
            f"evaluation {name} (step {step}): accuracy {metrics['eval/success']:.1%}, "
            f"{found}{metrics['eval/episodes']:.0f} responses to {len(groups)} prompts"
        )
        return metrics


def run_rlvr(config: RLVRConfig, started: float | None = None) -> int:
    """Runs the RLVR pipeline to its end and returns the exit code, see ``launch``; 2 for wrong data."""
    try:
        if config.data_generator is not None:
            make_data(config.data_generator)
        datasets = load_datasets(config, policy_renderer(config))
    except (OSError, ValueError) as error:  # a DataError is a ValueError
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    config = config if datasets.train is None else config.with_length(len(datasets.train))
    notes = [*describe_batches(config), *datasets.describe()]
    body, workers, needs = partial(_run, datasets=datasets), prompt_workers(config), policy_needs(config)
    data = datasets.identities()
    return launch(config, RLVR, body, workers, needs=needs, notes=notes, started=started, data=data)


def _run(config: RLVRConfig, run: RunContext, *, datasets: Datasets[PromptDataset]) -> None:
    roles, prompts = run.roles, PromptRolloutWorkers(config, run, datasets.train, datasets.val)
    roles.pictures = datasets.have_pictures or bool(config.showing)
    prompts.begin_setup()
    with run.set_up(config, prompts):
        if (writer := teacher_prompts(config, policy_renderer(config))) is not None:
            assert roles.teacher is not None, "a rule"
            roles.teacher = PrivilegedTeacher(roles.teacher, lambda group: writer.ids(prompts.drawn(group)))
        set_losses(roles, config)
    RLVRPipeline(config, run, prompts).run()
