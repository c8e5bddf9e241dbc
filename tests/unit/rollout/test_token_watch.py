"""``tokenization_sanity_check`` in episodes with tools, in environments and at the endpoint, under real templates."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from roll.agentic.env import make
from roll.agentic.tools.dialects import dialect_for
from roll.configs.agent import AgentConfig
from roll.configs.env import CustomEnvConfig
from roll.configs.tools import ToolsConfig
from roll.data.prompts import Prompt
from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, FinishReason, GenerateRequest, SamplingParams
from roll.rewards.types import RewardResult, Sample
from roll.rollout.call_threads import CallThreads
from roll.rollout.endpoint.session import Policy, Session, Wanted
from roll.rollout.env_manager import EpisodeSpec, LengthLimits, TrajEnvManager
from roll.rollout.env_runner import EnvRunner
from roll.rollout.metrics import rollout_metrics
from roll.rollout.prompt_worker import PromptEnv, PromptManager
from roll.rollout.tokenization_audit import COMPARED, TokenCheck, TokenizationAudit
from roll.rollout.tool_box import ToolBox
from roll.rollout.types import RolloutGroup, Trajectory
from tests.support.chat_families import family_tokenizer

LIMITS = LengthLimits(prompt_length=4000, sequence_length=6000)
PARAMS = SamplingParams(max_new_tokens=400)
ASKED = ({"role": "user", "content": "17*3="},)
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17*3"}}\n</tool_call>'
THOUGHT = "<think>\nleft\n</think>\n\n"


class Engine:
    """Says one text after the other, as the tokenizer writes it or letter by letter."""

    def __init__(self, renderer: ChatRenderer, *texts: str, letters: bool = False) -> None:
        self.tokenizer = renderer.tokenizer
        self.end = renderer.turn_end()[1]
        self.texts = list(texts)
        self.letters = letters

    async def generate(self, request: GenerateRequest) -> Completion:
        text = self.texts.pop(0)
        parts = text if self.letters else [text]
        ids = [index for part in parts for index in self.tokenizer.encode(part, add_special_tokens=False)]
        ids.append(self.end)
        zeros = np.zeros(len(ids), dtype=np.int64)
        return Completion(request.request_id, np.array(ids), zeros.astype(np.float32), FinishReason.STOP, zeros)


async def judge(sample: Sample) -> RewardResult:
    return RewardResult(1.0, True, sample.response)


def episode(member: int = 0) -> EpisodeSpec:
    return EpisodeSpec("sums", 5, member, env_seed=11, sampling_seed=13)


def play(
    family: str, *texts: str, check: TokenCheck = "strict", member: int = 0, cut: int = 0, letters: bool = False
) -> Trajectory:
    """An episode with tools."""
    renderer = ChatRenderer(family_tokenizer(family))
    engine = Engine(renderer, *texts, letters=letters)
    box = ToolBox(ToolsConfig(use={"calculator": {"tool": "calculator"}}), renderer, CallThreads())
    manager = PromptManager(renderer, PARAMS, LIMITS)
    manager.watch = TokenizationAudit(renderer, check)

    async def run() -> Trajectory:
        tools = [schema.as_openai() for schema in await box.schemas("sums")]
        prompt = Prompt("p1", "sums", ASKED, "51", prompt_ids=renderer.prompt(ASKED, tools)[cut:] if cut else None)
        env = PromptEnv(prompt, judge)
        partner, generate = await box.equip(env, "sums", env.watch(engine.generate))
        return await manager.run_episode(partner, generate, episode(member))

    return asyncio.run(run())


def counts(info: Mapping[str, Any]) -> dict[str, int]:
    """What was counted, without zeros."""
    return {name.removeprefix("tokens_"): n for name, n in info.items() if name.startswith("tokens_") and n}


@pytest.mark.parametrize(
    ("family", "texts", "reason"),
    [
        ("qwen2_5", (CALL, "51"), None),
        ("qwen2_5", (CALL.replace('": ', '":'), "51"), "white_space"),
        ("qwen2_5", (CALL.replace("17*3", "17\\u002a3"), "51"), "rewritten"),
        ("qwen2_5", (CALL + "<tool_call>{", "51"), None),  # what cannot be read stays as it was written
        ("qwen3", (CALL, f"{THOUGHT}51"), None),  # thoughts since the last question stay
        ("qwen3", (CALL, "51"), "reasoning"),  # a last answer without one is given an empty one
        ("deepseek_r1", ("</think>" + CALL, "51"), "rewritten"),  # the prompt opens a thought, a history does not
        ("gemma3", (CALL, "51"), None),
    ],
)
def test_episodes_with_tools_are_compared_with_their_conversations(family, texts, reason):
    expected = {"compared": 1} | ({reason: 1} if reason else {})
    assert counts(play(family, *texts).info) == expected
    lenient = {"compared": 1} if reason == "white_space" else expected
    assert counts(play(family, *texts, check="ignore_strippable").info) == lenient


def test_other_tokens_of_the_same_text_count_when_strict_and_some_episodes_are_not_compared():
    assert counts(play("qwen2_5", CALL, "another answer", letters=True).info) == {"compared": 1, "other_tokens": 1}
    assert counts(
        play("qwen2_5", CALL, "another answer", letters=True, check="ignore_strippable").info
    ) == {"compared": 1}  # fmt: skip
    assert COMPARED not in play("qwen3", CALL, "51", member=1).info, "one of a group is enough"
    assert COMPARED not in play("qwen3", CALL, "51", check="disable").info
    assert COMPARED not in play("qwen3", "51").info, "one turn has no history"
    assert COMPARED not in play("qwen3", CALL, "51", cut=3).info, "its prompt has lost tokens"


async def test_rows_of_agents_are_compared_as_the_program_has_sent_them():
    renderer = ChatRenderer(family_tokenizer("qwen3"))
    engine = Engine(renderer, f"{THOUGHT}right", f"{THOUGHT}left", "in short", "more", "plain")
    policy = Policy(renderer, dialect_for("auto", renderer), LIMITS)

    session = Session(AgentConfig(command=["true"]), policy, engine.generate, PARAMS, episode())
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    for _ in range(2):
        (answer,) = await session.chat(messages, [], Wanted())
        messages += [answer.turn.as_openai(), {"role": "user", "content": "more"}]
    await session.chat([{"role": "user", "content": "in short: q"}], [], Wanted())  # a row of one turn
    await session.complete("left", Wanted())
    assert counts(TokenizationAudit(renderer, "strict").compare("sums", session.conversation_rows())) == {
        "compared": 1,
        "reasoning": 1,
    }


@pytest.mark.parametrize("check", ["strict", "ignore_strippable"])
def test_differences_in_environments_too_are_shares_of_rows_and_a_warning_once(check, caplog):
    """An empty thought is in the last turn of a history alone, which is a difference too."""
    renderer = ChatRenderer(family_tokenizer("qwen3"))
    config = CustomEnvConfig(env_type="frozen_lake", env_manager_cls="traj", max_steps=2)
    manager = TrajEnvManager(config, renderer, PARAMS, LIMITS)
    manager.watch = TokenizationAudit(renderer, check)
    played = []
    with caplog.at_level(logging.WARNING, "roll.rollout.tokenization_audit"):
        for thought in (THOUGHT, "<think>\n\n</think>\n\n"):
            runner = EnvRunner(lambda: make("frozen_lake"), 5.0, instant=True)
            engine = Engine(renderer, f"{thought}Up", f"{thought}Up")
            played.append(asyncio.run(manager.run_episode(runner, engine.generate, episode())))
    assert [counts(trajectory.info) for trajectory in played] == [{"compared": 1, "reasoning": 1}] * 2
    (record,) = caplog.records
    assert "sums group 5 member 0" in record.getMessage() and "(reasoning)" in record.getMessage()
    played.append(play("qwen2_5", CALL, "51"))
    metrics = rollout_metrics([RolloutGroup(5, "sums", tuple(played))], "rollout")
    assert metrics["rollout/tokens/differ"] == metrics["rollout/tokens/reasoning"] == pytest.approx(2 / 3)
    assert metrics["rollout/tokens/rewritten"] == metrics["rollout/tokens/white_space"] == 0
