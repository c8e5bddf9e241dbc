"""Text that spells a control token stays text: hidden while a template is rendered, then encoded letter by letter."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


_BARS = "|｜"
_NEVER = "(?!)"


class ControlText:
    """Hides control texts in messages of users and tools, and encodes them as plain letters.

    Control tokens are those that the tokenizer calls special, and added tokens with a bar in them, as ``<｜User｜>``,
    which DeepSeek's tokenizer does not call so. Others, such as ``<think>``, are words that a message may use.

    A hidden text stands for itself while a template is rendered: letters and digits that no filter changes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._tokens = {
            str(t.content): t for t in added.values() if t.special or any(bar in t.content for bar in _BARS)
        }
        self.ids = frozenset(index for index, token in added.items() if str(token.content) in self._tokens)
        self._texts = sorted(self._tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, self._texts)) or _NEVER)
        self._nonce = f"q{secrets.token_hex(8)}q"
        self._hidden = re.compile(f"{self._nonce}([0-9]+)q")
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self._core: Tokenizer | None = None
        self._folded = self._fold()

    def hide(self, value: Any) -> Any:
        """The value, a text or texts in lists and objects, with every control text replaced by its stand-in."""
        if isinstance(value, str):
            if self._control.search(value):
                return self._control.sub(self._stand_in, value)
            if self._folded and self._becomes_control(value):
                return (
                    f"{value}{self._nonce}{len(self._texts)}q"  # stands for nothing: the text is taken by its letters
                )
            return value
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def show(self, text: str) -> str:
        """The text with stand-ins turned back."""
        if self._nonce not in text:
            return text
        return self._hidden.sub(lambda found: (*self._texts, "")[int(found[1])], text)

    def count(self, text: str) -> int:
        """Counts the control tokens that a text of somebody's spells out."""
        return len(self._control.findall(text))

    def hides(self, text: str) -> bool:
        """Tells whether there is a stand-in in a text."""
        return self._nonce in text

    def first(self, text: str) -> int:
        """Index of the first control token of a rendered text, its length if there is none."""
        found = self._control.search(text)
        return found.start() if found else len(text)

    def last_start(self, text: str) -> int:
        """Index of the last control token of a rendered text, 0 if there is none."""
        return max((found.start() for found in self._control.finditer(text)), default=0)

    def token_start(self, text: str, at: int) -> int:
        """An index of a rendered text, moved to the start of the control token that it is inside of."""
        inside = (found.start() for found in self._control.finditer(text) if found.start() < at < found.end())
        return next(inside, at)

    def between(self, text: str) -> list[str]:
        """The pieces of a rendered text between its control tokens."""
        return self._control.split(text)

    def lead(self, text: str) -> tuple[str, str] | None:
        """White space and the control token behind it that a rendered text begins with."""
        found = self._control.search(text)
        return (text[: found.start()], found[0]) if found and not text[: found.start()].strip() else None

    def trail(self, text: str) -> tuple[str, str] | None:
        """A rendered text up to the control token at its end, and that token; white space may stand behind it."""
        start = self.last_start(text)
        found = self._control.match(text, start)
        return (text[:start], found[0]) if found and not text[found.end() :].strip() else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text: control texts of the template are control tokens, hidden ones are letters."""
        if self._nonce not in text:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        ids: list[int] = []
        for piece in self._pieces(text):
            if self._nonce in piece:
                ids += self._literal(self.show(piece))
            else:
                ids += self._tokenizer.encode(piece, add_special_tokens=False)
        return ids

    def spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text in which nothing is a control token, and the characters that each stands for.

        For a fast tokenizer; tokens of one character have the same span.
        """
        core = self._literal_core()
        assert core is not None, "a fast tokenizer has one"
        (encoding,) = core.encode_batch([text], add_special_tokens=False)  # as in _encode_literal
        return list(encoding.ids), list(encoding.offsets)

    def _fold(self) -> re.Pattern[str] | None:
        """Pattern of control tokens as they look once normalised, if the tokenizer looks for them there."""
        normalizer = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "normalizer", None)
        texts = [text for text in self._texts if self._tokens[text].normalized]
        if normalizer is None or not texts:
            return None
        return re.compile("|".join(re.escape(normalizer.normalize_str(text)) for text in texts))

    def _becomes_control(self, text: str) -> bool:
        """Tells whether a text that spells no control token does once it is normalised."""
        assert self._folded is not None, "else there is nothing to become"
        return bool(self._folded.search(self._tokenizer.backend_tokenizer.normalizer.normalize_str(text)))

    def _stand_in(self, found: re.Match[str]) -> str:
        return f"{self._nonce}{self._numbers[found[0]]}q"

    def _pieces(self, text: str) -> Iterator[str]:
        """The text, cut at control tokens beside which something is hidden, without white space that they eat."""
        ordinary, position, eats = "", 0, False
        for found in [*self._control.finditer(text), None]:
            section = text[position : found.start() if found else len(text)]
            if self._nonce in section:
                section = section.lstrip() if eats else section
                section = section.rstrip() if found and self._tokens[found[0]].lstrip else section
                yield from filter(None, (ordinary, section))
                ordinary = ""
            else:
                ordinary += section
            if found:
                ordinary, position, eats = ordinary + found[0], found.end(), self._tokens[found[0]].rstrip
        yield from filter(None, (ordinary,))

    def _literal(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is a control token."""
        ids = self._encode_literal(text)
        if self.ids.isdisjoint(ids):
            return ids
        # The model's own vocabulary has the text as a word: letter by letter it has not.
        return [index for letter in text for index in self._encode_literal(letter)]

    def _encode_literal(self, text: str) -> list[int]:
        if (core := self._literal_core()) is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        (encoding,) = core.encode_batch_fast(
            [text], add_special_tokens=False
        )  # lets other threads run; encode does not
        return list(encoding.ids)

    def _literal_core(self) -> Tokenizer | None:
        """A copy of the fast tokenizer that looks for no control token.

        Threads may share the original, so that its own switch must stay as it is.
        """
        if self._core is None and (core := getattr(self._tokenizer, "backend_tokenizer", None)) is not None:
            spec = json.loads(core.to_str())
            for token in spec["added_tokens"]:
                token["special"] = token["content"] in self._tokens
            copy = type(core).from_str(json.dumps(spec | {"truncation": None, "padding": None, "post_processor": None}))
            copy.encode_special_tokens = True
            self._core = copy
        return self._core
