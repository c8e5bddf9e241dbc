"""Items whose bytes lie in files without a name: memory holds what is read of them, and they end with the process."""

from __future__ import annotations

import mmap
import tempfile
from typing import IO

import numpy as np

from roll.data.columns import Item

_FILE = 1 << 30
"""Bytes of a file, unless one item has more."""


class ItemSpool:
    """Keeps each different item once, in ``TMPDIR``."""

    def __init__(self) -> None:
        self._known: dict[str, Item] = {}
        self._file: IO[bytes] | None = None
        self._map: mmap.mmap | None = None
        self._end = 0

    def keep(self, item: Item) -> Item:
        """An equal item that takes no memory.

        Raises:
            OSError: no space is left.
        """
        if (known := self._known.get(item.hash)) is None:
            known = self._known[item.hash] = self._written(item)
        return known

    def _written(self, item: Item) -> Item:
        size = item.data.nbytes
        if self._map is None or self._end + size > len(self._map):
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (it ends with the last item in it)
            self._file.truncate(max(_FILE, size))
            self._map, self._end = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ), 0
        assert self._file is not None
        self._file.seek(self._end)
        self._file.write(item.data.tobytes())
        self._file.flush()
        data = np.frombuffer(self._map, np.uint8, size, self._end).reshape(item.data.shape)
        self._end += size
        kept = Item(data)
        vars(kept)["hash"] = item.hash  # it need not be read for that
        return kept
