"""A Hugging Face configuration becomes Megatron's arguments, or an error that says what stands in the way."""

from __future__ import annotations

import subprocess
import sys

import pytest
from transformers import GptOssConfig, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from roll.models.megatron.config import megatron_config, padded_vocab_size, parallel_size_problems
from tests.support.megatron_models import CONFIGS, EXPERTS, LLAMA3, SHAPE


def test_sizes_of_query_groups_wide_heads_and_layers_with_experts() -> None:
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
    [
        (MistralConfig(**SHAPE), "MistralForCausalLM", "Llama"),
        (GptOssConfig(**SHAPE), "GptOssConfig", ""),
    ],
)
def test_an_unknown_class_is_named_with_the_known_ones(config: PreTrainedConfig, seen: str, nearest: str) -> None:
    config.architectures = [seen]
    with pytest.raises(ValueError, match=rf"^{seen} \(model_type .*Qwen3MoeForCausalLM \(nearest: {nearest}"):
        megatron_config(config)


def rope(**changes: object) -> LlamaConfig:
    return LlamaConfig(**SHAPE, rope_parameters={**LLAMA3, **changes})


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "layer_types: got full_attention, sliding_attention (sliding_window 8), expected full_attention",
        ),
        (
            Qwen3MoeConfig(**SHAPE, **EXPERTS, use_sliding_window=True, sliding_window=8),
            "layer_types: got sliding_attention (sliding_window 8), expected full_attention",
        ),
        (
            LlamaConfig(**SHAPE, attention_bias=True),
            "attention_bias: got True with mlp_bias False, expected the same of both",
        ),
        (LlamaConfig(**SHAPE, hidden_act="gelu"), "hidden_act: got 'gelu', expected silu"),
        (rope(rope_type="yarn"), "rope_parameters.rope_type: got 'yarn', expected default, linear or llama3"),
        (rope(high_freq_factor=8.0), "rope_parameters.high_freq_factor: got 8.0, expected 4.0 (fixed in Megatron"),
        (rope(partial_rotary_factor=0.5), "rope_parameters.partial_rotary_factor: got 0.5, expected 1.0"),
        (
            Qwen3MoeConfig(**SHAPE, **EXPERTS | {"num_experts_per_tok": 1}, norm_topk_prob=True),
            "norm_topk_prob: got True with num_experts_per_tok 1, expected False",
        ),
    ],
)
def test_what_megatron_does_not_compute_is_named(config: PreTrainedConfig, problem: str) -> None:
    with pytest.raises(ValueError, match="ForCausalLM: Megatron-Core cannot compute this model") as error:
        megatron_config(config)
    assert problem in str(error.value)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ValueError) as error:
        megatron_config(
            LlamaConfig(**SHAPE, hidden_act="relu", mlp_bias=True, rope_parameters=dict(LLAMA3, factor=2.0))
        )
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(("size", "rows"), [(1, 97), (2, 98), (4, 100), (97, 97), (8, 104)])
def test_padded_vocabulary_is_the_next_multiple(size: int, rows: int) -> None:
    assert padded_vocab_size(97, size) == rows


def test_parallel_sizes_that_do_not_divide_are_all_named() -> None:
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
    (dense,) = parallel_size_problems(megatron_config(CONFIGS["qwen3"]), expert=2)
    assert dense.expected == "1 (Qwen3ForCausalLM has no experts)"
    assert "expert_tensor_parallel_size" in [p.path for p in parallel_size_problems(moe, tensor=2, expert_tensor=16)]


def test_nothing_of_this_imports_megatron() -> None:
    modules = ", ".join(f"roll.models.megatron.{name}" for name in ("config", "names"))
    code = f"import sys, {modules}; sys.exit('megatron' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
