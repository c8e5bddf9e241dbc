"""The model families that convert to Megatron-Core: names and forms of their weights, meaning of their configuration.

A family is an entry of ``FAMILIES``. Its tensors are told layer by layer, each with the condition under which a layer
has it; what its configuration means to Megatron is a function beside the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ExpertModules = Literal["sequential", "grouped", "legacy_grouped"]

Form = Literal["replicated", "vocab", "rows", "columns", "qkv", "gate_up", "all_gate_up", "all_down"]
"""Rule by which Hugging Face tensors become one of Megatron's, and its tensor-parallel shards are cut.

``replicated``: as it is, on every rank. ``vocab``: rows padded, cut by rows. ``rows``, ``columns``: cut by these.
``qkv``: rows of query, key and value interleaved by query group, cut by rows. ``gate_up``: each shard is its rows of
the gate above its rows of the up projection. Both take their parts as tensors of their own or as one that has them end
to end. ``all_gate_up``, ``all_down``: the transposed weights of all experts of a rank, as ``gate_up`` and ``columns``.
"""


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors that it holds.

    Within layers, both names are relative to the layer; ``{expert}`` stands for an expert's number.
    """

    hf: tuple[str, ...]
    local: str
    form: Form
    te: str = ""
    """The name in a model of TransformerEngine modules; empty: the same."""
    when: tuple[str, ...] = ()
    """What a layer must be to have it: ``dense``, ``experts``, a kind such as ``linear_attention``; or an argument of
    ``TransformerConfig`` that must be set, or after a ``!`` must not."""


EMBEDDING = Entry(("model.embed_tokens.weight",), "embedding.word_embeddings.weight", "vocab")
FINAL_NORM = Entry(("model.norm.weight",), "decoder.final_layernorm.weight", "replicated")
OUTPUT = Entry(("lm_head.weight",), "output_layer.weight", "vocab")
TIED_OUTPUT = Entry(("model.embed_tokens.weight",), "output_layer.weight", "vocab")
"""A copy of the embedding, where the last pipeline stage is not the first."""

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
INPUT_NORM = Entry(
    ("input_layernorm.weight",),
    "input_layernorm.weight",
    "replicated",
    te="self_attention.linear_qkv.layer_norm_weight",
)
PROJECTION = Entry(("self_attn.o_proj.weight",), "self_attention.linear_proj.weight", "columns")
ATTENTION = (
    INPUT_NORM,
    Entry(tuple(f"{name}.weight" for name in _QKV), "self_attention.linear_qkv.weight", "qkv"),
    PROJECTION,
)
QKV_BIAS = (
    Entry(tuple(f"{name}.bias" for name in _QKV), "self_attention.linear_qkv.bias", "qkv", when=("add_qkv_bias",)),
)
QK_NORM = (
    Entry(("self_attn.q_norm.weight",), "self_attention.q_layernorm.weight", "replicated", when=("qk_layernorm",)),
    Entry(("self_attn.k_norm.weight",), "self_attention.k_layernorm.weight", "replicated", when=("qk_layernorm",)),
)
SINKS = (Entry(("self_attn.sinks",), "self_attention.core_attention.softmax_offset", "rows"),)
LATENT = (
    Entry(("input_layernorm.weight",), "input_layernorm.weight", "replicated"),
    Entry(("self_attn.q_proj.weight",), "self_attention.linear_q_proj.weight", "rows", when=("!q_lora_rank",)),
    Entry(
        ("self_attn.q_a_proj.weight",), "self_attention.linear_q_down_proj.weight", "replicated", when=("q_lora_rank",)
    ),
    Entry(
        ("self_attn.q_a_layernorm.weight",), "self_attention.q_layernorm.weight", "replicated", when=("q_lora_rank",)
    ),
    Entry(("self_attn.q_b_proj.weight",), "self_attention.linear_q_up_proj.weight", "rows", when=("q_lora_rank",)),
    Entry(("self_attn.kv_a_proj_with_mqa.weight",), "self_attention.linear_kv_down_proj.weight", "replicated"),
    Entry(("self_attn.kv_a_layernorm.weight",), "self_attention.kv_layernorm.weight", "replicated"),
    Entry(("self_attn.kv_b_proj.weight",), "self_attention.linear_kv_up_proj.weight", "rows"),
    PROJECTION,
)
"""Multi-head latent attention (DeepSeek-V2, 2024)."""

MLP_NORM = Entry(
    ("post_attention_layernorm.weight",),
    "pre_mlp_layernorm.weight",
    "replicated",
    te="mlp.linear_fc1.layer_norm_weight",
    when=("dense",),
)
DENSE_MLP = (
    MLP_NORM,
    Entry(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "mlp.linear_fc1.weight", "gate_up", when=("dense",)),
    Entry(("mlp.down_proj.weight",), "mlp.linear_fc2.weight", "columns", when=("dense",)),
)
OUTPUT_BIAS = Entry(
    ("self_attn.o_proj.bias",), "self_attention.linear_proj.bias", "replicated", when=("add_bias_linear",)
)
LINEAR_BIASES = (
    OUTPUT_BIAS,
    Entry(
        ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        "mlp.linear_fc1.bias",
        "gate_up",
        when=("dense", "add_bias_linear"),
    ),
    Entry(("mlp.down_proj.bias",), "mlp.linear_fc2.bias", "replicated", when=("dense", "add_bias_linear")),
)


def _router(name: str = "mlp.gate") -> tuple[Entry, ...]:
    return (
        # The router needs the normalised input too, so TransformerEngine does not fuse it here.
        Entry(("post_attention_layernorm.weight",), "pre_mlp_layernorm.weight", "replicated", when=("experts",)),
        Entry((f"{name}.weight",), "mlp.router.weight", "replicated", when=("experts",)),
        Entry((f"{name}.bias",), "mlp.router.bias", "replicated", when=("experts", "add_bias_linear")),
    )


def _shared_expert(name: str) -> tuple[Entry, ...]:
    parts = (f"{name}.gate_proj.weight", f"{name}.up_proj.weight")
    when = ("experts", "moe_shared_expert_intermediate_size")
    return (
        Entry(parts, "mlp.shared_experts.linear_fc1.weight", "gate_up", when=when),
        Entry((f"{name}.down_proj.weight",), "mlp.shared_experts.linear_fc2.weight", "columns", when=when),
    )


SHARED_EXPERT = (
    *_shared_expert("mlp.shared_expert"),
    Entry(
        ("mlp.shared_expert_gate.weight",),
        "mlp.shared_experts.gate_weight",
        "replicated",
        when=("experts", "moe_shared_expert_gate"),
    ),
)


def _mixers(*deltas: str) -> tuple[Entry, ...]:
    """Transformers' own modules between the norms of a layer: with a state, and between those with attention.

    Args:
        deltas: names of the projections into a gated delta net.
    """
    state = ("A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight", *(f"{d}.weight" for d in deltas))
    parts = [f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    kinds = [("linear_attention", "linear_attn", state), ("full_attention", "self_attn", parts)]
    return (
        Entry(("input_layernorm.weight",), "input_layernorm.weight", "replicated"),
        *(
            Entry((f"{name}.{part}",), f"self_attention.module.{part}", "replicated", when=(kind,))
            for kind, name, each in kinds
            for part in each
        ),
    )


CORRECTION = Entry(
    ("mlp.gate.e_score_correction_bias",),
    "mlp.router.expert_bias",
    "replicated",
    when=("experts", "moe_router_enable_expert_bias"),
)
"""Added to scores where experts are chosen (DeepSeek-V3, 2024); no gradient trains it."""


@dataclass(frozen=True)
class Experts:
    """Names of a layer's routed experts, and how Transformers' module keeps all of them in a few tensors."""

    gate: str = "mlp.experts.{expert}.gate_proj"
    up: str = "mlp.experts.{expert}.up_proj"
    down: str = "mlp.experts.{expert}.down_proj"
    biased: bool = False
    alternating: bool = False
    """The module's tensors are [experts, inputs, outputs], with columns of gate and up projection in turn; those of a
    checkpoint are the same, so that the names of single experts are only used here."""

    def entries(self) -> dict[ExpertModules, tuple[Entry, ...]]:
        """Their parameters in each of the three shapes that Megatron has for experts."""
        both, down = (f"{self.gate}.weight", f"{self.up}.weight"), (f"{self.down}.weight",)
        when = ("experts",)
        one = "mlp.experts.local_experts.{expert}"
        biases = (
            Entry((f"{self.gate}.bias", f"{self.up}.bias"), f"{one}.linear_fc1.bias", "gate_up", when=when),
            Entry((f"{self.down}.bias",), f"{one}.linear_fc2.bias", "replicated", when=when),
        )
        return {
            "sequential": (
                Entry(both, f"{one}.linear_fc1.weight", "gate_up", when=when),
                Entry(down, f"{one}.linear_fc2.weight", "columns", when=when),
                *(biases if self.biased else ()),
            ),
            "grouped": (
                Entry(both, "mlp.experts.linear_fc1.weight{expert}", "gate_up", when=when),
                Entry(down, "mlp.experts.linear_fc2.weight{expert}", "columns", when=when),
            ),
            "legacy_grouped": (
                Entry(both, "mlp.experts.weight1", "all_gate_up", when=when),
                Entry(down, "mlp.experts.weight2", "all_down", when=when),
            ),
        }


Arguments = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """What is particular to one model class."""

    model_class: str
    entries: tuple[Entry, ...]
    """Parameters that its layers may have, but for routed experts."""
    arguments: Callable[[PreTrainedConfig], Arguments]
    """Of ``TransformerConfig``, beside those that every family has."""
    experts: Experts = Experts()
    buffers: tuple[Entry, ...] = ()
    """Tensors that no gradient trains."""
    has_experts: Callable[[PreTrainedConfig, int], bool] = lambda config, layer: False
    problems: Callable[[PreTrainedConfig], Iterator[str]] = lambda config: iter(())
    """What Megatron-Core does not compute of the configuration, beside what no family may have."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of names in a checkpoint, and those in Transformers' module."""
    partial_rotary: bool = False
    """A part of a head's dimensions may be rotated."""
    mixers: bool = False
    """Attention, and layers with a state, are Transformers' own modules."""
    own_modules: bool = False
    """Layers have something that only Megatron's own modules have been compared with."""

    expert_entries: dict[ExpertModules, tuple[Entry, ...]] = field(init=False, repr=False, compare=False)
    by_name: dict[str, Entry] = field(init=False, repr=False, compare=False)
    """All of a layer by either of their names in Megatron."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "expert_entries", self.experts.entries())
        every = [*self.entries, *self.buffers, *(entry for each in self.expert_entries.values() for entry in each)]
        object.__setattr__(self, "by_name", {name: e for e in every for name in (e.local, e.te or e.local)})


def _nothing_more(config: PreTrainedConfig) -> Arguments:
    return {}


def _llama(config: PreTrainedConfig) -> Arguments:
    return {"add_bias_linear": bool(config.attention_bias), "add_qkv_bias": bool(config.attention_bias)}


def _smollm3(config: PreTrainedConfig) -> Arguments:
    return {**_llama(config), "no_rope_freq": [int(not rotated) for rotated in config.no_rope_layers]}


def _qwen2(config: PreTrainedConfig) -> Arguments:
    return {"add_qkv_bias": True}


def _qwen3(config: PreTrainedConfig) -> Arguments:
    return {"qk_layernorm": True}


def softmax_experts(config: PreTrainedConfig, number: int, width: int, *, normalised: bool) -> Arguments:
    """Arguments for ``number`` experts of ``width``, chosen by the softmax of their scores."""
    return {
        "num_moe_experts": number,
        "moe_ffn_hidden_size": width,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_score_function": "softmax",
        # Softmax over the chosen experts equals softmax over all of them, normalised over the chosen.
        "moe_router_pre_softmax": not normalised,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
    }


def sigmoid_experts(config: PreTrainedConfig) -> Arguments:
    """Arguments for experts that are chosen in groups by sigmoids with a bias, and for the experts that all share."""
    grouped = config.n_group > 1
    return {
        "num_moe_experts": config.n_routed_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": config.n_group if grouped else None,
        "moe_router_group_topk": config.topk_group if grouped else None,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts or None,
    }


def _qwen_experts(config: PreTrainedConfig) -> Arguments:
    return softmax_experts(
        config, config.num_experts, config.moe_intermediate_size, normalised=bool(config.norm_topk_prob)
    )


def _qwen2_moe(config: PreTrainedConfig) -> Arguments:
    shared = {
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }
    return {"add_qkv_bias": bool(config.qkv_bias), **_qwen_experts(config), **shared}


def _mixtral(config: PreTrainedConfig) -> Arguments:
    return softmax_experts(config, config.num_local_experts, config.intermediate_size, normalised=True)


def _glm4_moe(config: PreTrainedConfig) -> Arguments:
    biased, normed = bool(config.attention_bias), bool(config.use_qk_norm)
    return {"add_qkv_bias": biased, "qk_layernorm": normed, **sigmoid_experts(config)}


def _deepseek_v3(config: PreTrainedConfig) -> Arguments:
    rope = config.rope_parameters
    return {
        "multi_latent_attention": True,
        "num_query_groups": config.num_attention_heads,
        "kv_channels": config.qk_head_dim,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "qk_layernorm": True,  # of the latent vectors
        "rope_type": "rope",  # its frequencies are set; these scale the softmax
        "rotary_scaling_factor": float(rope.get("factor") or 1.0),
        "mscale_all_dim": float(rope.get("mscale_all_dim") or 0.0),
        **sigmoid_experts(config),
    }


def quick_swiglu(gate: Tensor) -> Tensor:
    """The gate of gpt-oss; Megatron's own of that name is compiled, which takes longer on a CPU than a test of it."""
    return gate * torch.sigmoid(1.702 * gate)


def _gpt_oss(config: PreTrainedConfig) -> Arguments:
    return {
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "softmax_type": "learnable",
        "activation_func": quick_swiglu,
        "activation_func_clamp_value": config.swiglu_limit,
        "glu_linear_offset": 1.0,
        "bias_activation_fusion": False,
        **softmax_experts(config, config.num_local_experts, config.intermediate_size, normalised=True),
    }


def _hybrid(config: PreTrainedConfig) -> Arguments:
    return {"layernorm_zero_centered_gamma": True}


def _hybrid_experts(config: PreTrainedConfig) -> Arguments:
    normalised = bool(getattr(config, "norm_topk_prob", True))
    return {
        **_hybrid(config),
        **softmax_experts(config, config.num_experts, config.moe_intermediate_size, normalised=normalised),
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def _qwen_has_experts(config: PreTrainedConfig, layer: int) -> bool:
    dense = config.mlp_only_layers or ()
    return config.num_experts > 0 and layer not in dense and (layer + 1) % config.decoder_sparse_step == 0


def _after_dense_layers(config: PreTrainedConfig, layer: int) -> bool:
    return bool(layer >= config.first_k_dense_replace)


def _everywhere(config: PreTrainedConfig, layer: int) -> bool:
    return True


def _same_biases(config: PreTrainedConfig) -> Iterator[str]:
    attention, mlp = bool(getattr(config, "attention_bias", False)), bool(getattr(config, "mlp_bias", False))
    if attention != mlp:
        yield (
            f"attention_bias: got {attention} with mlp_bias {mlp}, expected the same of both (Megatron-Core has "
            "biases in all linear layers, in the query, key and value projections alone, or in none)"
        )


def _one_of_several(config: PreTrainedConfig) -> Iterator[str]:
    if config.num_experts_per_tok == 1 and getattr(config, "norm_topk_prob", True):
        yield "norm_topk_prob: got True with num_experts_per_tok 1, expected False (every weight would be 1)"


def _mixtral_problems(config: PreTrainedConfig) -> Iterator[str]:
    yield from _one_of_several(config)
    if config.router_jitter_noise:
        yield f"router_jitter_noise: got {config.router_jitter_noise}, expected 0"


def _qwen_moe_problems(config: PreTrainedConfig) -> Iterator[str]:
    yield from _same_biases(config)
    if any(_qwen_has_experts(config, layer) for layer in range(config.num_hidden_layers)):
        yield from _one_of_several(config)


def _sigmoid_problems(config: PreTrainedConfig) -> Iterator[str]:
    """Megatron normalises the weights of several experts, and of one never; groups score by their two best."""
    chosen = config.num_experts_per_tok
    if bool(config.norm_topk_prob) != (chosen > 1):
        expected = "True with several experts per token, False with one"
        yield f"norm_topk_prob: got {config.norm_topk_prob} with num_experts_per_tok {chosen}, expected {expected}"
    if config.n_group > 1 and chosen // config.topk_group != 2:
        yield (
            f"topk_group: got {config.topk_group} with num_experts_per_tok {chosen}, expected half as many (Megatron-"
            "Core scores a group by num_experts_per_tok / topk_group of its experts, the model by two)"
        )


def _deepseek_v3_problems(config: PreTrainedConfig) -> Iterator[str]:
    yield from _sigmoid_problems(config)
    if config.attention_bias:
        yield "attention_bias: got True, expected False (Megatron-Core's latent attention has no biases)"
    if not config.rope_interleave:
        yield "rope_interleave: got False, expected True"
    if config.rms_norm_eps != 1e-6:
        yield (
            f"rms_norm_eps: got {config.rms_norm_eps}, expected 1e-06 (the model's latent vectors are normalised with "
            "that, and Megatron-Core has one for all)"
        )


def _gpt_oss_problems(config: PreTrainedConfig) -> Iterator[str]:
    yield from _one_of_several(config)
    if not config.attention_bias:
        yield "attention_bias: got False, expected True"
    if config.swiglu_alpha != 1.702:
        yield f"swiglu_alpha: got {config.swiglu_alpha}, expected 1.702 (fixed in Megatron-Core)"


def _hybrid_problems(config: PreTrainedConfig) -> Iterator[str]:
    if config.attention_bias:
        yield "attention_bias: got True, expected False"
    if hasattr(config, "num_experts"):
        yield from _one_of_several(config)


_QWEN3_5 = _mixers("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_MIXTRAL = "block_sparse_moe.experts.{{expert}}.{}"
_STANDARD = (*ATTENTION, *QKV_BIAS, *QK_NORM, *DENSE_MLP, *LINEAR_BIASES)

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _STANDARD, _llama, problems=_same_biases),
    "mistral": Family("MistralForCausalLM", _STANDARD, _nothing_more),
    "smollm3": Family("SmolLM3ForCausalLM", _STANDARD, _smollm3, problems=_same_biases, own_modules=True),
    "qwen2": Family("Qwen2ForCausalLM", _STANDARD, _qwen2),
    "qwen2_5_vl_text": Family("Qwen2_5_VLForConditionalGeneration", _STANDARD, _qwen2, own_modules=True),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        (*_STANDARD, *_router(), *SHARED_EXPERT),
        _qwen2_moe,
        has_experts=_qwen_has_experts,
        problems=_qwen_moe_problems,
    ),
    "qwen3": Family("Qwen3ForCausalLM", _STANDARD, _qwen3, problems=_same_biases),
    "qwen3_vl_text": Family(
        "Qwen3VLForConditionalGeneration", _STANDARD, _qwen3, problems=_same_biases, own_modules=True
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        (*_STANDARD, *_router()),
        lambda config: {**_qwen3(config), **_qwen_experts(config)},
        has_experts=_qwen_has_experts,
        problems=_qwen_moe_problems,
    ),
    "qwen3_vl_moe_text": Family(
        "Qwen3VLMoeForConditionalGeneration",
        (*_STANDARD, *_router()),
        lambda config: {**_qwen3(config), **_qwen_experts(config)},
        has_experts=_qwen_has_experts,
        problems=_qwen_moe_problems,
        own_modules=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        (
            INPUT_NORM,
            Entry(("self_attn.qkv_proj.weight",), "self_attention.linear_qkv.weight", "qkv"),
            PROJECTION,
            MLP_NORM,
            Entry(("mlp.gate_up_proj.weight",), "mlp.linear_fc1.weight", "gate_up", when=("dense",)),
            DENSE_MLP[2],
        ),
        _nothing_more,
        partial_rotary=True,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        (*ATTENTION, *_router("block_sparse_moe.gate")),
        _mixtral,
        Experts(_MIXTRAL.format("w1"), _MIXTRAL.format("w3"), _MIXTRAL.format("w2")),
        has_experts=_everywhere,
        problems=_mixtral_problems,
        renamed=(("block_sparse_moe.", "mlp."),),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        (*LATENT, *DENSE_MLP, *_router(), *_shared_expert("mlp.shared_experts")),
        _deepseek_v3,
        buffers=(CORRECTION,),
        has_experts=_after_dense_layers,
        problems=_deepseek_v3_problems,
        own_modules=True,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        (*_STANDARD, *_router(), *_shared_expert("mlp.shared_experts")),
        _glm4_moe,
        buffers=(CORRECTION,),
        has_experts=_after_dense_layers,
        problems=_sigmoid_problems,
        partial_rotary=True,
        own_modules=True,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        (*ATTENTION, *QKV_BIAS, OUTPUT_BIAS, *SINKS, *_router("mlp.router")),
        _gpt_oss,
        Experts(biased=True, alternating=True),
        has_experts=_everywhere,
        problems=_gpt_oss_problems,
        own_modules=True,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        (*_mixers("in_proj_qkvz", "in_proj_ba"), *DENSE_MLP, *_router(), *SHARED_EXPERT),
        _hybrid_experts,
        has_experts=_qwen_has_experts,
        problems=_hybrid_problems,
        partial_rotary=True,
        mixers=True,
        own_modules=True,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        (*_QWEN3_5, *DENSE_MLP),
        _hybrid,
        problems=_hybrid_problems,
        partial_rotary=True,
        mixers=True,
        own_modules=True,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        (*_QWEN3_5, *_router(), *SHARED_EXPERT),
        _hybrid_experts,
        has_experts=_everywhere,
        problems=_hybrid_problems,
        partial_rotary=True,
        mixers=True,
        own_modules=True,
    ),
}
"""By ``model_type``."""

WITH_TOWER = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe", "llava", "mistral3")
"""Values of ``model_type`` of models that have one of these beside a tower for pictures."""

REFUSED = {
    "gemma2": "its caps of attention scores and logits (the soft cap of Megatron-Core's attention is fixed at 0)",
    "gemma3_text": "its norms after attention and MLP, and two sets of rotary positions (Megatron-Core has one)",
}
"""By ``model_type``, of families that people train: what Megatron-Core does not compute."""
