"""Weights are read by name from what Transformers itself writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from roll.models.megatron.weight_files import WeightFiles
from tests.support.megatron_models import CONFIGS, checkpoint, make_model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model(CONFIGS["qwen3 moe"])


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_reads_all_that_a_saved_model_holds(model: PreTrainedModel, tmp_path: Path, shard_size: str) -> None:
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "20KB")
    files = WeightFiles(str(tmp_path))
    for name, weight in checkpoint(model).items():
        assert torch.equal(files.read(name), weight)


def test_a_model_without_output_layer_has_names_without_prefix(model: PreTrainedModel, tmp_path: Path) -> None:
    model.get_decoder().save_pretrained(tmp_path)
    files = WeightFiles(str(tmp_path))
    assert torch.equal(files.read("model.norm.weight"), model.get_parameter("model.norm.weight"))
    with pytest.raises(ValueError, match=r"no weight 'lm_head\.weight' in its safetensors files"):
        files.read("lm_head.weight")


def test_a_folder_without_weights_is_an_error(model: PreTrainedModel, tmp_path: Path) -> None:
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no model\.safetensors in it"):
        WeightFiles(str(tmp_path))
