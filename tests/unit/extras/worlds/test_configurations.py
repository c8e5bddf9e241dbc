"""What no configuration of a world may say, each one problem of one key, and worlds whose package is missing."""

import re

import pytest

import roll.agentic.env as envs
from tests.support.absence import hide
from tests.unit.extras.worlds.test_gym_adapter import TAXI

ITEMS = [{"prompt": "1+1=", "answer": "2"}]
URL, GUESS = "http://x", "GuessTheNumber-v0"
HERE = "tests.unit.extras.worlds.test_single_turn"


@pytest.mark.parametrize(
    ("env_type", "config", "message"),
    [
        ("gymnasium", {"env_id": "Taxy-v4", "success_return": 0}, "env_id: .*Taxi"),
        ("gymnasium", {"env_id": "no_such_module:Env-v0", "success_return": 0}, "env_id: .*no_such_module"),
        ("gymnasium", {"env_id": TAXI, "success_return": 0, "renderer": "value"}, "renderer: .*Did you mean 'values'"),
        ("gymnasium", {"env_id": TAXI, "success_return": 0, "renderer": "no.py:tell"}, "renderer: .*no.py"),
        ("gymnasium", {"env_id": TAXI}, "success_return: got null, expected a number, or success_key"),
        ("gymnasium", {"success_return": 0}, "env_id: got nothing"),
        ("openenv", {"url": "localhost:1", "success_return": 1}, "url: .*expected an address that begins with"),
        ("openenv", {"url": URL}, "success_return: got null, expected a number, or success_key"),
        ("openenv", {"url": URL, "success_return": 1, "renderer": "valeus"}, "renderer: .*Did you mean 'values'"),
        ("openenv", {"success_return": 1}, "url: got nothing"),
        ("textarena", {"env_id": "GuesTheNumber-v0"}, "env_id: .*did you mean GuessTheNumber-v0"),
        ("textarena", {"env_id": "TicTacToe-v0", "num_players": 2}, "opponent: got null, expected the other players"),
        ("textarena", {"env_id": GUESS, "opponent": "random"}, "opponent: .*expected null with one player"),
        ("textarena", {"env_id": "TicTacToe-v0", "num_players": 2, "opponent": "radom"}, "Did you mean 'random'"),
        ("textarena", {"env_id": GUESS, "player": 1}, "player: got 1, expected a number below num_players = 1"),
        ("textarena", {"env_id": GUESS, "action_pattern": "x"}, "action_pattern: .*a group around the answer"),
        ("gem", {"env_id": "game:GuessNumber-v0-easy"}, "did you mean game:GuessTheNumber"),
        ("single_turn", {}, r"items: got \[\], expected at least one, or a generator"),
        ("single_turn", {"items": ITEMS, "scorer": "exakt"}, "scorer: .*unknown scorer 'exakt'. Did you mean 'exact'"),
        ("single_turn", {"generator": "no_such_module:f"}, "generator: .*no_such_module"),
        ("single_turn", {"items": ITEMS, "generator": f"{HERE}:addition"}, "generator: got .* with items"),
        ("single_turn", {"items": ITEMS, "answer_pattern": "("}, "answer_pattern: got"),
        ("shop", {"kinds": ["mug", "Hat"]}, "words of at least two letters a to z"),
        ("shop", {"kinds": ["mug", "red"]}, "every word once, in kinds and attributes"),
        ("shop", {"num_shown": 4}, "num_shown: got 4, expected at most 3, the attributes"),
        ("shop", {"dialect": "hermas"}, "hermes"),
        ("hidden_word", {"words": ["crane", "cran"]}, "words of 4 and 5 letters"),
        ("hidden_word", {"words": ["Crane", "creek"]}, 'got "Crane", expected words of one length, letters a to z'),
        ("hidden_word", {"words": ["crane", "crane"]}, "expected every word once"),
        ("hidden_word", {"words": ["crane"]}, "words: got"),
        ("hidden_word", {"words": ["crane", "creek"], "split": "eval", "holdout_fraction": 0.01},
         r"holdout_fraction: got 0\.01, expected at least one of 2 words"),
        ("adventure", {"num_rooms": 2, "num_doors": 2}, "num_doors: got 2, expected at most 1, the passages between 2"),
        ("adventure", {"max_steps": 3}, "max_steps: got 3, expected at least 4"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_one_problem(env_type, config, message):
    if env_type in ("gem", "textarena"):
        pytest.importorskip("gem.envs" if env_type == "gem" else env_type, reason=f"pip install 'roll-rl[{env_type}]'")
    (problem,) = envs.check_env_config(env_type, config)
    assert re.search(message, str(problem)), problem
    with pytest.raises(ValueError, match=message):
        envs.make(env_type, **config)


@pytest.mark.parametrize(
    ("env_type", "package", "config"),
    [("openenv", "websockets", {"url": URL, "success_return": 1}), ("textarena", "textarena", {"env_id": GUESS}),
     ("gem", "gem", {"env_id": "game:GuessTheNumber-v0-easy"})],
)  # fmt: skip
def test_a_package_that_is_missing_is_named(env_type, package, config, monkeypatch):
    hide(monkeypatch, [package])
    (problem,) = envs.check_env_config(env_type, config)
    assert f"expected the package {package} to be installed (pip install 'roll-rl[{env_type}]')" in str(problem)
