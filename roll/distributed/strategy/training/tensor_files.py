"""Tensors in safetensors files: written one by one, read by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

MAX_FILE_BYTES = 4 * 2**30

Reader: TypeAlias = Callable[[str], Tensor]
"""A whole tensor by name."""


class SafetensorsWriter:
    """Streams tensors into ``stem.safetensors``, or several numbered files with an index when they are large."""

    def __init__(self, folder: Path, stem: str, max_bytes: int = MAX_FILE_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"{stem}*.safetensors*"):
            stale.unlink()
        self._folder, self._stem, self._max_bytes = folder, stem, max_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a copy of ``tensor``; writes a file whenever enough has gathered."""
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self._flush()
        self._pending[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        self._pending_bytes += tensor.nbytes

    def finish(self) -> None:
        """Writes the rest and gives the files their final names."""
        self._flush()
        count = len(self._files)
        index: dict[str, str] = {}
        for number, names in enumerate(self._files, start=1):
            suffix = "" if count == 1 else f"-{number:05d}-of-{count:05d}"
            file = f"{self._stem}{suffix}.safetensors"
            self._part(number).rename(self._folder / file)
            index |= dict.fromkeys(names, file)
        if count > 1:
            content = {"metadata": {"total_size": self._total_bytes}, "weight_map": index}
            (self._folder / f"{self._stem}.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")

    def _flush(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not self._pending:
            return
        self._files.append(list(self._pending))
        try:
            save_file(self._pending, self._part(len(self._files)), metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{self._folder}: cannot write {self._stem} ({error})") from error
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"{self._stem}-part{number:05d}.safetensors"


class StoredTensors:
    """A checkpoint's tensors by name, from all safetensors files of a folder.

    ``kinds``: the last parts of the names, such as ``exp_avg``.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the files.

        Raises:
            ValueError: there are none, or one is damaged.
        """
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        self._files: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            try:
                opened = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{file.name}: {error}; expected a whole safetensors file") from error
            self._files |= dict.fromkeys(opened.keys(), opened)
        self.kinds = {name.rpartition(".")[2] for name in self._files}
        if not self._files:
            raise ValueError(f"no safetensors in {folder.name}; expected a trainer's")

    def get(self, name: str) -> Tensor:
        """Reads one tensor.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in self._files:
            raise ValueError(f"no tensor {name!r} in {self._folder.name}; it belongs to another model")
        return cast(Tensor, self._files[name].get_tensor(name))

    def reader(self, kind: str) -> Reader:
        """Reads what is stored of a parameter by the parameter's name."""
        return lambda name: self.get(f"{name}.{kind}")
