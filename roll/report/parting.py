"""Where two runs part that should agree: step, phase, metric, token and tensor, and what explains that.

Rounding is what remains between runs of equal settings and data: other kernels, devices, layouts or versions add up in
another order. It begins small and grows with every update, so the first difference tells whether it can be the cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.rollout.types import Collected, kept_steps
from roll.tracking.run import TRAINED, read_json_lines

if TYPE_CHECKING:
    from torch import Tensor

    from roll.report.comparison import Run

MEASURED = ("time/", "tokens_per_s", "tflops", "mfu", "memory/")
"""Metrics that differ from run to run."""
_PHASES = (
    ("rollout", ("eval", "rollout/", "kept/")),
    ("logprobs", ("mismatch/", "probe/", "async/", "teacher/")),
    ("advantage", ("reward/", "actor/advantage")),
)
"""In the order of a step, with the beginnings of their metrics; all others are of the phase train."""
_ROUNDING = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.4}
"""Differences of log-probs of the same tokens, in nats, that number formats explain: the bounds of the probe."""
_TENSORS = 5
"""Shown, the largest first."""
_MODELS = ("actor_train", "critic")
"""Folders of a checkpoint that hold one."""


@dataclass
class Parting:
    """What two runs show, in lines; the cause is named last.

    Attributes:
        step: the first with other metrics; ``None`` where all are the same.
        size: of the first difference: of log-probs of the same tokens, else of the first metric; ``None`` where that is
            not known.
    """

    one: Run
    other: Run
    step: int | None = None
    phase: str = ""
    size: float | None = None
    of: str = ""
    lines: list[str] = field(default_factory=list)


def partings(one: Run, other: Run, differ: Sequence[str], layout: Sequence[str]) -> list[str]:
    """Lines about where two runs part.

    Args:
        differ: what is known of software and machines that differ, in words.
        layout: keys of layout and engines that differ, on which the order of sums depends.
    """
    found = Parting(one, other)
    _metrics(found)
    rows_part = _tokens(found)
    weights_part = _weights(found)
    if found.step is not None or rows_part or weights_part:
        found.lines.append(f"  cause: {_cause(found, differ, layout)}")
    return found.lines


def _metrics(found: Parting) -> None:
    """The first step, phase and metric that differ."""
    name = f"{found.other.name} and {found.one.name} should agree:"
    theirs = {each["step"]: each for each in found.other.metrics}
    for mine in found.one.metrics:
        step = mine["step"]
        if step not in theirs:
            found.lines.append(f"{name} the metrics are the same up to step {step - 1}, after which one has no more")
            return
        names = [name for name in mine if name != "step" and not name.startswith(MEASURED)]
        differ = [name for name in names if mine[name] != theirs[step].get(name)]
        if differ:
            phases = [phase for phase, _ in _PHASES] + ["train"]
            first = min(differ, key=lambda name: phases.index(_phase(name)))
            left, right = mine[first], theirs[step].get(first)
            found.step, found.phase = step, _phase(first)
            found.size, found.of = _size(first, left, right), f"{first} in step {step}"
            found.lines.append(
                f"{name} they part in step {step}, phase {found.phase}: {first} is {left!r} and {right!r} "
                f"({len(differ)} metrics differ)"
            )
            return
    found.lines.append(f"{name} all metrics are the same but those of time and memory")


def _size(name: str, left: Any, right: Any) -> float:
    """Of a difference: in nats where a metric is one of log-probs, else as a share of the metric."""
    if left is None or right is None:
        return math.inf
    return abs(left - right) / (1.0 if name.startswith(("probe/", "mismatch/")) else max(abs(left), abs(right)))


def _phase(name: str) -> str:
    return next((phase for phase, starts in _PHASES if name.startswith(starts)), "train")


def _tokens(found: Parting) -> bool:
    """The first sampled token that differs: of kept rollouts, else the first letter of the responses written.

    Tells whether any row differs, which equal metrics do not exclude: responses of equal lengths may have equal scores.
    """
    one, other = _kept(found.one), _kept(found.other)
    if one is None or other is None:
        response = _texts(found)
        if response is not None:
            found.lines.append(f"  response: {response or _SAME_TEXTS}")
        if found.phase == "rollout" or (response and found.step is None):
            found.size = None  # one token that is sampled otherwise moves metrics by any amount
        return bool(response)
    metrics_part = math.inf if found.step is None else found.step
    theirs = kept_steps(other)
    moved = False
    for step, folder in kept_steps(one).items():
        if step not in theirs:
            continue
        largest, place, token = _compared(Collected.load(folder), Collected.load(theirs[step]))
        if largest > 0 and not moved:
            moved = True
            if step <= metrics_part:
                found.size, found.of = largest, f"log-probs of the same tokens in step {step}"
            found.lines.append(
                f"  log-probs: those that the generators reported for the same tokens differ from step {step} on, "
                f"there by up to {largest:.2g} in {place}"
            )
        if token:
            found.lines.append(f"  token: the first that differs is in step {step}, {token}")
            if not moved and step <= metrics_part:
                found.size, found.of = math.inf, "a token after equal log-probs"
            return True
    if not moved and found.phase == "rollout":
        found.size, found.of = math.inf, "what was judged or counted of the same tokens"
    found.lines.append("  token: all that were kept are the same")
    return moved


def _kept(run: Run) -> Path | None:
    """Its ``rollout_dump_dir``, where that is here."""
    folder = run.settings.get("rollout_dump_dir")
    path = None if folder is None else Path(folder).expanduser()
    return path if path is not None and path.is_dir() else None


def _compared(mine: Collected, theirs: Collected) -> tuple[float, str, str]:
    """The largest difference of log-probs after equal tokens, and its place; the first token that differs."""
    largest, place, first = 0.0, "", ""
    for left, right in zip(mine.groups + mine.rejected, theirs.groups + theirs.rejected, strict=False):
        if left.group_id != right.group_id:
            return largest, place, first or f"where group {left.group_id} and {right.group_id} were taken"
        for ours, others in zip(left.trajectories, right.trajectories, strict=False):
            where = f"group {ours.group_id}, member {ours.member}"
            for number, (turn, their) in enumerate(zip(ours.turns, others.turns, strict=False), start=1):
                if turn.prompt_ids.tolist() != their.prompt_ids.tolist():
                    first = first or f"{where}, turn {number}: in the prompt"
                    break
                ids, their_ids = turn.completion.token_ids.tolist(), their.completion.token_ids.tolist()
                at = _first_other(ids, their_ids)
                shared = len(ids) if at is None else at
                away = abs(turn.completion.logprobs[:shared] - their.completion.logprobs[:shared])
                workers = _workers(turn.completion.engine, their.completion.engine)
                if (most := float(away.max(initial=0.0))) > largest:
                    largest, place = most, f"{where}, turn {number}, token {int(away.argmax()) + 1}{workers}"
                if at is not None:
                    shown = [f"{each[at]}" if at < len(each) else "none" for each in (ids, their_ids)]
                    words = _text_parting(turn.text, their.text)
                    first = first or (
                        f"{where}, turn {number}, token {at + 1}: id {shown[0]} and {shown[1]}"
                        f"{workers}"
                        f"{f'; {words}' if turn.text != their.text else ''}"
                    )
                    break
    return largest, place, first


def _workers(one: int, other: int) -> str:
    """The generating workers that sampled a token, where both are known."""
    return "" if min(one, other) < 0 else f" (sampled by generating worker {one} and {other})"


def _first_other(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    return next((at for at, (a, b) in enumerate(zip_longest(left, right)) if a != b), None)


_SAME_TEXTS = "those that were written up to then are the same (rollout_dump_dir keeps all, with their tokens)"


def _texts(found: Parting) -> str | None:
    """The first letter that differs in the responses written up to the step in which metrics do.

    Returns:
        Empty where none does, ``None`` where none were written.
    """
    last, names = math.inf if found.step is None else found.step, f"trajectories/{TRAINED}*.jsonl"
    paths = [path for path in sorted(found.one.folder.glob(names)) if int(path.stem.removeprefix(TRAINED)) <= last]
    for path in paths:
        pairs = zip(
            read_json_lines(path), read_json_lines(found.other.folder / "trajectories" / path.name), strict=False
        )
        for mine, theirs in pairs:
            for turn, (left, right) in enumerate(zip(mine["turns"], theirs["turns"], strict=False), start=1):
                if left["text"] != right["text"]:
                    return (
                        f"the first that differs is in step {int(path.stem.removeprefix(TRAINED))}, group "
                        f"{mine['group_id']}, member {mine['member']}, turn {turn}: "
                        f"{_text_parting(left['text'], right['text'])}"
                    )
    return "" if paths else None


def _text_parting(left: str, right: str) -> str:
    at = _first_other(left, right) or 0
    begin = max(0, at - 20)
    return f"at letter {at + 1} one says {left[begin : at + 20]!r}, the other {right[begin : at + 20]!r}"


@dataclass(frozen=True)
class Difference:
    """Two tensors of one name that are not the same."""

    name: str
    share: float
    """Of the values that differ."""
    absolute: float
    relative: float
    """The largest difference, as a share of the largest value."""
    bits: int | None
    """Last bits of a value that differ, at most; ``None`` for tensors of several formats or shapes."""

    @classmethod
    def of(cls, name: str, left: Tensor, right: Tensor) -> Difference | None:
        """``None`` where both are equal to the bit."""
        import torch

        if left.dtype != right.dtype or left.shape != right.shape:
            return cls(name, 1.0, math.inf, math.inf, None)
        if torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
            return None
        differ = left != right
        away, size = (left.double() - right.double()).abs(), left.double().abs().max()
        bits = None
        if left.is_floating_point():
            steps = (_ordered(left) - _ordered(right)).abs()[differ]
            bits = int(steps.max()).bit_length() if steps.numel() else 1  # +0 and -0, or equal NaN
        largest = float(away.nan_to_num(math.inf).max())
        return cls(name, float(differ.double().mean()), largest, largest / max(float(size), 1e-300), bits)

    def __str__(self) -> str:
        if self.bits is None:
            return f"{self.name}: of another shape or number format, or in one alone"
        return (
            f"{self.name}: {self.share:.1%} of the values, by up to {self.absolute:.2g} ({self.relative:.2g} of its "
            f"largest value; in the last {self.bits} bits)"
        )


def _ordered(values: Tensor) -> Tensor:
    """Numbers as integers in the same order: neighbours are 1 apart."""
    import torch

    kinds = {1: (torch.int8, 0x7F), 2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}
    if (size := values.element_size()) == 8:
        return values.view(torch.int64) // 2  # float64: to within two neighbours, without overflow
    kind, most = kinds[size]
    bits = values.view(kind).to(torch.int64)
    return torch.where(bits < 0, -(bits & most), bits)


def _weights(found: Parting) -> bool:
    """The first checkpoint of both in which weights differ, and which; tells whether there is one."""
    folders = [_checkpoints(run) for run in (found.one, found.other)]
    steps = sorted(folders[0].keys() & folders[1].keys())
    for step in steps:
        count = 0
        differ: list[Difference] = []
        for model in _MODELS:
            tensors, differences = _differences(model, folders[0][step] / model, folders[1][step] / model)
            count, differ = count + tensors, differ + differences
        if differ:
            equal = [f"equal in checkpoint-{each}" for each in steps if each < step][-1:]
            found.lines.append(
                f"  weights: {', '.join([*equal, f'in checkpoint-{step}'])} {len(differ)} of {count} tensors differ:"
            )
            ranked = sorted(differ, key=lambda each: -each.relative)
            found.lines += [f"    {each}" for each in ranked[:_TENSORS]]
            return True
    if steps:
        found.lines.append(f"  weights: equal to the bit in the checkpoints of step {', '.join(map(str, steps))}")
    elif found.step is not None:
        found.lines.append("  weights: there is no checkpoint of the same step (save_steps, max_ckpt_to_keep)")
    return False


def _checkpoints(run: Run) -> Mapping[int, Path]:
    saved = run.settings.get("checkpoint_config.output_dir")
    folder = Path(saved).expanduser() if saved else run.folder / "checkpoints"
    return {int(path.name.rpartition("-")[2]): path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()}


def _differences(model: str, left: Path, right: Path) -> tuple[int, list[Difference]]:
    """How many tensors two folders of a model hold, and those that differ."""
    from safetensors import safe_open

    sides: list[dict[str, Any]] = []
    for folder in (left, right):
        opened = [safe_open(str(file), framework="pt") for file in folder.glob("*.safetensors")]
        sides.append({name: tensors for tensors in opened for name in tensors.keys()})  # noqa: SIM118
    names = sides[0].keys() | sides[1].keys()
    found = []
    for name in names:
        if any(name not in side for side in sides):
            found.append(Difference(f"{model} {name}", 1.0, math.inf, math.inf, None))
        elif each := Difference.of(f"{model} {name}", *(side[name].get_tensor(name) for side in sides)):
            found.append(each)
    return len(names), found


def _cause(found: Parting, differ: Sequence[str], layout: Sequence[str]) -> str:
    """Names what differs between the runs, and whether that can make the first difference so large."""
    known = [*differ, *([f"keys of layout and engines ({', '.join(layout)})"] if layout else [])]
    dtype = str(found.one.settings.get("actor_train.model_args.dtype") or "fp32")
    bound = _ROUNDING.get(dtype, max(_ROUNDING.values()))
    size = f"the first difference, of {found.of}, is {found.size or 0:.2g}"
    if found.size == math.inf:
        size = f"the first difference is {found.of}"
    if found.size is None:
        size = "how large the first difference is, is not known without rollout_dump_dir"
    if not known:
        timing = (
            "with async_generation_ratio the moment at which a response was done decides (replay_schedule repeats it)"
            if found.one.settings.get("async_generation_ratio")
            else "something that is not recorded does: the number of threads, an environment or reward that depends "
            "on time, or a fault of the machine"
        )
        return f"settings, data, software and machine are the same, so {timing}; {size}"
    what = f"the runs differ in nothing but {'; '.join(known)}"
    if found.size is None:
        return f"{what}; {size}"
    if found.size <= bound:
        return (
            f"{what}. That explains it: {size}, and rounding in {dtype} explains up to {bound:g}; a token sampled "
            "otherwise, and every update, then let it grow"
        )
    return (
        f"{what}, which does not explain it: {size}, and rounding in {dtype} explains up to {bound:g}; look for what "
        "is not recorded, such as an environment, a reward or the code"
    )
