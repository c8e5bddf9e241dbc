"""Drawn shapes to count and to compare: the data of the demonstration of RLVR with pictures.

A picture is a grid of cells with a circle, a square, a triangle or nothing in each, in one of four colours. A question
asks for the number of one kind, or for the more frequent of two::

    [picture] circles?              <answer>3</answer>
    [picture] circles or squares?   <answer>squares</answer>     (or equal)

The demonstrations overlook shapes: each is missing from a count with some probability. A policy that imitates them
prefers numbers that are too small, so reinforcement learning has a habit to change.
"""

from __future__ import annotations

import base64
import hashlib
import io
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.configs.arguments import takes
from roll.demo.arithmetic import DEMONSTRATIONS, TRAIN, VAL, Rate, Rows, Share, write_together
from roll.utils.hashing import derive_seed

TAG = "shapes"
KINDS = ("circles", "squares", "triangles")
COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd")
EQUAL = "equal"

Cells = tuple[tuple[str, str] | None, ...]
"""Kind and colour of each cell, row by row; ``None``: it is empty."""


@dataclass(frozen=True)
class Question:
    """A picture, and the kinds that are asked about: one to count, or two to compare."""

    cells: Cells
    kinds: tuple[str, ...]

    @property
    def words(self) -> str:
        return f"{' or '.join(self.kinds)}?"

    def answer(self, overlooked: Sequence[bool] = ()) -> str:
        """What is said by somebody who overlooks cells."""
        seen = [
            cell[0]
            for cell, missed in zip(self.cells, overlooked or [False] * len(self.cells), strict=True)
            if cell and not missed
        ]
        counts = [seen.count(kind) for kind in self.kinds]
        if len(counts) == 1:
            return str(counts[0])
        first, second = counts
        return EQUAL if first == second else self.kinds[second > first]


def draw(cells: Cells, columns: int, cell: int) -> str:
    """The picture as a data URI of a PNG, ``cell`` pixels for the side of a cell."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (columns * cell, len(cells) // columns * cell), "white")
    pen = ImageDraw.Draw(image)
    for index, shown in enumerate(cells):
        if shown is None:
            continue
        top, left = (place * cell + 1 for place in divmod(index, columns))
        box = (left, top, left + cell - 3, top + cell - 3)
        match shown[0]:
            case "circles":
                pen.ellipse(box, fill=shown[1])
            case "squares":
                pen.rectangle(box, fill=shown[1])
            case _:
                pen.polygon([(box[0], box[3]), (box[2], box[3]), ((box[0] + box[2]) // 2, box[1])], fill=shown[1])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def is_held_out(cells: Cells, share: float) -> bool:
    """Tells whether a picture belongs to validation: by a hash of its kinds, the same for every seed and colour."""
    kinds = ",".join(cell[0] if cell else "" for cell in cells)
    return int.from_bytes(hashlib.blake2b(kinds.encode(), digest_size=8).digest(), "big") < share * 2**64


def _check_arguments(*, rows: int = 3, columns: int = 3, cell: int = 16, **others: Any) -> None:
    for name, got, least, most in (("rows", rows, 1, 9), ("columns", columns, 1, 9), ("cell", cell, 8, 64)):
        if not least <= got <= most:
            raise ValueError(f"{name}: got {got}, expected {least} to {most}")
    if rows * columns < 2:
        raise ValueError("rows, columns: got 1 and 1, expected at least two cells")


@takes(check=_check_arguments)
def write_dataset(
    folder: Path,
    *,
    seed: int = 0,
    rows: int = 3,
    columns: int = 3,
    cell: int = 16,
    empty_share: Share = 0.3,
    compare_share: Rate = 0.3,
    overlook_rate: Rate = 0.3,
    held_out_share: Share = 0.1,
    num_train: Rows = 8192,
    num_val: Rows = 600,
    num_demonstrations: Rows = 16000,
) -> None:
    """Writes ``train.jsonl``, ``val.jsonl`` and ``demonstrations.jsonl``; equal arguments give equal bytes.

    The kinds of a picture of ``val.jsonl`` are arranged so in neither of the other files.

    Args:
        folder: made if it is not there.
        cell: pixels of a cell's side.
        empty_share: probability of an empty cell.
        compare_share: part of the questions that compare two kinds.
        overlook_rate: probability that a demonstration overlooks a shape.
        held_out_share: part of all pictures from which ``val.jsonl`` is drawn.

    Raises:
        ValueError: an argument is out of its range.
    """
    _check_arguments(rows=rows, columns=columns, cell=cell)

    def questions(name: str, count: int) -> Iterator[tuple[int, Question]]:
        rng, made = random.Random(derive_seed(seed, TAG, name)), 0
        while made < count:
            cells = tuple(
                None if rng.random() < empty_share else (rng.choice(KINDS), rng.choice(COLOURS))
                for _ in range(rows * columns)
            )
            kinds = rng.sample(KINDS, 2 if rng.random() < compare_share else 1)
            if is_held_out(cells, held_out_share) == (name == "val"):
                made += 1
                yield made, Question(cells, tuple(kinds))

    def row(name: str, number: int, question: Question) -> dict[str, Any]:
        shown = [draw(question.cells, columns, cell)]
        return {"id": f"{TAG}-{name}-{number}", "tag": TAG, "prompt": f"<image>{question.words}", "images": shown}

    def solved(name: str, count: int) -> Iterator[Mapping[str, Any]]:
        for number, question in questions(name, count):
            yield row(name, number, question) | {"solution": question.answer()}

    def demonstrated(name: str, count: int) -> Iterator[Mapping[str, Any]]:
        rng = random.Random(derive_seed(seed, TAG, "teacher"))
        for number, question in questions(name, count):
            said = question.answer([rng.random() < overlook_rate for _ in question.cells])
            yield row(name, number, question) | {"response": f"<answer>{said}</answer>"}

    files = {
        TRAIN: solved("train", num_train),
        VAL: solved("val", num_val),
        DEMONSTRATIONS: demonstrated("demonstrations", num_demonstrations),
    }
    write_together(folder, files)
