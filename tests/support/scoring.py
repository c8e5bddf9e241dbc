"""Verifiers for runs of the real pipeline. They are found by path, in child processes that import nothing heavy."""

import asyncio
import contextlib
import time

from roll.configs.base import Config
from roll.rewards.types import RewardResult, RuleVerifier, Sample


class Letters(RuleVerifier):
    """A score that depends on every letter of the response, so that the answers to a prompt differ.

    A row's reference answer may give orders: ``equal`` (the same score for all), ``right`` (1 for all), ``raise``,
    ``hang`` (for ever), ``raise-odd`` (for about half of the responses), and ``linger`` (for up to 0.3 s, by the
    response).
    """

    def check(self, sample: Sample) -> RewardResult:
        total = sum(map(ord, sample.response))
        order = sample.ground_truth
        if order == "raise" or (order == "raise-odd" and total % 2):
            raise ArithmeticError(f"cannot judge {sample.data_source}")
        while order == "hang":
            time.sleep(1)
        if order == "linger":
            time.sleep(total % 4 / 10)
        score = {"equal": 0.1, "right": 1.0}.get(order, total % 64 / 64)
        return RewardResult(score, score >= 0.5, sample.response[:1] or None, {"letters": float(len(sample.response))})


class Brief(RuleVerifier):
    """One point for an answer that ended by itself."""

    def check(self, sample: Sample) -> RewardResult:
        return RewardResult(float(not sample.truncated), True)


class Dear(RuleVerifier):
    """Needs more time than it has where the response, or the reference answer, is ``dear``."""

    cpu_seconds = 0.2

    @classmethod
    def tries_row(cls, config: Config, sample: Sample) -> bool:
        return True

    def try_row(self, sample: Sample) -> None:
        while sample.ground_truth == "dear":
            pass

    def check(self, sample: Sample) -> RewardResult:
        self.try_row(sample)
        while sample.response == "dear":
            with contextlib.suppress(Exception):
                sum(range(1000))
        return RewardResult(1.0, correct=True)


class Unbuildable(RuleVerifier):
    """Wants something that this machine does not have."""

    def __init__(self, config: Config) -> None:
        raise OSError("there is no word list")

    def check(self, sample: Sample) -> RewardResult:
        raise NotImplementedError


def slow_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(extra_info.get("seconds", 0))
    return {"score": float(len(solution_str)), "answer": solution_str[:5]}


async def slow_to_await(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(extra_info.get("seconds", 0))
    return len(solution_str) / 2


def score_and_say_why(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0.5, "length": len(solution_str), "why": "too short"}


def judge_lists(data_sources, solution_strs, ground_truths, extra_infos):
    if "poison" in solution_strs:
        raise ValueError("unreadable")
    return [{"score": float(len(text)), "together": len(solution_strs)} for text in solution_strs]
