"""Identity of prompts and responses: the one place that decides whether two are the same; it compares only ids.

An id below zero stands for content outside the vocabulary, such as a part of a picture. It is made of the content's
hash and of the token that the model is given in its place, so two prompts that show different pictures in the same
words differ in their ids, wherever they are compared. Models take ``vocabulary_ids``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from roll.data.columns import IntArray, Item
from roll.data.tool_messages import text_of

if TYPE_CHECKING:
    import torch

_TOKEN_BITS = 20
"""Of an id below zero; the 43 above them are of a hash."""
_TOKEN = 2**_TOKEN_BITS - 1

Ids = TypeVar("Ids", IntArray, "torch.Tensor")


def identity(ids: Sequence[int] | IntArray | torch.Tensor) -> bytes:
    """The same bytes for the same ids and for no others; those of a beginning are a beginning of the whole's."""
    return np.asarray(ids, dtype=np.int64).tobytes()


def digest(*parts: np.ndarray | torch.Tensor | bytes | str, size: int = 16) -> bytes:
    """So many bytes that stand for ids (``identity``) and what belongs to them, columns or texts, in this order."""
    found = hashlib.blake2b(digest_size=size)
    for part in parts:
        if isinstance(part, str):
            found.update(part.encode())
        else:
            found.update(part if isinstance(part, bytes) else np.asarray(part).tobytes())
    return found.digest()


def conversation_digest(messages: Iterable[Mapping[str, Any]], items: Iterable[Item] = ()) -> str:
    """The same text for conversations of the same roles, words and items, which are not tokens yet."""
    words = "\x1e".join(f"{message['role']}\x1f{text_of(message['content'])}" for message in messages)
    return digest(words, *(item.hash for item in items), size=8).hex()


def common_beginning(first: torch.Tensor, second: torch.Tensor) -> int:
    """Number of ids that two sequences begin with alike."""
    length = min(len(first), len(second))
    differs = (first[:length] != second[:length]).nonzero()
    return int(differs[0]) if len(differs) else length


def content_ids(item: Item, tokens: Sequence[int]) -> IntArray:
    """Ids for an item that the model is given these tokens for."""
    hashes = (int.from_bytes(digest(item.hash, str(place), size=8), "big") for place in range(len(tokens)))
    return np.array([~((h >> (_TOKEN_BITS + 1) << _TOKEN_BITS) | t) for h, t in zip(hashes, tokens, strict=True)])


def items_along(ids: Sequence[int] | IntArray | torch.Tensor, items: Iterable[Item]) -> list[tuple[int, Item]]:
    """Where in a row of ids each item begins, and the item; one that is in the row twice is there twice.

    Raises:
        ValueError: the row has content that is of none of the items.
    """
    firsts = {int(content_ids(item, (_TOKEN,))[0]): item for item in items}
    values = np.asarray(ids, dtype=np.int64)
    inside = np.flatnonzero(values < 0)
    contents = (values[inside] & ~_TOKEN).tolist()
    found = [(int(at), firsts[key]) for at, key in zip(inside, contents, strict=True) if key in firsts]
    if len(inside) and (not found or found[0][0] != inside[0]):
        raise ValueError(f"place {inside[0]}: content of none of the row's {len(firsts)} items")
    return found


def spans_along(ids: IntArray, items: Iterable[Item]) -> list[tuple[int, int, Item]]:
    """The first place and the number of ids of each item in a row, and the item; errors as ``items_along``."""
    along = items_along(ids, items)
    ends = [*(place for place, _ in along[1:]), len(ids)]
    return [(place, int((ids[place:end] < 0).sum()), item) for (place, item), end in zip(along, ends, strict=False)]


def vocabulary_ids(ids: Ids) -> Ids:
    """Ids with the vocabulary's own tokens for those below zero."""
    if isinstance(ids, np.ndarray):
        return np.where(ids < 0, ~ids & _TOKEN, ids)
    return ids.where(ids >= 0, ~ids & _TOKEN)
