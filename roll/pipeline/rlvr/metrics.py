"""Statistics of answers and scores: accuracy over several samples, rewards by domain, which groups to train on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from roll.configs.prompts import PromptsConfig
from roll.pipeline.session import RunFailedError
from roll.rewards.accuracy import Judged, figures_at_k
from roll.rollout.metrics import mean
from roll.rollout.types import OVER_BUDGET, RolloutGroup


class RewardFailureError(RunFailedError):
    """Too many answers could not be scored."""


def accuracy_metrics(groups: Sequence[RolloutGroup], num_samples: int, prefix: str) -> dict[str, float]:
    """``figures_at_k`` over prompts, for all and, with several tags, for each.

    Prompts of which no answer could be scored are left out; one with fewer than n counts with those it has.
    """
    answered = [group for group in groups if group.trajectories]
    if not answered:
        return {}
    metrics = _accuracy(answered, num_samples, prefix)
    tags = sorted({group.tag for group in answered})
    if len(tags) > 1:
        for tag in tags:
            metrics |= _accuracy([group for group in answered if group.tag == tag], num_samples, f"{prefix}/{tag}")
    return metrics


def _accuracy(groups: Sequence[RolloutGroup], n: int, prefix: str) -> dict[str, float]:
    prompts = [
        [Judged(t.score, t.success, t.turns[-1].action, t.knows_actions) for t in group.trajectories]
        for group in groups
    ]
    return {f"{prefix}/{name}": value for name, value in figures_at_k(prompts, n).items()}


def reward_metrics(groups: Sequence[RolloutGroup], config: PromptsConfig) -> dict[str, float]:
    """Per domain: ``score``, ``accuracy``, ``errors`` (answers without a reward), and the verifiers' own numbers.

    ``over_budget``, per domain and in all, are answers that count as wrong because they cost too much to judge.
    """
    metrics: dict[str, float] = {"reward/over_budget": 0.0}
    for name, of_domain in _by_domain(groups, config).items():
        trajectories = [trajectory for group in of_domain for trajectory in group.trajectories]
        metrics[f"reward/{name}/errors"] = float(sum(group.dropped for group in of_domain))
        over = float(sum(OVER_BUDGET in trajectory.info for trajectory in trajectories))
        metrics[f"reward/{name}/over_budget"] = over
        metrics["reward/over_budget"] += over
        if not trajectories:
            continue
        metrics[f"reward/{name}/score"] = mean(trajectory.score for trajectory in trajectories)
        metrics[f"reward/{name}/accuracy"] = mean(trajectory.success for trajectory in trajectories)
        parts: defaultdict[str, list[float]] = defaultdict(list)
        for trajectory in trajectories:
            for part, value in trajectory.info.items():
                if "/" in part and isinstance(value, int | float):
                    parts[part].append(float(value))
        metrics |= {f"reward/{name}/{part}": mean(values) for part, values in parts.items()}
    return metrics


def check_error_rates(groups: Sequence[RolloutGroup], config: PromptsConfig) -> None:
    """Stops the run where too many answers of a domain could not be scored.

    Raises:
        RewardFailureError: the share is above the domain's ``max_error_rate``.
    """
    for name, of_domain in _by_domain(groups, config).items():
        failed = sum(group.dropped for group in of_domain)
        total = failed + sum(len(group.trajectories) for group in of_domain)
        limit = config.rewards[name].max_error_rate
        if total and failed / total > limit:
            last = next(group.errors[-1] for group in reversed(of_domain) if group.errors)
            raise RewardFailureError(
                f"rewards.{name}: {failed} of {total} answers could not be scored, more than max_error_rate={limit:g}; "
                f"the last error: {last}"
            )


def _by_domain(groups: Iterable[RolloutGroup], config: PromptsConfig) -> dict[str, list[RolloutGroup]]:
    domains = config.domains
    found: defaultdict[str, list[RolloutGroup]] = defaultdict(list)
    for group in groups:
        found[domains[group.tag]].append(group)
    return dict(sorted(found.items()))
