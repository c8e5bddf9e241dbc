"""What a strategy shows of its model when its log-probs are doubted: settings, sketches of tensors, outputs of layers.

A sketch is a few random projections of a tensor: that of a difference is the difference of the sketches, so how far two
tensors are apart is known without sending either (Johnson and Lindenstrauss 1984).

Processes of engines, in environments of their own, import this too: what they may lack is imported where it is used.

Axes: N numbers of a tensor, P of a row, K projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from roll.distributed.weights.buckets import WeightBucket, dtype_name
from roll.utils.foreign import replaced

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from roll.data.batch import Batch
    from roll.data.columns import IntArray, Item
    from roll.data.pictures import Pictures
    from roll.data.requests import Completion, GenerateRequest
    from roll.data.templates import ChatTemplate
    from roll.models.lora import LoraSpec
    from roll.models.own_forward import OwnForward
    from roll.models.pictures import Tower

QUESTION = [{"role": "user", "content": "Name a colour, a number and an animal."}]
"""The message that a probe's prompt is made of."""
FEATURES = "features"
"""Of the pictures that a tower has seen, beside what it was given of them under the processor's names."""
FORMAT, EXPERTS, PROMPT, TEMPERATURE = "number format", "experts", "prompt", "temperature"
"""Settings that have these names on both sides; the others are entries of the model's configuration, and buffers."""

_PROJECTIONS = 64
_ROW = 1024
_UNTOLD = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"}
_AS_IT_IS = ""


@dataclass(frozen=True)
class Sketch:
    """Stands for a tensor."""

    shape: tuple[int, ...]
    norm: float
    forms: Mapping[str, np.ndarray]
    """float64 [K] by what was done to the tensor; the empty name is the tensor as it is."""

    @classmethod
    def of(cls, tensor: Tensor, forms: Mapping[str, Callable[[Tensor], Tensor]] | None = None) -> Sketch:
        """Sketches a tensor, and what it would be in other ``forms``."""
        values = tensor.detach().float()
        made = {_AS_IT_IS: values, **{name: form(values) for name, form in (forms or {}).items()}}
        return cls(tuple(tensor.shape), float(values.norm()), {name: _project(form) for name, form in made.items()})

    def distance(self, other: Sketch, form: str = _AS_IT_IS) -> float:
        """About |other - form of this| as a share of this tensor's size."""
        difference_K = other.forms[_AS_IT_IS] - self.forms[form]
        return float(np.linalg.norm(difference_K)) / _PROJECTIONS**0.5 / max(self.norm, 1e-30)

    def plain(self) -> PlainSketch:
        """What crosses between processes: shape, size and projections of the tensor as it is."""
        return list(self.shape), self.norm, self.forms[_AS_IT_IS].tolist()

    @classmethod
    def of_plain(cls, told: PlainSketch) -> Sketch:
        shape, norm, own = told
        return cls(tuple(shape), norm, {_AS_IT_IS: np.array(own)})

    def plus(self, tensor: Tensor) -> Sketch:
        """Of the sum of both tensors; its size is still this one's."""
        own_K = self.forms[_AS_IT_IS] + Sketch.of(tensor).forms[_AS_IT_IS]
        return Sketch(self.shape, self.norm, {_AS_IT_IS: own_K})


PlainSketch: TypeAlias = tuple[Sequence[int], float, Sequence[float]]


def rounded_forms(tensor: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Ways in which a tensor's values may have come to harm, by words that say so."""

    def rounded(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return lambda values: values.to(dtype).float()

    forms = {
        f"rounded to {dtype_name(dtype)}": rounded(dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
        if tensor.dtype != dtype
    }
    if tensor.dim() == 2:
        forms["transposed"] = lambda values: values.T
        forms["rounded to int8"] = _rounded_to_int8
    return forms


def sketched_export(
    buckets: Iterable[WeightBucket], adapter: Mapping[str, Tensor] | None = None, lora: LoraSpec | None = None
) -> dict[str, Sketch]:
    """Sketches of exported weights under their names, with an adapter that the model has: as they are with it."""
    from roll.distributed.weights.buckets import as_tensor

    found = {}
    for bucket in buckets:
        for name, tensor in bucket.outline.views(as_tensor(bucket.data)):
            forms = rounded_forms(tensor)
            if (delta := change_by(adapter, lora, name, tensor.shape)) is not None:
                base, tensor = tensor, tensor.float() + delta.to(tensor.device)
                forms["without the adapter"] = lambda _, base=base: base.float()  # type: ignore[misc]
            found[name] = Sketch.of(tensor, forms)
    return found


def change_by(
    adapter: Mapping[str, Tensor] | None, lora: LoraSpec | None, name: str, shape: Sequence[int]
) -> Tensor | None:
    """What an adapter adds to a weight of this name and shape, float32; ``None`` where it adds nothing."""
    from roll.models.lora import matrix_name

    layer = name.removesuffix(".weight")
    if adapter is None or lora is None or matrix_name(layer, "A") not in adapter:
        return None
    down_RI, up_OR = (adapter[matrix_name(layer, part)].float() for part in "AB")
    delta = up_OR @ down_RI * (lora.alpha / lora.rank)
    return delta if delta.shape == tuple(shape) else delta.T


def layer_stream(args: Sequence[Any], output: Any) -> list[Tensor]:
    """Parts of the stream of hidden states behind a layer: what it returns, mostly its own part and the residual."""
    return [output] if isinstance(output, Tensor) else [each for each in output[:2] if each is not None]


class LayerWatch:
    """Collects what the decoder layers of an engine's model give from now on.

    Args:
        stream: the parts that add up to it, by a layer's arguments and what it returns; none where they are not known.
    """

    def __init__(self, model: nn.Module, stream: Callable[[Sequence[Any], Any], list[Tensor]] = layer_stream) -> None:
        stacks = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and n.endswith("layers"))
        name, layers = next(stacks, ("", nn.ModuleList()))
        self._seen: dict[str, list[Tensor]] = {f"{name}.{number}": [] for number in range(len(layers))}

        def watch(seen: list[Tensor], layer: nn.Module) -> Any:
            def keep(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
                if parts := stream([*args, *named.values()], output):
                    seen.append(torch.stack([part.float() for part in parts]).sum(0).cpu())

            return layer.register_forward_hook(keep, with_kwargs=True)

        self._hooks = [watch(*each) for each in zip(self._seen.values(), layers, strict=True)]

    def end(self, num_tokens: int) -> dict[str, Tensor]:
        """float32 [T, H] by layer: its first output of so many tokens, as a whole forward pass of a prompt gives."""
        for hook in self._hooks:
            hook.remove()
        firsts = {name: next((o for o in seen if len(o) == num_tokens), None) for name, seen in self._seen.items()}
        return {name: output for name, output in firsts.items() if output is not None}


def layer_outputs(own: OwnForward, row: Batch) -> dict[str, Tensor]:
    """What each layer on this rank gives for the tokens of a row, float32 [T, H] by name (collective).

    NaN of tokens that are on another rank.
    """
    from roll.models.own_forward import outputs

    places_T = own.usual_places(row)
    _, layers, _ = own.layers()
    with torch.no_grad(), outputs(layers, places_T) as found:
        own.usual(row)
    return dict(found)


def config_settings(config: PreTrainedConfig) -> dict[str, str]:
    """The entries of a model's configuration that say how it computes, as text, and whether it has experts."""
    from roll.models.routing import expert_sizes

    text = config.get_text_config()
    entries = dict(_flat(text.to_dict()))
    return {name: repr(value) for name, value in entries.items()} | {EXPERTS: str(any(expert_sizes(text)))}


def buffer_settings(model: nn.Module) -> dict[str, str]:
    """Buffers, such as the frequencies of rotary embeddings, as figures that differ when they do."""
    return {
        f"buffer {name}": f"mean {float(buffer.double().mean()):.9g}, norm {float(buffer.double().norm()):.9g}"
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and not buffer.is_meta
    }


def pictures_seen(own: OwnForward | None, tower: Tower | None, row: Batch) -> dict[str, Tensor]:
    """What the tower is given of a row's pictures in a forward pass, and its features of them (collective)."""
    if own is None or tower is None or row.items_I is None:
        return {}
    found: dict[str, Tensor] = {}

    def note(given: Sequence[Mapping[str, Tensor]], features: Sequence[Tensor]) -> None:
        parts = {name: torch.cat([each[name] for each in given]) for name in given[0]} | {
            FEATURES: torch.cat([*features])
        }
        found.update({name: values.detach().float().cpu() for name, values in parts.items()})

    with torch.no_grad(), replaced(tower, observer=note):
        own.usual(row)
    return found


def probe_picture(pictures: Pictures) -> Item:
    """The picture of a probe: noise, so that no two of its pixels are alike."""
    return pictures.item(np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8))


def pictured_prompt(tokenizer: PreTrainedTokenizerBase, template: str | ChatTemplate, pictures: Pictures) -> IntArray:
    """Token ids of ``QUESTION`` about ``probe_picture``.

    Raises:
        ValueError: the template or the picture processor does not take it.
    """
    from roll.data.renderer import ChatRenderer

    parts = [{"type": "image", "image": probe_picture(pictures)}, {"type": "text", "text": QUESTION[0]["content"]}]
    return ChatRenderer(tokenizer, template, pictures).prompt([{"role": "user", "content": parts}])


def probe_prompt(tokenizer: PreTrainedTokenizerBase, template: str | ChatTemplate) -> list[int]:
    """Token ids of ``QUESTION`` in a chat template; of its bare text, where there is no template."""
    from roll.data.renderer import ChatRenderer

    try:
        return [int(i) for i in ChatRenderer(tokenizer, template).prompt(QUESTION)]
    except ValueError:
        return [int(i) for i in tokenizer(QUESTION[0]["content"], add_special_tokens=False)["input_ids"]]


def rows_of(requests: Sequence[GenerateRequest], completions: Sequence[Completion]) -> Batch:
    """Requests and their answers, a row each; the loss mask is True on what was sampled."""
    from roll.data.batch import Batch

    lengths = [(len(each.prompt_ids), len(done.token_ids)) for each, done in zip(requests, completions, strict=True)]
    parts = [ids for each, done in zip(requests, completions, strict=True) for ids in (each.prompt_ids, done.token_ids)]
    mask = np.repeat(np.tile([False, True], len(lengths)), np.ravel(lengths))
    tokens_T = torch.from_numpy(np.concatenate(parts).astype(np.int64))
    items = tuple(each.items for each in requests)
    return Batch(
        torch.tensor([sum(each) for each in lengths]),
        tokens_T,
        torch.from_numpy(mask),
        items_I=items if any(items) else None,
    )


def _project(values: Tensor) -> np.ndarray:
    """float64 [K]; a signed sum for each projection, where a number's sign is that of its row times that of its place.

    Values of equal forms are equal to the last bit where they are computed on one kind of device.
    """
    flat_N = values.contiguous().view(-1)
    rows = -(-flat_N.numel() // _ROW)
    padded = nn.functional.pad(flat_N, (0, rows * _ROW - flat_N.numel())).view(rows, _ROW)
    signs = torch.Generator().manual_seed(0)
    place_PK, row_RK = (
        (torch.randint(0, 2, (size, _PROJECTIONS), generator=signs) * 2.0 - 1).to(values.device)
        for size in (_ROW, rows)
    )
    return ((padded @ place_PK) * row_RK).double().sum(0).cpu().numpy()


def _rounded_to_int8(values: Tensor) -> Tensor:
    """With a scale for each row."""
    scale = values.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (values / scale).round() * scale


def _flat(entries: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in entries.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        elif name not in _UNTOLD:
            yield f"{path}{name}", value
