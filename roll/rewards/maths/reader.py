r"""Reads a mathematical answer, LaTeX or plain text, as a value, or not at all.

``read`` either understands the whole text, by the grammar in ``roll.rewards.maths.grammar``, or returns it as ``Text``,
which equals the same text only. Nothing is skipped: a part that has no meaning here (``\ldots``, ``\to``, an unknown
command) makes the whole a text. So a number inside an answer is never taken for the answer. What values there are is in
``roll.rewards.maths.values``, when two are equal in ``roll.rewards.maths.equality``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import sympy

from roll.rewards.maths.grammar import Answer
from roll.rewards.maths.ordered import in_order
from roll.rewards.maths.tokens import (
    INFINITY,
    MAX_CHARS,
    PLAIN,
    TEXT_COMMAND,
    NotUnderstoodError,
    Token,
    normalise,
    tokens_of,
)
from roll.rewards.maths.values import (
    DEGREE,
    PLUS_MINUS,
    Choice,
    Group,
    Quantity,
    Relation,
    Sets,
    Term,
    Text,
    Value,
    Word,
)

_LABEL = re.compile(r"(?:\\text(?:bf)?\s*\{\s*)?\(?([A-J])[).:]\s*\}?\s+(\S.*)", re.DOTALL)
_OTHER_LABEL = re.compile(r"^(?:,|and\b|or\b|&|/|\\text\s*\{\s*(?:and|or))|\([A-J]\)|^[A-J]\b")
"""``(A) or (B)`` is no choice."""
_DERIVATIVE = re.compile(r"\\frac\s*\{\s*(?:d|\\partial)[^{}]*\}\s*\{\s*(?:d\s*[a-zA-Z]|\\partial)|d[a-z]/d[a-z]")
_DATE = re.compile(r"(?<![\w.])(?:\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{4})(?![\w.])")
"""No difference and no quotient: it would be the same for many dates."""
_BARE_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*")


def read(text: str) -> Value:
    """The value of a whole answer; a ``Text`` where a part of it is not understood."""
    if len(text) > MAX_CHARS:
        return Text(" ".join(text.split()))
    plain = normalise(text)
    label = _LABEL.fullmatch(plain)
    if label and not _OTHER_LABEL.search(label[2]):
        return Choice(label[1], read(label[2]))
    unmarked = _unmarked(plain)
    if _BARE_WORDS.fullmatch(unmarked) and unmarked.lower() not in INFINITY | PLAIN:
        product = _understood(plain)
        return Word(unmarked, product.product if isinstance(product, Word) else None)
    return _understood(plain) or Text(_tight(plain))


def _tight(text: str) -> str:
    """White space between words only."""
    text = re.sub(r"\s+(?=\\)", "", text)
    return re.sub(r"(\\[a-zA-Z]+)\s+(?![a-zA-Z])", r"\1", re.sub(r"\s*([^\w\s\\])\s*", r"\1", text))


def _unmarked(text: str) -> str:
    r"""The word in ``\text{(blue)}``."""
    while match := re.fullmatch(rf"(?:{TEXT_COMMAND})\{{([^{{}}]*)\}}|\(([^(),]*)\)", text):
        text = (match[1] if match[1] is not None else match[2]).strip().rstrip(".")
    return text


def _understood(plain: str) -> Value | None:
    """The value of a text, with letters in order where they are matrices."""
    marked = re.fullmatch(rf"(?:{TEXT_COMMAND})\{{([^{{}}]*)\}}", plain)
    text = marked[1].strip() if marked and re.search(r"[\d(]", marked[1]) else plain
    if _DERIVATIVE.search(text) or _DATE.search(text):
        return None
    text = _without_thousands(text)
    return _parsed(in_order, text) or _parsed(tokens_of, text)


def _parsed(tokenise: Callable[[str], list[Token] | None], text: str) -> Value | None:
    try:
        tokens = tokenise(text)
        return _finished(Answer(tokens).whole()) if tokens else None
    # SymPy raises anything where a term has no value; recursion ends at Python's limit.
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None


def _without_thousands(text: str) -> str:
    """Commas between digits separate thousands outside of brackets only: ``(1,200)`` has two members."""
    depth, parts = 0, []
    for part in re.split(r"(\\?[(\[{]|\\?[)\]}]|\\[lr]angle)", text):
        if re.fullmatch(r"\\?[(\[{]|\\langle", part):
            depth += part != "{"
        elif re.fullmatch(r"\\?[)\]}]|\\rangle", part):
            depth -= part != "}"
        elif depth > 0 or not re.search(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", part):
            part = part.replace(",", ", ")
        parts.append(part)
    return "".join(parts)


def _finished(value: Value) -> Value:
    """``±`` as two values, degrees as a unit."""
    if isinstance(value, Term):
        expr = value.expr
        if not isinstance(expr, sympy.MatrixBase):
            if expr.has(PLUS_MINUS):
                return Group(tuple(_finished(Term(expr.subs(PLUS_MINUS, sign))) for sign in (1, -1)))
            if expr.has(DEGREE):
                return Quantity((_with_degree(value, ""),))
            if expr.has(sympy.zoo, sympy.nan):
                raise NotUnderstoodError("no value")
        return value
    if isinstance(value, Quantity):
        return Quantity(tuple(_with_degree(term, unit) for term, unit in value.parts))
    if isinstance(value, Group):
        return Group(tuple(_finished(item) for item in value.items), value.brackets, value.joined)
    if isinstance(value, Relation):
        return Relation(tuple(None if side is None else _finished(side) for side in value.sides), value.signs)
    if isinstance(value, Sets):
        return Sets(value.sign, tuple(_finished(operand) for operand in value.operands))
    return value


def _with_degree(term: Term, unit: str) -> tuple[Term, str]:
    """The degrees of an angle or, with a letter behind, of a temperature."""
    if not term.expr.has(DEGREE):
        return term, unit
    rest = term.expr / DEGREE
    for scale in "CF":
        if not unit and rest.has(sympy.Symbol(scale)):
            rest, unit = rest / sympy.Symbol(scale), scale
    if rest.has(DEGREE):
        raise NotUnderstoodError("degrees among other things")
    return Term(rest, term.decimals), f"°{unit.lstrip('°').upper()}"
