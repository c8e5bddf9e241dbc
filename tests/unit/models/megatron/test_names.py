"""The name map as data: complete, without doubles, and the same model under both sets of Megatron's modules."""

from collections import Counter

import pytest
from torch import nn

from roll.models.megatron.config import MegatronModelConfig, megatron_config
from roll.models.megatron.families import ATTENTION, DENSE_MLP, LINEAR_BIASES, QK_NORM, QKV_BIAS, ExpertModules
from roll.models.megatron.names import (
    ParallelLayout,
    adaptable_layers,
    module_parts,
    source,
    torn,
)
from tests.support.megatron_models import CONFIGS, PLAIN, ModuleSet, checkpoint, make_model, name_in, parameter_names

WHOLE = ParallelLayout(layers=(0, 1, 2))
MODULE_SETS: list[tuple[ModuleSet, ExpertModules]] = [
    ("local", "sequential"),
    ("local", "legacy_grouped"),
    ("te", "sequential"),
    ("te", "grouped"),
    ("te", "legacy_grouped"),
]


def hf_names(config: MegatronModelConfig, names: list[str]) -> Counter[str]:
    return Counter(hf for name in names for group in source(name, config, WHOLE).hf for hf in group)


@pytest.mark.parametrize(
    ("case", "modules", "experts"),
    [(case, *each) for case in CONFIGS for each in MODULE_SETS if case in PLAIN or each == MODULE_SETS[0]],
)
def test_each_weight_of_a_checkpoint_is_covered_once(case, modules, experts):
    config = megatron_config(CONFIGS[case])
    names = list(parameter_names(config, WHOLE, modules, experts))
    assert len(set(names)) == len(names)
    assert hf_names(config, names) == Counter(checkpoint(make_model(CONFIGS[case])).keys())


@pytest.mark.parametrize("case", [case for case in CONFIGS if case != "phi3"])  # its layers are fused
def test_adapters_go_on_all_linear_layers_but_gates(case):
    modules = make_model(CONFIGS[case]).named_modules()
    linear = {name for name, module in modules if isinstance(module, nn.Linear) and name != "lm_head"}
    assert set(adaptable_layers(megatron_config(CONFIGS[case]))) == {n for n in linear if "shared_expert_gate" not in n}


def test_an_adapter_is_cut_where_its_layer_is():
    config = megatron_config(CONFIGS["qwen3"])
    forms = {
        "self_attention.linear_qkv.lora.k_proj.lora_A": ("replicated", "self_attn.k_proj.lora_A"),
        "self_attention.linear_qkv.lora.k_proj.lora_B": ("rows", "self_attn.k_proj.lora_B"),
        "mlp.linear_fc1.lora.up_proj.lora_B": ("rows", "mlp.up_proj.lora_B"),
        "mlp.linear_fc2.lora.down_proj.lora_A": ("columns", "mlp.down_proj.lora_A"),
        "mlp.linear_fc2.lora.down_proj.lora_B": ("replicated", "mlp.down_proj.lora_B"),
    }
    for name, (form, hf) in forms.items():
        found = source(f"decoder.layers.1.{name}.weight", config, WHOLE)
        assert (found.form, found.hf) == (form, ((f"base_model.model.model.layers.1.{hf}.weight",),))


@pytest.mark.parametrize("case", PLAIN)
def test_each_local_name_has_one_transformer_engine_name_for_the_same_weights(case):
    config = megatron_config(CONFIGS[case])
    local, te = (list(parameter_names(config, WHOLE, modules)) for modules in ("local", "te"))  # type: ignore[arg-type]
    renamed = {mine: theirs for mine, theirs in zip(local, te, strict=True) if mine != theirs}
    assert [source(name, config, WHOLE) for name in local] == [source(name, config, WHOLE) for name in te]
    for layer, has_experts in enumerate(config.moe_layers):
        prefix = f"decoder.layers.{layer}."
        fused = {f"{prefix}input_layernorm.weight": f"{prefix}self_attention.linear_qkv.layer_norm_weight"}
        if not has_experts:
            fused[f"{prefix}pre_mlp_layernorm.weight"] = f"{prefix}mlp.linear_fc1.layer_norm_weight"
        assert {name: renamed.pop(name) for name in fused} == fused
    assert not renamed


def test_transformer_engine_names_of_a_dense_layer():
    names = list(parameter_names(megatron_config(CONFIGS["qwen3"]), ParallelLayout(layers=(2,)), "te"))
    assert names == [
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.self_attention.k_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]


def test_transformer_engine_names_are_those_that_megatron_saves_its_own_modules_under():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    saved_under = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.sharded_state_dict_keys_map
    for entry in (*ATTENTION, *QKV_BIAS, *QK_NORM, *DENSE_MLP, *LINEAR_BIASES):
        prefix = next((prefix for prefix in saved_under if entry.local.startswith(prefix)), "")
        assert name_in(entry, "te") == saved_under.get(prefix, "") + entry.local.removeprefix(prefix)


def test_transformer_engine_names_of_grouped_experts():
    config = megatron_config(CONFIGS["qwen3 moe"])
    stage = ParallelLayout(layers=(1,), first_stage=False, last_stage=False, ep_rank=1, ep_size=2)
    names = [name for name in parameter_names(config, stage, "te", "grouped") if ".mlp." in name]
    assert names == [
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.0.mlp.experts.linear_fc1.weight0",
        "decoder.layers.0.mlp.experts.linear_fc1.weight1",
        "decoder.layers.0.mlp.experts.linear_fc2.weight0",
        "decoder.layers.0.mlp.experts.linear_fc2.weight1",
    ]
    assert source(names[2], config, stage).hf == (
        ("model.layers.1.mlp.experts.3.gate_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"),
    )


def test_a_tied_output_layer_exists_only_away_from_the_embedding():
    config = megatron_config(CONFIGS["qwen2, tied"])
    assert "output_layer.weight" not in parameter_names(config, WHOLE, "local")
    last = ParallelLayout(layers=(2,), first_stage=False)
    assert "output_layer.weight" in parameter_names(config, last, "local")
    assert source("output_layer.weight", config, last).hf == (("model.embed_tokens.weight",),)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.self_attention.linear_q_proj.weight",
        "decoder.layers.0.embedding.word_embeddings.weight",
        "self_attention.linear_qkv.weight",
        "mtp.layers.0.eh_proj.weight",
    ],
)
def test_an_unknown_parameter_is_an_error(name):
    with pytest.raises(ValueError, match=f"Megatron parameter '{name}': not one of those that Qwen3ForCausalLM has"):
        source(name, megatron_config(CONFIGS["qwen3"]), WHOLE)


def test_a_layer_or_expert_that_the_rank_does_not_hold_is_an_error():
    config = megatron_config(CONFIGS["qwen3 moe"])
    stage = ParallelLayout(layers=(1, 2), ep_size=2)
    with pytest.raises(ValueError, match="layer 2, but the rank holds 2"):
        source("decoder.layers.2.input_layernorm.weight", config, stage)
    with pytest.raises(ValueError, match="expert 3, but the rank holds 2"):
        source("decoder.layers.0.mlp.experts.linear_fc1.weight3", config, stage)


def test_parts_that_stand_or_fall_together():
    fused = tuple(f"model.layers.3.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
    config, mixtral = megatron_config(CONFIGS["qwen3 moe"]), megatron_config(CONFIGS["mixtral"])
    assert module_parts("model.layers.3.mlp.experts.7.up_proj.weight", config) == fused
    assert module_parts("model.norm.weight", config) == ("model.norm.weight",)
    assert module_parts("model.layers.3.block_sparse_moe.experts.7.w3.weight", mixtral) == fused
    assert module_parts("model.layers.3.block_sparse_moe.gate.weight", mixtral) == ("model.layers.3.mlp.gate.weight",)
    held = ["q", "k", "v"]
    assert torn(held, ["q", "k", "v", "o"]) == torn(held, ["o"]) == ""
    assert torn(held, ["k", "o"]).startswith("q, v with the rest")
