"""The model families of ``docs/models.md``, tiny and random, each with its own windows, ropes, caps and states."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support import megatron_models
from tests.support.families import tiny_config, tiny_model

YARN = megatron_models.YARN | {"factor": 2.0, "original_max_position_embeddings": 16}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 6,
    "long_factor": [3.0] * 6,
}
TWO_LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2, "rms_norm_eps": 1e-3}
"""A recurrent state begins near zero, and the normalisation behind it would show its rounding in place of its value."""

CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}


@dataclass(frozen=True)
class Known:
    """A family and how its tiny model differs from ``tiny_config``'s."""

    title: str
    """As its publisher calls it."""
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    layers: int = 4
    routed: bool = False
    """Its routers' choices are replayed; with four layers of four experts, two of them a token's."""
    scores: bool = False
    """Its heads for scores are proved, too."""
    recurrent: bool = False
    """It has layers with a state."""
    megatron: bool = False
    """``roll.models.megatron.families`` has it."""


KNOWN: dict[str, Known] = {
    "llama3": Known("Llama 3", "llama", {"rope_parameters": megatron_models.LLAMA3}, scores=True, megatron=True),
    "mistral": Known("Mistral", "mistral", {"sliding_window": 8}, megatron=True),
    "phi3": Known("Phi-3, Phi-4 (14B)", "phi3", {"sliding_window": 8}, megatron=True),
    "phi4_mini": Known(
        "Phi-4-mini",
        "phi3",
        {
            "sliding_window": None,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 64,
            "tie_word_embeddings": True,
        },
        megatron=True,
    ),
    "gemma2": Known("Gemma 2", "gemma2", TWO_LAYERS | CAPS, scores=True),
    "gemma3": Known("Gemma 3 (text)", "gemma3_text", TWO_LAYERS),
    "qwen2": Known("Qwen2, Qwen2.5", "qwen2", {"tie_word_embeddings": True}, megatron=True),
    "qwen3": Known("Qwen3", "qwen3", megatron=True),
    "qwen3_moe": Known(
        "Qwen3-MoE",
        "qwen3_moe",
        {"norm_topk_prob": True, "mlp_only_layers": []},
        routed=True,
        scores=True,
        megatron=True,
    ),
    "qwen3_next": Known("Qwen3-Next", "qwen3_next", LINEAR, recurrent=True, megatron=True),
    "qwen3_5": Known("Qwen3.5, Qwen3.6 (text)", "qwen3_5_text", LINEAR, recurrent=True, megatron=True),
    "qwen3_5_moe": Known("Qwen3.5-MoE (text)", "qwen3_5_moe_text", LINEAR, recurrent=True, megatron=True),
    "deepseek_v3": Known(
        "DeepSeek-V3, R1", "deepseek_v3", {"rope_parameters": YARN}, layers=5, routed=True, megatron=True
    ),
    "glm4_moe": Known("GLM-4.5, GLM-4.6", "glm4_moe", megatron=True),
    "gpt_oss": Known("gpt-oss", "gpt_oss", TWO_LAYERS | {"rope_parameters": YARN | {"truncate": False}}, megatron=True),
    "mixtral": Known("Mixtral", "mixtral", routed=True, megatron=True),
    "smollm": Known("SmolLM, SmolLM2", "llama", {"tie_word_embeddings": True}, megatron=True),
    "smollm3": Known("SmolLM3", "smollm3", megatron=True),
    "granite_hybrid": Known("Granite 4 (hybrid)", "granitemoehybrid", LINEAR, recurrent=True),
    "falcon_h1": Known("Falcon-H1", "falcon_h1", recurrent=True),
    "nemotron_h": Known("Nemotron-H", "nemotron_h", recurrent=True),
}
SCORES = "_scores"
"""Ends the name of a model that is a classifier with one output."""


def make_known(path: Path, name: str, vocabulary: int, **changed: Any) -> Path:
    """A model's folder: no two parameters are equal, those that start as zeros or ones included.

    Args:
        changed: further entries of the configuration.
    """
    known = KNOWN[name.removesuffix(SCORES)]
    ids = {"pad_token_id": 0, "eos_token_id": vocabulary - 1, "bos_token_id": None}
    config = tiny_config(
        known.model_type,
        **{"vocab_size": vocabulary, "num_hidden_layers": known.layers, **ids, **known.config, **changed},
    )
    scores = name.endswith(SCORES)
    if scores:
        config.num_labels = 1
    model = tiny_model(config, scores=scores)
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor_name.endswith(("gate.weight", "router.weight")) and tensor.ndim == 2:
                tensor.mul_(3.0)  # experts that score alike would be chosen by rounding
            if tensor.ndim == 1 and not re.search(r"inv_freq|A_log", tensor_name) and tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(path)
    return path
