"""Faults that are planted between a trainer and a generator: the probe finds each and names it."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from roll.distributed.strategy.evidence import probe_prompt
from roll.distributed.strategy.hf_infer import continuous_batching
from roll.models import sampling
from roll.models.lora import LoraSpec
from roll.models.tiny import make_tokenizer
from roll.pipeline.probe import Bound, Probe, find_causes, other_prompt
from roll.utils.foreign import replaced
from tests.support.known_families import make_known
from tests.support.picture_models import make_picture_model
from tests.support.probe_pair import (
    PENALTIES,
    SPOILED,
    TRUNCATIONS,
    Pair,
    exchange,
    started,
    started_seeing,
    wrong_names,
)

LORA = LoraSpec(rank=4, alpha=12, targets=("q_proj", "down_proj"))
VOCABULARY = len(make_tokenizer())
FAMILIES = {
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "experts": ("qwen3_moe", {}),
    "capped": ("gemma2", {}),
    "sinks": ("gpt_oss", {}),
}


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    """A pair by family, or ``lora``; a test that plants a fault takes it out again."""
    root, pairs = tmp_path_factory.mktemp("pairs"), dict[str, Pair]()

    def pair(family: str) -> Pair:
        if family not in pairs:
            name, changes = FAMILIES.get(family, FAMILIES["tied"])
            path = make_known(root / family, name, VOCABULARY, **changes)
            make_tokenizer().save_pretrained(path)
            pairs[family] = started("hf_infer", path, LORA if family == "lora" else None)
        return pairs[family]

    yield pair
    for each in pairs.values():
        each.generator.shutdown()


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair whose question has a picture."""
    path = make_picture_model(tmp_path_factory.mktemp("sees") / "model", "qwen2_5_vl")
    pair = started_seeing("hf_infer", path)
    yield pair
    pair.generator.shutdown()


def other_picture(pixels: Any) -> Any:
    return pixels.flip(0)


def other_pixel(pixels: Any) -> Any:
    pixels = pixels.clone()
    pixels[2, 5] += 0.5
    return pixels


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_picture, "the generator sees another one: 100% of pixel_values differ"),
        (other_pixel, "pixels have changed on the way to the generator's tower: 1 of 28,224 numbers of pixel_values"),
    ],
)
def test_a_swapped_picture_and_a_changed_pixel_are_named(pictured, change, words, monkeypatch):
    assert not pictured.causes()
    tower = pictured.generator._scorer.tower
    made = tower._values

    def changed(items):
        found = made(items)
        return found | {"pixel_values": change(found["pixel_values"])}

    monkeypatch.setattr(tower, "_values", changed)
    difference, bound, completion = pictured.difference()
    assert difference > bound.value or change is other_pixel
    (cause,) = find_causes(pictured, pictured.request, completion, bound)[:1]
    assert cause.startswith(f"pictures: {words}") and ("in patch 2 of 24" in cause or change is other_picture)


def test_features_of_old_weights_are_named(pictured):
    weight = next(value for name, value in pictured.model.named_parameters() if "visual" in name and value.dim() > 1)
    kept = weight.detach().clone()
    weight.data *= 1.5
    causes = pictured.causes()
    weight.data.copy_(kept)
    assert causes[0].startswith("pictures: of equal pixels the generator's vision tower makes features")
    assert any(cause.startswith("tensors:") and "visual" in cause for cause in causes)


def come_apart(pair: Pair) -> None:
    pair.model.lm_head.weight = nn.Parameter(pair.model.lm_head.weight.detach() * 1.1)


def to_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Pair], object]:
    """The change made to the weights that the generator has."""
    return lambda pair: change({name: each.data for name, each in pair.model.named_parameters()})


EXPERTS, SINKS = "model.layers.0.mlp.experts.down_proj", "model.layers.0.self_attn.sinks"
TENSORS: dict[str, tuple[str, Callable[[Pair], object], str]] = {
    **{name: ("tied", to_weights(change), words) for name, (change, words) in SPOILED.items()},
    "tied weight apart": ("tied", come_apart, "lm_head.weight is tied to another tensor"),
    "permuted experts": (
        "experts",
        to_weights(lambda weights: weights[EXPERTS].copy_(weights[EXPERTS].roll(1, 0).clone())),
        "experts.1.down_proj.weight has the values of model.layers.0.mlp.experts.0.down_proj.weight",
    ),
    "two experts of the last layer": (
        "experts",
        lambda pair: exchange(*pair.weight(EXPERTS.replace("0", "1"))[:2]),
        "experts.1.down_proj.weight has the values of model.layers.1.mlp.experts.0.down_proj.weight",
    ),
    "no sinks": ("sinks", lambda pair: pair.weight(SINKS).zero_(), f"{SINKS} is 1 of its size away"),
    "adapter dropped": (
        "lora",
        lambda pair: asyncio.run(pair.generator.update_weights(export_of(pair), 1)),
        "q_proj.weight is without the adapter",
    ),
}


async def export_of(pair: Pair) -> Any:
    for bucket in pair.trainer.export_weights(1 << 20, check=False):
        yield bucket


@pytest.mark.parametrize("fault", TENSORS)
def test_a_wrong_tensor_is_named(pair_of, fault):
    family, plant, words = TENSORS[fault]
    pair = pair_of(family)
    assert pair.difference()[0] < 1e-4, "a right pair"
    head = pair.model.lm_head.weight
    with torch.no_grad():
        plant(pair)
    try:
        assert words in pair.causes()[0]
    finally:
        pair.model.lm_head.weight = head
        pair.update()


def test_right_bytes_under_wrong_names_are_named_wherever_names_are_exchanged(pair_of, monkeypatch):
    pair = pair_of("tied")
    monkeypatch.setattr(pair, "rename", wrong_names)
    pair.update()
    assert "gate_proj.weight has the values of model.layers.1.mlp.up_proj.weight" in pair.causes()[0]

    right = pair.trainer.sketches
    monkeypatch.setattr(pair.trainer, "sketches", lambda: {wrong_names(name): each for name, each in right().items()})
    (cause,) = pair.causes()  # the trainer itself calls them so
    assert "they part in model.layers.1" in cause and "wrong names" in cause
    monkeypatch.undo()
    pair.update()


def hotter(logits_BV, rows, *args):
    return sampling.sample(logits_BV / 1.4, rows, *args)


def cut_by_itself(logits_BV, rows, *args):
    """Reports log-probs of the likeliest tokens alone."""
    tokens_B, logprobs_B = sampling.sample(logits_BV, rows, *args)
    all_BV = (logits_BV / rows.temperature_B[:, None]).log_softmax(-1)
    out_BV = all_BV < logprobs_B[:, None] - 0.5
    return tokens_B, all_BV.masked_fill(out_BV, -torch.inf).log_softmax(-1).gather(1, tokens_B[:, None])[:, 0]


def cut_where_asked(logits_BV, rows, *args):
    sample = sampling.sample if rows.truncated_R is None else cut_by_itself
    return sample(logits_BV, rows, *args)


def penalised(logits_BV, rows, *args):
    if rows.penalty_B is None and rows.presence_B is None:
        return sampling.sample(logits_BV, rows, *args)
    _, seen_BV, _, count_BV, *_ = (*args, None, None, None)
    logits_BV = sampling._penalised(logits_BV, rows, seen_BV, count_BV)
    return sampling.sample(logits_BV, replace(rows, penalty_B=None, presence_B=None), *args)


@pytest.mark.parametrize(
    ("sample", "changes", "words"),
    [
        (hotter, {}, "temperature: both agree where the generator is asked for 0.57"),
        (cut_by_itself, {}, "a cut distribution"),
        *((cut_where_asked, *each) for each in TRUNCATIONS),
        *((penalised, *each) for each in PENALTIES),
    ],
)
def test_a_wrong_sampling_setting_is_named(pair_of, monkeypatch, sample, changes, words):
    pair = pair_of("tied")
    monkeypatch.setattr(pair, "request", replace(pair.request, params=replace(pair.request.params, **changes)))
    assert not pair.causes()
    monkeypatch.setattr(continuous_batching, "sample", sample)
    (cause,) = pair.causes()
    assert cause.startswith(words)


def test_a_trainer_of_another_temperature_is_named(pair_of, monkeypatch):
    pair = pair_of("tied")
    monkeypatch.setattr(pair.trainer.weights.scorer, "temperature", 1.1)
    assert "asked for 1.1 in place of 0.8" in pair.causes()[0]


@pytest.mark.parametrize(("shift", "words"), [(1, "before"), (-1, "after")])
def test_a_token_offset_is_named(pair_of, monkeypatch, shift, words):
    pair, complete = pair_of("tied"), Pair.complete

    def moved(self, requests):
        return [replace(done, logprobs=np.roll(done.logprobs, shift)) for done in complete(self, requests)]

    monkeypatch.setattr(Pair, "complete", moved)
    (cause,) = pair.causes()
    assert cause.startswith("token offset") and f"the token {words} it" in cause


def test_keys_and_values_of_old_weights_are_named(pair_of, monkeypatch):
    pair = pair_of("tied")
    batching, old = pair.generator._batching, {name: each.data * 1.2 for name, each in pair.model.named_parameters()}
    prefill = batching._prefill

    def from_cache(groups):
        for group in groups:
            new = {name: each.data for name, each in pair.model.named_parameters()}
            found = np.array_equal(group[0].request.prompt_ids, pair.request.prompt_ids)
            for name, each in pair.model.named_parameters():
                each.data = (old if found else new)[name]
            prefill([group])
            for name, each in pair.model.named_parameters():
                each.data = new[name]

    monkeypatch.setattr(batching, "_prefill", from_cache)
    (cause,) = pair.causes()
    assert cause.startswith("keys and values of old weights")


@pytest.mark.parametrize("fault", ["rope base", "final soft cap", "soft cap of attention", "experts of a token"])
def test_another_way_to_compute_is_named(pair_of, monkeypatch, fault):
    pair = pair_of({"rope base": "tied", "experts of a token": "experts"}.get(fault, "capped"))
    assert not pair.causes()
    model = pair.model.model
    if fault == "rope base":
        monkeypatch.setattr(model.rotary_emb, "inv_freq", model.rotary_emb.inv_freq**0.7)
        words = ["buffer model.rotary_emb.inv_freq: mean", "they part in model.layers.0"]
    elif fault == "final soft cap":
        monkeypatch.setattr(pair.model.config, "final_logit_softcapping", None)
        words = ["final_logit_softcapping: 3.0 in the trainer, None in the generator", "part behind them"]
    elif fault == "soft cap of attention":
        for layer in model.layers:
            monkeypatch.setattr(layer.self_attn, "attn_logit_softcapping", None)
        words = ["they part in model.layers.0, whose output is"]
    else:
        monkeypatch.setattr(model.layers[1].mlp.gate, "top_k", 1)
        words = ["they part in model.layers.1, whose output is"]
    causes = pair.causes()
    assert all(word in cause for word, cause in zip(words, causes, strict=True)), causes


def test_another_chat_template_is_named(pair_of):
    generator, own = pair_of("tied").generator, probe_prompt(make_tokenizer(), "chatml")
    for template, differs in (("chatml", False), ("qwen2", True)):
        with replaced(generator, context=replace(generator.context, template=template)):
            assert bool(problem := other_prompt(own, generator.settings())) == differs
    assert problem is not None and problem.startswith("template or tokenizer")


def test_the_bound_follows_the_coarser_number_format():
    full, half = {"number format": "float32"}, {"number format": "bfloat16", "temperature": "0.5"}
    away_M = torch.arange(6.0)
    for sides, value, judged in [
        ((full, full), 1e-3, 5.0),
        ((half, full), 0.8, 2.0),
        ((full, full | {"experts": "True"}), 1e-3, 4.0),
        ((half, full | {"experts": "True"}), 0.8, 2.0),
    ]:
        bound = Bound.of(*sides)
        assert (bound.value, bound.difference(-away_M, torch.zeros(6))) == (value, judged)
    assert Bound.of(full, {"number format": "bfloat16 fp8"}).value == 1.5


def test_a_load_the_first_change_and_every_nth_step_are_probed_against_their_own_version(monkeypatch):
    asked = []
    replicas: Any = SimpleNamespace(num_loads=1, shares_devices=True, version=0)
    replicas.cluster = SimpleNamespace(name="actor_infer", submit=lambda *_: asked.append(replicas.version))
    probe = Probe(SimpleNamespace(probe_every=3, rpc_timeout=1.0), SimpleNamespace(on_synced=[]), "tiny")
    monkeypatch.setattr(probe, "_make_request", lambda: None)
    monkeypatch.setattr(probe, "_gather", lambda asked, _: [asked.version])
    monkeypatch.setattr(probe, "_compare", lambda asked, found, metrics: {"compared": found[0]})
    compared = []
    for version, trained in [(0, 0), (0, 0), (1, 1), (2, 2), (3, 3), (4, 5), (5, 5), (6, 6), (7, 7)]:
        replicas.version = version
        probe.ask(replicas)
        compared.append(probe.check(trained).get("compared"))
    assert asked == [0, 1, 4, 7]
    assert compared == [0, None, 1, None, None, None, None, None, 7], "what was trained meanwhile is left out"
    replicas.num_loads, replicas.shares_devices = 2, False  # a worker was replaced
    probe.ask(replicas)
    assert asked[-2:] == [7, 7] and probe.check(8) == {"compared": 7}, "compared at once, reported later"
