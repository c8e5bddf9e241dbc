"""Whole runs on preferences as a user starts them, on an untrained model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.conftest import TWO_RANKS, Offline, Run, assert_as_expected, assert_taken_again, packed
from tests.support.imitation import Imitator, Talk, learnt
from tests.support.resuming import stop_and_resume

Dpo = Callable[..., Run]
BETA = 0.5


def sides(number: int) -> tuple[str, str]:
    return "Up" * (1 + number % 3), "Down and up"[: 3 + number % 5]


def row(number: int) -> str:
    chosen, rejected = sides(number)
    return json.dumps({"ask": f"{number}?", "chosen": chosen, "rejected": rejected}) + "\n"


def talks(number: int) -> list[Talk]:
    return [[("user", f"{number}?"), ("assistant", answer)] for answer in sides(number)]


def leads(imitator: Imitator, reference: Imitator, numbers: list[int]) -> Tensor:
    """The chosen answers' rewards beyond the rejected ones'."""
    found = []
    for number in numbers:
        ratios = []
        for talk in talks(number):
            with torch.no_grad():
                ref = reference.logprobs(talk)[0].sum()
            ratios.append(imitator.logprobs(talk)[0].sum() - ref)
        found.append(BETA * (ratios[0] - ratios[1]))
    return torch.stack(found)


@pytest.fixture(scope="session")
def expected(model: Path) -> dict[int, dict[str, float]]:
    """Held-out loss, margin and accuracy by step: the run of ``config/dpo.yaml`` in float64, without the library."""
    imitator, reference, held_out = Imitator(model), Imitator(model), list(range(10, 14))

    def measure() -> dict[str, float]:
        with torch.no_grad():
            lead = leads(imitator, reference, held_out)
        loss = -torch.nn.functional.logsigmoid(lead).mean()
        return {"loss": loss.item(), "margin": lead.mean().item(), "accuracy": (lead > 0).double().mean().item()}

    def loss(rows: list[int]) -> Tensor:
        return -torch.nn.functional.logsigmoid(leads(imitator, reference, rows)).mean()

    return learnt(imitator, "dpo", loss, measure)


def assert_learnt(run: Run, expected: dict[int, dict[str, float]]) -> None:
    assert_as_expected(run, expected, steps=(2, 4), rel=2e-3, slack=1e-4)
    assert run.metrics[0]["eval/loss"] == pytest.approx(0.693147, abs=1e-5), "the policy is its reference"


@pytest.fixture
def dpo(offline: Offline) -> Dpo:
    return offline("dpo", row)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stopped_run_ends_where_an_undisturbed_one_does(dpo, expected):
    whole, second = stop_and_resume(dpo, last_step=4)
    assert_learnt(whole, expected)
    assert "using" in (second.path / "logs" / "roll.log").read_text(), "the reference's scores are read again"
    after = whole.summary["eval"]["after"]
    assert after["loss"] < whole.summary["eval"]["before"]["loss"] and after["margin"] > 0


REFERENCES = {
    "role": ("precompute_reference=false", "reference={strategy_args: {strategy_name: hf_infer}}"),
    "megatron, role": (
        "precompute_reference=false",
        "train=megatron",
        "reference={strategy_args: {strategy_name: megatron_infer}, device_mapping: [0], model_args: {dtype: fp32}}",
    ),
    "two ranks, packed": (*TWO_RANKS, *packed(90)),
    "deepspeed": ("train=deepspeed",),
}


@pytest.mark.slow
@pytest.mark.parametrize("reference", REFERENCES)
def test_every_reference_and_engine_learns_as_float64_does(dpo, expected, reference):
    assert_learnt(dpo(*REFERENCES[reference], "actor_infer=null", "save_steps=4"), expected)


def without_pairs(folder: Path) -> list[str]:
    """Writes answers that are good or bad by themselves; the keys of a run on them."""
    for name, numbers in (("train", range(10)), ("val", range(10, 14))):
        lines = (
            json.dumps({"ask": f"{number}?", "solution": sides(number)[number % 2], "label": number % 2 == 0}) + "\n"
            for number in numbers
        )
        (folder / f"kto_{name}.jsonl").write_text("".join(lines))
    files = {"actor_train": "kto_train.jsonl", "validation": "kto_val.jsonl"}
    names = [f"{key}.data_args.file_name={file}" for key, file in files.items()]
    return ["preference_loss=kto", "actor_infer=null", *names]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_answers_without_pairs_are_taken_up_again_bit_for_bit(dpo, tmp_path):
    scored_by_step = ("precompute_reference=false", "reference={strategy_args: {strategy_name: hf_infer}}")
    kto = without_pairs(tmp_path)

    def start(*overrides: str, **options: Any) -> Run:
        return dpo(*kto, *scored_by_step, *overrides, **options)

    whole, _ = stop_and_resume(start, last_step=4)
    assert whole.metrics[4]["eval/loss"] < whole.metrics[0]["eval/loss"]


@pytest.mark.slow
def test_an_adapter_and_answers_without_pairs(dpo, tmp_path):
    lora = ("precompute_reference=false", "actor_train.model_args.lora_target=all-linear", "actor_infer=null")
    adapter = dpo(*lora, "actor_train.training_args.learning_rate=0.01", output="adapter")
    kto = dpo(*without_pairs(tmp_path), output="kto")
    assert adapter.wait() == 0, adapter.output
    assert adapter.metrics[0]["eval/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert adapter.metrics[4]["eval/loss"] < 0.68
    assert kto.wait() == 0, kto.output
    assert kto.metrics[0]["eval/loss"] == pytest.approx(0.5, abs=1e-6) and kto.metrics[0]["eval/anchor"] == 0
    assert kto.metrics[4]["eval/loss"] < kto.metrics[0]["eval/loss"]


@pytest.mark.slow  # a run and its replay
def test_a_step_is_taken_again_from_the_data_to_the_bit(dpo, replay):
    assert_taken_again(replay, dpo("save_steps=2").ended(), 3, "dpo")
