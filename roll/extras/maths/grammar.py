"""The grammar of a mathematical answer, from the outside in down to products.

Answers separated by commas, semicolons, "and", "or"; chains of relations; sets joined by ``\\cup``, ``\\cap``,
``\\setminus``; a value with its units; sums; products, implicit ones too. What they consist of is in
``roll.extras.maths.factors``.
"""

from __future__ import annotations

from typing import Any, Literal

import sympy
from sympy.core.function import AppliedUndef

from roll.extras.maths import operations
from roll.extras.maths.factors import Factors, names_unit
from roll.extras.maths.tokens import Token
from roll.extras.maths.units import CURRENCIES, MULTIPLIERS, canonical_unit, size_of
from roll.extras.maths.values import Group, Quantity, Relation, Residue, Sets, Term, Value

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
