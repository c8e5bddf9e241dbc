"""What of an adapter is refused in the training of a reward model, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.configs.loader import validate
from roll.configs.problems import ConfigErrors
from roll.configs.reward_training import RewardTrainingConfig
from roll.models.lora import LoraSpec, write_adapter_config
from roll.preflight.choices import CHECKS

KEY = "actor_train.model_args"
NAMES = [f"layers.0.{layer}.lora_A.weight" for layer in ("q_proj", "down_proj")]


@pytest.fixture
def problems(tmp_path: Path) -> Any:
    def find(strategy: str, **model_args: Any) -> dict[str, str]:
        data = {"file_name": str(tmp_path / "pairs.jsonl"), "prompt": "prompt"}
        (tmp_path / "pairs.jsonl").write_text("")
        section = {
            "model_args": {"dtype": "fp32", "lora_target": "q_proj,down_proj", **model_args},
            "data_args": data,
            "strategy_args": {"strategy_name": strategy},
            "device_mapping": [0],
        }
        values = {"exp_name": "run", "max_steps": 1, "pretrain": "tiny", "actor_train": section}
        try:
            validate(RewardTrainingConfig, values, CHECKS[RewardTrainingConfig])
        except ConfigErrors as errors:
            return {problem.path: f"{problem.expected} {problem.hint}" for problem in errors.problems}
        return {}

    return find


@pytest.mark.parametrize("strategy", ["fsdp2_train", "deepspeed_train", "megatron_train"])
def test_an_adapter_is_trained(problems: Any, strategy: str) -> None:
    assert problems(strategy) == {}


def test_an_adapter_of_a_language_model_or_one_that_adds_otherwise_is_no_start(problems: Any, tmp_path: Path) -> None:
    key, spec = f"{KEY}.adapter_name_or_path", LoraSpec(8, 16, ("q_proj", "down_proj"))
    write_adapter_config(tmp_path, spec, "base", NAMES, scores=True)
    assert problems("fsdp2_train", adapter_name_or_path=str(tmp_path)) == {}
    write_adapter_config(tmp_path, spec, "base", NAMES)
    assert (
        "task_type SEQ_CLS task_type: CAUSAL_LM in" in problems("fsdp2_train", adapter_name_or_path=str(tmp_path))[key]
    )
    write_adapter_config(tmp_path, LoraSpec(8, 16, ("q_proj", "down_proj")), "base", NAMES, scores=True)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_rslora": True}))
    found = problems("fsdp2_train", adapter_name_or_path=str(tmp_path))
    assert found == {f"{KEY}.adapter_name_or_path": "an adapter without it use_rslora is True in adapter_config.json"}
