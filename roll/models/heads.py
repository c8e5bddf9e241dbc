"""Heads on a language model's trunk: its output layer, a scalar head, another model's output layer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roll.algorithms.quantities import OutputLayer
from roll.models.loading import make_skeleton
from roll.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel


VALUE_HEAD_FILE = "value_head.safetensors"
SCORE_WEIGHT = "score.weight"
"""The head of a sequence classifier, as Transformers names it in a model's files."""


class ValueHead(nn.Module):
    """Maps a hidden state to a value. Starts at zero, so that an untrained critic predicts nothing.

    Args:
        bias: a reward model has none, as classifiers have none.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, bias=bias, dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_KH: Tensor) -> Tensor:
        """Values in float32, shape [K]. Beside an adapter the head is float32, the trunk may be narrower."""
        values: Tensor = self.linear(hidden_KH.to(self.linear.weight.dtype))
        return values.float().squeeze(-1).clone()  # no view: FSDP2 could not hook one safely


def load_value_head(hidden_size: int, folder: Path, *, bias: bool = True) -> ValueHead:
    """The head saved in ``folder``: a critic's, or a classifier's with one output; a fresh one where there is none.

    Raises:
        ValueError: it is one of several outputs.
    """
    from safetensors.torch import load_file

    head = ValueHead(hidden_size, bias=bias)
    file = folder / VALUE_HEAD_FILE
    if file.exists():
        head.load_state_dict(load_file(file))
    elif (weight := _score_weight(folder)) is not None:
        if weight.shape != (expected := head.linear.weight.shape):
            seen = f"{SCORE_WEIGHT}: got shape {tuple(weight.shape)}, expected {tuple(expected)}"
            raise ValueError(f"model path {str(folder)!r}: {seen}, a head with one output")
        head.load_state_dict({"linear.weight": weight.float()}, strict=False)
    return head


def _score_weight(folder: Path) -> Tensor | None:
    from safetensors import safe_open

    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            if SCORE_WEIGHT in tensors.keys():  # noqa: SIM118 (not a dict)
                found: Tensor = tensors.get_tensor(SCORE_WEIGHT)
                return found
    return None


def trunk_of(model: PreTrainedModel) -> nn.Module:
    """The part of a causal language model that makes hidden states.

    Raises:
        ValueError: it has none.
    """
    trunk = model.base_model
    if trunk is model:  # some name another class's part there (Llama 4)
        trunk = getattr(model, "model", model)
    if trunk is model:
        raise ValueError(f"{type(model).__name__} has no trunk apart from its head; expected a causal language model")
    return trunk


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that the model's own class says must not be split: each is one unit of sharding and recomputation.

    Not one with the input embedding (BERT's family): tied to the output layer, it belongs into that layer's unit.
    """
    names, embedding = set(model._no_split_modules or ()), model.get_input_embeddings()
    # By base classes too: fully_shard makes a QwenLayer an FSDPQwenLayer.
    named = [module for module in model.modules() if names & {cls.__name__ for cls in type(module).__mro__}]
    layers = [module for module in named if all(part is not embedding for part in module.modules())]
    if not layers:
        raise ValueError(f"{type(model).__name__} names no decoder layers (_no_split_modules); cannot shard it")
    return layers


def text_modules(model: PreTrainedModel) -> set[nn.Module]:
    """All modules of a model but those of a tower that it has beside its language model, such as one for pictures."""
    if model.config.get_text_config() is model.config:
        return set(model.modules())
    parts = [model.get_decoder(), model.get_output_embeddings()]
    return {module for part in parts if part is not None for module in part.modules()}


class OutputHead:
    """Computes logits from a causal language model's last hidden states, with the model's own code.

    Most models apply their output layer and nothing else. Others scale or cap before it or after it. So the model's own
    forward runs with two parts replaced: a trunk that has the hidden states already, and an output layer whose result
    is float32, as precise as a loss wants it.

    Args:
        model: a causal language model; its weights need not be set yet.

    Raises:
        ValueError: it has no output layer, or no trunk.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        layer = model.get_output_embeddings()
        if layer is None:
            raise ValueError(f"{type(model).__name__} has no output layer; expected a causal language model")
        trunk = trunk_of(model)
        within = {id(module) for module in trunk.modules()} | {id(model)}
        self.modules = [module for module in model.modules() if id(module) not in within]
        """What is not the trunk's: the output layer, and in some models others."""
        self._model, self._layer, self._trunk = model, layer, trunk
        self._trunk_places, self._layer_places = _places(model, trunk), _places(model, layer)
        self.is_plain = self._changes_nothing()
        """The output layer is all there is, or what else there is cannot be run alone (``OwnForward`` tells)."""

    @property
    def others(self) -> list[nn.Parameter]:
        """Parameters of the head besides the output layer's."""
        known = {id(parameter) for parameter in self._layer.parameters()}
        return [p for module in self.modules for p in module.parameters(recurse=False) if id(p) not in known]

    def __call__(self, hidden_KH: Tensor, layer: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """float32 logits [K, V].

        Args:
            layer: in the place of the model's own output layer.
        """
        apply = layer or self._layer
        if self.is_plain:
            return apply(hidden_KH).float()
        return self._run(hidden_KH, lambda states: apply(states).float())

    def _run(self, hidden_KH: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        output = _TrunkOutput(hidden_KH[None])
        ids = torch.zeros(output.last_hidden_state.shape[:2], dtype=torch.int64, device=hidden_KH.device)
        with (
            _replaced(self._trunk_places, _StandIn(self._trunk, lambda *_, **__: output, everywhere=True)),
            _replaced(self._layer_places, _StandIn(self._layer, layer)),
        ):
            # Not called as a module: the hooks of an engine would take it for a forward pass.
            logits: Tensor = self._model.forward(input_ids=ids, use_cache=False).logits
        return logits[0]

    @torch.no_grad()
    def _changes_nothing(self) -> bool:
        """Runs the head on hidden states and logits of many sizes, and sees whether it changes any."""
        weight = self._layer.weight
        device = torch.device("cpu") if weight.is_meta else weight.device
        generator, scales = torch.Generator().manual_seed(0), torch.tensor([1e-2, 1.0, 1e2])[:, None]

        def states(width: int) -> Tensor:
            return (torch.randn(3, width, generator=generator) * scales).to(device)

        hidden_KH = states(self._model.config.get_text_config().hidden_size).to(weight.dtype)
        logits_KV, seen = states(weight.shape[0]), []

        def watched(states: Tensor) -> Tensor:
            seen.append(states)
            return logits_KV[None]

        try:
            result = self._run(hidden_KH, watched)
        except (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return True
        alone = len(seen) == 1 and seen[0].shape[1:] == hidden_KH.shape and torch.equal(seen[0][0], hidden_KH)
        return alone and result.shape == logits_KV.shape and torch.equal(result, logits_KV)


class _TrunkOutput:
    """Output of a trunk that is known already, however a model looks into it; everything else is ``None``."""

    def __init__(self, hidden_RCH: Tensor) -> None:
        self.last_hidden_state = hidden_RCH

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _StandIn:
    """Stands for a module whose call is another's; everything else about it is the module's.

    Args:
        everywhere: so it is for the modules in it.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any], *, everywhere: bool = False) -> None:
        self._module, self._call, self._everywhere = module, call, everywhere

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if self._everywhere and isinstance(value, nn.Module):
            return _StandIn(value, self._call, everywhere=True)
        return value


def _places(model: nn.Module, module: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules that have it as a part, with the part's name."""
    return [(each, name) for each in model.modules() for name, part in each._modules.items() if part is module]


@contextlib.contextmanager
def _replaced(places: list[tuple[nn.Module, str]], by: _StandIn) -> Iterator[None]:
    parts = [owner._modules[name] for owner, name in places]
    for owner, name in places:
        owner._modules[name] = by  # type: ignore[assignment]
    try:
        yield
    finally:
        for (owner, name), part in zip(places, parts, strict=True):
            owner._modules[name] = part


def load_output_layer(
    path: str, dtype: torch.dtype, *, trust_remote_code: bool = False, pictures: bool = False
) -> OutputLayer:
    """The output layer of a model (a folder in Hugging Face format, or a hub name) in host memory.

    Raises:
        ValueError: it is not a linear map of the hidden states, or its weights are not in the files.
    """
    with torch.device("meta"):
        model = make_skeleton("lm", path, dtype=dtype, trust_remote_code=trust_remote_code, pictures=pictures)
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"teacher {path!r}: the output layer is a {type(layer).__name__}, expected Linear")
    head = OutputHead(model)
    if head.others:
        raise ValueError(
            f"teacher {path!r}: {type(model).__name__} has other weights in its head than its output layer's"
        )
    files = WeightFiles(path)
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is layer.weight]
    error = None
    for name in names:  # tied weights are in the files once
        try:
            weight_VH = files.read(name)
            break
        except ValueError as missing:
            error = missing
    else:
        raise ValueError(f"teacher {path!r}: its output layer is not in its files") from error
    bias = [name for name, p in model.named_parameters() if p is layer.bias]
    bias_V = files.read(bias[0]).to(dtype) if bias else None
    return OutputLayer(weight_VH.to(dtype), bias_V, head)
