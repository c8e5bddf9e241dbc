"""A conversation about a prompt: the user's turns and rewards, the answer that is scored, and a user who fails."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from roll.configs.loader import load_config
from roll.configs.problems import ConfigErrors
from roll.configs.rlvr import RLVRConfig, UserConfig
from roll.data.prompts import Prompt
from roll.data.requests import SamplingParams
from roll.preflight.choices import CHECKS
from roll.rewards.types import RewardResult, Sample
from roll.rollout.errors import EnvError
from roll.rollout.prompt_worker import (
    PromptEnv,
    PromptManager,
    PromptWorker,
    PromptWorkerContext,
    UserEnv,
    UserError,
    load_user,
)
from roll.rollout.types import RolloutGroup
from tests.unit.configs.test_rlvr_config import MINIMAL
from tests.unit.rollout.test_prompt_env import spec
from tests.unit.rollout.test_tool_env import EPISODE, LIMITS, PROMPT, RENDERER, TOKENIZER, Engine


class Guide:
    """Says warmer or colder; what it says wrong is told by ``fault``."""

    def __init__(self, fault: str = "", goal: int = 51) -> None:
        self.fault, self.goal = fault, goal
        self.seen: list[list[str]] = []

    async def respond(self, messages: Sequence[Mapping[str, str]], prompt: Prompt) -> tuple[str, float, bool]:
        self.seen.append([message["content"] for message in messages])
        assert messages[-1]["role"] == "assistant" and prompt.tag == PROMPT.tag
        if self.fault == "raise":
            raise ZeroDivisionError("by nought")
        if self.fault == "exit":
            raise SystemExit(3)
        if self.fault == "hang":
            await asyncio.sleep(30)
        if self.fault == "own timeout":
            raise TimeoutError("no line")
        if self.fault == "odd":
            return "text", float("nan"), False
        guess = int(messages[-1]["content"])
        return ("larger" if guess < self.goal else "smaller"), 0.25, guess == self.goal


class Silent:
    """No user."""


PATH = f"{Guide.__module__}:Guide"


async def judge(sample: Sample) -> RewardResult:
    SCORED.append(sample)
    return RewardResult(1.0, True, sample.response)


SCORED: list[Sample] = []


def play(user: Guide, *texts: str, **keys: Any) -> Any:
    engine, env = Engine(*texts), PromptEnv(PROMPT, judge)
    manager = PromptManager(RENDERER, SamplingParams(max_new_tokens=400), LIMITS)
    config = UserConfig(path=PATH, **keys)
    SCORED.clear()
    trajectory = asyncio.run(manager.run_episode(UserEnv(env, user, config), env.watch(engine.generate), EPISODE))
    return trajectory, engine


def test_the_user_answers_and_the_last_answer_is_scored():
    user = Guide()
    trajectory, engine = play(user, "7", "99", "51")
    question = [message["content"] for message in PROMPT.messages]
    said = [*question, "7", "larger", "99", "smaller", "51"]
    assert user.seen == [said[: len(question) + n] for n in (1, 3, 5)]
    assert [turn.task_reward for turn in trajectory.turns] == [0.25, 0.25, 1.25]
    assert trajectory.success and trajectory.end == "terminated" and trajectory.info["user_turns"] == 2
    assert [message["content"] for message in SCORED[0].messages] == said[:-1] and SCORED[0].response == "51"
    # One row: what was sampled stays as it was sampled, and what the user said follows as the template has it.
    prompt, ids = RENDERER.prompt(PROMPT.messages).tolist(), []
    for words, (seen, sampled) in zip(("larger", "smaller", ""), engine.log, strict=True):
        assert seen == prompt + ids
        added = RENDERER.continuation([{"role": "user", "content": words}], np.array(sampled))
        ids += [*sampled, *added.tolist()]
    assert "larger" in TOKENIZER.decode(engine.log[1][0])


def test_after_its_last_turn_the_answer_is_scored_without_the_user():
    user = Guide()
    trajectory, _ = play(user, "7", "8", "9", max_turns=2)
    assert [turn.task_reward for turn in trajectory.turns] == [0.25, 0.25, 1.0] and len(user.seen) == 2
    assert SCORED[0].response == "9"


async def test_an_episode_that_is_given_up_as_the_user_answers_is_over():
    """``asyncio.wait_for`` of Python 3.11 forgets a cancellation that comes together with its result."""

    class Interrupted(Guide):
        async def respond(self, messages: Sequence[Mapping[str, str]], prompt: Prompt) -> tuple[str, float, bool]:
            asyncio.get_running_loop().call_soon(episode[0].cancel)
            return await super().respond(messages, prompt)

    def slow(engine: Engine) -> Any:
        async def generate(request: Any) -> Any:
            await asyncio.sleep(0)
            return await engine.generate(request)

        return generate

    episode: list[asyncio.Task[Any]] = []
    engine = Engine("7", "51")
    env = UserEnv(PromptEnv(PROMPT, judge), Interrupted(), UserConfig(path=PATH))
    manager = PromptManager(RENDERER, SamplingParams(max_new_tokens=400), LIMITS)
    episode.append(asyncio.create_task(manager.run_episode(env, slow(engine), EPISODE)))
    with pytest.raises(asyncio.CancelledError):
        await episode[0]
    assert len(engine.log) == 1


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise", "the user raised ZeroDivisionError: by nought"),
        ("own timeout", "the user raised TimeoutError: no line"),
        ("exit", "the user raised RuntimeError: SystemExit: 3"),
        ("hang", r"the user took longer than user.timeout=0\.1s"),
        ("odd", r"the user answered \('text', nan, False\), expected \(text, finite number, true or false\)"),
    ],
)
def test_a_user_who_fails_is_a_failure_of_the_episode(fault, told):
    with pytest.raises(UserError, match=told) as raised:
        play(Guide(fault), "7", timeout=0.1)
    assert isinstance(raised.value, EnvError) and not SCORED


def test_a_worker_plays_them_and_counts_failures(tokenizer_path):
    def group(fault: str) -> RolloutGroup:
        worker = PromptWorker("rollout", 0, 1, {})
        user = UserConfig(path=PATH, args={"fault": fault}, retries=2)
        params, limits = {"train": SamplingParams(max_new_tokens=400)}, {"train": LIMITS}
        worker.setup(
            PromptWorkerContext(tokenizer_path, "native", params, limits, {"sums": "maths"}, spread=True, user=user)
        )
        worker.client = Engine(*["51"] * 3)  # type: ignore[assignment]
        worker.rewards = {"maths": judge}
        return asyncio.run(worker.run_group(spec(group_size=1, prompt=PROMPT, tag=PROMPT.tag)))

    good, bad = group(""), group("raise")
    assert [len(each.turns) for each in good.trajectories] == [1] and good.trajectories[0].score == 1.25
    assert bad.dropped == 1 and len(bad.errors) == 3 and "ZeroDivisionError" in bad.errors[0]


def test_what_is_no_user_is_told_before_the_run(tmp_path):
    def problems(*overrides: str) -> dict[str, str]:
        (tmp_path / "mine.yaml").write_text(MINIMAL)
        with pytest.raises(ConfigErrors) as caught:
            load_config(RLVRConfig, "mine", tmp_path, overrides, CHECKS[RLVRConfig])
        return {problem.path: str(problem) for problem in caught.value.problems}

    assert "no such method" in problems(f"user={{path: {Silent.__module__}:Silent}}")["user"]
    found = problems(
        f"user={{path: {PATH}, args: {{gaol: 1}}}}", "tools={dialect: hermes, use: {c: {tool: calculator}}}"
    )
    assert "gaol" in found["user.args.gaol"] and "null with user" in found["tools"]
    beside = problems(f"user={{path: {PATH}}}", "actor_train.data_args.tag_templates={gsm8k: plain}")
    assert "conversations of several turns have one template" in beside["user"]
    file = tmp_path / "mine.py"
    file.write_text("class Me:\n    async def respond(self, messages, prompt):\n        return 'a', 0.0, True\n")
    assert asyncio.run(load_user(UserConfig(path=f"{file}:Me")).respond([], PROMPT)) == ("a", 0.0, True)
