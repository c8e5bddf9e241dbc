"""Environments that ask a judge: what it says, and failures of it, which are never a reward."""

import asyncio
import pickle
from typing import Any

import pytest

import roll.agentic.env as envs
from roll.configs.env import CustomEnvConfig
from roll.configs.rewards import AskedModelConfig
from roll.data.requests import JudgeQuestion
from roll.distributed.strategy.base import States
from roll.extras.env_check import check_env
from roll.rewards.types import RewardError
from roll.rollout.env_runner import EnvRunner
from roll.rollout.env_worker import EnvironmentWorker
from roll.rollout.errors import EnvCrashError, EnvTimeoutError
from roll.rollout.reward_worker import AskFn, Asking, JudgeWorker
from roll.rollout.router import EngineUnavailableError
from tests.support.judged_env import JudgedEnv
from tests.support.judges import WORDS, digit_model, greedy_words
from tests.support.talks import system, user

PATH = f"{JudgedEnv.__module__}:{JudgedEnv.__qualname__}"
TALK = [system("a"), user("1+1=")]


class InstantlyAsking(JudgedEnv):
    """It says what it cannot be."""

    instant = True


async def test_what_it_says_is_what_transformers_says(tmp_path):
    folder = digit_model(tmp_path)
    questions: list[Any] = [*(f"{i}+1=" for i in range(6)), TALK, "1 " * 300, [user("a", seen={1})]]
    worker = JudgeWorker("reward_judge", 0, 1, {})
    await worker.offload(States.ALL)  # before its set-up: nothing is there
    await worker.setup(AskedModelConfig(model=folder, max_tokens=WORDS, max_concurrency=3))
    await worker.offload(States.WEIGHTS)
    asked = asyncio.create_task(worker.ask(questions))
    await asyncio.sleep(0.1)
    assert not asked.done(), "the judge is away"
    await worker.onload(States.WEIGHTS)
    try:
        *words, too_long, odd = pickle.loads(pickle.dumps(await asked))
    finally:
        await worker.close()
    expected = [*([user(text)] for text in questions[:6]), TALK]
    assert words == [greedy_words(folder, messages) for messages in expected] and len(set(words)) > 1
    assert all(isinstance(error, RewardError) and "judge: " in str(error) for error in (too_long, odd))


def play(ask: AskFn, *answers: str, timeout: float = 30.0, **env_config: Any) -> list[float]:
    """Rewards of some environments side by side, one for each answer."""

    async def run() -> list[float]:
        runners = [EnvRunner(lambda: JudgedEnv(**env_config), timeout, asking=Asking(ask)) for _ in answers]
        try:
            await asyncio.gather(*(runner.reset(1) for runner in runners))
            steps = zip(runners, answers, strict=True)
            return [told[1] for told in await asyncio.gather(*(runner.step(text) for runner, text in steps))]
        finally:
            for runner in runners:
                runner.close()

    return asyncio.run(run())


def test_environments_wait_for_it_side_by_side():
    waiting, all_here = [], asyncio.Event()

    async def ask(question: JudgeQuestion) -> str:
        waiting.append(question)
        if len(waiting) == 8:
            all_here.set()
        await asyncio.wait_for(all_here.wait(), 20)
        return str(question)[-1] + "0"

    answers = [str(number) for number in range(8)]
    assert play(ask, *answers) == [int(answer) / 10 for answer in answers]
    assert sorted(waiting) == [f"Grade: {answer}" for answer in answers]


@pytest.mark.parametrize("catches", [False, True])
@pytest.mark.parametrize(
    ("failure", "raised", "told"),
    [
        (RewardError("judge: too long"), EnvCrashError, "environment step asked the judge: judge: too long"),
        (EngineUnavailableError("gone"), EngineUnavailableError, "gone"),
    ],
)
def test_a_failure_is_one_of_the_environment_unless_the_judge_died_whether_it_is_caught_or_not(
    catches, failure, raised, told
):
    async def ask(question: JudgeQuestion) -> str:
        raise failure

    with pytest.raises(raised, match=told):
        play(ask, "1", catches=catches)


def test_waiting_for_it_is_part_of_the_step():
    async def ask(question: JudgeQuestion) -> str:
        await asyncio.sleep(1)
        return "1"

    with pytest.raises(EnvTimeoutError, match=r"step_timeout=0\.2s"):
        play(ask, "1", timeout=0.2)


def test_an_environment_that_asks_is_built_before_the_run_and_never_instant():
    instant = f"{InstantlyAsking.__module__}:{InstantlyAsking.__qualname__}"
    assert envs.asks_judge(PATH) and not envs.asks_judge("sokoban") and not envs.is_instant(instant)
    worker = EnvironmentWorker("train_env_manager", 0, 1, {})
    tags = {"Fine": {}, "Wrong": {"padding": 1, "no_such_key": 1}}
    played = {tag: CustomEnvConfig(env_type=PATH, env_config=keys) for tag, keys in tags.items()}
    (problem,) = filter(None, (each.problem for each in asyncio.run(worker.probe(played, 0, 1))))
    assert problem.startswith("custom_envs.Wrong: environment construction raised") and "no_such_key" in problem


def test_the_check_of_environments_answers_in_its_place():
    report = check_env(JudgedEnv, answers=["1"], judge_says="7", episodes=2, max_steps=2)
    assert not {"step-raises", "cannot-travel", "could-be-instant"} & {finding.name for finding in report.findings}
    assert ("rewards", "0.7 to 0.7 for a step") in report.facts
