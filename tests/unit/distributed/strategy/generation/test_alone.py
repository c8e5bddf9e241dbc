"""The model behind a folder of peft, and which adapters are no such addition as every engine makes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file

from roll.distributed.strategy.generation.alone import base_of
from roll.models.lora import LoraSpec


def save(folder: Path, **options: Any) -> str:
    """As peft writes it."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], base_model_name_or_path="base", **options)
    config.save_pretrained(str(folder))
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    matrices = {f"{layer}_A.weight": torch.ones(4, 6), f"{layer}_B.weight": torch.ones(5, 4)}
    save_file(matrices, folder / "adapter_model.safetensors")
    return str(folder)


def test_an_adapter_is_found_with_its_base(tmp_path):
    assert base_of(save(tmp_path, task_type="CAUSAL_LM")) == ("base", LoraSpec(4, 8, ("q_proj",)))
    assert base_of("org/model") == ("org/model", None)


@pytest.mark.parametrize(
    "options", [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}, {"use_dora": True}, {"bias": "all"}]
)
def test_an_adapter_that_adds_otherwise_is_refused(tmp_path, options):
    folder = save(tmp_path, **options)
    (key,) = options
    written = json.loads((tmp_path / "adapter_config.json").read_text())[key]
    with pytest.raises(ValueError, match=f"{key} is ") as refusal:
        base_of(folder)
    assert repr(written) in str(refusal.value)
