"""Tensors of a sharded checkpoint, joined one at a time by one process without process groups or devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.distributed.strategy.training.pieces import Region, TensorForm

SHARDS_FOLDER = "shards"
"""Folder of a checkpoint's shards, with the configuration and the tokenizer of their model beside them."""


class StoredShards:
    """Whole tensors by name from the shards that ranks have written (PyTorch's distributed checkpoint, safetensors).

    ``forms``: shape and number format of each.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the headers of the files.

        Raises:
            ValueError: there are none, or one is damaged.
        """
        from safetensors import SafetensorError
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        try:
            found: Any = HuggingFaceStorageReader(str(folder)).read_metadata()
        except SafetensorError as error:
            raise ValueError(f"{folder}: {error}; expected whole safetensors files") from error
        if not found.storage_data:
            raise ValueError(f"no safetensors in {folder}; expected the shards of a trainer")
        self._folder = folder
        self._parts: dict[str, list[tuple[torch.Size, torch.Size, str]]] = {}
        for index, part in found.storage_data.items():
            self._parts.setdefault(index.fqn, []).append((index.offset, part.shape, part.relative_path))
        self.forms = {
            name: TensorForm(tuple(entry.size), entry.properties.dtype)
            for name, entry in found.state_dict_metadata.items()
        }

    def get(self, name: str) -> Tensor:
        """Joins one tensor.

        Raises:
            ValueError: a part of it is missing.
        """
        from safetensors import safe_open

        form, parts = self.forms[name], self._parts[name]
        if (seen := sum(shape.numel() for _, shape, _ in parts)) != torch.Size(form.shape).numel():
            raise ValueError(f"{name}: {seen} elements in {self._folder}, expected a tensor of shape {form.shape}")
        whole = torch.empty(form.shape, dtype=form.dtype)
        for offsets, sizes, path in parts:
            with safe_open(path, framework="pt") as file:
                Region(tuple(offsets), tuple(sizes), ()).cut(whole).copy_(file.get_tensor(name))
        return whole
