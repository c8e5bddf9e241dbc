"""Prompts with pictures: what every generator that takes them says of its tokens, through updates and penalties."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from roll.data.columns import Item
from roll.data.requests import Completion, GenerateRequest, SamplingParams
from roll.distributed.strategy.evidence import rows_of
from roll.models.loading import load_causal_lm
from roll.pipeline.probe import find_causes, of_pictures
from tests.generators.conftest import _parameter
from tests.support.contract import buckets_of, first_token, needs_seeing, started, weights_of
from tests.support.picture_models import make_picture_model
from tests.support.pictured import make_rows, picture, plain_logprobs, unmodified
from tests.support.probe_pair import seeing_pair

FAMILY = "qwen2_5_vl"
A, B, C = (picture(*each, FAMILY) for each in ((1, 2, 3), (2, 3, 2), (3, 2, 3)))
"""The first and the last have one size."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_picture_model(tmp_path_factory.mktemp("seeing") / "model", FAMILY)


@pytest.fixture(scope="module")
def old(path: Path) -> Any:
    return load_causal_lm(str(path), pictures=True).eval()


@pytest.fixture(scope="module")
def new(path: Path) -> Any:
    """With another tower, and the same language model."""
    model = load_causal_lm(str(path), pictures=True).eval()
    for name, parameter in model.named_parameters():
        if "visual" in name:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    return model


@pytest.fixture(scope="module", params=[_parameter(name, slow=True) for name in ("hf_infer", "vllm", "sglang")])
def seeing(request: pytest.FixtureRequest, path: Path) -> Iterator[Any]:
    if request.param == "vllm":
        needs_seeing("vllm")
    with started(request.param, path, pictures=True) as engine:
        yield engine


def request_of(name: str, first: Item, **params: Any) -> GenerateRequest:
    """The same words around another first picture."""
    row = make_rows([[3, first, 2, B, 4]], 3, FAMILY)
    return GenerateRequest(name, row.tokens_T.numpy(), SamplingParams(ignore_eos=True, **params), items=row.items_I[0])


def reported(completion: Completion) -> torch.Tensor:
    return torch.from_numpy(completion.logprobs)


def said(model: PreTrainedModel, request: GenerateRequest, completion: Completion) -> torch.Tensor:
    """[M]: log-probs of sampled tokens, by Transformers."""
    row = rows_of([request], [completion])
    return plain_logprobs(model, row)[row.loss_mask_T].detach()


async def test_requests_in_flight_see_with_the_new_tower_and_nothing_of_the_old_one_is_found(seeing, old, new):
    # Greedy, as the plain model cannot read a picture's token where it was sampled.
    running = [request_of(str(n), first, max_new_tokens=100, temperature=0.0) for n, first in enumerate((A, C))]
    tasks = [asyncio.create_task(seeing.generate(request)) for request in running]
    await first_token(seeing)
    await seeing.update_weights(buckets_of(weights_of(new)), 5, recompute_kv=True)
    for request, task in zip(running, tasks, strict=True):
        completion = await task
        version_M = torch.from_numpy(completion.versions)
        by_old, by_new = said(old, request, completion), said(new, request, completion)
        assert set(version_M.tolist()) == {0, 5}
        assert float((reported(completion) - by_old)[version_M == 0].abs().max()) < 1e-4
        assert float((reported(completion) - by_new)[version_M == 5].abs().max()) < 1e-4
        assert float((by_old - by_new).abs().max()) > 0.1
    for name, first in (("again", A), ("other", C), ("same", A)):  # equal words, so a cache would find the one before
        request = request_of(name, first, max_new_tokens=4, temperature=0.0)
        completion = await seeing.generate(request)
        assert float((reported(completion) - said(new, request, completion)).abs().max()) < 1e-4
    await seeing.update_weights(buckets_of(weights_of(old)), 0)


async def test_penalties_count_the_tokens_that_stand_for_pictures(seeing, old):
    request = request_of("penalised", A, max_new_tokens=12, temperature=0.0, repetition_penalty=1.5)
    completion = await seeing.generate(request)
    arguments = unmodified(make_rows([[3, A, 2, B, 4]], 3, FAMILY), FAMILY)
    stops = old.generation_config.eos_token_id
    old.generation_config.eos_token_id = None
    expected = old.generate(**arguments, do_sample=False, max_new_tokens=12, repetition_penalty=1.5)[0, -12:]
    old.generation_config.eos_token_id = stops
    assert completion.token_ids.tolist() == expected.tolist()
    plain = await seeing.generate(
        replace(request, request_id="plain", params=replace(request.params, repetition_penalty=1.0))
    )
    assert completion.token_ids.tolist() != plain.token_ids.tolist()


def test_a_probe_names_a_swapped_picture(seeing, path, monkeypatch):
    """Planted where pixels leave for an engine's process; in ``hf_infer`` by ``tests/unit/pipeline/test_probe.py``."""
    if seeing.name == "hf_infer":
        pytest.skip("it has no process of its own")
    pair, prompts = seeing_pair(path, seeing), seeing._prompts
    pictures = prompts._pictures if seeing.name == "vllm" else prompts._tower.pictures
    made = pictures.inputs

    def with_inputs(inputs):
        monkeypatch.setattr(pictures, "inputs", inputs)
        prompts._of_item.cache_clear()
        pair.update()  # what was made of the picture is forgotten
        return pair.difference()

    difference, bound, completion = with_inputs(made)
    assert difference < bound.value
    row = rows_of([pair.request], [completion])
    (given, seen), settings = pair.pictures(row), pair.settings()
    assert given.keys() == seen.keys() == {"pixel_values", "image_grid_thw", "features"}
    assert not of_pictures(pair, row, *settings)
    difference, bound, completion = with_inputs(
        lambda items: (found := made(items)) | {"pixel_values": found["pixel_values"][::-1].copy()}
    )
    causes = find_causes(pair, pair.request, completion, bound)
    with_inputs(made)
    assert difference > bound.value and causes[0].startswith("pictures: the generator sees another one: "), causes


async def test_content_that_is_not_there_is_refused(seeing):
    request = request_of("blind", A, max_new_tokens=1)
    for wrong, words in (
        (replace(request, items=()), "content of none of the row's 0 items"),
        (replace(request, prompt_ids=request.prompt_ids[:5]), "the prompt ends within a picture"),
    ):
        with pytest.raises(ValueError, match=words):
            await seeing.generate(wrong)
    assert np.flatnonzero(request.prompt_ids < 0)[0] < 5
