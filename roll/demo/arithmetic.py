"""Integer addition and subtraction with a written scratchpad: the data of the demonstrations of RLVR, DPO and rewards.

A solution goes column by column from the ones, ``digit, digit, carry = result``, and then states the answer. A result
is the carry or the borrow for the next column and then the digit, so 2-7 is 15: five, with one borrowed::

    347+285=   <think>7+5+0=12 4+8+1=13 3+2+1=06</think><answer>632</answer>
    632-347=   <think>2-7-0=15 3-4-1=18 6-3-1=02</think><answer>285</answer>

The demonstrations omit most carries: they have 0 for most of the carries and borrows that one column owes to the next.
A policy that imitates them masters the single steps and prefers a wrong one, so reinforcement learning has a habit to
change: to sharpen the imitation is not enough.

Of the pairs for DPO and reward models, the better answer carries what one column owes to the next; the worse one
forgets some of it, and so comes to a wrong result. A policy that is rewarded for what tells these two apart need not
calculate: every carry looks good. So the worse answers may have other mistakes too.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from roll.configs.arguments import takes
from roll.utils.hashing import derive_seed

TAG = "arithmetic"
TRAIN, VAL, DEMONSTRATIONS = "train.jsonl", "val.jsonl", "demonstrations.jsonl"
WORKED = "worked.jsonl"
PAIRS, VAL_PAIRS = "pairs.jsonl", "val_pairs.jsonl"

SHORT = "{x}{operation}{y}="
"""The wording that the tiny model's demonstrations have."""

Share = Annotated[float, Field(gt=0, lt=1)]
Rate = Annotated[float, Field(ge=0, le=1)]
Rows = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Problem:
    """``x operation y``; a difference is never negative."""

    x: int
    operation: str
    """``+`` or ``-``."""
    y: int

    def prompt(self, wording: str) -> str:
        """Question to the policy, such as ``47+85=``."""
        return wording.format(x=self.x, operation=self.operation, y=self.y)

    @property
    def answer(self) -> int:
        return self.x + self.y if self.operation == "+" else self.x - self.y

    @property
    def num_columns(self) -> int:
        """Digits of the longer operand."""
        return len(str(max(self.x, self.y)))

    @property
    def carried_columns(self) -> tuple[int, ...]:
        """Columns (0: the ones) that receive a carry or a borrow from the column before."""
        modulus = [10**column for column in range(1, self.num_columns)]
        if self.operation == "+":
            owed = [self.x % size + self.y % size >= size for size in modulus]
        else:
            owed = [self.x % size < self.y % size for size in modulus]
        return tuple(column for column, owes in enumerate(owed, start=1) if owes)


def worked_solution(
    problem: Problem,
    forgotten_columns: Collection[int] = (),
    invented_columns: Collection[int] = (),
    errors: Mapping[int, int] = MappingProxyType({}),
) -> str:
    """The scratchpad and the answer, as the policy is to write them.

    Args:
        forgotten_columns: columns (0: the ones) that ignore the carry or borrow into them; the answer follows from
            what is written, so it is wrong where one was due.
        invented_columns: columns that use a carry or borrow of 1, owed or not.
        errors: how far the results of columns are off; what follows goes on with them.
    """
    x_digits, y_digits = (f"{number:0{problem.num_columns}d}"[::-1] for number in (problem.x, problem.y))
    sign = problem.operation
    steps, digits, carry = [], [], 0
    for column, (a, b) in enumerate(zip(map(int, x_digits), map(int, y_digits), strict=True)):
        used = 0 if column in forgotten_columns else max(carry, int(column in invented_columns))
        result = a + b + used if sign == "+" else a - b - used
        tens, digit = divmod(result + errors.get(column, 0), 10)
        carry = abs(tens)
        steps.append(f"{a}{sign}{b}{sign}{used}={carry}{digit}")
        digits.append(digit)
    answer = sum(digit * 10**column for column, digit in enumerate([*digits, carry]))
    return f"<think>{' '.join(steps)}</think><answer>{answer}</answer>"


def is_held_out(x: int, y: int, share: float) -> bool:
    """Tells whether the operands belong to validation: by a hash of the unordered pair, the same for every seed.

    Args:
        share: part of all pairs that is held out.
    """
    digest = hashlib.blake2b(f"{min(x, y)},{max(x, y)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


MAX_OPERAND = 10**9


def check_operands(min_operand: int = 100, max_operand: int = 999, held_out_share: float = 0.1, **others: Any) -> None:
    """Raises ``ValueError`` for arguments of a data set that are out of their ranges."""
    if not 0 <= min_operand < max_operand:
        raise ValueError(f"min_operand, max_operand: got {min_operand} and {max_operand}, expected 0 <= min < max")
    if max_operand > MAX_OPERAND:
        raise ValueError(f"max_operand: got {max_operand}, expected at most {MAX_OPERAND:,}")
    if not 0 < held_out_share < 1:
        raise ValueError(f"held_out_share: got {held_out_share}, expected a number between 0 and 1, both excluded")


def _check_arguments(
    *,
    operations: Sequence[str] = ("+", "-"),
    max_second: int | None = None,
    wording: str = SHORT,
    forget_rate: float = 0.75,
    **others: Any,
) -> None:
    check_operands(**others)
    if [part for _, part, *_ in Formatter().parse(wording) if part is not None] != ["x", "operation", "y"]:
        raise ValueError(
            f"wording: got {wording!r}, expected a text with {{x}}, {{operation}} and {{y}}, in this order"
        )
    if not operations or set(operations) - {"+", "-"} or len(set(operations)) < len(operations):
        raise ValueError(f"operations: got {operations!r}, expected '+', '-' or both, each once")
    if not 0 <= forget_rate <= 1:
        raise ValueError(f"forget_rate: got {forget_rate}, expected a number from 0 to 1")
    for key in ("num_train", "num_val", "num_demonstrations"):
        if (count := others.get(key, 1)) < 1:
            raise ValueError(f"{key}: got {count}, expected at least 1")
    low, high = others.get("min_operand", 100), others.get("max_operand", 999)
    if max_second is not None and not low <= max_second <= high:
        raise ValueError(f"max_second: got {max_second}, expected min_operand {low} to max_operand {high}")
    num_pairs = (high - low + 1) * ((high if max_second is None else max_second) - low + 1)
    for key in ("num_train", "num_val", "num_demonstrations", "num_worked"):
        if others.get(key, 0) > (most := num_pairs * len(operations)):
            raise ValueError(f"{key}: got {others[key]:,}, expected at most {most:,}, the problems that there are")


@takes(check=_check_arguments)
def write_dataset(
    folder: Path,
    *,
    seed: int = 0,
    min_operand: int = 100,
    max_operand: int = 999,
    max_second: int | None = None,
    operations: Sequence[str] = ("+", "-"),
    wording: str = SHORT,
    held_out_share: Share = 0.1,
    forget_rate: Rate = 0.75,
    num_train: Rows = 8192,
    num_val: Rows = 1024,
    num_demonstrations: Rows = 16000,
    num_worked: Annotated[int, Field(ge=0)] = 0,
) -> None:
    """Writes ``train.jsonl``, ``val.jsonl`` and ``demonstrations.jsonl``; equal arguments give equal bytes.

    With ``num_worked`` there is ``worked.jsonl`` too, without omissions.

    Problems within a file are distinct. A pair of operands in ``val.jsonl`` occurs in neither of the other files, under
    no operation and in no order. Existing files are replaced when all three are complete.

    Args:
        folder: made if it is not there.
        seed: draws the problems and the omissions; the split does not depend on it.
        max_operand: largest operand; with as many digits as ``min_operand`` all prompts are equally long.
        max_second: largest second operand; ``None``: as large as the first.
        operations: ``+``, ``-`` or both, drawn evenly; a difference has the larger operand first.
        wording: a question, with ``{x}``, ``{operation}`` and ``{y}``.
        held_out_share: part of all operand pairs from which ``val.jsonl`` is drawn.
        forget_rate: probability of a written 0 for a carry or borrow that is due.
        num_train, num_val, num_demonstrations, num_worked: rows of the files.

    Raises:
        ValueError: an argument is out of its range, or there are fewer problems than rows.
    """
    counts = {"num_train": num_train, "num_val": num_val, "num_demonstrations": num_demonstrations}
    operands = {"min_operand": min_operand, "max_operand": max_operand, "held_out_share": held_out_share}
    _check_arguments(
        operations=operations, max_second=max_second, wording=wording, forget_rate=forget_rate, **operands, **counts
    )

    def draw(name: str, count: int, held_out: bool) -> list[Problem]:
        rng = random.Random(derive_seed(seed, TAG, name))
        share = held_out_share if held_out else 1 - held_out_share
        # Each pair is in the split with probability `share`: four times the need is enough, or else all pairs.
        limit = 1000 + int(4 * count / share)
        pairs = _pairs(rng, min_operand, max_operand, max_operand if max_second is None else max_second, limit)
        kept = ((x, y) for x, y in pairs if is_held_out(x, y, held_out_share) == held_out)
        found = dict.fromkeys(_problem(x, y, rng.choice(operations)) for x, y in kept)
        if len(found) < count:
            raise ValueError(
                f"num_{name}: got {count}, expected at most {len(found)}, the distinct problems drawn from operands "
                f"{min_operand} to {max_operand} with held_out_share {held_out_share}"
            )
        return list(found)[:count]

    rng = random.Random(derive_seed(seed, TAG, "teacher"))
    demonstrations = [
        (problem, {column for column in range(problem.num_columns) if rng.random() < forget_rate})
        for problem in draw("demonstrations", num_demonstrations, held_out=False)
    ]
    files = {
        TRAIN: (_row("train", *item, wording) for item in enumerate(draw("train", num_train, held_out=False))),
        VAL: (
            # With the way to the answer, to measure imitation by.
            _row("val", index, problem, wording) | {"response": worked_solution(problem)}
            for index, problem in enumerate(draw("val", num_val, held_out=True))
        ),
        DEMONSTRATIONS: (_demonstration(index, *item, wording) for index, item in enumerate(demonstrations)),
    }
    if num_worked:
        worked = draw("worked", num_worked, held_out=False)
        files[WORKED] = (_demonstration(index, problem, (), wording) for index, problem in enumerate(worked))
    write_together(folder, files)


def _pairs(rng: random.Random, low: int, high: int, high_second: int, limit: int) -> Iterator[tuple[int, int]]:
    """At most ``limit`` distinct ordered pairs of numbers from ``low`` to ``high`` and ``high_second``, shuffled."""
    size, size_second = high - low + 1, high_second - low + 1
    for index in rng.sample(range(size * size_second), min(limit, size * size_second)):
        x, y = divmod(index, size_second)
        yield low + x, low + y


def _problem(x: int, y: int, operation: str) -> Problem:
    return Problem(max(x, y), "-", min(x, y)) if operation == "-" else Problem(x, operation, y)


def _row(split: str, index: int, problem: Problem, wording: str) -> dict[str, Any]:
    return {
        "id": f"{TAG}-{split}-{index}",
        "tag": TAG,
        "prompt": problem.prompt(wording),
        "solution": str(problem.answer),
        "operands": [problem.x, problem.y],
        "operation": problem.operation,
        "difficulty": len(problem.carried_columns),
    }


def _demonstration(index: int, problem: Problem, forgotten_columns: Collection[int], wording: str) -> dict[str, Any]:
    return {
        "id": f"{TAG}-demonstration-{index}",
        "prompt": problem.prompt(wording),
        "response": worked_solution(problem, forgotten_columns),
    }


def write_together(folder: Path, files: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Writes JSON-lines files beside their final names, then renames them all."""
    folder.mkdir(parents=True, exist_ok=True)
    building = {folder / name: folder / f".{name}.{os.getpid()}.tmp" for name in files}
    try:
        for temporary, rows in zip(building.values(), files.values(), strict=True):
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in building.items():
            temporary.replace(path)
    finally:
        for temporary in building.values():
            temporary.unlink(missing_ok=True)


def _check_pair_arguments(*, slip_rate: float = 0.0, **options: Any) -> None:
    write_dataset.check_arguments(**options)  # type: ignore[attr-defined]


@takes(passes_on=write_dataset, check=_check_pair_arguments)
def write_pairs(folder: Path, *, seed: int = 0, slip_rate: Rate = 0.0, **options: Any) -> None:
    """Writes ``pairs.jsonl`` and ``val_pairs.jsonl`` beside the files of ``write_dataset``, of the same problems.

    Every problem of ``train.jsonl`` and ``val.jsonl`` in which something is carried or borrowed is a pair, with
    ``slip_rate`` every problem. Rows also
    have ``response``, the chosen answer or the rejected one, with ``label`` and ``score``, which of the two it is, and
    its ``steps`` with ``step_labels``, which are right.

    Args:
        folder: made if it is not there.
        slip_rate: probability of another mistake than a forgotten carry: one that nothing owes, a wrong result that
            the answer follows from, or a digit that is wrong, doubled or left out. A problem without carries has no
            other.
        options: further arguments of ``write_dataset``.
    """
    write_dataset(folder, seed=seed, **options)
    files = {
        target: list(_preferences(folder / source, random.Random(derive_seed(seed, TAG, target)), slip_rate))
        for source, target in ((TRAIN, PAIRS), (VAL, VAL_PAIRS))
    }
    write_together(folder, files)


def _preferences(path: Path, rng: random.Random, slip_rate: float) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        problem = Problem(row["operands"][0], row["operation"], row["operands"][1])
        carried = problem.carried_columns
        if not (carried or slip_rate):
            continue
        chosen = worked_solution(problem)
        if carried and not (slip_rate and rng.random() < slip_rate):
            rejected = worked_solution(problem, set(rng.sample(carried, rng.randint(1, len(carried)))))
        else:
            rejected = _with_a_slip(problem, chosen, rng)
        label = rng.random() < 0.5
        response = chosen if label else rejected
        steps, right = _steps(response), _steps(chosen)
        wrong_from = next((n for n, (a, b) in enumerate(zip(steps, right, strict=True)) if a != b), len(steps))
        yield row | {
            "chosen": chosen,
            "rejected": rejected,
            "response": response,
            "label": label,
            "score": float(label),
            "steps": steps,
            "step_labels": [n < wrong_from for n in range(len(steps))],
        }


def _with_a_slip(problem: Problem, chosen: str, rng: random.Random) -> str:
    columns = range(problem.num_columns)
    kind = rng.choice(("carry", "result", "digit"))
    if kind == "carry":
        free = [column for column in columns if column not in problem.carried_columns]
        return worked_solution(problem, invented_columns=[rng.choice(free)])
    if kind == "result":
        return worked_solution(problem, errors={rng.choice(columns): rng.choice((-1, 1)) * rng.randint(1, 9)})
    place = rng.choice([place for place, character in enumerate(chosen) if character.isdigit()])
    digit = chosen[place]
    other = str((int(digit) + rng.randint(1, 9)) % 10)
    return chosen[:place] + rng.choice((other, digit + digit, "")) + chosen[place + 1 :]


def _steps(solution: str) -> list[str]:
    """A solution cut behind every column's sum; the last step is the answer."""
    thoughts, marker, answer = solution.partition("</think>")
    first, *others = thoughts.split(" ")
    return [first, *(f" {step}" for step in others), marker + answer]
