"""Checksums of files: XXH3 of 128 bits, which finds torn and rotten data (not malice) faster than a disk writes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_128 as Checksum

__all__ = ["Checksum", "WrittenFile", "checksum_of"]


@dataclass(frozen=True)
class WrittenFile:
    """A file as it was written."""

    path: str
    size: int
    checksum: str

    def relative_to(self, folder: Path) -> WrittenFile:
        """The same, named from ``folder``."""
        return replace(self, path=Path(self.path).relative_to(folder).as_posix())


def checksum_of(path: Path) -> str:
    """Reads the file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, Checksum).hexdigest()
