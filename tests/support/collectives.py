"""Records what each rank enters on its process groups, and finds where the ranks of a group do not fit together.

``recording`` notes every collective and message of this process, whoever asks for it: our code, FSDP2, DTensor,
DeepSpeed and Megatron all end in the operators of ``torch.ops.c10d``, whose kernels for a CPU are replaced by ones that
take a note and go on. ``compare`` lets the records of all ranks run together, as nccl would:

- a collective goes on when all ranks of its group are in it, with the same operation, type, size and root;
- the n-th message between two ranks is received by the n-th receipt there, of the same size: nccl knows no tags;
- where a group's first communication on a device is a batch of messages, all of its ranks enter one, unless the group
  was made with ``device_id``: nccl connects a group in its first call, which is then a collective.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import threading
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

ROOT = str(Path(__file__).resolve().parents[2]) + "/"
TORCH = str(Path(torch.__file__).parent) + "/"
CALLED = ("distributed/distributed_c10d.py", "distributed/_functional_collectives.py")
"""Files of torch with the functions that are called."""
LOW = ("distributed/c10d_logger.py", "/contextlib.py")
"""Other files between these and the operators, beside all that torch has outside of ``distributed``."""
REDUCTIONS = (dist.ReduceOp, dist.ReduceOp.RedOpType, str)
ON_HOST = ("_gather_counts", "raise_on_all_ranks", "_first")
"""Functions of ours whose tensors lie in host memory on every machine, where gloo carries them."""
COLLECTIVES = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "broadcast_",
    "gather_",
    "monitored_barrier_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
)
MESSAGES = ("send", "recv_", "recv_any_source_")
INPUTS = ("tensors", "input_tensors", "inputs", "input_list", "input_tensor", "input")
"""Names of an operator's argument with what a rank gives, or with the place for what it receives."""
OWN_SIZES = ("alltoall_", "alltoall_base_", "scatter_")
"""Ranks may give different amounts to these."""


@dataclass(frozen=True)
class Entry:
    """One operation that a rank enters."""

    group: str
    ranks: tuple[int, ...]
    """The group's, by their numbers in the default group."""
    description: str
    """What the group's maker calls it."""
    connected: bool
    """The group was made with ``device_id``."""
    operation: str
    """Operator of ``torch.ops.c10d``."""
    label: str
    """The function that was called."""
    place: tuple[str, ...]
    """Who called it, innermost first."""
    size: int
    """Elements that go out; of a receipt, that come in."""
    dtype: str
    reduction: str
    root: int
    """Of a broadcast and its like, within the group; -1: it has none."""
    peer: int
    """The other end of a message, by its number in the default group; -1: none."""
    splits: tuple[tuple[int, ...], ...]
    """Of an all-to-all: what goes to each rank and comes from it; empty: equal shares."""
    on_host: bool
    """In host memory on every machine, not on the trainer's device."""
    thread: int
    part: str
    """What the run did meanwhile, such as a layout's name."""

    @property
    def is_message(self) -> bool:
        return self.operation in MESSAGES

    @property
    def in_batch(self) -> bool:
        return self.label == "batch_isend_irecv"

    @property
    def alike(self) -> tuple[Any, ...]:
        """What all ranks of a collective agree on."""
        size = None if self.operation in OWN_SIZES else self.size
        return self.operation, size, self.dtype, self.reduction, self.root

    @property
    def title(self) -> str:
        """Which group it is, for a person."""
        name = self.group if self.description == "undefined" else self.description
        return f"group {name} of {_ranks(self.ranks)}"

    def __str__(self) -> str:
        what = "" if "barrier" in self.operation else f" of {self.size} {self.dtype}"
        ends = (f"root {self.root}" if self.root >= 0 else "", f"with rank {self.peer}" if self.peer >= 0 else "")
        more = ", ".join(filter(None, (self.reduction, *ends)))
        return f"{self.label}{what}{more and f' ({more})'} at {' < '.join(self.place)}"


class Recorder:
    """Takes the notes of one process; what is written survives a rank that hangs."""

    def __init__(self, file: Path) -> None:
        self.part = ""
        """What the run does now."""
        self._file = file.open("w", encoding="utf-8")
        self._threads: dict[int, int] = {}
        self._lock = threading.Lock()

    def note(self, operation: str, arguments: Mapping[str, Any]) -> None:
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        ranks = dist.get_process_group_ranks(group)
        tensors = list(_flat([arguments[name] for name in INPUTS if name in arguments]))
        label, place, reduction, on_host = _caller(sys._getframe(2), "reduce_op" in arguments)
        peer = arguments.get("dst", arguments.get("src", -1))
        values = (
            group.group_name,
            ranks,
            group.group_desc,
            group.bound_device_id is not None,
            operation,
            label or operation,
            place,
            sum(tensor.numel() for tensor in tensors),
            str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            reduction,
            arguments.get("root_rank", -1),
            ranks[peer] if peer >= 0 else -1,
            [list(arguments.get(name, ())) for name in ("input_split_sizes", "output_split_sizes")],
            on_host,
        )
        with self._lock:
            thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
            self._file.write(json.dumps((*values, thread, self.part)) + "\n")
            self._file.flush()


def _flat(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from _flat(value)


def _caller(frame: FrameType | None, reduces: bool) -> tuple[str, list[str], str, bool]:
    """The function of torch that was called, the places that led there, its reduction, whether it is on the host."""
    label, reduction, place, on_host, below = "", "", list[str](), False, True
    while frame is not None and len(place) < 4:
        name = frame.f_code.co_name
        called, low, own, short = _file(frame.f_code.co_filename)
        below = below and (called or low)
        if called:
            label = name
            found = frame.f_locals.get("op", frame.f_locals.get("reduceOp")) if reduces else None
            reduction = str(found) if isinstance(found, REDUCTIONS) else reduction
        elif not below and (own or not place):
            place.append(f"{short}:{frame.f_lineno} {name}")
            on_host = on_host or name in ON_HOST
        frame = frame.f_back
    return label, place, reduction.removeprefix("RedOpType.").lower(), on_host or "_object" in label


@functools.cache
def _file(path: str) -> tuple[bool, bool, bool, str]:
    """Whether its functions are those that are called, or it lies below them, or it is ours; its short name."""
    low = path.endswith(LOW) or (path.startswith(TORCH) and "/distributed/" not in path)
    return path.endswith(CALLED), low, path.startswith(ROOT), path.removeprefix(ROOT).rpartition("site-packages/")[2]


@contextlib.contextmanager
def recording(file: Path | None) -> Iterator[Recorder]:
    """Notes in ``file`` what this process enters inside the block, in every thread; nothing where there is none."""
    recorder, library = Recorder(file or Path(os.devnull)), torch.library.Library("c10d", "IMPL")
    if file is None:
        yield recorder
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for name in (*COLLECTIVES, *MESSAGES):
            library.impl(name, _noting(name, recorder), "CPU")
    try:
        yield recorder
    finally:
        library._destroy()


def _noting(name: str, recorder: Recorder) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default
    arguments = [argument.name for argument in operator._schema.arguments]
    # The kernel for CUDA asks the group for its backend there, which is the same gloo.
    further = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

    def kernel(*given: Any, **named: Any) -> Any:
        recorder.note(name, dict(zip(arguments, given, strict=False)) | named)
        return operator.redispatch(further, *given, **named)

    return kernel


def read(file: Path) -> list[Entry]:
    """A rank's record, nothing where there is none; the last line of one that was killed may be torn."""
    entries = list[Entry]()
    if not file.exists():
        return entries
    for line in file.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            name, ranks, *rest = json.loads(line)
            rest[4], rest[10] = tuple(rest[4]), tuple(map(tuple, rest[10]))
            entries.append(Entry(name, tuple(ranks), *rest))
    return entries


@dataclass(frozen=True)
class Problem:
    """Ranks that do not fit together, for a person."""

    part: str
    text: str


def compare(records: Mapping[int, Sequence[Entry]]) -> list[Problem]:
    """Everything that would stop or garble a run on GPUs; nothing, where all ranks fit together."""
    return [*_unlike(records), *_lost_messages(records), *_partial_batches(records)]


def _unlike(records: Mapping[int, Sequence[Entry]]) -> Iterator[Problem]:
    """Collectives that some ranks of a group do not enter, or enter in another order, or as others."""
    run = _Run(records)
    for entries in run:
        if len({entry.alike for entry in entries.values()}) > 1 or not _splits_fit(list(entries.values())):
            yield run.problem(entries, "is not the same on all of its ranks", entered=True)
            return
    for entries in run.waiting():
        ranks = next(iter(entries.values())).ranks
        absent = [rank for rank in ranks if rank not in entries]
        yield run.problem(entries, f"is not entered by {_ranks(absent)}", entered=False)


def _splits_fit(entries: Sequence[Entry]) -> bool:
    out, back = ([entry.splits[n] if entry.splits else () for entry in entries] for n in (0, 1))
    if not all(out) or not all(back):
        return True  # equal shares
    return all(out[i][j] == back[j][i] for i, j in itertools.product(range(len(entries)), repeat=2))


class _Run:
    """The collectives of all ranks, each thread as far as it gets; yields those that are complete, by rank."""

    def __init__(self, records: Mapping[int, Sequence[Entry]]) -> None:
        self._of_group: dict[tuple[int, str], list[Entry]] = defaultdict(list)
        self._of_thread: dict[tuple[int, int], deque[Entry]] = defaultdict(deque)
        self._done: Counter[tuple[int, str]] = Counter()
        for rank, entries in records.items():
            for entry in entries:
                if not entry.is_message:
                    self._of_group[rank, entry.group].append(entry)
                    self._of_thread[rank, entry.thread].append(entry)

    def __iter__(self) -> Iterator[dict[int, Entry]]:
        to_try = deque(self._of_thread)
        while to_try:
            line = self._of_thread[to_try.popleft()]
            while line and (entries := self._complete(line[0])):
                for rank, entry in entries.items():
                    self._of_thread[rank, entry.thread].popleft()
                    self._done[rank, entry.group] += 1
                    to_try.append((rank, entry.thread))
                yield entries

    def _complete(self, entry: Entry) -> dict[int, Entry]:
        """What the ranks of a group are in, if all are in its next operation; else nothing."""
        found: dict[int, Entry] = {}
        for rank in entry.ranks:
            entries, done = self._of_group[rank, entry.group], self._done[rank, entry.group]
            if done == len(entries) or self._of_thread[rank, entries[done].thread][0] is not entries[done]:
                return {}
            found[rank] = entries[done]
        return found

    def waiting(self) -> list[dict[int, Entry]]:
        """For each group in which ranks wait at the end of the run, what they are in."""
        found: dict[str, dict[int, Entry]] = defaultdict(dict)
        for (rank, _), line in sorted(self._of_thread.items()):
            if line:
                found[line[0].group][rank] = line[0]
        return list(found.values())

    def problem(self, entries: Mapping[int, Entry], what: str, *, entered: bool) -> Problem:
        """What is wrong with a group's present operation, what its ranks do, and where they went different ways."""
        rank, first = next(iter(entries.items()))
        number = self._done[rank, first.group] + (not entered)
        lines = [f"{first.title}: its collective {number} {what}"]
        lines += _by_rank({rank: self._doing(rank, entries.get(rank)) for rank in first.ranks})
        programs = {rank: self._of_group[rank, first.group] for rank in first.ranks}
        for position in range(min(number - 1, *map(len, programs.values()))):
            texts = {rank: str(program[position]) for rank, program in programs.items()}
            if len(set(texts.values())) > 1:
                lines += [f"  Before, at its collective {position + 1}:", *_by_rank(texts)]
                break
        return Problem(first.part, "\n".join(lines))

    def _doing(self, rank: int, entry: Entry | None) -> str:
        if entry is not None:
            return str(entry)
        waits = [line[0] for (other, _), line in sorted(self._of_thread.items()) if other == rank and line]
        if waits:
            return f"in {waits[0]}, of {waits[0].title}"
        return "has ended"


def _lost_messages(records: Mapping[int, Sequence[Entry]]) -> Iterator[Problem]:
    """Messages without a receipt, or with one of another size; receipts without a message."""
    ends: dict[tuple[str, int, int], tuple[list[Entry], list[Entry]]] = defaultdict(lambda: ([], []))
    for rank, entries in records.items():
        for entry in filter(lambda entry: entry.is_message, entries):
            if entry.operation == "send":
                ends[entry.group, rank, entry.peer][0].append(entry)
            else:
                ends[entry.group, entry.peer, rank][1].append(entry)
    for (_, source, target), (sent, received) in ends.items():
        for number, (one, other) in enumerate(itertools.zip_longest(sent, received), start=1):
            if one is None or other is None or (one.size, one.dtype) != (other.size, other.dtype):
                known = one or other
                lines = [
                    f"{known.title}: message {number} from rank {source} to rank {target} is "
                    f"not received as it is sent ({len(sent)} are sent, {len(received)} received)",
                    f"  rank {source}: {one or 'sends no more'}",
                    f"  rank {target}: {other or 'receives no more'}",
                ]
                yield Problem(known.part, "\n".join(lines))
                break


def _partial_batches(records: Mapping[int, Sequence[Entry]]) -> Iterator[Problem]:
    """Batches of messages that connect a group although not all of its ranks are in them."""
    firsts: dict[str, dict[int, Entry]] = defaultdict(dict)
    for rank, entries in records.items():
        for entry in entries:
            if not entry.on_host and not entry.connected:
                firsts[entry.group].setdefault(rank, entry)
    for first in firsts.values():
        inside = {rank: entry for rank, entry in first.items() if entry.in_batch}
        if inside and len(inside) < len(known := next(iter(inside.values())).ranks):
            outside = [rank for rank in known if rank not in inside]
            entry = next(iter(inside.values()))
            lines = [
                f"{entry.title}: its first communication is a batch of messages that "
                f"{len(inside)} of {len(known)} ranks enter, expected all, a collective before it, or device_id",
                *_by_rank({rank: str(each) for rank, each in inside.items()}),
                *_by_rank({rank: f"first in {first.get(rank, 'nothing')}" for rank in outside}),
            ]
            yield Problem(entry.part, "\n".join(lines))


def _by_rank(texts: Mapping[int, str]) -> list[str]:
    """What each rank does, those together that do the same."""
    ranks = defaultdict(list)
    for rank, text in texts.items():
        ranks[text].append(rank)
    return [f"  {_ranks(those)}: {text}" for text, those in ranks.items()]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def counts(records: Mapping[int, Sequence[Entry]]) -> dict[str, dict[str, int]]:
    """What was compared, by part: groups of two ranks or more, and what all ranks entered on these."""
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in itertools.chain.from_iterable(records.values()):
        found[entry.part] += [entry] if len(entry.ranks) > 1 else []
    return {
        part: {
            "groups": len({entry.group for entry in entries}),
            "collectives": sum(not entry.is_message for entry in entries),
            "messages": sum(entry.is_message for entry in entries),
        }
        for part, entries in found.items()
    }
