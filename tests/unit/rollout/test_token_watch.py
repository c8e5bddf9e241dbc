"""``tokenization_sanity_check`` in episodes with tools, in environments and at the endpoint, under real templates."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from roll.agentic.env import make
from roll.agentic.tools.dialects import dialect_for
from roll.configs.agent import AgentConfig
from roll.configs.env import CustomEnvConfig
from roll.configs.tools import ToolsConfig
from roll.data.renderer import ChatRenderer
from roll.data.requests import SamplingParams
from roll.rollout.endpoint.session import Policy, Session, Wanted
from roll.rollout.env_manager import EpisodeSpec, LengthLimits, TrajEnvManager
from roll.rollout.env_runner import EnvRunner
from roll.rollout.metrics import rollout_metrics
from roll.rollout.prompt_worker import PromptManager
from roll.rollout.tokenization_audit import COMPARED, TokenCheck, TokenizationAudit
from roll.rollout.tool_box import told_tools
from roll.rollout.types import RolloutGroup, Trajectory
from tests.support.chat_families import family_tokenizer
from tests.support.rollouts import Engine
from tests.support.talks import user
from tests.unit.rollout.test_tool_env import PROMPT
from tests.unit.rollout.test_tool_env import play as play_with_tools

LIMITS = LengthLimits(prompt_length=4000, sequence_length=6000)
PARAMS = SamplingParams(max_new_tokens=400)
EPISODE = EpisodeSpec("sums", 5, 0, env_seed=11, sampling_seed=13)
USE = {"calculator": {"tool": "calculator"}}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17*3"}}\n</tool_call>'
THOUGHT = "<think>\nleft\n</think>\n\n"


def play(
    family: str, *texts: str | list[str], check: TokenCheck = "strict", member: int = 0, cut: int = 0
) -> Trajectory:
    """An episode with tools; its prompt has lost the first tokens if they are ``cut``."""
    renderer = ChatRenderer(family_tokenizer(family))
    manager = PromptManager(renderer, PARAMS, LIMITS)
    manager.watch = TokenizationAudit(renderer, check)
    tools = told_tools(ToolsConfig(use=USE), ["sums"])["sums"]
    ids = renderer.prompt(PROMPT.messages, tools)[cut:] if cut else None
    engine = Engine(*texts, renderer=renderer)
    return play_with_tools(engine, manager, prompt=replace(PROMPT, prompt_ids=ids), member=member, use=USE)


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
    letters = [*CALL], [*"another answer"]
    assert counts(play("qwen2_5", *letters).info) == {"compared": 1, "other_tokens": 1}
    assert counts(play("qwen2_5", *letters, check="ignore_strippable").info) == {"compared": 1}
    assert COMPARED not in play("qwen3", CALL, "51", member=1).info, "one of a group is enough"
    assert COMPARED not in play("qwen3", CALL, "51", check="disable").info
    assert COMPARED not in play("qwen3", "51").info, "one turn has no history"
    assert COMPARED not in play("qwen3", CALL, "51", cut=3).info, "its prompt has lost tokens"


async def test_rows_of_agents_are_compared_as_the_program_has_sent_them():
    renderer = ChatRenderer(family_tokenizer("qwen3"))
    engine = Engine(f"{THOUGHT}right", f"{THOUGHT}left", "in short", "more", "plain", renderer=renderer)
    policy = Policy(renderer, dialect_for("auto", renderer), LIMITS)
    session = Session(AgentConfig(command=["true"]), policy, engine.generate, PARAMS, EPISODE)
    messages: list[dict[str, Any]] = [user("q")]
    for _ in range(2):
        (answer,) = await session.chat(messages, [], Wanted())
        messages += [answer.turn.as_openai(), user("more")]
    await session.chat([user("in short: q")], [], Wanted())  # a row of one turn
    await session.complete("left", Wanted())
    found = TokenizationAudit(renderer, "strict").compare("sums", session.conversation_rows())
    assert counts(found) == {"compared": 1, "reasoning": 1}


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
            engine = Engine(f"{thought}Up", renderer=renderer)
            played.append(asyncio.run(manager.run_episode(runner, engine.generate, EPISODE)))
    assert [counts(trajectory.info) for trajectory in played] == [{"compared": 1, "reasoning": 1}] * 2
    (record,) = caplog.records
    assert "sums group 5 member 0" in record.getMessage() and "(reasoning)" in record.getMessage()
    played.append(play("qwen2_5", CALL, "51"))
    metrics = rollout_metrics([RolloutGroup(5, "sums", tuple(played))], "rollout")
    assert metrics["rollout/tokens/differ"] == metrics["rollout/tokens/reasoning"] == pytest.approx(2 / 3)
    assert metrics["rollout/tokens/rewritten"] == metrics["rollout/tokens/white_space"] == 0
