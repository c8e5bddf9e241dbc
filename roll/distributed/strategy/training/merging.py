"""Makes model folders from checkpoints, in one process, tensor by tensor, on a CPU.

What a checkpoint holds of a role is a model folder, an adapter's, or shards that ranks have written. Shards are joined,
an adapter is merged into the weights that it adapts, numbers are rounded once and from the most exact ones there are:
those of the optimizer, where the model's own are stored in fewer bits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.distributed.strategy.training.checkpoint import (
    ADAPTER,
    HEAD_PREFIX,
    MODEL,
    MODEL_PREFIX,
    OPTIMIZER,
    SHARDS_FOLDER,
    UNTRAINED,
    VALUE_HEAD,
    Contents,
    StoredShards,
    Tensors,
    folder_forms,
    model_tensors,
    write_contents,
)
from roll.distributed.strategy.training.exchange import ShardLayout, TensorForm, WeightShard, everywhere, weight_shard
from roll.distributed.strategy.training.module_weights import hf_piece
from roll.distributed.strategy.training.optim import MASTER, MOMENTS
from roll.distributed.strategy.training.tensor_files import MAX_FILE_BYTES, StoredTensors
from roll.models.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    CLASSIFIES,
    is_target,
    read_adapter_config,
    unusual_entry,
)
from roll.models.freezing import whole_name
from roll.models.heads import SCORE_WEIGHT, VALUE_HEAD_FILE
from roll.models.loading import (
    COMPANIONS,
    GENERATION_FILE,
    Head,
    adapted_classifier_problem,
    classifier_entries,
    copy_files,
    copy_own_code,
    make_skeleton,
    resolve_dtype,
    state_format,
    to_hf_weights,
)
from roll.models.lora import PREFIX, SCORE_NAME, adapter_name, is_adapter, is_transposed, matrix_name
from roll.models.stored import scheme_of
from roll.models.tokenizer import TOKENIZER_FILES, local_folder
from roll.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel


CPU = torch.device("cpu")
_CONFIG = "config.json"
_CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True)
class Export:
    """Source and form of an export."""

    model: Path
    """A model folder, or an adapter's. There is none where the checkpoint holds shards."""
    resume: Path | None = None
    """Folder with what else the checkpoint has of the role."""
    dtype: torch.dtype | None = None
    """Number format of the weights, but for a value head; ``None``: that in which they are stored."""
    merge: bool = False
    """Add an adapter to the weights that it adapts."""
    base: str | None = None
    """The model that it adapts, if it is not where the adapter says."""
    config_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the base's configuration that the run replaced."""
    max_file_bytes: int = MAX_FILE_BYTES
    trust_remote_code: bool = False
    """True if Python files that come with the model may run."""


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    num_tensors: int
    num_bytes: int
    num_files: int
    notes: Sequence[str]
    """Facts that a reader should know."""


@dataclass
class _Draft:
    """Tensors of the folder to come, and where what is beside them comes from."""

    tensors: Tensors
    beside: Path
    """Has the tokenizer and, but for an adapter, the configuration."""
    base: Path | None = None
    """Model folder with what ``beside`` lacks."""
    classifies: bool = False
    """The base becomes a classifier with one output."""
    notes: list[str] = field(default_factory=list)


def export_folder(export: Export, target: Path) -> Exported:
    """Writes a model folder in Hugging Face form, or that of an adapter which is not merged.

    Args:
        target: an empty folder, or one to be made.

    Raises:
        ValueError: it cannot be exported so.
        OSError: it cannot be written.
    """
    shards = None if export.resume is None else export.resume / SHARDS_FOLDER
    if (export.model / ADAPTER_FILE).is_file():
        adapter = StoredTensors(export.model, [export.model / ADAPTER_FILE])
        draft = _adapter(export, export.model, _spreads(adapter))
    elif (export.model / _CONFIG).is_file():
        draft = _whole(export)
    elif shards is not None and shards.is_dir():
        draft = _sharded(export, shards)
    else:
        raise ValueError(f"{export.model}: neither a model nor an adapter in it, nor shards next to it")
    if export.merge and ADAPTER not in draft.tensors and draft.base is None:
        raise ValueError(f"{export.model}: no adapter in it; expected one to merge")
    contents = Contents(
        target, draft.tensors, lambda: _write_beside(export, draft, target), max_file_bytes=export.max_file_bytes
    )
    written = write_contents([contents]).result()
    names = [name for pieces in draft.tensors.values() for piece in pieces for name in piece.outline]
    return Exported(len(names), sum(file.size for file in written), len(written), draft.notes)


def _whole(export: Export) -> _Draft:
    """A model folder, in another number format where one is asked for."""
    folder = export.model
    found = _folder_spreads(folder)
    notes: list[str] = []
    exact: list[WeightShard] = []
    stored_in = {spread.dtype for spread in found.values() if spread.dtype.is_floating_point}
    if export.dtype is not None and stored_in - {export.dtype}:
        exact = _masters(export, notes)
    covered = {name for piece in exact for name in piece.outline}
    rest = [weight_shard(name, _as(spread, export.dtype)) for name, spread in found.items() if name not in covered]
    tensors: dict[str, Sequence[WeightShard]] = {MODEL: [*exact, *rest]}
    if (folder / VALUE_HEAD_FILE).is_file():
        head = StoredTensors(folder, [folder / VALUE_HEAD_FILE])
        tensors[VALUE_HEAD] = [weight_shard(name, spread) for name, spread in _spreads(head).items()]
    return _Draft(tensors, folder, notes=notes)


def _masters(export: Export, notes: list[str]) -> list[WeightShard]:
    """The float32 weights behind a model of fewer bits, under the names of its folder."""
    file = None if export.resume is None else (export.resume / OPTIMIZER).parent
    stored = StoredTensors(file) if file is not None and file.is_dir() else None
    if stored is None or MASTER not in stored.kinds:
        if export.dtype == torch.float32:
            notes.append("float32 weights were not saved: these are the stored ones, widened")
        return []
    spreads = _spreads(stored, f".{MASTER}")
    kind = _head_of(export.model)
    trunk = {name: spread for name, spread in spreads.items() if not name.startswith(HEAD_PREFIX)}
    return list(_model_pieces(export, export.model, kind, trunk, [])[MODEL])


def _sharded(export: Export, shards: Path) -> _Draft:
    """Whole tensors of shards."""
    if not any((shards / name).is_file() for name in (_CONFIG, ADAPTER_CONFIG)):
        raise ValueError(f"{shards}: no {_CONFIG} in it, an earlier version wrote none; continue from it and save")
    stored = StoredShards(shards)
    spreads = {name: spread for name, spread in _spreads(stored).items() if name.rpartition(".")[2] not in MOMENTS}
    trunk = {name.removeprefix(MODEL_PREFIX): one for name, one in spreads.items() if name.startswith(MODEL_PREFIX)}
    if (shards / ADAPTER_CONFIG).is_file():
        return _adapter(export, shards, _adapter_names(export, shards, spreads))
    kind = _head_of(shards)
    parameters = _skeleton(kind, shards, export.trust_remote_code, trunk).named_parameters()
    if frozen := [name for name, _ in parameters if name not in trunk]:
        raise ValueError(
            f"{shards}: no {frozen[0]} in it, an earlier version left out what is frozen; continue from it and save"
        )
    head = [
        weight_shard(name.removeprefix(HEAD_PREFIX), spread)
        for name, spread in spreads.items()
        if name.startswith(HEAD_PREFIX)
    ]
    untrained = (shards / UNTRAINED).parent
    found = _spreads(StoredTensors(untrained)) if untrained.is_dir() else {}
    beside = [weight_shard(name, spread) for name, spread in found.items()]
    return _Draft(_model_pieces(export, shards, kind, trunk, head, beside), shards)


def _model_pieces(
    export: Export,
    folder: Path,
    kind: Head,
    trunk: Mapping[str, ShardLayout],
    head: Sequence[WeightShard],
    beside: Sequence[WeightShard] = (),
) -> Tensors:
    """Parameters of a module, and what is ``beside`` them, as its model folder has them, see ``model_tensors``."""
    stated = json.loads((folder / _CONFIG).read_text(encoding="utf-8")).get("dtype")
    dtype = export.dtype or resolve_dtype(stated)
    model = _skeleton(kind, folder, export.trust_remote_code, trunk)
    pieces = [hf_piece(model, name, _as(one, dtype), torch.Size(one.shape)) for name, one in trunk.items()]
    return model_tensors([*pieces, *beside], head, kind, model.base_model_prefix)


def _adapter(export: Export, folder: Path, matrices: Mapping[str, ShardLayout]) -> _Draft:
    """An adapter by itself, or merged into its base."""
    if not export.merge:
        return _Draft({ADAPTER: [weight_shard(name, _as(one, export.dtype)) for name, one in matrices.items()]}, folder)
    config = read_adapter_config(folder)
    classifies = config.get("task_type") == CLASSIFIES
    if unusual := unusual_entry(config):
        raise ValueError(f"{folder}: {unusual}, expected an adapter without it to merge")
    base = _base_of(export, config)
    skeleton, scale = _skeleton("lm", base, export.trust_remote_code, matrices), config["lora_alpha"] / config["r"]
    layers = _layers(skeleton, matrices, config)
    stored = _folder_spreads(base)
    if classifies:
        if problem := adapted_classifier_problem(skeleton.config.model_type):
            raise ValueError(f"{folder}: {problem}")
        stored = _as_classifier(stored, matrices.get(SCORE_NAME), skeleton)
    if missing := [name for name in layers if name not in stored]:
        raise ValueError(f"{base}: no {missing[0]} in it, which the adapter changes; expected the model that it adapts")
    pieces = []
    for name, weight in stored.items():
        if name in layers:
            pieces.append(_merged(name, weight, *layers[name], scale=scale, dtype=export.dtype or weight.dtype))
        else:
            pieces.append(weight_shard(name, _as(weight, export.dtype)))
    return _Draft({MODEL: pieces}, folder, base, classifies)


def _as_classifier(
    stored: Mapping[str, ShardLayout], head: ShardLayout | None, model: PreTrainedModel
) -> dict[str, ShardLayout]:
    """A model's weights without its output layer, and a head: the adapter's, else the model's own.

    Raises:
        ValueError: no head, or one of several outputs.
    """
    found = stored.get(SCORE_WEIGHT) if head is None else head
    if found is None or found.shape[0] != 1:
        seen = "none" if found is None else f"shape {found.shape}"
        raise ValueError(f"{SCORE_NAME}: got {seen}, expected the head of a classifier with one output")
    trunk = {name: one for name, one in stored.items() if name.startswith(f"{model.base_model_prefix}.")}
    return trunk | {SCORE_WEIGHT: found}


def _adapter_names(export: Export, shards: Path, spreads: Mapping[str, ShardLayout]) -> dict[str, ShardLayout]:
    """Tensors that shards have of an adapter, and of a head with it, under the names of a peft folder."""
    config = read_adapter_config(shards)
    matrices = {name.removeprefix(MODEL_PREFIX): one for name, one in spreads.items() if is_adapter(name)}
    if config.get("task_type") != CLASSIFIES:
        return {adapter_name(name): one for name, one in matrices.items()}
    trunk = _skeleton("score", _base_of(export, config), export.trust_remote_code, matrices)
    named = {adapter_name(whole_name(trunk, name)): one for name, one in matrices.items()}
    (head,) = (one for name, one in spreads.items() if name.startswith(HEAD_PREFIX))
    return {**named, SCORE_NAME: head}


def _base_of(export: Export, config: Mapping[str, Any]) -> Path:
    """The folder of the model that is adapted."""
    name = export.base or config.get("base_model_name_or_path")
    if name is None:
        raise ValueError(f"{export.model}: {ADAPTER_CONFIG} names no base_model_name_or_path; expected --base MODEL")
    return local_folder(name, "*.json", "*.safetensors", *COMPANIONS, *TOKENIZER_FILES)


def _layers(
    model: PreTrainedModel, matrices: Mapping[str, ShardLayout], config: Mapping[str, Any]
) -> dict[str, tuple[ShardLayout, ShardLayout, bool]]:
    """A, B, and whether the weight is [inputs, outputs], by the name that it has in a model folder."""
    layers: dict[str, tuple[ShardLayout, ShardLayout, bool]] = {}
    modules = dict(model.named_modules())
    marks = matrix_name("", "A").removeprefix(PREFIX), matrix_name("", "B").removeprefix(PREFIX)
    for name, first in matrices.items():
        if not name.endswith(marks[0]):
            if not name.endswith(marks[1]) and name != SCORE_NAME:
                raise ValueError(f"{name}: got in the adapter, expected the matrices of LoRA alone to merge")
            continue
        layer = name.removeprefix(PREFIX).removesuffix(marks[0])
        second = matrices.get(matrix_name(layer, "B"))
        if second is None:
            raise ValueError(f"{name}: no {matrix_name(layer, 'B')} with it")
        if not first.shape[0] == second.shape[1] == config["r"]:
            seen = f"matrices of rank {first.shape[0]} and {second.shape[1]}"
            raise ValueError(f"{layer}: got {seen}, expected r = {config['r']} of {ADAPTER_CONFIG}")
        if not is_target(config, layer):
            raise ValueError(f"{layer}: got in {ADAPTER_FILE}, expected in target_modules of {ADAPTER_CONFIG} too")
        turned = layer in modules and is_transposed(modules[layer])
        shape = torch.empty(_adapted_shape(first, second, turned), device="meta")
        (stored, tensor), *others = to_hf_weights(model, f"{layer}.weight", shape).items()
        if others or tensor.shape != shape.shape:
            raise ValueError(
                f"{layer}: its weight is stored in another shape, expected one that an adapter is added to"
            )
        layers[stored] = (first, second, turned)
    return layers


def _adapted_shape(first: ShardLayout, second: ShardLayout, turned: bool) -> tuple[int, int]:
    shape = (second.shape[0], first.shape[1])
    return shape[::-1] if turned else shape


def _merged(
    name: str,
    weight: ShardLayout,
    first: ShardLayout,
    second: ShardLayout,
    turned: bool,
    *,
    scale: float,
    dtype: torch.dtype,
) -> WeightShard:
    """``W + scale·B·A``, computed in float64 and rounded once (Hu et al. 2021, section 4.1)."""
    if weight.shape != (adapted := _adapted_shape(first, second, turned)):
        raise ValueError(f"{name}: got shape {weight.shape}, expected {adapted}, which the adapter changes")

    def merge(whole: Sequence[Tensor]) -> dict[str, Tensor]:
        base, a, b = (tensor.double() for tensor in whole)
        delta = (a.T, b.T) if turned else (b, a)
        return {name: torch.addmm(base, *delta, alpha=scale).to(dtype)}

    return WeightShard([weight, first, second], merge)


def _write_beside(export: Export, draft: _Draft, target: Path) -> None:
    """Writes configuration, generation defaults and tokenizer."""
    folders = [folder for folder in (draft.base, draft.beside) if folder is not None]
    for folder in folders:
        if ADAPTER not in draft.tensors:
            copy_files(folder, [*COMPANIONS, *([] if draft.classifies else [GENERATION_FILE])], target)
    for folder in reversed(folders):  # all files of one: those of two tokenizers do not fit
        if copy_files(folder, TOKENIZER_FILES, target):
            break
    else:
        draft.notes.append("no tokenizer was saved with it")
    if ADAPTER in draft.tensors:
        shutil.copy2(draft.beside / ADAPTER_CONFIG, target)
        return
    content = json.loads((folders[0] / _CONFIG).read_text(encoding="utf-8"))
    if draft.base is not None:
        content |= export.config_kwargs
    if draft.classifies:
        content |= classifier_entries(content["model_type"])
    if export.dtype is not None:
        state_format(content, export.dtype)
    elif scheme_of(content) is not None:
        del content["quantization_config"]
    (target / _CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    copy_own_code(folders[0], target)


def _skeleton(kind: Head, folder: Path, trust_remote_code: bool, names: Iterable[str]) -> PreTrainedModel:
    """The module without values, which knows how its checkpoints name and shape them.

    Args:
        names: some of its parameters or of an adapter's: with a tower, they say which are the language model's.
    """
    pictures, path = any("language_model." in name for name in names), str(folder)
    with torch.device("meta"):
        return make_skeleton(kind, path, dtype=torch.float32, trust_remote_code=trust_remote_code, pictures=pictures)


def _head_of(folder: Path) -> Head:
    """Head on the trunk, by the configuration of a model folder that a trainer has written."""
    (architecture,) = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))["architectures"]
    if architecture.endswith(_CLASSIFIER):
        return "score"
    return "lm" if architecture.endswith("LMHeadModel") or "For" in architecture else "value"


def _spreads(stored: StoredTensors | StoredShards, suffix: str = "") -> dict[str, ShardLayout]:
    """Tensors that are read when they are asked for, by their names without a suffix that all of them have."""
    forms = {name: form for name, form in stored.forms.items() if name.endswith(suffix)}
    return {name.removesuffix(suffix): _spread(name, form, stored.get) for name, form in forms.items()}


def _folder_spreads(folder: Path) -> dict[str, ShardLayout]:
    """The tensors of a model folder."""
    files = WeightFiles(str(folder))
    forms = folder_forms(files, files.names)
    return {name: _spread(name, form, files.read) for name, form in forms.items()}


def _spread(name: str, form: TensorForm, read: Callable[[str], Tensor]) -> ShardLayout:
    return ShardLayout(form.shape, form.dtype, CPU, everywhere(form.shape), lambda: read(name))


def _as(spread: ShardLayout, dtype: torch.dtype | None) -> ShardLayout:
    """The tensor in another number format; whole numbers stay."""
    return replace(spread, dtype=dtype) if dtype is not None and spread.dtype.is_floating_point else spread
