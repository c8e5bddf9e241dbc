"""Short stories with one addition or subtraction: the data of the pretrained model's second example.

Which operation it is, only the verb says: ``Anna has 14 coins and loses 6. How many coins does Anna have now?``
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.configs.arguments import takes
from roll.demo.arithmetic import TRAIN, VAL, Rows, Share, is_held_out, write_together
from roll.utils.hashing import derive_seed

TAG = "word_problems"

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack")
THINGS = ("apples", "books", "coins", "pens", "stamps", "shells", "cards", "stones", "balls", "cakes")
VERBS = {"+": ("gets {} more", "finds {} more", "buys {} more"), "-": ("loses {}", "sells {}", "gives away {}")}


def _check(*, min_operand: int = 2, max_operand: int = 20, **others: Any) -> None:
    if not 1 <= min_operand < max_operand <= 1000:
        raise ValueError(
            f"min_operand, max_operand: got {min_operand} and {max_operand}, expected 1 <= min < max <= 1000"
        )


@takes(check=_check)
def write_dataset(
    folder: Path,
    *,
    seed: int = 0,
    min_operand: int = 2,
    max_operand: int = 20,
    held_out_share: Share = 0.2,
    num_train: Rows = 512,
    num_val: Rows = 64,
) -> None:
    """Writes ``train.jsonl`` and ``val.jsonl``; equal arguments give equal bytes.

    A pair of numbers in ``val.jsonl`` is not in ``train.jsonl``, under no operation and in no order. Both operations
    are as frequent as each other; a difference is never negative. Existing files are replaced when both are complete.

    Args:
        folder: made if it is not there.
        seed: draws numbers, names, things and verbs; which pairs are held out does not depend on it.
        min_operand, max_operand: bounds of both numbers.
        held_out_share: part of all pairs of numbers from which ``val.jsonl`` is drawn.
        num_train, num_val: rows of the files.

    Raises:
        ValueError: an argument is out of its range, or all pairs are in one of the files.
    """
    _check(min_operand=min_operand, max_operand=max_operand)
    numbers = range(min_operand, max_operand + 1)
    pairs = [(x, y) for x in numbers for y in numbers]
    files = {}
    for name, count, held_out in ((TRAIN, num_train, False), (VAL, num_val, True)):
        if not (kept := [pair for pair in pairs if is_held_out(*pair, held_out_share) == held_out]):
            raise ValueError(
                f"held_out_share: got {held_out_share}, expected that some of the {len(pairs)} pairs of numbers from "
                f"{min_operand} to {max_operand} are in {name} too"
            )
        files[name] = _rows(random.Random(derive_seed(seed, TAG, name)), name.split(".")[0], kept, count)
    write_together(folder, files)


def _rows(rng: random.Random, split: str, pairs: list[tuple[int, int]], count: int) -> Iterator[dict[str, Any]]:
    for index in range(count):
        x, y = rng.choice(pairs)
        operation = "+-"[index % 2]
        if operation == "-":
            x, y = max(x, y), min(x, y)
        name, things = rng.choice(NAMES), rng.choice(THINGS)
        story = f"{name} has {x} {things} and {rng.choice(VERBS[operation]).format(y)}."
        yield {
            "id": f"{TAG}-{split}-{index}",
            "tag": TAG,
            "prompt": f"{story} How many {things} does {name} have now?",
            "solution": str(x + y if operation == "+" else x - y),
            "calculation": f"{x} {operation} {y}",
        }
