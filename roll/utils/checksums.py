"""Checksums of files: XXH3 of 128 bits, which finds torn and rotten data (not malice) faster than a disk writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_128 as Checksum

__all__ = ["Checksum", "WrittenFile", "checksum_of"]

_CHUNK = 1 << 20


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
    checksum = Checksum()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum.update(chunk)
    return checksum.hexdigest()
