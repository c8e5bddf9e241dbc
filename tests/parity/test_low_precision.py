"""Folders in FP8 and MXFP4: read as what their bits stand for, by an independent reading in float64; saved as plain."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from roll.distributed.strategy.training.merging import Export, export_folder
from roll.models.loading import load_causal_lm
from roll.models.stored import LowPrecision
from roll.models.weight_files import WeightFiles
from roll.rewards.classifiers import RewardModelConfig, load_classifier
from tests.support.harness import Layout, started, take_steps
from tests.support.known_families import SCORES, make_known

BLOCK = 24
"""Divides hardly any side of the tiny models, as 128 divides not all of DeepSeek-V3's."""
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
ENDS = [5, 7, 95]
"""What ends a completion; ``config.json`` names the last alone."""
MTP = "model.layers.5.eh_proj.weight"


def in_fp8(whole: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (-(-size // BLOCK) for size in whole.shape)
    scales = torch.empty(rows, columns)
    values = torch.empty_like(whole)
    for i in range(rows):
        for j in range(columns):
            area = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = whole[area].abs().max() / 448
            values[area] = whole[area] / scales[i, j]
    return values.to(torch.float8_e4m3fn), scales


def from_fp8(values: Tensor, scales: Tensor) -> Tensor:
    row_of, column_of = (torch.arange(size) // BLOCK for size in values.shape)
    return values.double() * scales.double()[row_of][:, column_of]


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Sign, two bits of exponent with bias 1, one of mantissa; the group's power of two has bias 127."""
    halves = torch.stack([blocks % 16, blocks // 16], -1).flatten(-2).double()
    sign, exponent, mantissa = 1 - 2 * (halves // 8), halves % 8 // 2, halves % 2
    value = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2 ** (exponent - 1))
    return (sign * value * 2.0 ** (scales.double() - 127)[..., None]).flatten(-2).transpose(1, 2)


def publish(folder: Path, family: str) -> dict[str, Tensor]:
    """A tiny model in its publisher's format; returns what its bits stand for, in float64."""
    make_known(folder, family, 96, **({"hidden_size": 64, "intermediate_size": 32} if family == "gpt_oss" else {}))
    tensors = load_file(folder / "model.safetensors")
    if family == "deepseek_v3":
        tensors[MTP] = torch.randn(40, 50)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, whole in tensors.items():
        if family == "deepseek_v3" and ("_proj" in name):
            stored[name], stored[f"{name}_scale_inv"] = in_fp8(whole)
            meant[name] = from_fp8(stored[name], stored[f"{name}_scale_inv"])
        elif family == "gpt_oss" and name.endswith("experts.gate_up_proj"):
            shape = (whole.shape[0], whole.shape[2], whole.shape[1] // 32)
            blocks = stored[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            scales = stored[f"{name}_scales"] = torch.randint(117, 125, shape, dtype=torch.uint8)
            meant[name] = from_mxfp4(blocks, scales)
            assert torch.equal(convert_moe_packed_tensors(blocks, scales).double(), meant[name])
        else:
            stored[name] = whole if "correction_bias" in name else whole.bfloat16()
            meant[name] = stored[name].double()
    save_file({name: one.contiguous() for name, one in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    method = {"quant_method": "mxfp4"} if family == "gpt_oss" else FP8 | {"activation_scheme": "dynamic"}
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": method, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return meant


def check(found: dict[str, Tensor], meant: dict[str, Tensor], *, exactly: bool) -> None:
    """To the bit in MXFP4, whose values have few bits; within half a unit of bf16's last place in FP8."""
    assert found.keys() == meant.keys()
    assert not [name for name, one in found.items() if one.dtype != torch.bfloat16 and "correction_bias" not in name]
    for name, one in found.items():
        gap = (one.double() - meant[name]).abs()
        assert bool((gap <= (0 if exactly else meant[name].abs() * 2**-8 * (1 + 1e-6))).all()), name


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_bits_are_read_as_they_are_meant_and_saved_as_plain_weights(tmp_path, family, caplog):
    caplog.set_level("INFO")
    meant = publish(tmp_path / "model", family)
    files = WeightFiles(str(tmp_path / "model"))
    read = {name: files.read(name) for name in files.names}
    check(read, meant, exactly=family == "gpt_oss")
    trainer = started(Layout("alone", "fsdp2_train", 1, model_args={"dtype": None}), tmp_path / "model")
    assert caplog.text.count("are read as bf16; models that are saved have them so, without quantization_config") == 1
    trainer.save_model(tmp_path / "saved")
    export_folder(Export(tmp_path / "model"), tmp_path / "exported")
    for folder in (tmp_path / "saved", tmp_path / "exported"):
        saved = load_file(folder / "model.safetensors")
        assert saved.keys() == read.keys() and all(torch.equal(saved[name], read[name]) for name in read)
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    model, plain = load_causal_lm(str(tmp_path / "model")), load_causal_lm(str(tmp_path / "saved"))
    assert all(torch.equal(one, plain.state_dict()[name]) for name, one in model.state_dict().items())
    assert model.generation_config.eos_token_id == plain.generation_config.eos_token_id == ENDS
    take_steps(trainer, 0)


def test_a_reward_model_is_read_as_its_bits_are_meant(tmp_path):
    whole = load_file(make_known(tmp_path, f"llama3{SCORES}", 96) / "model.safetensors")
    packed = {name: in_fp8(one) for name, one in whole.items() if "_proj" in name}
    scales = {f"{name}_scale_inv": parts[1] for name, parts in packed.items()}
    values = {name: parts[0].contiguous() for name, parts in packed.items()}
    save_file(whole | values | scales, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "quantization_config": FP8}))
    found = load_classifier(RewardModelConfig(model_path=str(tmp_path))).state_dict()
    check({name: found[name] for name in packed}, {n: from_fp8(*parts) for n, parts in packed.items()}, exactly=False)


def test_scales_of_other_blocks_are_refused():
    with pytest.raises(ValueError, match=r"w: got shape \(4, 6\) with scales .*\(3, 2\), expected .* per \(4, 4\)"):
        LowPrecision("fp8", (4, 4)).stored("w", torch.zeros(4, 6).to(torch.float8_e4m3fn), torch.ones(3, 2))
