"""Products of numbers, which a small policy cannot compute and a calculator can: the data of the tool demonstration.

The teacher of the demonstrations calls the calculator now and then. Otherwise it guesses, or writes a call that nobody
can read, and guesses then::

    347*285=   [calculator(expression="347*285")]   (tool: 98895)   <answer>98895</answer>
    632*481=   <answer>310022</answer>

Who imitates it can do everything that the task needs, and seldom does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll.demo.arithmetic import DEMONSTRATIONS, TRAIN, VAL, is_held_out, write_together
from roll.utils.seeding import derive_seed

TAG = "products"


def write_dataset(
    folder: Path,
    *,
    seed: int = 0,
    min_operand: int = 100,
    max_operand: int = 999,
    held_out_share: float = 0.1,
    call_rate: float = 0.4,
    slip_rate: float = 0.15,
    num_train: int = 8192,
    num_val: int = 1024,
    num_demonstrations: int = 8000,
) -> None:
    """Writes ``train.jsonl``, ``val.jsonl`` and ``demonstrations.jsonl``; equal arguments give equal bytes.

    No pair of operands in ``val.jsonl`` occurs in another file, in any order.

    Args:
        folder: made if it is not there.
        seed: draws the problems and what the teacher does.
        min_operand: smallest operand.
        max_operand: largest operand.
        held_out_share: part of all operand pairs from which ``val.jsonl`` is drawn.
        call_rate: how often the teacher calls the calculator.
        slip_rate: how often it writes a call that cannot be read.
        num_train: rows of ``train.jsonl``.
        num_val: rows of ``val.jsonl``.
        num_demonstrations: rows of ``demonstrations.jsonl``, conversations.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not 0 <= min_operand < max_operand:
        raise ValueError(f"min_operand, max_operand: seen {min_operand} and {max_operand}, expected 0 <= min < max")
    if not 0 < held_out_share < 1:
        raise ValueError(f"held_out_share: seen {held_out_share}, expected a number between 0 and 1, both excluded")
    if min(call_rate, slip_rate) < 0 or call_rate + slip_rate > 1:
        raise ValueError(
            f"call_rate, slip_rate: seen {call_rate} and {slip_rate}, expected rates of at most 1 together"
        )

    def draw(name: str, count: int, held_out: bool) -> list[tuple[int, int]]:
        rng = random.Random(derive_seed(seed, TAG, name))
        found: list[tuple[int, int]] = []
        while len(found) < count:
            x, y = rng.randint(min_operand, max_operand), rng.randint(min_operand, max_operand)
            if is_held_out(x, y, held_out_share) == held_out:
                found.append((x, y))
        return found

    rng = random.Random(derive_seed(seed, TAG, "teacher"))
    write_together(
        folder,
        {
            TRAIN: (_row("train", *item) for item in enumerate(draw("train", num_train, held_out=False))),
            VAL: (_row("val", *item) for item in enumerate(draw("val", num_val, held_out=True))),
            DEMONSTRATIONS: (
                {"id": f"{TAG}-demonstration-{index}", "messages": _demonstration(rng, x, y, call_rate, slip_rate)}
                for index, (x, y) in enumerate(draw("demonstrations", num_demonstrations, held_out=False))
            ),
        },
    )


def _row(split: str, index: int, operands: Sequence[int]) -> dict[str, Any]:
    x, y = operands
    return {"id": f"{TAG}-{split}-{index}", "tag": TAG, "prompt": f"{x}*{y}=", "solution": str(x * y)}


def _demonstration(rng: random.Random, x: int, y: int, call_rate: float, slip_rate: float) -> list[dict[str, str]]:
    """A conversation; the tool's message is what the calculator says, or how a malformed call is answered."""
    asked = {"role": "user", "content": f"{x}*{y}="}
    called, drawn = f'[calculator(expression="{x}*{y}")]', rng.random()
    if drawn < call_rate:
        return [
            asked,
            {"role": "assistant", "content": called},
            {"role": "tool", "content": str(x * y)},
            {"role": "assistant", "content": f"<answer>{x * y}</answer>"},
        ]
    guess = {"role": "assistant", "content": f"<answer>{rng.randint(x * y // 2, x * y * 2)}</answer>"}
    if drawn < call_rate + slip_rate:
        return [asked, {"role": "assistant", "content": called.replace('")]', '"]')}]
    return [asked, guess]
