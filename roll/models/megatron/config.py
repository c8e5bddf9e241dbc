"""A Hugging Face configuration as arguments of Megatron-Core's ``TransformerConfig`` and ``GPTModel``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn import functional

from roll.configs.problems import ConfigProblem

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SUPPORTED = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""Model classes that convert, by ``model_type``."""

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values that Megatron's scaled rotary embedding has built in; only the factor is its argument."""


@dataclass(frozen=True)
class MegatronModelConfig:
    """Shape that a Megatron model is built from and its weights are converted by."""

    model_class: str
    """The Hugging Face class, e.g. ``Qwen3ForCausalLM``."""
    transformer: dict[str, Any]
    """Arguments of ``TransformerConfig`` that the architecture fixes; parallel sizes, number formats and fusions are
    the strategy's. Dropout and the routers' balancing loss are off, whatever the model's configuration says, as they
    are in the other engines."""
    model: dict[str, Any]
    """Arguments of ``GPTModel``. ``vocab_size`` is the model's own: pass ``padded_vocab_size`` of it."""
    moe_layers: tuple[bool, ...]
    """For each layer, whether it has experts."""

    @property
    def num_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer that has them; 0 in a dense model."""
        return self.transformer.get("num_moe_experts") or 0

    @property
    def vocab_size(self) -> int:
        return int(self.model["vocab_size"])

    @property
    def tied(self) -> bool:
        """The output layer is the embedding."""
        return bool(self.model["share_embeddings_and_output_weights"])


def megatron_config(hf_config: PreTrainedConfig) -> MegatronModelConfig:
    """Translates a model's configuration.

    Raises:
        ValueError: a model class that the converter does not know (with the nearest that it does), or something in the
            configuration that Megatron-Core does not compute; names all of them.
    """
    model_class = _known_class(hf_config)
    layers = _moe_layers(hf_config)
    if problems := [*_attention_problems(hf_config), *_rope_problems(hf_config), *_mlp_problems(hf_config, layers)]:
        found = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"{model_class}: Megatron-Core cannot compute this model\n{found}")
    transformer = {**_transformer_arguments(hf_config), **_expert_arguments(hf_config, layers)}
    return MegatronModelConfig(model_class, transformer, _model_arguments(hf_config), layers)


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Rows of the embedding and output layer, so that each tensor-parallel rank holds equally many.

    Added rows are zeros; their logits are no tokens' and must be masked.
    """
    return -(-vocab_size // tensor_parallel_size) * tensor_parallel_size


def parallel_size_problems(
    config: MegatronModelConfig, *, tensor: int = 1, expert: int = 1, expert_tensor: int | None = None
) -> Iterator[ConfigProblem]:
    """Parallel sizes that do not divide what they deal out of the model, with the nearest that do.

    Args:
        expert_tensor: tensor-parallel size within an expert; ``None``: as ``tensor``.
    """
    size = config.transformer
    name = "tensor_model_parallel_size"
    yield from _indivisible(name, tensor, "num_attention_heads", size["num_attention_heads"])
    groups = size["num_query_groups"]
    if groups % tensor and tensor % groups:
        yield ConfigProblem(name, tensor, f"a divisor or multiple of num_key_value_heads {groups}")
    if not all(config.moe_layers):
        yield from _indivisible(name, tensor, "intermediate_size", size["ffn_hidden_size"])
    if shared := size.get("moe_shared_expert_intermediate_size"):
        yield from _indivisible(name, tensor, "shared_expert_intermediate_size", shared)
    if config.num_experts:
        etp_name = name if expert_tensor is None else "expert_tensor_parallel_size"
        etp = tensor if expert_tensor is None else expert_tensor
        yield from _indivisible(etp_name, etp, "moe_intermediate_size", size["moe_ffn_hidden_size"])
        yield from _indivisible("expert_model_parallel_size", expert, "num_experts", config.num_experts)
    elif expert > 1:
        expected = f"1 ({config.model_class} has no experts)"
        yield ConfigProblem("expert_model_parallel_size", expert, expected)


def _indivisible(name: str, divisor: int, what: str, number: int) -> Iterator[ConfigProblem]:
    if number % divisor:
        near = min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: abs(n - divisor))
        yield ConfigProblem(name, divisor, f"a divisor of {what} {number} (nearest: {near})")


def _known_class(config: PreTrainedConfig) -> str:
    if config.model_type in SUPPORTED:
        return SUPPORTED[config.model_type]
    seen = (config.architectures or [type(config).__name__])[0]
    nearest = difflib.get_close_matches(config.model_type, SUPPORTED, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"{seen} (model_type {config.model_type!r}): weights of this class cannot be converted to Megatron-Core; "
        f"expected one of {', '.join(SUPPORTED.values())} (nearest: {SUPPORTED[nearest]}). "
        "Other trainers take any class."
    )


def _moe_layers(config: PreTrainedConfig) -> tuple[bool, ...]:
    experts = getattr(config, "num_experts", 0)
    every = getattr(config, "decoder_sparse_step", 1)
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    return tuple(
        experts > 0 and index not in dense and (index + 1) % every == 0 for index in range(config.num_hidden_layers)
    )


def _transformer_arguments(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads),
        "ffn_hidden_size": config.intermediate_size,
        "activation_func": functional.silu,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "add_bias_linear": bool(getattr(config, "attention_bias", False)),
        "add_qkv_bias": _has_qkv_bias(config),
        "qk_layernorm": config.model_type.startswith("qwen3"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _expert_arguments(config: PreTrainedConfig, layers: tuple[bool, ...]) -> dict[str, Any]:
    if not any(layers):
        return {}
    arguments = {
        "num_moe_experts": config.num_experts,
        "moe_layer_freq": [int(has_experts) for has_experts in layers],
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_score_function": "softmax",
        # Softmax over the chosen experts equals softmax over all of them, normalised over the chosen.
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
    }
    if config.model_type == "qwen2_moe":
        arguments["moe_shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
        arguments["moe_shared_expert_gate"] = True
    return arguments


def _model_arguments(config: PreTrainedConfig) -> dict[str, Any]:
    rope = _rope(config)
    factor = float(rope.get("factor", 1.0))
    return {
        "vocab_size": config.vocab_size,
        "max_sequence_length": config.max_position_embeddings,
        "share_embeddings_and_output_weights": bool(config.tie_word_embeddings),
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": 1.0,
        "rope_scaling": rope["rope_type"] == "llama3",
        "rope_scaling_factor": factor,
        "seq_len_interpolation_factor": factor if rope["rope_type"] == "linear" else None,
    }


def _attention_problems(config: PreTrainedConfig) -> list[str]:
    problems = []
    window = getattr(config, "sliding_window", None)
    # Qwen3-MoE has no list of layer types: its window holds for every layer.
    types = set(getattr(config, "layer_types", None) or (["sliding_attention"] if window else ["full_attention"]))
    if types != {"full_attention"}:
        problems.append(
            f"layer_types: got {', '.join(sorted(types))} (sliding_window {window}), expected full_attention"
        )
    attention, mlp = bool(getattr(config, "attention_bias", False)), bool(getattr(config, "mlp_bias", False))
    if attention != mlp:
        problems.append(
            f"attention_bias: got {attention} with mlp_bias {mlp}, expected the same of both (Megatron-Core has "
            "biases in all linear layers, in the query, key and value projections alone, or in none)"
        )
    return problems


def _rope_problems(config: PreTrainedConfig) -> list[str]:
    rope = _rope(config)
    problems = []
    if "rope_type" not in rope:
        problems.append(f"rope_parameters: got {rope}, expected one set for all layers")
    elif rope["rope_type"] not in ("default", "linear", "llama3"):
        problems.append(f"rope_parameters.rope_type: got {rope['rope_type']!r}, expected default, linear or llama3")
    elif rope["rope_type"] == "llama3":
        problems += [
            f"rope_parameters.{key}: got {rope.get(key)}, expected {value} (fixed in Megatron-Core)"
            for key, value in LLAMA3_ROPE.items()
            if rope.get(key) != value
        ]
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"rope_parameters.partial_rotary_factor: got {rope['partial_rotary_factor']}, expected 1.0")
    return problems


def _mlp_problems(config: PreTrainedConfig, layers: tuple[bool, ...]) -> list[str]:
    problems = []
    if config.hidden_act not in ("silu", "swish"):
        problems.append(f"hidden_act: got {config.hidden_act!r}, expected silu")
    if any(layers) and config.num_experts_per_tok == 1 and config.norm_topk_prob:
        problems.append("norm_topk_prob: got True with num_experts_per_tok 1, expected False (every weight would be 1)")
    return problems


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    return dict(config.rope_parameters or {})


def _has_qkv_bias(config: PreTrainedConfig) -> bool:
    if config.model_type == "qwen2_moe":
        return bool(config.qkv_bias)
    return config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False))
