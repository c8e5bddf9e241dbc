"""Sizes of a decoder-only model, and what follows from them: parameters, bytes of a number, operations of a pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.configs.worker import WorkerConfig

KNOWN = ("deepseek_v3", "glm4_moe", "llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
"""Values of ``model_type`` whose parameters are counted exactly; others as a Llama of the same sizes."""
_QK_NORM = ("qwen3", "qwen3_moe")
_QKV_BIAS = ("qwen2", "qwen2_moe")
STATE_KINDS = ("linear_attention", "conv", "mamba", "hybrid")
KEY_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid")
"""Kinds of layers that keep states, and that keep keys and values."""
FORWARD, BACKWARD = 2, 4
"""Operations per parameter and token: a product and a sum forward, twice as many backward."""
FORMAT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class States:
    """Of one sequence, whatever its length, in the layers that carry a state along (gated delta nets, Mamba,
    convolutions).
    """

    layers: int = 0
    convolution: int = 0
    """Numbers of one layer's last inputs, in the format of computation."""
    recurrent: int = 0
    """Numbers of one layer's state, in float32."""

    def num_bytes(self, number_bytes: int) -> int:
        return self.layers * (number_bytes * self.convolution + 4 * self.recurrent)

    @staticmethod
    def of(config: Mapping[str, Any], kinds: Sequence[str], layers: int) -> States:
        """Those of a ``config.json``.

        Args:
            kinds: of the layers, if it names them.
        """

        def get(*names: str) -> int:
            return next((config[name] for name in names if isinstance(config.get(name), int)), 0)

        if heads := get("linear_num_value_heads"):  # gated delta net
            key, value = get("linear_key_head_dim"), get("linear_value_head_dim")
            channels = 2 * key * get("linear_num_key_heads") + value * heads
            sizes = channels * get("linear_conv_kernel_dim"), heads * key * value
        elif heads := get("mamba_n_heads", "mamba_num_heads"):
            inner, width = heads * get("mamba_d_head", "mamba_head_dim"), get("mamba_d_state", "ssm_state_size")
            channels = inner + 2 * width * get("mamba_n_groups", "n_groups")
            sizes = channels * get("mamba_d_conv", "conv_kernel"), inner * width
        elif kernel := get("conv_L_cache"):  # short convolution
            sizes = kernel * config["hidden_size"], 0
        else:
            return States()
        return States(sum(kind in STATE_KINDS for kind in kinds) if kinds else layers, *sizes)


@dataclass(frozen=True)
class ModelShape:
    """A decoder of attention and gated feed-forward layers."""

    kind: str
    """``model_type`` of its ``config.json``."""
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    """Width of a dense feed-forward layer."""
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    experts: int = 0
    """Of a mixture layer; 0 in a dense model."""
    experts_per_token: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    """Width of the expert that takes every token."""
    mixture_layers: int = 0
    stored_bytes: int = 4
    """Bytes of a number in the checkpoint."""
    value_size: int = 0
    """Of a head's values, where it is not ``head_size``."""
    latent: int = 0
    """Numbers that stand for all keys and values of a token (multi-head latent attention); 0: it has none."""
    latent_rank: int = 0
    """Of these, the numbers that keys and values are computed from; the others are the keys' rotary part."""
    query_rank: int = 0
    """Width between the two matrices of the queries; 0: there is one."""
    attention_layers: int = 0
    """Layers that keep keys and values."""
    states: States = States()
    """What layers that read a state keep of a sequence."""
    tower: TowerShape | None = None
    """Its vision tower, in a run with pictures."""

    @staticmethod
    def of(config: Mapping[str, Any]) -> ModelShape:
        """The shape in a ``config.json`` (its text part).

        Raises:
            ValueError: it names no sizes of a decoder.
        """
        kinds = config.get("layer_types") or config.get("layers_block_type") or ()
        config = {"num_hidden_layers": len(kinds) or None} | {**config}
        needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        if absent := [key for key in needed if not isinstance(config.get(key), int)]:
            raise ValueError(f"config.json: no {', '.join(absent)}, expected the sizes of a decoder-only model")
        kind, heads, layers = str(config.get("model_type", "")), config["num_attention_heads"], config[needed[2]]
        experts = next(filter(None, map(config.get, ("num_experts", "num_local_experts", "n_routed_experts"))), 0)
        dense = len(config.get("mlp_only_layers") or ()) + (config.get("first_k_dense_replace") or 0)
        rank, rotary = config.get("kv_lora_rank") or 0, config.get("qk_rope_head_dim") or 0
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        expert_inner = config.get("moe_intermediate_size") or config["intermediate_size"]
        step = config.get("decoder_sparse_step") or 1
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        return ModelShape(
            kind=kind,
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=layers,
            heads=heads,
            kv_heads=heads if rank else config.get("num_key_value_heads") or heads,
            head_size=config["qk_nope_head_dim"] + rotary if rank else head_size,
            inner=config["intermediate_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("qkv_bias", kind in _QKV_BIAS)) or bool(config.get("attention_bias")),
            o_bias=bool(config.get("attention_bias")) and kind not in ("qwen2", "glm4_moe"),
            qk_norm=kind in _QK_NORM or bool(config.get("use_qk_norm", False)),
            experts=experts,
            experts_per_token=config.get("num_experts_per_tok") or 0,
            expert_inner=expert_inner,
            shared_inner=_shared_inner(kind, config, expert_inner),
            mixture_layers=max(0, layers // step - dense) if experts else 0,
            stored_bytes=FORMAT_BYTES.get(dtype, 4),
            value_size=config.get("v_head_dim") or 0 if rank else 0,
            latent=rank + rotary if rank else 0,
            latent_rank=rank,
            query_rank=config.get("q_lora_rank") or 0 if rank else 0,
            attention_layers=sum(name in KEY_KINDS for name in kinds) if kinds else layers,
            states=States.of(config, kinds, layers),
        )

    @property
    def exact(self) -> bool:
        """Tells whether the parameters of this architecture are counted exactly."""
        return self.kind in KNOWN

    @property
    def query(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_size

    @property
    def attended(self) -> int:
        """Width of what attention gives for a token: all heads' values."""
        return self.heads * (self.value_size or self.head_size)

    @property
    def key(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.kv_heads * self.head_size

    @property
    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear maps of a dense layer."""
        h, q, k, i = self.hidden, self.query, self.key, self.inner
        attention = {"q_proj": (h, q), "k_proj": (h, k), "v_proj": (h, k), "o_proj": (q, h)}
        return attention | {"gate_proj": (h, i), "up_proj": (h, i), "down_proj": (i, h)}

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, the largest matrix."""
        return self.vocabulary * self.hidden

    @property
    def attention(self) -> int:
        """Parameters of a layer's attention and of its norms."""
        h, q, k, rank = self.hidden, self.query, self.key, self.query_rank
        if self.latent:
            queries = h * rank + rank + rank * q if rank else h * q
            rotary = self.latent - self.latent_rank
            keys = h * self.latent + self.latent_rank * (1 + q - self.heads * rotary + self.attended)
            return queries + keys + self.attended * h + 2 * h
        biases = (q + 2 * k) * self.qkv_bias + h * self.o_bias
        return 2 * h * q + 2 * h * k + biases + 2 * self.head_size * self.qk_norm + 2 * h

    @property
    def mixture(self) -> int:
        """Parameters of a mixture layer's feed-forward part."""
        gate = self.hidden if self.shared_inner and self.kind == "qwen2_moe" else 0
        shared = 3 * self.hidden * self.shared_inner + gate
        return self.hidden * self.experts + 3 * self.hidden * self.expert_inner * self.experts + shared

    @property
    def layer(self) -> int:
        """Parameters of the largest layer."""
        dense = 3 * self.hidden * self.inner
        return self.attention + (self.mixture if self.mixture_layers else dense)

    @property
    def trunk(self) -> int:
        """Parameters without an output layer of its own: what a critic has below its head."""
        dense = (self.layers - self.mixture_layers) * 3 * self.hidden * self.inner
        layers = self.layers * self.attention + dense + self.mixture_layers * self.mixture
        return self.embedding + layers + self.hidden

    @property
    def parameters(self) -> int:
        """All of a language model's."""
        return self.trunk + (0 if self.tied else self.embedding)

    @property
    def active(self) -> int:
        """Parameters that a token is multiplied with: without the embedding, which is looked up, and idle experts."""
        idle = max(0, self.experts - self.experts_per_token) * 3 * self.hidden * self.expert_inner
        return self.trunk - self.embedding - self.mixture_layers * idle

    @property
    def width(self) -> float:
        """Of a layer's largest matrices: the geometric mean of their two sides."""
        return math.sqrt(self.hidden * (self.expert_inner if self.mixture_layers else self.inner))

    @property
    def token_inner(self) -> int:
        """Width of all that a token passes through in a feed-forward part."""
        if not self.mixture_layers:
            return self.inner
        return self.experts_per_token * self.expert_inner + self.shared_inner

    def adapted(self, targets: Sequence[str]) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's linear maps that get an adapter; ``all-linear`` are all of them."""
        return [size for name, size in self.linear_sizes.items() if name in targets or "all-linear" in targets]

    def adapter(self, rank: int, targets: Sequence[str]) -> int:
        """Parameters of a LoRA adapter on these linear maps."""
        return self.layers * sum(rank * (inputs + outputs) for inputs, outputs in self.adapted(targets))

    def kv_bytes(self, number_bytes: int) -> int:
        """Keys and values of one token in all layers, or the latent numbers that stand for them, in bytes."""
        one = self.latent or self.key + self.kv_heads * (self.value_size or self.head_size)
        return self.attention_layers * one * number_bytes

    def touched(self, tokens: int) -> float:
        """Parameters that so many tokens are multiplied with, each with experts of its own choice, taken as random."""
        if not self.mixture_layers:
            return self.active
        expert = 3 * self.hidden * self.expert_inner
        share = 1 - (1 - self.experts_per_token / self.experts) ** tokens
        return self.active + self.mixture_layers * expert * (share * self.experts - self.experts_per_token)


def _shared_inner(kind: str, config: Mapping[str, Any], expert_inner: int) -> int:
    if shared := config.get("n_shared_experts"):
        return int(shared) * expert_inner
    return config.get("shared_expert_intermediate_size") or 0 if kind == "qwen2_moe" else 0


def compute_bytes(worker: WorkerConfig, shape: ModelShape) -> int:
    """Bytes of a number that a role's model computes with."""
    own = worker.strategy_args.typed().own_dtype
    name = own[1] if own else worker.model_args.dtype
    return FORMAT_BYTES[name] if name else shape.stored_bytes


def forward_flops(shape: ModelShape, tokens: int, length: int, loss_tokens: int) -> float:
    """Operations of a forward pass over samples of one length."""
    return samples_flops(shape, tokens, tokens * length, loss_tokens)


def samples_flops(shape: ModelShape, tokens: float, squares: float, loss_tokens: float) -> float:
    """Operations of a forward pass: matrices, causal attention (half of all pairs), and the output layer.

    Args:
        tokens: of all samples.
        squares: sum of the squares of their lengths.
        loss_tokens: for which the output layer is computed.
    """
    return FORWARD * (tokens * shape.active + loss_tokens * shape.embedding) + attention_flops(shape, squares)


def attention_flops(shape: ModelShape, squares: float) -> float:
    """Those of causal attention alone."""
    return FORWARD * shape.attention_layers * (shape.query + shape.attended) * squares / 2


def training_factor(adapter: bool) -> int:
    """Operations of forward and backward pass as a multiple of the forward pass's, without recomputation."""
    times = FORWARD + BACKWARD
    if adapter:  # no gradients of the frozen matrices
        times -= FORWARD
    return times // FORWARD


@dataclass(frozen=True)
class TowerShape:
    """A vision tower of one of the families that take pictures, projector included."""

    parameters: int
    embedding: int
    """Parameters that see a patch as it comes."""
    block: int
    """Parameters of one of ``depth`` layers."""
    projectors: int
    """Parameters that see the patches of a token together."""
    hidden: int
    depth: int
    kept: int
    """Numbers that autograd keeps of a patch and a layer."""
    patch: int
    """Pixels of a patch's side."""
    merged: int
    """Patches of a token's side."""
    times: int = 1
    """Copies of a picture that a patch is made of."""
    counted: int = 1
    """Times that the processor's bounds count a picture's pixels."""
    side: int | None = None
    """Pixels of the side that every picture has, or that the longer one has at most; ``None``: of any."""

    @staticmethod
    def of(config: Mapping[str, Any]) -> TowerShape | None:
        """That in a ``config.json`` with its defaults; ``None``: there is none of a known family."""
        kind, eyes = str(config.get("model_type")), config.get("vision_config") or {}
        if kind in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v"):
            return _tower_of_patches(kind, eyes)
        if kind in ("llava", "gemma3", "mistral3"):
            return _tower_of_pictures(kind, config, eyes)
        return None

    def bound(self, size: Mapping[str, Any]) -> int | None:
        """The most pixels of a picture that a processor with these entries makes; ``None``: they do not say."""
        if self.side is not None:
            return min(self.side, size.get("longest_edge") or self.side) ** 2
        most = size.get("longest_edge") or size.get("max_pixels")
        return None if most is None else int(most) // self.counted

    def tokens(self, pixels: int) -> int:
        """Tokens of a picture that get its features."""
        return pixels // (self.patch * self.merged) ** 2

    def input_bytes(self, pixels: int) -> int:
        """Of what the tower is given, in float32."""
        return 4 * 3 * self.times * pixels

    def operations(self, pixels: int) -> int:
        """Of a forward pass in which every patch attends to every other; windows take fewer."""
        patches = pixels // self.patch**2
        passed = patches * (self.embedding + self.depth * self.block) + self.tokens(pixels) * self.projectors
        return FORWARD * (passed + 2 * self.depth * patches**2 * self.hidden)

    def kept_bytes(self, pixels: int, number_bytes: int, *, recomputes: bool) -> int:
        """What waits for the backward pass: the input, and of every layer all, or its input where it is computed again;
        then one layer is there as a whole."""
        patches, layers = pixels // self.patch**2, 1 if recomputes else self.depth
        inputs = self.depth * self.hidden if recomputes else 0
        return self.input_bytes(pixels) + patches * number_bytes * (layers * self.kept + inputs)

    def forward_bytes(self, pixels: int, number_bytes: int) -> int:
        """What exists at once where nothing is kept for a backward pass."""
        return self.input_bytes(pixels) + pixels // self.patch**2 * number_bytes * self.kept


def _tower_of_patches(kind: str, eyes: Mapping[str, Any]) -> TowerShape:
    """Those that get rows of patches: Qwen's and GLM's."""
    h, inner, depth, out = (eyes[key] for key in ("hidden_size", "intermediate_size", "depth", "out_hidden_size"))
    patch, merged, times = (eyes[key] for key in ("patch_size", "spatial_merge_size", "temporal_patch_size"))
    seen, wide = 3 * times * patch**2 * h, h * merged**2
    attention, projector = 4 * h * h + 4 * h, wide * wide + wide + wide * out + out
    beside = 0
    if kind == "qwen2_5_vl":
        embedding, block = seen, attention + 3 * h * inner + 2 * inner + h + 2 * h
        projectors, kept = projector + h, 13 * h + 4 * inner
    elif kind == "glm4v":
        embedding = seen + h
        block = 4 * h * h + 3 * h * bool(eyes.get("attention_bias")) + 3 * h * out + 2 * h
        projectors = wide * out + out + out * out + 2 * out + 3 * out * inner
        beside, kept = (eyes["image_size"] // patch) ** 2 * h + 2 * h, 13 * h + 4 * out
    else:
        embedding, beside = seen + h, eyes["num_position_embeddings"] * h
        block = attention + 2 * h * inner + inner + h + 4 * h
        deep = len(eyes.get("deepstack_visual_indexes") or ()) if kind.startswith("qwen3_vl") else 0
        projectors, kept = projector + 2 * h + deep * (projector + 2 * wide), 11 * h + 2 * inner
    total = embedding + beside + depth * block + projectors
    counted = times if kind == "glm4v" else 1
    return TowerShape(total, embedding, block, projectors, h, depth, kept, patch, merged, times, counted)


def _tower_of_pictures(kind: str, config: Mapping[str, Any], eyes: Mapping[str, Any]) -> TowerShape:
    """Those that get pictures as they are: CLIP's, SigLIP's and Pixtral's."""
    h, inner, depth = (eyes[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    patch, side, width = eyes["patch_size"], eyes["image_size"], config["text_config"]["hidden_size"]
    seen, patches, merged = 3 * patch**2 * h, (side // patch) ** 2, 1
    chosen = config.get("vision_feature_layer")
    read, bias = len(chosen) if isinstance(chosen, list) else 1, bool(config.get("multimodal_projector_bias"))
    block = 4 * h * h + 4 * h + 2 * h * inner + inner + h + 4 * h
    linear = read * h * width + width * width + 2 * width * bias
    if kind == "llava":
        embedding, beside = seen, (patches + 2) * h + 4 * h
        projectors, kept = linear, 8 * h + 3 * inner
    elif kind == "gemma3":
        embedding, beside = seen + h, patches * h + 2 * h
        projectors, kept, merged = (
            h * width + h,
            8 * h + 2 * inner,
            math.isqrt(patches // config["mm_tokens_per_image"]),
        )
    else:
        merged = config["spatial_merge_size"]
        embedding, beside, block = seen, h, 4 * h * h + 3 * h * inner + 2 * h
        projectors, kept = linear + h + h * h * merged**2, 10 * h + 4 * inner
    total = embedding + beside + depth * block + projectors
    return TowerShape(total, embedding, block, projectors, h, depth, kept, patch, merged, side=side)
