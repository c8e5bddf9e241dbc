"""Tensors of a folder: read by name or in parts from what is written, and taken, kept or refused by a model."""

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, Qwen2Config
from transformers.core_model_loading import revert_weight_conversion

from roll.models.freezing import UnknownPartError, freeze, frozen_parameters, own_rates
from roll.models.heads import load_value_head
from roll.models.loading import copy_companions, fit_folder, load_causal_lm, load_config, outline, persistent_buffers
from roll.models.stored import LowPrecision, StoredTensor
from roll.models.tiny import make_tokenizer
from roll.models.tokenizer import load_tokenizer
from roll.models.weight_files import INDEX, FolderFit, WeightFiles
from tests.support.choice import slow_but
from tests.support.families import tiny_config, tiny_model
from tests.support.known_families import KNOWN, make_known
from tests.support.megatron_models import CONFIGS, checkpoint, make_model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model(CONFIGS["qwen3 moe"])


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_reads_all_that_a_saved_model_holds(model, tmp_path, shard_size):
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "20KB")
    files, weights = WeightFiles(str(tmp_path)), checkpoint(model)
    assert set(files.names) == weights.keys()
    assert all(torch.equal(files.read(name), weight) for name, weight in weights.items())


def test_a_model_is_loaded_in_the_number_format_of_its_folder(model, tmp_path):
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_causal_lm(str(tmp_path)).dtype == torch.bfloat16


def test_a_model_without_output_layer_has_names_without_prefix(model, tmp_path):
    model.get_decoder().save_pretrained(tmp_path)
    files = WeightFiles(str(tmp_path))
    assert torch.equal(files.read("model.norm.weight"), model.get_parameter("model.norm.weight"))
    with pytest.raises(ValueError, match=r"no weight 'lm_head\.weight' in its safetensors files"):
        files.read("lm_head.weight")


def written(folder: Path, family: str) -> dict[str, Tensor]:
    """The tensors of a random model, which is in the folder then; Qwen's output layer is its embedding."""
    tiny_model(tiny_config(family, num_hidden_layers=2, tie_word_embeddings=family == "qwen2")).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    whole = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def fit(folder: Path, head: str = "lm") -> FolderFit:
    return fit_folder(head, str(folder), load_config(str(folder)))


Change = Callable[[Path, dict[str, Tensor]], None]


def configured(**entries: Any) -> Change:
    return lambda folder, _: configure(folder, **entries)


def with_more(name: str, *shape: int, dtype: torch.dtype = torch.float32, **entries: Any) -> Change:
    def change(folder: Path, tensors: dict[str, Tensor]) -> None:
        write(folder, {**tensors, name: torch.ones(shape, dtype=dtype)})
        configure(folder, **entries)

    return change


def without(name: str) -> Change:
    return lambda folder, tensors: write(folder, {key: one for key, one in tensors.items() if key != name})


def third_layer(folder: Path, tensors: dict[str, Tensor]) -> None:
    copy = {name.replace(".1.", ".2."): tensor for name, tensor in tensors.items() if ".layers.1." in name}
    write(folder, {**tensors, **copy})


def below(prefix: str) -> Change:
    return lambda folder, tensors: write(folder, {f"{prefix}{name}": tensor for name, tensor in tensors.items()})


def trunk_alone(folder: Path, tensors: dict[str, Tensor]) -> None:
    write(folder, {name.removeprefix("model."): one for name, one in tensors.items() if name != "lm_head.weight"})


def in_fp8(folder: Path, tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    write(folder, {**tensors, name: tensors[name].to(torch.float8_e4m3fn)})


QUERY = "model.layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[str, Change, str]] = {
    "another output layer than the tied one": (
        "qwen2",
        with_more("lm_head.weight", 96, 64),
        r"lm_head\.weight differs from model\.embed_tokens\.weight, but .* tie_word_embeddings: true",
    ),
    "a layer too many": (
        "llama",
        third_layer,
        r"9 of its 30 tensors have no place in LlamaForCausalLM and would be lost: \S+layers\.2\.\S+, \S+, \S+ and 6 "
        r"more; config\.json says num_hidden_layers: 2, the file has 3 layers",
    ),
    "a layer too few": (
        "llama",
        without("model.layers.1.mlp.up_proj.weight"),
        r"1 weights are missing.*1\.mlp\.up_proj",
    ),
    "a trunk": ("llama", trunk_alone, r"1 weights are missing, the first is 'lm_head\.weight'"),
    "a bias": ("llama", with_more(f"{QUERY}.bias", 64), rf"1 of its 22 tensors .*lost: {QUERY}\.bias"),
    "scales": ("llama", with_more(f"{QUERY}.weight_scale_inv", 1, 1), "they belong to quantised weights"),
    "fp8": ("llama", in_fp8, r"0\.mlp\.up_proj\.weight: got number format F8_E4M3, expected weights in bf16"),
    "stated as quantised": (
        "llama",
        configured(quantization_config={"quant_method": "fp8"}),
        r"quantization_config in its config\.json \(fp8\), expected a model in bf16",
    ),
    "a layer behind those that predict further tokens": (
        "deepseek_v3",
        with_more("model.layers.3.eh_proj.weight", 64, 128, num_nextn_predict_layers=1),
        r".*lost: model\.layers\.3\.eh_proj\.weight; .* the file has 4 layers",
    ),
    "a wrapper's prefix": ("llama", below("module."), r"21 of its 21 tensors .*lost: module\.lm_head\.weight"),
    "other sizes": (
        "llama",
        configured(intermediate_size=20),
        r"mlp\.\w+\.weight: got shape \(.*\), expected \(.*\), and 5 more of other shapes",
    ),
    "an expert without its half": (
        "qwen3_moe",
        without("model.layers.1.mlp.experts.2.up_proj.weight"),
        r"1\.mlp\.experts\.gate_up_proj: made of 4 of \S+, 3 of \S+, expected 4 of each",
    ),
    "an expert too few": (
        "qwen3_moe",
        without("model.layers.1.mlp.experts.2.down_proj.weight"),
        r"1\.mlp\.experts\.down_proj: made of 3 of \S+, expected 4 of each",
    ),
    "a router without its bias": (
        "deepseek_v3",
        without("model.layers.1.mlp.gate.e_score_correction_bias"),
        r"1 weights are missing.*e_score_correction_bias",
    ),
    "an adapter too": (
        "llama",
        lambda folder, _: (folder / "adapter_config.json").write_text("{}") and None,
        r"got a model and adapter_config\.json",
    ),
    "a matrix of an adapter": (
        "llama",
        with_more(f"base_model.model.{QUERY}.lora_A.weight", 4, 64),
        rf"1 of its 22 tensors .*lost: base_model\.model\.{QUERY}\.lora_A\.weight; they are an adapter's",
    ),
    "an unknown activation": (
        "llama",
        configured(hidden_act="swishy"),
        r"no model can be made of config\.json \(KeyError: 'swishy'\)",
    ),
    "a padding token": ("llama", configured(pad_token_id=96), "pad_token_id: got 96, expected below vocab_size 96"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_is_not_the_models_is_refused(tmp_path, name):
    kind, change, reason = REFUSED[name]
    change(tmp_path, written(tmp_path, kind))
    with pytest.raises(ValueError, match=f"model path .*{reason}"):
        load_causal_lm(str(tmp_path))


@pytest.mark.parametrize(
    ("family", "name", "shape", "options"),
    [
        pytest.param("llama", "v_head.summary.weight", (1, 64), {}, id="a value head"),
        pytest.param("llama", f"{QUERY[:-7]}.rotary_emb.inv_freq", (4,), {}, id="frequencies"),
        ("gpt_neox", "gpt_neox.layers.0.attention.bias", (1, 1, 4, 4), {"dtype": torch.bool}),
        pytest.param("qwen3_moe", "mtp.fc.weight", (64, 128), {}, id="predictors of their own"),
        ("deepseek_v3", "model.layers.2.eh_proj.weight", (64, 128), {"num_nextn_predict_layers": 1}),
    ],
)
def test_what_the_model_does_not_compute_with_is_kept(tmp_path, family, name, shape, options):
    with_more(name, *shape, **options)(tmp_path, written(tmp_path, family))
    assert fit(tmp_path).kept == [name]
    assert not load_causal_lm(str(tmp_path)).training


def test_a_tied_output_layer_may_be_written_out_and_is_no_business_of_a_trunk(tmp_path):
    tensors = written(tmp_path, "qwen2")
    write(tmp_path, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert fit(tmp_path).kept == [] and not load_causal_lm(str(tmp_path)).training
    with_more("lm_head.weight", 96, 64)(tmp_path, tensors)
    assert fit(tmp_path, "value").kept == ["lm_head.weight"]


def test_a_head_of_several_outputs_is_no_start_of_a_value_head(tmp_path):
    with_more("score.weight", 2, 16)(tmp_path, written(tmp_path, "llama"))
    with pytest.raises(ValueError, match=r"score\.weight: got shape \(2, 16\), expected \(1, 16\)"):
        load_value_head(16, tmp_path)


@pytest.fixture
def shards(model: PreTrainedModel, tmp_path: Path) -> tuple[Path, list[Path], dict[str, str]]:
    """A folder of several files, and the map of its index."""
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / INDEX).read_text())
    return tmp_path, sorted(tmp_path.glob("model-*.safetensors")), index["weight_map"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(Path.unlink, rf"1 of the \d+ files that {INDEX} names are not there: ", id="a file is missing"),
        pytest.param(
            lambda file: shutil.copy(file, file.parent / "model-00099-of-00099.safetensors"),
            r"got model-00099-of-00099\.safetensors, that \S+index\.json does not name",
            id="a file too many",
        ),
        pytest.param(
            lambda file: shutil.copy(file, file.parent / "model.safetensors"),
            r"got both model\.safetensors and \S+index\.json, expected one model",
            id="two models",
        ),
    ],
)
def test_files_that_are_not_those_of_the_index_are_refused(shards, damage, reason):
    folder, files, _ = shards
    damage(files[0])
    with pytest.raises(ValueError, match=reason):
        load_causal_lm(str(folder))


def test_an_index_that_names_what_is_not_in_its_file_is_refused(shards):
    folder, _, names = shards
    (folder / INDEX).write_text(json.dumps({"weight_map": {**names, "model.more.weight": min(names.values())}}))
    with pytest.raises(ValueError, match=r"1 tensors are not in the files that it names: model\.more\.weight"):
        WeightFiles(str(folder))


def test_a_tensor_in_two_files_is_refused(shards):
    folder, files, names = shards
    name = next(name for name, file in names.items() if file == files[0].name)
    first, second = load_file(files[0]), load_file(files[1])
    save_file({**second, name: first[name] + 1}, files[1])
    with pytest.raises(ValueError, match=f"{name} is in {files[0].name} and in {files[1].name}, expected in one file"):
        WeightFiles(str(folder))


FAMILIES = ["bloom", "falcon", "gemma3_text", "glm4_moe", "gpt2", "gpt_oss", "jamba", "mixtral", "opt", "phi3"]


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_transformers_saves_of_a_family_fits_it(kind):
    """Made of no more than names and shapes, in the sizes that the family has by default, with few layers."""
    config = transformers.AutoConfig.for_model(kind)
    if getattr(config, "layer_types", None) is None and kind != "jamba":
        config.num_hidden_layers = 2
    model = outline("lm", config)
    state = {name: one for name, one in model.state_dict().items() if name not in model.all_tied_weights_keys}
    tensors = revert_weight_conversion(model, state)
    headers: Any = SimpleNamespace(names=tensors, form=lambda name: (tuple(tensors[name].shape), "F32"))
    found = FolderFit(model, config, headers)
    assert list(found.problems()) == [] and found.kept == []


def check_parts(stored: StoredTensor, whole: Tensor) -> None:
    """Compares a flat part and a block in bf16, at random."""
    assert stored.whole().to(whole.dtype).equal(whole)
    for view, dtype in ((whole.reshape(-1), whole.dtype), (whole, torch.bfloat16)):
        offsets = [random.randrange(size) for size in view.shape]
        sizes = [random.randrange(size - start) + 1 for size, start in zip(view.shape, offsets, strict=True)]
        place = torch.full(sizes, 7.0, dtype=dtype)
        stored.copy_into(place, tuple(view.shape), offsets, sizes)
        region = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        assert place.equal(view[region].to(dtype))


QUICK = {"qwen2", "qwen3_moe", "gpt_oss"}
"""Tied weights, experts that are merged, and experts that lie in one tensor."""


@pytest.mark.parametrize("family", slow_but(QUICK, KNOWN))
def test_every_part_of_a_family_is_that_of_transformers(tmp_path, family):
    random.seed(0)
    make_known(tmp_path, family, 96)
    model, found = load_causal_lm(str(tmp_path), dtype=torch.float32), fit(tmp_path)
    for name, tensor in [*model.named_parameters(), *persistent_buffers(model)]:
        check_parts(found.stored(name), tensor.detach().float())
    merged = [name for name, one in model.named_parameters() if len(found.stored(name).blocks) == len(one) == 4]
    assert bool(merged) == (family == "qwen3_moe") or family not in QUICK  # experts are read one by one


@pytest.mark.parametrize("sizes", [[40], [12, 28], [7, 20, 13]])
def test_blocks_may_end_anywhere(sizes):
    whole = torch.randn(5, 8)
    pieces = whole.view(-1).split(sizes)
    check_parts(StoredTensor((5, 8), [(len(one), lambda one=one: one) for one in pieces]), whole)


def test_weights_of_few_bits_are_read_in_rows(monkeypatch):
    monkeypatch.setattr("roll.models.stored._MAX_ELEMENTS", 50)
    values, scales = torch.randn(23, 10).to(torch.float8_e4m3fn), torch.rand(6, 3)
    fp8 = LowPrecision("fp8", (4, 4), "F32").stored("w", values, scales)
    assert len(fp8.blocks) == 6
    wide = scales.repeat_interleave(4, 0)[:23].repeat_interleave(4, 1)[:, :10]
    check_parts(fp8, values.float() * wide)
    blocks, exponents = torch.randint(0, 256, (3, 4, 2, 16), dtype=torch.uint8), torch.full((3, 4, 2), 127)
    mxfp4 = LowPrecision("mxfp4", dtype="F32").stored("w", blocks, exponents)
    assert len(mxfp4.blocks) == 3
    check_parts(mxfp4, mxfp4.whole())


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model in the hub's cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "hub" / "models--org--small"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("a" * 40)
    make_tokenizer().save_pretrained(model / "snapshots" / ("a" * 40))
    (model / "snapshots" / ("a" * 40) / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    return "org/small"


@pytest.mark.parametrize("place", ["hub", "home"])
def test_a_model_of_the_hub_or_the_home_folder_keeps_its_tokenizer_and_its_ends(place, cached, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "hub" / "models--org--small" / "snapshots"))
    target = tmp_path / "saved"
    target.mkdir()
    (target / "generation_config.json").write_text("{}")
    copy_companions(cached if place == "hub" else f"~/{'a' * 40}", target)
    assert "eos_token_id" in (target / "generation_config.json").read_text()
    assert load_tokenizer(str(target), alone=True).get_vocab() == make_tokenizer().get_vocab()


def test_a_tokenizer_that_cannot_be_had_is_told(cached, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        copy_companions("org/other", tmp_path)
    assert "org/other: its tokenizer is not in the hub's cache" in caplog.text


def model_of(kind: type = AutoModelForCausalLM, **config: object):
    shape = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 12}
    with torch.device("meta"):
        return kind.from_config(Qwen2Config(**shape, num_attention_heads=2, num_key_value_heads=1, **config))


def test_a_prefix_is_a_whole_name_and_something_is_left_to_train():
    frozen = frozen_parameters(model_of(), ["model.layers.1"])
    assert frozen and {name.split(".")[2] for name in frozen} == {"1"}
    assert frozen_parameters(model_of(), ["model.norm.weight"]) == {"model.norm.weight"}
    for unknown in ("model.layers.", "layers.1", "model.layer"):
        with pytest.raises(UnknownPartError, match="the nearest: model"):
            frozen_parameters(model_of(), [unknown])
    with pytest.raises(UnknownPartError, match="something left to train"):
        frozen_parameters(model_of(tie_word_embeddings=True), ["model"])
    assert frozen_parameters(model_of(AutoModel), ["model"], head=True)


def test_a_tied_parameter_is_frozen_by_each_of_its_names():
    both = {"model.embed_tokens.weight", "lm_head.weight"}
    for name in ("model.embed_tokens", "lm_head"):
        assert frozen_parameters(model_of(tie_word_embeddings=True), [name]) == both
        assert len(frozen_parameters(model_of(tie_word_embeddings=False), [name])) == 1


def test_the_longest_name_gives_the_learning_rate_and_each_name_is_of_something_trained():
    model = model_of()
    freeze(model, ["model.layers.0"])
    found = own_rates(model, {"model.layers": 1e-4, "model.layers.1.mlp": 1e-3})
    assert {found[f"model.layers.1.{part}.weight"] for part in ("mlp.up_proj", "mlp.down_proj")} == {1e-3}
    assert found["model.layers.11.mlp.up_proj.weight"] == 1e-4 and "model.norm.weight" not in found
    for idle in ({"model.layers.0": 1.0}, {"model.norm": 1.0, "model.norm.weight": 2.0}):
        with pytest.raises(UnknownPartError, match=f"would learn at the rate of {min(idle)}, expected parts"):
            own_rates(model, idle)
    with pytest.raises(UnknownPartError, match=r"learning_rate_of: 'model\.visual' is not a part of Qwen2ForCausalLM"):
        own_rates(model, {"model.visual": 1.0})


def test_a_trunk_has_the_names_of_the_whole_model():
    trunk = model_of(AutoModel)
    freeze(trunk, ["model.layers.0", "model.norm"])
    still = {name for name, parameter in trunk.named_parameters() if not parameter.requires_grad}
    assert {name.split(".")[0] for name in still} == {"layers", "norm"}
    assert not any(name.startswith("layers.1") for name in still)
