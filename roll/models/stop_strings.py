"""Finding stop strings in a growing sequence of tokens, without decoding at every token."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

_UNDECODABLE = "�"  # how a tokenizer shows a piece of a character


class StopStrings:
    """Stop strings for one tokenizer.

    A stop string is completed by a token that holds its last character, or a part of that character's bytes. Few tokens
    do, so a table over the vocabulary says when decoding is worth it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._enders = functools.lru_cache(maxsize=64)(self._find_enders)

    def may_end(self, stop: tuple[str, ...], token: int) -> bool:
        """Tells whether ``token`` could complete one of ``stop``; if so, ask ``found``."""
        enders = self._enders(stop)
        return token < len(enders) and bool(enders[token])

    def found(self, stop: tuple[str, ...], token_ids: list[int]) -> bool:
        """Tells whether the end of the decoded text holds one of ``stop``."""
        # A character has at most four bytes and a token at least one; four more absorb a cut at the tail's start.
        tail = 4 * max(map(len, stop)) + 4
        text = self._tokenizer.decode(token_ids[-tail:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(s in text for s in stop)

    def _find_enders(self, stop: tuple[str, ...]) -> npt.NDArray[np.bool_]:
        """bool [vocabulary]: the tokens that could complete one of ``stop``."""
        last = {s[-1] for s in stop}
        if any(c.isspace() for c in last):
            # Tokenizers may strip the space of a lone token, so its text cannot rule anything out.
            return np.ones(len(self._pieces), dtype=np.bool_)
        wanted = last | {_UNDECODABLE}
        return np.array([not wanted.isdisjoint(piece) for piece in self._pieces], dtype=np.bool_)

    @functools.cached_property
    def _pieces(self) -> list[str]:
        ids = [[i] for i in range(len(self._tokenizer))]
        return self._tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
