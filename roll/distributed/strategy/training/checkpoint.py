"""Checkpoints of a trainer, in safetensors and JSON only (nothing in them can run code), whichever engine wrote them.

A role has two folders in a checkpoint. ``<role>/`` is a model and nothing else, which other programs open:
``config.json``, tokenizer files, ``model*.safetensors`` and a critic's ``value_head.safetensors``, or with LoRA what
peft calls an adapter. ``resume/<role>/`` is what else a resumed run needs: ``optimizer/state*.safetensors`` with Adam's
moments, and the float32 weights when the model is stored in fewer bits; ``trainer.json`` with the counters;
``rng.safetensors`` with one torch generator state per rank. Tensors have Hugging Face names, so any number of ranks, in
any layout and with any engine, can read what others wrote. They are gathered one at a time, each where it is written:
every rank writes a share of the files. Where ranks have blocks of rows of the optimizer's tensors, each writes its own
as they are. In the background the same is done with copies of what the ranks had, over a process group of its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from roll.configs.pipeline import PARTS
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.training.exchange import (
    Read,
    ShardLayout,
    Slice,
    TensorForm,
    WeightShard,
    everywhere,
    gather,
    own_rank,
    raise_on_all_ranks,
    weight_shard,
    world_size,
)
from roll.distributed.strategy.training.optim import MASTER
from roll.distributed.strategy.training.tensor_files import (
    DTYPE_NAMES,
    MAX_FILE_BYTES,
    BackgroundWriter,
    PlannedFile,
    Reader,
    StoredTensors,
    cut_at_ranks,
    plan_files,
    write_index,
)
from roll.models.adapter_files import ADAPTER_FILE
from roll.models.heads import SCORE_WEIGHT, VALUE_HEAD_FILE
from roll.models.loading import Head, fit_folder, load_config
from roll.models.weight_files import FolderFit, WeightFiles, shown
from roll.utils.hashing import WrittenFile
from roll.utils.threads import in_background

logger = logging.getLogger(__name__)

SHARDS_FOLDER = "shards"
"""Folder of a checkpoint's shards, with the configuration and the tokenizer of their model beside them."""


class StoredShards:
    """Whole tensors by name from the shards that ranks have written (PyTorch's distributed checkpoint, safetensors).

    ``forms``: shape and number format of each.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the headers of the files.

        Raises:
            ValueError: there are none, or one is damaged.
        """
        from safetensors import SafetensorError
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        try:
            found: Any = HuggingFaceStorageReader(str(folder)).read_metadata()
        except SafetensorError as error:
            raise ValueError(f"{folder}: {error}; expected whole safetensors files") from error
        if not found.storage_data:
            raise ValueError(f"no safetensors in {folder}; expected the shards of a trainer")
        self._folder = folder
        self._parts: dict[str, list[tuple[torch.Size, torch.Size, str]]] = {}
        for index, part in found.storage_data.items():
            self._parts.setdefault(index.fqn, []).append((index.offset, part.shape, part.relative_path))
        self.forms = {
            name: TensorForm(tuple(entry.size), entry.properties.dtype)
            for name, entry in found.state_dict_metadata.items()
        }

    def get(self, name: str) -> Tensor:
        """Joins one tensor.

        Raises:
            ValueError: a part of it is missing.
        """
        from safetensors import safe_open

        form, parts = self.forms[name], self._parts[name]
        if (seen := sum(shape.numel() for _, shape, _ in parts)) != torch.Size(form.shape).numel():
            raise ValueError(f"{name}: {seen} elements in {self._folder}, expected a tensor of shape {form.shape}")
        whole = torch.empty(form.shape, dtype=form.dtype)
        for offsets, sizes, path in parts:
            with safe_open(path, framework="pt") as file:
                Slice(tuple(offsets), tuple(sizes), ()).cut(whole).copy_(file.get_tensor(name))
        return whole


MODEL = "model"
ADAPTER = Path(ADAPTER_FILE).stem
VALUE_HEAD = Path(VALUE_HEAD_FILE).stem
OPTIMIZER = "optimizer/state"
"""Stems of a checkpoint's files; the last is in ``resume_folder``, the others are in ``model_folder``."""

UNTRAINED = "untrained/tensors"
"""Stem of what a model folder has beside parameters, in the folder of a sharded checkpoint's shards."""

TRAINER_FILE = "trainer.json"
RNG_FILE = "rng.safetensors"
SINGLE = (ADAPTER, VALUE_HEAD, Path(RNG_FILE).stem)
"""Stems of what readers expect in one file."""

MODEL_PREFIX = "model."
HEAD_PREFIX = "value_head."
"""Parameters of the language model and of a critic's head, as a trainer's whole module names them."""


@dataclass
class TrainerState:
    """Counters of a trainer."""

    optimizer_steps: int = 0
    """Optimizer steps taken: the position in the learning-rate schedule."""
    total_optimizer_steps: int = 1
    """Horizon of the schedule."""


def model_folder(checkpoint: Path, role: str) -> Path:
    """Folder in which a checkpoint has a role's model, alone."""
    return checkpoint / role


def resume_folder(checkpoint: Path, role: str) -> Path:
    """Folder in which it has what else resumes the role."""
    return checkpoint / "resume" / role


class Trained(Protocol):
    """Weights and moments that a trainer changes, under the names of the Hugging Face module.

    A ``kind`` is one of the optimizer's moments or ``MASTER``, the float32 weights.
    """

    @property
    def device(self) -> torch.device: ...
    @property
    def kinds(self) -> Sequence[str]:
        """Of the optimizer's state."""

    def tensors(self, kind: str) -> Sequence[WeightShard]:
        """All of a kind, in float32; a parameter may have none of it."""

    def fill(self, kind: str, read: Reader) -> None:
        """Sets all of a kind (collective)."""

    def load(self, path: Path) -> None:
        """Sets the weights to those of a model folder or an adapter's (collective)."""

    def set_steps(self, steps: int) -> None:
        """Tells Adam how many steps it has taken, for its bias correction."""


def restore_checkpoint(
    path: Path, role: str, trained: Trained, parts: Collection[str] = PARTS, *, tensors: bool = True
) -> TrainerState:
    """Restores what a trainer saved, whatever its ranks and engine (collective).

    Args:
        parts: of the checkpoint that are taken; moments that are not stay as they are, in their first step.
        tensors: False leaves weights and moments as they are, which an engine then reads in a way of its own.

    Raises:
        ValueError: on every rank, when a part is missing or belongs to another model.
    """
    model, resume = model_folder(path, role), resume_folder(path, role)
    try:
        with raise_on_all_ranks():
            state = _read_state(model, resume)
            if tensors and not model.is_dir() and (resume / SHARDS_FOLDER).is_dir():
                words = "the strategy that wrote them, or in pretrain the folder that `roll export` makes of it"
                raise ValueError(f"it holds shards of {role}; expected {words}")
            files = {"rng": resume / RNG_FILE} | ({"optimizer": (resume / OPTIMIZER).parent} if tensors else {})
            if absent := [part for part, file in files.items() if part in parts and not file.exists()]:
                rest = ", ".join(part for part in PARTS if part in parts and part not in absent)
                words = f"it was saved without {' and '.join(absent)}"
                raise ValueError(f"{words}; expected checkpoint_config.load_contents: [{rest}]")
        if tensors:
            _restore_tensors(model, resume, trained, optimizer="optimizer" in parts)
    except ValueError as error:
        raise ValueError(f"checkpoint {path}: {error}") from error
    trained.set_steps(state.optimizer_steps if "optimizer" in parts else 0)
    if "rng" in parts:
        with raise_on_all_ranks():
            _restore_rng(resume, trained.device)
    return state


def adapter_tensors(path: Path, names: Collection[str]) -> StoredTensors:
    """Opens what a checkpoint of a run with an adapter has beside ``OPTIMIZER``.

    Args:
        names: of all tensors that are trained.

    Raises:
        ValueError: it is of a run without, or has more than these.
    """
    if not (path / ADAPTER_FILE).is_file():
        raise ValueError(f"no {ADAPTER_FILE}; expected a checkpoint of a run with lora_target")
    stored = StoredTensors(path, [path / ADAPTER_FILE])
    if others := sorted(stored.forms.keys() - set(names)):
        raise ValueError(f"{ADAPTER_FILE}: got {others[0]}, expected only the layers of lora_target")
    return stored


def _restore_tensors(model: Path, resume: Path, trained: Trained, *, optimizer: bool) -> None:
    if not optimizer:
        trained.load(model)
        return
    with raise_on_all_ranks():
        stored = StoredTensors((resume / OPTIMIZER).parent)
        masters = {name for name in stored.forms if name.endswith(f".{MASTER}")}
        if stored.kinds - {MASTER} != set(trained.kinds):
            found, expected = (", ".join(sorted(set(kinds) - {MASTER})) for kinds in (stored.kinds, trained.kinds))
            words = f"its optimizer has {found}; expected {expected}, those of training_args.optimizer here"
            raise ValueError(f"{words}; checkpoint_config.load_contents without optimizer restarts it")
    own = {f"{name}.{MASTER}" for piece in trained.tensors(MASTER) for name in piece.outline}
    if not masters or masters - own:  # what was trained and is frozen now is in the model's folder
        trained.load(model)
    if masters:
        trained.fill(MASTER, stored.reader(MASTER))
    for kind in trained.kinds:
        trained.fill(kind, stored.reader(kind))


def _read_state(model: Path, resume: Path) -> TrainerState:
    file = resume / TRAINER_FILE
    if file.is_file():
        return TrainerState(**json.loads(file.read_text()))
    if (model / TRAINER_FILE).is_file():
        raise ValueError(f"{TRAINER_FILE} in {model.name}: of an earlier version, which stored it next to the model")
    raise ValueError(f"no {TRAINER_FILE} in resume/{resume.name}; expected a folder written by save()")


def _restore_rng(path: Path, device: torch.device) -> None:
    """Gives this rank its generators' states of a checkpoint; a rank that it has none for keeps its own."""
    from safetensors.torch import load_file

    states = load_file(path / RNG_FILE)
    if f"cpu.{own_rank()}" not in states:
        logger.info("checkpoint %s has no generator state for rank %d; it keeps its own", path, own_rank())
        return
    torch.set_rng_state(states[f"cpu.{own_rank()}"])
    if device.type == "cuda" and f"cuda.{own_rank()}" in states:
        torch.cuda.set_rng_state(states[f"cuda.{own_rank()}"], device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor in host memory or on a GPU; complete when the current stream is.

    In host memory its room is pinned, which makes both ways several times as fast. PyTorch keeps such room for the next
    tensor of its size.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return DTensor(to_device(tensor._local_tensor, device), tensor._spec, requires_grad=tensor.requires_grad)
    if device.type == "cpu" and tensor.is_cuda:
        return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=True)


class Snapshots:
    """Copies tensors into memory that is reused.

    Fresh memory costs several times what the copy does: the system clears it page by page, and a GPU's driver pins it.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies all; those that show the same memory share a copy. What ``take`` returned before is written over."""
        pinned = torch.cuda.is_available()
        different = {_memory_of(tensor): tensor.detach() for tensor in tensors}
        self._kept = [self._room(number, tensor, pinned) for number, tensor in enumerate(different.values())]
        for copy, tensor in zip(self._kept, different.values(), strict=True):
            copy.copy_(tensor, non_blocking=pinned)
        if pinned:
            torch.cuda.synchronize()
        copies = dict(zip(different, self._kept, strict=True))
        return [copies[_memory_of(tensor)] for tensor in tensors]

    def _room(self, number: int, tensor: Tensor, pinned: bool) -> Tensor:
        kept = self._kept[number] if number < len(self._kept) else None
        if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)


def _memory_of(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


Tensors: TypeAlias = Mapping[str, Sequence[WeightShard]]
"""Tensors in the files of a folder, by the stems."""


@dataclass(frozen=True)
class SourceFolder:
    """The model folder that a role starts from."""

    fit: FolderFit
    kept: Sequence[WeightShard]
    """What the model does not compute with and a saved language model has as it was, such as a vision tower."""
    config: Mapping[str, Any]
    """What ``config.json`` says."""

    @property
    def exact(self) -> frozenset[str]:
        """Names of what is in float32 beside weights of 16 bits, and is saved so."""
        return self.fit.files.exact


def open_source(context: StrategyContext) -> SourceFolder:
    """Opens a role's model folder, of which each rank will read its part (collective).

    Raises:
        ValueError: on every rank, where the model has no place for some of its tensors, or lacks some.
    """
    args, path = context.worker.model_args, context.model_path
    with raise_on_all_ranks():
        config = load_config(path, args.model_config_kwargs, trust_remote_code=args.trust_remote_code)
        others = own_rank() > 0  # one rank compares what may differ as a whole
        options = {"trust_remote_code": args.trust_remote_code, "pictures": context.pictures}
        fit = fit_folder(context.head, path, config, sampled=others, **options)
        forms = folder_forms(fit.files, fit.kept) if context.head == "lm" else {}
        published = json.loads((fit.files.folder / "config.json").read_text(encoding="utf-8"))
    if not others and (kept := [name for name in fit.kept if forms or name != SCORE_WEIGHT]):
        what = "saved unchanged" if forms else f"not saved with the {context.role}"
        logger.info("%s: %d tensors are not trained, and %s: %s", path, len(kept), what, shown(kept))

    def piece(name: str, form: TensorForm) -> WeightShard:
        spread = ShardLayout(
            form.shape, form.dtype, torch.device("cpu"), everywhere(form.shape), lambda: fit.files.read(name)
        )
        return weight_shard(name, spread)

    return SourceFolder(fit, [piece(name, form) for name, form in forms.items()], published)


def folder_forms(files: WeightFiles, names: Iterable[str]) -> dict[str, TensorForm]:
    """Shapes and number formats of tensors in a model folder.

    Raises:
        ValueError: a number format that is not written again.
    """
    formats = {written: dtype for dtype, written in DTYPE_NAMES.items()}
    found = {name: files.form(name) for name in names}
    if strange := sorted(name for name, (_, kind) in found.items() if kind not in formats):
        kind = found[strange[0]][1]
        raise ValueError(f"{strange[0]}: number format {kind}, expected one of {', '.join(formats)}")
    return {name: TensorForm(shape, formats[kind]) for name, (shape, kind) in found.items()}


@dataclass(frozen=True)
class Contents:
    """Contents of a folder, which is created if necessary."""

    path: Path
    tensors: Tensors
    """Nothing is written of a stem that has none."""
    write_rest: Callable[[], None]
    """Writes what is no tensor; called on rank 0."""
    write_shards: Callable[[dist.ProcessGroup | None], None] | None = None
    """Writes what an engine writes in a way of its own (collective over a process group)."""
    max_file_bytes: int = MAX_FILE_BYTES

    @cached_property
    def pieces(self) -> Tensors:
        """Pieces that are written: the tensors, or parts of those that no other program reads."""
        return {
            stem: cut_at_ranks(pieces, world_size()) if stem == OPTIMIZER else pieces
            for stem, pieces in self.tensors.items()
            if pieces
        }

    @cached_property
    def files(self) -> dict[str, list[PlannedFile]]:
        """The same on all ranks, by the stems."""
        return {
            stem: plan_files(stem, pieces, world_size(), single=stem in SINGLE, max_bytes=self.max_file_bytes)
            for stem, pieces in self.pieces.items()
        }

    def targets(self) -> Iterator[tuple[WeightShard, PlannedFile]]:
        """Every piece and where it belongs, in the order in which they are gathered."""
        for stem, files in self.files.items():
            file_of = {id(piece): file for file in files for piece in file.pieces}
            yield from ((piece, file_of[id(piece)]) for piece in self.pieces[stem])


def model_tensors(trunk: Sequence[WeightShard], head: Sequence[WeightShard], kind: Head, prefix: str) -> Tensors:
    """A model's tensors, by the stems of their files, in the number format of a Hugging Face checkpoint.

    Args:
        trunk: the language model, or the trunk, whose names have no prefix.
        head: a critic's or a reward model's; empty of a language model.
        kind: of head. A reward model is one with its trunk, as a sequence classifier is.
        prefix: before the trunk's names in a classifier.
    """
    if kind != "score":
        return {MODEL: trunk, VALUE_HEAD: head}
    named = [piece.renamed(lambda name: f"{prefix}.{name}") for piece in trunk]
    return {MODEL: [*named, *(piece.renamed(lambda _: SCORE_WEIGHT) for piece in head)]}


def resume_contents(
    path: Path, optimizer: Sequence[WeightShard], state: TrainerState, device: torch.device | None
) -> Contents:
    """Contents of the folder that resumes training.

    Args:
        device: whose generator states are kept beside the CPU's; ``None``: none are.
    """
    counters = json.dumps(asdict(state), indent=2) + "\n"

    def write_rest() -> None:
        (path / TRAINER_FILE).write_text(counters)

    generators = [] if device is None else _rng_states(device)
    return Contents(path, {OPTIMIZER: optimizer, Path(RNG_FILE).stem: generators}, write_rest)


def write_contents(
    contents: Sequence[Contents], *, read: Read | None = None, group: dist.ProcessGroup | None = None
) -> Future[list[WrittenFile]]:
    """Gathers folders and hands them to the ranks' writers, each a share (collective).

    Args:
        read: see ``gather``.

    Returns:
        What this rank wrote, but for small files, once all of it is on disk; or the ``OSError``.

    Raises:
        OSError: on every rank, when one cannot write what is not left to the writers.
    """
    writer = BackgroundWriter()
    try:
        for one in contents:
            _hand_over(one, writer, read, group)
    except BaseException:
        writer.close().exception()  # it has stopped writing
        raise
    return writer.close()


class BackgroundSaves:
    """Writes contents as they were at the start, while the ranks continue to change them. One save at a time."""

    def __init__(self) -> None:
        self._snapshots = Snapshots()
        self._group: dist.ProcessGroup | None = None
        self._running: Future[list[WrittenFile]] | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """In which nothing else is sent, so that it may be used beside training (made collectively)."""
        if self._group is None and world_size() > 1:
            self._group = dist.new_group(backend="gloo")
        return self._group

    def start(self, contents: Sequence[Contents]) -> Future[list[WrittenFile]]:
        """Copies this rank's parts to host memory and returns (collective); the result: see ``write_contents``."""
        if self._running is not None:
            self._running.exception()  # its copies are needed no more
        group, rank = self.group, own_rank()
        spreads = [
            spread
            for one in contents
            for piece, file in one.targets()
            for spread in piece.spreads
            if spread.sent_by(rank, file.rank)
        ]
        copies = dict(zip(map(id, spreads), self._snapshots.take([one.own() for one in spreads]), strict=True))

        def write() -> list[WrittenFile]:
            return write_contents(contents, read=lambda spread: copies[id(spread)], group=group).result()

        self._running = in_background(write, name="checkpoint")
        return self._running


def optimizer_tensors(trained: Trained, *, masters: bool) -> list[WeightShard]:
    """``<parameter>.<kind>`` for each moment, and ``.master`` where the model is stored in fewer bits."""
    kinds = (*trained.kinds, MASTER) if masters else trained.kinds
    return [
        piece.renamed(lambda name, kind=kind: f"{name}.{kind}")  # type: ignore[misc]
        for kind in kinds
        for piece in trained.tensors(kind)
    ]


def _hand_over(
    contents: Contents, writer: BackgroundWriter, read: Read | None, group: dist.ProcessGroup | None
) -> None:
    path = contents.path
    with raise_on_all_ranks(group):
        if own_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
            contents.write_rest()
            for stem, files in contents.files.items():
                write_index(path, stem, files)
    if contents.write_shards is not None:
        contents.write_shards(group)
    for piece, file in contents.targets():
        whole = gather([piece], [file.rank], read=read, group=group)
        if own_rank() != file.rank:
            continue
        target = path / file.name
        if piece is file.pieces[0]:
            writer.begin(target, file.header())
        for name, form in piece.outline.items():
            tensor = whole[name]
            assert (tensor.shape, tensor.dtype) == form, (name, tensor.shape, tensor.dtype, form)
            writer.add(target, tensor)


def _rng_states(device: torch.device) -> list[WeightShard]:
    """Every rank's generator states."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)

    def piece(kind: str, state: Tensor, rank: int) -> WeightShard:
        region = Slice((0,), tuple(state.shape), (rank,))
        spread = ShardLayout(tuple(state.shape), state.dtype, torch.device("cpu"), [region], lambda: state)
        return weight_shard(f"{kind}.{rank}", spread)

    return [piece(kind, state, rank) for kind, state in states.items() for rank in range(world_size())]
