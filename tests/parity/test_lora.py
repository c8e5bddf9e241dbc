"""LoRA beside what the matrix shows: scores without the adapter, base weights, checkpoints, folders that peft reads; on
other kinds of models it is trained, kept and merged as peft itself would, or refused with the reason."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll.configs.engines import packages
from roll.distributed.strategy.generation.alone import base_of
from roll.distributed.strategy.training.merging import Export, export_folder
from roll.distributed.weights.adapters import MergedAdapter
from roll.models.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE, unusual_entry
from roll.models.loading import load_causal_lm, outline
from roll.models.lora import (
    LoraSpec,
    UnknownLayerError,
    adapted_layers,
    adapted_names,
    adapter_dropout,
    inject_adapter,
    left_out,
)
from tests.support.choice import slow_but
from tests.support.families import tiny_config, tiny_model
from tests.support.harness import (
    ADAPTER,
    TEMPERATURE,
    Expected,
    Layout,
    adapter_weights,
    make_batch,
    make_model,
    needs,
    oracle,
    started,
    take_steps,
)
from tests.support.layouts_megatron import PP, SP, TP
from tests.support.pictured import plain_logprobs
from tests.support.ranks import assert_near, exported, exported_adapter, run_ranks, wanted

peft = pytest.importorskip("peft", reason="peft is not installed")


def layout(name: str, strategy: str, world_size: int, config: dict[str, Any] | None = None, **options: Any) -> Layout:
    return Layout(name, strategy, world_size, config or {}, lora=ADAPTER, **options)


ALONE = layout("alone", "fsdp2_train", 1)
FSDP2 = [
    layout("replica", "fsdp2_train", 2, {"fsdp_size": 1}),
    layout("shards", "fsdp2_train", 2, {"checkpoint": "sharded"}),
    layout("bf16", "fsdp2_train", 2, model_args={"dtype": "bf16"}),
]
MEGATRON = [
    layout("tensor", "megatron_train", 2, {TP: 2, **SP}),
    layout("stages", "megatron_train", 2, {PP: 2}),
    layout("megatron-bf16", "megatron_train", 2, model_args={"dtype": "bf16"}),
]
NAMES = slow_but(("alone", "shards", "bf16", "stages"), [each.name for each in (ALONE, *FSDP2, *MEGATRON)])
FIRST, LAST = range(2), range(2, 3)


def make_trainer(layout: Layout, model: Path, rank: int = 0, spec: LoraSpec | None = ADAPTER) -> Any:
    return started(replace(layout, lora=spec), model, rank)


def train(trainer: Any, steps: range) -> dict[str, Tensor]:
    """The adapter after these steps."""
    take_steps(trainer, *steps)
    return exported_adapter(trainer)


def scores(trainer: Any, adapter: bool) -> Any:
    """Of the whole batch, whatever the rank's share is."""
    return trainer.logprobs(make_batch(0), adapter=adapter).logprobs_T


def run(rank: int, layouts: list[Layout], model: Path, folder: Path) -> None:
    for layout in layouts:
        trainer = make_trainer(layout, model, rank)
        result = {"base": exported(trainer)}
        train(trainer, FIRST)
        trainer.save(folder / f"{layout.name}-checkpoint")
        result["end"] = train(trainer, LAST)
        result["scores"] = {"on": scores(trainer, True), "off": scores(trainer, False)}
        trainer.load(folder / f"{layout.name}-checkpoint")
        result["resumed"] = train(trainer, LAST)
        if layout.name == "stages":
            trainer.load(folder / "alone-checkpoint")
            result["from-alone"] = train(trainer, LAST)
        if rank == 0:
            flat = {f"{part}/{key}": tensor for part, tensors in result.items() for key, tensor in tensors.items()}
            save_file(flat, folder / f"{layout.name}.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("lora") / "model", "qwen2")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    path, names = tmp_path_factory.mktemp("runs"), wanted(request, "name")
    run(0, [ALONE], model, path)
    for layouts in (FSDP2, MEGATRON):
        if layouts is FSDP2 or packages()["megatron_train"].installed:
            run_ranks(run, 2, [each for each in layouts if each.name in names], model, path)
    return path


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    if request.param in [each.name for each in MEGATRON]:
        needs("megatron_train")
    return request.param


@pytest.fixture
def expected(model: Path) -> Expected:
    return oracle(model, ADAPTER, num_steps=LAST.stop)


def part(folder: Path, name: str, key: str) -> dict[str, Tensor]:
    tensors = load_file(folder / f"{name}.safetensors")
    return {k.removeprefix(f"{key}/"): v for k, v in tensors.items() if k.startswith(f"{key}/")}


def test_scores_with_the_adapter_off_are_the_base_models(folder, expected, name):
    found, mask = part(folder, name, "scores"), make_batch(0).loss_mask_T
    for key, reference in (("on", expected.after_T), ("off", expected.before_T)):
        tolerance = 0.06 if "bf16" in name else 5e-6
        torch.testing.assert_close(found[key][mask].double(), reference[mask], rtol=0, atol=tolerance)
    assert (found["on"] - found["off"]).abs().max() > 1e-3


def test_resumed_adapter_equals_the_uninterrupted_one_bit_for_bit(folder, name):
    assert_near(part(folder, name, "resumed"), part(folder, name, "end"), 0.0)


def test_base_weights_leave_under_plain_names_unchanged(folder, model, name):
    state = load_causal_lm(str(model)).state_dict()
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    assert_near(part(folder, name, "base"), {n: t.to(dtype) for n, t in state.items() if n != "lm_head.weight"}, 0.0)


def test_checkpoints_of_two_ranks_continue_on_one(folder, model, expected, name):
    trainer = make_trainer(ALONE, model)
    trainer.load(folder / f"{name}-checkpoint")
    assert_near(train(trainer, LAST), expected.weights, 3e-3 if "bf16" in name else 5e-6)


@pytest.mark.parametrize("name", ["stages"], indirect=True)
def test_checkpoint_of_fsdp2_continues_in_megatron(folder, expected, name):
    assert_near(part(folder, name, "from-alone"), expected.weights, 5e-6)


def test_checkpoints_are_folders_that_peft_loads(folder, model, name):
    checkpoint = folder / f"{name}-checkpoint"
    assert not [f for f in checkpoint.rglob("*") if f.suffix in (".pt", ".bin", ".metadata", ".distcp")]
    adapter = checkpoint / "actor_train"
    if name == "shards":
        assert not adapter.exists(), "whole tensors are not written then"
        return
    files = {file.name for file in adapter.iterdir() if "token" not in file.name}
    assert files == {ADAPTER_FILE, "adapter_config.json"}
    loaded = peft.PeftModel.from_pretrained(load_causal_lm(str(model)), adapter)
    assert_near(adapter_weights(loaded), load_file(adapter / ADAPTER_FILE), 0.0)
    assert set(load_file(adapter / ADAPTER_FILE)) == set(part(folder, "alone", "end"))


def test_all_linear_means_all_but_the_output_layer_and_what_is_excluded(model):
    trainer = make_trainer(ALONE, model, spec=replace(ADAPTER, targets=("all-linear",)))
    names = adapted_names(exported_adapter(trainer))
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    spec = replace(ADAPTER, targets=("all-linear",), excluded=("o_proj", "gate_proj"))
    trainer = make_trainer(ALONE, model, spec=spec)
    assert adapted_names(exported_adapter(trainer)) == {"q_proj", "k_proj", "v_proj", "up_proj", "down_proj"}
    with pytest.raises(ValueError, match=r"lora_exclude: 'oproj' matches no linear layer.*the nearest: o_proj"):
        inject_adapter(load_causal_lm(str(model)), replace(spec, excluded=("oproj",)))


@pytest.mark.parametrize("strategy", ["fsdp2_train", "megatron_train"])
def test_training_starts_from_an_adapter_that_is_there(model, tmp_path, strategy):
    first = make_trainer(ALONE, model)
    trained = train(first, FIRST)
    first.save_model(tmp_path)
    second = make_trainer(replace(ALONE, strategy=strategy), model, spec=replace(ADAPTER, start=str(tmp_path)))
    assert_near(exported_adapter(second), trained, 0.0)
    assert not torch.equal(scores(second, True), scores(second, False))


@pytest.mark.parametrize("strategy", ["fsdp2_train", "megatron_train"])
def test_an_adapter_of_more_layers_is_no_start(model, tmp_path, strategy):
    make_trainer(ALONE, model).save_model(tmp_path)
    *fewer, last = ADAPTER.targets
    narrower = replace(ADAPTER, targets=tuple(fewer), start=str(tmp_path))
    with pytest.raises(ValueError, match=rf"got \S+{last}\.lora_A\.weight, expected only the layers of lora_target"):
        make_trainer(replace(ALONE, strategy=strategy), model, spec=narrower)


def test_dropout_acts_in_training_only(model):
    trainer = make_trainer(ALONE, model, spec=replace(ADAPTER, dropout=0.5))
    scorer = trainer.weights.scorer
    assert not any(module.training for module in scorer.model.modules())
    train(trainer, range(1))
    assert torch.equal(scores(trainer, True), scores(trainer, True))
    ids = make_batch(0).tokens_T[None, :12].to(scorer.device)
    with torch.no_grad(), adapter_dropout(scorer):
        first, second = (scorer.model(ids).logits for _ in range(2))
    assert not torch.equal(first, second)
    assert not any(module.training for module in scorer.model.modules())


def test_unknown_target_is_refused_with_the_nearest_names(model):
    with pytest.raises(ValueError, match=r"lora_target: 'qproj' matches no linear layer.*the nearest: q_proj"):
        inject_adapter(load_causal_lm(str(model)), replace(ADAPTER, targets=("v_proj", "qproj")))


@pytest.mark.parametrize("strategy", ["fsdp2_train", "megatron_train"])
def test_what_has_no_adapter_says_so(model, strategy):
    trainer = make_trainer(replace(ALONE, strategy=strategy), model, spec=None)
    with pytest.raises(ValueError, match="no LoRA adapter to export"):
        trainer.export_adapter(1000)
    with pytest.raises(ValueError, match="no LoRA adapter to leave out"):
        trainer.logprobs(make_batch(0), adapter=False)


def test_layers_that_are_split_are_refused(model):
    with pytest.raises(ValueError, match="tensor_parallel_size: 2, expected 1 with lora_target"):
        make_trainer(replace(ALONE, strategy_config={"tensor_parallel_size": 2}), model)


def test_megatron_refuses_dropout_of_an_adapter(model):
    spec = replace(ADAPTER, dropout=0.1)
    with pytest.raises(ValueError, match=r"actor_train\.model_args\.lora_dropout: got 0\.1, expected 0"):
        make_trainer(replace(ALONE, strategy="megatron_train"), model, spec=spec)


def test_missing_peft_names_the_extra(model, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "peft" else find(name, *args))
    with pytest.raises(ImportError, match=r"'peft' is not installed.*roll-rl\[lora\]"):
        make_trainer(ALONE, model)


# ---- other kinds of models

SPEC = LoraSpec(4, 8, ("all-linear",))
ATTENTION, GATED = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
FAMILIES = {
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "gpt_neox": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    "qwen2_moe": ATTENTION | GATED | {"shared_expert_gate"},
    "deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    "phimoe": ATTENTION,
    "mamba": {"in_proj", "x_proj", "dt_proj"},
}
two_layers = partial(tiny_config, num_hidden_layers=2)


@torch.no_grad()
def logits(model: Any) -> Any:
    return model(make_batch(0).tokens_T[None, :12]).logits[0]


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_adapter_is_what_peft_makes_of_its_folder(tmp_path, kind):
    folder = tmp_path / "model"
    tiny_model(two_layers(kind)).save_pretrained(folder)
    trainer = started(Layout("one", "fsdp2_train", 1, lora=SPEC), folder)
    take_steps(trainer, 0, 1, 2)
    trainer.save_model(tmp_path / "adapter")
    matrices = load_file(tmp_path / "adapter" / ADAPTER_FILE)
    assert adapted_names(matrices) == FAMILIES[kind]

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    batch = make_batch(0)
    found = trainer.logprobs(batch).logprobs_T * batch.loss_mask_T
    torch.testing.assert_close(found.double(), plain_logprobs(adapted, batch, TEMPERATURE), rtol=0, atol=2e-5)

    merged = adapted.merge_and_unload()
    export_folder(Export(tmp_path / "adapter", merge=True), tmp_path / "out")
    options = {"dtype": torch.float32, "output_loading_info": True}
    exported, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(logits(exported), logits(merged), rtol=0, atol=2e-5)
    generator = load_causal_lm(str(folder))
    MergedAdapter(generator, SPEC).apply(matrices)
    torch.testing.assert_close(logits(generator), logits(merged), rtol=0, atol=2e-5)
    assert (logits(merged) - logits(load_causal_lm(str(folder)))).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "target", "reason"),
    [
        ("deepseek_v3", "down_proj", "means the routed experts in peft, which no engine here adapts"),
        ("mamba", "out_proj", "is a layer whose weights Mamba's kernels read by themselves"),
        ("phimoe", "router", "matches no linear layer"),
        ("gpt2", "q_proj", "matches no linear layer of GPT2LMHeadModel, expected all-linear or some of c_attn"),
    ],
)
def test_a_layer_that_cannot_be_adapted_is_named(kind, target, reason):
    with pytest.raises(UnknownLayerError, match=f"'{target}' {reason}"):
        adapted_layers(outline("lm", two_layers(kind)), (target,))


def test_what_all_linear_or_named_targets_leave_out_is_counted():
    found = left_out(outline("lm", two_layers("deepseek_v3")), ("all-linear",))
    assert "mlp.experts.gate_up_proj (1 tensors, 24,576 parameters)" in found, "4 of 2 times 64 by 48"
    assert "mlp.experts.down_proj (1 tensors, 12,288 parameters)" in found
    assert "mlp.down_proj.weight (1 tensors, 3,072 parameters)" in found
    assert left_out(outline("lm", two_layers("gpt2")), ("all-linear",)) == ""
    config = two_layers("qwen3_5_text", layer_types=["linear_attention", "full_attention"])
    assert "q_proj is in 1 of 2 layers" in left_out(outline("lm", config), ("q_proj", "down_proj"))
    assert left_out(outline("lm", two_layers("qwen2_moe")), ("q_proj",)) == (
        "mlp.experts.down_proj (2 tensors, 24,576 parameters); mlp.experts.gate_up_proj (2 tensors, 49,152 parameters)"
    )


def saved(path: Path, **options: Any) -> dict[str, Any]:
    """Configuration of an adapter as peft saves it."""
    peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **options).save_pretrained(str(path))
    return dict(json.loads((path / ADAPTER_CONFIG).read_text()))


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal"])
def test_an_adapter_that_left_its_base_alone_is_usual(tmp_path, init):
    assert unusual_entry(saved(tmp_path, init_lora_weights=init)) is None
    assert unusual_entry(saved(tmp_path, layers_to_transform=[0], fan_in_fan_out=True)) is None


@pytest.mark.parametrize(
    "options",
    [
        *({"init_lora_weights": init} for init in ("pissa", "pissa_niter_4", "olora", "mica", "Olora")),
        {"use_rslora": True},
        {"use_dora": True},
        {"lora_bias": True, "bias": "none"},
        {"bias": "lora_only"},
        {"bias": "all"},
        {"alpha_pattern": {"q_proj": 3}},
        {"rank_pattern": {"q_proj": 2}},
        {"alora_invocation_tokens": [1, 2]},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {"trainable_token_indices": [3]},
        {"layer_replication": [(0, 2)]},
        {"modules_to_save": ["lm_head"]},
    ],
)
def test_an_adapter_that_is_more_than_two_matrices_is_named(tmp_path, options):
    key, *_ = options
    config = saved(tmp_path, **options)
    assert f"{key} is " in (unusual_entry(config) or "")
    with pytest.raises(ValueError, match=f"{key} is ") as refusal:
        base_of(str(tmp_path))
    assert repr(config[key]) in str(refusal.value)


def test_a_folder_of_peft_is_found_with_its_base(tmp_path):
    saved(tmp_path, base_model_name_or_path="base")
    matrices = {"A": torch.ones(4, 6), "B": torch.ones(5, 4)}
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    save_file({f"{layer}_{part}.weight": each for part, each in matrices.items()}, tmp_path / ADAPTER_FILE)
    assert base_of(str(tmp_path)) == ("base", LoraSpec(4, 8, ("q_proj",)))
    assert base_of("org/model") == ("org/model", None)


def test_what_a_later_peft_adds_is_not_trusted():
    assert unusual_entry({"peft_type": "LORA", "r": 4, "some_new_kind": {"a": 1}}) == "some_new_kind is {'a': 1}"
    assert unusual_entry({"peft_type": "ADALORA", "r": 4}) == "peft_type is 'ADALORA'"
    assert unusual_entry({"peft_type": "LORA", "r": 4, "some_new_kind": None}) is None
