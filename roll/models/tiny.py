"""The embedded models: a small tokenizer and a tiny Qwen2, or Qwen2.5-VL, in Hugging Face format, made on the spot.

The tokenizer is byte-level, so any text round-trips, with single tokens for what grid games say often: a grid row, a
coordinate, an action, an answer tag. One token per row and coordinate keeps a Sokoban turn at about 23 prompt and 4
answer tokens, which a two-layer model can learn on a CPU. The model with pictures sees 8×8 pixels as a patch and four
patches as a token: a 6×6 board with a patch for each cell is nine tokens.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast


RECIPE_VERSION = 2
"""Part of the cache key: raise it when the tokenizer or the architecture changes."""

MAX_POSITIONS = 2048
"""Of the longest sample."""

PAD, END, TURN_START, TURN_END = "<|endoftext|>", "<|end|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


PATCH, MERGED = 8, 2
"""Pixels of a patch's side, and patches of a token's side."""
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
PICTURE_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}",
)


def domain_tokens() -> list[str]:
    """Pieces of text that get a token of their own, in a fixed order."""
    words = [
        "system\n",
        "user\n",
        "assistant\n",
        "Sokoban",
        "FrozenLake",
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
    ]
    words += ["Up", "Down", "Left", "Right"]
    coordinates = [f"({row},{column})" for row in range(10) for column in range(10)]
    rows = [f"#{''.join(cells)}#\n" for cells in itertools.product("#_OXPS√", repeat=4) if _is_row(cells)]
    return words + coordinates + rows


def make_tokenizer(*, pictures: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with ``domain_tokens`` and a ChatML template, and with the marks of pictures."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    core.normalizer = normalizers.NFC()  # as transformers has it for every model of this architecture
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in (PAD, END, TURN_START, TURN_END)])
    core.add_tokens([AddedToken(text, normalized=False) for text in domain_tokens()])
    if pictures:
        core.add_special_tokens([AddedToken(text, special=True) for text in (VISION_START, VISION_END, IMAGE, VIDEO)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=TURN_END)
    tokenizer.chat_template = PICTURE_TEMPLATE if pictures else CHAT_TEMPLATE
    return tokenizer


def tiny_config(num_heads: int = 4, hidden_size: int = 64, num_layers: int = 2) -> dict[str, Any]:
    """The model's ``config.json``: a small Qwen2; what is not said is that architecture's default.

    ``initializer_range`` is 0.1: with 0.02 a model this narrow hardly learns.

    Args:
        hidden_size: units of a layer, an even number for each head.
    """
    tokenizer = make_tokenizer()
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "float32",
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def picture_config(num_heads: int = 4, hidden_size: int = 64, num_layers: int = 2) -> dict[str, Any]:
    """The ``config.json`` of the model with pictures: ``tiny_config``'s sizes behind a small Qwen2.5-VL tower."""
    tokenizer = make_tokenizer(pictures=True)
    head, vocabulary = hidden_size // num_heads, tokenizer.get_vocab()
    side = head // 8  # frequencies for each of height and width; the others are those of the order
    plain = tiny_config(num_heads, hidden_size, num_layers)
    text = {
        **{key: plain[key] for key in plain if key not in ("architectures", "model_type")},
        "vocab_size": len(tokenizer),
        "rope_parameters": {**plain["rope_parameters"], "mrope_section": [head // 2 - 2 * side, side, side]},
    }
    tower = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGED,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden_size,
        "window_size": 8 * MERGED * PATCH,
        "fullatt_block_indexes": [0],
        "initializer_range": 0.1,
    }
    marks = {"vision_start": VISION_START, "vision_end": VISION_END, "image": IMAGE, "video": VIDEO}
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": "float32",
        "text_config": text,
        "vision_config": tower,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **{f"{name}_token_id": vocabulary[text] for name, text in marks.items()},
    }


def make_tiny_model(
    path: Path, seed: int, num_heads: int = 4, hidden_size: int = 64, num_layers: int = 2, *, pictures: bool = False
) -> None:
    """Writes the tokenizer and a randomly initialised model to ``path`` (replaced if it exists).

    Args:
        pictures: the model is a ``picture_config``, with its processor, else a ``tiny_config``.
    """
    from safetensors.torch import save_file

    building = path.with_name(path.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    make_tokenizer(pictures=pictures).save_pretrained(building)
    if pictures:
        config = picture_config(num_heads, hidden_size, num_layers)
        _write_with_pictures(config, seed, building)
    else:
        config = tiny_config(num_heads, hidden_size, num_layers)
        save_file(initial_weights(config, seed), building / "model.safetensors", metadata={"format": "pt"})
    (building / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.rmtree(path, ignore_errors=True)
    building.rename(path)


@functools.cache
def processor_folder() -> Path:
    """A folder of the model with pictures without weights, which lasts as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="roll-tiny-vl-")
    atexit.register(folder.cleanup)
    path = Path(folder.name)
    make_tokenizer(pictures=True).save_pretrained(path)
    (path / "config.json").write_text(json.dumps(picture_config(), indent=2) + "\n")
    _write_processor(path)
    return path


def _write_with_pictures(config: Mapping[str, Any], seed: int, folder: Path) -> None:
    """Writes the weights that Transformers draws, and the files of the picture processor."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_dict(dict(config))).save_pretrained(folder)
    _write_processor(folder)


def _write_processor(folder: Path) -> None:
    side = PATCH * MERGED
    entries: dict[str, Any] = {"patch_size": PATCH, "merge_size": MERGED, "temporal_patch_size": 2}
    entries |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    entries["size"] = {"shortest_edge": side**2, "longest_edge": (16 * side) ** 2}
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen2VLVideoProcessor"}),
    ):
        (folder / name).write_text(json.dumps(kind | entries, indent=2) + "\n")


def initial_weights(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """The weights that Transformers draws for a ``tiny_config`` after ``torch.manual_seed``.

    Drawn without it: to import its models takes seconds, in a process that needs none, before any worker can load one.
    """
    import torch
    from torch import nn

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # PyTorch draws too when a layer is made; what it has drawn is drawn again below.
        drawn: dict[str, nn.Embedding | nn.Linear] = {"model.embed_tokens": nn.Embedding(config["vocab_size"], hidden)}
        weights: dict[str, Tensor] = {"model.norm.weight": torch.ones(hidden)}
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                drawn[f"{prefix}.self_attn.{name}"] = nn.Linear(hidden, hidden, bias=name != "o_proj")
            drawn[f"{prefix}.mlp.gate_proj"] = nn.Linear(hidden, inner, bias=False)
            drawn[f"{prefix}.mlp.up_proj"] = nn.Linear(hidden, inner, bias=False)
            drawn[f"{prefix}.mlp.down_proj"] = nn.Linear(inner, hidden, bias=False)
            for name in ("input_layernorm", "post_attention_layernorm"):
                weights[f"{prefix}.{name}.weight"] = torch.ones(hidden)
        for name, module in drawn.items():
            weights[f"{name}.weight"] = nn.init.normal_(module.weight, std=config["initializer_range"]).detach()
            if isinstance(module, nn.Linear) and module.bias is not None:
                weights[f"{name}.bias"] = torch.zeros_like(module.bias)
        weights["model.embed_tokens.weight"][config["pad_token_id"]] = 0
    return weights


def _is_row(cells: tuple[str, ...]) -> bool:
    """A row of a one-box board: at most one player, one box and one target, wherever they overlap."""
    text = "".join(cells)
    return all(sum(map(text.count, glyphs)) <= 1 for glyphs in ("PS", "X√", "OS√"))
