"""Adapters on other kinds of models: trained, kept and merged as peft itself would, or refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll.distributed.strategy.training.merging import Export, export_folder
from roll.distributed.weights.adapters import MergedAdapter
from roll.models.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE, unusual_entry
from roll.models.loading import load_causal_lm, outline
from roll.models.lora import LoraSpec, UnknownLayerError, adapted_layers, adapted_names, left_out
from tests.support.harness import TEMPERATURE, Layout, make_batch, started, take_steps
from tests.support.pictured import plain_logprobs

peft = pytest.importorskip("peft", reason="peft is not installed")

SPEC = LoraSpec(4, 8, ("all-linear",))
SHAPE: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 60, "pad_token_id": 0}
MIXTURE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "GPT2": ({"n_positions": 64}, {"c_attn", "c_proj", "c_fc"}),
    "GPTNeoX": ({"intermediate_size": 48}, {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}),
    "Qwen2Moe": (
        {"intermediate_size": 48, "num_key_value_heads": 2, "num_experts": 4, "shared_expert_intermediate_size": 16}
        | MIXTURE,
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "shared_expert_gate"},
    ),
    "DeepseekV3": (
        {"intermediate_size": 48, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        | LATENT
        | MIXTURE,
        {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    ),
    "Phimoe": (
        {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4},
        {"q_proj", "k_proj", "v_proj", "o_proj"},
    ),
    "Mamba": ({"state_size": 8}, {"in_proj", "x_proj", "dt_proj"}),
}


def config_of(kind: str) -> Any:
    return getattr(transformers, f"{kind}Config")(**SHAPE, **ENDS, **FAMILIES[kind][0])


def make_folder(kind: str, path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind)).float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 0.2)
    model.save_pretrained(path)
    return path


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(make_batch(0).tokens_T[None, :12]).logits[0]
    return found


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_adapter_is_what_peft_makes_of_its_folder(tmp_path, kind):
    folder = make_folder(kind, tmp_path / "model")
    trainer = started(Layout("one", "fsdp2_train", 1, lora=SPEC), folder)
    take_steps(trainer, 0, 1, 2)
    trainer.save_model(tmp_path / "adapter")
    matrices = load_file(tmp_path / "adapter" / ADAPTER_FILE)
    assert adapted_names(matrices) == FAMILIES[kind][1]

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    batch = make_batch(0)
    found = trainer.logprobs(batch).logprobs_T * batch.loss_mask_T
    torch.testing.assert_close(found, plain_logprobs(adapted, batch, TEMPERATURE), rtol=0, atol=2e-5)

    merged = adapted.merge_and_unload()
    export_folder(Export(tmp_path / "adapter", merge=True), tmp_path / "out")
    exported, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(logits(exported), logits(merged), rtol=0, atol=2e-5)
    generator = load_causal_lm(str(folder))
    MergedAdapter(generator, SPEC).apply(matrices)
    torch.testing.assert_close(logits(generator), logits(merged), rtol=0, atol=2e-5)
    assert (logits(merged) - logits(load_causal_lm(str(folder)))).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "target", "reason"),
    [
        ("DeepseekV3", "down_proj", "means the routed experts in peft, which no engine here adapts"),
        ("Mamba", "out_proj", "is a layer whose weights Mamba's kernels read by themselves"),
        ("Phimoe", "router", "matches no linear layer"),
        ("GPT2", "q_proj", "matches no linear layer of GPT2LMHeadModel, expected all-linear or some of c_attn"),
    ],
)
def test_a_layer_that_cannot_be_adapted_is_named(kind, target, reason):
    with pytest.raises(UnknownLayerError, match=f"'{target}' {reason}"):
        adapted_layers(outline("lm", config_of(kind)), (target,))


def test_what_all_linear_or_named_targets_leave_out_is_counted():
    found = left_out(outline("lm", config_of("DeepseekV3")), ("all-linear",))
    assert "mlp.experts.gate_up_proj (1 tensors, 4,096 parameters)" in found
    assert "mlp.experts.down_proj (1 tensors, 2,048 parameters)" in found
    assert "mlp.down_proj.weight (1 tensors, 1,536 parameters)" in found
    assert left_out(outline("lm", config_of("GPT2")), ("all-linear",)) == ""
    config = transformers.Qwen3_5TextConfig(**SHAPE, layer_types=["linear_attention", "full_attention"])
    assert "q_proj is in 1 of 2 layers" in left_out(outline("lm", config), ("q_proj", "down_proj"))
    mixture = left_out(outline("lm", config_of("Qwen2Moe")), ("q_proj",))
    assert mixture == (
        "mlp.experts.down_proj (2 tensors, 4,096 parameters); mlp.experts.gate_up_proj (2 tensors, 8,192 parameters)"
    )


def saved(path: Path, **options: Any) -> dict[str, Any]:
    """Configuration of an adapter as peft saves it."""
    peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **options).save_pretrained(str(path))
    found: dict[str, Any] = json.loads((path / ADAPTER_CONFIG).read_text())
    return found


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
    assert f"{key} is " in (unusual_entry(saved(tmp_path, **options)) or "")


def test_what_a_later_peft_adds_is_not_trusted():
    assert unusual_entry({"peft_type": "LORA", "r": 4, "some_new_kind": {"a": 1}}) == "some_new_kind is {'a': 1}"
    assert unusual_entry({"peft_type": "ADALORA", "r": 4}) == "peft_type is 'ADALORA'"
    assert unusual_entry({"peft_type": "LORA", "r": 4, "some_new_kind": None}) is None
