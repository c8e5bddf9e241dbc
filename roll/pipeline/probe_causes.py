"""Why a trainer and a generator of the same weights disagree on tokens: experiments on both, and what they show.

The generator reports log-probs of what it sampled; it also computes those of given tokens in one forward pass, as the
trainer does. Where its pass agrees with the trainer, the fault lies in sampling or in its cache; otherwise in settings,
tensors or layers, which are compared.

Axes: M sampled tokens of the probe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from roll.data.batch import Batch
from roll.data.requests import Completion, GenerateRequest, SamplingParams
from roll.distributed.strategy.evidence import EXPERTS, FORMAT, PROMPT, TEMPERATURE, Sketch, rows_of
from roll.models.own_forward import differences

Settings = Mapping[str, str]

FLOAT32 = "float32"
LARGEST = 1e-3
"""Bound for the largest difference in float32 (without experts). All engines are within 1e-4."""
MEDIANS = {FLOAT32: LARGEST, "tf32": 0.05, "float16": 0.05, "bfloat16": 0.4}
"""Bounds for the median difference by the coarser number format. Of a right model in that format, medians of six tokens
are up to 0.012 and 0.17 (SmolLM2-135M, 48 random prompts)."""
OF_OTHERS = 1.5
"""In formats of 8 bits and fewer: there up to 0.13 with weights in int8, 0.64 in FP8."""
_NEUTRAL: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "first_token_temperature": None,
    "first_token_top_k": None,
}
_HOTTEST = 2.0  # that every engine takes
_SAME = 1e-5
"""Share of a tensor's size by which sketches of equal tensors may differ."""
_LAYERS = {FLOAT32: 1e-3, "tf32": 0.02, "float16": 0.02, "bfloat16": 0.1}
"""Share of its size by which a layer's output may differ."""
_SHOWN = 4
_REPAIRED = (
    "tensors: both agree since the same weights were sent again, so the last update did not reach the generator whole, "
    "or its weights were changed after it. check_weight_update: true checks what arrives"
)


@dataclass(frozen=True)
class Bound:
    """How far two engines may be apart."""

    value: float
    every: bool
    """For the largest difference; otherwise for the median, as single tokens differ more."""
    words: str

    @classmethod
    def of(cls, trainer: Settings, generator: Settings) -> Bound:
        """By the number formats of both sides, and whether rounding may tip a router's choice of experts."""
        formats = [side.get(FORMAT, "unknown") for side in (trainer, generator)]
        experts = any(side.get(EXPERTS) == "True" for side in (trainer, generator))
        every = set(formats) == {FLOAT32} and not experts
        value = LARGEST if every else max(MEDIANS.get(each, OF_OTHERS) for each in formats)
        colder = max(1.0, 1.0 / float(trainer.get(TEMPERATURE, 1.0)))
        what = f"trainer {formats[0]}, generator {formats[1]}{', experts' if experts else ''}"
        return cls(
            value * colder, every, f"at most {value * colder:.2g} in the {'maximum' if every else 'median'} ({what})"
        )

    def difference(self, ours_M: Tensor, theirs_M: Tensor) -> float:
        """The figure that the bound is for."""
        found_M = differences(ours_M, theirs_M)
        return float(found_M.amax() if self.every else found_M.median())


class Sides(Protocol):
    """The trainer, and one generating worker."""

    resent: bool
    """The generator has got the weights again since it answered."""

    def complete(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Samples, as in a rollout."""
        ...

    def trained(self, batch: Batch) -> Tensor:
        """[T]: log-probs by the trainer."""
        ...

    def forward(self, batch: Batch) -> Tensor | None:
        """[T]: log-probs by the generator, without sampling and cache; ``None``: it has no way."""
        ...

    def settings(self) -> tuple[Settings, Settings]:
        """Of trainer and generator, as ``evidence`` names them."""
        ...

    def sketches(self) -> tuple[Mapping[str, Sketch], Mapping[str, Sketch]]:
        """Of trainer and generator, by name in a checkpoint; none of a side that cannot say."""
        ...

    def own_sketches(self) -> Mapping[str, Sketch]:
        """Of the generator, by its own names."""
        ...

    def layers(self, row: Batch) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """[T, H] by trainer and generator: outputs of layers; none of a side that cannot say."""
        ...

    def resend(self) -> None:
        """Sends the generator the trainer's weights again."""
        ...


def find_causes(sides: Sides, request: GenerateRequest, completion: Completion, bound: Bound) -> list[str]:
    """Sentences that name the causes, the most certain first."""
    row = rows_of([request], [completion])
    reported_M, trained_M = torch.from_numpy(completion.logprobs), sides.trained(row)[row.loss_mask_T]
    for shift, neighbour in ((1, "after"), (-1, "before")):
        ours_M, theirs_M = reported_M[max(0, -shift) :], trained_M[max(0, shift) :]
        length = len(reported_M) - 1
        if length > 1 and bound.difference(ours_M[:length], theirs_M[:length]) <= bound.value:
            return [
                f"token offset: what the generator reports for a token is what the trainer computes for the token "
                f"{neighbour} it; one of the two counts from another place"
            ]
    forward_T = sides.forward(row)
    if forward_T is not None and bound.difference(forward_T[row.loss_mask_T], trained_M) <= bound.value:
        return _of_sampling(sides, request, reported_M - trained_M, bound)
    trainer, generator = sides.settings()
    layers, behind = _of_layers(sides, row, trainer, generator)
    found = [*_of_settings(trainer, generator), *_of_tensors(sides, row, bound, generator)]
    if behind or not (found or layers):
        found += _of_temperature(sides, request, bound)
    found += [layers] if layers else []
    return found or ["no setting, tensor or layer was found that differs; set another strategy for one of the two"]


def other_prompt(own: Sequence[int], generator: Settings) -> str | None:
    """Words for a generator that does not render the probe's message as the rollouts do, which no log-prob shows."""
    theirs = generator.get(PROMPT, " ".join(map(str, own))).split()
    at = next((i for i, (a, b) in enumerate(zip_longest(theirs, map(str, own))) if a != b), None)
    if at is None:
        return None
    return (
        f"template or tokenizer: one message has {len(theirs)} tokens there and {len(own)} in the rollouts, other ones "
        f"from token {at} on, so answers end at other tokens too. Look at actor_train.data_args.template, "
        "chat_template_kwargs and tokenizer_path"
    )


def _of_sampling(sides: Sides, request: GenerateRequest, excess_M: Tensor, bound: Bound) -> list[str]:
    """The generator's own forward pass is right."""
    prompt, params = request.prompt_ids, request.params
    moved = replace(request, prompt_ids=np.roll(prompt, 1))  # nothing of it is in a cache
    again, elsewhere = _differences(sides, [request, moved], bound)
    if sides.resent and max(again, elsewhere) <= bound.value:
        return [_REPAIRED]
    if elsewhere <= bound.value:
        agrees = "agrees" if again <= bound.value else "does not"
        return [
            "keys and values of old weights: another prompt agrees, and the generator's forward pass on these tokens, "
            f"which uses no cache; the same prompt asked again {agrees}. Look at kv_after_update and, of vllm, "
            "enable_prefix_caching"
        ]
    active = [(key, off) for key, off in _NEUTRAL.items() if getattr(params, key) != off]
    tries = [replace(moved, params=replace(params, **{key: off})) for key, off in active]
    if tries:
        for (key, off), difference in zip(active, _differences(sides, tries, bound), strict=True):
            if difference <= bound.value:
                return [
                    f"{key}: with {off} in place of {getattr(params, key)} both agree, so the generator reports "
                    f"log-probs after {key}, not before. Look at generating_args.{key}"
                ]
    if found := _of_temperature(sides, moved, bound):
        return found
    least, most = float(excess_M.min()), float(excess_M.max())
    if least > -bound.value:
        return [
            f"a cut distribution: every log-prob that the generator reports is higher, by {least:.2g} to {most:.2g}, "
            "as after top-p, top-k or min-p, although its forward pass agrees. Look at generating_args.top_p, top_k "
            "and min_p, and at sampling defaults of the engine"
        ]
    return [
        "the generator's sampler: its forward pass on the same tokens agrees, what it reports while sampling does not"
    ]


def _of_temperature(sides: Sides, request: GenerateRequest, bound: Bound) -> list[str]:
    """Asks for other temperatures until both agree."""
    asked = request.params.temperature
    if not asked:
        return []
    centre, step = 1.0, 2**0.25
    before = best = _differences(sides, [request], bound)[0]
    for _ in range(3):
        factors = [centre * step**power for power in range(-8, 9)]
        factors = [factor for factor in factors if 0.05 <= asked * factor <= _HOTTEST] or [1.0]
        tries = [_at(request, asked * factor) for factor in factors]
        found = _differences(sides, tries, bound)
        best = min(found)
        centre, step = factors[found.index(best)], step ** (1 / 8)
    if best > max(bound.value, before / 20) or abs(math.log(centre)) < 0.01:
        return []
    return [
        f"temperature: both agree where the generator is asked for {asked * centre:.3g} in place of {asked:g}, so one "
        f"of them divides logits by {max(centre, 1 / centre):.3g} times too much or too little. Look at "
        "actor_infer.generating_args.temperature, by which both divide"
    ]


def _of_settings(trainer: Settings, generator: Settings) -> list[str]:
    found = []
    for name in trainer:
        if name in generator and trainer[name] != generator[name] and name not in (PROMPT, EXPERTS):
            where = {
                FORMAT: "model_args.dtype and strategy_config of both roles",
                TEMPERATURE: "actor_infer.generating_args.temperature",
            }.get(name, "model_args.model_config_kwargs of actor_train and actor_infer")
            found.append(f"{name}: {trainer[name]} in the trainer, {generator[name]} in the generator. Look at {where}")
    return found


def _of_tensors(sides: Sides, row: Batch, bound: Bound, generator: Settings) -> list[str]:
    trainer, held = sides.sketches()
    if trainer and held:
        if found := list(different_tensors(trainer, held, generator.get(FORMAT, FLOAT32))):
            more = [f"and {len(found) - _SHOWN} more tensors"] if len(found) > _SHOWN else []
            return ["tensors: " + "; ".join([*found[:_SHOWN], *more])]
        return []
    before = sides.own_sketches()
    sides.resend()
    after = sides.own_sketches()
    changed = [name for name in before if before[name].distance(after[name]) > _SAME]
    more = [f"and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
    named = [f"tensors that changed when the weights were sent again: {', '.join([*changed[:_SHOWN], *more])}"]
    forward_T, mask_T = sides.forward(row), row.loss_mask_T
    agrees = forward_T is not None and bound.difference(forward_T[mask_T], sides.trained(row)[mask_T]) <= bound.value
    return [*([_REPAIRED] if agrees else []), *(named if changed else [])]


def different_tensors(trainer: Mapping[str, Sketch], held: Mapping[str, Sketch], number_format: str) -> Iterator[str]:
    """Tensors that a generator holds otherwise than the trainer, and what they are, in words.

    Args:
        number_format: of the generator, to which it may round.
    """
    expected = f"rounded to {number_format}"

    def other_with(sketch: Sketch) -> str | None:
        alike = (name for name, each in trainer.items() if each.shape == sketch.shape)
        return next((name for name in alike if trainer[name].distance(sketch) < _SAME), None)

    for name, sketch in held.items():
        own = trainer.get(name)
        if own is None:
            if other_with(sketch) is None:
                yield f"{name} is tied to another tensor in the trainer, and has values of its own here"
            continue
        if own.shape == sketch.shape and own.distance(sketch) < _SAME:
            continue
        fitting = [form for form in own.forms if form and own.distance(sketch, form) < _SAME]
        if expected in fitting:
            continue
        if fitting:
            yield f"{name} is {fitting[0]}"
        elif (other := other_with(sketch)) is not None:
            yield f"{name} has the values of {other}"
        else:
            away = own.distance(sketch)
            why = ", as if an update had not reached it" if away < 0.5 else ""
            yield f"{name} is {away:.2g} of its size away{why}"


def _of_layers(sides: Sides, row: Batch, trainer: Settings, generator: Settings) -> tuple[str, bool]:
    """The first layer that differs, in words; and whether they part behind the layers."""
    ours, theirs = (dict(_numbered(side)) for side in sides.layers(row))
    numbers = sorted(ours.keys() & theirs.keys())
    if not numbers:
        return "", False
    most = max(_LAYERS.get(side.get(FORMAT, ""), 0.3) for side in (trainer, generator))
    for number in numbers:
        (name, ours_TH), (_, theirs_TH) = ours[number], theirs[number]
        away_T = (ours_TH - theirs_TH).norm(dim=1) / ours_TH.norm(dim=1).clamp(min=1e-12)
        if (away := float(away_T[~away_T.isnan()].median())) > most:
            return (
                f"layers: they part in {name}, whose output is {away:.2g} of its size away"
                f"{'' if number == numbers[0] else '; those in front of it agree'}. If its tensors are equal, they are "
                "sent under wrong names, or one side computes attention, rotary embeddings, soft cap, sinks or routing "
                "otherwise",
                False,
            )
    return (
        f"layers: all {len(numbers)} agree; they part behind them: final norm, output layer, soft cap, temperature",
        True,
    )


def _numbered(layers: Mapping[str, Tensor]) -> Iterator[tuple[int, tuple[str, Tensor]]]:
    """Layers by their number, as engines name them otherwise."""
    for name, output_TH in layers.items():
        if numbers := re.findall(r"\d+", name):
            yield int(numbers[-1]), (name, output_TH)


def _at(request: GenerateRequest, temperature: float) -> GenerateRequest:
    params: SamplingParams = replace(request.params, temperature=temperature, first_token_temperature=None)
    return replace(request, params=params)


def _differences(sides: Sides, requests: Sequence[GenerateRequest], bound: Bound) -> list[float]:
    """Between report and trainer, of each of several requests."""
    named = [replace(request, request_id=f"{request.request_id}, try {i}") for i, request in enumerate(requests)]
    completions = sides.complete(named)
    rows = rows_of(named, completions)
    parts = sides.trained(rows)[rows.loss_mask_T].split([len(done.token_ids) for done in completions])
    return [
        bound.difference(torch.from_numpy(done.logprobs), trained_M)
        for done, trained_M in zip(completions, parts, strict=True)
    ]
