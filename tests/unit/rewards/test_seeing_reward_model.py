"""A reward model that sees: its scores are those of Transformers' trunk and the head's weights, in float64."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel

from roll.configs.rewards import RewardConfig
from roll.data.batch import Batch
from roll.data.columns import Item
from roll.models.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE, CLASSIFIES
from roll.models.loading import classifier_class, load_config
from roll.models.lora import SCORE_NAME
from roll.models.pictures import FAMILIES
from roll.preflight import models as preflight
from roll.rewards.classifiers import RewardModelConfig, load_classifier
from roll.rewards.scorer import sees
from roll.rewards.scoring import unseen
from roll.rewards.types import RewardError, Sample
from tests.support.picture_models import FAMILIES as KNOWN
from tests.support.picture_models import make_picture_model, make_tokenizer
from tests.support.pictured import picture, pictures_of, shown, unmodified
from tests.unit.rewards.test_reward_model import closing, verifier_of

QUICK = ("qwen2_5_vl", "qwen3_vl")
DTYPES = {"qwen3_vl_moe": torch.float32}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    def made(family: str) -> Path:
        path = folder / family
        return path if path.exists() else make_classifier(path, family)

    return made


def make_classifier(path: Path, family: str) -> Path:
    """A random one with one output, in double precision where the family's experts have it."""
    make_picture_model(path, family)
    config = load_config(str(path))
    config.num_labels = 1
    torch.manual_seed(3)
    model = classifier_class(config).from_config(config).to(DTYPES.get(family, torch.float64))
    torch.nn.init.normal_(model.score.weight)
    model.model.load_state_dict(AutoModel.from_pretrained(path).state_dict())
    model.save_pretrained(path)
    return path


def sample(words: str, answer: str, *pictures: Item) -> Sample:
    asked = ({"role": "system", "content": "Say <image>."}, {"role": "user", "content": words})
    return Sample(words, answer, None, "t", messages=asked, pictures=pictures)


def oracle(folder: Path, family: str, given: Sample) -> float:
    """By the trunk, one conversation alone, whose pictures its own processor has made ready."""
    tokenizer = make_tokenizer(family)

    def ids(text: str) -> Tensor:
        # "<image>" is a token of LLaVA's: in a message it is letters.
        return torch.tensor(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    start, end = (torch.tensor([tokenizer.convert_tokens_to_ids(f"<|im_{which}|>")]) for which in ("start", "end"))
    pieces, pictures = [], iter(given.pictures)
    for message in (*given.messages, {"role": "assistant", "content": given.response}):
        words = message["content"].split("<image>") if message["role"] == "user" else [message["content"]]
        pieces += [start, ids(f"{message['role']}\n{words[0]}")]
        for more in words[1:]:
            pieces += [shown(next(pictures), family), ids(more)]
        pieces += [end, ids("\n")]
    whole = torch.cat(pieces)
    mask = torch.zeros(len(whole), dtype=torch.bool)
    one = Batch(torch.tensor([len(whole)]), whole, mask, items_I=(tuple(given.pictures),))
    model = classifier_class(load_config(str(folder))).from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        hidden = model.model(**unmodified(one, family)).last_hidden_state[0, -1]
    return float(hidden @ model.score.weight[0].detach())


def scores(folder: Path, samples: Sequence[Sample], **keys: Any) -> list[Any]:
    """In one batch."""

    async def judge() -> list[Any]:
        async with closing(verifier_of(folder, **keys)) as verifier:
            return await asyncio.gather(*map(verifier.score, samples), return_exceptions=True)

    return [getattr(verdict, "score", verdict) for verdict in asyncio.run(judge())]


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES])
def test_scores_with_pictures_are_those_of_plain_transformers(models, family):
    a, b = picture(1, 2, 3, family), picture(2, 3, 2, family)
    samples = [
        sample("<image>what?", "one", a),
        sample("<image>what?", "one", b),
        sample("<image> or <image>, which of them?", "the second of the two", a, b),
        sample("no picture", "right"),
    ]
    found = scores(models(family), samples)
    expected = [oracle(models(family), family, each) for each in samples]
    tolerance = 1e-5 if family in DTYPES else 1e-6  # a score is rounded to float32
    assert found == pytest.approx(expected, rel=tolerance, abs=1e-6)
    assert len({round(value, 3) for value in found}) == 4 and np.isfinite(found).all()


def test_a_picture_of_another_size_is_resized_by_the_reward_model(models):
    """The policy's processor has made it, or none has (``roll score``)."""
    raw = Item(np.random.default_rng(0).integers(0, 256, (75, 50, 3), dtype=np.uint8))
    given, again = sample("<image>?", "a", raw), sample("<image>?", "a", pictures_of("qwen3_vl").item(raw.data))
    first, second = scores(models("qwen3_vl"), [given, again])
    assert first == second == pytest.approx(oracle(models("qwen3_vl"), "qwen3_vl", again), abs=1e-6)


def test_what_cannot_be_shown_has_no_score(models):
    a = picture(1, 2, 3)
    amiss = [sample("<image><image>", "a", a), sample("<image>" + "long " * 30, "a", a)]
    found = scores(models("qwen3_vl"), amiss, max_length=64)
    assert all(isinstance(each, RewardError) for each in found)
    assert "2 places for pictures" in str(found[0]) and "one with pictures is never cut" in str(found[1])


def test_adapters_that_were_not_compared_are_refused(models, tmp_path):
    pytest.importorskip("peft", reason="peft is not installed")
    content = {"base_model_name_or_path": str(models("qwen2_5_vl")), "task_type": CLASSIFIES, "peft_type": "LORA"}
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(content))
    save_file({SCORE_NAME: torch.ones(1, 64)}, tmp_path / ADAPTER_FILE)
    with pytest.raises(ValueError, match="an adapter of a reward model of the family qwen2_5_vl was not compared"):
        load_classifier(RewardModelConfig(model_path=str(tmp_path)))
    trained = SimpleNamespace(model_args=SimpleNamespace(lora_target="all-linear"))
    config = SimpleNamespace(trains_scores=True, uses_lora=True, actor_train=trained)
    with pytest.MonkeyPatch.context() as patched:
        for family, expected in (("qwen2_5_vl", 1), ("qwen3_vl", 0)):
            patched.setattr(preflight, "whole_config", lambda *_, kind=family: SimpleNamespace(model_type=kind))
            assert len(list(preflight.check_adapted_classifier(config))) == expected


def test_it_says_whether_it_sees(models):
    def domain(**args: Any) -> RewardConfig:
        verifier = {"name": "reward_model", "args": {"model_path": str(models("qwen3_vl")), **args}}
        return RewardConfig(tag_included=["t"], verifiers=[verifier])

    assert sees(domain()) and list(unseen({"d": domain()}, {"d": 3})) == []
    for blind in (domain(tensor_parallel_size=2), domain(remote={"url": "http://127.0.0.1:1"})):
        (line,) = unseen({"d": blind}, {"d": 3})
        assert "(reward_model) reads <image> in place of the pictures of 3 prompts" in line
    assert KNOWN.keys() >= set(FAMILIES)
