"""The section ``judge``: who asks, which devices it may have, and what of ROLL's cluster ``reward`` it becomes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from roll.configs.agentic import JUDGE_CLUSTER, AgenticConfig
from roll.extras.importers.convert import convert
from roll.extras.importers.draft import Kind
from roll.extras.plan.plan import hosted_models
from roll.preflight.models import trusted_code
from tests.support.configs import words_of
from tests.unit.configs.test_config import MINIMAL, load

__all__ = ["load"]  # a fixture
ASKING = "Lake: {env_type: 'tests.support.judged_env:JudgedEnv', env_manager_cls: traj}"
TEXT = MINIMAL.replace("Lake: {env_type: frozen_lake, env_manager_cls: traj}", ASKING).replace("tiny", "some/model")
ROLL = Path(__file__).parents[1] / "extras" / "importers" / "files" / "roll" / "run" / "agentic.yaml"


@pytest.fixture
def judged(load: Any) -> Any:
    """Loads MINIMAL with an environment that asks, with overrides."""
    return partial(load, text=TEXT)


def test_it_is_a_cluster_of_its_own_and_a_model_that_counts(judged):
    words = "judge={model: some/judge, device_mapping: [0, 1], num_gpus_per_worker: 2, max_tokens: 9}"
    trust = "judge.engine.model_args.trust_remote_code=true"
    config = judged(words, trust)
    assert config.clusters[JUDGE_CLUSTER].num_workers == 1 and config.key_of(JUDGE_CLUSTER) == "judge"
    assert config.models["judge.model"] == "some/judge"
    assert any("judge.engine.model_args.trust_remote_code" in line for line in trusted_code(config))
    (hosted,) = hosted_models(config)
    assert (hosted.cluster, hosted.key, hosted.model) == (JUDGE_CLUSTER, "judge.model", "some/judge")
    assert hosted.judge is config.judge and hosted.worker.num_gpus_per_worker == 2


def test_who_asks_has_a_judge_and_a_judge_is_asked(judged, load):
    assert "the model that Lake (tests.support.judged_env:JudgedEnv) asks" in words_of(judged)["judge"]
    assert "no environment calls a model" in words_of(load, "judge={model: some/judge}")["judge"]


def test_everything_wrong_is_told_at_once(judged, tmp_path):
    trainer = "judge.engine.strategy_args.strategy_name=fsdp2_train"
    given = "judge={model: ./absent, max_tokens: 20, engine: {max_length: 20}}"
    found = words_of(judged, given, "judge.device_mapping=[0,1,9]", "judge.num_gpus_per_worker=2", trainer)
    expected = {
        "judge.model": "there is nothing at this path",
        "judge.max_tokens": "less than engine.max_length = 20",
        "judge.num_gpus_per_worker": "a divisor of 3",
        "judge.engine.strategy_args.strategy_name": "an engine that generates",
    }
    assert {key: words for key, words in expected.items() if words not in found.get(key, "")} == {}, found
    assert "ids from 0" in words_of(judged, "judge={model: a/b, device_mapping: [99]}")["judge.device_mapping"]
    (tmp_path / "blind").mkdir()
    (tmp_path / "blind" / "config.json").write_text('{"model_type": "llama"}')
    blind = words_of(judged, f"judge={{model: {tmp_path / 'blind'}, pictures: true}}")
    assert "blind takes no pictures" in blind["judge.pictures"]
    beside = words_of(judged, "judge={model: a/b, device_mapping: [1]}", "async_generation_ratio=1")
    assert "devices of no role that trains or computes log-probs" in beside["judge.device_mapping"]


def test_the_cluster_reward_of_roll_becomes_it():
    engine = "strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.5}}"
    words = "model_args: {model_name_or_path: some/judge, dtype: bf16}, generating_args: {max_new_tokens: 99, top_p: 1}"
    reward = f"+reward={{{words}, {engine}, device_mapping: 'list(range(0,2))', llm_proxy: {{proxy_type: policy}}}}"
    imported = convert("roll", [ROLL], [reward, "+train_env_manager.llm_proxy={proxy_type: policy}"])
    assert imported.schema is AgenticConfig
    outcomes = {outcome.key: outcome.kind for outcome in imported.outcomes if "llm_proxy" in outcome.key}
    assert set(outcomes.values()) == {Kind.DROPPED} and len(outcomes) == 2
    for told in ("model: some/judge", "max_tokens: 99", "strategy_name: vllm", "dtype: bf16"):
        assert told in imported.text
    assert any(outcome.kind is Kind.TO_DO and "asks = True" in outcome.note for outcome in imported.outcomes)
    other = convert("roll", [ROLL], ["+train_env_manager.llm_proxy={proxy_type: openai}"])
    told = {outcome.key for outcome in other.outcomes if outcome.kind is Kind.IMPOSSIBLE}
    assert "train_env_manager.llm_proxy.proxy_type" in told
