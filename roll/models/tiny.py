"""The embedded default model: a small tokenizer and a tiny Qwen2 causal LM, in Hugging Face format, made on the spot.

The tokenizer is byte-level, so any text round-trips, with single tokens for what grid games say often: a grid row, a
coordinate, an action, an answer tag. One token per row and coordinate keeps a Sokoban turn at about 23 prompt and 4
answer tokens, which a two-layer model can learn on a CPU.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2Config


RECIPE_VERSION = 2
"""Part of the cache key: raise it when the tokenizer or the architecture changes."""

MAX_POSITIONS = 2048
"""Of the longest sample."""

PAD, END, TURN_START, TURN_END = "<|endoftext|>", "<|end|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
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


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with ``domain_tokens`` and a ChatML template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    core.normalizer = normalizers.NFC()  # as transformers has it for every model of this architecture
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in (PAD, END, TURN_START, TURN_END)])
    core.add_tokens([AddedToken(text, normalized=False) for text in domain_tokens()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=TURN_END)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(num_heads: int = 4) -> Qwen2Config:
    """The model's sizes.

    ``initializer_range`` is 0.1: with 0.02 a model this narrow hardly learns.

    Args:
        num_heads: attention heads, which share 64 units.
    """
    from transformers import Qwen2Config

    tokenizer = make_tokenizer()
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_tiny_model(path: Path, seed: int, num_heads: int = 4) -> None:
    """Writes the tokenizer and a randomly initialised model to ``path`` (replaced if it exists).

    Args:
        path: its folder.
        seed: of the weights.
        num_heads: see ``tiny_config``.
    """
    import torch
    from transformers import Qwen2ForCausalLM

    from roll.models.loading import save_model

    tokenizer = make_tokenizer()
    config = tiny_config(num_heads)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
    building = path.with_name(path.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    save_model(model, building)
    tokenizer.save_pretrained(building)
    shutil.rmtree(path, ignore_errors=True)
    building.rename(path)


def _is_row(cells: tuple[str, ...]) -> bool:
    """A row of a one-box board: at most one player, one box and one target, wherever they overlap."""
    text = "".join(cells)
    return all(sum(map(text.count, glyphs)) <= 1 for glyphs in ("PS", "X√", "OS√"))
