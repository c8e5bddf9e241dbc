"""The tensors of a model folder by name, read when they are asked for, and how they fit a model.

Every engine reads a folder by the same rules: each tensor in it is taken by the model, kept as it is beside what is
trained, or the folder is refused. None is left out in silence, and none is made up.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.models.adapter_files import ADAPTER_CONFIG
from roll.models.stored import StoredTensor, scheme_in
from roll.models.tokenizer import local_folder, locate_model, model_folder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_PREDICTORS = re.compile(r"(^|\.)(mtp|nextn|eagle|medusa)[^.]*(\.|$)")
"""Modules that predict further tokens, by the names that published models give them."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_QUANTISED = re.compile(r"(_scale(_inv|s)?|_blocks|\.?(qweight|qzeros|g_idx|scales|absmax|quant_map)|_packed)$")
_FLOATS = {"F64", "F32", "F16", "BF16"}
_SAMPLED_ROWS = 64
_OTHER_FORMATS = ("pytorch_model*.bin", "*.safetensors", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack")


class WeightFiles:
    """A model's safetensors files, opened once; tensors come as the checkpoint names and shapes them.

    Args:
        path: folder in Hugging Face format, or a hub name (fetched first).

    Raises:
        ValueError: no such folder, no safetensors files in it, or files that are not those of their index.
    """

    def __init__(self, path: str) -> None:
        self.folder = local_folder(path, "*.safetensors", "*.json")
        """On this machine."""
        self._opened: dict[str, Any] = {}
        self._file_of = self._find()
        self.scheme = scheme_in(self.folder)
        """How what is in few bits is stored; it is read as plain tensors."""
        self.packed = {} if self.scheme is None else self.scheme.packed(self._file_of)
        self.names: Collection[str] = (
            self._file_of.keys() if self.scheme is None else dict.fromkeys(self.scheme.names(self._file_of))
        )

    @property
    def files(self) -> list[Path]:
        return [self.folder / file for file in dict.fromkeys(self._file_of.values())]

    def read(self, name: str) -> Tensor:
        """The whole tensor of ``stored``."""
        return self.stored(name).whole()

    def stored(self, name: str) -> StoredTensor:
        """A tensor to be read, in the number format of ``form``.

        Raises:
            ValueError: no tensor of that name.
        """
        # A model saved without its output layer has names without this prefix.
        file_name = next((n for n in (name, name.removeprefix("model.")) if n in self.names), None)
        if file_name is None:
            raise ValueError(f"{self.folder}: no weight {name!r} in its safetensors files")
        if self.scheme is not None and (parts := self.packed.get(file_name)):
            return self.scheme.stored(file_name, self._mapped(parts.values), self._mapped(parts.scales))
        shape = self.form(file_name)[0]
        return StoredTensor(shape, [(math.prod(shape), partial(self._mapped, file_name))])

    def _mapped(self, name: str) -> Tensor:
        tensor: Tensor = self._in(name).get_tensor(name)
        return tensor

    def form(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and number format, as a header names it (``BF16``)."""
        if self.scheme is not None and (parts := self.packed.get(name)):
            values = self._in(parts.values).get_slice(parts.values)
            return self.scheme.shape(tuple(values.get_shape())), self.scheme.dtype
        part = self._in(name).get_slice(name)
        return tuple(part.get_shape()), part.get_dtype()

    @cached_property
    def exact(self) -> frozenset[str]:
        """Names of the tensors in float32 where most weights have 16 bits, such as a router's bias."""
        forms = {name: self.form(name) for name in self.names}
        sizes = Counter[str]()
        for shape, kind in forms.values():
            sizes[kind] += math.prod(shape)
        if not sizes or sizes.most_common(1)[0][0] not in ("BF16", "F16"):
            return frozenset()
        return frozenset(name for name, (_, kind) in forms.items() if kind == "F32")

    def same(self, one: str, other: str, *, sampled: bool) -> bool:
        """Tells whether two tensors have the same values; ``sampled``: in some of their rows."""
        if self.form(one) != self.form(other):
            return False
        if one in self.packed or other in self.packed:
            return bool((self.read(one) == self.read(other)).all())
        parts = [self._in(name).get_slice(name) for name in (one, other)]
        rows = self.form(one)[0][0]
        step = max(1, rows // _SAMPLED_ROWS if sampled else 4096)
        width = 1 if sampled else step
        spans = ((start, start + width) for start in range(0, rows, step))
        return all(bool((parts[0][a:b] == parts[1][a:b]).all()) for a, b in spans)

    def close(self) -> None:
        """Lets go of what the system keeps of the files; what is read later opens them again."""
        self._opened.clear()

    def _in(self, name: str) -> Any:
        """The open file of a tensor."""
        return self._opened.get(file := self._file_of[name]) or self._open(file)

    def _find(self) -> dict[str, str]:
        """The file of each tensor, by what the files themselves hold."""
        index, single = self.folder / INDEX, self.folder / SINGLE
        indexed: dict[str, str] = {}
        if index.is_file():
            indexed = _read_index(index)
            if single.is_file() and SINGLE not in indexed.values():
                raise ValueError(f"model path {str(self.folder)!r}: got both {SINGLE} and {INDEX}, expected one model")
        elif not single.is_file():
            raise ValueError(f"model path {str(self.folder)!r}: {no_weights(self.folder)}")
        files = sorted(set(indexed.values())) or [SINGLE]
        if missing := [file for file in files if not (self.folder / file).is_file()]:
            named = f"{len(missing)} of the {len(files)} files that {INDEX} names are not there"
            raise ValueError(f"model path {str(self.folder)!r}: {named}: {shown(missing)}")
        if parts := sorted({path.name for path in self.folder.glob("model-*-of-*.safetensors")} - set(files)):
            read = f"that {INDEX} does not name" if indexed else f"next to {SINGLE}"
            raise ValueError(f"model path {str(self.folder)!r}: got {shown(parts)}, {read}; expected one model")
        found: dict[str, str] = {}
        for file in files:
            for name in self._open(file).keys():  # noqa: SIM118 (not a dict)
                if name in found:
                    raise ValueError(f"{self.folder}: {name} is in {found[name]} and in {file}, expected in one file")
                found[name] = file
        if absent := [name for name, file in indexed.items() if found.get(name) != file]:
            raise ValueError(f"{index}: {len(absent)} tensors are not in the files that it names: {shown(absent)}")
        return found

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            self._opened[file] = safe_open(str(self.folder / file), framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{self.folder / file}: {error}; expected a whole safetensors file") from error
        return self._opened[file]


def no_weights(folder: Path) -> str:
    """Says what a folder without weights that are read has in their place."""
    missing, others = f"no {SINGLE} in it, and no {INDEX}", other_weights(folder)
    return f"{missing}, but {shown(others)}; save_pretrained of Transformers writes the others" if others else missing


def other_weights(folder: Path) -> list[str]:
    """Names of files with weights that are not read."""
    return [path.name for pattern in _OTHER_FORMATS for path in folder.glob(pattern) if path.is_file()]


def tensor_names(path: str) -> Sequence[str] | None:
    """Names of a model's tensors where its files are on this machine, which nothing is fetched for; else ``None``."""
    folder = model_folder(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(locate_model(path)[0], local_files_only=True))
        except (OSError, ValueError):
            return None
    if (folder / INDEX).is_file():
        found, scheme = list(_read_index(folder / INDEX)), scheme_in(folder)
        return found if scheme is None else scheme.names(found)
    if not (folder / SINGLE).is_file():
        return None
    with contextlib.suppress(ValueError):  # said by those who read it
        return list(WeightFiles(str(folder)).names)
    return None


def shown(names: Iterable[str], most: int = 3) -> str:
    """The first of some names, and how many others there are."""
    listed = sorted(names)
    rest = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {rest} more" if rest > 0 else "")


def _read_index(file: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = dict(json.loads(file.read_text(encoding="utf-8"))["weight_map"])
        if strange := [name for name, place in found.items() if not isinstance(place, str)]:
            raise ValueError(f"weight_map.{strange[0]}: got {found[strange[0]]!r}, expected the name of a file")
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: {error!r}; expected the index of a model's safetensors files") from error


def adopt_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, tuple[tuple[str, ...], str | None]]:
    """Makes a model's tensors leave under the names that a folder has, and says what each name of it means.

    Transformers renames and joins tensors while it reads a folder, and undoes that when it saves the model which it has
    read. A model that gets its weights in another way learns here what it would have done.

    Returns:
        For each name the model's own, several where it is cut, or some that the model does not have; and the pattern of
        the conversion that makes them of it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    steps: Any = (
        [one for one in conversions if isinstance(one, WeightRenaming)],
        [one for one in conversions if isinstance(one, WeightConverter)],
    )
    own, prefix = model.state_dict(), model.base_model_prefix
    targets = {source: one.target_patterns for one in steps[1] for source in one.source_patterns}
    found: dict[str, tuple[tuple[str, ...], str | None]] = {}
    for name in sorted(names, key=dot_natural_key):
        key, pattern = rename_source_key(name, steps[0], steps[1], prefix, own)
        plain, _ = rename_source_key(name, [], [], prefix, own)
        if key not in own and plain in own:
            key, pattern = plain, None
        first, *others = targets[pattern] if pattern else [key]
        found[name] = ((key, *(key.replace(first, other) for other in others)), pattern)
    model._weight_conversions = [one for one in conversions if one.was_used()]  # type: ignore[assignment]
    return found


@dataclass(frozen=True)
class FolderFit:
    """How the tensors of a folder fit a model.

    Args:
        model: made of the folder's configuration, its weights on the meta device.
        config: the folder's, of which the model may be the language part.
        sampled: compare some rows of what may differ, not all.
    """

    model: PreTrainedModel
    config: PreTrainedConfig
    files: WeightFiles
    sampled: bool = False

    @cached_property
    def kept(self) -> list[str]:
        """Names of what the model does not compute with, and a saved model has as it was."""
        return sorted(name for name in self._left if self._stands_alone(name))

    def stored(self, key: str) -> StoredTensor:
        """A tensor by the model's own name, made of one or several of the folder's.

        Raises:
            ValueError: the folder has none, or some that do not fit together.
        """
        twins = [key, *(name for pair in self.model.all_tied_weights_keys.items() if key in pair for name in pair)]
        made = next((self._made_of[name] for name in twins if name in self._made_of), None)
        if made is None:
            raise ValueError(f"{self.files.folder}: no weight {key!r} in its safetensors files")
        own, groups = made
        if None in groups:
            return self.files.stored(groups[None][0])
        shape = tuple(self._own[own].shape)
        if _turns(self._converter(next(iter(groups)))):
            ((name,),) = groups.values()
            return StoredTensor(shape, [(math.prod(shape), partial(self._turned, own, name, shape))])
        if not _by_rows(self._converter(next(iter(groups)))):
            return StoredTensor(shape, [(math.prod(shape), partial(self._convert, own, groups, shape))])
        row = (1, *shape[1:])
        each = [{pattern: [names[index]] for pattern, names in groups.items()} for index in range(shape[0])]
        return StoredTensor(shape, [(math.prod(row), partial(self._convert, own, one, row)) for one in each])

    @cached_property
    def _made_of(self) -> dict[str, tuple[str, dict[str | None, list[str]]]]:
        """For each tensor of the model its name, and the folder's names that it is made of, by pattern."""
        found: dict[tuple[str, ...], dict[str | None, list[str]]] = {}
        for name, (keys, pattern) in self._meant.items():
            if keys[0] in self._own:
                found.setdefault(keys, {}).setdefault(pattern, []).append(name)
        return {key: (key, groups) for keys, groups in found.items() for key in keys}

    def _converter(self, pattern: str | None) -> Any:
        """Transformers' conversion of tensors whose names match a pattern."""
        used: Any = self.model._weight_conversions
        found = [one for one in used if hasattr(one, "operations") and pattern in one.source_patterns]
        return copy.deepcopy(found[-1])  # of several, the one that Transformers takes

    def _convert(self, key: str, groups: dict[str | None, list[str]], shape: tuple[int, ...]) -> Tensor:
        converter = self._converter(next(iter(groups)))
        for pattern, names in groups.items():
            for name in names:
                converter.add_tensor(key, name, pattern, partial(self.files.read, name))
        made = converter.convert(self._meant[name][0][0], model=self.model, config=self.model.config)[key]
        return _of_shape(key, made[0] if isinstance(made, list) else made, shape)

    def _turned(self, key: str, name: str, shape: tuple[int, ...]) -> Tensor:
        """A view of the file, of which a rank reads its experts alone."""
        tensor = self.files.read(name)
        return _of_shape(key, tensor if tensor.shape == shape else tensor.mT, shape)

    def problems(self) -> Iterator[str]:
        """Reasons for which no engine may read the folder."""
        kind, total = type(self.model).__name__, len(self.files.names)
        if foreign := sorted(self._left.keys() - set(self.kept)):
            yield (
                f"{len(foreign)} of its {total} tensors have no place in {kind} and would be lost: {shown(foreign)}; "
                f"{self._hint(foreign)}"
            )
        if missing := sorted(self._missing()):
            yield f"{len(missing)} weights are missing, the first is {missing[0]!r}"
        yield from self._shape_problems()
        if formats := {
            n: form for n in self._taken if (form := self.files.form(n)[1]) not in _FLOATS and self._real(n)
        }:
            name = min(formats)
            yield f"{name}: got number format {formats[name]}, expected weights in bf16, fp16 or fp32"
        for one, other in self._ties():
            if not self.files.same(one, other, sampled=self.sampled):
                yield (
                    f"{one} differs from {other}, but config.json says tie_word_embeddings: true, by which they are "
                    "one; engines would run different models. Set tie_word_embeddings: false in config.json if "
                    f"{one} is meant, else remove it from the file"
                )

    @cached_property
    def _own(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    @cached_property
    def _meant(self) -> dict[str, tuple[tuple[str, ...], str | None]]:
        return adopt_names(self.model, self.files.names)

    @cached_property
    def _taken(self) -> dict[str, str]:
        return {name: keys[0] for name, (keys, _) in self._meant.items() if keys[0] in self._own}

    @cached_property
    def _left(self) -> dict[str, str]:
        """What the model does not take, by names in the file, with what they would be in the model."""
        return {name: keys[0] for name, (keys, _) in self._meant.items() if keys[0] not in self._own}

    def _real(self, name: str) -> bool:
        return self._own[self._taken[name]].is_floating_point()

    def _stands_alone(self, name: str) -> bool:
        """Tells whether a tensor that is left over changes nothing of what the model computes."""
        key, model = self._left[name], self.model
        if ".lora_" in name:
            return False  # it means to change what the model computes
        if _PREDICTORS.search(name) or self._beyond(name) or name in self._of_other_parts:
            return True
        ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
        if any(re.search(pattern, key) for pattern in ignored):
            return True
        if key in self._computed or self.files.form(name)[1] == "BOOL" or name.endswith(".masked_bias"):
            return True  # masks and frequencies, which older versions stored
        return self._outside(name)

    @cached_property
    def _computed(self) -> set[str]:
        return {name for name, _ in self.model.named_non_persistent_buffers()}

    def _outside(self, name: str) -> bool:
        """A head beside the trunk, such as ``v_head.summary.weight``, which reads what the trunk returns."""
        prefix = f"{self.model.base_model_prefix}."
        roots = {child for child, _ in self.model.named_children()}
        trunk = self.model.base_model is self.model  # then the heads are what the model lacks
        whole = any(taken.startswith(prefix) for taken in self._taken)
        return whole and not name.startswith(prefix) and (trunk or name.partition(".")[0] not in roots)

    def _beyond(self, name: str) -> bool:
        """A layer behind the model's own, where the configuration says that some there predict further tokens."""
        text = self.config.get_text_config()
        entries = {key: value for key, value in text.to_dict().items() if isinstance(value, int)}
        further = max([0, *(count for key, count in entries.items() if "nextn" in key or "mtp" in key)])
        number, count = _LAYER.search(name), getattr(text, "num_hidden_layers", None)
        return number is not None and count is not None and count <= int(number[1]) < count + further

    @cached_property
    def _of_other_parts(self) -> set[str]:
        """Names that the class which the configuration names has beside the language model, as a vision tower."""
        import torch
        import transformers
        from transformers.initialization import no_init_weights

        config = self.config
        declared = getattr(transformers, (config.architectures or [""])[0], None)
        if config.get_text_config() is config or declared is None or type(self.model) is declared:
            return set()
        with torch.device("meta"), no_init_weights():
            whole = declared._from_config(config)
        own = whole.state_dict()
        return {name for name, (keys, _) in adopt_names(whole, self._left).items() if keys[0] in own}

    def _missing(self) -> set[str]:
        found = {key for name in self._taken for key in self._meant[name][0]}
        ties = self.model.all_tied_weights_keys
        for one, other in ties.items():
            if one in found or other in found:
                found |= {one, other}
        ignored = self.model._keys_to_ignore_on_load_missing or ()
        return {name for name in self._own.keys() - found if not any(re.search(each, name) for each in ignored)}

    def _shape_problems(self) -> Iterator[str]:
        parts: dict[str, dict[str, list[str]]] = {}
        wrong = []
        for name, key in self._taken.items():
            if (pattern := self._meant[name][1]) is not None:
                parts.setdefault(key, {}).setdefault(pattern, []).append(name)
                continue
            seen, expected = self.files.form(name)[0], tuple(self._own[key].shape)
            if seen != expected:
                wrong.append(f"{name}: got shape {seen}, expected {expected}")
        if wrong:
            yield wrong[0] + (f", and {len(wrong) - 1} more of other shapes" if wrong[1:] else "")
        for key, groups in parts.items():
            counts = {len(names) for names in groups.values()}
            many = any("*" in pattern for pattern in groups) and self._own[key].ndim == 3
            if len(counts) > 1 or (many and counts != {self._own[key].shape[0]}):
                made = ", ".join(f"{len(names)} of {pattern}" for pattern, names in groups.items())
                yield f"{key}: made of {made}, expected {self._own[key].shape[0] if many else 'as many'} of each"

    def _ties(self) -> Iterator[tuple[str, str]]:
        """Pairs of names of the file that are one tensor in the model."""
        names = {key: name for name, key in self._taken.items()}
        for target, source in self.model.all_tied_weights_keys.items():
            if target in names and source in names:
                yield names[target], names[source]

    def _hint(self, foreign: Sequence[str]) -> str:
        if any(_QUANTISED.search(name) for name in foreign):
            return "they belong to quantised weights; expected a model in bf16, fp16 or fp32"
        if any(".lora_" in name for name in foreign):
            return "they are an adapter's; expected a model that it is merged into, or the model and the adapter apart"
        count = getattr(self.config.get_text_config(), "num_hidden_layers", None)
        beyond = [int(found[1]) for name in foreign if (found := _LAYER.search(name))]
        if count is not None and beyond and min(beyond) >= count:
            return f"config.json says num_hidden_layers: {count}, the file has {max(beyond) + 1} layers"
        return "expected the config.json that belongs to the file"


def _of_shape(key: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tensor.shape != shape:
        raise ValueError(f"{key}: got shape {tuple(tensor.shape)}, expected {shape}")
    return tensor


def _turns(converter: Any) -> bool:
    """Tells whether a conversion changes at most the order of a tensor's last two dimensions."""
    first, *rest = converter.operations
    return not rest and type(first).__name__ == "Transpose" and first.check_dims and (first.dim0, first.dim1) == (1, 2)


def _by_rows(converter: Any) -> bool:
    """Tells whether a conversion makes each row, such as an expert, of one tensor of each kind."""
    first, *rest = converter.operations
    merges = type(first).__name__ == "MergeModulelist" and first.dim == 0
    return merges and all(type(one).__name__ == "Concatenate" and one.dim > 0 for one in rest)


def check_folder(model: PreTrainedModel, config: PreTrainedConfig, path: str, *, sampled: bool = False) -> FolderFit:
    """The fit of a folder that engines read. Arguments as in ``FolderFit``.

    Raises:
        ValueError: it has problems; names all of them.
    """
    fit = FolderFit(model, config, WeightFiles(path), sampled)
    if (fit.files.folder / ADAPTER_CONFIG).is_file():  # which Transformers would put on the model that it loads
        raise ValueError(f"model path {path!r}: got a model and {ADAPTER_CONFIG}, expected one of them")
    if problems := list(fit.problems()):
        raise ValueError(f"model path {path!r}: " + "; ".join(problems))
    return fit
