"""The map of names is complete, and whole weights cut into the shards of any layout come back to the last bit."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MinistralConfig,
    OlmoConfig,
    Qwen3MoeConfig,
)

from roll.models.megatron.config import MegatronModelConfig, megatron_config, padded_vocab_size, parallel_size_problems
from roll.models.megatron.families import ATTENTION, DENSE_MLP, LINEAR_BIASES, QK_NORM, QKV_BIAS, ExpertModules
from roll.models.megatron.names import (
    ParallelLayout,
    adaptable_layers,
    join,
    load_shards,
    module_parts,
    shard,
    shard_group,
    source,
    torn,
)
from tests.support.choice import one_in
from tests.support.megatron_models import (
    CONFIGS,
    EXPERTS,
    LATENT,
    LLAMA3,
    PLAIN,
    SHAPE,
    SIGMOIDS,
    YARN,
    ModuleSet,
    checkpoint,
    make_model,
    name_in,
    parameter_names,
)

WHOLE = ParallelLayout(layers=(0, 1, 2))
STAGES = {
    "one stage": [WHOLE],
    "uneven": [ParallelLayout(layers=(0,), last_stage=False), ParallelLayout(layers=(1, 2), first_stage=False)],
    "virtual": [
        ParallelLayout(layers=(0,), last_stage=False),
        ParallelLayout(layers=(1,), first_stage=False, last_stage=False),
        ParallelLayout(layers=(2,), first_stage=False),
    ],
}


def with_tensor_rank(layout: ParallelLayout, rank: int, size: int, expert_size: int | None = None) -> ParallelLayout:
    experts = {} if expert_size is None else {"expert_tp_rank": rank % expert_size, "expert_tp_size": expert_size}
    return replace(layout, tp_rank=rank, tp_size=size, **experts)


def round_trip(
    config: MegatronModelConfig,
    weights: dict[str, Tensor],
    stages: list[ParallelLayout],
    tp: int,
    ep: int,
    modules: tuple[ModuleSet, ExpertModules],
    expert_tp: int | None = None,
) -> dict[str, Tensor]:
    """Loads every rank, then joins every parameter from the ranks of its group. Parameters without experts are the
    same for every expert-parallel rank."""
    back: dict[str, Tensor] = {}
    for stage, ep_rank in itertools.product(stages, range(ep)):
        place = replace(stage, ep_rank=ep_rank, ep_size=ep)
        names = list(parameter_names(config, place, *modules))
        ranks = [with_tensor_rank(place, rank, tp, expert_tp) for rank in range(tp)]
        shards = [dict(load_shards(weights.__getitem__, names, config, layout)) for layout in ranks]
        for name in names:
            group = shard_group(name, config, ranks[0])
            size = {"replicated": 1, "tensor": tp, "expert_tensor": expert_tp or tp}[group]
            assert len({part[name].shape for part in shards}) == 1, name
            for hf, whole in join(name, [part[name] for part in shards[:size]], config, ranks[0]):
                assert hf not in back or torch.equal(back[hf], whole)
                back[hf] = whole
    return back


@cache
def made(case: str) -> tuple[dict[str, Tensor], MegatronModelConfig]:
    return checkpoint(make_model(CONFIGS[case])), megatron_config(CONFIGS[case])


def assert_comes_back(case: str, *layout: Any) -> None:
    weights, config = made(case)
    back = round_trip(config, weights, *layout)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("tp", one_in(2, [1, 2, 4]))
@pytest.mark.parametrize("case", CONFIGS)
def test_every_layout_comes_back_to_the_last_bit(case, tp, stages):
    _, config = made(case)
    variants: list[tuple[int, ModuleSet, ExpertModules]] = [(1, "local", "sequential"), (1, "te", "sequential")]
    biased = config.family.experts.biased
    if biased:
        variants = [(1, "local", "sequential"), (2, "local", "sequential")]
    elif config.num_experts:
        kinds: tuple[ExpertModules, ...] = ("sequential", "grouped", "legacy_grouped")
        variants = [(ep, "te", kind) for ep in (1, 2) for kind in kinds]
    for ep, modules, experts in variants:
        assert_comes_back(case, STAGES[stages], tp, ep, (modules, experts), 1 if biased else None)


def test_experts_may_have_another_tensor_parallel_size():
    assert_comes_back("qwen2 moe, every other layer dense", [WHOLE], 4, 2, ("local", "sequential"), 2)


def test_reads_one_parameter_at_a_time():
    weights, config = made("qwen2")
    read: list[str] = []

    def recorded(name: str) -> Tensor:
        read.append(name)
        return weights[name]

    shards = load_shards(recorded, parameter_names(config, WHOLE, "local"), config, WHOLE)
    assert read == []
    for expected in (1, 2, 5):  # embedding; norm; query, key and value
        next(shards)
        assert len(read) == expected


def test_rows_of_a_query_group_follow_each_other():
    config = megatron_config(CONFIGS["qwen3, tied"])  # 4 heads in 2 groups, 16 wide
    kinds = {"q_proj": 0, "k_proj": 100, "v_proj": 200}

    def labelled(name: str) -> Tensor:
        kind = name.split(".")[-2]
        heads = 4 if kind == "q_proj" else 2
        return kinds[kind] + torch.arange(heads).repeat_interleave(16).unsqueeze(1).expand(-1, 32)

    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    whole = shard(name, labelled, config, WHOLE)
    assert whole[::16, 0].tolist() == [0, 1, 100, 200, 2, 3, 101, 201]
    halves = [shard(name, labelled, config, with_tensor_rank(WHOLE, rank, 2)) for rank in (0, 1)]
    assert torch.equal(torch.cat(halves), whole)


def test_a_shard_of_the_gated_layer_has_its_gate_above_its_up_projection():
    config = megatron_config(CONFIGS["llama"])

    def labelled(name: str) -> Tensor:
        return torch.arange(48).unsqueeze(1).expand(-1, 32) + (100 if "up_proj" in name else 0)

    name = "decoder.layers.1.mlp.linear_fc1.weight"
    second = shard(name, labelled, config, with_tensor_rank(WHOLE, 1, 2))
    assert second[:, 0].tolist() == [*range(24, 48), *range(124, 148)]


def test_legacy_grouped_experts_multiply_from_the_left():
    """As in Megatron's ``GroupedMLP.forward``: ``x @ weight1.view(experts, hidden, -1)[i]``."""
    weights, config = made("qwen3 moe")
    layout = with_tensor_rank(WHOLE, 1, 2)
    prefix = "decoder.layers.0.mlp.experts."
    first, second = (shard(prefix + name, weights.__getitem__, config, layout) for name in ("weight1", "weight2"))
    assert (first.shape, second.shape) == ((32, 4 * 24), (4 * 12, 32))
    hidden = torch.randn(5, 32)
    for expert in range(4):
        gate, up, down = (
            weights[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        both = hidden @ first.view(4, 32, -1)[expert]
        torch.testing.assert_close(both, hidden @ torch.cat([gate[12:], up[12:]]).T)
        torch.testing.assert_close(both[:, :12] @ second.view(4, -1, 32)[expert], both[:, :12] @ down[:, 12:].T)


def test_padding_is_zero_and_is_cut_off_again():
    weights, config = made("qwen2, tied")
    name = "embedding.word_embeddings.weight"
    ranks = [with_tensor_rank(WHOLE, rank, 4) for rank in range(4)]
    shards = [shard(name, weights.__getitem__, config, layout) for layout in ranks]
    padded = torch.cat(shards)
    assert padded.shape[0] == padded_vocab_size(97, 4) == 100
    assert not padded[97:].any()
    assert dict(join(name, shards, config, ranks[0]))["model.embed_tokens.weight"].shape == (97, 32)


def test_number_formats_stay_and_a_missing_shard_is_an_error():
    weights, config = made("qwen3 moe")
    names = parameter_names(config, WHOLE, "local")
    shards = load_shards(lambda name: weights[name].bfloat16(), names, config, WHOLE)
    assert {part.dtype for _, part in shards} == {torch.bfloat16}
    config = megatron_config(CONFIGS["qwen2"])
    layout = with_tensor_rank(WHOLE, 0, 2)
    with pytest.raises(ValueError, match=r"'output_layer.weight': 1 shards, expected 2"):
        list(join("output_layer.weight", [torch.zeros(49, 32)], config, layout))


@pytest.mark.parametrize(
    ("name", "rows"),
    [("embedding.word_embeddings.weight", 97), ("decoder.layers.0.self_attention.linear_qkv.weight", 64)],
)
def test_wrong_sizes_are_not_padded_or_folded_away(name, rows):
    with pytest.raises(ValueError, match=rf"weight: 96 rows, expected {rows} by the model's configuration"):
        shard(name, lambda _: torch.zeros(96, 32), megatron_config(CONFIGS["qwen3, tied"]), WHOLE)


def test_sizes_of_query_groups_wide_heads_and_layers_with_experts():
    config = megatron_config(CONFIGS["qwen3"])
    expected = {"num_query_groups": 2, "kv_channels": 24, "ffn_hidden_size": 48, "qk_layernorm": True}
    assert config.transformer.items() >= (expected | {"add_qkv_bias": False, "add_bias_linear": False}).items()
    assert config.model["vocab_size"] == config.vocab_size == 97
    assert (config.num_layers, config.num_experts, config.tied) == (3, 0, False)
    assert not any(key.startswith("moe") for key in config.transformer)
    config = megatron_config(CONFIGS["qwen3 moe, second layer dense"])
    assert config.moe_layers == (True, False, True)
    expected = {"num_moe_experts": 4, "moe_layer_freq": [1, 0, 1], "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
    assert config.transformer.items() >= (expected | {"moe_router_pre_softmax": False}).items()
    assert megatron_config(CONFIGS["qwen3 moe, not normalised"]).transformer["moe_router_pre_softmax"] is True
    assert megatron_config(CONFIGS["qwen2 moe, every other layer dense"]).moe_layers == (False, True, False)
    config = megatron_config(Qwen3MoeConfig(**SHAPE, **EXPERTS, mlp_only_layers=[0, 1, 2]))
    assert config.num_experts == 0
    assert "moe_layer_freq" not in config.transformer


@pytest.mark.parametrize(
    ("config", "seen", "nearest"),
    [(MinistralConfig(**SHAPE, head_dim=8), "MinistralForCausalLM", "Mistral"), (OlmoConfig(), "OlmoConfig", "")],
)
def test_an_unknown_class_is_named_with_the_known_ones(config, seen, nearest):
    config.architectures = [seen]
    with pytest.raises(ValueError, match=rf"^{seen} \(model_type .*Qwen3_5MoeForCausalLM \(nearest: {nearest}"):
        megatron_config(config)


def latent(**changes: object) -> DeepseekV3Config:
    return DeepseekV3Config(**SHAPE | LATENT | SIGMOIDS | changes)


def rope(**changes: object) -> LlamaConfig:
    return LlamaConfig(**SHAPE, rope_parameters={**LLAMA3, **changes})


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            LlamaConfig(**SHAPE, attention_bias=True),
            "attention_bias: got True with mlp_bias False, expected the same of both",
        ),
        (LlamaConfig(**SHAPE, hidden_act="gelu"), "hidden_act: got 'gelu', expected silu"),
        (rope(rope_type="dynamic"), "rope_parameters.rope_type: got 'dynamic', expected one of default, linear, "),
        (rope(rope_type="yarn", attention_factor=0.5), "got an attention factor of 0.5, expected at least 1"),
        (latent(rope_parameters=YARN), "got an attention factor of 1.13"),
        (latent(n_group=2, topk_group=2), "topk_group: got 2 with num_experts_per_tok 2, expected half as many"),
        (latent(norm_topk_prob=False), "norm_topk_prob: got False with num_experts_per_tok 2, expected True with"),
        (latent(rms_norm_eps=1e-5), "rms_norm_eps: got 1e-05, expected 1e-06 (the model's latent vectors"),
        (latent(rope_interleave=False), "rope_interleave: got False, expected True"),
        (GptOssConfig(**SHAPE, head_dim=8, swiglu_alpha=1.0), "swiglu_alpha: got 1.0, expected 1.702"),
        (rope(partial_rotary_factor=0.5), "rope_parameters.partial_rotary_factor: got 0.5, expected 1.0"),
        (
            Qwen3MoeConfig(**SHAPE, **EXPERTS | {"num_experts_per_tok": 1}, norm_topk_prob=True),
            "norm_topk_prob: got True with num_experts_per_tok 1, expected False",
        ),
    ],
)
def test_what_megatron_does_not_compute_is_named(config, problem):
    with pytest.raises(ValueError, match="ForCausalLM: Megatron-Core cannot compute this model") as error:
        megatron_config(config)
    assert problem in str(error.value)


def test_all_problems_come_at_once():
    with pytest.raises(ValueError) as error:
        megatron_config(
            LlamaConfig(**SHAPE, hidden_act="relu", mlp_bias=True, rope_parameters=dict(LLAMA3, rope_type="dynamic"))
        )
    assert len(str(error.value).splitlines()) == 4


def test_a_family_that_megatron_does_not_compute_says_what_it_lacks():
    lacks = r"gemma2.*soft cap of Megatron-Core's attention is fixed at 0.*another trainer"
    with pytest.raises(ValueError, match=lacks):
        megatron_config(Gemma2Config())


@pytest.mark.parametrize(("size", "rows"), [(1, 97), (2, 98), (4, 100), (97, 97), (8, 104)])
def test_padded_vocabulary_is_the_next_multiple(size, rows):
    assert padded_vocab_size(97, size) == rows


def test_parallel_sizes_that_do_not_divide_are_all_named():
    moe = megatron_config(CONFIGS["qwen3 moe, second layer dense"])
    for tensor, expert in [(1, 1), (2, 4), (4, 2)]:
        assert not list(parallel_size_problems(moe, tensor=tensor, expert=expert))
    assert [str(problem) for problem in parallel_size_problems(moe, tensor=5, expert=3)] == [
        "tensor_model_parallel_size: got 5, expected a divisor of num_attention_heads 4 (nearest: 4)",
        "tensor_model_parallel_size: got 5, expected a divisor or multiple of num_key_value_heads 2",
        "tensor_model_parallel_size: got 5, expected a divisor of intermediate_size 48 (nearest: 4)",
        "tensor_model_parallel_size: got 5, expected a divisor of moe_intermediate_size 24 (nearest: 4)",
        "expert_model_parallel_size: got 3, expected a divisor of num_experts 4 (nearest: 2)",
    ]
    oss = megatron_config(CONFIGS["gpt-oss"])
    unmeasured = parallel_size_problems(oss, expert=2, expert_tensor=2, context=2)
    assert [problem.path for problem in unmeasured] == ["context_parallel_size", "expert_tensor_parallel_size"]
    (dense,) = parallel_size_problems(megatron_config(CONFIGS["qwen3"]), expert=2)
    assert dense.expected == "1 (Qwen3ForCausalLM has no experts)"
    assert "expert_tensor_parallel_size" in [p.path for p in parallel_size_problems(moe, tensor=2, expert_tensor=16)]


# ---- the map of names, under both sets of Megatron's modules

MODULE_SETS: list[tuple[ModuleSet, ExpertModules]] = [
    ("local", "sequential"),
    ("local", "legacy_grouped"),
    ("te", "sequential"),
    ("te", "grouped"),
    ("te", "legacy_grouped"),
]


@pytest.mark.parametrize(
    ("case", "modules", "experts"),
    [(case, *each) for case in CONFIGS for each in MODULE_SETS if case in PLAIN or each == MODULE_SETS[0]],
)
def test_each_weight_of_a_checkpoint_is_covered_once(case, modules, experts):
    weights, config = made(case)
    names = list(parameter_names(config, WHOLE, modules, experts))
    assert len(set(names)) == len(names)
    found = Counter(hf for name in names for group in source(name, config, WHOLE).hf for hf in group)
    assert found == Counter(weights.keys())


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


def test_transformer_engine_names_of_a_dense_layer_and_of_grouped_experts():
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
    gate_and_up = (f"model.layers.1.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up"))
    assert source(names[2], config, stage).hf == (tuple(gate_and_up),)


def test_transformer_engine_names_are_those_that_megatron_saves_its_own_modules_under():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    saved_under = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.sharded_state_dict_keys_map
    for entry in (*ATTENTION, *QKV_BIAS, *QK_NORM, *DENSE_MLP, *LINEAR_BIASES):
        prefix = next((prefix for prefix in saved_under if entry.local.startswith(prefix)), "")
        assert name_in(entry, "te") == saved_under.get(prefix, "") + entry.local.removeprefix(prefix)


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
