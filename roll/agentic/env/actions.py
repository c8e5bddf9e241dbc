"""From a model's words to an action's name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from roll.configs.problems import ConfigErrors, pattern_problems

ANSWER_PATTERN = r"<answer>(.*?)</answer>"

MAX_PARSED_CHARS = 8192
"""Only this much of a text's end is searched, which bounds what a slow pattern can cost."""


class ActionParser:
    """Finds the action that a text names.

    The last match of ``pattern`` counts, because models think aloud before they commit; an earlier match is never a
    fallback. Its first group, stripped of surrounding white space, must be an action's name; upper and lower case are
    the same. ``.`` matches line breaks too. Only the last ``MAX_PARSED_CHARS`` characters are searched, so a pattern
    anchored with ``^`` does not match a longer text.

    Args:
        actions: their names.
        pattern: regular expression with at least one group.

    Raises:
        ValueError: the pattern does not compile, has no group, or two names differ only in case.
    """

    def __init__(self, actions: Iterable[str], pattern: str = ANSWER_PATTERN) -> None:
        if problems := list(pattern_problems("action_pattern", pattern)):
            raise ConfigErrors(problems)
        names = tuple(actions)
        self.pattern = re.compile(pattern, re.DOTALL)
        self._names = {name.casefold(): name for name in names}
        if len(self._names) < len(names):
            raise ValueError(f"actions: got {', '.join(names)}, expected names that differ in more than case")

    def parse(self, text: str) -> str | None:
        """The name of the action in ``text``, spelled as it is known; ``None`` if it holds no valid one."""
        answer = self.answer(text)
        return None if answer is None else self._names.get(answer.casefold())

    def answer(self, text: str) -> str | None:
        """Last match's first group, stripped; ``None`` without a match."""
        last = None
        for match in self.pattern.finditer(text, max(0, len(text) - MAX_PARSED_CHARS)):
            last = match[1]
        return None if last is None else last.strip()
