"""Third-party gymnasium environments played as text: as gymnasium ships them."""

from __future__ import annotations

import sys
from collections import deque

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import roll.agentic.env as envs
from roll.agentic.env.gym_adapter import GymnasiumEnv

TAXI = max((name for name in gymnasium.registry if name.startswith("Taxi-v")), key=lambda name: int(name[6:]))
"""The newest: gymnasium refuses older versions."""

CLIFF = {
    "env_id": "CliffWalking-v1",
    "action_names": ["Up", "Right", "Down", "Left"],
    "success_return": -13,
    "max_steps": 30,
}


def answer(name: str) -> str:
    return f"<answer>{name}</answer>"


def shout(observation: object) -> str:
    return f"STATE {observation}!"


def test_cliff_walking_is_won_by_walking_along_the_cliff():
    env = envs.make("gymnasium", **CLIFF)
    text, _ = env.reset(seed=0)
    assert len(text.split("\n")) >= 4 and "x" in text and "T" in text
    total = 0.0
    for name in ["Up", *["Right"] * 11, "Down"]:
        text, reward, terminated, truncated, info = env.step(answer(name))
        assert info["action"] == name and info["action_is_effective"]
        total += reward
    assert terminated and not truncated and info["success"] and total == -13
    env.close()


def test_falling_off_the_cliff_costs_and_is_no_success():
    env = GymnasiumEnv(**CLIFF, reward_scale=0.01)
    env.reset(seed=0)
    _, reward, _, _, info = env.step(answer("Right"))
    assert reward == -1.0 and not info["success"]


def test_an_invalid_action_is_not_played():
    env = GymnasiumEnv(**(CLIFF | {"max_steps": 2}))
    text, start = env.reset(seed=0)
    for last in (False, True):
        after, reward, terminated, truncated, info = env.step("Up")
        assert after == text and info["state_key"] == start["state_key"]
        assert (reward, info["task_reward"], info["penalty"]) == (-0.5, 0.0, -0.5)
        assert (terminated, truncated) == (False, last)


def test_taxi_is_solved_by_the_plan_of_its_transition_table():
    names = ["South", "North", "East", "West", "Pickup", "Dropoff"]
    env = GymnasiumEnv(env_id=TAXI, action_names=names, formatter="values", success_return=-20, max_steps=50)
    text, _ = env.reset(seed=7)
    table = gymnasium.make(TAXI).unwrapped.P
    plans, queue = {int(text): []}, deque([int(text)])
    plan = None
    while plan is None:
        state = queue.popleft()
        for action, [(_, after, _, done)] in table[state].items():
            if done:
                plan = [*plans[state], action]
            elif after not in plans:
                plans[after] = [*plans[state], action]
                queue.append(after)
    for action in plan:
        _, reward, terminated, _, info = env.step(answer(names[action].lower()))
    assert terminated and info["success"] and reward == 20


def test_taxi_text_has_no_terminal_codes():
    env = GymnasiumEnv(env_id=TAXI, success_return=0)
    text, _ = env.reset(seed=0)
    assert "\x1b" not in text and text.startswith("+---")
    assert env.step(answer("0"))[4]["action"] == "0"


def test_blackjack_values_are_numbers_and_the_seed_repeats():
    config = {"env_id": "Blackjack-v1", "action_names": ["Stick", "Hit"], "formatter": "values", "success_return": 1}
    first, second = GymnasiumEnv(**config), GymnasiumEnv(**config)
    wins = 0
    for seed in range(40):
        text, _ = first.reset(seed=seed)
        assert len(text.split()) == 3 and text == second.reset(seed=seed)[0]
        _, reward, terminated, _, info = step = first.step(answer("Stick"))
        assert step == second.step(answer("Stick"))
        assert terminated and info["success"] == (reward == 1)
        wins += info["success"]
    assert 0 < wins < 40


def test_array_observations_and_own_formatters_become_text():
    env = GymnasiumEnv(env_id="CartPole-v1", formatter="values", success_return=5)
    text, _ = env.reset(seed=0)
    assert len([float(value) for value in text.split()]) == 4
    env = GymnasiumEnv(env_id=TAXI, formatter=f"{__name__}:shout", success_return=0)
    assert env.reset(seed=0)[0].startswith("STATE ")


def test_an_environment_of_another_package_is_registered_by_importing_its_module(monkeypatch):
    module, name = "tests.support.third_party_envs", "Corridor-v0"
    monkeypatch.delitem(sys.modules, module, raising=False)
    gymnasium.registry.pop(name, None)
    config = {"env_id": f"{module}:{name}", "action_names": ["Left", "Right"], "success_return": 1}
    assert envs.check_env_config("gymnasium", config) == []
    env = envs.make("gymnasium", **config)
    assert env.reset(seed=0)[0] == "P____"
    for _ in range(3):
        env.step(answer("Right"))
    text, _, terminated, _, info = env.step(answer("Right"))
    assert text == "____P" and terminated and info["success"]
    (problem,) = envs.check_env_config("gymnasium", config | {"env_id": f"{module}:Coridor-v0"})
    assert problem.path == "env_config.env_id" and problem.seen == f"{module}:Coridor-v0" and "Corridor" in problem.hint


@pytest.mark.filterwarnings("ignore:.*render_mode")
def test_an_unsupported_environment_is_named():
    with pytest.raises(ValueError, match=r"Pendulum-v1 has the action space Box.*expected Discrete"):
        GymnasiumEnv(env_id="Pendulum-v1", formatter="values", success_return=0)
    with pytest.raises(ValueError, match="formatter: got 'ansi', but CartPole-v1 renders only"):
        GymnasiumEnv(env_id="CartPole-v1", success_return=0)
    with pytest.raises(ValueError, match="action_names: got 1 names, expected 6"):
        GymnasiumEnv(env_id=TAXI, action_names=["Go"], success_return=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"env_id": "Taxy-v4", "success_return": 0}, "env_id: .*Taxi"),
        ({"env_id": "no_such_module:Env-v0", "success_return": 0}, "env_id: .*no_such_module"),
        ({"env_id": TAXI, "success_return": 0, "formatter": "value"}, "formatter: .*Did you mean 'values'"),
        ({"env_id": TAXI}, "success_return: seen null, expected a number, or success_key"),
        ({"success_return": 0}, "env_id: seen nothing"),
    ],
)
def test_wrong_configurations_are_problems(config, message):
    with pytest.raises(ValueError, match=message):
        GymnasiumEnv(**config)
    assert len(envs.check_env_config("gymnasium", config)) == 1


def test_gymnasium_accepts_it():
    check_env(GymnasiumEnv(**CLIFF), skip_render_check=True)
    check_env(GymnasiumEnv(env_id="Blackjack-v1", formatter="values", success_return=1), skip_render_check=True)
