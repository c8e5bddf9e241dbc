"""A trainer and a generator in this process, between which tests plant faults for the probe."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from roll.data.pictures import Pictures
from roll.data.requests import GenerateRequest, SamplingParams
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.evidence import pictured_prompt, probe_picture, probe_prompt, rows_of
from roll.distributed.weights.buckets import as_tensor
from roll.models.lora import LoraSpec
from roll.models.tiny import make_tokenizer
from roll.pipeline.probe import PROMPTED, SAMPLED, Bound, find_causes, other_prompt
from roll.utils.foreign import replaced
from tests.support.contract import LORA, buckets_of, context_of, load, weights_of
from tests.support.trainers import make_trainer


class Pair:
    """``Sides`` in this process: ``fsdp2_train`` and a generator that has its weights."""

    resent = False

    def __init__(
        self, path: str | Path, generator: Any, temperature: float, lora: LoraSpec | None = None, **context_keys: Any
    ) -> None:
        self.trainer = make_trainer(Path(path), "fsdp2_train", lora=lora, temperature=temperature, **context_keys)
        self.generator = generator
        ids = np.array(probe_prompt(make_tokenizer(), "chatml")[-PROMPTED:])
        params = SamplingParams(SAMPLED, temperature, ignore_eos=True, seed=7)
        self.request = GenerateRequest("probe", ids, params)
        self.rename: Callable[[str], str] = lambda name: name
        self.spoil: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None
        """Changes tensors on their way to the generator."""

    def update(self) -> None:
        async def buckets(export: Any) -> Any:
            for bucket in export(1 << 24, check=False):
                self.spoil(dict(bucket.outline.views(as_tensor(bucket.data))))
                names = tuple(map(self.rename, bucket.outline.names))
                yield replace(bucket, outline=replace(bucket.outline, names=names))

        asyncio.run(self.generator.update_weights(buckets(self.trainer.export_weights), 1))
        if self.trainer.context.lora is not None:
            asyncio.run(self.generator.update_adapter(buckets(self.trainer.export_adapter), 1))

    resend = update

    def complete(self, requests: Sequence[GenerateRequest]) -> Any:
        async def all_of_them() -> Any:
            return await asyncio.gather(*map(self.generator.generate, requests))

        return asyncio.run(all_of_them())

    def trained(self, batch: Any) -> Any:
        with replaced(self.trainer, own_forward=None):
            return self.trainer.logprobs(batch).logprobs_T

    def forward(self, batch: Any) -> Any:
        return self.generator.forward_logprobs(batch)

    def own_sketches(self) -> Any:
        return self.generator.own_sketches()

    def settings(self) -> Any:
        return self.trainer.settings(), self.generator.settings()

    def sketches(self) -> Any:
        return self.trainer.sketches(), self.generator.sketches()

    def pictures(self, row: Any) -> Any:
        return self.trainer.pictures_seen(row), self.generator.pictures_seen(row)

    def layers(self, row: Any) -> Any:
        return self.trainer.layer_outputs(row), self.generator.layer_outputs(row)

    @property
    def model(self) -> Any:
        return self.generator._model

    def weight(self, name: str) -> Any:
        return self.model.get_parameter(name).data

    def difference(self) -> tuple[float, Bound, Any]:
        bound = Bound.of(*self.settings())
        (completion,) = self.complete([self.request])
        row = rows_of([self.request], [completion])
        reported_M = torch.from_numpy(completion.logprobs)
        return bound.difference(reported_M, self.trained(row)[row.loss_mask_T]), bound, completion

    def causes(self) -> list[str]:
        """What is found; nothing where the probe is content."""
        difference, bound, completion = self.difference()
        return find_causes(self, self.request, completion, bound) if difference > bound.value else []


def started(
    engine: str, path: Path, lora: LoraSpec | None = None, options: Any = None, sequence_length: int = 64
) -> Pair:
    """A pair whose weights are no longer those of the folder, so that one that was not sent shows."""
    context = context_of(engine, str(path), options, sequence_length=sequence_length, lora=lora, temperature=0.8)
    generator = STRATEGIES.get(engine)(context)
    generator.setup()
    pair = Pair(path, generator, 0.8, lora)
    with torch.no_grad():
        for name, parameter in pair.trainer.weights.scorer.model.named_parameters():
            if lora is None or "lora_" in name:
                parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    pair.update()
    return pair


def started_seeing(engine: str, path: Path, options: Any = None) -> Pair:
    """A pair whose question has a picture."""
    context = context_of(engine, str(path), options, sequence_length=128, pictures=True)
    generator = STRATEGIES.get(engine)(context)
    generator.setup()
    return seeing_pair(path, generator)


def causes_in(family: str, engine: str, path: str, options: Any = None) -> list[str]:
    """What is found where two ``experts`` are exchanged, or where the model ``untied`` is without its adapter again."""
    pair = started(engine, Path(path), LORA if family == "untied" else None, options)
    try:
        assert not pair.causes()
        if family == "experts":
            names = [f"model.layers.0.mlp.experts.{number}.down_proj.weight" for number in (0, 1)]
            pair.spoil = lambda tensors: exchange(*(tensors[name] for name in names))
            pair.update()
        else:
            asyncio.run(pair.generator.update_weights(buckets_of(weights_of(load(path))), 1))
        return pair.causes()
    finally:
        pair.generator.shutdown()


def assert_names_another_template(generator: Any) -> None:
    """A probe that was written by ChatML finds nothing of a generator with this template, and another one at once."""
    own, found = probe_prompt(make_tokenizer(), "chatml"), []
    for template in ("chatml", "qwen2"):
        with replaced(generator, context=replace(generator.context, template=template)):
            found.append(other_prompt(own, generator.settings()))
    assert not found[0] and found[1].startswith("template or tokenizer")


def seeing_pair(path: Path, generator: Any) -> Pair:
    pair = Pair(path, generator, 1.0, pictures=True)
    tokenizer, pictures = AutoTokenizer.from_pretrained(path), Pictures(path)
    prompt = pictured_prompt(tokenizer, "native", pictures)
    pair.request = replace(pair.request, prompt_ids=prompt, items=(probe_picture(pictures),))
    return pair


def to_int8(weight: torch.Tensor) -> None:
    scale = weight.abs().amax(1, keepdim=True) / 127
    weight.copy_((weight / scale).round() * scale)


def exchange(first: torch.Tensor, second: torch.Tensor) -> None:
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


Q = "model.layers.0.self_attn.q_proj.weight"
Q1 = Q.replace("0", "1")


def stale(tensors: dict[str, torch.Tensor]) -> None:
    weight = tensors[Q]
    weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))


SPOILED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "swapped": (lambda tensors: exchange(tensors[Q], tensors[Q1]), f"{Q} has the values of {Q1}"),
    "stale": (stale, "of its size away, as if an update had not reached it"),
    "transposed": (lambda tensors: tensors[Q].copy_(tensors[Q].T.clone()), f"{Q} is transposed"),
    "quantised": (lambda tensors: to_int8(tensors[Q]), f"{Q} is rounded to int8"),
    "number format": (
        lambda tensors: tensors[Q].copy_(tensors[Q].to(torch.float8_e4m3fn).float()),
        f"{Q} is rounded to float8_e4m3fn",
    ),
}
"""Of tensors on their way to a generator, with what is said where it can read them back by their names."""


def wrong_names(name: str) -> str:
    """Right bytes under wrong names, in the second layer."""
    swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    return re.sub("gate_proj|up_proj", lambda found: swap[found[0]], name) if "layers.1." in name else name


TRUNCATIONS = (
    ({"top_p": 0.7}, "top_p: with 1.0 in place of 0.7 both agree"),
    ({"top_k": 9}, "top_k: with 0 in place of 9 both agree"),
    ({"min_p": 0.05}, "min_p: with 0.0 in place of 0.05 both agree"),
)
PENALTIES = (
    ({"repetition_penalty": 1.3}, "repetition_penalty: with 1.0 in place of 1.3 both agree"),
    ({"presence_penalty": 1.0}, "presence_penalty: with 0.0 in place of 1.0 both agree"),
    ({"frequency_penalty": 1.0}, "frequency_penalty: with 0.0 in place of 1.0 both agree"),
)
"""Settings of a request that a generator's log-probs follow though they should not, and what is said of them."""
