"""Equality of mathematical answers: when two values of ``roll.rewards.maths.values`` are the same answer.

What is not certain is unequal: a policy that finds two answers which are taken for one earns rewards for nothing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import sympy

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

MIN_DECIMALS = 6
"""A decimal number with fewer is exact: 0.33 is not 1/3. Numbers of which one has as many are compared to its decimals,
and six significant digits."""
MAX_DECIMALS = 12
"""Of floats the last decimals are noise."""
_PRECISION = 40
_POINTS = tuple(
    tuple(sympy.Rational(real) + sympy.Rational(imaginary) * sympy.I for real, imaginary in numbers)
    for numbers in (
        (("1.2345", "0"), ("0.7182", "0"), ("2.4142", "0"), ("0.5772", "0"), ("1.9021", "0")),
        (("-0.8346", "0"), ("1.4513", "0"), ("-1.7724", "0"), ("0.2614", "0"), ("-2.2361", "0")),
        (("0.4142", "0.9159"), ("-0.7391", "0.3029"), ("1.1319", "-0.6181")),
    )
)
"""Values for the symbols, negative and complex ones too: the square root of x² is not x."""
_ENOUGH = 2
"""Points at which two terms must agree; a term may have no value at some."""


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
        return _same_term(gold, answer) or _same_column(gold, answer)
    if type(gold) is type(answer):
        comparison: Callable[[Any, Any], bool] | None = _COMPARISONS.get(type(gold))
        if comparison is not None and comparison(gold, answer):
            return True
    elif (isinstance(gold, Group) and isinstance(answer, Term)) or (
        isinstance(gold, Term) and isinstance(answer, Group)
    ):
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
    if not named and not (isinstance(sides[0], Term) and not _symbols(sides[0].expr)):
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


# --- numbers and terms ------------------------------------------------------------------------------------------------


def _symbols(expr: Any) -> set[Any]:
    return (expr.free_symbols - {PERCENT}) | expr.atoms(sympy.core.function.AppliedUndef)


def _same_term(gold: Term, answer: Term) -> bool:
    one, other = gold.expr, answer.expr
    if isinstance(one, sympy.MatrixBase) or isinstance(other, sympy.MatrixBase):
        return (
            isinstance(one, sympy.MatrixBase)
            and isinstance(other, sympy.MatrixBase)
            and one.shape == other.shape
            and all(_same_expr(a, b) for a, b in zip(one.flat(), other.flat(), strict=True))
        )
    if one.has(PERCENT) or other.has(PERCENT):
        return _same_percentage(gold, answer)
    given = [decimals for decimals in (gold.decimals, answer.decimals) if decimals >= MIN_DECIMALS]
    if given and one.is_number and other.is_number:
        return _same_rounded(one, other, min(*given, MAX_DECIMALS))
    return _same_expr(one, other)


def _same_percentage(gold: Term, answer: Term) -> bool:
    """50% is 0.5; beside a number without the sign it may stand for 50 too."""
    one, other = gold.expr, answer.expr
    hundredths = {PERCENT: sympy.Rational(1, 100)}
    if _same_term(Term(one.subs(hundredths), gold.decimals), Term(other.subs(hundredths), answer.decimals)):
        return True
    if one.has(PERCENT) and other.has(PERCENT):
        return False
    bare = {PERCENT: 1}
    one, other = one.subs(bare), other.subs(bare)
    return bool(one.is_number and one.is_real and abs(one) >= 1) and _same_expr(one, other)


def _same_rounded(one: Any, other: Any, decimals: int) -> bool:
    if not (one.is_finite and other.is_finite):
        return False
    difference = abs(sympy.N(one - other, _PRECISION))
    size = max(abs(sympy.N(one, 20)), abs(sympy.N(other, 20)))
    if size == 0:
        return True
    leading = int(sympy.floor(sympy.log(size, 10).evalf()))
    places = max(decimals, MIN_DECIMALS - 1 - leading)
    return bool(difference <= sympy.Rational(5, 10 ** (places + 1)))


def _same_expr(one: Any, other: Any) -> bool:
    if one == other:
        return True
    if one.is_Rational and other.is_Rational:
        return False
    if one.has(sympy.oo, -sympy.oo) or other.has(sympy.oo, -sympy.oo):
        return False
    symbols = sorted(_symbols(one) | _symbols(other), key=str)
    if not symbols:
        return _same_number(one, other, {}) is True
    stand_ins = {symbol: sympy.Dummy() for symbol in symbols}
    pair = [expr.xreplace(stand_ins) for expr in (one, other)]
    agreed = 0
    for numbers in _POINTS:
        # No two symbols have the same value.
        values = {
            symbol: sympy.N(number + sympy.Rational(index, 7), _PRECISION + 20)
            for index, (symbol, number) in enumerate(zip(stand_ins.values(), itertools.cycle(numbers), strict=False))
        }
        agrees = _same_number(pair[0], pair[1], values)
        if agrees is False:
            return False
        agreed += agrees is True
    return agreed >= _ENOUGH


def _same_number(one: Any, other: Any, values: dict[Any, Any]) -> bool | None:
    """Equal to 35 digits, which no two different answers of a few hundred characters are; ``None``: no value."""
    try:
        left, right = (_complex_parts(expr, values) for expr in (one, other))
    except (ArithmeticError, TypeError, ValueError):
        return None
    size = max(abs(part) for part in (*left, *right))
    if size == 0:
        return True
    tiny = sympy.Float(10, _PRECISION) ** (5 - _PRECISION)
    return all(abs(a - b) <= size * tiny for a, b in zip(left, right, strict=True))


def _complex_parts(expr: Any, values: dict[Any, Any]) -> tuple[Any, Any]:
    """Real and imaginary part as floats of high precision.

    Raises:
        ValueError: it has no value.
    """
    value = expr.evalf(_PRECISION, subs=values, maxn=400)
    real, imaginary = value.as_real_imag()
    if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
        raise ValueError("no number")
    if not (real.is_finite and imaginary.is_finite):
        raise ValueError("no finite number")
    return real, imaginary


def _same_quantity(gold: Value, answer: Value) -> bool:
    """Units must be the same where both sides have one."""
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        return len(gold.parts) == len(answer.parts) and all(
            unit == other and _same_term(term, value)
            for (term, unit), (value, other) in zip(gold.parts, answer.parts, strict=True)
        )
    measured, plain = (gold, answer) if isinstance(gold, Quantity) else (answer, gold)
    assert isinstance(measured, Quantity)
    if len(measured.parts) != 1 or not isinstance(plain, Term):
        return False
    term, unit = measured.parts[0]
    # ``5 m`` without a mark is a product.
    return _same_term(term, plain) or (len(unit) == 1 and _same_term(Term(term.expr * sympy.Symbol(unit)), plain))


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

_MIRROR = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


def _same_relation(gold: Relation, answer: Relation) -> bool:
    if len(gold.signs) != len(answer.signs):
        return _both_unwrapped(gold, answer)
    if _same_sides(gold.sides, answer.sides) and gold.signs == answer.signs:
        return True
    if all(sign in _MIRROR for sign in answer.signs):
        mirrored = tuple(_MIRROR[sign] for sign in reversed(answer.signs))
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
    sides = _exprs((*gold.sides, *answer.sides))
    first, second = gold.signs[0], answer.signs[0]
    if sides is None or first not in _MIRROR or second not in _MIRROR:
        return False
    one, other = sides[0] - sides[1], sides[2] - sides[3]
    if _symbols(one) != _symbols(other) or not _symbols(one):
        return False
    ratio = sympy.cancel(one / other)
    if not (ratio.is_number and ratio.is_finite and ratio.is_real) or ratio == 0:
        return False
    return first == (second if ratio > 0 else _MIRROR[second])


_NAMED_SETS = {
    "empty": sympy.S.EmptySet,
    "R": sympy.S.Reals,
    "Z": sympy.S.Integers,
    "N": sympy.S.Naturals,
    "Q": sympy.S.Rationals,
    "C": sympy.S.Complexes,
}


def _as_set(value: Value) -> Any:
    """The set of SymPy that is meant; ``None`` where there is none, or a tuple may be meant as well."""
    if isinstance(value, Sets) and not value.operands:
        return _NAMED_SETS.get(value.sign)
    if isinstance(value, Sets):
        operands = [_as_set(operand) for operand in value.operands]
        if None in operands:
            return None
        if value.sign == "cup":
            return sympy.Union(*operands)
        if value.sign == "cap":
            return sympy.Intersection(*operands)
        return operands[0] - sympy.Union(*operands[1:])
    if isinstance(value, Group):
        return _group_as_set(value)
    return _relation_as_set(value) if isinstance(value, Relation) else None


def _group_as_set(group: Group) -> Any:
    if group.brackets == "{}":
        members = _exprs(group.items)
        return None if members is None else sympy.FiniteSet(*members)
    if group.brackets == "":
        sets = [_relation_as_set(item) if isinstance(item, Relation) else None for item in group.items]
        variables = {str(symbol) for item in group.items if isinstance(item, Relation) for symbol in _variables(item)}
        if None in sets or len(variables) != 1 or group.joined == ",":
            return None
        return sympy.Union(*sets) if group.joined == "or" else sympy.Intersection(*sets)
    ends = _exprs(group.items)
    if ends is None or len(ends) != 2 or group.brackets == "<>":
        return None
    return _interval(ends[0], ends[1], group.brackets[0] == "(", group.brackets[1] == ")")


def _exprs(items: Sequence[Value | None]) -> list[Any] | None:
    """The scalar terms that the items are; ``None`` if one is something else."""
    exprs = [item.expr for item in items if isinstance(item, Term) and not isinstance(item.expr, sympy.MatrixBase)]
    return exprs if len(exprs) == len(items) else None


def _interval(low: Any, high: Any, left_open: bool, right_open: bool) -> Any:
    if not (low.is_number and high.is_number and low.is_extended_real and high.is_extended_real):
        return None
    return sympy.Interval(low, high, left_open, right_open) if low < high else None


def _variables(relation: Relation) -> set[Any]:
    return {symbol for side in relation.sides if isinstance(side, Term) for symbol in side.expr.free_symbols}


def _relation_as_set(relation: Relation) -> Any:
    """``0 < x ≤ 1``, ``x ≥ 3``, ``x ≠ 2``, over the real numbers."""
    exprs = _exprs(relation.sides)
    if exprs is None:
        return None
    signs = list(relation.signs)
    if len(signs) == 2 and exprs[1].is_Symbol:
        if set(signs) <= {">", ">="}:
            exprs, signs = exprs[::-1], [_MIRROR[sign] for sign in reversed(signs)]
        return _interval(exprs[0], exprs[2], signs[0] == "<", signs[1] == "<") if set(signs) <= {"<", "<="} else None
    if len(signs) != 1 or signs[0] not in _MIRROR:
        return None
    if exprs[1].is_Symbol and exprs[0].is_number:
        exprs, signs = exprs[::-1], [_MIRROR[signs[0]]]
    if not (exprs[0].is_Symbol and exprs[1].is_number and exprs[1].is_real):
        return None
    bound, infinity = exprs[1], sympy.oo
    if signs[0] in ("<", "<="):
        return sympy.Interval(-infinity, bound, True, signs[0] == "<")
    if signs[0] in (">", ">="):
        return sympy.Interval(bound, infinity, signs[0] == ">", True)
    return sympy.S.Reals - sympy.FiniteSet(bound) if signs[0] == "!=" else None


def _same_set(gold: Value, answer: Value) -> bool:
    kinds = (Sets, Group, Relation)
    if not isinstance(gold, kinds) or not isinstance(answer, kinds):
        return False
    variables = [_variables(value) for value in (gold, answer) if isinstance(value, Relation)]
    if len(variables) == 2 and variables[0] != variables[1]:
        return False
    if isinstance(gold, Group) and isinstance(answer, Group) and gold.brackets and answer.brackets:
        return False  # members were compared
    one, other = _as_set(gold), _as_set(answer)
    return one is not None and other is not None and bool(one == other)


def _same_sets(gold: Sets, answer: Sets) -> bool:
    if gold.sign != answer.sign or len(gold.operands) != len(answer.operands) or not gold.operands:
        return False
    if gold.sign == "backslash":
        return all(same(a, b) for a, b in zip(gold.operands, answer.operands, strict=True))
    return _subset(gold.operands, answer.operands) and _subset(answer.operands, gold.operands)


def _same_residue(gold: Residue, answer: Residue) -> bool:
    if not _same_term(gold.modulus, answer.modulus):
        return False
    if same(gold.value, answer.value):
        return True
    numbers = _exprs((gold.value, answer.value, gold.modulus))
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


def _term_name(expr: Any) -> str:
    expr = expr.subs(PERCENT, sympy.Rational(1, 100))
    small = all(not power.exp.is_Integer or abs(power.exp) <= 8 for power in expr.atoms(sympy.Pow))
    with contextlib.suppress(Exception):  # SymPy raises anything; the unexpanded term is a good enough name
        expr = expr.expand() if small else expr
    try:
        return str(expr)
    except ValueError:  # an integer with more digits than Python converts
        return f"number {hash(expr)}"
