"""Compares a conversation that has grown by samples with the same conversation tokenised at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from roll.data.columns import IntArray
    from roll.data.renderer import ChatRenderer, Message, Tool

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
    try:
        whole = renderer.history(messages, tools)
    except Exception:  # a template may raise anything
        return "refused"
    if ids.tolist() == whole[: len(ids)].tolist():
        return None
    texts = [ids.tolist(), whole.tolist(), *([end] for end in renderer.ends)]
    grown, anew, *ends = (str(renderer.tokenizer.decode(each)) for each in texts)
    difference = _reason(grown, anew, ends)
    return None if difference in _STRIPPABLE and check == "ignore_strippable" else difference


def first_difference(
    renderer: ChatRenderer, messages: Sequence[Message], ids: IntArray, tools: Sequence[Tool] | None = None
) -> tuple[str, str]:
    """The texts of a row and of its conversation from a little before the first token in which they differ.

    Where the template refuses the conversation, the end of the row and why.
    """
    try:
        whole = renderer.history(messages, tools)
    except Exception as error:  # a template may raise anything
        return str(renderer.tokenizer.decode(ids[-_BEHIND:].tolist())), f"(refused: {error})"
    same = next((at for at, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b), min(len(ids), len(whole)))
    around = slice(max(0, same - _BEFORE), same + _BEHIND)
    return str(renderer.tokenizer.decode(ids[around].tolist())), str(renderer.tokenizer.decode(whole[around].tolist()))


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
