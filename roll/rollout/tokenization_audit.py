"""``tokenization_sanity_check``: compares a conversation of sampled tokens with the same one tokenised at once."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np

from roll.data.columns import IntArray
from roll.data.identity import vocabulary_ids
from roll.data.renderer import ChatRenderer, Message, Tool
from roll.rollout.types import Turn
from roll.utils.foreign import Fault

logger = logging.getLogger(__name__)


TokenCheck: TypeAlias = Literal["strict", "ignore_strippable", "disable"]
"""Differences that count: every one, those of the text beyond white space, or none."""
TokenDifference: TypeAlias = Literal["white space", "other tokens", "reasoning", "rewritten", "refused"]
"""Reason why ids differ: in white space alone; the same text in other tokens; the history lacks reasoning, or has an
empty one; anything else, such as calls whose arguments are written anew; the template refuses the conversation, as
some do answers to malformed calls and several calls of a turn."""

_STRIPPABLE: tuple[TokenDifference, ...] = ("white space", "other tokens")
_BEFORE, _BEHIND = 4, 12
"""Tokens around a difference that are shown."""
_SPACE = re.compile(r"\s+")


def compare_tokens(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    ids: IntArray,
    tools: Sequence[Tool] | None = None,
    check: TokenCheck = "strict",
) -> TokenDifference | None:
    """Difference of a row that is trained from its conversation; ``None`` if there is none, or none that counts.

    Args:
        messages: the whole conversation, the last of which is the assistant's.
        ids: what is trained, shape [tokens], its last sampled; what closes that turn may be missing.
    """
    if check == "disable":
        return None
    with Fault() as fault:  # a template may raise anything
        whole = renderer.history(messages, tools)
    if fault.error is not None:
        return "refused"
    if ids.tolist() == whole[: len(ids)].tolist():
        return None
    ends = (np.array([end]) for end in renderer.ends)
    grown, anew, *marks = (_shown(renderer, each) for each in (ids, whole, *ends))
    difference = _reason(grown, anew, marks)
    return None if difference in _STRIPPABLE and check == "ignore_strippable" else difference


def first_difference(
    renderer: ChatRenderer, messages: Sequence[Message], ids: IntArray, tools: Sequence[Tool] | None = None
) -> tuple[str, str]:
    """The texts of a row and of its conversation from a little before the first token in which they differ.

    Where the template refuses the conversation, the end of the row and why.
    """
    with Fault() as fault:  # a template may raise anything
        whole = renderer.history(messages, tools)
    if fault.error is not None:
        return _shown(renderer, ids[-_BEHIND:]), f"(refused: {fault.error})"
    same = next((at for at, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b), min(len(ids), len(whole)))
    around = slice(max(0, same - _BEFORE), same + _BEHIND)
    return _shown(renderer, ids[around]), _shown(renderer, whole[around])


def _shown(renderer: ChatRenderer, ids: IntArray) -> str:
    return str(renderer.tokenizer.decode(vocabulary_ids(ids).tolist()))


def _reason(grown: str, whole: str, ends: Sequence[str]) -> TokenDifference:
    """Reason why two texts differ, the second of which may go on behind the first, by the end of a turn alone.

    Args:
        ends: texts of the tokens that end a turn, and so reasoning that was cut off.
    """
    if whole.startswith(grown):
        return "other tokens"
    if _SPACE.sub("", whole).startswith(_SPACE.sub("", grown)):
        return "white space"
    over = "|".join(["</think>", *(f"(?={re.escape(end)})" for end in ends), r"\Z"])
    reasoning = re.compile(f"<think>.*?(?:{over})", re.DOTALL)
    bare, bare_whole = (_SPACE.sub("", reasoning.sub("", text)) for text in (grown, whole))
    rest = bare_whole[len(bare) :]
    same = bare_whole.startswith(bare) and (not rest or rest.startswith(tuple(ends)))
    return "reasoning" if same else "rewritten"


TOKENS = "tokens_"
"""Start of the keys of ``Trajectory.info`` that count compared rows."""
COMPARED = f"{TOKENS}compared"
REASONS: tuple[TokenDifference, ...] = get_args(TokenDifference)


def key_of(reason: TokenDifference) -> str:
    """The key of ``Trajectory.info`` that counts the rows which differ so."""
    return f"{TOKENS}{reason.replace(' ', '_')}"


@dataclass
class Conversation:
    """The messages of a row that grows."""

    messages: list[Message] = field(default_factory=list)
    tools: Sequence[Tool] | None = None


class TokenizationAudit:
    """Compares rows of one process; logs each reason once and always counts it."""

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
            "tokenization_sanity_check: %s: the trained tokens differ from the conversation tokenised at once (%s): "
            "trained %r, conversation %r; the sampled tokens are kept, and further differences of this kind are only "
            "counted",
            name,
            reason,
            trained,
            history,
        )
