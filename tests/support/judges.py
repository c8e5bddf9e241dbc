"""A judge that says digits, and what it says by Transformers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from roll.data.renderer import ChatRenderer, Message
from roll.models.loading import load_causal_lm
from roll.models.tiny import make_tokenizer
from roll.rewards.judge import JudgeVerifier
from tests.support.contract import FAMILIES, HEADS, greedy_oracle, random_model

WORDS = 5
"""Tokens that it says."""


class Summing(JudgeVerifier):
    """Makes a number of whatever a model says."""

    def _score_in(self, words: str, is_cut: bool) -> float:
        return self.number(words)

    @staticmethod
    def number(words: str) -> float:
        return float(sum(map(ord, words)) % 11)


def digit_model(folder: Path) -> str:
    """A model whose every token is a digit, another one after every question."""
    config_class, model_class, extra = FAMILIES["untied"]
    model = random_model(config_class, model_class, 3, max_position_embeddings=256, **HEADS, **extra)
    tokenizer = make_tokenizer()
    digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]
    others = torch.ones(model.config.vocab_size, dtype=torch.bool)
    others[digits] = False
    with torch.no_grad():
        model.lm_head.weight[others] = 0.0
        model.lm_head.weight[digits] *= 20.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def greedy_words(folder: str, messages: Sequence[Message]) -> str:
    """What the judge says, by Transformers."""
    renderer = ChatRenderer(make_tokenizer())
    ids = greedy_oracle(load_causal_lm(folder), renderer.prompt(messages).copy(), WORDS)
    return renderer.decode(np.array(ids))
