"""Tiny random models that see pictures, each a folder with a tokenizer, a chat template and a picture processor."""

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
)

from tests.support.sizes import FOUR_EXPERTS

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "initializer_range": 0.1,
}
FIXED: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 56,
}
"""A tower for pictures of one size."""
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS: dict[str, Any] = {**FOUR_EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
WINDOWS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "query_pre_attn_scalar": 32,
}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
PROCESSOR: dict[str, Any] = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}


@dataclass(frozen=True)
class Family:
    """What a family has of its own."""

    text: dict[str, Any]
    vision: dict[str, Any]
    rope: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    """Of ``config.json``."""
    image_processor: str = "Qwen2VLImageProcessor"
    options: dict[str, Any] = field(default_factory=dict)
    """Of the picture processor."""
    processor: dict[str, Any] = field(default_factory=dict)
    """``processor_config.json``."""
    image: str = IMAGE
    """The token in whose places features are put."""
    mark: str = f"<|vision_start|>{IMAGE}<|vision_end|>"
    """What the chat template writes."""
    names: dict[str, str] = field(default_factory=dict)
    """Special tokens that the tokenizer knows by name."""
    others: tuple[str, ...] = ()
    """Further special tokens, which vLLM looks up."""


PATCHES = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}, **PROCESSOR}
QWEN3_VL = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
INTERLEAVED = {"mrope_section": [8, 4, 4], "mrope_interleaved": True}
FAMILIES: dict[str, Family] = {
    "qwen2_5_vl": Family(
        TEXT, VISION | {"window_size": 56, "fullatt_block_indexes": [1]}, {"mrope_section": [8, 4, 4]}, options=PATCHES
    ),
    "qwen3_vl": Family(TEXT, VISION | QWEN3_VL, INTERLEAVED, options=PATCHES),
    "qwen3_5": Family(
        TEXT | LINEAR,
        VISION | {"num_position_embeddings": 64},
        {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
        options=PATCHES,
    ),
    "qwen3_vl_moe": Family(TEXT | EXPERTS, VISION | QWEN3_VL, INTERLEAVED, options=PATCHES),
    "llava": Family(
        TEXT | {"model_type": "llama"},
        FIXED | {"model_type": "clip_vision_model", "projection_dim": 16},
        more={"vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
        image_processor="CLIPImageProcessor",
        options={"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        processor={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        image="<image>",
        mark="<image>",
    ),
    "glm4v": Family(
        TEXT | {"attention_bias": True},  # it has biases whatever this says, which only vLLM reads
        VISION | {"image_size": 56, "attention_bias": False},
        {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5},
        image_processor="Glm4vImageProcessor",
        options={"size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 28 * 28 * 64}, **PROCESSOR},
        image="<|image|>",
        mark="<|vision_start|><|image|><|vision_end|>",
        others=("<|begin_of_video|>", "<|video|>", "<|end_of_video|>"),
    ),
    "gemma3": Family(
        TEXT | WINDOWS,
        FIXED | {"vision_use_head": False},
        more={"mm_tokens_per_image": 4},
        image_processor="Gemma3ImageProcessor",
        options={"size": {"height": 56, "width": 56}, "do_pan_and_scan": None},
        processor={"image_seq_length": 4},
        image="<image_soft_token>",
        mark="<|vision_start|>",
        names={"boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>", "image_token": "<image_soft_token>"},
    ),
    "mistral3": Family(
        TEXT | {"model_type": "mistral", "sliding_window": None},
        FIXED
        | {"model_type": "pixtral", "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        more={"spatial_merge_size": 2, "vision_feature_layer": -1},
        image_processor="PixtralImageProcessor",
        options={"size": {"longest_edge": 224}, "patch_size": {"height": 14, "width": 14}},
        processor={
            "patch_size": 14,
            "spatial_merge_size": 2,
            "image_token": "[IMG]",
            "image_break_token": "<|vision_start|>",
            "image_end_token": "<|vision_end|>",
        },
        image="[IMG]",
        mark="[IMG]",
    ),
}


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def make_tokenizer(family: str = "qwen3_vl") -> PreTrainedTokenizerFast:
    """A token for each byte, and those of ChatML and of pictures."""
    known = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in (*SPECIALS, known.image, VIDEO, *known.others)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|endoftext|>", eos_token="<|im_end|>", extra_special_tokens=known.names
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
        f"{{% else %}}{{% for c in m['content'] %}}{{% if c['type'] == 'image' %}}{known.mark}"
        f"{{% elif c['type'] == 'video' %}}<|vision_start|>{VIDEO}<|vision_end|>"
        "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def make_processor(
    path: Path, family: str = "qwen3_vl", *, layers: int = 2, tower: Mapping[str, Any] | None = None, **changed: Any
) -> Path:
    """A folder without weights, in the files of a published model, one for videos included where it takes them.

    Args:
        layers: of the language model.
        tower: entries of its configuration.
        changed: entries of the picture processor.
    """
    known, tokenizer = FAMILIES[family], make_tokenizer(family)
    places = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", known.image, VIDEO)
    names = ("pad", "eos", "vision_start", "vision_end", "image", "video")
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(text) for name, text in zip(names, places, strict=True)}
    rope = {"rope_type": "default", "rope_theta": 10000.0} | known.rope
    if family == "gemma3":
        rope = dict.fromkeys(known.text["layer_types"], rope)
    text = known.text | {
        "vocab_size": len(tokenizer),
        "rope_parameters": rope,
        "pad_token_id": ids["pad_token_id"],
        "bos_token_id": None,
        "eos_token_id": ids["eos_token_id"],
        "tie_word_embeddings": True,
        "num_hidden_layers": layers,
    }
    entries = {name: index for name, index in ids.items() if name.startswith(("image", "video", "vision"))}
    config = AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=known.vision | dict(tower or {}),
        tie_word_embeddings=True,
        **entries,
        **known.more,
    )
    path.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    chosen = {"image_processor_type": f"{known.image_processor}Fast", **known.options, **changed}
    (path / "preprocessor_config.json").write_text(json.dumps(chosen))
    if known.processor:
        (path / "processor_config.json").write_text(json.dumps(known.processor))
    if known.options.get("merge_size"):
        video = {"video_processor_type": "Qwen3VLVideoProcessor", "size": PATCHES["size"], **PROCESSOR}
        (path / "video_preprocessor_config.json").write_text(json.dumps(video))
    return path


def make_picture_model(path: Path, family: str = "qwen3_vl", *, seed: int = 0, **changed: Any) -> Path:
    """``make_processor`` with random weights beside it."""
    make_processor(path, family, **changed)
    config = AutoConfig.from_pretrained(path)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():  # Gemma's projector, behind which no picture could be seen
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id = config.get_text_config().eos_token_id
    model.generation_config.pad_token_id = config.get_text_config().pad_token_id
    model.save_pretrained(path)
    if family in ("llava", "gemma3"):  # as they were published, before Transformers had left out a module
        file = path / "model.safetensors"
        old = {re.sub(r"^vision_tower\.", "vision_tower.vision_model.", name): x for name, x in load_file(file).items()}
        save_file(old, file, metadata={"format": "pt"})
    if family == "qwen3_vl_moe":  # likewise, with inputs of experts before their outputs
        file = path / "model.safetensors"
        turned = {name: x.mT.contiguous() if ".experts." in name else x for name, x in load_file(file).items()}
        save_file(turned, file, metadata={"format": "pt"})
    return path


def greedy_words(model: str, words: str, pictures: Sequence[np.ndarray], most: int) -> str:
    """What a model says to pictures and words of a user, by Transformers with its own picture processor."""
    tokenizer, loaded = make_tokenizer(), cast(Any, AutoModelForImageTextToText.from_pretrained(model))
    processor = Qwen2VLImageProcessorPil(**PROCESSOR, size={"shortest_edge": 784, "longest_edge": 784 * 64})
    seen = processor([Image.fromarray(pixels) for pixels in pictures], return_tensors="pt") if len(pictures) else {}
    sizes = (seen["image_grid_thw"].prod(1) // PROCESSOR["merge_size"] ** 2).tolist() if len(pictures) else []
    shown = "".join(f"<|vision_start|>{IMAGE * size}<|vision_end|>" for size in sizes)
    text = f"<|im_start|>user\n{shown}{words}<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    kinds = ids.eq(tokenizer.encode(IMAGE, add_special_tokens=False)[0]).int()
    whole = loaded.generate(input_ids=ids, mm_token_type_ids=kinds, do_sample=False, max_new_tokens=most, **seen)
    return str(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
