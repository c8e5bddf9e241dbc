"""The tensors of a model folder by name, read when they are asked for."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from roll.models.tokenizer import local_folder

INDEX = "model.safetensors.index.json"


class WeightFiles:
    """A model's safetensors files, opened once; tensors come as the checkpoint names and shapes them.

    Args:
        path: folder in Hugging Face format, or a hub name (fetched first).

    Raises:
        ValueError: no such folder, or no safetensors files in it.
    """

    def __init__(self, path: str) -> None:
        self.folder = local_folder(path, "*.safetensors", "*.json")
        """On this machine."""
        self._files: dict[str, Any] = {}
        self._file_of = self._index()

    def read(self, name: str) -> Tensor:
        """A whole tensor on the CPU, in the number format of the file.

        Raises:
            ValueError: no tensor of that name.
        """
        # A model saved without its output layer has names without this prefix.
        file_name = next((n for n in (name, name.removeprefix("model.")) if n in self._file_of), None)
        if file_name is None:
            raise ValueError(f"{self.folder}: no weight {name!r} in its safetensors files")
        tensor: Tensor = self._open(self._file_of[file_name]).get_tensor(file_name)
        return tensor

    def _index(self) -> dict[str, str]:
        if (self.folder / INDEX).is_file():
            weight_map: dict[str, str] = json.loads((self.folder / INDEX).read_text())["weight_map"]
            return weight_map
        files = sorted(file.name for file in self.folder.glob("model*.safetensors"))
        if not files:
            raise ValueError(f"model path {str(self.folder)!r}: no model.safetensors in it")
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 (not a dict)

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            try:
                self._files[file] = safe_open(str(self.folder / file), framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{self.folder / file}: {error}; expected a whole safetensors file") from error
        return self._files[file]
