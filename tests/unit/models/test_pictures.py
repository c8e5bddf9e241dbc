"""A model with pictures computes what its own class does of each row alone, and what it would not is found."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from roll.data.batch import Batch
from roll.data.columns import Item
from roll.data.identity import content_ids
from roll.data.packing import packed_row, rectangle, row_with_shared_prompts
from roll.data.pictures import Pictures
from roll.data.requests import GenerateRequest
from roll.distributed.strategy.fsdp2.strategy import Fsdp2Train
from roll.distributed.strategy.generation.generator import check_request
from roll.models.pictures import FAMILIES, PictureInput, Tower
from roll.models.planned_attention import enable_sharing
from roll.models.scoring import TokenScorer, score_batch, score_input
from tests.support.picture_models import make_picture_model
from tests.support.pictured import MARK, make_pictured, make_rows, picture, shown, unmodified
from tests.support.trainers import make_context

PACKED = {"use_sequence_packing": True, "share_prompts": False, "infer_batch_size": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    def made(family: str) -> Path:
        path = folder / family
        return path if path.exists() else make_picture_model(path, family)

    return made


def exact_model(folder: Path) -> Any:
    """In double precision; the numbers that training leaves in biases and norms are not 0 and 1."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def own_logprobs(model: Any, batch: Batch) -> Tensor:
    """Of the loss tokens, by the model's class from one row after another; 0 elsewhere."""
    rows = []
    for number in range(batch.num_sequences):
        one = batch.select([number])
        logits = model(**unmodified(one), use_cache=False).logits[0, :-1]
        found = logits.log_softmax(-1).gather(1, one.tokens_T[1:, None].clamp(min=0))[:, 0]
        rows.append(torch.cat([found.new_zeros(1), found]) * one.loss_mask_T)
    return torch.cat(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_are_those_of_the_models_own_forward_pass(models, family):
    """Of tower, projector and language model, in every layout; each distinct picture goes through the tower once."""
    folder, batch = models(family), make_pictured(0)
    model, own = exact_model(folder), exact_model(folder)
    weights_T = torch.randn(batch.num_tokens, dtype=torch.float64)
    expected_T = own_logprobs(own, batch)
    (expected_T * weights_T).sum().backward()
    scorer = TokenScorer(model, tower=Tower(model, Pictures(folder)))
    patches: list[int] = []
    model.model.visual.register_forward_hook(lambda _, args, __: patches.append(len(args[0])))
    layouts = [rectangle, packed_row] + [row_with_shared_prompts] * enable_sharing(model)
    for lay_out in layouts:
        model.zero_grad()
        found_T = score_input(scorer, lay_out(batch), batch.num_tokens).logprobs_T
        assert found_T is not None and float((found_T - expected_T).abs().max()) < 2e-6
        (found_T * weights_T).sum().backward()
        for (name, parameter), theirs in zip(model.named_parameters(), own.parameters(), strict=True):
            difference = float((parameter.grad - theirs.grad).norm() / theirs.grad.norm())
            assert difference < 5e-6, f"{lay_out.__name__}: {name}: {difference:.2g}"
    assert patches == [4 * (6 + 6 + 1)] * len(layouts)


def test_a_mark_that_the_policy_sampled_is_a_word(models):
    """The unmodified model takes it for a picture's and refuses the row; in generation it is one more token."""
    folder = models("qwen3_vl")
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    batch = make_rows([[3, picture(0, 1, 2), 2, -5], [4, -3]], 0)
    sampled = batch.loss_mask_T.nonzero()[[1, 6], 0]
    batch = batch.replace(tokens_T=batch.tokens_T.index_fill(0, sampled, MARK))
    scorer = TokenScorer(model, tower=Tower(model, Pictures(folder)))
    found = score_batch(scorer, batch, packing=True).logprobs_T
    words = unmodified(batch.select([0]).replace(tokens_T=batch.select([0]).tokens_T.where(~batch.loss_mask_T[:13], 9)))
    with torch.no_grad():
        seen = model(**{name: x[:, :8] if x.ndim == 2 and name != "pixel_values" else x for name, x in words.items()})
        raise AssertionError(seen)
    assert found
