"""The text adventure: houses can be solved, doors need keys, the expert's way is a shortest one."""

import copy
import random
import re

import pytest

from roll.extras.worlds.adventure import ACTIONS, AdventureEnv, House, State, draw_house
from tests.support.tags import answer

HOUSE = House(
    names=("hall", "kitchen", "cellar"),
    exits=({"north": 1, "east": 2}, {"south": 0}, {"west": 0}),
    doors={(0, "east"): 0, (2, "west"): 0},
    keys=(1,),
    treasure=2,
)
WAY = ["go north", "take", "go south", "unlock east", "go east", "take"]


def in_house(house: House, **config: object) -> AdventureEnv:
    env = AdventureEnv(**config)
    env.reset(seed=0)
    env._house = house
    return env


def fewest_steps(env: AdventureEnv) -> int:
    """Breadth first, through the environment's own steps and by what it shows."""
    states, seen = [env], {env.observation() + repr(env._state)}
    for steps in range(1, 100):
        following = []
        for state in states:
            for name in ACTIONS:
                after = copy.deepcopy(state)
                _, _, terminated, _, info = after.step(answer(name))
                if terminated:
                    assert info["success"]
                    return steps
                if info["action_is_effective"] and info["state_key"] not in seen:
                    seen.add(info["state_key"])
                    following.append(after)
        states = following
    raise AssertionError("no way to the treasure")


def test_a_house_is_told_and_solved():
    env = in_house(HOUSE, step_penalty=-0.01, door_reward=0.25, reward_scale=2.0)
    seen = [env.observation()]
    rewards = []
    for name in WAY:
        text, reward, terminated, _, info = env.step(answer(name.upper()))
        seen.append(text)
        rewards.append(reward)
        assert info["action"] == name and info["action_is_effective"]
    assert seen == [
        "You are in the hall.\nWays: north, east (locked red door).",
        "You are in the kitchen.\nHere: red key.\nWays: south.",
        "You are in the kitchen.\nWays: south.\nYou carry: red key.",
        "You are in the hall.\nWays: north, east (locked red door).\nYou carry: red key.",
        "You are in the hall.\nWays: north, east (open red door).\nYou carry: red key.",
        "You are in the cellar.\nHere: treasure.\nWays: west (open red door).\nYou carry: red key.",
        "You have the treasure.",
    ]
    assert terminated and info["success"] and env.expert_actions() == []
    assert all(re.search(rf"\b{name}\b", env.env_instruction) for name in ACTIONS)
    assert rewards == pytest.approx([-0.02, -0.02, -0.02, 0.48, -0.02, 1.98])


@pytest.mark.parametrize(
    ("said", "action", "penalty"),
    [
        *((answer(name), name, 0.0) for name in ("go east", "go south", "unlock east", "unlock north", "take")),
        *((said, None, -0.25) for said in ("", "go north", answer("walk north"), answer("go north, take"))),
    ],
)
def test_what_cannot_be_done_changes_nothing_and_what_is_no_action_costs_the_penalty(said, action, penalty):
    env = in_house(HOUSE, format_penalty=-0.25)
    before = env.observation()
    text, reward, terminated, truncated, info = env.step(said)
    assert (text, reward, terminated, truncated) == (before, penalty, False, False)
    assert (info["action"], info["action_is_effective"], info["penalty"]) == (action, False, penalty)


@pytest.mark.parametrize(("num_rooms", "num_doors"), [(2, 0), (2, 1), (4, 3), (6, 2)])
def test_every_house_is_solved_by_its_expert_in_the_fewest_steps(num_rooms, num_doors):
    env = AdventureEnv(num_rooms=num_rooms, num_doors=num_doors, max_steps=40)
    for seed in range(12):
        env.reset(seed=seed)
        rng, steps, terminated = random.Random(seed), 0, False
        fewest = fewest_steps(env)
        while not terminated:
            _, _, terminated, truncated, _ = env.step(answer(rng.choice(env.expert_actions())))
            steps += 1
            assert not truncated
        assert steps == fewest == env.house.distances[State()]


def test_houses_have_what_was_asked_for_and_never_a_key_out_of_reach():
    for seed in range(300):
        house = draw_house(random.Random(seed), 8, 3, 40)
        assert len(house.names) == len(set(house.names)) == 8 and len(house.keys) == 3 and house.treasure != 0
        assert sum(map(len, house.exits)) == 14 and len(house.doors) == 6
        assert all(house.exits[to][back] == room for room, ways in enumerate(house.exits) for to, back in _backs(ways))
        stuck = [state for state in _states(house) if state not in house.distances]
        assert not stuck, "whatever is done, the treasure can still be reached"


def _backs(ways: dict[str, int]) -> list[tuple[int, str]]:
    opposite = {"north": "south", "south": "north", "east": "west", "west": "east"}
    return [(to, opposite[direction]) for direction, to in ways.items()]


def _states(house: House) -> set[State]:
    seen, queue = {State()}, [State()]
    while queue:
        state = queue.pop()
        new = {house.after(state, action) for action in ACTIONS} - seen
        seen |= new
        queue += [each for each in new if not each.has_treasure]
    return seen


def test_all_ways_are_short_enough_for_the_limit():
    env = AdventureEnv(num_rooms=6, num_doors=2, max_steps=7)
    lengths = set()
    for seed in range(100):
        env.reset(seed=seed)
        lengths.add(env.house.distances[State()])
    assert max(lengths) <= 7 and len(lengths) > 2
    with pytest.raises(ValueError, match="max_steps: got 1, but none of 1000 houses"):
        draw_house(random.Random(0), 12, 3, 1)


def test_seeds_give_different_houses_and_the_same_seed_the_same():
    env = AdventureEnv()
    with pytest.raises(RuntimeError, match="reset"):
        env.expert_actions()
    keys = [env.reset(seed=seed)[1]["state_key"] for seed in range(50)]
    assert len(set(keys)) == 50
    assert keys == [AdventureEnv().reset(seed=seed)[1]["state_key"] for seed in range(50)]
