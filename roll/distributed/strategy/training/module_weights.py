"""Parameters of a distributed Hugging Face module, under the names in its files.

What is here is the same for all engines that train such a module (FSDP2, DeepSpeed): its way from a model folder and to
a generator, its adapter, its checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from roll.algorithms.quantities import OutputLayer
from roll.distributed.strategy.training.checkpoint import HEAD_PREFIX, MODEL_PREFIX, adapter_tensors
from roll.distributed.strategy.training.exchange import (
    ShardLayout,
    WeightShard,
    everywhere,
    gather,
    own_rank,
    raise_on_all_ranks,
    weight_shard,
    world_size,
)
from roll.distributed.strategy.training.optim import MASTER
from roll.distributed.strategy.training.tensor_files import Reader
from roll.models.freezing import whole_name
from roll.models.heads import decoder_layers, load_value_head
from roll.models.loading import (
    Head,
    converts_weights,
    fit_folder,
    load_config,
    persistent_buffers,
    set_buffer,
    to_hf_weights,
)
from roll.models.lora import SCORE_NAME, adapter_name, base_name, initial_value, is_adapter
from roll.models.scoring import TokenScorer
from roll.models.stored import StoredTensor
from roll.models.weight_files import FolderFit
from roll.utils.memory import paused_collector

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModuleWeights(Protocol):
    """Protocol of an engine. Names are those of the scorer's parameters, kinds those of ``checkpoint.Trained``."""

    @property
    def scorer(self) -> TokenScorer: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...
    @property
    def trained(self) -> Collection[str]:
        """Names of the parameters that the optimizer changes."""

    def shape(self, name: str) -> torch.Size:
        """The whole parameter's."""

    def kinds(self, name: str) -> Sequence[str]:
        """Kinds of the optimizer's state behind a trained parameter."""

    def spread(self, name: str, kind: str, dtype: torch.dtype) -> ShardLayout:
        """State of a parameter, where it lies, ``MASTER`` as exact as there is (the only one of what is not trained).

        Collective.
        """

    def places(self, name: str, kind: str) -> Sequence[ShardLayout]:
        """Where state of a parameter, or an untrained one's ``MASTER``, is set: ``own`` of each shares its memory.

        Collective.
        """

    def set_steps(self, steps: int) -> None:
        """Tells Adam how many steps it has taken, for its bias correction."""


@dataclass(frozen=True)
class TrainedModule:
    """``checkpoint.Trained`` for such a module."""

    weights: ModuleWeights
    trust_remote_code: bool = False
    """True if Python files that come with a model may run to read it."""

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def kinds(self) -> Sequence[str]:
        return sorted({kind for name in self.weights.trained for kind in self.weights.kinds(name)})

    def tensors(self, kind: str) -> list[WeightShard]:
        return [_float32(self.weights, name, _stored_name(self.weights, name), kind) for name in self._with(kind)]

    def fill(self, kind: str, read: Reader) -> None:
        fill(self.weights, self._with(kind), kind, lambda name: read(_stored_name(self.weights, name)))

    def _with(self, kind: str) -> list[str]:
        """Names of the trained parameters that have a kind of state."""
        return [name for name in self.weights.trained if kind == MASTER or kind in self.weights.kinds(name)]

    def load(self, path: Path) -> None:
        weights = self.weights
        if not any(map(is_adapter, weights.trained)):
            trusts = self.trust_remote_code
            head: Head = "lm" if weights.scorer.value_head is None else "value"
            with raise_on_all_ranks():
                options = {"trust_remote_code": trusts, "pictures": weights.scorer.tower is not None}
                fit = fit_folder(head, str(path), load_config(str(path), trust_remote_code=trusts), **options)
            load_model(fit, weights)
            return
        with raise_on_all_ranks():
            stored = adapter_tensors(path, [_peft_name(weights, name) for name in weights.trained])
        fill(weights, weights.trained, MASTER, lambda name: stored.stored(_peft_name(weights, name)))

    def set_steps(self, steps: int) -> None:
        self.weights.set_steps(steps)


def load_model(fit: FolderFit, weights: ModuleWeights) -> None:
    """Sets all parameters, but for an adapter's, and buffers to those of a folder; ranks read their parts (collective).

    Raises:
        ValueError: on every rank, when one cannot read its part.
    """
    model, head = weights.scorer.model, weights.scorer.value_head
    saved: dict[str, Tensor] = {}
    with raise_on_all_ranks():
        if head is not None:
            bias, width = head.linear.bias is not None, model.config.get_text_config().hidden_size
            saved = dict(load_value_head(width, fit.files.folder, bias=bias).named_parameters(HEAD_PREFIX[:-1]))
        for name, buffer in list(persistent_buffers(model)):
            set_buffer(model, name, fit.stored(base_name(name)).whole().to(buffer.device))

    def read(name: str) -> StoredTensor:
        if name in saved:
            return StoredTensor.of(saved[name])
        return fit.stored(base_name(name).removeprefix(MODEL_PREFIX))

    fill(weights, [name for name in weights.parameters if not is_adapter(name)], MASTER, read)
    fit.files.close()


def start_adapter(weights: ModuleWeights, seed: int) -> None:
    """Gives an adapter its first values (collective)."""
    names = [name for name in weights.parameters if is_adapter(name)]

    def first(name: str) -> StoredTensor:
        return StoredTensor.of(initial_value(_peft_name(weights, name), weights.shape(name), seed))

    fill(weights, names, MASTER, first)


@torch.no_grad()
def fill(weights: ModuleWeights, names: Iterable[str], kind: str, read: Callable[[str], StoredTensor]) -> None:
    """Sets this rank's parts of what ``names`` mean (collective).

    Raises:
        ValueError: on every rank, when one cannot read its part.
    """
    places = {name: weights.places(name, kind) for name in names}
    with raise_on_all_ranks():
        for name, layouts in places.items():
            stored, expected = read(name), tuple(weights.shape(name))
            if stored.shape != expected:
                raise ValueError(f"{_stored_name(weights, name)}: got shape {stored.shape}, expected {expected}")
            for layout in layouts:
                for region in layout.regions:
                    if own_rank() in region.ranks:
                        stored.copy_into(layout.own(), layout.shape, region.offsets, region.sizes)


def buffer_pieces(weights: ModuleWeights) -> list[WeightShard]:
    """What a model folder has beside parameters, the same on every rank and never trained, under its names."""
    model = weights.scorer.model

    def piece(name: str, buffer: Tensor) -> WeightShard:
        shape = tuple(buffer.shape)
        (stored,) = to_hf_weights(model, base_name(name), torch.empty(shape, device="meta"))
        return weight_shard(stored, ShardLayout(shape, buffer.dtype, buffer.device, everywhere(shape), lambda: buffer))

    return [piece(name, buffer) for name, buffer in persistent_buffers(model)]


@paused_collector()
def hf_pieces(weights: ModuleWeights, dtype: torch.dtype, exact: AbstractSet[str] = frozenset()) -> list[WeightShard]:
    """The language model's weights without an adapter under Hugging Face names, tied ones once (collective).

    Args:
        exact: names of what is in float32 whatever ``dtype`` is.

    Raises:
        ValueError: an engine has the exact values no more.
    """
    model = weights.scorer.model
    converts = converts_weights(model)

    def piece(name: str, dtype: torch.dtype) -> WeightShard:
        hf = base_name(name).removeprefix(MODEL_PREFIX)
        spread, shape = weights.spread(name, MASTER, dtype), weights.shape(name)
        found = hf_piece(model, hf, spread, shape) if converts else weight_shard(hf, spread, shape)
        if dtype != torch.float32 and not exact.isdisjoint(found.outline):
            if name not in weights.trained and weights.parameters[name].dtype != torch.float32:
                words = "it is in float32 in the model's folder and not trained, and this engine keeps bf16 of it"
                raise ValueError(f"{hf}: {words}; expected model_args.dtype: fp32, or fsdp2_train, which keeps float32")
            return piece(name, torch.float32)
        return found

    names = [name for name in weights.parameters if name.startswith(MODEL_PREFIX) and not is_adapter(name)]
    return [piece(name, dtype) for name in names]


def hf_piece(model: PreTrainedModel, name: str, spread: ShardLayout, shape: torch.Size) -> WeightShard:
    """One parameter of a model whose checkpoints have other names or shapes than the model, as they have it."""
    whole = torch.empty(shape, device="meta")
    (stored, tensor), *others = to_hf_weights(model, name, whole).items()
    if tensor is whole and not others:
        return weight_shard(stored, spread, shape)
    return WeightShard([spread], lambda whole: to_hf_weights(model, name, whole[0].view(shape)))


def adapter_pieces(weights: ModuleWeights) -> list[WeightShard]:
    """The adapter, and the head beside it, in float32 under the names of a peft folder (collective)."""
    names = [name for name in weights.parameters if is_adapter(name) or name.startswith(HEAD_PREFIX)]
    return [_float32(weights, name, _peft_name(weights, name)) for name in names]


def copy_output_layer(weights: ModuleWeights, dtype: torch.dtype) -> OutputLayer:
    """A frozen copy of the model's output layer as it is now, whole on every rank (collective).

    Raises:
        ValueError: the output layer is not a linear map of the hidden states.
    """
    layer = weights.scorer.model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"kl_penalty 'full': the output layer is a {type(layer).__name__}, expected Linear")
    if weights.scorer.head is not None and weights.scorer.head.others:
        name = type(weights.scorer.model).__name__
        raise ValueError(f"kl_penalty 'full': {name} has other weights in its head than its output layer's")
    names = {id(parameter): name for name, parameter in weights.parameters.items()}

    def copy(parameter: Tensor) -> Tensor:
        name = names[id(parameter)]
        piece = weight_shard(name, weights.spread(name, MASTER, dtype), weights.shape(name))
        return gather([piece], range(world_size()))[name].to(weights.device, copy=True)

    return OutputLayer(copy(layer.weight), None if layer.bias is None else copy(layer.bias))


@contextlib.contextmanager
def whole_layers(weights: ModuleWeights, model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Gives a model with unset weights those of the trained one inside, a layer's only while it runs (collective).

    So the unmodified module computes what ranks have split between them, in the memory of one layer.
    """
    device, own = weights.device, weights.scorer.model
    for name, buffer in own.named_buffers():
        model.get_buffer(name).data = buffer.to(device)
    layers = decoder_layers(model)
    within = {id(parameter) for layer in layers for parameter in layer.parameters()}
    names = {id(parameter): MODEL_PREFIX + name for name, parameter in model.named_parameters()}

    def fill(parameters: Iterable[nn.Parameter]) -> None:
        named = {names[id(parameter)]: parameter for parameter in parameters}
        pieces = [weight_shard(name, weights.spread(name, MASTER, dtype), weights.shape(name)) for name in named]
        for name, whole in gather(pieces, range(world_size())).items():
            named[name].data = whole.to(device, dtype).view(weights.shape(name))

    def empty(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.data = torch.empty(0, dtype=dtype)

    rest = [parameter for parameter in model.parameters() if id(parameter) not in within]
    fill(rest)
    hooks = [layer.register_forward_pre_hook(lambda layer, _: fill(layer.parameters())) for layer in layers]
    hooks += [layer.register_forward_hook(lambda layer, *_: empty(layer.parameters())) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        empty(rest)


def head_pieces(weights: ModuleWeights) -> list[WeightShard]:
    """A value head in float32, under its own names (collective)."""
    names = [name for name in weights.parameters if name.startswith(HEAD_PREFIX)]
    return [_float32(weights, name, name.removeprefix(HEAD_PREFIX)) for name in names]


def _float32(weights: ModuleWeights, name: str, stored: str, kind: str = MASTER) -> WeightShard:
    return weight_shard(stored, weights.spread(name, kind, torch.float32), weights.shape(name))


def _stored_name(weights: ModuleWeights, name: str) -> str:
    """A parameter's name in a model folder, or an adapter's in a peft folder."""
    return _peft_name(weights, name) if is_adapter(name) else name.removeprefix(MODEL_PREFIX)


def _peft_name(weights: ModuleWeights, name: str) -> str:
    """Name in a peft folder of what is trained: the adapter, and the head of a classifier beside it."""
    if name.startswith(HEAD_PREFIX):
        return SCORE_NAME
    scorer, hf_name = weights.scorer, name.removeprefix(MODEL_PREFIX)
    return adapter_name(hf_name if scorer.value_head is None else whole_name(scorer.model, hf_name))
