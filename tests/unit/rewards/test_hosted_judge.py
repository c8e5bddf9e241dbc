"""A judge on the run's own devices, against transformers' greedy answer to the same question."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from roll.configs.rewards import RewardConfig
from roll.distributed.strategy.generation.alone import HostedGenerator
from roll.rewards.judge import JudgeConfig, JudgeVerifier
from roll.rewards.scorer import DomainScorer, check_rewards
from roll.rewards.types import RewardError, Sample
from tests.support.judges import WORDS, digit_model, greedy_words

PROMPT = "{{ prompt }}|{{ response }}"
SAMPLES = [Sample(prompt=f"{i}+1=", response=str(i * 7), ground_truth=None, data_source="sums") for i in range(8)]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digit_model(tmp_path_factory.mktemp("judge"))


def settings(judge: str, **changes: Any) -> dict[str, Any]:
    return {
        "judge_model_type": "inference",
        "judge_model_name": judge,
        "judge_prompt": PROMPT,
        "score_pattern": r"(\d)",
        "max_score": 9.0,
        "max_tokens": WORDS,
    } | changes


class LastDigit(JudgeVerifier):
    """Takes the last digit of whatever a tiny model says, which no reader of scores would."""

    def _score_in(self, words: str, is_cut: bool) -> float:
        return float(re.findall(r"\d", words)[-1])


def verdicts(config: JudgeConfig) -> list[float]:
    async def run() -> list[float]:
        verifier = LastDigit(config, HostedGenerator)
        try:
            await verifier.offload()
            asking = [asyncio.create_task(verifier.score(sample)) for sample in SAMPLES]
            await asyncio.sleep(0.2)
            assert not any(task.done() for task in asking), "the judge is away"
            await verifier.onload()
            return [verdict.parts["judge_score"] for verdict in await asyncio.gather(*asking)]
        finally:
            await verifier.close()

    return asyncio.run(run())


def test_the_score_is_that_of_transformers_greedy_words(judge: str) -> None:
    found = verdicts(JudgeConfig(**settings(judge)))
    for sample, score in zip(SAMPLES, found, strict=True):
        words = greedy_words(judge, [{"role": "user", "content": f"{sample.prompt}|{sample.response}"}])
        assert score == float(re.findall(r"\d", words)[-1])
    assert len(set(found)) > 1


def test_what_a_judge_says_depends_on_its_question_alone(judge: str) -> None:
    warm = JudgeConfig(**settings(judge, temperature=5.0, max_concurrency=2))
    assert verdicts(warm) == verdicts(warm.model_copy(update={"max_concurrency": 8}))


async def test_words_without_a_score_are_an_error_after_all_attempts(judge: str) -> None:
    reward = RewardConfig(
        tag_included=["sums"],
        retries=0,
        verifiers=[{"name": "judge", "args": settings(judge, score_pattern="never(.)", temperature=1.0)}],
    )

    scorer = DomainScorer("sums", reward, host=HostedGenerator)
    try:
        with pytest.raises(RewardError, match="cut off by max_tokens"):
            await scorer.score(SAMPLES[0])
    finally:
        await scorer.close()
    with pytest.raises(ValueError, match="needs a reward worker that hosts models"):
        DomainScorer("sums", reward)


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"judge_api_url": "http://127.0.0.1:1/v1"}, "judge_api_url", "no endpoint is asked"),
        ({"judge_model_type": "api"}, "judge_api_url", "judge_model_type: inference"),
        ({"engine": {"strategy_args": {"strategy_name": "fsdp2_train"}}}, "engine", "generates"),
        (
            {"judge_model_type": "api", "judge_api_url": "http://h/v1", "engine": {"max_length": 9}},
            "engine",
            "the endpoint has its own",
        ),
    ],
)
def test_keys_of_the_other_kind_are_refused(changes: dict[str, Any], path: str, words: str) -> None:
    verifier = {"name": "judge", "args": settings("org/judge") | changes}
    (problem,) = check_rewards(RewardConfig(tag_included=["a"], verifiers=[verifier]))
    assert path in problem.path and words in str(problem)
