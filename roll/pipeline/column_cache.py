"""Columns of a dataset that a model computes, cached on disk by what they depend on."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from roll.data.batch import Batch
from roll.data.identity import digest

logger = logging.getLogger(__name__)


def digest_of(batch: Batch, more: Iterable[str] = ()) -> str:
    """Of the tokens, of what of them is an answer, and of further texts."""
    return digest(batch.lengths_B, batch.tokens_T, batch.loss_mask_T, *more, size=8).hex()


def weight_files(folder: Path) -> list[str]:
    """Marks that tell a model folder's weights from others without reading them: path, size and time of each file."""
    found = []
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        known = file.stat()
        found.append(f"{file.resolve()} {known.st_size} {known.st_mtime_ns}")
    return found


def check_writable(folder: str, key: str) -> None:
    """Makes a folder, and a file in it that goes at once.

    Raises:
        ValueError: that cannot be done; the key is named.
    """
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"{key}: got {folder}, expected a folder that can be written ({error.strerror})") from error


def read_cached(
    file: Path, names: Sequence[str], what: str, about: Mapping[str, str] | None = None
) -> dict[str, Tensor] | None:
    """The columns of a file; ``None`` where there is none.

    Args:
        about: what the file must say of their making.

    Raises:
        ValueError: the file cannot be read, or was made in another way.
    """
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        return None
    try:
        with safe_open(str(file), framework="pt") as tensors:
            said = tensors.metadata() or {}
            found = {name: tensors.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{file}: no {what} ({error}); delete it") from error
    for key, expected in (about or {}).items():
        if said.get(key) != expected:
            seen = said.get(key)
            raise ValueError(f"{file}: {key}: got {seen!r}, expected {expected!r}; delete it or name another folder")
    logger.info("%s: using %s", what, file)
    return found


def cached_columns(
    file: Path,
    names: Sequence[str],
    what: str,
    compute: Callable[[], Mapping[str, Tensor]],
    about: Mapping[str, str] | None = None,
) -> Mapping[str, Tensor]:
    """The columns of a file, which are computed and written where there is none (arguments as ``read_cached``).

    Raises:
        ValueError: as ``read_cached``.
        OSError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if (found := read_cached(file, names, what, about)) is not None:
        return found
    computed = compute()
    file.parent.mkdir(parents=True, exist_ok=True)
    building = file.with_suffix(f".{os.getpid()}.building")  # runs may share a folder, and start together
    try:
        save_file(dict(computed), building, metadata=dict(about) if about else None)
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"{file}: the {what} cannot be kept ({error})") from error
    building.replace(file)
    logger.info("%s: kept in %s", what, file)
    return computed
