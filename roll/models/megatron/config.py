"""A Hugging Face configuration as arguments of Megatron-Core's ``TransformerConfig`` and ``GPTModel``."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from roll.configs.problems import ConfigProblem
from roll.models.megatron.families import FAMILIES, REFUSED, WITH_TOWER, Family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


LANGUAGE = "language_model"
"""The language model in a trunk that has a tower beside it."""


@dataclass(frozen=True)
class MegatronModelConfig:
    """Shape that a Megatron model is built from and its weights are converted by."""

    family: Family
    transformer: dict[str, Any]
    """Arguments of ``TransformerConfig`` that the architecture fixes; parallel sizes, number formats and fusions are
    the strategy's. Dropout and the routers' balancing loss are off, whatever the model's configuration says, as they
    are in the other engines."""
    model: dict[str, Any]
    """Arguments of ``GPTModel``. ``vocab_size`` is the model's own: pass ``padded_vocab_size`` of it."""
    moe_layers: tuple[bool, ...]
    """For each layer, whether it has experts."""
    layer_kinds: tuple[str, ...]
    """For each layer, ``full_attention``, ``sliding_attention`` or ``linear_attention``."""
    rotary_frequencies: tuple[float, ...]
    """Radians per position of each pair of a head's first dimensions, as Transformers computes them (float32)."""
    rotary_factor: float = 1.0
    """Of the rotated dimensions of queries and keys (YaRN, Peng et al. 2023)."""
    trunk: str = "model."
    """Before the names of the language model's parts in the Hugging Face model, which may have a tower beside it."""
    part: bool = False
    """Of a configuration that has other parts than a language model."""

    @property
    def model_class(self) -> str:
        """The Hugging Face class, e.g. ``Qwen3ForCausalLM``."""
        return self.family.model_class

    @property
    def own_modules(self) -> bool:
        """The model is built of Megatron's own modules, not TransformerEngine's, and every layer has a row's whole
        sequences: it has something that has been compared in no other way."""
        own = self.family.own_modules or self.part
        return own or "window_size" in self.transformer or self.rotary_factor != 1.0

    def traits(self, layer: int) -> set[str]:
        """What ``Entry.when`` may name of a layer, by its number in the whole model."""
        return {
            "experts" if self.moe_layers[layer] else "dense",
            self.layer_kinds[layer],
            *(name for name, value in self.transformer.items() if value),
        }

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


def megatron_config(hf_config: PreTrainedConfig, hf_model: PreTrainedModel | None = None) -> MegatronModelConfig:
    """Translates a model's configuration, or the part of it that is of a language model.

    Args:
        hf_model: made of a configuration that has other parts too, to name its weights by.

    Raises:
        ValueError: a model class that the converter does not know (with the nearest that it does), or something in the
            configuration that Megatron-Core does not compute; names all of them.
    """
    family, whole, hf_config = _known_family(hf_config), hf_config, hf_config.get_text_config()
    problems = [*_attention_problems(hf_config), *_rope_problems(hf_config), *family.problems(hf_config)]
    if hf_config.hidden_act not in ("silu", "swish"):
        problems.append(f"hidden_act: got {hf_config.hidden_act!r}, expected silu")
    if problems:
        found = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"{family.model_class}: Megatron-Core cannot compute this model\n{found}")
    layers = tuple(family.has_experts(hf_config, layer) for layer in range(hf_config.num_hidden_layers))
    transformer = {**_transformer_arguments(hf_config), **_window(hf_config), **family.arguments(hf_config)}
    if any(layers):
        transformer["moe_layer_freq"] = [int(has_experts) for has_experts in layers]
    else:
        transformer = {name: value for name, value in transformer.items() if "moe" not in name}
    frequencies, factor = _rotary(hf_config)
    kinds = tuple(_layer_kinds(hf_config))
    model, trunk = _model_arguments(hf_config), "model."
    if hf_model is not None:
        model["share_embeddings_and_output_weights"] = bool(getattr(hf_model.config, "tie_word_embeddings", False))
        trunk = f"model.{LANGUAGE}." if hasattr(hf_model.base_model, LANGUAGE) else trunk
    part = whole is not hf_config
    return MegatronModelConfig(family, transformer, model, layers, kinds, frequencies, factor, trunk, part)


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Rows of the embedding and output layer, so that each tensor-parallel rank holds equally many.

    Added rows are zeros; their logits are no tokens' and must be masked.
    """
    return -(-vocab_size // tensor_parallel_size) * tensor_parallel_size


def parallel_size_problems(
    config: MegatronModelConfig,
    *,
    tensor: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
    context: int = 1,
) -> Iterator[ConfigProblem]:
    """Parallel sizes that do not divide what they deal out of the model, with the nearest that do, or are unmeasured.

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
    yield from _unmeasured_sizes(config, tensor, tensor if expert_tensor is None else expert_tensor, context)


def _unmeasured_sizes(
    config: MegatronModelConfig, tensor: int, expert_tensor: int, context: int
) -> Iterator[ConfigProblem]:
    """Sizes above 1 that a model's layers have not been compared with."""
    if context > 1 and config.own_modules:
        what = f"1 with {config.model_class} (its attention has been compared on whole sequences alone)"
        yield ConfigProblem("context_parallel_size", context, what)
    if tensor > 1 and config.family.mixers:
        what = f"1 with {config.model_class} (its gated delta nets are whole on each rank)"
        yield ConfigProblem("tensor_model_parallel_size", tensor, what)
    if expert_tensor > 1 and config.num_experts and config.transformer["add_bias_linear"]:
        what = f"1 with {config.model_class} (Megatron-Core adds an expert's bias once per rank)"
        yield ConfigProblem("expert_tensor_parallel_size", expert_tensor, what)


def _indivisible(name: str, divisor: int, what: str, number: int) -> Iterator[ConfigProblem]:
    if number % divisor:
        near = min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: abs(n - divisor))
        yield ConfigProblem(name, divisor, f"a divisor of {what} {number} (nearest: {near})")


def _known_family(whole: PreTrainedConfig) -> Family:
    config = whole.get_text_config()
    if config.model_type in FAMILIES and (config is whole or whole.model_type in WITH_TOWER):
        return FAMILIES[config.model_type]
    seen = (whole.architectures or [type(whole).__name__])[0]
    if config.model_type in REFUSED:
        raise ValueError(
            f"{seen} (model_type {config.model_type!r}): cannot be converted to Megatron-Core, which does not compute "
            f"{REFUSED[config.model_type]}; expected another trainer: they take any class."
        )
    nearest = difflib.get_close_matches(config.model_type, FAMILIES, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"{seen} (model_type {whole.model_type!r}): weights of this class cannot be converted to Megatron-Core; "
        f"expected one of {', '.join(family.model_class for family in FAMILIES.values())} "
        f"(nearest: {FAMILIES[nearest].model_class}). Other trainers take any class."
    )


def _transformer_arguments(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads),
        "ffn_hidden_size": getattr(config, "intermediate_size", None) or config.moe_intermediate_size,
        "activation_func": functional.silu,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _window(config: PreTrainedConfig) -> dict[str, Any]:
    """Arguments for layers that look no further back than a window, of which a token is a part itself."""
    kinds = _layer_kinds(config)
    if "sliding_attention" not in kinds:
        return {}
    skipped = [int(kind == "sliding_attention") for kind in kinds]
    return {"window_size": (config.sliding_window - 1, 0), "window_attn_skip_freq": skipped}


def _layer_kinds(config: PreTrainedConfig) -> list[str]:
    window = getattr(config, "sliding_window", None)
    # Mistral, Phi-3 and Qwen3-MoE have no list of layer types: their window holds for every layer.
    alike = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    return list(getattr(config, "layer_types", None) or alike)


def _model_arguments(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "max_sequence_length": config.max_position_embeddings,
        "share_embeddings_and_output_weights": bool(config.tie_word_embeddings),
        "position_embedding_type": "rope",
    }


def _attention_problems(config: PreTrainedConfig) -> Iterator[str]:
    mixers = FAMILIES[config.model_type].mixers
    expected = ("full_attention", "linear_attention" if mixers else "sliding_attention")
    if strange := sorted(set(_layer_kinds(config)).difference(expected)):
        yield f"layer_types: got {', '.join(strange)}, expected {' or '.join(expected)}"


ROPES = ("default", "linear", "llama3", "longrope", "yarn")
"""Kinds of rotary positions whose frequencies do not depend on what is computed, in rows that ``check_rope`` allows."""


def _rope_problems(config: PreTrainedConfig) -> Iterator[str]:
    rope = _rope(config)
    if "rope_type" not in rope:
        yield f"rope_parameters: got {rope}, expected one set for all layers"
    elif rope["rope_type"] not in ROPES:
        yield f"rope_parameters.rope_type: got {rope['rope_type']!r}, expected one of {', '.join(ROPES)}"
    elif (partial := rope.get("partial_rotary_factor", 1.0)) != 1.0 and not FAMILIES[config.model_type].partial_rotary:
        yield f"rope_parameters.partial_rotary_factor: got {partial}, expected 1.0"
    elif (factor := _rotary(config)[1]) < 1.0:
        yield f"rope_parameters: got an attention factor of {factor}, expected at least 1"
    elif factor != 1.0 and hasattr(config, "kv_lora_rank"):
        yield f"rope_parameters: got an attention factor of {factor}, expected 1 with latent attention"


def _rotary(config: PreTrainedConfig) -> tuple[tuple[float, ...], float]:
    """``MegatronModelConfig.rotary_frequencies`` and ``rotary_factor``, by the model's own class in Transformers."""
    rotary = transformers_class(config, "RotaryEmbedding")(config)
    return tuple(rotary.inv_freq.tolist()), float(rotary.attention_scaling)


def transformers_class(config: PreTrainedConfig, part: str) -> Any:
    """A class of the family's module in Transformers, e.g. ``LlamaRotaryEmbedding`` by the end of its name."""
    kind = config.model_type.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    family = FAMILIES[config.model_type].model_class.partition("For")[0]
    return getattr(module, family + part, None) or getattr(module, f"{family}Text{part}")


def rotary_angles(rotary: Any, positions_3RC: Tensor) -> Tensor:
    """Angles [C, R, 1, D] of tokens that have a time, a height and a width, as Megatron takes them.

    Args:
        rotary: of the model's own class, which knows which of the three turns a pair of dimensions.
    """
    angles_3RCF = positions_3RC[..., None].float() * rotary.inv_freq.to(positions_3RC.device)
    angles_RCD: Tensor = rotary.recomposition_frequencies(angles_3RCF)
    return angles_RCD.transpose(0, 1)[:, :, None]


def set_rotary(model: Any, config: MegatronModelConfig) -> None:
    """Gives a model that Megatron has made the rotary positions of the Hugging Face model."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.inv_freq = torch.tensor(config.rotary_frequencies, device=module.inv_freq.device)
    if config.rotary_factor != 1.0:
        # Megatron's factor is 0.1 ln(scale) + 1.
        model.config.yarn_rotary_scaling_factor = math.exp(10.0 * (config.rotary_factor - 1.0))


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    return dict(config.rope_parameters or {})
