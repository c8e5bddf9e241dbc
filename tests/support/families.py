"""Every causal language model that Transformers knows, tiny and random, made of its configuration class alone."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from roll.data.packing import PackedSequences
from roll.models import pictures, planned_attention
from roll.models.measured import kinds, watched
from roll.models.scoring import TokenScorer, layout, score_input
from tests.support.batches import batch_of

FAMILIES = tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *pictures.FAMILIES} - {"blt"}))
LAYERS = 6
"""Enough for the patterns of layers that families repeat."""

SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|vocab_size_per_layer_input", 96),
    (r"num_hidden_layers|num_layers|n_layers?|(en|de)coder_layers|depth|num_encoder_layers|num_decoder_layers", LAYERS),
    (
        r"hidden_size|n_embd|d_model|embed_dim|emb_dim|n_embed|embedding_size|word_embed_proj_dim|attention_hidden_size",
        64,
    ),
    (r"num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|num_local_heads", 4),
    (r"num_key_value_heads|num_kv_heads|n_kv_heads?|num_global_key_value_heads|swa_num_key_value_heads", 2),
    (r"(global_|swa_)?(v_)?head_dim|kv_channels|d_kv|attention_head_size|head_size", 16),
    (
        r"(.*_)?intermediate_size(_mlp|_per_layer)?|n_inner|ffn_dim|d_ff|ff_dim|(en|de)coder_ffn_dim|dff|ffn_hidden_size|d_inner",
        48,
    ),
    (r"(num|n)(_local|_routed|_dense)?_experts|moe_num_experts|n_routed_experts|num_experts_pool", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts|num_selected_experts|experts_top_k", 2),
    (r"n_group|topk_group|num_expert_group|n_groups|mamba_n_groups|mamba_ngroups", 1),
    (r"n_shared_experts|num_shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers|first_dense_layers", 1),
    (r"(.*_)?q_lora_rank|kv_lora_rank|o_lora_rank|(.*)_lora_rank", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim|linear_(key|value)_head_dim|index_head_dim|indexer_head_dim", 8),
    (r"linear_num_(key|value)_heads|index_n_heads|index_num_heads", 4),
    (
        r"(.*_)?sliding_window(_size)?|window_size|local_window_size|attention_window|attention_window_size|sliding_window_mlp",
        8,
    ),
    (r"attention_chunk_size|chunk_size|mamba_chunk_size|block_size|index_block_size|chunk_size_feed_forward", 8),
    (r"index_topk|keep_window_size|floor_scale|index_topk_blocks", 6),
    (r"mamba_n_heads|mamba_num_heads|num_mamba_heads", 8),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", 16),
    (r"mamba_d_state|state_size|ssm_state_size|mamba_state_size", 8),
    (r"mamba_dt_rank|time_step_rank", 4),
    (r"max_position_embeddings|n_positions|max_sequence_length|max_seq_len|n_ctx|seq_length|max_target_positions", 256),
    (r"original_max_position_embeddings", 16),
    (r"lru_width", 64),
)
"""Sizes by the names that families have for them: windows, chunks and top-k shorter than the rows that are tried."""

DROPPED = re.compile(r"transformers_version|_name_or_path|architectures|model_type|torch_dtype|dtype|attribute_map")


def small(config: PreTrainedConfig) -> dict[str, Any]:
    """Arguments that make a tiny one of a family's default configuration."""
    values: dict[str, Any] = {}
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in config.to_dict().items():
        real = getattr(config, name, value) if isinstance(value, dict) else value
        if isinstance(real, PreTrainedConfig):
            values[name] = small(real)
        elif DROPPED.fullmatch(name):
            continue
        elif re.fullmatch(r".*_token_(id|ids|index)", name):
            values[name] = 0 if isinstance(value, int) and value >= 96 else 1 if isinstance(value, list) else value
        elif isinstance(value, list) and layers and len(value) == layers:
            continue
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            values[name] = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), value)
        elif isinstance(value, (bool, float, str)):
            values[name] = value
    return values | OWN.get(config.model_type, {})


MLA = {"head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
ZAMBA = {
    "layers_block_type": (["linear_attention", "hybrid"] * LAYERS)[:LAYERS],
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
    "use_mamba_kernels": False,
}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "youtu", "glm4_moe_lite"), MLA),
    **dict.fromkeys(("kimi_linear", "minicpm3"), MLA),
    "axk2": MLA | {"qk_head_dim": 16},
    "deepseek_v2": MLA | {"num_experts_per_tok": 2},
    "longcat_flash": MLA | {"qk_head_dim": 16, "expert_ffn_hidden_size": 48, "zero_expert_num": 2, "num_layers": 3},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "hidden_size": 64, "expand": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "reformer": {"is_decoder": True},
    "xlnet": {"d_head": 16},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "cohere_compass_text": {
        "rope_parameters": {kind: {**PLAIN_ROPE} for kind in ("full_attention", "sliding_attention")}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * LAYERS,
        "activation_sparsity_pattern": [0.5] * LAYERS,
        "layer_types": (["sliding_attention", "full_attention"] * LAYERS)[:LAYERS],
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8, "per_layer_config": {f"{LAYERS - 1:02}": {"head_dim": 32}}},
    "lfm2": {"layer_types": (["conv", "conv", "full_attention"] * LAYERS)[:LAYERS]},
    "lfm2_moe": {"layer_types": (["conv", "conv", "full_attention"] * LAYERS)[:LAYERS], "num_experts_per_tok": 2},
    "qwen4_exp_text": {
        "layer_types": (["linear_attention", "indexed_attention"] * LAYERS)[:LAYERS],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "num_heads": 4, "num_blocks": LAYERS},
    "zamba": ZAMBA | {"n_mamba_heads": 2},
    "zamba2": ZAMBA | {"hybrid_layer_ids": [1, 3, 5], "n_mamba_heads": 8, "mamba_headdim": 16},
    "glm4v_text": {"rope_parameters": PLAIN_ROPE | {"mrope_section": [2, 3, 3]}},
    "qwen2_5_vl_text": {"rope_parameters": PLAIN_ROPE | {"mrope_section": [2, 3, 3]}},
    "xmod": {"default_language": "en_XX"},
}


def tiny_config(family: str, **changed: Any) -> PreTrainedConfig:
    """A family's configuration; what is ``changed`` is its text part's, where it has one."""
    kind = CONFIG_MAPPING[family]
    values = small(kind())
    if isinstance(values.get("text_config"), dict):
        values["text_config"] |= changed
        return kind(**values)
    return kind(**values | changed)


FACTOR = re.compile(r".*(logit|head).*(scal|cap|multiplier).*|.*soft_?cap.*")
"""Entries that change logits, by any of their names."""


def with_factors(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same with all factors and caps of its logits set to something that shows."""
    for each in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in each.to_dict().items():
            if FACTOR.fullmatch(name) and (value is None or isinstance(value, (int, float))) and value is not False:
                setattr(each, name, 1.7)
    return config


def tiny_model(config: PreTrainedConfig, seed: int = 0, *, scores: bool = False, **options: Any) -> PreTrainedModel:
    """A model in float32 whose layers all matter, with an output layer or a classifier's."""
    torch.manual_seed(seed)
    text = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    kind = kind if text else AutoModelForImageTextToText
    model: PreTrainedModel = kind.from_config(config, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return model


LENGTHS = (20, 33, 13)
KINDS_OF_LAYERS = (["full_attention"], ["sliding_attention"], ["sliding_attention", "full_attention"])
ALTERNATIVES: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute", "rope", "learned", "alibi", "nope", "relative_key", "relative_key_query"),
    "use_bidirectional_attention": (False, True),
}
SHORT = {"original_max_position_embeddings": 16}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0} | SHORT,
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | SHORT,
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "factor": 16.0, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8} | SHORT,
)


def variants(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Changes of one entry each that say how tokens of a row see each other, and of those that go with it."""
    values = config.get_text_config().to_dict()
    for name in watched(config):
        value = values.get(name)
        if isinstance(value, bool):
            windows = {"sliding_window": 8, "max_window_layers": 1} if "sliding" in name else {}
            yield {name: not value, **(windows if not value else {})}
        elif name == "layer_types":
            windows = {"sliding_window": 8} | ({"use_sliding_window": True} if "use_sliding_window" in values else {})
            hybrid = [["linear_attention", "full_attention"]] if "linear_attention" in (value or ()) else []
            for kinds in (*KINDS_OF_LAYERS, *hybrid):
                yield {name: (kinds * LAYERS)[:LAYERS], **(windows if "sliding_attention" in kinds else {})}
        elif name == "sliding_window":
            yield {name: 8 if value is None else None}
        elif name == "rope_parameters":
            for rope in ROPES:
                short = {"max_position_embeddings": 16} if rope["rope_type"] == "dynamic" else {}
                for parts in _with_rope(value or {}, {"rope_theta": 1e4} | rope, values.get("layer_types") or ()):
                    yield {name: parts, **short}
        for other in ALTERNATIVES.get(name, ()):
            if other != value:
                yield {name: other}


def _with_rope(value: dict[str, Any], rope: dict[str, Any], layers: Sequence[str]) -> list[dict[str, Any]]:
    """Rotary positions of one more kind, of all layers or of one kind of layers that there are at a time."""
    if not any(isinstance(each, dict) for each in value.values()):
        return [rope]
    return [value | {name: rope} for name, each in value.items() if isinstance(each, dict) and name in layers]


def packing_differences(config: PreTrainedConfig) -> dict[str, float]:
    """How far log-probs of packed sequences are from those of the model's own forward pass on one sequence alone.

    Returns:
        Largest differences by how the row is computed: with a plan of attention, by positions, and with shared
        prompts; as far as the model can do it.
    """
    found, generator = {}, torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 90, (length,), generator=generator) for length in LENGTHS]
    shared = [torch.cat([rows[1][:10], row]) for row in rows]
    for kernel in ("sdpa", "eager"):
        try:
            model = tiny_model(config, attn_implementation=kernel)
        except ValueError:
            continue
        with torch.no_grad():
            alone, alone_shared = ([_alone(model, row) for row in each] for each in (rows, shared))
            scorer = TokenScorer(model)
            plans = planned_attention.enable(model)
            if kernel == "sdpa" or not plans:  # FlashAttention goes by positions with all models that have sdpa
                found[kernel] = _packed_difference(scorer, rows, alone, planned=False)
            if plans:
                found[f"{kernel}, plan"] = _packed_difference(scorer, rows, alone, planned=True)
            if planned_attention.enable_sharing(model):
                found["shared"] = _shared_difference(scorer, shared, alone_shared)
    return found


def _alone(model: PreTrainedModel, row: Tensor) -> Tensor:
    logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]


def _packed_difference(scorer: TokenScorer, rows: list[Tensor], alone: list[Tensor], *, planned: bool) -> float:
    """Also with the first sequence replaced by the second: what comes after must not move."""
    worst, scorer._takes_plans = 0.0, planned
    for order in ((0, 1, 2), (1, 1, 2), (2, 0, 1)):
        packed = [rows[index] for index in order]
        lengths = tuple(map(len, packed))
        positions = torch.cat([torch.arange(length) for length in lengths])
        targets = positions.nonzero()[:, 0]
        ids = torch.cat(packed)
        scores = scorer(ids[None], positions[None], targets - 1, ids[targets], attention=PackedSequences(lengths))
        difference = (scores["logprobs_T"] - torch.cat([alone[index] for index in order])).abs().max()
        worst = max(worst, float(difference.nan_to_num(1e9)))
    return worst


def _shared_difference(scorer: TokenScorer, rows: list[Tensor], alone: list[Tensor]) -> float:
    batch = batch_of(rows, prompts=11)
    inputs = layout(batch, sharing=True)
    assert inputs.input_ids_RC.numel() < batch.num_tokens
    logprobs_T = score_input(scorer, inputs, batch.num_tokens).logprobs_T
    assert logprobs_T is not None
    return float((logprobs_T[batch.loss_mask_T] - torch.cat([row[10:] for row in alone])).abs().max())


def worst_of(found: dict[str, float]) -> float:
    """By positions only where there is no plan."""
    return max(value for name, value in found.items() if f"{name}, plan" not in found)


BOUND = 1e-4
"""Of a right log-probability, float32; what is right is hardly ever above 5e-6."""


def measured(family: str) -> tuple[dict[str, Any] | None, str]:
    """What the file says of a family: its entry, or why it has none."""
    config = attempt(lambda: tiny_config(family))
    found = None if isinstance(config, str) else attempt(lambda: packing_differences(config))
    if not found or isinstance(found, str):
        return None, "has not been measured"
    worst, positions = worst_of(found), found.get("sdpa", 0.0)
    if worst > BOUND:
        return None, f"lets the sequences of a row see each other (log-probabilities are off by {worst:.2g})"
    values = config.get_text_config().to_dict()
    right = {name: set(kinds(values.get(name))) for name in watched(config)}
    for change in variants(config):
        found = attempt(lambda given: packing_differences(tiny_config(family, **given)), change)
        if found and not isinstance(found, str) and worst_of(found) <= BOUND:
            positions = max(positions, found.get("sdpa", 0.0))
            for name in change.keys() & right.keys():
                right[name] |= set(kinds(change[name]))
            worst = max(worst, worst_of(found))
    allowed = {name: sorted(each, key=str) for name, each in right.items()}
    entry = {"difference": float(f"{worst:.1e}"), "values": allowed}
    return entry | ({"positions": False} if positions > BOUND else {}), ""


def attempt(make: Callable[..., Any], *given: Any) -> Any:
    """What it makes, or why it cannot, in words."""
    try:
        return make(*given)
    except Exception as error:  # of whatever kind a model's code raises for sizes or options that it does not take
        return f"{type(error).__name__}: {error}"
