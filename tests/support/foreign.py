"""A tokenizer that is not the tiny model's, and a model with it."""

from pathlib import Path

import torch
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from roll.models.tiny import tiny_config
from tests.support.chat_families import byte_pairs

TEXTS = ["the answer is 42", "hello, the √2 of 日本 — 12 and 30", "naïve\n\n  café </s> <|im_end|", "x", ""]


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """It writes words of ``TEXTS`` as a token or two, where the tiny one has bytes; its texts begin with ``<s>``."""
    core = byte_pairs(TEXTS * 5, 310, ["<s>", "</s>"])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


def save_foreign_model(folder: Path, seed: int) -> None:
    """Writes a random model with heads that every engine takes, and this tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = merging_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id, "pad_token_id": None}
    torch.manual_seed(seed)
    shape = tiny_config(num_heads=2) | {"vocab_size": len(tokenizer), **ids}
    Qwen2ForCausalLM(Qwen2Config(**shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
