"""A model with pictures computes what its own class does of each row alone, and what it would not is found."""

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from roll.configs.pipeline import PipelineConfig
from roll.data.batch import Batch
from roll.data.columns import Item
from roll.data.identity import content_ids
from roll.data.packing import packed_row, rectangle, row_with_shared_prompts
from roll.data.pictures import Pictures
from roll.data.requests import GenerateRequest
from roll.distributed.strategy.generation.generator import check_request
from roll.models.freezing import freeze_unseen
from roll.models.loading import load_causal_lm
from roll.models.own_forward import in_one_process
from roll.models.pictures import FAMILIES, PictureInput, Tower, tower_of
from roll.models.planned_attention import enable_sharing
from roll.models.scoring import TokenScorer, score_batch, score_input
from roll.preflight.models import check_frozen_parts
from tests.support.contract import threads
from tests.support.picture_models import FAMILIES as KNOWN
from tests.support.picture_models import make_picture_model
from tests.support.pictured import MARK, make_pictured, make_rows, picture, plain_logprobs, shown, unmodified
from tests.support.trainers import make_trainer

PACKED = {"use_sequence_packing": True, "share_prompts": False, "infer_batch_size": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda family: make_picture_model(folder / family, family))


def exact_model(folder: Path) -> Any:
    """In double precision; the numbers that training leaves in biases and norms are not 0 and 1."""
    options: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}  # others have no float64
    model = AutoModelForImageTextToText.from_pretrained(folder, **options).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def is_fixed(family: str) -> bool:
    """All of its pictures have one size, and go into the tower whole."""
    return KNOWN[family].options.get("merge_size") is None


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_are_those_of_the_models_own_forward_pass(models, family):
    """Of tower, projector and language model, in every layout; each distinct picture goes through the tower once."""
    folder, batch = models(family), make_pictured(0, family)
    model, own = exact_model(folder), exact_model(folder)
    freeze_unseen(model)
    weights_T = torch.randn(batch.num_tokens, dtype=torch.float64)
    expected_T = plain_logprobs(own, batch)
    (expected_T * weights_T).sum().backward()
    scorer = TokenScorer(model, tower=Tower(model, Pictures(folder)))
    features: list[int] = []
    scorer.tower.observer = lambda given, placed: features.append(sum(len(each["pixel_values"]) for each in given))
    layouts = [rectangle, packed_row] + [row_with_shared_prompts] * enable_sharing(model)
    for lay_out in layouts:
        model.zero_grad()
        found_T = score_input(scorer, lay_out(batch), batch.num_tokens).logprobs_T
        assert found_T is not None and float((found_T - expected_T).abs().max()) < 2e-6
        (found_T * weights_T).sum().backward()
        for (name, parameter), theirs in zip(model.named_parameters(), own.parameters(), strict=True):
            assert parameter.requires_grad == (theirs.grad is not None), name
            if theirs.grad is None:
                continue
            difference = float((parameter.grad - theirs.grad).norm() / theirs.grad.norm().clamp(min=1e-3))
            assert difference < 5e-6, f"{lay_out.__name__}: {name}: {difference:.2g}"
    assert features == [3 if is_fixed(family) else 4 * (6 + 6 + 1)] * len(layouts)


def test_a_mark_that_the_policy_sampled_is_a_word(models):
    """The unmodified model takes it for a picture's and refuses the row; while it generates, it is one more token."""
    folder = models("qwen3_vl")
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    batch = make_rows([[3, picture(0, 1, 2), 2, -5], [4, -3]], 0)
    (start, *_), row = batch.loss_mask_T.nonzero()[:, 0].tolist(), batch.select([0])
    batch = batch.replace(tokens_T=batch.tokens_T.index_fill(0, torch.tensor([start + 1, start + 7]), MARK))
    scorer = TokenScorer(model, tower=Tower(model, Pictures(folder)))
    check = in_one_process(scorer, packing=True)
    found_T = score_batch(scorer, batch, packing=True, check=check).logprobs_T
    assert found_T is not None and check.compared == {"packed"}
    prompt = Batch(torch.tensor([start]), row.tokens_T[:start], row.loss_mask_T[:start], items_I=row.items_I)
    with torch.no_grad():
        first = model(**unmodified(prompt), use_cache=True)
        rest = model(batch.tokens_T[None, start : start + 4], past_key_values=first.past_key_values, use_cache=True)
    logprobs_TV = torch.cat([first.logits[0, -1:], rest.logits[0]]).log_softmax(-1)
    expected_T = logprobs_TV.gather(1, batch.tokens_T[start : start + 5, None])[:, 0]
    torch.testing.assert_close(found_T[start : start + 5], expected_T, rtol=1e-4, atol=1e-5)


Change = Callable[[PictureInput], PictureInput]


def swapped(pictures: PictureInput) -> PictureInput:
    """Two pictures of equal sizes change places."""
    return dataclasses.replace(pictures, order=[{0: 1, 1: 0}.get(number, number) for number in pictures.order])


def one_off(pictures: PictureInput) -> PictureInput:
    """Words behind pictures are one further."""
    assert pictures.positions_4RC is not None
    positions = pictures.positions_4RC.clone()
    positions[1:] += (positions[1] == positions[2]) & (positions[1] != positions[0])
    return dataclasses.replace(pictures, positions_4RC=positions)


def other_grid(pictures: PictureInput) -> PictureInput:
    """Height and width change places."""
    values = dict(pictures.values[0])
    (name,) = values.keys() - {"pixel_values"}
    values[name] = torch.cat([values[name][:, :-2], values[name][:, -2:].flip(1)], dim=1)
    return dataclasses.replace(pictures, values=[values])


CHANGES = (swapped, one_off, other_grid)


@pytest.mark.parametrize(
    ("family", "change", "engine"),
    [
        *(("qwen3_vl", change, engine) for change in CHANGES for engine in ("fsdp2_train", "megatron_train")),
        *(("glm4v", change, "fsdp2_train") for change in (one_off, other_grid)),
        *((family, swapped, "fsdp2_train") for family in ("qwen3_vl_moe", "llava", "gemma3", "mistral3")),
        ("mistral3", other_grid, "fsdp2_train"),
    ],
)
def test_what_is_shown_wrongly_ends_the_run_before_its_first_result(models, monkeypatch, family, change, engine):
    options: dict[str, Any] = {"worker": PACKED, "pictures": True, "temperature": 1.0}
    trainer = make_trainer(models(family), engine, **options)
    a, b = picture(1, 2, 3, family), picture(2, *((2, 3) if change is swapped else (3, 2)), family)
    batch = make_rows([[3, a, 2, -6], [4, b, 3, -5], [2, a, -9]], 1, family)
    made = Tower.of_rows
    monkeypatch.setattr(Tower, "of_rows", lambda *given: change(made(*given)))
    with pytest.raises(ValueError, match=r"of the first micro-batch \(packed\) .* part in [a-z_.]+\.layers\.0"):
        trainer.logprobs(batch)
    monkeypatch.undo()
    trainer.logprobs(batch)
    assert trainer.own_forward.compared == {"packed"}


def test_pictures_that_are_seen_one_way_end_the_run(models, monkeypatch):
    """Gemma's tokens of a picture see each other both ways, also in a packed row; a kernel that cannot is refused."""
    folder, batch = models("gemma3"), make_pictured(0, "gemma3")
    trainer = make_trainer(folder, "fsdp2_train", worker=PACKED, pictures=True, temperature=1.0)
    with monkeypatch.context() as patched:
        patched.setattr(trainer.weights.scorer.tower, "both_ways", False)
        with pytest.raises(ValueError, match=r"of the first micro-batch \(packed\) .* part in model.language_model"):
            trainer.logprobs(batch)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    model.config.get_text_config()._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation: got flash_attention_2, expected auto, sdpa or eager"):
        Tower(model, Pictures(folder))


@pytest.mark.parametrize(
    ("family", "head", "engine"),
    [
        ("qwen3_vl", "value", "fsdp2_train"),
        ("qwen3_5", "score", "fsdp2_train"),
        ("qwen3_vl", "value", "megatron_train"),
    ],
)
def test_critics_and_reward_models_see(models, monkeypatch, family, head, engine):
    """Their hidden states are those of the model's own trunk."""
    options: dict[str, Any] = {"worker": PACKED, "pictures": True, "head": head, "role": "critic"}
    trainer = make_trainer(models(family), engine, **options)
    batch = make_rows([[3, picture(1, 2, 3), 2, -6], [4, picture(2, 2, 3), 3, -5], [5, -4]], 1)
    assert trainer.logprobs(batch).values_T is not None and trainer.own_forward.compared == {"packed"}
    trainer.own_forward.compared.clear()
    made = Tower.of_rows
    monkeypatch.setattr(Tower, "of_rows", lambda *given: swapped(made(*given)))
    with pytest.raises(ValueError, match="projected hidden states of the first micro-batch"):
        trainer.logprobs(batch)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "mistral3"])
def test_one_other_pixel_ends_the_run(models, monkeypatch, family):
    """However little it changes: pixels are compared with the ids by their hash, and the tower's input with the
    processor's."""
    folder, item = models(family), Item(picture(5, 1, 2, family).data.copy())
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    pictures = Pictures(folder)
    scorer, batch = TokenScorer(model, tower=Tower(model, pictures)), make_rows([[3, item, 2, -4]], 1, family)
    right = pictures.inputs

    def other(items: Any) -> Any:
        values = right(items)
        values["pixel_values"][0, 0] += 0.01
        return values

    with monkeypatch.context() as patched:
        patched.setattr(pictures, "inputs", other)
        with pytest.raises(ValueError, match="pixel_values of a row's pictures are not those that the model's picture"):
            score_batch(scorer, batch, check=in_one_process(scorer))
    item.data[0, 0, 0] ^= 1
    with pytest.raises(ValueError, match="pixels have changed since a row's ids were made of them: place "):
        score_batch(scorer, batch, check=in_one_process(scorer))


def test_pictures_that_do_not_fit_are_named(models):
    folder, item = models("qwen3_vl"), picture(5, 1, 2)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    ids = torch.cat([torch.arange(3), torch.from_numpy(content_ids(item, [MARK] * 3)), torch.arange(4)])
    batch = Batch(torch.tensor([10]), ids, torch.arange(10) > 7, items_I=((item,),))
    with pytest.raises(ValueError, match="pictures for Qwen3VLForConditionalGeneration, which was loaded without"):
        score_batch(TokenScorer(model), batch)
    scorer = TokenScorer(model, tower=Tower(model, Pictures(folder)))
    with pytest.raises(ValueError, match="a picture of 56 x 28 pixels: got 3 tokens in its row, expected 2"):
        score_batch(scorer, batch)
    model.config.model_type = "llava"
    with pytest.raises(ValueError, match=r"llava has been .* with a clip_vision_model alone, not with a qwen3_vl"):
        Tower(model, Pictures(folder))
    model.config.model_type = "internvl"
    with pytest.raises(ValueError, match=r"internvl has not been compared .* on pictures; expected one of qwen2_5_vl"):
        Tower(model, Pictures(folder))


UP = "model.language_model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("family", "prefix", "rates", "expected"),
    [
        ("qwen3_vl", "model.visual", {}, ""),
        ("qwen3_5", "model.visual", {"model.visual.merger": 1e-3}, ""),
        ("qwen3_5", "model.vissual", {}, "nearest"),
        ("qwen3_5", UP, {}, "model.language_model.layers.0.mlp.gate_proj.weight with the rest that Megatron stores"),
        ("qwen3_vl", "", {UP: 1e-3}, "with megatron_train one rate for model.language_model.layers.0.mlp.gate_proj"),
    ],
)
def test_a_configuration_may_freeze_the_tower(models, family, prefix, rates, expected):
    """Whether the model will have it is not known before the data are. Megatron cannot part all that has a name."""
    train = {"model_args": {"freeze_module_prefix": prefix}, "training_args": {"learning_rate_of": rates}}
    train["strategy_args"] = {"strategy_name": "megatron_train"}
    config = PipelineConfig.model_validate({"pretrain": str(models(family)), "actor_train": train})
    problems = [f"{problem.expected}{problem.hint}" for problem in check_frozen_parts(config)]
    assert bool(problems) == bool(expected) and all(expected in problem for problem in problems)


def test_a_generator_is_asked_about_pictures_that_the_request_has():
    item, other = picture(1, 1, 1), picture(2, 1, 1)
    prompt = np.concatenate([np.arange(3), shown(item).numpy()])
    sizes: dict[str, Any] = {"vocab_size": 300, "sequence_length": 30}
    assert check_request(GenerateRequest("a", prompt, items=(item,)), **sizes, pictures=True) == 24
    for items, end, options, reason in (
        ((other,), 6, {"pictures": True}, "place 4: content of none of the row's 1 items"),
        ((item,), 5, {"pictures": True}, "the prompt ends within a picture"),
        ((item,), 6, {}, "expected 0 to 299"),
    ):
        with pytest.raises(ValueError, match=reason):
            check_request(GenerateRequest("a", prompt[:end], items=items), **sizes, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_of_features_depends_on_other_pictures(tmp_path, family):
    """The generator's: pictures of one size go through the tower together."""
    folder = make_picture_model(tmp_path, family, tower={"intermediate_size": 64})
    sizes = [*((seed, 2, 3) for seed in range(7)), (7, 3, 2), (8, 3, 2), (9, 1, 2)]
    batch = make_rows([[3, picture(*each, family), 2] for each in sizes], 1, family)
    ids = np.split(batch.tokens_T.numpy(), np.cumsum(batch.lengths_B.numpy())[:-1])
    rows = list(zip(ids, batch.items_I, strict=True))
    tower = tower_of(load_causal_lm(str(folder), pictures=True), str(folder), apart=True)

    given: list[int] = []
    tower.observer = lambda values, _: given.append(sum(len(each["pixel_values"]) for each in values))

    def features(some: list[Any]) -> tuple[Tensor, int]:
        length = sum(len(ids) for ids, _ in some)
        seen = tower.of_rows(some, torch.arange(length), (1, length))
        output = tower.see(seen)["mm_encoder_outputs"]["image"].pooler_output
        return (output if isinstance(output, Tensor) else torch.cat(output)), len(seen.values)

    with threads(1), torch.inference_mode():
        together, passes = features(rows)
        alone = [features([row])[0] for row in rows]
        reversed_order = features(rows[::-1])[0]
    shapes = [item.data.shape for items in batch.items_I for item in items]
    assert passes == (len(shapes) if family == "mistral3" else len({*shapes}))
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(reversed_order, torch.cat(alone[::-1]))
    assert not torch.equal(alone[0], alone[1])
    assert given[0] == given[-1] == sum(given[1:-1]), "repeated pictures are not shown"
