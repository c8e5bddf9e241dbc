"""What a model folder has: read as its publisher means it, in FP8 and MXFP4 too, computed with as Transformers does,
and saved with its names, formats and files; only what was trained differs."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from roll.distributed.strategy.training.merging import Export, export_folder
from roll.distributed.strategy.training.module_weights import fill
from roll.distributed.strategy.training.optim import MASTER
from roll.distributed.weights.receiver import WeightUpdate
from roll.models.loading import load_causal_lm
from roll.models.stored import LowPrecision, StoredTensor
from roll.models.tiny import make_tokenizer
from roll.models.weight_files import WeightFiles
from roll.rewards.classifiers import RewardModelConfig, load_classifier
from tests.support.families import tiny_config, tiny_model
from tests.support.harness import ADAPTER, Layout, differ, make_batch, make_model, started, take_steps
from tests.support.known_families import KNOWN, SCORES, make_known
from tests.support.ranks import exported, run_ranks

TOWERS = {f"{family} with pictures": family for family in ("qwen3_5", "qwen3_5_moe", "gemma3")}
PREDICTORS = dict.fromkeys(["qwen3_next", "qwen3_5", "qwen3_5_moe", *list(TOWERS)[:2]], "mtp.fc.weight") | {
    "deepseek_v3": "model.layers.5.eh_proj.weight",
    "glm4_moe": "model.layers.4.eh_proj.weight",
}
EXACT = re.compile(r"^(?!.*(vision|multi_modal)).*(A_log|e_score_correction_bias|norm\.weight$)")
"""What some models of 16 bits have in 32."""
BESIDE = ("preprocessor_config.json", "chat_template.jinja", "generation_config.json", "LICENSE", "tekken.json")
TRAINERS = {"fsdp2_train": {}, "deepspeed_train": {"zero_optimization": {"stage": 2}}}
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
    add_entries(folder, dtype="bfloat16", num_nextn_predict_layers=1, publisher_says=family)
    make_tokenizer().save_pretrained(folder)
    for name in BESIDE:
        (folder / name).write_text(json.dumps({"eos_token_id": [1, 2], "name": name}))
    return folder


def add_entries(folder: Path, **entries: Any) -> None:
    """To its configuration."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))


def stored(folder: Path) -> dict[str, tuple[str, bytes]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        read = {name: file.get_tensor(name).contiguous().view(-1).view(torch.uint8) for name in file.keys()}  # noqa: SIM118
        return {name: (file.get_slice(name).get_dtype(), bytes(one.numpy())) for name, one in read.items()}


@pytest.mark.parametrize(("family", "strategy"), CASES)
def test_all_but_what_was_trained_comes_back(tmp_path, family, strategy):
    folder, saved = publish(tmp_path / "model", family), tmp_path / "saved"
    trainer = make_trainer(folder, strategy, strategy_config=TRAINERS[strategy], model_args={"dtype": None})
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
    start = partial(make_trainer, folder, strategy, strategy_config=TRAINERS[strategy], model_args=options)
    if strategy == "deepspeed_train":
        words = r"model\.layers\.0\.\S+: it is in float32 in the model's folder and not trained"
        with pytest.raises(ValueError, match=words):
            start()
        return
    trainer = start()
    take_steps(trainer, 0)
    trainer.save_model(tmp_path / "saved")
    before, after = stored(folder), stored(tmp_path / "saved")
    changed = [name for name in before if before[name] != after[name]]
    assert changed and not [name for name in changed if ".layers.0." in name]


# ---- what is computed with and saved though nothing trains it


def random_folder(model: Any, path: Path) -> Path:
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.ndim > 1 or "correction_bias" in name:
                tensor.normal_(0, 0.3)
    model.float().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose routers have a bias that no gradient trains, and a layer that predicts further tokens."""
    config = tiny_config("deepseek_v3", num_hidden_layers=2, n_group=2, num_nextn_predict_layers=1)
    folder = random_folder(tiny_model(config), tmp_path_factory.mktemp("models") / "deepseek")
    predictor = {"model.layers.2.eh_proj.weight": torch.randn(64, 128)}
    file = folder / "model.safetensors"
    save_file(load_file(file) | predictor, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model with a vision tower, in the layout in which Qwen publishes them."""
    config = tiny_config("qwen3_5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    return random_folder(model, tmp_path_factory.mktemp("models") / "qwen3_5")


def make_trainer(folder: Path, strategy: str = "fsdp2_train", rank: int = 0, **options: Any) -> Any:
    return started(Layout("alone", strategy, **{"world_size": 1} | options), folder, rank)


def scores(trainer: Any) -> Any:
    return trainer.logprobs(make_batch(0)).logprobs_T


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        *((strategy, kind) for strategy in ("fsdp2_train", "deepspeed_train") for kind in ("balanced", "published")),
        ("megatron_train", "balanced"),
    ],
)
def test_all_of_a_folder_is_computed_with_and_saved_again(request, tmp_path, strategy, kind):
    folder = request.getfixturevalue(kind)
    trainer = make_trainer(folder, strategy)
    assert differ(scores(trainer), folder) < 1e-4
    trainer.save_model(tmp_path / "same")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "same"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    settings = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "same")]
    assert len({(one["model_type"], *one["architectures"]) for one in settings}) == 1
    receiver = load_causal_lm(str(folder))
    weights = exported(trainer)
    assert WeightUpdate(receiver, weights).parts and not any("visual" in name or "eh_proj" in name for name in weights)
    take_steps(trainer, 0)
    trainer.save(tmp_path / "checkpoint")
    trained = scores(trainer)
    assert differ(trained, tmp_path / "checkpoint" / "actor_train") < 1e-4
    take_steps(trainer, 1)
    trainer.load(tmp_path / "checkpoint")
    assert torch.equal(scores(trainer), trained)


@pytest.mark.parametrize("kind", ["balanced", "published"])
def test_an_export_from_the_optimizers_weights_has_all_of_the_folder(request, tmp_path, kind):
    folder = request.getfixturevalue(kind)
    trainer = make_trainer(folder, model_args={"dtype": "bf16"}, strategy_config={"param_dtype": "fp32"})
    take_steps(trainer, 0)
    trainer.save(tmp_path)
    made = export_folder(
        Export(tmp_path / "actor_train", tmp_path / "resume" / "actor_train", torch.float32), tmp_path / "out"
    )
    assert made.num_tensors == len(load_file(folder / "model.safetensors"))
    assert differ(scores(trainer), tmp_path / "out") < 1e-4


def test_an_adapter_is_merged_into_all_of_the_folder(published, tmp_path):
    trainer = make_trainer(published, lora=ADAPTER)
    take_steps(trainer, 0, 1)
    trainer.save_model(tmp_path / "adapter")
    made = export_folder(Export(tmp_path / "adapter", merge=True), tmp_path / "out")
    assert made.num_tensors == len(load_file(published / "model.safetensors"))
    assert differ(scores(trainer), tmp_path / "out") < 1e-4


def sharded_main(rank: int, folder: Path, out: Path) -> Any:
    trainer = make_trainer(folder, rank=rank, world_size=2, strategy_config={"checkpoint": "sharded"})
    take_steps(trainer, 0)
    trainer.save(out)
    return scores(trainer)


@pytest.mark.slow  # two processes that import all over again
def test_shards_of_two_ranks_become_all_of_the_folder(balanced, tmp_path):
    expected, _ = run_ranks(sharded_main, 2, balanced, tmp_path)
    made = export_folder(Export(tmp_path / "actor_train", tmp_path / "resume" / "actor_train"), tmp_path / "out")
    assert made.num_tensors == len(load_file(balanced / "model.safetensors"))
    assert differ(expected, tmp_path / "out") < 1e-4


def test_shards_of_a_model_with_other_parts_are_refused(published):
    with pytest.raises(ValueError, match=r"checkpoint: got sharded, expected whole: .* \(qwen3_5\) has more than"):
        make_trainer(published, strategy_config={"checkpoint": "sharded"})


@pytest.mark.parametrize("strategy", ["fsdp2_train", "deepspeed_train", "megatron_train", "hf_infer"])
@pytest.mark.parametrize("change", ["tied", "layer", "head"])
def test_every_engine_reads_a_folder_alike(tmp_path, strategy, change):
    folder = make_model(tmp_path / "model", "qwen2")
    tensors, file = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    more = {"tied": "lm_head.weight", "layer": "model.layers.4.input_layernorm.weight", "head": "v_head.weight"}[change]
    tensors[more] = torch.ones_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, file, metadata={"format": "pt"})

    def load() -> Any:
        return load_causal_lm(str(folder)) if strategy == "hf_infer" else make_trainer(folder, strategy)

    if refused := {"tied": r"lm_head\.weight differs", "layer": r"lost: model\.layers\.4"}.get(change):
        with pytest.raises(ValueError, match=refused):
            load()
        return
    found = load()
    if strategy != "hf_infer":
        found.save_model(tmp_path / "saved")
        assert torch.equal(load_file(tmp_path / "saved" / "model.safetensors")[more], tensors[more])


def test_a_tower_survives_the_end_of_the_folder_that_it_came_from(published, tmp_path):
    folder = shutil.copytree(published, tmp_path / "model")
    trainer = make_trainer(folder)
    (folder / "model.safetensors").unlink()
    trainer.save_model(tmp_path / "saved")
    names = [load_file(path / "model.safetensors").keys() for path in (tmp_path / "saved", published)]
    assert names[0] == names[1]


# ---- numbers of few bits

BLOCK = 24
"""Divides hardly any side of the tiny models, as 128 divides not all of DeepSeek-V3's."""
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
ENDS = [5, 7, 95]
"""What ends a completion; ``config.json`` names the last alone."""


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


def publish_in_few_bits(folder: Path, family: str) -> dict[str, Tensor]:
    """A tiny model in its publisher's format; returns what its bits stand for, in float64."""
    make_known(folder, family, 96, **({"hidden_size": 64, "intermediate_size": 32} if family == "gpt_oss" else {}))
    tensors = load_file(folder / "model.safetensors")
    if family == "deepseek_v3":
        tensors[PREDICTORS[family]] = torch.randn(40, 50)
    stored = {}
    meant = {}
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
    add_entries(folder, dtype="bfloat16", quantization_config=method, num_nextn_predict_layers=1)
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
    meant = publish_in_few_bits(tmp_path / "model", family)
    files = WeightFiles(str(tmp_path / "model"))
    read = {name: files.read(name) for name in files.names}
    check(read, meant, exactly=family == "gpt_oss")
    trainer = make_trainer(tmp_path / "model", model_args={"dtype": None})
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
    add_entries(tmp_path, dtype="bfloat16", quantization_config=FP8)
    found = load_classifier(RewardModelConfig(model_path=str(tmp_path))).state_dict()
    check({name: found[name] for name in packed}, {n: from_fp8(*parts) for n, parts in packed.items()}, exactly=False)


def test_scales_of_other_blocks_are_refused():
    with pytest.raises(ValueError, match=r"w: got shape \(4, 6\) with scales .*\(3, 2\), expected .* per \(4, 4\)"):
        LowPrecision("fp8", (4, 4)).stored("w", torch.zeros(4, 6).to(torch.float8_e4m3fn), torch.ones(3, 2))
