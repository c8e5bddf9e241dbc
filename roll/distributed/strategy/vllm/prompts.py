"""Prompts as vLLM's engine takes them; pictures arrive as the numbers that a trainer's tower is given.

vLLM's own processing, which would resize a picture once more and put marks of its own into the prompt, is passed by.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from roll.data.columns import IntArray, Item
from roll.data.identity import spans_along, vocabulary_ids

if TYPE_CHECKING:
    from vllm.inputs.engine import EngineInput

    from roll.data.pictures import Pictures

_KEPT = 16
"""Pictures whose numbers are kept: the requests of a group bring the same."""


class Prompts:
    """Makes the engine's inputs.

    Args:
        pictures: the picture processor of the model's folder; ``None`` for a run without pictures.
        dtype: that vLLM computes in.
    """

    def __init__(self, pictures: Pictures | None, dtype: torch.dtype) -> None:
        self._pictures = pictures
        self._dtype = dtype
        self._of_item = functools.lru_cache(_KEPT)(self._arguments)

    def of(self, ids: IntArray, items: Sequence[Item], weights: str) -> EngineInput:
        """A prompt, in the engine's words.

        Args:
            ids: those of pictures are below zero (``roll.data.identity``).
            weights: name of the present weights, part of the keys of both caches: nothing that was computed with
                others is ever found, neither keys and values of a beginning nor features of a picture.

        Raises:
            ValueError: the ids show content of none of the items.
        """
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        along = spans_along(ids, items) if len(items) else []
        words = vocabulary_ids(ids).tolist()
        if not along:
            return tokens_input(words, cache_salt=weights)
        places = [PlaceholderRange(offset=place, length=size) for place, size, _ in along]
        shown = [item for *_, item in along]
        arguments = MultiModalKwargsItems({"image": [self._of_item(item) for item in shown]})
        hashes = {"image": [f"{weights} {item.hash}" for item in shown]}
        return mm_input(words, arguments, hashes, {"image": places}, cache_salt=weights)

    def _arguments(self, item: Item) -> Any:
        """What the tower takes of one picture."""
        from transformers import BatchFeature
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

        assert self._pictures is not None, "requests of other runs have no pictures"
        values = {name: torch.from_numpy(found) for name, found in self._pictures.inputs([item]).items()}
        values["pixel_values"] = values["pixel_values"].to(self._dtype)
        patches = values["image_grid_thw"].prod(-1)
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", patches),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        return MultiModalKwargsItems.from_hf_inputs(BatchFeature(values), fields)["image"][0]
