"""Products of numbers, which a small policy cannot compute and a tool can: the data of the tool demonstrations.

The author of the demonstrations calls the calculator now and then. Otherwise it guesses, or writes a call that nobody
can read::

    347*285=   [calculator(expression="347*285")]   (tool: 98895)   <answer>98895</answer>
    632*481=   <answer>310022</answer>

With Python it forgets to print, and then mends its program or guesses after all::

    347*285=   [python(code="347*285")]   (tool: (it printed nothing))   [python(code="print(347*285)")]   …

Who imitates it can do everything that the task needs, and seldom does.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from roll.configs.arguments import takes
from roll.demo.arithmetic import (
    DEMONSTRATIONS,
    TRAIN,
    VAL,
    Rate,
    Rows,
    Share,
    check_operands,
    is_held_out,
    write_together,
)
from roll.utils.hashing import derive_seed

TAG = "products"
PRINTED_NOTHING = "(it printed nothing)"
"""Answer of the Python tool to a program that prints nothing."""

Message: TypeAlias = dict[str, str]


def _check_arguments(*, call_rate: float = 0.4, slip_rate: float = 0.15, **others: Any) -> None:
    check_operands(**others)
    if min(call_rate, slip_rate) < 0 or call_rate + slip_rate > 1:
        raise ValueError(f"call_rate, slip_rate: got {call_rate} and {slip_rate}, expected rates of at most 1 together")


@takes(check=_check_arguments)
def write_dataset(
    folder: Path,
    *,
    seed: int = 0,
    min_operand: int = 100,
    max_operand: int = 999,
    held_out_share: Share = 0.1,
    call_rate: Rate = 0.4,
    slip_rate: Rate = 0.15,
    tool: Literal["calculator", "python"] = "calculator",
    num_train: Rows = 8192,
    num_val: Rows = 1024,
    num_demonstrations: Rows = 8000,
) -> None:
    """Writes ``train.jsonl``, ``val.jsonl`` and ``demonstrations.jsonl``; equal arguments give equal bytes.

    No pair of operands in ``val.jsonl`` occurs in another file, in any order.

    Args:
        folder: made if it is not there.
        seed: draws the problems and the behaviour in the demonstrations.
        held_out_share: part of all operand pairs from which ``val.jsonl`` is drawn.
        call_rate: share of demonstrations that call the tool as they should.
        slip_rate: how often it writes a call that cannot be read, or a program that prints nothing.
        num_train, num_val, num_demonstrations: rows of the files.

    Raises:
        ValueError: an argument is out of its range.
    """
    operands = {"min_operand": min_operand, "max_operand": max_operand, "held_out_share": held_out_share}
    _check_arguments(call_rate=call_rate, slip_rate=slip_rate, **operands)

    def draw(name: str, count: int, held_out: bool) -> list[tuple[int, int]]:
        numbers = range(min_operand, max_operand + 1)
        if not any(is_held_out(x, y, held_out_share) == held_out for x, y in itertools.product(numbers, numbers)):
            raise ValueError(
                f"held_out_share: got {held_out_share}, with which {'no' if held_out else 'every'} pair of operands "
                f"from {min_operand} to {max_operand} is held out, expected some that are and some that are not"
            )
        rng = random.Random(derive_seed(seed, TAG, name))
        found: list[tuple[int, int]] = []
        while len(found) < count:
            x, y = rng.randint(min_operand, max_operand), rng.randint(min_operand, max_operand)
            if is_held_out(x, y, held_out_share) == held_out:
                found.append((x, y))
        return found

    if tool not in _AUTHORS:
        raise ValueError(f"tool: got {tool!r}, expected one of {', '.join(_AUTHORS)}")
    rng, write = random.Random(derive_seed(seed, TAG, "teacher")), _AUTHORS[tool]
    write_together(
        folder,
        {
            TRAIN: (_row("train", *item) for item in enumerate(draw("train", num_train, held_out=False))),
            VAL: (_row("val", *item) for item in enumerate(draw("val", num_val, held_out=True))),
            DEMONSTRATIONS: (
                {"id": f"{TAG}-demonstration-{index}", "messages": write(rng, x, y, call_rate, slip_rate)}
                for index, (x, y) in enumerate(draw("demonstrations", num_demonstrations, held_out=False))
            ),
        },
    )


def _row(split: str, index: int, operands: Sequence[int]) -> dict[str, Any]:
    x, y = operands
    return {"id": f"{TAG}-{split}-{index}", "tag": TAG, "prompt": f"{x}*{y}=", "solution": str(x * y)}


def _with_calculator(rng: random.Random, x: int, y: int, call_rate: float, slip_rate: float) -> list[Message]:
    """A conversation; a slip is a call without its closing parenthesis."""
    called, drawn = f'[calculator(expression="{x}*{y}")]', rng.random()
    if drawn < call_rate:
        return [_asked(x, y), *_call(called, str(x * y)), _answer(x * y)]
    guess = _answer(rng.randint(x * y // 2, x * y * 2))
    if drawn < call_rate + slip_rate:
        return [_asked(x, y), _said(called.replace('")]', '"]'))]
    return [_asked(x, y), guess]


def _with_python(rng: random.Random, x: int, y: int, call_rate: float, slip_rate: float) -> list[Message]:
    """A conversation; a slip is a program that prints nothing, of which every second one is mended."""
    solved = [*_call(f'[python(code="print({x}*{y})")]', str(x * y)), _answer(x * y)]
    guess, drawn = _answer(rng.randint(x * y // 2, x * y * 2)), rng.random()
    if drawn < call_rate:
        return [_asked(x, y), *solved]
    if drawn < call_rate + slip_rate:
        slip = _call(f'[python(code="{x}*{y}")]', PRINTED_NOTHING)
        return [_asked(x, y), *slip, *(solved if rng.random() < 0.5 else [guess])]
    return [_asked(x, y), guess]


_AUTHORS = {"calculator": _with_calculator, "python": _with_python}


def _asked(x: int, y: int) -> Message:
    return {"role": "user", "content": f"{x}*{y}="}


def _said(words: str) -> Message:
    return {"role": "assistant", "content": words}


def _answer(number: int) -> Message:
    return _said(f"<answer>{number}</answer>")


def _call(words: str, result: str) -> list[Message]:
    return [_said(words), {"role": "tool", "content": result}]
