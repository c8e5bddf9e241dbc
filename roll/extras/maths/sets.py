"""Answers as sets of SymPy: intervals, chains of inequalities, sets of members, and sets with a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from roll.extras.maths.values import Group, Relation, Sets, Term, Value

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
