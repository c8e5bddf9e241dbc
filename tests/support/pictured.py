"""Batches with pictures for the models of ``picture_models``, and what the unmodified model is given for them."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.data.batch import Batch
from roll.data.columns import Item
from roll.data.identity import items_along, vocabulary_ids
from roll.data.pictures import Pictures
from tests.support.picture_models import FAMILIES, IMAGE, PROCESSOR, SPECIALS, make_processor, make_tokenizer

SIDE = PROCESSOR["patch_size"] * PROCESSOR["merge_size"]
"""Pixels of a token's side."""
MARK = 256 + len(SPECIALS)
"""``IMAGE`` in the vocabulary of ``make_tokenizer``."""
TITLES = {
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_5": "Qwen3.5, Qwen3.6",
    "qwen3_vl_moe": "Qwen3-VL-MoE",
    "llava": "LLaVA",
    "glm4v": "GLM-4.1V",
    "gemma3": "Gemma 3",
    "mistral3": "Mistral Small 3.1",
}
"""Families as their publishers call them."""
TEXT = 61
"""Ids below are words."""
assert IMAGE == "<|image_pad|>"


@cache
def pictures_of(family: str) -> Pictures:
    """The picture processor of a family's models."""
    with TemporaryDirectory() as folder:
        pictures = Pictures(make_processor(Path(folder), family))
        assert pictures.token >= 0, "it is loaded"
    return pictures


@cache
def picture(seed: int, high: int, wide: int, family: str = "qwen3_vl") -> Item:
    """Noise of so many tokens, or of as many as all pictures of the family have."""
    size = pictures_of(family)._size(high * SIDE, wide * SIDE)
    return Item(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def shown(item: Item, family: str = "qwen3_vl") -> Tensor:
    """A picture's ids in a prompt."""
    pictures = pictures_of(family)
    ids = make_tokenizer(family).encode(pictures.spaced(FAMILIES[family].mark), add_special_tokens=False)
    parts = [pictures.content(item) if index == pictures.token else np.array([index]) for index in ids]
    return torch.from_numpy(np.concatenate(parts))


Part = Item | int
"""A picture, or so many words; a policy has sampled those below zero."""


def make_rows(rows: Sequence[Sequence[Part]], seed: int, family: str = "qwen3_vl") -> Batch:
    """Rows of parts; words are random, but the same behind as many words and pictures of the same sizes."""
    generator = torch.Generator().manual_seed(seed)
    known: dict[tuple[Any, ...], Tensor] = {}
    ids, masks = [], []
    for row in rows:
        pieces = []
        for number, part in enumerate(row):
            if isinstance(part, Item):
                pieces.append(shown(part, family))
            elif part < 0:
                pieces.append(torch.randint(0, TEXT, (-part,), generator=generator))
            else:
                words = torch.randint(0, TEXT, (part,), generator=generator)
                before = (each.data.shape if isinstance(each, Item) else each for each in row[: number + 1])
                pieces.append(known.setdefault(tuple(before), words))
            masks.append(torch.full((len(pieces[-1]),), not isinstance(part, Item) and part < 0))
        ids.append(torch.cat(pieces))
    items = tuple(tuple(dict.fromkeys(part for part in row if isinstance(part, Item))) for row in rows)
    tokens_T = torch.cat(ids)
    advantages_T = torch.randn(len(tokens_T), generator=generator)
    lengths = torch.tensor([len(each) for each in ids])
    return Batch(lengths, tokens_T, torch.cat(masks), advantages_T=advantages_T, items_I=items)


def make_pictured(step: int, family: str = "qwen3_vl") -> Batch:
    """Seven rows: text alone, one or several pictures of several sizes, one of them twice, and several turns."""
    alone = 2 if family == "mistral3" else 1  # it has no picture of a single token
    a, b, c = (picture(*each, family) for each in ((step, 2, 3), (10 + step, 3, 2), (20 + step, 1, alone)))
    prompt: list[Part] = [3, a, 2, b, 4]
    rows: list[list[Part]] = [[9, -6], [*prompt, -5], [*prompt, -7], [2, c, 3, -4, 1, a, 2, -3], [5, -8]]
    return make_rows([*rows, [b, 2, b, 3, -6], [4, c, 5, -2]], 700 + step, family)


def make_pictured_groups(step: int, family: str = "qwen3_vl") -> Batch:
    """Three groups of three rows with a prompt each, one of them without a picture."""
    a, b = picture(30 + step, 2, 2, family), picture(40 + step, 1, 3, family)
    prompts: list[list[Part]] = [[3, a, 4, b, 2], [8], [2, b, 9]]
    return make_rows([[*prompt, -3 - n] for prompt in prompts for n in range(3)], 800 + step, family)


KINDS = {"llava": "", "mistral3": "", "gemma3": "token_type_ids"}
"""What the model's forward calls the marks of pictures' tokens, where that is not ``mm_token_type_ids``."""


def unmodified(one: Batch, family: str = "qwen3_vl") -> dict[str, Any]:
    """Arguments of the model's own forward pass for one sequence, its pictures by Transformers' processor."""
    assert one.items_I is not None
    along = items_along(one.tokens_T, one.items_I[0])
    found: dict[str, Any] = {"input_ids": vocabulary_ids(one.tokens_T)[None]}
    if along:
        options = {"return_tensors": "pt", "input_data_format": "channels_last"}
        processor = pictures_of(family)._processor.image_processor
        found |= processor([item.data for _, item in along], do_resize=False, do_center_crop=False, **options)
        found.pop("num_crops", None)
        mark = make_tokenizer(family).convert_tokens_to_ids(FAMILIES[family].image)
        if kinds := KINDS.get(family, "mm_token_type_ids"):
            found[kinds] = ((one.tokens_T < 0) & (found["input_ids"][0] == mark)).int()[None]
    return found


def plain_logprobs(model: Any, batch: Batch, temperature: float) -> torch.Tensor:
    """float32 [T]: of the loss tokens, each row alone."""
    found_T = torch.zeros(batch.num_tokens)
    for number in range(batch.num_sequences):
        one, at = batch.select([number]), batch.token_index([number])
        with torch.no_grad():
            logits = model(**unmodified(one, model.config.model_type), use_cache=False).logits[0, :-1]
        said = (logits / temperature).log_softmax(-1).gather(1, one.tokens_T[1:, None].clamp(min=0))[:, 0]
        found_T[at[1:]] = said.float() * one.loss_mask_T[1:]
    return found_T
