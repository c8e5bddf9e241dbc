"""Statistics of answers and scores: accuracy over several samples, rewards by domain, which groups to train on."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from roll.configs.prompts import PromptsConfig
from roll.pipeline.session import RunFailedError
from roll.rollout.metrics import mean
from roll.rollout.types import RolloutGroup, Trajectory

MAX_CHOICES = 100
"""Choices of k answers that ``maj@k`` looks at."""


class RewardFailureError(RunFailedError):
    """Too many answers could not be scored."""


def accuracy_metrics(groups: Sequence[RolloutGroup], num_samples: int, prefix: str) -> dict[str, float]:
    """mean@n, std@n, and pass@k, best@k, worst@k and maj@k over prompts, for all and, with several tags, for each.

    * ``mean@n``: share of correct answers.
    * ``std@n``, of n > 1: mean over prompts of the standard deviation of the scores (ddof 0).
    * ``pass@k``, k = 1, 2, 4 … n: chance that one of k answers is correct, estimated without bias from all n (Chen et
      al. 2021, "Evaluating Large Language Models Trained on Code").
    * ``best@k``, ``worst@k`` (of n > 1): mean over prompts of the best and the worst score of k answers, over all
      choices of k.
    * ``maj@k``: chance that the most frequent of k answers is correct, over all choices of k, or 100 of them where
      there are more; equally frequent ones share the vote, and responses in which no answer was found have none.

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
    correct = [[trajectory.success for trajectory in group.trajectories] for group in groups]
    scores = [[trajectory.score for trajectory in group.trajectories] for group in groups]
    ks = sorted({n} | {2**i for i in range(n.bit_length()) if 2**i <= n})
    several = [k for k in ks if k > 1 or n == 1]
    return {
        f"{prefix}/mean@{n}": mean(mean(each) for each in correct),
        **{f"{prefix}/pass@{k}": mean(pass_at_k(len(each), sum(each), k) for each in correct) for k in ks},
        **{f"{prefix}/best@{k}": mean(best_of_k(each, k) for each in scores) for k in several},
        **({f"{prefix}/std@{n}": mean(map(statistics.pstdev, scores))} if n > 1 else {}),
        **{f"{prefix}/worst@{k}": mean(-best_of_k([-x for x in each], k) for each in scores) for k in ks if k > 1},
        **{f"{prefix}/maj@{k}": mean(majority_of_k(group, k) for group in groups) for k in several},
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """``1 - C(n - c, k) / C(n, k)``; k is at most n."""
    k = min(k, num_samples)
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def best_of_k(scores: Sequence[float], k: int) -> float:
    """Mean over all choices of k scores of the largest; k is at most their number."""
    k, ascending = min(k, len(scores)), sorted(scores)
    ways = math.comb(len(scores), k)
    return sum(ascending[i] * (math.comb(i, k - 1) / ways) for i in range(k - 1, len(scores)))


def majority_of_k(group: RolloutGroup, k: int) -> float:
    """Mean of ``majority_correct`` over all choices of k answers, or over ``MAX_CHOICES`` drawn from a fixed seed."""
    answers = group.trajectories
    if k >= len(answers):
        return majority_correct(answers)
    if math.comb(len(answers), k) <= MAX_CHOICES:
        return mean(map(majority_correct, itertools.combinations(answers, k)))
    rng = random.Random(k)
    return mean(majority_correct(rng.sample(answers, k)) for _ in range(MAX_CHOICES))


def majority_correct(answers: Sequence[Trajectory]) -> float:
    """Share of the most frequent answers that are correct; 0 where no answer was found."""
    votes: defaultdict[str, list[bool]] = defaultdict(list)
    for trajectory in answers:
        answer = trajectory.turns[-1].action
        if answer is not None:
            votes[answer].append(trajectory.success)
    most = max(map(len, votes.values()), default=0)
    return mean(mean(outcomes) for outcomes in votes.values() if len(outcomes) == most)


def reward_metrics(groups: Sequence[RolloutGroup], config: PromptsConfig) -> dict[str, float]:
    """Per domain: ``score``, ``accuracy``, ``errors`` (answers without a reward), and the verifiers' own numbers."""
    metrics: dict[str, float] = {}
    for name, of_domain in _by_domain(groups, config).items():
        trajectories = [trajectory for group in of_domain for trajectory in group.trajectories]
        metrics[f"reward/{name}/errors"] = float(sum(group.dropped for group in of_domain))
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
