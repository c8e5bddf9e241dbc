"""``device_mapping`` expressions: ``list(range(0,8)) + [12, 13]``, read by a small grammar and never evaluated."""

from __future__ import annotations

import ast
from typing import Annotated

from pydantic import BeforeValidator

from roll.configs.schema import Described

MAX_EXPRESSION_CHARACTERS = 1000
MAX_DEVICES = 1_000_000
SYNTAX = "a list of device ids, or an expression such as list(range(0,8)) + [12, 13]"


def parse_device_mapping(value: object) -> list[int] | None:
    """Turns what a YAML file says about devices into a list of ids.

    The grammar: ``sum = term ('+' term)*``, ``term = '[' ids ']' | 'list(' range ')' | range | '(' sum ')'``,
    ``range = 'range(' integer {',' integer} ')'``.

    Raises:
        ValueError: anything else, an id that is negative, or an id that occurs twice.
    """
    if value is None:
        return None
    if isinstance(value, str):
        value = _parse_expression(value)
    if not isinstance(value, list) or any(type(device) is not int for device in value):
        raise ValueError(SYNTAX)
    if not value:
        raise ValueError("at least one device id; null for a role without devices")
    if min(value) < 0:
        raise ValueError(f"device ids of at least 0, not {min(value)}")
    if len(set(value)) != len(value):
        twice = next(device for device in value if value.count(device) > 1)
        raise ValueError(f"every device id once; {twice} occurs {value.count(twice)} times")
    return value


DeviceMapping = Annotated[
    list[int] | None,
    BeforeValidator(parse_device_mapping),
    Described("list of int, an expression such as `list(range(0,8))`, or null"),
]


def _parse_expression(text: str) -> list[int]:
    if len(text) > MAX_EXPRESSION_CHARACTERS:
        raise ValueError(f"an expression of at most {MAX_EXPRESSION_CHARACTERS} characters, not {len(text)}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _sum(tree.body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(SYNTAX) from error


def _sum(node: ast.expr) -> list[int]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _sum(node.left) + _sum(node.right)
    if isinstance(node, ast.List):
        return [_integer(element) for element in node.elts]
    if isinstance(node, ast.Call) and not node.keywords and isinstance(node.func, ast.Name):
        if node.func.id == "list" and len(node.args) == 1:
            return _sum(node.args[0])
        if node.func.id == "range" and 1 <= len(node.args) <= 3:
            return _range([_integer(argument) for argument in node.args])
    raise ValueError(SYNTAX)


def _range(arguments: list[int]) -> list[int]:
    if len(arguments) == 3 and arguments[2] == 0:
        raise ValueError("a range with a step other than 0")
    devices = range(*arguments)
    if len(devices) > MAX_DEVICES:
        raise ValueError(f"a range of at most {MAX_DEVICES} devices")
    return list(devices)


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_integer(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError(SYNTAX)
