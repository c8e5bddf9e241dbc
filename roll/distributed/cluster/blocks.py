"""Blocks of columns in Ray's object store, see ``roll.data.stored``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import ray
from ray import ObjectRef

from roll.data.columns import num_bytes
from roll.data.stored import Arrays
from roll.distributed.cluster.errors import RowsLostError


@dataclass(frozen=True)
class RayBlock:
    """A block that this process, or another one, has put into the store."""

    ref: ObjectRef

    fetched_bytes: ClassVar[int] = 0
    """Fetched by this process, until somebody sets it back."""

    @classmethod
    def put(cls, arrays: Arrays) -> RayBlock:
        return cls(ray.put(arrays))

    @classmethod
    def fetch(cls, blocks: Sequence[RayBlock]) -> list[Arrays]:
        """Raises ``RowsLostError`` where a block is on a node, or belongs to a process, that is gone."""
        try:
            found: list[Arrays] = ray.get([block.ref for block in blocks])
        except (ray.exceptions.ObjectLostError, ray.exceptions.ObjectFetchTimedOutError) as error:
            raise RowsLostError(str(error).splitlines()[0]) from None
        RayBlock.fetched_bytes += sum(num_bytes(values) for arrays in found for values in arrays.values())
        return found
