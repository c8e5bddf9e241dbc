"""Tiny random models of every class that converts to Megatron-Core, each with something in it that could go wrong."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

from roll.models.megatron.config import MegatronModelConfig, megatron_config
from roll.models.megatron.families import EMBEDDING, FINAL_NORM, OUTPUT, Entry, ExpertModules
from roll.models.megatron.names import ParallelLayout, fuse, layer_entries, source, split_reader
from roll.models.stored import StoredTensor
from tests.support.contract import weights_of
from tests.support.sizes import FOUR_EXPERTS, sizes

ModuleSet = Literal["local", "te"]

VOCABULARY = 97  # divides by nothing, so that every tensor-parallel size pads it
SHAPE: dict[str, Any] = sizes(VOCABULARY, 32, 48, 3, 4, 2) | {"max_position_embeddings": 128}
EXPERTS: dict[str, Any] = FOUR_EXPERTS
SIGMOIDS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
}
WIDE_HEADS: dict[str, Any] = {"head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama with every bias, tied": LlamaConfig(
        **SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-3
    ),
    "llama 3 rope": LlamaConfig(**SHAPE | {"num_key_value_heads": 4}, rope_parameters=LLAMA3),
    "llama linear rope": LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "qwen2": Qwen2Config(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen2, tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=24),
    "qwen3, tied": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "qwen3 moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, norm_topk_prob=True, **WIDE_HEADS),
    "qwen3 moe, not normalised": Qwen3MoeConfig(**SHAPE, **EXPERTS, norm_topk_prob=False, **WIDE_HEADS),
    "qwen3 moe, second layer dense": Qwen3MoeConfig(
        **SHAPE, **EXPERTS, norm_topk_prob=True, **WIDE_HEADS, mlp_only_layers=[1], tie_word_embeddings=True
    ),
    "qwen2 moe, every other layer dense": Qwen2MoeConfig(
        **SHAPE, **EXPERTS, shared_expert_intermediate_size=40, decoder_sparse_step=2
    ),
    "llama yarn": LlamaConfig(**SHAPE, rope_parameters=YARN),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "phi3": Phi3Config(**SHAPE, **ENDS, sliding_window=8),
    "glm4 moe": Glm4MoeConfig(**SHAPE, **SIGMOIDS, **WIDE_HEADS, attention_bias=True, use_qk_norm=True),
    "deepseek v3": DeepseekV3Config(**SHAPE | LATENT, **SIGMOIDS),
    "deepseek v3, whole queries": DeepseekV3Config(**SHAPE | LATENT | {"q_lora_rank": None}, **SIGMOIDS),
    "gpt-oss": GptOssConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=8, rope_parameters=YARN
    ),
    "smollm3": SmolLM3Config(**SHAPE, **ENDS, no_rope_layers=[1, 0, 1]),
    "qwen3 next": Qwen3NextConfig(**SHAPE, **EXPERTS, **DELTA, shared_expert_intermediate_size=40),
    "qwen3.5": Qwen3_5TextConfig(**SHAPE, **DELTA),
}
PLAIN = [name for name, config in CONFIGS.items() if not megatron_config(config).own_modules]
"""Those that Megatron builds without a module of ours, and of TransformerEngine's modules too."""


def make_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model in which no two parameters are equal, biases and norms included."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config))  # a test may save it
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.1)
    return model.eval()


def checkpoint(model: PreTrainedModel) -> dict[str, Tensor]:
    """Its weights as a model folder names and shapes them; of gpt-oss, whose experts are in one tensor, one by one."""
    weights = weights_of(model)
    converted = megatron_config(model.config)
    if not converted.family.experts.alternating:
        return weights
    alone = ParallelLayout(tuple(range(converted.num_layers)))
    groups = [source(name, converted, alone).hf for name in parameter_names(converted, alone, "local")]
    names = itertools.chain.from_iterable(itertools.chain.from_iterable(groups))
    read = split_reader(lambda name: StoredTensor.of(weights[name]), converted.family)
    split = {name: read(name).contiguous() for name in names}
    again = dict(fuse(split.items(), converted.family, converted.num_experts))
    assert again.keys() == weights.keys() and all(again[name].equal(weights[name]) for name in weights)
    return split


def name_in(entry: Entry, modules: ModuleSet) -> str:
    return entry.te or entry.local if modules == "te" else entry.local


def parameter_names(
    config: MegatronModelConfig, layout: ParallelLayout, modules: ModuleSet, experts: ExpertModules = "sequential"
) -> Iterator[str]:
    """Every parameter that the model of this rank (or chunk) has."""
    if layout.first_stage:
        yield name_in(EMBEDDING, modules)
    for index, layer in enumerate(layout.layers):
        for entry in layer_entries(config, layer, experts):
            name = f"decoder.layers.{index}.{name_in(entry, modules)}"
            if "{expert}" not in name:
                yield name
            else:
                yield from (name.format(expert=i) for i in range(len(layout.experts(config.num_experts))))
    if layout.last_stage:
        yield name_in(FINAL_NORM, modules)
        if not (config.tied and layout.first_stage):
            yield name_in(OUTPUT, modules)
