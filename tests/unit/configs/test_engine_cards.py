"""Engines are known by their cards alone: shared code names none, and one more takes a card and one line."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll.configs.agentic import AgenticConfig
from roll.configs.engines import ENGINES, card_of, cards, packages, strategy_names
from roll.configs.loader import validate
from roll.configs.problems import ConfigErrors
from roll.distributed.strategy import strategy_class
from roll.preflight.choices import CHECKS, describe_unchecked
from tests.support.terse.card import CARD

ROLL = Path(__file__).resolve().parents[3] / "roll"
SHARED = ["configs/*.py", "preflight/*.py", "pipeline/**/*.py", "rollout/*.py", "distributed/strategy/*.py"]
BY_PATH = ["tests.support.terse.card:CARD", "tests.support.terse.strategy:Terse"]


def check(**actor_infer: Any) -> AgenticConfig:
    values = {
        "adv_estimator": "reinforce",
        "rollout_batch_size": 8,
        "val_batch_size": 8,
        "custom_envs": {"Lake": {"env_type": "frozen_lake"}},
        "train_env_manager": {"tags": ["Lake"]},
        "val_env_manager": {"tags": ["Lake"]},
        "actor_infer": {"strategy_args": actor_infer},
    }
    return validate(AgenticConfig, values, CHECKS[AgenticConfig])


def problems(**actor_infer: Any) -> dict[str, str]:
    with pytest.raises(ConfigErrors) as caught:
        check(**actor_infer)
    base = "actor_infer.strategy_args."
    return {p.path.removeprefix(base): f"{p.expected} {p.hint}" for p in caught.value.problems}


def test_shared_code_names_no_engine() -> None:
    names = {*ENGINES.names(), *strategy_names()}
    allowed = {"configs/rl.py", "configs/strategy.py"}  # what a configuration says that says nothing
    found = [
        f"{path.relative_to(ROLL)}:{node.lineno}: {node.value}"
        for pattern in SHARED
        for path in ROLL.glob(pattern)
        if str(path.relative_to(ROLL)) not in allowed
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not found


def test_cards_load_neither_torch_nor_an_engine() -> None:
    code = (
        "import sys; from roll.configs.engines import cards; list(cards());"
        "print({'torch', 'ray', 'transformers', 'vllm', 'deepspeed', 'megatron'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_card_has_a_folder_and_says_what_it_can_play() -> None:
    for card in cards():
        assert (ROLL / "distributed" / "strategy" / card.name / "strategy.py").is_file()
        for name, strategy in card.strategies.items():
            assert card_of(name) is card and card.strategy(name) is strategy is card.strategy(strategy.path)
            assert strategy.trains or strategy.scores or strategy.generates
            assert strategy.path.startswith(f"roll.distributed.strategy.{card.name}.strategy:")


@pytest.fixture(params=[*BY_PATH, "terse"])
def terse(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The toy engine, by the path of its card or class, or registered by one line."""
    if request.param == "terse":
        monkeypatch.setattr(ENGINES, "_entries", dict(ENGINES._entries))
        ENGINES.register("terse", "tests.support.terse.card:CARD")
    yield request.param


def test_an_engine_with_a_card_is_checked_like_those_of_the_library(terse: str) -> None:
    assert card_of(terse) is CARD
    assert check(strategy_name=terse, strategy_config={"max_answer_tokens": 2})
    assert strategy_class(terse).__name__ == "Terse"
    found = problems(strategy_name=terse, strategy_config={"max_answer_tokens": 0, "min_answer_tokens": 1})
    assert found["strategy_config.max_answer_tokens"].startswith("int, at least 1")
    assert "did you mean max_answer_tokens?" in found["strategy_config.min_answer_tokens"]
    found = problems(strategy_name=terse, strategy_config={"max_answer_tokens": 5000})
    assert "response_length = 1024" in found["strategy_config.max_answer_tokens"]


def test_an_engine_plays_only_what_its_card_says(terse: str) -> None:
    values = {"actor_train": {"strategy_args": {"strategy_name": terse}}, "adv_estimator": "reinforce"}
    with pytest.raises(ConfigErrors) as caught:
        validate(AgenticConfig, values, CHECKS[AgenticConfig])
    found = {problem.path: problem.expected for problem in caught.value.problems}
    assert "a strategy that trains" in found["actor_train.strategy_args.strategy_name"]


@pytest.mark.skipif(bool(packages()["sglang"].installed), reason="SGLang is installed here")
def test_options_that_nobody_could_check_are_told() -> None:
    config = check(strategy_name="sglang", strategy_config={"chunked_prefill_sise": 64, "tp_size": 1})
    (line,) = describe_unchecked(config)
    assert "chunked_prefill_sise: not checked, since sglang is not installed here" in line
    config = check(strategy_name="collections:OrderedDict", strategy_config={"a": 1})
    assert "has no card" in describe_unchecked(config)[0]
