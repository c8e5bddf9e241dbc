"""Whole runs on given data as a user starts them: on conversations, preferences and a teacher, and of reward models."""

import asyncio
import functools
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from roll.__main__ import main
from roll.data.columns import Item
from roll.report.live import watch
from roll.rewards.classifiers import RewardModelConfig
from roll.rewards.reward_model import RewardModelVerifier
from roll.rewards.types import Sample
from tests.integration.conftest import Offline, Run
from tests.support.imitation import Imitator, Talk, learnt, talk
from tests.support.imitation import row as conversation
from tests.support.lines import write_lines
from tests.support.picture_models import make_picture_model
from tests.support.resuming import stop_and_resume

pytestmark = pytest.mark.timeout(600)

BETA = 0.5
RIGHT, WRONG = "Up Up", "Down"
HELD_OUT = list(range(10, 14))
Figures = dict[int, dict[str, float]]

TWO_RANKS = ("actor_train.device_mapping=[0,1]", "actor_train.training_args.gradient_accumulation_steps=1")
LORA = ("actor_train.model_args.lora_target=all-linear",)
BY_STEP = ("precompute_reference=false", "reference={strategy_args: {strategy_name: hf_infer}}")
"""The reference scores each step's rows, rather than all of them first."""


def packed(max_tokens: int) -> tuple[str, ...]:
    """Keys of training on packed rows, of at most so many tokens."""
    return (
        "actor_train.use_sequence_packing=true",
        "actor_train.use_dynamic_batching_in_train=true",
        f"actor_train.max_tokens_per_microbatch_in_train={max_tokens}",
    )


# ---- rows


def sides(number: int) -> tuple[str, str]:
    return "Up" * (1 + number % 3), "Down and up"[: 3 + number % 5]


def preference(number: int) -> str:
    chosen, rejected = sides(number)
    return json.dumps({"ask": f"{number}?", "chosen": chosen, "rejected": rejected}) + "\n"


def judged(number: int) -> str:
    right = number % 2 == 0
    content = {
        "ask": f"{number}?",
        "chosen": RIGHT,
        "rejected": WRONG,
        "answer": RIGHT if right else WRONG,
        "score": 1.0 if right else -1.0,
        "steps": ["Up ", "Up" if right else "Down"],
        "step_labels": [True, right],
    }
    return json.dumps(content) + "\n"


def without_pairs(folder: Path) -> list[str]:
    """Writes answers that are good or bad by themselves; the keys of a run on them."""
    for name, numbers in (("train", range(10)), ("val", HELD_OUT)):
        answers = [{"ask": f"{n}?", "solution": sides(n)[n % 2], "label": n % 2 == 0} for n in numbers]
        write_lines(folder / f"kto_{name}.jsonl", answers)
    files = {"actor_train": "kto_train.jsonl", "validation": "kto_val.jsonl"}
    names = [f"{key}.data_args.file_name={file}" for key, file in files.items()]
    return ["preference_loss=kto", "actor_infer=null", *names]


ROWS = {"sft": conversation, "dpo": preference, "distill": conversation, "rm": judged}


@pytest.fixture
def pipeline(offline: Offline, teacher: Path) -> Callable[[str], Callable[..., Run]]:
    """Makes the ``launch`` of a pipeline by its name."""

    def made(name: str) -> Callable[..., Run]:
        return offline(name, ROWS[name], *[f"teacher_pretrain={teacher}"] * (name == "distill"))

    return made


# ---- what they come to in float64, without the library's training


def learnt_conversations(model: Path, teacher: Path) -> Figures:
    imitator, held_out = Imitator(model), [talk(number) for number in HELD_OUT]

    def measure() -> dict[str, float]:
        return {"loss": imitator.loss(held_out).item(), "token_accuracy": imitator.accuracy(held_out)}

    return learnt(imitator, "sft", lambda rows: imitator.loss(map(talk, rows)), torch.no_grad()(measure))


def leads(imitator: Imitator, reference: Imitator, numbers: list[int]) -> Tensor:
    """The chosen answers' rewards beyond the rejected ones'."""
    found = []
    for number in numbers:
        ratios = []
        for answer in sides(number):
            said: Talk = [("user", f"{number}?"), ("assistant", answer)]
            with torch.no_grad():
                ref = reference.logprobs(said)[0].sum()
            ratios.append(imitator.logprobs(said)[0].sum() - ref)
        found.append(BETA * (ratios[0] - ratios[1]))
    return torch.stack(found)


def learnt_preferences(model: Path, teacher: Path) -> Figures:
    imitator, reference = Imitator(model), Imitator(model)

    def measure() -> dict[str, float]:
        lead = leads(imitator, reference, HELD_OUT)
        loss = -torch.nn.functional.logsigmoid(lead).mean()
        return {"loss": loss.item(), "margin": lead.mean().item(), "accuracy": (lead > 0).double().mean().item()}

    def loss(rows: list[int]) -> Tensor:
        return -torch.nn.functional.logsigmoid(leads(imitator, reference, rows)).mean()

    return learnt(imitator, "dpo", loss, torch.no_grad()(measure))


def logits(imitator: Imitator, number: int) -> tuple[Tensor, Tensor]:
    """In front of each token that the assistant says, and these tokens."""
    ids, positions = imitator.said(talk(number))
    found = imitator.model(torch.tensor([ids]), use_cache=False).logits[0]
    return found[torch.tensor(positions) - 1], torch.tensor(ids)[positions]


def distillation(student: Imitator, teacher: Imitator, numbers: list[int]) -> tuple[Tensor, float]:
    """The loss, and the divergence in it: KL(teacher || student) at temperature 1.25."""
    divergences, nlls = [], []
    for number in numbers:
        own, said = logits(student, number)
        with torch.no_grad():
            t = (logits(teacher, number)[0] / 1.25).softmax(-1)
        s = (own / 1.25).softmax(-1)
        divergences.append((t * (t / s).log()).sum(-1))
        nlls.append(-own.log_softmax(-1).gather(1, said[:, None])[:, 0])
    divergence = torch.cat(divergences).mean()
    return 0.75 * divergence + 0.25 * torch.cat(nlls).mean(), divergence.item()


def learnt_from_a_teacher(model: Path, teacher: Path) -> Figures:
    student, frozen = Imitator(model), Imitator(teacher)

    def measure() -> dict[str, float]:
        total, divergence = distillation(student, frozen, HELD_OUT)
        return {"loss": total.item(), "divergence": divergence}

    return learnt(student, "distill", lambda rows: distillation(student, frozen, rows)[0], torch.no_grad()(measure))


ORACLES = {"sft": learnt_conversations, "dpo": learnt_preferences, "distill": learnt_from_a_teacher}


@pytest.fixture(scope="session")
def expected(model: Path, teacher: Path) -> Callable[[str], Figures]:
    """Held-out figures by step: the run of ``config/<name>.yaml``."""
    return functools.cache(lambda name: ORACLES[name](model, teacher))


def assert_learnt(run: Run, expected: Figures) -> None:
    """The run has ended well, and its held-out figures are those."""
    assert run.wait() == 0, run.output
    watch(run.path, Console(file=(terminal := io.StringIO()), width=120), 1.0)
    assert "held-out loss" in terminal.getvalue(), "what roll watch shows"
    preferences = "margin" in expected[0]
    if preferences:
        assert run.metrics[0]["eval/loss"] == pytest.approx(0.693147, abs=1e-5), "the policy is its reference"
    rel, slack, steps = (2e-3, 1e-4, (2, 4)) if preferences else (1e-3, None, (0, 2, 4))
    for step in steps:
        for name, value in expected[step].items():
            assert run.metrics[step][f"eval/{name}"] == pytest.approx(value, rel=rel, abs=slack), (step, name)


ZERO3 = "actor_train.strategy_args.strategy_config=${deepspeed_zero3}"
TENSOR_PARALLEL = "actor_train.strategy_args.strategy_config.tensor_model_parallel_size=2"
MEGATRON_SCORES = "{strategy_args: {strategy_name: megatron_infer}, device_mapping: [0], model_args: {dtype: fp32}}"
LAYOUTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("sft", "deepspeed"): ("train=deepspeed",),
    ("sft", "megatron"): ("train=megatron",),
    ("sft", "fsdp2, two ranks, packed"): ("train=fsdp2", *TWO_RANKS, *packed(48)),
    ("sft", "deepspeed, two ranks, ZeRO-3"): ("train=deepspeed", ZERO3, *TWO_RANKS),
    ("sft", "megatron, two tensor-parallel ranks, packed"): (
        "train=megatron",
        TENSOR_PARALLEL,
        "actor_train.device_mapping=[0,1]",
        *packed(48),
    ),
    ("dpo", "role"): BY_STEP,
    ("dpo", "megatron, role"): ("precompute_reference=false", "train=megatron", f"reference={MEGATRON_SCORES}"),
    ("dpo", "two ranks, packed"): (*TWO_RANKS, *packed(90)),
    ("dpo", "deepspeed"): ("train=deepspeed",),
    ("distill", "a teacher that vllm serves"): (
        "teacher.strategy_args={strategy_name: vllm}",
        "teacher.device_mapping=[1]",
        "logits_topk=5000",
    ),
    ("distill", "deepspeed"): ("train=deepspeed",),
    ("distill", "megatron, its teacher too"): (
        "train=megatron",
        "teacher.strategy_args={strategy_name: megatron_infer}",
        "teacher.device_mapping=[1]",
    ),
    ("distill", "two ranks, packed"): (
        *TWO_RANKS,
        *packed(48),
        "teacher.strategy_args={strategy_name: fsdp2_infer}",
    ),
    ("distill", "megatron, top tokens"): (
        "train=megatron",
        "logits_topk=5000",
        "teacher.strategy_args={strategy_name: megatron_infer, strategy_config: {tensor_model_parallel_size: 2}}",
        "teacher.device_mapping=[0,1]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_every_engine_and_layout_learns_as_float64_does(pipeline, expected, name, layout):
    if "vllm" in layout:
        pytest.importorskip("vllm")
    without_answers = ["actor_infer=null"] * (name != "distill")
    run = pipeline(name)(*LAYOUTS[name, layout], *without_answers, "save_steps=4")
    assert_learnt(run, expected(name))
    assert (run.checkpoint(4) / "actor_train" / "model.safetensors").is_file()


@pytest.mark.slow  # a run and its replay
@pytest.mark.parametrize(
    ("name", "step", "role"),
    [("sft", 4, "actor"), ("dpo", 3, "actor"), ("distill", 3, "actor"), ("rm", 3, "reward_model")],
)
def test_a_step_is_taken_again_from_the_data_to_the_bit_and_a_change_shows(pipeline, replay, name, step, role):
    run = pipeline(name)("save_steps=2").ended()
    said, again = replay(run, step)
    assert {f"{name}/loss", f"{role}/grad_norm"} <= again.keys() and "checkpoint-2" in said
    said, other = replay(run, 1, "actor_train.training_args.weight_decay=0.5")
    assert "replayed from the beginning" in said and "weight_decay" in said
    assert other[f"{name}/loss"] == run.metrics[1][f"{name}/loss"]


SHOWN = {"sft": ("shown", "Loss by training step"), "distill": ("Divergence from teacher, nats per token",)}
"""What the page of a run says."""


@pytest.mark.slow  # as test_pipeline_faults.py, without environments
@pytest.mark.parametrize("name", ORACLES)
def test_a_stopped_run_ends_where_an_undisturbed_one_does_and_has_learnt(pipeline, expected, name):
    whole, second = stop_and_resume(pipeline(name), last_step=4, thoroughly=name != "sft")
    assert_learnt(whole, expected(name))
    before, after = whole.summary["eval"]["before"], whole.summary["eval"]["after"]
    measure = "divergence" if name == "distill" else "loss"
    assert after[measure] < before[measure]
    page = (whole.path / "renders" / "index.html").read_text()
    assert all(words in page for words in SHOWN.get(name, ()))
    if name == "sft":
        assert before["perplexity"] == pytest.approx(math.exp(before["loss"]))
        assert whole.metrics[2]["sft/epoch"] == 1.0 and "eval/loss" in whole.metrics[2]
        assert "eval/success" not in whole.metrics[2], "no verifier has judged"
    if name == "dpo":
        assert "using" in (second.path / "logs" / "roll.log").read_text(), "the reference's scores are read again"
        assert after["margin"] > 0


# ---- conversations


@pytest.mark.slow
def test_an_adapter_learns_alike_in_two_engines(pipeline, expected):
    sft, faster = pipeline("sft"), "actor_train.training_args.learning_rate=0.01"
    lora = (*LORA, "actor_train.model_args.lora_rank=4", faster, "actor_infer=null", "save_steps=4")
    runs = [sft(f"train={engine}", *lora, output=engine) for engine in ("fsdp2", "megatron")]
    for run in runs:
        run.ended()
        assert run.metrics[0]["eval/loss"] == pytest.approx(expected("sft")[0]["loss"], rel=1e-5), (
            "it starts as nothing"
        )
        assert run.metrics[4]["eval/loss"] < run.metrics[0]["eval/loss"]
        assert (run.checkpoint(4) / "actor_train" / "adapter_model.safetensors").is_file(), run.path
    losses = [[run.metrics[step]["eval/loss"] for step in (2, 4)] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_without_a_generator_it_trains_and_wrong_rows_are_told_before_ray_starts(pipeline, tmp_path):
    sft = pipeline("sft")
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    lines[1] = lines[1][:-1]
    lines[2] = lines[2].replace("assistant", "asistant")
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    wrong = sft("actor_train.data_args.file_name=bad.jsonl", output="wrong")
    run = sft("actor_infer=null", "num_train_epochs=2", "train_on=last", "loss_agg_mode=seq-mean-token-mean")
    wrong.ended(2)
    assert "bad.jsonl:2: invalid JSON" in wrong.output and "bad.jsonl:3: messages[1].role" in wrong.output
    assert not wrong.path.exists(), "something was started"
    run.ended()
    assert list(run.metrics) == list(range(5)), "10 conversations, 4 at least in a step: 2 steps an epoch"
    assert "actor_infer" not in run.output and run.summary["eval"]["after"]["loss"] > 0


# ---- preferences


@pytest.mark.slow
def test_answers_without_pairs_are_taken_up_again_bit_for_bit(pipeline, tmp_path):
    start = functools.partial(pipeline("dpo"), *without_pairs(tmp_path), *BY_STEP)
    whole, _ = stop_and_resume(start, last_step=4)
    assert whole.metrics[4]["eval/loss"] < whole.metrics[0]["eval/loss"]


@pytest.mark.slow
def test_an_adapter_and_answers_without_pairs(pipeline, tmp_path):
    dpo, faster = pipeline("dpo"), "actor_train.training_args.learning_rate=0.01"
    adapter = dpo(BY_STEP[0], *LORA, "actor_infer=null", faster, output="adapter")
    kto = dpo(*without_pairs(tmp_path), output="kto")
    adapter.ended()
    assert adapter.metrics[0]["eval/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert adapter.metrics[4]["eval/loss"] < 0.68
    kto.ended()
    assert kto.metrics[0]["eval/loss"] == pytest.approx(0.5, abs=1e-6) and kto.metrics[0]["eval/anchor"] == 0
    assert kto.metrics[4]["eval/loss"] < kto.metrics[0]["eval/loss"]


# ---- a teacher


@pytest.mark.slow
def test_what_a_teacher_wrote_takes_its_place(pipeline, expected, model, tmp_path):
    # More than the tiny model has tokens: nothing is in the tail, and the loss is that of whole distributions.
    start = functools.partial(pipeline("distill"), "teacher_logprobs=kept", "logits_topk=5000")
    no_teacher = ("teacher=null", "teacher_pretrain=null")
    missing = start(*no_teacher, output="missing").ended(2)
    assert "teacher_logprobs: got no" in missing.output, "told before Ray starts"
    assert not missing.path.exists()
    written = start("precompute_only=true", output="written").ended()
    assert len(list((tmp_path / "kept").glob("teacher-*.safetensors"))) == 2 and not written.checkpoint(4).exists()
    read = start(*no_teacher, output="read")
    other = start(f"teacher_pretrain={model}", output="other")
    assert_learnt(read, expected("distill"))
    assert "delete it or name another folder" in other.ended(1).said
    again = start(*no_teacher, "eval_only=true", f"pretrain={read.checkpoint(4)}/actor_train").ended()
    assert again.metrics[0]["eval/divergence"] == pytest.approx(read.metrics[4]["eval/divergence"], rel=1e-5)


# ---- reward models: what they save is what a verifier loads


def scores(folder: Path, answers: list[str]) -> list[float]:
    """The verifier's."""
    return scores_of(folder, [Sample("12?", answer, ground_truth=None, data_source="") for answer in answers])


def scores_of(folder: Path, samples: list[Sample]) -> list[float]:
    """The same of any samples, one event loop for all."""

    async def judge() -> list[float]:
        verifier = RewardModelVerifier(RewardModelConfig(model_path=str(folder)))
        verdicts = [await verifier.score(sample) for sample in samples]
        await verifier.close()
        return [verdict.score for verdict in verdicts]

    return asyncio.run(judge())


@pytest.mark.slow
def test_a_stopped_reward_model_ends_where_an_undisturbed_one_does_and_is_a_verifier(pipeline):
    whole, _ = stop_and_resume(pipeline("rm"), last_step=6)
    metrics = whole.metrics
    assert metrics[0]["eval/loss"] == pytest.approx(0.693147, abs=1e-6), "an untrained head says nothing"
    assert metrics[6]["eval/accuracy"] == 1 and metrics[6]["eval/loss"] < 0.5
    assert 0 <= metrics[6]["eval/calibration_error"] <= 0.5

    right, wrong = scores(whole.checkpoint(6) / "actor_train", [RIGHT, WRONG])
    mean = {side: metrics[6][f"eval/{side}_score"] for side in ("chosen", "rejected")}
    assert right > wrong
    assert right == pytest.approx(mean["chosen"], abs=0.3) and wrong == pytest.approx(mean["rejected"], abs=0.3)
    assert not (whole.checkpoint(6) / "actor_train" / "value_head.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("train", ["fsdp2", "megatron"])
def test_an_adapter_resumes_bit_for_bit_and_is_a_verifier(pipeline, tmp_path, train):
    keys = (f"train={train}", *LORA, "actor_train.training_args.learning_rate=0.03")
    whole, _ = stop_and_resume(functools.partial(pipeline("rm"), *keys), last_step=6)
    assert whole.metrics[6]["eval/loss"] < 0.5 < whole.metrics[0]["eval/loss"]
    folder = whole.checkpoint(6) / "actor_train"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in folder.iterdir()}
    assert not (folder / "config.json").exists() and not (folder / "value_head.safetensors").exists()
    answers = [RIGHT, WRONG, "Up", "x"]
    found = scores(folder, answers)
    assert found[0] > found[1]
    assert main(["export", str(folder), "-o", str(tmp_path / "whole"), "--merge-adapter"]) == 0
    assert scores(tmp_path / "whole", answers) == pytest.approx(found, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [("train=deepspeed", ZERO3), ("train=megatron",), (*TWO_RANKS, *packed(90))],
    ids=["deepspeed", "megatron", "two ranks, packed"],
)
def test_every_engine_saves_the_same_classifier(pipeline, layout):
    rm = pipeline("rm")
    runs = [rm(), rm(*layout, output="other")]
    found = [scores(run.ended().checkpoint(6) / "actor_train", [RIGHT, WRONG, "Up", "x"]) for run in runs]
    assert found[1] == pytest.approx(found[0], rel=1e-2, abs=2e-3)


@pytest.mark.slow
def test_scores_and_steps_are_learnt_too(pipeline):
    rm = pipeline("rm")
    regression, process = (rm(f"reward_loss={loss}", "max_steps=8", output=loss) for loss in ("regression", "process"))
    for run in (regression, process):
        run.ended()
        assert run.metrics[8]["eval/loss"] < 0.8 * run.metrics[0]["eval/loss"]
    assert regression.metrics[8]["eval/correlation"] > 0.9
    assert 0 <= process.metrics[8]["eval/calibration_error"] < 0.5
    right, wrong = scores(regression.checkpoint(8) / "actor_train", [RIGHT, WRONG])
    assert right > wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "train"),
    [
        ("qwen2_5_vl", ()),
        ("qwen3_vl", ("train=deepspeed",)),
        ("qwen3_vl", (*LORA, "actor_train.training_args.learning_rate=0.03")),
    ],
    ids=["fsdp2", "deepspeed", "adapter"],
)
def test_a_reward_model_sees_what_it_was_trained_to_see(offline, tmp_path, family, train):
    """Which answer is right, the picture alone says; what is saved scores as the run does, and goes on."""
    pixels = np.random.default_rng(0).integers(0, 256, (14, 56, 84, 3), np.uint8)
    pixels[::2] //= 4  # dark ones
    for number, each in enumerate(pixels):
        Image.fromarray(each).save(tmp_path / f"{number}.png")
    sides = [(RIGHT, WRONG), (WRONG, RIGHT)]

    def shown(number: int) -> str:
        chosen, rejected = sides[number % 2]
        row = {"ask": "<image>?", "images": [f"{number}.png"], "chosen": chosen, "rejected": rejected}
        return json.dumps(row) + "\n"

    model = make_picture_model(tmp_path / "model", family)
    rm = offline("rm", shown, *train, "sequence_length=128", "prompt_length=64")
    run = rm(f"pretrain={model}").ended()
    folder = run.checkpoint(6) / "actor_train"
    assert run.metrics[0]["eval/loss"] == pytest.approx(0.693147, abs=1e-6)
    assert run.metrics[6]["eval/loss"] < 0.6
    asked: dict[str, Any] = {"messages": ({"role": "user", "content": "<image>?"},)}
    found = {
        side: [
            Sample("<image>?", sides[number % 2][index], None, "", pictures=(Item(pixels[number]),), **asked)
            for number in HELD_OUT
        ]
        for index, side in enumerate(("chosen", "rejected"))
    }
    for side, samples in found.items():
        assert np.mean(scores_of(folder, samples)) == pytest.approx(run.metrics[6][f"eval/{side}_score"], abs=1e-4)
    merging = ["--merge-adapter"] * (folder / "adapter_config.json").is_file()
    assert main(["export", str(folder), "-o", str(tmp_path / "exported"), *merging]) == 0
    both = [scores_of(path, found["chosen"]) for path in (tmp_path / "exported", folder)]
    assert both[0] == pytest.approx(both[1], abs=1e-6)
    assert "classifier_class(AutoConfig" in (tmp_path / "exported" / "README.md").read_text()
    again = rm(f"pretrain={tmp_path / 'exported'}", "max_steps=1", output="again").ended()
    assert again.metrics[0]["eval/loss"] == pytest.approx(run.metrics[6]["eval/loss"], abs=1e-4)
