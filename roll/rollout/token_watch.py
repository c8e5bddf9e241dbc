"""``tokenization_sanity_check``: rows that are trained beside the same conversations tokenised at once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from roll.data.columns import IntArray
from roll.data.renderer import ChatRenderer, Message, Tool
from roll.data.token_check import TokenCheck, TokenDifference, compare_tokens, first_difference
from roll.rollout.types import Turn

TOKENS = "tokens_"
"""Start of the keys of ``Trajectory.info`` that count compared rows."""
COMPARED = f"{TOKENS}compared"
REASONS: tuple[TokenDifference, ...] = get_args(TokenDifference)

logger = logging.getLogger(__name__)


def key_of(reason: TokenDifference) -> str:
    """The key of ``Trajectory.info`` that counts the rows which differ so."""
    return f"{TOKENS}{reason.replace(' ', '_')}"


@dataclass
class Conversation:
    """The messages of a row that grows."""

    messages: list[Message] = field(default_factory=list)
    tools: Sequence[Tool] | None = None


class TokenWatch:
    """Compares rows of one process; says each reason once and counts it always."""

    def __init__(self, renderer: ChatRenderer, check: TokenCheck) -> None:
        self._renderer = renderer
        self._check = check
        self._said: set[TokenDifference] = set()

    def watches(self, member: int) -> bool:
        """Tells whether episodes of that member are compared: those of each group's first, which cost as much as one
        more tokenisation of their conversation."""
        return self._check != "disable" and member == 0

    def compare(self, name: str, rows: Iterable[tuple[Conversation, Sequence[Turn]]]) -> dict[str, int]:
        """Counts for ``Trajectory.info``; none where no row has several turns."""
        counts: Counter[str] = Counter()
        for conversation, turns in rows:
            if len(turns) < 2:
                continue
            counts[COMPARED] += 1
            ids = np.concatenate([turns[-1].prompt_ids, turns[-1].completion.token_ids])
            messages, tools = conversation.messages, conversation.tools
            reason = compare_tokens(self._renderer, messages, ids, tools, self._check)
            if reason is not None:
                counts[key_of(reason)] += 1
                self._say(name, reason, ids, conversation)
        return {key: counts[key] for key in (COMPARED, *map(key_of, REASONS))} if counts else {}

    def _say(self, name: str, reason: TokenDifference, ids: IntArray, conversation: Conversation) -> None:
        if reason in self._said:
            return
        self._said.add(reason)
        trained, history = first_difference(self._renderer, conversation.messages, ids, conversation.tools)
        logger.warning(
            "tokenization_sanity_check: %s: what is trained differs from the conversation tokenised at once (%s): it "
            "has %r, the conversation %r; sampled tokens stay as they are, further differences of this kind are "
            "counted alone",
            name,
            reason,
            trained,
            history,
        )
