"""Tiny random models that see pictures, each a folder with a tokenizer, a chat template and a picture processor."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
)

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
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ({"mrope_section": [8, 4, 4]}, {"window_size": 56, "fullatt_block_indexes": [1]}),
    "qwen3_vl": (
        {"mrope_section": [8, 4, 4], "mrope_interleaved": True},
        {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_5": (
        {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
        {"num_position_embeddings": 64},
    ),
}
"""Their rotary embedding, and what their tower has of its own."""

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSOR = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and those of ChatML and of pictures."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in (*SPECIALS, IMAGE, VIDEO)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_processor(path: Path, family: str = "qwen3_vl", *, layers: int = 2, **changed: Any) -> Path:
    """A folder without weights, in the files of a published model, one for videos included.

    Args:
        layers: of the language model.
        changed: entries of the picture processor.
    """
    tokenizer = make_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(text) for name, text in zip(_IDS, _ID_TEXTS, strict=True)}
    rope, tower = FAMILIES[family]
    text = TEXT | {
        "vocab_size": len(tokenizer),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | rope,
        "pad_token_id": ids["pad_token_id"],
        "bos_token_id": None,
        "eos_token_id": ids["eos_token_id"],
        "tie_word_embeddings": True,
        "num_hidden_layers": layers,
    }
    if family == "qwen3_5":
        text |= LINEAR
    entries = {name: index for name, index in ids.items() if name.startswith(("image", "video", "vision"))}
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=VISION | tower, tie_word_embeddings=True, **entries
    )
    path.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}
    chosen = {"image_processor_type": "Qwen2VLImageProcessorFast", "size": size, **PROCESSOR, **changed}
    (path / "preprocessor_config.json").write_text(json.dumps(chosen))
    video = {"video_processor_type": "Qwen3VLVideoProcessor", "size": size, **PROCESSOR}
    (path / "video_preprocessor_config.json").write_text(json.dumps(video))
    return path


def make_picture_model(path: Path, family: str = "qwen3_vl", *, seed: int = 0, **changed: Any) -> Path:
    """``make_processor`` with random weights beside it."""
    make_processor(path, family, **changed)
    config = AutoConfig.from_pretrained(path)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    model.generation_config.eos_token_id = config.text_config.eos_token_id
    model.generation_config.pad_token_id = config.text_config.pad_token_id
    model.save_pretrained(path)
    return path


def greedy_words(model: str, words: str, pictures: Sequence[np.ndarray], most: int) -> str:
    """What a model says to pictures and words of a user, by Transformers with its own picture processor."""
    tokenizer, loaded = make_tokenizer(), AutoModelForImageTextToText.from_pretrained(model)
    processor = Qwen2VLImageProcessorPil(**PROCESSOR, size={"shortest_edge": 784, "longest_edge": 784 * 64})
    seen = processor([Image.fromarray(pixels) for pixels in pictures], return_tensors="pt") if len(pictures) else {}
    sizes = (seen["image_grid_thw"].prod(1) // PROCESSOR["merge_size"] ** 2).tolist() if len(pictures) else []
    shown = "".join(f"<|vision_start|>{IMAGE * size}<|vision_end|>" for size in sizes)
    text = f"<|im_start|>user\n{shown}{words}<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    kinds = (ids == tokenizer.convert_tokens_to_ids(IMAGE)).int()
    whole = loaded.generate(input_ids=ids, mm_token_type_ids=kinds, do_sample=False, max_new_tokens=most, **seen)
    return str(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))


_IDS = (
    "pad_token_id",
    "eos_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "image_token_id",
    "video_token_id",
)
_ID_TEXTS = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", IMAGE, VIDEO)
