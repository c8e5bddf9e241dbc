"""The shop: the catalogue and its search, commands as text and as calls of tools, what is paid, the expert."""

import asyncio
import json
import random
import subprocess
import sys

import pytest

from roll.configs.env import CustomEnvConfig
from roll.data.requests import Completion, GenerateRequest, SamplingParams
from roll.extras.worlds.shop import Catalogue, Goal, Product, ShopEnv, catalogue
from roll.rollout.env_manager import EpisodeSpec, LengthLimits, TrajEnvManager
from roll.rollout.env_runner import EnvRunner
from tests.support.rollouts import RENDERER, TOKENIZER, sampled
from tests.support.tags import answer

SMALL = {"kinds": ["hat", "mug"], "attributes": {"colour": ["blue", "red"], "size": ["large", "small"]}, "num_shown": 1}
PRODUCTS = [
    Product("mug", ("red", "large"), 20),
    Product("mug", ("red", "small"), 5),
    Product("mug", ("blue", "small"), 7),
    Product("hat", ("red", "small"), 9),
]
GOAL = Goal("mug", ("red", "small"), 8)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def in_shop(goal: Goal, **config: object) -> ShopEnv:
    """An episode with this goal among ``PRODUCTS``."""
    env = ShopEnv(**{**SMALL, "num_results": 3, **config})
    env.catalogue = Catalogue(env.config.shelves(), PRODUCTS)
    env.reset(seed=0)
    env._goal = goal
    return env


def test_a_visit_is_told_and_paid():
    env = in_shop(GOAL, step_penalty=-0.01, goal_reward=2.0, reward_scale=0.5)
    wanted = "Wanted: red mug, small, at most 8 francs."
    assert env.observation() == wanted and env.expert_actions() == ["search red mug"]
    text, reward, *_, info = env.step(answer(" Search  RED mug "))
    assert text == f"{wanted}\n1. red mug, 20 francs\n2. red mug, 5 francs\n3. blue mug, 7 francs"
    assert (info["action"], info["action_is_effective"], reward) == ("search red mug", True, -0.005)
    assert env.expert_actions() == ["view 2"], "the first one costs too much"
    text, *_ = env.step(answer("view 2"))
    assert text.split("\n")[2] == "2. red mug, 5 francs, small" and env.expert_actions() == ["buy 2"]
    text, reward, terminated, truncated, info = env.step(answer("buy 2"))
    assert text == f"{wanted}\nYou bought: red mug, 5 francs, small."
    assert reward == pytest.approx(0.5 * (2.0 - 0.01)) and info["success"] and (terminated, truncated) == (True, False)


@pytest.mark.parametrize(
    ("search", "number", "score"),  # red and large and dear; right; blue; another kind
    [("red mug", 1, 2 / 4), ("red mug", 2, 1.0), ("red mug", 3, 3 / 4), ("hat", 1, 0.0)],
)
def test_what_is_bought_is_paid_by_the_demands_that_it_meets(search, number, score):
    env = in_shop(GOAL)
    env.step(answer(f"search {search}"))
    _, reward, terminated, _, info = env.step(answer(f"buy {number}"))
    assert terminated and reward == pytest.approx(score) and info["success"] == (score == 1)


@pytest.mark.parametrize(
    ("said", "action", "reward", "told"),
    [
        *(
            (answer(said), said, 0.0, f"\nThere is no result {said.split()[1]}.")
            for said in ("view 1", "buy 1", "buy 99")
        ),
        *((said, None, -0.25, "") for said in ("", "buy 1", *map(answer, ("buy", "buy one", "search", "steal 1")))),
    ],
)
def test_what_is_not_listed_cannot_be_had_and_what_is_no_command_costs_the_penalty(said, action, reward, told):
    env = in_shop(GOAL, format_penalty=-0.25)
    before, key = env.observation(), env.state_key()
    text, paid, terminated, _, info = env.step(said)
    assert (text, paid, terminated) == (before + told, reward, False)
    assert (info["action"], info["action_is_effective"], info["state_key"]) == (action, False, key)


def test_the_search_ranks_by_words_and_says_when_there_is_nothing():
    env = in_shop(GOAL)
    assert env.catalogue.search("red mug") == (0, 1, 2) and env.catalogue.search("a blue one, please") == (2,)
    assert env.catalogue.search("small") == (), "a detail, which titles do not say"
    assert env.step(answer("search umbrella"))[0].endswith("\nNothing found.")


def test_every_wish_can_be_met_by_the_expert_who_looks_at_details():
    env, views = ShopEnv(), 0
    for seed in range(150):
        env.reset(seed=seed)
        rng, terminated = random.Random(seed + 1), False
        while not terminated:
            chosen = rng.choice(env.expert_actions())
            views += chosen.startswith("view")
            _, _, terminated, truncated, info = env.step(answer(chosen))
            assert not truncated and info["action"] == chosen
        assert info["success"]
    assert views > 150


def test_the_splits_want_different_products():
    wanted = {}
    for split in ("train", "eval", "all"):
        env = ShopEnv(split=split)
        wanted[split] = {(goal.kind, goal.values) for goal in env._goals}
    assert not wanted["train"] & wanted["eval"] and wanted["train"] | wanted["eval"] == wanted["all"]
    assert 0.1 < len(wanted["eval"]) / len(wanted["all"]) < 0.3


def test_another_process_has_the_same_catalogue_and_finds_the_same():
    words = ("wool", "red mug", "small oak chair")
    code = "from roll.extras.worlds.shop import ShopEnv\nenv = ShopEnv()\n"
    code += f"print([env.catalogue.search(name) for name in {words}], env.reset(seed=7)[0])"
    other = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=other).stdout
    env = ShopEnv()
    assert said == f"{[env.catalogue.search(name) for name in words]} {env.reset(seed=7)[0]}\n"
    assert catalogue(env.config.shelves()) is env.catalogue, "made once in a process"


def test_commands_are_calls_of_tools_where_a_dialect_is_given():
    env = in_shop(GOAL, dialect="hermes")
    _, info = env.reset(seed=0)
    assert [tool["function"]["name"] for tool in info["tools"]] == ["search", "view", "buy"]
    env._goal = GOAL
    text, *_, info = env.step(call("search", query="red mug"))
    assert info["action"] == "search red mug"
    assert info["messages"] == [{"role": "tool", "tool_call_id": "call00000", "name": "search", "content": text}]
    *_, info = env.step(call("view", number=2) + call("buy", number=1))
    assert [message["content"][:14] for message in info["messages"]] == ["Wanted: red mu", "error: not run"]
    for said in (call("view", place=1), call("steal", number=1), '<tool_call>{"name"', "I would buy it."):
        _, reward, terminated, _, info = env.step(said)
        assert (reward, terminated, info["action"]) == (-0.5, False, None)
        assert ("messages" in info) == ("tool_call" in said)
    assert env.step(call("buy", number=2))[4]["success"]


def test_a_conversation_with_tools_is_played_by_the_manager():
    said = [call("search", query="red mug"), "Hm.", call("buy", number=2)]

    async def policy(request: GenerateRequest) -> Completion:
        turn = int(request.request_id.rpartition("-")[2])
        return sampled(TOKENIZER.encode(said[turn] + "<|im_end|>"), request.request_id)

    config = CustomEnvConfig(env_type="shop", env_manager_cls="traj", max_steps=5)
    limits = LengthLimits(prompt_length=4000, sequence_length=8000)
    manager = TrajEnvManager(config, RENDERER, SamplingParams(max_new_tokens=200), limits)
    env = ShopEnv(dialect="hermes")
    runner = EnvRunner(lambda: env, timeout=30, instant=True)
    played = asyncio.run(manager.run_episode(runner, policy, EpisodeSpec("Shop", 0, 0, env_seed=3, sampling_seed=1)))
    shown = [str(TOKENIZER.decode(turn.prompt_ids)) for turn in played.turns]
    assert '"name": "search"' in shown[0] and shown[0].count("Wanted: ") == 1
    assert "<tool_response>\nWanted: " in shown[1], "the answer of the first call"
    assert shown[2].startswith(shown[1]) and "<tool_response>" not in shown[2].removeprefix(shown[1])
    assert [turn.action for turn in played.turns] == ["search red mug", None, "buy 2"]
