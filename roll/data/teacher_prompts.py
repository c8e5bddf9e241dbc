"""Text that a teacher reads instead of a prompt: the question, with columns of the row that the policy does not get."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from roll.data.columns import IntArray
from roll.data.files.rows import Problems
from roll.data.prompt_rows import RowError, lookup
from roll.data.prompts import Prompt
from roll.data.renderer import ChatRenderer

_PLACEHOLDER = re.compile(r"(?<![\w\\{])\{([\w.]+)\}(?!\})")  # not the braces of \boxed{answer}
_BLOCK = 1024
"""Prompts that are tokenised together."""


class TeacherPrompts:
    """Fills a template with a row and renders it.

    Args:
        template: text of the last message; ``{prompt}`` is what it is for the policy, ``{column}`` a column of the row.
        renderer: the policy's: the teacher reads the same tokens.
        response: column of the reference answer.
        column_length: most tokens of a column; what is behind them is cut off.
    """

    def __init__(
        self, template: str, renderer: ChatRenderer, response: str | None = None, column_length: int | None = None
    ) -> None:
        self._template = template
        self._renderer = renderer
        self._response = response
        self._column_length = column_length

    def messages(self, prompt: Prompt) -> tuple[Mapping[str, str], ...]:
        """The conversation that the teacher reads.

        Raises:
            RowError: the row has no such column, or no text or number in it.
        """
        *before, question = prompt.messages
        values = {**prompt.extra_info, "prompt": question["content"]}
        if self._response is not None:
            values.setdefault(self._response, prompt.ground_truth)

        def fill(place: re.Match[str]) -> str:
            value = lookup(values, place[1])
            if not isinstance(value, str | int | float):
                raise RowError(f"column {place[1]!r}: {value!r:.60}, expected text or a number")
            return str(value) if place[1] == "prompt" else self._cut(str(value))

        return (*before, {**question, "content": _PLACEHOLDER.sub(fill, self._template)})

    def _cut(self, text: str) -> str:
        """The text of its first ``column_length`` tokens; of a character that they only begin, nothing."""
        if self._column_length is None:
            return text
        tokenizer = self._renderer.tokenizer
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= self._column_length:
            return text
        kept: Any = tokenizer.decode(ids[: self._column_length], skip_special_tokens=False)
        return str(kept if text.startswith(kept) else kept.rstrip("\ufffd"))

    def ids(self, prompt: Prompt) -> IntArray:
        """Token ids of the conversation, with the assistant's turn opened."""
        return self._renderer.prompt(self.messages(prompt))

    def check(self, prompts: Sequence[Prompt], most: int) -> None:
        """Fills the template with every row.

        Raises:
            DataError: what is missing in which row, and which prompt has more than ``most`` tokens.
        """
        problems = Problems()
        for start in range(0, len(prompts), _BLOCK):
            filled = {}
            for prompt in prompts[start : start + _BLOCK]:
                try:
                    filled[prompt.id] = self.messages(prompt)
                except RowError as error:
                    problems.add(prompt.id, f"teacher_prompt: {error}")
            for name, ids in zip(filled, self._renderer.prompts(list(filled.values())), strict=True):
                if len(ids) > most:
                    expected = f"expected at most {most:,}: sequence_length minus the longest response"
                    problems.add(name, f"teacher_prompt: {len(ids):,} tokens, {expected}")
        problems.raise_any()
