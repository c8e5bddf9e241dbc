"""Third-party gymnasium environments played as text: as gymnasium ships them."""

import sys

import gymnasium
import pytest

import roll.agentic.env as envs
from roll.extras.worlds.gym_adapter import GymnasiumEnv, tell_colours
from tests.support.tags import answer

TAXI = max((name for name in gymnasium.registry if name.startswith("Taxi-v")), key=lambda name: int(name[6:]))
"""The newest: gymnasium refuses older versions."""

CLIFF = {"env_id": "CliffWalking-v1", "action_names": ["Up", "Right", "Down", "Left"], "success_return": -13}
CLIFF |= {"max_steps": 30}


def test_cliff_walking_is_won_by_walking_along_the_cliff():
    env = envs.make("gymnasium", **CLIFF)
    text, _ = env.reset(seed=0)
    assert len(text.split("\n")) >= 4 and "x" in text and "T" in text
    total = 0.0
    for name in ["Up", *["Right"] * 11, "Down"]:
        text, reward, terminated, truncated, info = env.step(answer(name.lower()))
        assert info["action"] == name and info["action_is_effective"]
        total += reward
    assert terminated and not truncated and info["success"] and total == -13
    env.close()
    env = GymnasiumEnv(**CLIFF, reward_scale=0.01)
    env.reset(seed=0)
    _, reward, _, _, info = env.step(answer("Right"))
    assert reward == -1.0 and not info["success"], "it has fallen"


def test_an_invalid_action_is_not_played():
    env = GymnasiumEnv(**(CLIFF | {"max_steps": 2}))
    text, start = env.reset(seed=0)
    for last in (False, True):
        after, reward, terminated, truncated, info = env.step("Up")
        assert after == text and info["state_key"] == start["state_key"]
        assert (reward, info["task_reward"], info["penalty"]) == (-0.5, 0.0, -0.5)
        assert (terminated, truncated) == (False, last)


def test_frozen_lake_shows_the_player_who_is_there_by_colour_alone():
    env = GymnasiumEnv(env_id="FrozenLake-v1", env_kwargs={"is_slippery": False}, success_return=1)
    text, start = env.reset(seed=0)
    assert text == "[red:S]FFF\nFHFH\nFFFH\nHFFG"
    text, _, _, _, info = env.step(answer("2"))
    assert text == "  (Right)\nS[red:F]FF\nFHFH\nFFFH\nHFFG"
    assert info["action_is_effective"] and info["state_key"] != start["state_key"]
    for name in "21112":
        text, reward, terminated, _, info = env.step(answer(name))
    assert "[red:G]" in text and reward == 1 and terminated and info["success"]


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ("plain", "plain"), ("\x1b[31mA\x1b[0mB", "[red:A]B"), ("\x1b[1;4mA\x1b[m", "A"),
        ("\x1b[97;44mA\x1b[49mB\x1b[39mC", "[bright white on blue:A][bright white:B]C"),
        ("\x1b[34m \x1b[0m\x1b[43m \x1b[0m", " [yellow: ]"), ("\x1b[42mA\nB\n\x1b[0m", "[green:A]\n[green:B]\n"),
        ("\x1b[38;5;208mA\x1b[48;2;1;2;3mB\x1b[0m", "[colour 208:A][colour 208 on colour 1 2 3:B]"),
        ("\x1b[2J\x1b[1;1HA\x1b[K", "A"),
    ],
)  # fmt: skip
def test_colours_are_told(seen, told):
    assert tell_colours(seen) == told


def test_blackjack_values_are_numbers_and_the_seed_repeats():
    config = {"env_id": "Blackjack-v1", "action_names": ["Stick", "Hit"], "renderer": "values", "success_return": 1}
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


def test_observations_of_any_kind_are_told_by_a_renderer(tmp_path):
    env = GymnasiumEnv(env_id="CartPole-v1", renderer="values", success_return=5)
    text, _ = env.reset(seed=0)
    assert len([float(value) for value in text.split()]) == 4
    file = tmp_path / "words.py"
    file.write_text("def tell(seen): return f'cart at {seen[0]:.2f}, speed {seen[1]:+.1f}'")
    env = GymnasiumEnv(env_id="CartPole-v1", renderer=f"{file}:tell", success_return=5, max_steps=3)
    text, _ = env.reset(seed=0)
    assert text == "cart at 0.01, speed -0.0"
    assert env.step(answer("1"))[0] != text


def measures(observation):
    return f"{observation['level']} litres of {observation['jar']}" if observation["level"] < 3 else None


def test_dictionaries_of_arrays_too_and_what_is_no_text_is_a_failure():
    config = {"env_id": "tests.support.third_party_envs:Jug-v0", "success_return": 2, "max_steps": 9}
    with pytest.raises(ValueError, match=r"renderer: got nothing, but the observations of .*Jug-v0 are Dict\("):
        GymnasiumEnv(**config)
    values = GymnasiumEnv(**config, renderer="values")
    assert values.reset(seed=3)[0] == "level: 0\njar: 2 3"
    env = GymnasiumEnv(**config, renderer=f"{__name__}:measures")
    assert env.reset(seed=3)[0] == "0 litres of [2 3]"
    env.step(answer("1"))
    assert env.step(answer("1"))[0] == "2 litres of [2 3]"
    with pytest.raises(TypeError, match=r"renderer .*:measures returned None \(NoneType\), expected text"):
        env.step(answer("1"))


def test_text_in_and_text_out_need_no_renderer():
    env = GymnasiumEnv(env_id="tests.support.third_party_envs:Echo-v0", success_return=1)
    assert env.reset(seed=0)[0] == "say it" and env.action_names == ()
    text, _, _, _, info = env.step(answer("it7"))
    assert (text, info["action"]) == ("say it", None), "not of the characters of the action space"
    text, reward, terminated, _, info = env.step(answer("it"))
    assert (text, reward, terminated, info["action"], info["success"]) == ("it", 1.0, True, "it", True)


def test_an_environment_of_another_package_is_registered_by_importing_its_module(monkeypatch):
    module, name = "tests.support.third_party_envs", "Corridor-v0"
    monkeypatch.delitem(sys.modules, module, raising=False)
    for known in (name, "Jug-v0", "Echo-v0"):
        gymnasium.registry.pop(known, None)
    config = {"env_id": f"{module}:{name}", "action_names": ["Left", "Right"], "success_return": 1}
    assert envs.check_env_config("gymnasium", config) == []
    env = envs.make("gymnasium", **config)
    assert env.reset(seed=0)[0] == "P____"
    for _ in range(3):
        env.step(answer("Right"))
    text, _, terminated, _, info = env.step(answer("Right"))
    assert text == "____P" and terminated and info["success"]
    (problem,) = envs.check_env_config("gymnasium", config | {"env_id": f"{module}:Coridor-v0"})
    assert problem.path == "env_config.env_id" and problem.got == f"{module}:Coridor-v0" and "Corridor" in problem.hint


@pytest.mark.filterwarnings("ignore:.*render_mode")
def test_an_unsupported_environment_is_named():
    wrong = [
        ("Pendulum-v1", {"renderer": "values"}, "Pendulum-v1 has the action space Box.*expected Discrete or Text"),
        ("CartPole-v1", {"renderer": "ansi"}, "renderer: got 'ansi', but CartPole-v1 renders only"),
        ("CartPole-v1", {}, "renderer: got nothing, but the observations of CartPole-v1 are Box.*expected"),
        (TAXI, {"action_names": ["Go"]}, "action_names: got 1 names, expected 6"),
    ]
    for name, config, message in wrong:
        with pytest.raises(ValueError, match=message):
            GymnasiumEnv(env_id=name, success_return=0, **config)
