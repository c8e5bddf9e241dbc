"""Equality of mathematical answers: when two values of ``roll.extras.maths.values`` are the same answer.

What is not certain is unequal: a policy that finds two answers which are taken for one earns rewards for nothing.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import sympy

from roll.extras.maths.terms import same_term, symbols_of
from roll.extras.maths.units import canonical_unit, size_of
from roll.extras.maths.values import (
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

MIRROR = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
"""By sign, the one that reads from right to left."""
_NAMED_SETS = {
    "empty": sympy.S.EmptySet,
    "R": sympy.S.Reals,
    "Z": sympy.S.Integers,
    "N": sympy.S.Naturals,
    "Q": sympy.S.Rationals,
    "C": sympy.S.Complexes,
}


def as_set(value: Value) -> Any:
    """The set of SymPy that is meant; ``None`` where there is none, or a tuple may be meant as well."""
    if isinstance(value, Sets) and not value.operands:
        return _NAMED_SETS.get(value.sign)
    if isinstance(value, Sets):
        operands = [as_set(operand) for operand in value.operands]
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
        members = exprs_of(group.items)
        return None if members is None else sympy.FiniteSet(*members)
    if group.brackets == "":
        if group.joined == "or" and all(isinstance(item, Group) for item in group.items):
            intervals = [as_set(item) for item in group.items]
            return None if None in intervals else sympy.Union(*intervals)
        sets = [_relation_as_set(item) if isinstance(item, Relation) else None for item in group.items]
        variables = {str(symbol) for item in group.items if isinstance(item, Relation) for symbol in variables_of(item)}
        if None in sets or len(variables) != 1 or group.joined == ",":
            return None
        return sympy.Union(*sets) if group.joined == "or" else sympy.Intersection(*sets)
    ends = exprs_of(group.items)
    if ends is None or len(ends) != 2 or group.brackets == "<>":
        return None
    return _interval(ends[0], ends[1], group.brackets[0] == "(", group.brackets[1] == ")")


def exprs_of(items: Sequence[Value | None]) -> list[Any] | None:
    """The scalar terms that the items are; ``None`` if one is something else."""
    exprs = [item.expr for item in items if isinstance(item, Term) and not isinstance(item.expr, sympy.MatrixBase)]
    return exprs if len(exprs) == len(items) else None


def _interval(low: Any, high: Any, left_open: bool, right_open: bool) -> Any:
    if not (low.is_number and high.is_number and low.is_extended_real and high.is_extended_real):
        return None
    return sympy.Interval(low, high, left_open, right_open) if low < high else None


def variables_of(relation: Relation) -> set[Any]:
    """Symbols on any side."""
    return {symbol for side in relation.sides if isinstance(side, Term) for symbol in side.expr.free_symbols}


def _relation_as_set(relation: Relation) -> Any:
    """``0 < x ≤ 1``, ``x ≥ 3``, ``x ≠ 2``, over the real numbers."""
    exprs = exprs_of(relation.sides)
    if exprs is None:
        return None
    signs = list(relation.signs)
    if len(signs) == 2 and exprs[1].is_Symbol:
        if set(signs) <= {">", ">="}:
            exprs, signs = exprs[::-1], [MIRROR[sign] for sign in reversed(signs)]
        return _interval(exprs[0], exprs[2], signs[0] == "<", signs[1] == "<") if set(signs) <= {"<", "<="} else None
    if len(signs) != 1 or signs[0] not in MIRROR:
        return None
    if exprs[1].is_Symbol and exprs[0].is_number:
        exprs, signs = exprs[::-1], [MIRROR[signs[0]]]
    if not (exprs[0].is_Symbol and exprs[1].is_number and exprs[1].is_real):
        return None
    bound, infinity = exprs[1], sympy.oo
    if signs[0] in ("<", "<="):
        return sympy.Interval(-infinity, bound, True, signs[0] == "<")
    if signs[0] in (">", ">="):
        return sympy.Interval(bound, infinity, signs[0] == ">", True)
    return sympy.S.Reals - sympy.FiniteSet(bound) if signs[0] == "!=" else None


def same(gold: Value, answer: Value) -> bool:
    """Tells whether an answer is the reference answer."""
    if gold == answer and not isinstance(gold, Term):
        return True
    if isinstance(gold, Choice) or isinstance(answer, Choice):
        return _same_choice(gold, answer)
    gold, answer = _spread(_stripped(gold)), _spread(_stripped(answer))
    if isinstance(gold, Group) and isinstance(answer, Group) and _assigned(gold) and _assigned(answer):
        gold, answer = Group(gold.items), Group(answer.items)
    elif _assigned(gold) != _assigned(answer):
        gold, answer = _in_order_of_names(gold), _in_order_of_names(answer)
    if isinstance(gold, Term) or isinstance(answer, Term):
        gold, answer = _as_fraction(gold, may_be_time=True), _as_fraction(answer, may_be_time=False)
    if isinstance(gold, Relation) != isinstance(answer, Relation):
        gold, answer = _unwrapped(gold), _unwrapped(answer)
    if isinstance(gold, Word) and isinstance(answer, Word):
        return _same_word(gold.text, answer.text)
    gold, answer = (v.product if isinstance(v, Word) and v.product is not None else v for v in (gold, answer))
    if isinstance(gold, Quantity) or isinstance(answer, Quantity):
        return _same_quantity(gold, answer)
    if isinstance(gold, Term) and isinstance(answer, Term):
        return same_term(gold, _same_constant(gold, answer))
    if type(gold) is type(answer):
        comparison: Callable[[Any, Any], bool] | None = _COMPARISONS.get(type(gold))
        if comparison is not None and comparison(gold, answer):
            return True
    elif isinstance(gold, Term) or isinstance(answer, Term):
        return _same_column(gold, answer)
    return _same_set(gold, answer)


# --- wrappings --------------------------------------------------------------------------------------------------------


def _stripped(value: Value) -> Value:
    """``((1, 2))`` is ``(1, 2)``; ``x ∈ A`` is ``A``; ``3/2 or 1.5`` is one number."""
    while isinstance(value, Group) and value.brackets == "()" and len(value.items) == 1:
        value = value.items[0]
    if isinstance(value, Group) and value.joined == "or" and all(same(value.items[0], item) for item in value.items):
        return value.items[0]
    if isinstance(value, Relation) and value.signs == ("in",) and _is_name(value.sides[0]) and value.sides[1]:
        return value.sides[1]
    return value


def _is_name(value: Value | None) -> bool:
    if isinstance(value, Group) and value.brackets in ("()", "") and len(value.items) > 1:
        return all(_is_name(item) for item in value.items)
    if isinstance(value, Term):
        return bool(value.expr.is_Symbol or isinstance(value.expr, sympy.core.function.AppliedUndef))
    return isinstance(value, Word)


def _is_of_names(value: Value) -> bool:
    """Tells whether a value may be asked for: a sum or product of letters, a cosine of one, its absolute value."""
    if isinstance(value, Term) and isinstance(value.expr, sympy.cos | sympy.sin | sympy.tan | sympy.Abs):
        return bool(value.expr.args[0].is_Symbol)
    if not isinstance(value, Term) or not isinstance(value.expr, sympy.Add | sympy.Mul):
        return False
    parts = [-part if part.could_extract_minus_sign() else part for part in value.expr.args if part != -1]
    powers = [part.as_base_exp() for part in parts]
    linear = isinstance(value.expr, sympy.Add) or all(exponent in (1, -1) for _, exponent in powers)
    return linear and len(parts) > 1 and all(base.is_Symbol for base, _ in powers)


def _unwrapped(value: Value) -> Value:
    """The right side of ``x = 5``, ``m + n = 5`` and of ``3 + 4 = 7``; a chain must be true."""
    if isinstance(value, Relation) and value.signs == ("=",) and value.sides[0] is None and value.sides[1]:
        return value.sides[1]
    if not isinstance(value, Relation) or set(value.signs) != {"="} or None in value.sides:
        return value
    sides = [side for side in value.sides if side is not None]
    named = _is_name(sides[0]) or _is_of_names(sides[0])
    if not named and not (isinstance(sides[0], Term) and not symbols_of(sides[0].expr)):
        return value
    rest = sides[1:] if named else sides
    if not all(same(rest[-1], side) for side in rest[:-1]):
        return value
    return rest[-1]


def _spread(value: Value) -> Value:
    """``(x, y) = (1, 2)`` is ``x = 1`` and ``y = 2``."""
    if not isinstance(value, Relation) or set(value.signs) != {"="}:
        return value
    if len(value.signs) > 1:
        letters, last = value.sides[:-1], value.sides[-1]
        named = all(isinstance(name, Term) and name.expr.is_Symbol for name in letters)
        if not (named and isinstance(last, Term) and last.expr.is_number):
            return value
        return Group(tuple(Relation((name, last), ("=",)) for name in letters), "", "and")
    names, values = value.sides
    if not (isinstance(names, Group) and isinstance(values, Group) and _is_name(names)):
        return value
    if values.brackets not in ("()", "<>", "") or len(names.items) != len(values.items):
        return value
    return Group(
        tuple(Relation(pair, ("=",)) for pair in zip(names.items, values.items, strict=True)), names.brackets, "and"
    )


def _assigned(value: Value) -> bool:
    """Tells whether a value consists of values of different names: ``m = 3, n = 5``."""
    if not isinstance(value, Group) or not all(
        isinstance(item, Relation) and item.signs == ("=",) and _is_name(item.sides[0]) and item.sides[1]
        for item in value.items
    ):
        return False
    names = {_letter_of(item) for item in value.items}
    return len(value.items) > 1 and len(names) == len(value.items) and value.joined != "or"


def _letter_of(item: Value) -> str:
    return name_of(item.sides[0]) if isinstance(item, Relation) and item.sides[0] is not None else ""


def _in_order_of_names(value: Value) -> Value:
    """The values alone of ``y = 2, x = 1``, in the order in which the letters follow one another.

    Of ``(p, n) = (2, 3)`` that is the order that was asked for, unless the letters are such as everyone keeps in order.
    """
    if not isinstance(value, Group) or not _assigned(value):
        return value
    names = [_letter_of(item) for item in value.items]
    items = list(value.items)
    if not value.brackets or set(names) <= set("xyz") or set(names) <= set("abcd"):
        items.sort(key=_letter_of)
    sides = [item.sides[1] for item in items if isinstance(item, Relation)]
    return Group(tuple(side for side in sides if side is not None), "()" if value.brackets else "")


_CONSTANTS = [sympy.Symbol(name) for name in ("C", "c", "K", "k", "C_1", "c_1", "D")]


def _same_constant(gold: Term, answer: Term) -> Term:
    """The answer with its constant of integration under the reference's name: ``x^2 + K`` is ``x^2 + C``."""
    constants = [_constant_of(term.expr) for term in (gold, answer)]
    if None in constants or constants[0] == constants[1] or constants[0].name not in ("C", "C_1"):
        return answer
    return Term(answer.expr.xreplace({constants[1]: constants[0]}), answer.decimals)


def _constant_of(expr: Any) -> Any:
    """The letter of a sum with other letters that is a term of its own there, and nowhere else."""
    if not expr.is_Add or len(expr.free_symbols) < 2:
        return None
    rest = [symbol for symbol in _CONSTANTS if symbol in expr.args and symbol not in (expr - symbol).free_symbols]
    return rest[0] if len(rest) == 1 else None


def _same_choice(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Choice) and isinstance(answer, Choice):
        return gold.letter == answer.letter and same(gold.content, answer.content)
    labelled, other = (gold, answer) if isinstance(gold, Choice) else (answer, gold)
    assert isinstance(labelled, Choice)
    letter = Term(sympy.Symbol(labelled.letter))
    return same(letter, other) or same(labelled.content, other)


def _same_word(gold: str, answer: str) -> bool:
    """``No`` is ``no``; ``AB`` is not ``ab``."""
    if len(gold) < 3 and gold.isupper() != answer.isupper():
        return False
    one, other = (re.sub(r"^(?:the|an?|on|in|at)\s+(?=\w{3})", "", text.casefold()) for text in (gold, answer))
    return one == other


def _same_quantity(gold: Value, answer: Value) -> bool:
    """Units must be the same where both sides have one."""
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        if [unit for _, unit in gold.parts] == [unit for _, unit in answer.parts]:
            return all(same_term(a, b) for (a, _), (b, _) in zip(gold.parts, answer.parts, strict=True))
        one, other = _total(gold), _total(answer)
        return one is not None and other is not None and one[1] == other[1] and same_term(one[0], other[0])
    measured, plain = (gold, answer) if isinstance(gold, Quantity) else (answer, gold)
    assert isinstance(measured, Quantity)
    if len(measured.parts) != 1 or not isinstance(plain, Term) or plain.expr.has(PERCENT):
        return False
    term = measured.parts[0][0]
    # ``5 m`` without a mark is a product.
    if same_term(term, plain):
        return True
    unmarked = _with_letters_as_units(plain)
    return unmarked is not None and _same_quantity(measured, unmarked)


def _with_letters_as_units(term: Term) -> Quantity | None:
    """``1000 m`` and ``10 m/s`` without a mark are products; beside a quantity they may be one."""
    number, letters = term.expr.as_coeff_Mul()
    units = []
    for letter, power in letters.as_powers_dict().items():
        unit = canonical_unit(letter.name) if letter.is_Symbol and letter.name.isalpha() else None
        if unit is None or not power.is_Integer:
            return None
        units.append(unit if power == 1 else f"{unit}^{power}")
    return Quantity(((Term(number, term.decimals), " ".join(sorted(units))),))


def _total(quantity: Quantity) -> tuple[Term, Any] | None:
    """All parts in basic units; ``None`` where they measure different things."""
    sizes = [size_of(unit) for _, unit in quantity.parts]
    if any(size[1] != sizes[0][1] for size in sizes):
        return None
    values = [term.expr * sympy.Rational(size) for (term, _), (size, _) in zip(quantity.parts, sizes, strict=True)]
    return Term(sympy.Add(*values)), sizes[0][1]


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
    if "or" in (gold.joined, answer.joined) or any(
        not group.brackets and group.joined == "," and _repeats_name(group) for group in (gold, answer)
    ):
        return False
    points = {"()", "<>", ""} | ({"[]"} if len(gold.items) != 2 else set())
    return {gold.brackets, answer.brackets} <= points


def _repeats_name(group: Group) -> bool:
    """Tells whether one thing has several values: ``x = 1, x = 2`` is no point."""
    names = _names(group)
    return len(names) > 1 and len(set(names)) == 1


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
    if set(gold.signs) == set(answer.signs) == {":"}:
        return _same_ratio(gold, answer)
    gold, answer = _with_subject(gold, answer), _with_subject(answer, gold)
    if _same_sides(gold.sides, answer.sides) and gold.signs == answer.signs:
        return True
    if all(sign in MIRROR for sign in answer.signs):
        mirrored = tuple(MIRROR[sign] for sign in reversed(answer.signs))
        if gold.signs == mirrored and _same_sides(gold.sides, answer.sides[::-1]):
            return True
    if len(gold.signs) == 1:
        answer = _with_argument(gold, answer)
        names = gold.sides[0], answer.sides[0]
        renamed = gold.signs == answer.signs == ("=",) and (
            _same_function(gold, answer) or (None not in names and _abbreviated(names[0], names[1]))  # type: ignore[arg-type]
        )
        return (renamed and _same_sides(gold.sides[1:], answer.sides[1:])) or _same_difference(gold, answer)
    return _both_unwrapped(gold, answer)


def _both_unwrapped(gold: Relation, answer: Relation) -> bool:
    """Two chains of equalities with the same name in front."""
    one, other = _unwrapped(gold), _unwrapped(answer)
    if isinstance(one, Relation) or isinstance(other, Relation):
        return False
    first, second = gold.sides[0], answer.sides[0]
    if _is_name(first) and _is_name(second):
        assert first is not None and second is not None
        return (same(first, second) or _same_function(gold, answer) or _abbreviated(first, second)) and same(one, other)
    return same(one, other)


def _abbreviated(first: Value, second: Value) -> bool:
    """``r`` is the radius."""
    words = [value.text.lower() for value in (first, second) if isinstance(value, Word)]
    letters = [str(value.expr).lower() for value in (first, second) if isinstance(value, Term)]
    return len(words) == len(letters) == 1 and len(letters[0]) == 1 and words[0].startswith(letters[0])


def _same_function(gold: Relation, answer: Relation) -> bool:
    """``f(x) = …`` and ``y = …`` name the same, where the name is not in the term."""
    names = [side.expr for side in (gold.sides[0], answer.sides[0]) if isinstance(side, Term)]
    functions = [name for name in names if isinstance(name, sympy.core.function.AppliedUndef)]
    return len(names) == 2 and len(functions) == 1 and sympy.Symbol("y") in names and len(functions[0].args) == 1


def _with_argument(gold: Relation, answer: Relation) -> Relation:
    """``f(t) = t^2`` with the reference's letter for the argument."""
    left, right = gold.sides[0], answer.sides[0]
    if not (isinstance(left, Term) and isinstance(right, Term) and isinstance(answer.sides[1], Term)):
        return answer
    one, other = left.expr, right.expr
    if not all(isinstance(e, sympy.core.function.AppliedUndef) and len(e.args) == 1 for e in (one, other)):
        return answer
    if one.func != other.func or not (one.args[0].is_Symbol and other.args[0].is_Symbol):
        return answer
    if one.args[0] in answer.sides[1].expr.free_symbols and one != other:
        return answer
    value = answer.sides[1].expr.xreplace({other.args[0]: one.args[0]})
    return Relation((left, Term(value, answer.sides[1].decimals)), answer.signs)


def _with_subject(value: Relation, other: Relation) -> Relation:
    """``≥ 3`` beside ``x ≥ 3`` is said of ``x``."""
    if value.sides[0] is None and isinstance(other.sides[0], Term) and other.sides[0].expr.is_Symbol:
        return Relation((other.sides[0], *value.sides[1:]), value.signs)
    return value


def _may_be_time(parts: Sequence[Any]) -> bool:
    """``3:30``, but not ``3:4``."""
    whole = len(parts) == 2 and all(part.is_Integer for part in parts)
    return whole and 10 <= parts[1] < 60 and 0 <= parts[0] < 24


def _as_fraction(value: Value, may_be_time: bool) -> Value:
    """The quotient that ``3:4`` is."""
    if not isinstance(value, Relation) or value.signs != (":",):
        return value
    parts = exprs_of(value.sides)
    return (
        value if parts is None or parts[1] == 0 or (may_be_time and _may_be_time(parts)) else Term(parts[0] / parts[1])
    )


def _same_ratio(gold: Relation, answer: Relation) -> bool:
    """``3:4`` is ``6:8``; ``3:30`` may be a time."""
    if _same_sides(gold.sides, answer.sides):
        return True
    one, other = exprs_of(gold.sides), exprs_of(answer.sides)
    if one is None or other is None or 0 in one or 0 in other:
        return False
    if _may_be_time(one):
        return False
    return all(same_term(Term(one[0] * b), Term(other[0] * a)) for a, b in zip(one[1:], other[1:], strict=True))


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
