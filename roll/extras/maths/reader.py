r"""Reads a mathematical answer, LaTeX or plain text, as a value, or not at all.

``read`` either understands the whole text, by the grammar below and in ``factors.py``, or returns it as ``Text``,
which equals the same text only. Nothing is skipped: a part that has no meaning here (``\ldots``, ``\to``, an unknown
command) makes the whole a text. So a number inside an answer is never taken for the answer. What values there are is in
``roll.extras.maths.values``, when two are equal in ``roll.extras.maths.equality``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import sympy
from sympy.core.function import AppliedUndef

from roll.extras.maths import operations
from roll.extras.maths.factors import Factors, names_unit
from roll.extras.maths.phrases import APPROXIMATE, choice, meaning, number_word, plain_text, predicate
from roll.extras.maths.terms import in_order
from roll.extras.maths.tokens import (
    INFINITY,
    MAX_CHARS,
    PLAIN,
    TEXT_COMMAND,
    NotUnderstoodError,
    Token,
    normalise,
    tokens_of,
)
from roll.extras.maths.units import CURRENCIES, MULTIPLIERS, canonical_unit, changes_number, size_of
from roll.extras.maths.values import (
    DEGREE,
    PLUS_MINUS,
    Choice,
    Group,
    Quantity,
    Relation,
    Residue,
    Sets,
    Term,
    Text,
    Value,
    Word,
)

_RELATIONS = {
    "=": "=", "==": "=", "<": "<", ">": ">", r"\le": "<=", "<=": "<=", r"\ge": ">=", ">=": ">=", r"\ne": "!=",
    "!=": "!=", r"\in": "in", ":": ":", r"\equiv": "equiv", r"\approx": "=",
}  # fmt: skip


class Answer(Factors):
    """Recursive descent, the outer half."""

    def whole(self) -> Value:
        value = self.enumeration()
        return value if self._next.kind == "end" else self._fail()

    def enumeration(self) -> Value:
        """Values between commas or conjunctions; ``x = 1, 2`` is ``x = 1`` or ``x = 2``."""
        items, joints, marks = [self.relation()], set(), set()
        while self._next.kind == "joint" or self._is(",", ";"):
            joint = self._take().text
            marks.add(joint)
            if self._next.kind == "joint" and joint == ",":
                joint = self._take().text
            joints.add(joint if joint in ("and", "or") else ",")
            items.append(self.relation())
        if len(items) == 1:
            return items[0]
        if {",", ";"} <= marks:  # a list of lists
            self._fail()
        named: Literal[",", "or", "and"] = "or" if "or" in joints else "and" if joints == {"and"} else ","
        return Group(tuple(items), joined=named)

    def relation(self) -> Value:
        sides: list[Value | None] = [None if self._sign_ahead() else self.union()]
        signs: list[str] = []
        while (sign := self._sign_ahead()) is not None:
            self._take()
            signs.append(sign)
            sides.append(self.union())
        modulus = self._modulus()
        if modulus is not None:
            residue = sides[-1]
            if residue is None or signs not in ([], ["equiv"], ["="]) or None in sides:
                self._fail()
            return Residue(residue, modulus)
        if not signs:
            assert sides[0] is not None
            return sides[0]
        if "equiv" in signs:
            left = sides[0].expr if isinstance(sides[0], Term) else None
            if signs != ["equiv"] or not isinstance(left, AppliedUndef):
                self._fail()
            signs = ["="]
        return Relation(tuple(sides), tuple(signs))

    def _sign_ahead(self) -> str | None:
        if self._next[:2] == ("text", "to"):
            return ":"
        if self._next.kind != "sign" or (self._next.text == ":" and self._bars):
            return None
        return _RELATIONS.get(self._next.text)

    def _modulus(self) -> Term | None:
        if self._accept(r"\pmod"):
            return self._term(self._argument())
        if self._is("(") and self._tokens[self._at + 1][:2] == ("sign", r"\mod"):
            self._take()
            self._take()
            modulus = self._term(self.union())
            self._expect(")")
            return modulus
        return self._term(self.union()) if self._accept(r"\mod") else None

    def union(self) -> Value:
        value = self.measured()
        if not self._is(r"\cup", r"\cap", r"\backslash"):
            return value
        sign, operands = self._next.text, [value]
        while self._accept(sign):
            operands.append(self.measured())
        if self._is(r"\cup", r"\cap", r"\backslash"):
            self._fail()
        return Sets(sign.lstrip("\\"), tuple(operands))

    # --- units

    def measured(self) -> Value:
        """A sum with the units behind it, several such side by side too (``5 ft 6 in``), or a price."""
        prefix = self._currency()
        value = self.sum()
        if not isinstance(value, Term):
            return value if not prefix else self._fail()
        unit = self._unit() or prefix
        if prefix and unit != prefix:
            self._fail()
        if not unit:
            return value
        parts = [(value, unit)]
        while not prefix:
            start = self._at
            joined = self._next[:2] == ("joint", "and")
            self._at += joined
            if self._next.kind != "number":
                self._at = start
                break
            value = self._term(self.sum())
            unit = self._unit()
            if joined and (unit == parts[0][1] or size_of(unit)[1] != size_of(parts[0][1])[1]):
                self._at = start  # two values
                break
            parts.append((value, unit or self._fail()))
        return _scaled(parts)

    def _currency(self) -> str:
        sign = self._next.text
        if self._next.kind == "sign" and sign in CURRENCIES:
            self._take()
            return CURRENCIES[sign]
        return ""

    def _unit(self) -> str:
        """Words behind a number, as one canonical unit; none is ``""``."""
        if self._next.kind == "sign" and self._next.text in CURRENCIES:
            return self._currency()
        words: list[str] = []
        while True:
            token = self._next
            if (
                (token.kind == "text" and token.text != "to")
                or token.value == "marked"
                or (token.kind == "word" and (words or names_unit(token)))
            ) or (token.kind == "letter" and (words[-1][-1:] in "/°" if words else self._measures(token))):
                words.append(self._take().text)
            elif words and self._is("/") and self._tokens[self._at + 1].kind in ("text", "word", "letter"):
                self._take()
                words.append("/")
            elif words and self._accept("^"):
                words.append(f"^{self._term(self._argument()).expr}")
            else:
                break
        unit = canonical_unit(" ".join(words), self._known) if words else ""
        return self._fail() if unit is None else unit

    def _measures(self, token: Token) -> bool:
        """Tells whether a letter is a unit, because a number follows: ``3 h 20 min``."""
        after = self._tokens[self._at + 1]
        return after.kind == "number" and after.spaced and canonical_unit(token.text) is not None

    # --- terms

    def sum(self) -> Value:
        sign = self._accept("+", "-", r"\pm", r"\mp")
        first = self.product()
        if sign is None and not self._is("+", "-", r"\pm", r"\mp"):
            return first
        total = self._signed(sign, first)
        while sign := self._accept("+", "-", r"\pm", r"\mp"):
            total = Term(self._plus(total.expr, self._signed(sign, self.product()).expr))
        return total

    def _plus(self, one: Any, other: Any) -> Any:
        matrices = [isinstance(expr, sympy.MatrixBase) for expr in (one, other)]
        if any(matrices) and (not all(matrices) or one.shape != other.shape):
            self._fail()
        return one + other

    def product(self) -> Value:
        value = self.factor()
        while True:
            if sign := self._accept("*", r"\cdot", r"\times"):
                value = Term(self._times(value, self._unary(), sign.text))
            elif self._is("/", r"\div") and self._tokens[self._at + 1].kind not in ("text",):
                self._take()
                value = Term(
                    self._times(value, Term(operations.quotient(sympy.Integer(1), self._scalar(self._unary()))))
                )
            elif self._starts_factor():
                value = Term(self._times(value, self.factor()))
            else:
                return value

    def _unary(self) -> Value:
        sign = self._accept("-", "+")
        value = self.factor()
        return self._signed(sign, value) if sign else value


def _scaled(parts: list[tuple[Term, str]]) -> Value:
    """Multipliers are no units: ``5 million`` is a number."""
    if len(parts) == 1:
        (value, unit) = parts[0]
        head, _, rest = unit.partition(" ")
        if head in MULTIPLIERS:
            value = Term(value.expr * MULTIPLIERS[head])
            return Quantity(((value, rest),)) if rest else value
    return Quantity(tuple(parts))


_LABEL = re.compile(r"(?:\\text(?:bf)?\s*\{\s*)?\(?([A-J])[).:]\s*\}?\s+(\S.*)", re.DOTALL)
_OTHER_LABEL = re.compile(r"^(?:,|and\b|or\b|&|/|\\text\s*\{\s*(?:and|or))|\([A-J]\)|^[A-J]\b")
"""``(A) or (B)`` is no choice."""
_DERIVATIVE = re.compile(r"\\frac\s*\{\s*(?:d|\\partial)[^{}]*\}\s*\{\s*(?:d\s*[a-zA-Z]|\\partial)|d[a-z]/d[a-z]")
_DATE = re.compile(r"(?<![\w.])(?:\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{4})(?![\w.])")
"""No difference and no quotient: it would be the same for many dates."""
_BARE_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*")


def read(text: str, known: Collection[str] | None = ()) -> Value:
    """The value of a whole answer; a ``Text`` where a part of it is not understood.

    Args:
        known: words behind a number that are trusted to be what is counted, beside the units that are known; ``None``:
            all words are.
    """
    if len(text) > MAX_CHARS:
        return Text(" ".join(text.split()))
    plain = normalise(text)
    words = _words_of(plain)
    whole = re.fullmatch(rf"(?:{TEXT_COMMAND})\{{([^{{}}]*)\}}", plain)
    plain = whole[1].strip() if whole and _LABEL.fullmatch(whole[1].strip()) else plain
    said = meaning(words)
    if said is not None:
        return said
    letter = choice(words)
    if letter is not None:
        return Term(sympy.Symbol(letter))
    rounded = APPROXIMATE.match(plain)
    if rounded:
        return _rounded(rounded[0], plain[rounded.end() :], known) or Text(_tight(plain))
    label = _LABEL.fullmatch(plain)
    if label and not _OTHER_LABEL.search(label[2]):
        return Choice(label[1], read(label[2], known))
    unmarked = _unmarked(plain)
    if _BARE_WORDS.fullmatch(unmarked) and unmarked.lower() not in INFINITY | PLAIN:
        product = _understood(plain, known)
        if isinstance(product, Group):  # A and C
            return product
        return Word(unmarked, product.product if isinstance(product, Word) else None)
    return _understood(plain, known) or _labelled(plain, known) or Text(_tight(plain))


def readings(text: str, known: Collection[str] | None = ()) -> list[Value]:
    """All that a text may mean: ``2e-3`` is 0.002 or twice Euler's number less 3, ``3,14`` two numbers or one."""
    values = [read(text, known)]
    written = number_word(values[0])
    if written is not None:
        values.append(written)
    bold = _BOLD_LETTER.fullmatch(text.strip(" $."))
    if bold:
        values.append(Term(sympy.Symbol(bold[1])))
    said = predicate(_words_of(normalise(text))) if isinstance(values[0], Word) else None
    if said is not None:
        values.append(said)
    everywhere = _EVERYWHERE.search(text) if len(text) <= MAX_CHARS else None
    if everywhere:
        values.append(read(text[: everywhere.start()], known))
    if len(text) <= MAX_CHARS:
        exact = _ROUNDED_TOO.fullmatch(text)
        if exact and _is_exact(value := read(f"{exact[1]} {exact[2]}".strip(), known)):
            values.append(value)
        if _EULER.search(text):
            values.append(read(_EULER.sub(r"\1 e \2 ", text), known))
        comma = _DECIMAL_COMMA.fullmatch(text.strip(" $"))
        if comma and (known is not None or comma[2] == "0"):
            values.append(read(f"{comma[1]}{comma[2]}.{comma[3]}{comma[4]}", known))
    return values


def same_text(one: str, other: str) -> bool:
    """Tells whether two texts are the same but for their marks."""
    if len(one) > MAX_CHARS or len(other) > MAX_CHARS:
        return False
    return plain_text(normalise(one)) == plain_text(normalise(other)) != ""


_BOLD_LETTER = re.compile(r"\\(?:mathbf|boldsymbol|bm|pmb)\s*\{\s*\(?([A-J])\)?\s*\}")


def _is_exact(value: Value) -> bool:
    """Tells whether a value is a number, or one that is given to a letter."""
    if isinstance(value, Relation) and value.signs == ("=",) and value.sides[1] is not None:
        return _is_exact(value.sides[1])
    return isinstance(value, Quantity) or (isinstance(value, Term) and not value.expr.free_symbols)


_ROUNDED_TOO = re.compile(r"(.*[^\s=])\s*(?:\\approx|≈)\s*-?\d+\.\d+((?:\s*[a-z]+)*)[\s$.]*")
"""``\\pi \\approx 3.14``."""
_EULER = re.compile(r"(?<![\w.])(?!1e)(\d+)e([+-]\d)(?!\d)")
_EVERYWHERE = re.compile(
    r"[\s,;$]*(?:\\q?quad\s*)?(?:\(\s*)?(?:\\text\s*\{\s*,?\s*)?"
    r"(?:for (?:all|every|any|each)|\\forall)(?:\s+real(?: numbers?)?)?[\s}$]*"
    r"[a-z](?:,\s*[a-z])*(?:\s*(?:\\in|∈)\s*(?:\\mathbb\s*\{?R\}?|ℝ))?[\s)$.]*$"
)
"""``f(x) = x`` for all real ``x``."""
_DECIMAL_COMMA = re.compile(
    r"([-+−]?)(0(?=\D*\d)|\d+(?=\D*\d\d)(?!\D*\d{3}(?!\d))|\d+(?=,\d\s*[^\d\s,]))(?:,|\{,\})(\d+)((?:\s*[^\d,]*)?)"
)
"""``0,5``, ``3,14`` and ``2,5 cm``, but not ``2,5``, which may be two numbers, nor ``1,234``."""


def _rounded(mark: str, text: str, known: Collection[str] | None) -> Value | None:
    """The number behind "about": it is the reference where the reference is a decimal number or "about" too."""
    value = _understood(text, known)
    number = value.parts[0][0] if isinstance(value, Quantity) else value
    if not isinstance(number, Term) or isinstance(number.expr, sympy.MatrixBase) or not number.expr.is_Rational:
        return None
    return value if number.decimals or known is None or mark.startswith("\\approx") else None


def _labelled(plain: str, known: Collection[str] | None) -> Value | None:
    r"""The value that is given a name in words or signs: ``\angle ABC = 30^\circ``, ``\text{Area} = 5``."""
    label = _NAMED.fullmatch(plain)
    words = [] if label is None else re.findall(r"(?<!\\)\b[^\W\d_]{2,}", label[1])
    if label is None or len(words) > _MOST_WORDS or any(changes_number(w) or w.lower() in _NO_NAMES for w in words):
        return None
    value = _understood(label[2], known)
    if value is None or isinstance(value, Relation):
        return None
    return Relation((Word(plain_text(label[1]).replace(" ", "")), value), ("=",))


_MOST_WORDS = 5
_NO_NAMES = frozenset(
    [
        "let",
        "suppose",
        "assume",
        "whether",
        "check",
        "when",
        "never",
        "can",
        "cannot",
        "could",
        "unless",
        "example",
        "instance",
    ]
)
_NAMED = re.compile(
    r"((?:[a-zA-Z'|,()\s]|_\{?+\w++\}?+|\\(?:angle|triangle|overline|overrightarrow|cap|cup|mid|measuredangle|operatorname"
    r"|text(?:rm|bf|it)?|mathrm|mathbf)(?![a-zA-Z])\s*+|[{}])+?)\s*[=:]\s*([^=:]+)"
)


def _tight(text: str) -> str:
    """White space between words only."""
    text = re.sub(r"\s+(?=\\)", "", text)
    return re.sub(r"(\\[a-zA-Z]+)\s+(?![a-zA-Z])", r"\1", re.sub(r"\s*([^\w\s\\])\s*", r"\1", text))


def _words_of(text: str) -> str:
    """The words of a text in which only words are marked."""
    words = re.sub(rf"(?:{TEXT_COMMAND})\{{([^{{}}]*)\}}", r"\1", text)
    return "" if "\\" in words else words


def _unmarked(text: str) -> str:
    r"""The word in ``\text{(blue)}``."""
    while match := re.fullmatch(rf"(?:{TEXT_COMMAND})\{{([^{{}}]*)\}}|\(([^(),]*)\)", text):
        text = (match[1] if match[1] is not None else match[2]).strip().rstrip(".")
    return text


def _understood(plain: str, known: Collection[str] | None) -> Value | None:
    """The value of a text, with letters in order where they are matrices."""
    marked = re.fullmatch(rf"(?:{TEXT_COMMAND})\{{([^{{}}]*)\}}", plain)
    text = marked[1].strip() if marked and re.search(r"[\d(,]|\band\b", marked[1]) else plain
    if _DERIVATIVE.search(text) or _DATE.search(text):
        return None
    text = _without_thousands(text)
    return _parsed(in_order, text, known) or _parsed(tokens_of, text, known)


def _parsed(tokenise: Callable[[str], list[Token] | None], text: str, known: Collection[str] | None) -> Value | None:
    try:
        tokens = tokenise(text)
        return _finished(Answer(tokens, known).whole()) if tokens else None
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
        items = [_finished(item) for item in value.items]
        if value.brackets in ("", "{}"):
            items = [each for item in items for each in _both_signs(item)]
        return Group(tuple(items), value.brackets, value.joined)
    if isinstance(value, Relation):
        return Relation(tuple(None if side is None else _finished(side) for side in value.sides), value.signs)
    if isinstance(value, Sets):
        return Sets(value.sign, tuple(_finished(operand) for operand in value.operands))
    return value


def _both_signs(item: Value) -> Sequence[Value]:
    """Among other values ``±2``, or ``x = ±2``, is two of them."""
    if isinstance(item, Group) and not item.brackets:
        return item.items
    if isinstance(item, Relation) and item.signs == ("=",):
        name, value = item.sides
        if isinstance(value, Group) and not value.brackets:
            return [Relation((name, each), ("=",)) for each in value.items]
    return (item,)


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
