"""Statistics over several responses to a prompt: pass@k, votes, means and their errors."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Hashable, Sequence
from statistics import fmean, pstdev, stdev
from typing import NamedTuple

from roll.rewards.types import RewardResult

MAX_CHOICES = 100
"""Choices of k answers that ``maj@k`` looks at."""


class Judged(NamedTuple):
    """The part of a result that statistics use."""

    score: float
    correct: bool
    answer: str | None
    """Answer that was found in the response, equal answers as equal texts; ``None``: none."""
    sought: bool = True
    """False where nobody looked for one."""


def figures_at_k(prompts: Sequence[Sequence[Judged]], n: int) -> dict[str, float]:
    """mean@n, std@n, and pass@k, best@k, worst@k and maj@k over prompts.

    * ``mean@n``: share of correct answers.
    * ``std@n``, of n > 1: mean over prompts of the standard deviation of the scores (ddof 0).
    * ``pass@k``, k = 1, 2, 4 … n: chance that one of k answers is correct, estimated without bias from all n (Chen et
      al. 2021, "Evaluating Large Language Models Trained on Code").
    * ``best@k``, ``worst@k`` (of n > 1): mean over prompts of the best and the worst score of k answers, over all
      choices of k.
    * ``maj@k``: chance that the most frequent of k answers is correct, over all choices of k, or 100 of them where
      there are more; equally frequent ones share the vote, and responses in which no answer was found have none. Over
      the prompts to which answers were looked for; left out where there is none.

    Args:
        prompts: the answers to each, at least one; a prompt with fewer than n counts with those it has.
    """
    correct = [[judged.correct for judged in answers] for answers in prompts]
    scores = [[judged.score for judged in answers] for answers in prompts]
    ks = sorted({n} | {2**i for i in range(n.bit_length()) if 2**i <= n})
    several = [k for k in ks if k > 1 or n == 1]
    voting = [answers for answers in prompts if any(judged.sought for judged in answers)]
    return {
        f"mean@{n}": fmean(fmean(each) for each in correct),
        **{f"pass@{k}": fmean(pass_at_k(len(each), sum(each), k) for each in correct) for k in ks},
        **{f"best@{k}": fmean(best_of_k(each, k) for each in scores) for k in several},
        **({f"std@{n}": fmean(map(pstdev, scores))} if n > 1 else {}),
        **{f"worst@{k}": fmean(-best_of_k([-x for x in each], k) for each in scores) for k in ks if k > 1},
        **{f"maj@{k}": fmean(majority_of_k(answers, k) for answers in voting) for k in several if voting},
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


def majority_of_k(answers: Sequence[Judged], k: int) -> float:
    """Mean of ``majority_correct`` over all choices of k answers, or over ``MAX_CHOICES`` drawn from a fixed seed."""
    if k >= len(answers):
        return majority_correct(answers)
    if math.comb(len(answers), k) <= MAX_CHOICES:
        return fmean(map(majority_correct, itertools.combinations(answers, k)))
    rng = random.Random(k)
    return fmean(majority_correct(rng.sample(answers, k)) for _ in range(MAX_CHOICES))


def majority_correct(answers: Sequence[Judged]) -> float:
    """Share of the most frequent answers that are correct; 0 where no answer was found."""
    votes: defaultdict[str, list[bool]] = defaultdict(list)
    for judged in answers:
        if judged.answer is not None:
            votes[judged.answer].append(judged.correct)
    most = max(map(len, votes.values()), default=0)
    shares = [fmean(outcomes) for outcomes in votes.values() if len(outcomes) == most]
    return fmean(shares) if shares else 0.0


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean of independent values; ``None`` of fewer than two."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


class Tally:
    """Counts results by prompt; keeps the numbers and the extracted answer of each response."""

    def __init__(self) -> None:
        self.failed = 0
        """Answers that have no score."""
        self.over_budget = 0
        """Answers that count as wrong because they cost too much to judge."""
        self._prompts: defaultdict[Hashable, list[Judged]] = defaultdict(list)

    def add(self, prompt: Hashable, verdict: RewardResult | None) -> None:
        """Takes in one answer to a prompt; ``None``: it could not be scored."""
        of_prompt = self._prompts[prompt]
        if verdict is None:
            self.failed += 1
            return
        self.over_budget += bool(verdict.over_budget)
        of_prompt.append(Judged(verdict.score, verdict.correct, verdict.answer, verdict.seeks_answer))

    def summary(self) -> dict[str, float | None]:
        """The figures, by name.

        ``score`` and ``accuracy`` are means over prompts of the means of their answers, and ``…_error`` their standard
        errors over prompts, as answers to one prompt are not independent. Those of ``figures_at_k`` are there where
        some prompt has several answers; ``found`` is the share of answers in which one was found, where it was looked
        for. Answers that could not be scored are in ``failed`` alone.
        """
        scored = [answers for answers in self._prompts.values() if answers]
        count = sum(map(len, scored))
        figures: dict[str, float | None] = {"prompts": len(self._prompts), "answers": count + self.failed}
        figures["failed"] = self.failed
        if self.over_budget:
            figures["over_budget"] = self.over_budget
        if not scored:
            return figures
        scores = [fmean(judged.score for judged in answers) for answers in scored]
        accuracies = [fmean(judged.correct for judged in answers) for answers in scored]
        figures |= {"score": fmean(scores), "score_error": standard_error(scores)}
        figures |= {"accuracy": fmean(accuracies), "accuracy_error": standard_error(accuracies)}
        if sought := [judged.answer for each in scored for judged in each if judged.sought]:
            figures["found"] = sum(answer is not None for answer in sought) / len(sought)
        if (n := max(map(len, scored))) > 1:
            figures.update(figures_at_k(scored, n))
        return figures
