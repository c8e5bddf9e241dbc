"""A tokenizer that is not the tiny model's, and a model with it."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from roll.models.tiny import tiny_config

TEXTS = ["the answer is 42", "hello, the √2 of 日本 — 12 and 30", "naïve\n\n  café </s> <|im_end|", "x", ""]


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """It writes words of ``TEXTS`` as a token or two, where the tiny one has bytes; its texts begin with ``<s>``."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    core.train_from_iterator(
        TEXTS * 5, trainers.BpeTrainer(vocab_size=310, special_tokens=special, initial_alphabet=alphabet)
    )
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
