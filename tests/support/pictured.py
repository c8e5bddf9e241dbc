"""Batches with pictures for the models of ``picture_models``, and what the unmodified model is given for them."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from roll.data.batch import Batch
from roll.data.columns import Item
from roll.data.identity import items_along, vocabulary_ids
from roll.data.pictures import Pictures, Video
from roll.data.renderer import items_of
from tests.support.picture_models import FAMILIES, IMAGE, PROCESSOR, SPECIALS, VIDEO, make_processor, make_tokenizer

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
        assert family != "qwen3_vl" or pictures.videos.mark == VIDEO
    return pictures


@cache
def picture(seed: int, high: int, wide: int, family: str = "qwen3_vl") -> Item:
    """Noise of so many tokens, or of as many as all pictures of the family have."""
    size = pictures_of(family)._size(high * SIDE, wide * SIDE)
    return Item(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


@cache
def video(seed: int, frames: int, high: int, wide: int) -> Video:
    """Noise likewise, in so many frames; the last is there twice where they are odd in number."""
    noise = np.random.default_rng(seed).integers(0, 256, (frames, high * SIDE, wide * SIDE, 3), dtype=np.uint8)
    noise = np.concatenate([noise, noise[-1:]])[: frames + frames % 2]
    times = tuple(round(0.4 * number, 1) for number in range(frames))
    return Video(tuple(map(Item, noise.reshape(-1, 2, *noise.shape[1:]))), times)


def shown(part: Item | Video, family: str = "qwen3_vl") -> Tensor:
    """The ids of a picture or video in a prompt."""
    pictures = pictures_of(family)
    mark = pictures.spaced(FAMILIES[family].mark)
    token = pictures.token
    if isinstance(part, Video):
        mark, token = mark.replace(IMAGE, VIDEO), pictures.video_token
    ids = make_tokenizer(family).encode(mark, add_special_tokens=False)
    parts = [pictures.content(part) if index == token else np.array([index]) for index in ids]
    return torch.from_numpy(np.concatenate(parts))


Part = Item | Video | int
"""A picture, a video, or so many words; a policy has sampled those below zero."""


def make_rows(rows: Sequence[Sequence[Part]], seed: int, family: str = "qwen3_vl") -> Batch:
    """Rows of parts; words are random, but the same behind as many words and pictures of the same sizes."""
    generator = torch.Generator().manual_seed(seed)
    known: dict[tuple[Any, ...], Tensor] = {}
    ids, masks = [], []
    for row in rows:
        pieces = []
        for number, part in enumerate(row):
            if not isinstance(part, int):
                pieces.append(shown(part, family))
            elif part < 0:
                pieces.append(torch.randint(0, TEXT, (-part,), generator=generator))
            else:
                words = torch.randint(0, TEXT, (part,), generator=generator)
                before = (each if isinstance(each, int) else len(shown(each, family)) for each in row[: number + 1])
                pieces.append(known.setdefault(tuple(before), words))
            masks.append(torch.full((len(pieces[-1]),), isinstance(part, int) and part < 0))
        ids.append(torch.cat(pieces))
    parts = [[{"type": "image", "image": part} for part in row if not isinstance(part, int)] for row in rows]
    items = tuple(items_of([{"role": "user", "content": shown}]) for shown in parts)
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


def make_filmed(step: int, family: str = "qwen3_vl") -> Batch:
    """Videos of two lengths and sizes, beside text and pictures, in rows of their own and together."""
    a, b, c = picture(50 + step, 2, 3), video(60 + step, 5, 1, 2), video(70 + step, 2, 2, 2)
    prompt: list[Part] = [3, b, 4]
    rows: list[list[Part]] = [[9, -6], [*prompt, -5], [*prompt, -7], [2, c, 3, -4, 1, a, 2, b, 1, -3], [a, 5, -8]]
    return make_rows([*rows, [b, 2, c, 3, -6]], 900 + step, family)


KINDS = {"llava": "", "mistral3": "", "gemma3": "token_type_ids"}
"""What the model's forward calls the marks of pictures' tokens, where that is not ``mm_token_type_ids``."""


def unmodified(one: Batch, family: str = "qwen3_vl") -> dict[str, Any]:
    """Arguments of the model's own forward pass for one sequence, its pictures by Transformers' processor."""
    along = items_along(one.tokens_T, one.items_I[0]) if one.items_I else []
    found: dict[str, Any] = {"input_ids": vocabulary_ids(one.tokens_T)[None]}
    if images := [item.data for _, item in along if item.data.ndim == 3]:
        options = {"return_tensors": "pt", "input_data_format": "channels_last"}
        processor = pictures_of(family)._processor.image_processor
        found |= processor(images, do_resize=False, do_center_crop=False, **options)
        found.pop("num_crops", None)
    if along and (kinds := KINDS.get(family, "mm_token_type_ids")):
        seen, ids, tokenizer = one.tokens_T < 0, found["input_ids"][0], make_tokenizer(family)
        image, video = (tokenizer.encode(mark, add_special_tokens=False)[0] for mark in (FAMILIES[family].image, VIDEO))
        found[kinds] = ((seen & (ids == image)).int() + 2 * (seen & (ids == video)).int())[None]
    if any(item.data.ndim == 4 for _, item in along):
        found |= whole_videos(one)
    return found


def whole_videos(one: Batch) -> dict[str, Tensor]:
    """What Transformers makes of a row's videos, each in one piece, by its own code for patches."""
    own = Qwen3VLVideoProcessor(**PROCESSOR)
    ids = [*vocabulary_ids(one.tokens_T).tolist(), -1, -1]
    end = make_tokenizer().convert_tokens_to_ids("<|vision_end|>")
    videos: list[list[np.ndarray]] = [[]]
    assert one.items_I is not None
    for place, item in items_along(one.tokens_T, one.items_I[0]):
        if item.data.ndim == 3:
            continue
        videos[-1].extend(item.data)
        last = ids.index(end, place)
        if ids[last + 1] == end:  # the chat template's behind the piece's
            videos.append([])
    assert not videos.pop()
    patches, grids = [], []
    for frames in videos:
        values = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float()[None] / 255
        flat, *grid = own.patchify((values - 0.5) / 0.5, *(PROCESSOR[f"{name}_size"] for name in SIZES))
        patches.append(flat[0])
        grids.append(grid)
    return {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}


SIZES = ("patch", "merge", "temporal_patch")


def plain_logprobs(model: Any, batch: Batch, temperature: float = 1.0) -> Tensor:
    """float64 [T]: of the loss tokens, by the model's own forward pass of one row after another; 0 elsewhere."""
    rows = []
    for number in range(batch.num_sequences):
        one = batch.select([number])
        logits = model(**unmodified(one, model.config.model_type), use_cache=False).logits[0, :-1].double()
        said = (logits / temperature).log_softmax(-1).gather(1, one.tokens_T[1:, None].clamp(min=0))[:, 0]
        rows.append(torch.cat([said.new_zeros(1), said]) * one.loss_mask_T)
    return torch.cat(rows)
