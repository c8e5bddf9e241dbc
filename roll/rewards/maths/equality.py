"""Equality of mathematical answers: when two values of ``roll.rewards.maths.values`` are the same answer.

What is not certain is unequal: a policy that finds two answers which are taken for one earns rewards for nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy

from roll.rewards.maths.sets import MIRROR, as_set, exprs_of, variables_of
from roll.rewards.maths.terms import same_term, symbols_of
from roll.rewards.maths.values import (
    PERCENT,
    Choice,
    Digits,
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


def same(gold: Value, answer: Value) -> bool:
    """Tells whether an answer is the reference answer."""
    if gold == answer and not isinstance(gold, Term):
        return True
    if isinstance(gold, Choice) or isinstance(answer, Choice):
        return _same_choice(gold, answer)
    gold, answer = _stripped(gold), _stripped(answer)
    if isinstance(gold, Relation) != isinstance(answer, Relation):
        gold, answer = _unwrapped(gold), _unwrapped(answer)
    if isinstance(gold, Word) and isinstance(answer, Word):
        return _same_word(gold.text, answer.text)
    gold, answer = (v.product if isinstance(v, Word) and v.product is not None else v for v in (gold, answer))
    if isinstance(gold, Quantity) or isinstance(answer, Quantity):
        return _same_quantity(gold, answer)
    if isinstance(gold, Term) and isinstance(answer, Term):
        return same_term(gold, answer)
    if type(gold) is type(answer):
        comparison: Callable[[Any, Any], bool] | None = _COMPARISONS.get(type(gold))
        if comparison is not None and comparison(gold, answer):
            return True
    elif isinstance(gold, Term) or isinstance(answer, Term):
        return _same_column(gold, answer)
    return _same_set(gold, answer)


# --- wrappings --------------------------------------------------------------------------------------------------------


def _stripped(value: Value) -> Value:
    """``((1, 2))`` is ``(1, 2)``; ``x ∈ A`` is ``A``."""
    while isinstance(value, Group) and value.brackets == "()" and len(value.items) == 1:
        value = value.items[0]
    if isinstance(value, Relation) and value.signs == ("in",) and _is_name(value.sides[0]) and value.sides[1]:
        return value.sides[1]
    return value


def _is_name(value: Value | None) -> bool:
    if isinstance(value, Term):
        return bool(value.expr.is_Symbol or isinstance(value.expr, sympy.core.function.AppliedUndef))
    return isinstance(value, Word)


def _unwrapped(value: Value) -> Value:
    """The right side of ``x = 5`` and of ``3 + 4 = 7``; a chain must be true."""
    if not isinstance(value, Relation) or set(value.signs) != {"="} or None in value.sides:
        return value
    sides = [side for side in value.sides if side is not None]
    named = _is_name(sides[0])
    if not named and not (isinstance(sides[0], Term) and not symbols_of(sides[0].expr)):
        return value
    rest = sides[1:] if named else sides
    if not all(same(rest[-1], side) for side in rest[:-1]):
        return value
    return rest[-1]


def _same_choice(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Choice) and isinstance(answer, Choice):
        return gold.letter == answer.letter and same(gold.content, answer.content)
    labelled, other = (gold, answer) if isinstance(gold, Choice) else (answer, gold)
    assert isinstance(labelled, Choice)
    letter = Term(sympy.Symbol(labelled.letter))
    return same(letter, other) or (labelled is gold and same(labelled.content, other))


def _same_word(gold: str, answer: str) -> bool:
    """``No`` is ``no``; ``AB`` is not ``ab``."""
    if len(gold) < 3 and gold.isupper() != answer.isupper():
        return False
    return gold.casefold() == answer.casefold()


def _same_quantity(gold: Value, answer: Value) -> bool:
    """Units must be the same where both sides have one."""
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        return len(gold.parts) == len(answer.parts) and all(
            unit == other and same_term(term, value)
            for (term, unit), (value, other) in zip(gold.parts, answer.parts, strict=True)
        )
    measured, plain = (gold, answer) if isinstance(gold, Quantity) else (answer, gold)
    assert isinstance(measured, Quantity)
    if len(measured.parts) != 1 or not isinstance(plain, Term) or plain.expr.has(PERCENT):
        return False
    term, unit = measured.parts[0]
    # ``5 m`` without a mark is a product.
    return same_term(term, plain) or (len(unit) == 1 and same_term(Term(term.expr * sympy.Symbol(unit)), plain))


# --- several values ---------------------------------------------------------------------------------------------------


def _same_group(gold: Group, answer: Group) -> bool:
    kinds = gold.brackets, answer.brackets
    if "{}" in kinds:
        if not set(kinds) <= {"{}", ""}:
            return False
        return _subset(gold.items, answer.items) and _subset(answer.items, gold.items)
    if len(gold.items) != len(answer.items):
        return False
    if kinds == ("", ""):
        return _same_enumeration(gold, answer)
    if kinds[0] != kinds[1] and not _both_coordinates(gold, answer):
        return False
    return all(same(a, b) for a, b in zip(gold.items, answer.items, strict=True))


def _both_coordinates(gold: Group, answer: Group) -> bool:
    """``(1, 2)``, ``⟨1, 2⟩`` and ``1, 2`` name a point; ``[1, 2, 3]`` too, since it is no interval."""
    points = {"()", "<>", ""} | ({"[]"} if len(gold.items) != 2 else set())
    return {gold.brackets, answer.brackets} <= points


def _subset(items: Sequence[Value], others: Sequence[Value]) -> bool:
    return all(any(same(other, item) for other in others) for item in items)


def _same_enumeration(gold: Group, answer: Group) -> bool:
    """In any order, unless names on one side say which value is whose."""
    unlike = gold.joined != answer.joined and "or" in (gold.joined, answer.joined)
    if unlike and not (_alternatives(gold) and _alternatives(answer)):
        return False
    names = [_names(group) for group in (gold, answer)]
    if any(len(set(own)) > 1 for own in names) and not all(names):
        return all(same(a, b) for a, b in zip(gold.items, answer.items, strict=True))
    rest = list(answer.items)
    for item in gold.items:
        found = next((index for index, other in enumerate(rest) if same(item, other)), None)
        if found is None:
            return False
        rest.pop(found)
    return True


def _alternatives(group: Group) -> bool:
    """Tells whether the items are values that one thing may have: then "and", "or" and a comma say the same."""
    equations = all(item.signs == ("=",) for item in group.items if isinstance(item, Relation))
    symbols = any(isinstance(item, Term) and item.expr.is_Symbol for item in group.items)
    return equations and not symbols and len(set(_names(group))) <= 1


def _names(group: Group) -> list[Value | None]:
    return [item.sides[0] for item in group.items if isinstance(item, Relation)]


def _same_column(gold: Value, answer: Value) -> bool:
    """A column is a point or a vector: ``(1, 2)``, ``⟨1, 2⟩``."""
    matrix, group = (gold, answer) if isinstance(gold, Term) else (answer, gold)
    if not isinstance(matrix, Term) or not isinstance(group, Group) or group.brackets not in ("()", "<>"):
        return False
    if not isinstance(matrix.expr, sympy.MatrixBase) or matrix.expr.shape != (len(group.items), 1):
        return False
    return all(same(Term(entry), item) for entry, item in zip(matrix.expr.flat(), group.items, strict=True))


# --- relations, sets, residues ----------------------------------------------------------------------------------------


def _same_relation(gold: Relation, answer: Relation) -> bool:
    if len(gold.signs) != len(answer.signs):
        return _both_unwrapped(gold, answer)
    if _same_sides(gold.sides, answer.sides) and gold.signs == answer.signs:
        return True
    if all(sign in MIRROR for sign in answer.signs):
        mirrored = tuple(MIRROR[sign] for sign in reversed(answer.signs))
        if gold.signs == mirrored and _same_sides(gold.sides, answer.sides[::-1]):
            return True
    if len(gold.signs) == 1:
        return _same_difference(gold, answer)
    return _both_unwrapped(gold, answer)


def _both_unwrapped(gold: Relation, answer: Relation) -> bool:
    """Two chains of equalities with the same name in front."""
    one, other = _unwrapped(gold), _unwrapped(answer)
    if isinstance(one, Relation) or isinstance(other, Relation):
        return False
    first, second = gold.sides[0], answer.sides[0]
    if _is_name(first) and _is_name(second):
        assert first is not None and second is not None
        return same(first, second) and same(one, other)
    return same(one, other)


def _same_sides(gold: Sequence[Value | None], answer: Sequence[Value | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and same(a, b))
        for a, b in zip(gold, answer, strict=True)
    )


def _same_difference(gold: Relation, answer: Relation) -> bool:
    """``y = 2x + 1`` and ``2x - y + 1 = 0``: the differences of the sides are proportional, by a constant."""
    sides = exprs_of((*gold.sides, *answer.sides))
    first, second = gold.signs[0], answer.signs[0]
    if sides is None or first not in MIRROR or second not in MIRROR:
        return False
    one, other = sides[0] - sides[1], sides[2] - sides[3]
    if not (one.is_commutative and other.is_commutative):
        return False
    if symbols_of(one) != symbols_of(other) or not symbols_of(one):
        return False
    powers = one.atoms(sympy.Pow) | other.atoms(sympy.Pow)
    degree = max((abs(power.exp) for power in powers if power.exp.is_Integer), default=1)
    if max(_terms(one), _terms(other), degree) > _MOST_TERMS:
        return False
    ratio = sympy.cancel(one / other)
    if not (ratio.is_number and ratio.is_finite and ratio.is_real) or ratio == 0:
        return False
    return first == (second if ratio > 0 else MIRROR[second])


def _same_set(gold: Value, answer: Value) -> bool:
    kinds = (Sets, Group, Relation)
    if not isinstance(gold, kinds) or not isinstance(answer, kinds):
        return False
    variables = [variables_of(value) for value in (gold, answer) if isinstance(value, Relation)]
    if len(variables) == 2 and variables[0] != variables[1]:
        return False
    if isinstance(gold, Group) and isinstance(answer, Group) and gold.brackets and answer.brackets:
        return False  # members were compared
    one, other = as_set(gold), as_set(answer)
    return one is not None and other is not None and bool(one == other)


def _same_sets(gold: Sets, answer: Sets) -> bool:
    if gold.sign != answer.sign or len(gold.operands) != len(answer.operands) or not gold.operands:
        return False
    if gold.sign == "backslash":
        return all(same(a, b) for a, b in zip(gold.operands, answer.operands, strict=True))
    return _subset(gold.operands, answer.operands) and _subset(answer.operands, gold.operands)


def _same_residue(gold: Residue, answer: Residue) -> bool:
    if not same_term(gold.modulus, answer.modulus):
        return False
    if same(gold.value, answer.value):
        return True
    numbers = exprs_of((gold.value, answer.value, gold.modulus))
    if numbers is None or not all(number.is_Integer for number in numbers) or numbers[2] == 0:
        return False
    return bool((numbers[0] - numbers[1]) % numbers[2] == 0)


def _same_digits(gold: Digits, answer: Digits) -> bool:
    return gold.base == answer.base and gold.digits.lstrip("0") == answer.digits.lstrip("0")


_COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    Group: _same_group,
    Relation: _same_relation,
    Sets: _same_sets,
    Residue: _same_residue,
    Digits: _same_digits,
}


# --- names ------------------------------------------------------------------------------------------------------------


def name_of(value: Value) -> str:
    """One text for equal answers, as far as that is cheap: 1/2, 0.5 and x = 1/2 give ``1/2``."""
    value = _unwrapped(_stripped(value))
    if isinstance(value, Text):
        return value.text
    if isinstance(value, Word):
        return value.text
    if isinstance(value, Term):
        return _term_name(value.expr)
    if isinstance(value, Quantity):
        return " ".join(f"{_term_name(term.expr)} {unit}" if len(value.parts) > 1 else _term_name(term.expr)
                        for term, unit in value.parts)  # fmt: skip
    if isinstance(value, Group):
        names = [name_of(item) for item in value.items]
        if value.brackets in ("", "{}"):
            return f"{{{', '.join(sorted(names))}}}"
        return f"{value.brackets[0]}{', '.join(names)}{value.brackets[1]}"
    if isinstance(value, Relation):
        sides = ["" if side is None else name_of(side) for side in value.sides]
        return "".join(side + sign for side, sign in zip(sides, (*value.signs, ""), strict=True))
    if isinstance(value, Sets):
        return f" {value.sign} ".join(map(name_of, value.operands)) or value.sign
    if isinstance(value, Residue):
        return f"{name_of(value.value)} mod {_term_name(value.modulus.expr)}"
    return f"{value.digits}_{value.base}" if isinstance(value, Digits) else value.letter


_MOST_TERMS = 200
"""Of a term that is expanded or cancelled."""


def _terms(expr: Any) -> int:
    """Terms that a term has when it is expanded, at most."""
    if expr.is_Add:
        return sum(map(_terms, expr.args))
    if expr.is_Mul:
        return math.prod(map(_terms, expr.args))
    if expr.is_Pow and expr.exp.is_Integer and (inner := _terms(expr.base)) > 1:
        power = min(abs(int(expr.exp)), _MOST_TERMS)
        return math.comb(inner + power - 1, power) if expr.is_commutative else inner**power
    return max(map(_terms, expr.args), default=1)


def _term_name(expr: Any) -> str:
    expr = expr.subs(PERCENT, sympy.Rational(1, 100))
    with contextlib.suppress(Exception):  # SymPy raises anything; the unexpanded term is a good enough name
        expr = expr.expand() if _terms(expr) <= _MOST_TERMS else expr
    try:
        return str(expr)
    except ValueError:  # an integer with more digits than Python converts
        return f"number {hash(expr)}"
