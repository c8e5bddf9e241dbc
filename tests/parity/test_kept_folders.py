"""A published folder comes back from the trainers with its names, formats and files; only what was trained differs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from roll.distributed.strategy.training.module_weights import fill
from roll.distributed.strategy.training.optim import MASTER
from roll.models.stored import StoredTensor
from roll.models.tiny import make_tokenizer
from tests.support.families import tiny_config
from tests.support.harness import Layout, started, take_steps
from tests.support.known_families import KNOWN, make_known

TOWERS = {f"{family} with pictures": family for family in ("qwen3_5", "qwen3_5_moe", "gemma3")}
PREDICTORS = dict.fromkeys(["qwen3_next", "qwen3_5", "qwen3_5_moe", *list(TOWERS)[:2]], "mtp.fc.weight") | {
    "deepseek_v3": "model.layers.5.eh_proj.weight",
    "glm4_moe": "model.layers.4.eh_proj.weight",
}
EXACT = re.compile(r"^(?!.*(vision|multi_modal)).*(A_log|e_score_correction_bias|norm\.weight$)")
"""What some models of 16 bits have in 32."""
BESIDE = ("preprocessor_config.json", "chat_template.jinja", "generation_config.json", "LICENSE", "tekken.json")
TRAINERS: dict[str, dict[str, Any]] = {"fsdp2_train": {}, "deepspeed_train": {"zero_optimization": {"stage": 2}}}
CASES = [
    pytest.param(family, trainer, marks=[] if (number + place) % 2 else [pytest.mark.slow])
    for number, family in enumerate([*KNOWN, *TOWERS])
    for place, trainer in enumerate(TRAINERS)
]


def publish(folder: Path, family: str) -> Path:
    """A tiny model as its publisher has it: in bf16, some of it in float32, with predictors of further tokens."""
    if family in TOWERS:
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(tiny_config(TOWERS[family])).save_pretrained(folder)
    else:
        make_known(folder, family, 96)
    file = folder / "model.safetensors"
    tensors = {name: one if EXACT.search(name) else one.bfloat16() for name, one in load_file(file).items()}
    more = {PREDICTORS[family]: torch.randn(8, 4)} if family in PREDICTORS else {}
    save_file(tensors | more, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "num_nextn_predict_layers": 1, "publisher_says": family}
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer().save_pretrained(folder)
    for name in BESIDE:
        (folder / name).write_text(json.dumps({"eos_token_id": [1, 2], "name": name}))
    return folder


def stored(folder: Path) -> dict[str, tuple[str, bytes]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        read = {name: file.get_tensor(name).contiguous().view(-1).view(torch.uint8) for name in file.keys()}  # noqa: SIM118
        return {name: (file.get_slice(name).get_dtype(), bytes(one.numpy())) for name, one in read.items()}


@pytest.mark.parametrize(("family", "strategy"), CASES)
def test_all_but_what_was_trained_comes_back(tmp_path, family, strategy):
    folder, saved = publish(tmp_path / "model", family), tmp_path / "saved"
    trainer = started(Layout("alone", strategy, 1, TRAINERS[strategy], model_args={"dtype": None}), folder)
    weights = trainer.weights
    changed = next(name for name in weights.trained if name.endswith("norm.weight"))
    fill(weights, [changed], MASTER, lambda name: StoredTensor.of(torch.full(weights.shape(name), 1 / 3)))
    if family in TOWERS:
        take_steps(trainer, 0)
    trainer.save_model(saved)
    before, after = stored(folder), stored(saved)
    assert {name: kind for name, (kind, _) in after.items()} == {name: kind for name, (kind, _) in before.items()}
    differing = [name for name in before if before[name] != after[name]]
    if family in TOWERS:
        assert differing and not [name for name in differing if re.search("vis|multi_modal|mtp", name)]
    else:
        assert len(differing) == 1 and differing[0].split(".")[-2] == changed.split(".")[-2]
    for file in folder.iterdir():
        if file.name == "config.json":
            assert json.loads(file.read_text()) == json.loads((saved / file.name).read_text())
        elif file.name != "model.safetensors":
            assert file.read_bytes() == (saved / file.name).read_bytes(), file.name


@pytest.mark.parametrize("strategy", TRAINERS)
def test_frozen_parts_in_float32_are_kept_or_refused(tmp_path, strategy):
    folder = publish(tmp_path / "model", "llama3")
    options = {"dtype": None, "freeze_module_prefix": "model.layers.0"}
    layout = Layout("alone", strategy, 1, TRAINERS[strategy], model_args=options)
    if strategy == "deepspeed_train":
        words = r"model\.layers\.0\.\S+: it is in float32 in the model's folder and not trained"
        with pytest.raises(ValueError, match=words):
            started(layout, folder)
        return
    trainer = started(layout, folder)
    take_steps(trainer, 0)
    trainer.save_model(tmp_path / "saved")
    before, after = stored(folder), stored(tmp_path / "saved")
    changed = [name for name in before if before[name] != after[name]]
    assert changed and not [name for name in changed if ".layers.0." in name]
