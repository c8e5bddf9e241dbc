"""Whole distillations as a user starts them: from a teacher's role, from disk, and on the policy's own samples."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from roll.pipeline.rollouts import read_rollouts
from roll.rollout.rows import groups_to_batch
from tests.integration.conftest import (
    TWO_RANKS,
    Offline,
    Run,
    assert_as_expected,
    assert_taken_again,
    packed,
    rows,
    write,
)
from tests.support.foreign import save_foreign_model
from tests.support.imitation import Imitator, learnt, row, talk
from tests.support.resuming import stop_and_resume

Distill = Callable[..., Run]


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another untrained model."""
    from roll.models.tiny import make_tiny_model

    path = tmp_path_factory.mktemp("teacher") / "tiny"
    make_tiny_model(path, seed=2, num_heads=2)
    return path


def logits(imitator: Imitator, number: int) -> tuple[Tensor, Tensor]:
    """In front of each token that the assistant says, and these tokens."""
    ids, positions = imitator.said(talk(number))
    found = imitator.model(torch.tensor([ids]), use_cache=False).logits[0]
    return found[torch.tensor(positions) - 1], torch.tensor(ids)[positions]


def loss(student: Imitator, teacher: Imitator, numbers: list[int]) -> tuple[Tensor, float]:
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


@pytest.fixture(scope="session")
def expected(model: Path, teacher: Path) -> dict[int, dict[str, float]]:
    """Held-out figures by step: the run of ``config/distill.yaml`` in float64, without the library."""
    student, frozen, held_out = Imitator(model), Imitator(teacher), list(range(10, 14))

    def measure() -> dict[str, float]:
        with torch.no_grad():
            total, divergence = loss(student, frozen, held_out)
        return {"loss": total.item(), "divergence": divergence}

    return learnt(student, "distill", lambda rows: loss(student, frozen, rows)[0], measure)


@pytest.fixture
def distill(offline: Offline, teacher: Path) -> Distill:
    return offline("distill", row, f"teacher_pretrain={teacher}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stopped_run_ends_where_an_undisturbed_one_does(distill, expected):
    whole, _ = stop_and_resume(distill, last_step=4)
    assert_as_expected(whole, expected)
    assert whole.metrics[4]["eval/divergence"] < whole.metrics[0]["eval/divergence"]
    assert "Divergence from teacher, nats per token" in (whole.path / "renders" / "index.html").read_text()


ON_DISK = ("teacher_logprobs=kept", "logits_topk=5000")
"""More than the tiny model has tokens: nothing is in the tail, and the loss is that of whole distributions."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_teacher_wrote_takes_its_place(distill, expected, model, tmp_path):
    missing = distill(*ON_DISK, "teacher=null", "teacher_pretrain=null", output="missing")
    assert missing.wait() == 2 and "teacher_logprobs: got no" in missing.output, "told before Ray starts"
    assert not missing.path.exists()
    written = distill(*ON_DISK, "precompute_only=true", output="written").ended()
    assert len(list((tmp_path / "kept").glob("teacher-*.safetensors"))) == 2 and not written.checkpoint(4).exists()
    read = distill(*ON_DISK, "teacher=null", "teacher_pretrain=null", output="read")
    other = distill(*ON_DISK, f"teacher_pretrain={model}", output="other")
    assert_as_expected(read, expected)
    assert other.wait() == 1 and "delete it or name another folder" in " ".join(other.output.split()), other.output
    again = distill(
        *ON_DISK,
        "teacher=null",
        "teacher_pretrain=null",
        "eval_only=true",
        f"pretrain={read.checkpoint(4)}/actor_train",
    ).ended()
    assert again.metrics[0]["eval/divergence"] == pytest.approx(read.metrics[4]["eval/divergence"], rel=1e-5)


VLLM = ("teacher.strategy_args={strategy_name: vllm}", "teacher.device_mapping=[1]")
LAYOUTS = {
    "a teacher that vllm serves": (*VLLM, "logits_topk=5000"),
    "deepspeed": ("train=deepspeed",),
    "megatron, its teacher too": (
        "train=megatron",
        "teacher.strategy_args={strategy_name: megatron_infer}",
        "teacher.device_mapping=[1]",
    ),
    "two ranks, packed": (*TWO_RANKS, *packed(48), "teacher.strategy_args={strategy_name: fsdp2_infer}"),
    "megatron, top tokens": (
        "train=megatron",
        "logits_topk=5000",
        "teacher.strategy_args={strategy_name: megatron_infer, strategy_config: {tensor_model_parallel_size: 2}}",
        "teacher.device_mapping=[0,1]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_engine_learns_as_float64_does(distill, expected, layout):
    if "vllm" in layout:
        pytest.importorskip("vllm")
    assert_as_expected(distill(*LAYOUTS[layout], "save_steps=4"), expected)


TEACHER = (
    "teacher={strategy_args: {strategy_name: hf_infer}, device_mapping: [0]}",
    "max_steps=3",
    "num_return_sequences_in_group=2",
    "actor_train.training_args.per_device_train_batch_size=8",
    "save_steps=3",
)
FORMS = {
    "advantage": ("is_pure_opd=true", "opd_form=advantage"),
    "reward": ("opd_form=reward", "opd_kl_coef=0.5", "adv_estimator=reinforce"),
    "loss": ("is_pure_opd=true", "opd_form=loss", "kd_objective=reverse_kl", "logits_topk=50"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", FORMS)
def test_on_the_policys_own_samples(rlvr, model, teacher, form):
    itself = rlvr(*TEACHER, *FORMS[form], f"teacher_pretrain={model}", output="itself")
    run = rlvr(*TEACHER, *FORMS[form], f"teacher_pretrain={teacher}", output="other")
    assert itself.wait() == 0, itself.output
    assert itself.metrics[1]["teacher/reverse_kl"] == pytest.approx(0, abs=1e-5), "it is what it learns from"
    assert run.wait() == 0, run.output
    metrics = run.metrics
    assert metrics[1]["teacher/reverse_kl"] > 0.1
    if form == "loss":
        assert metrics[3]["actor/distill_loss"] < metrics[1]["actor/distill_loss"]
        assert itself.metrics[1]["actor/distill_loss"] == pytest.approx(0, abs=1e-5)
    if form == "advantage":
        assert metrics[1]["actor/advantage_mean"] == pytest.approx(-metrics[1]["teacher/reverse_kl"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("top", [(), ("logits_topk=10000",)], ids=["hidden states", "top tokens"])
def test_a_divergence_at_a_temperature_of_its_own(rlvr, model, teacher, tmp_path, top):
    form = (*FORMS["loss"][:3], "kd_temperature=2", "actor_infer.generating_args.temperature=0.8")
    words = (*TEACHER[:1], *TEACHER[2:4], *form, *top, "max_steps=1", "rollout_dump_dir=dumped")
    run = rlvr(*words, f"teacher_pretrain={teacher}").ended()
    batch = groups_to_batch(read_rollouts(tmp_path / "dumped", 1).groups, ["letters"])
    found: list[Tensor] = []
    for index in range(batch.num_sequences):
        one = batch.select([index])
        ids, mask = one.tokens_T[None], one.loss_mask_T[1:]
        with torch.no_grad():
            s, t = (
                (Imitator(path).model(ids, use_cache=False).logits[0, :-1][mask] / 2).softmax(-1)
                for path in (model, teacher)
            )
        found.append((s * (s / t).log()).sum(-1))
    assert run.metrics[1]["actor/distill_loss"] == pytest.approx(float(torch.cat(found).mean()), rel=1e-4)
    assert "teacher/reverse_kl" not in run.metrics[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_teachers_judge_rows_of_their_own_tags(rlvr, model, teacher, tmp_path):
    section = "strategy_args: {strategy_name: hf_infer}, device_mapping: [0]"
    owners = {"letters": ("itself", model), "digits": ("other", teacher)}
    several = ", ".join(
        f"{name}: {{pretrain: '{path}', tag_included: [{tag}], {section}}}" for tag, (name, path) in owners.items()
    )
    verifiers = "[{name: tests.support.scoring:Letters}]"
    write(tmp_path / "train.jsonl", rows("t", [""] * 4) + rows("u", [""] * 4, "digits"))
    run = rlvr(
        "rollout_batch_size=8",
        f"rewards.digits={{tag_included: [digits], verifiers: {verifiers}}}",
        "is_pure_opd=true",
        f"teachers={{{several}}}",
        "rollout_dump_dir=dumped",
        "max_steps=1",
        "val_before_train=false",
        "val_after_train=false",
    ).ended()
    batch = groups_to_batch(read_rollouts(tmp_path / "dumped", 1).groups, list(owners))
    for number, (name, path) in enumerate(owners.values()):
        scorer = Imitator(path).model
        found: list[Tensor] = []
        for index in (batch.tag_B == number).nonzero()[:, 0].tolist():
            one = batch.select([index])
            with torch.no_grad():
                logprobs = scorer(one.tokens_T[None], use_cache=False).logits[0].log_softmax(-1)
            found.append(logprobs[:-1].gather(1, one.tokens_T[1:, None])[:, 0][one.loss_mask_T[1:]])
        assert found, "both tags were played"
        assert run.metrics[1][f"teacher/{name}/logprob"] == pytest.approx(float(torch.cat(found).mean()), rel=1e-5)
    assert run.metrics[1]["teacher/itself/reverse_kl"] == pytest.approx(0, abs=1e-5)
    assert run.metrics[1]["teacher/other/reverse_kl"] > 0.1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_policy_teaches_itself_with_the_solution(rlvr, model, tmp_path):
    worked = [each | {"worked": "Up" * (1 + number % 3)} for number, each in enumerate(rows("t", [""] * 8))]
    write(tmp_path / "train.jsonl", worked)
    itself = (*TEACHER[:2], "max_steps=1", "is_pure_opd=true", f"teacher_pretrain={model}", "rollout_dump_dir=dumped")
    missing = rlvr(*itself, "teacher_prompt={prompt} {solved}", output="missing")
    assert missing.wait() == 2 and "teacher_prompt: no column 'solved'" in " ".join(missing.output.split())
    run = rlvr(*itself, "teacher_prompt='{prompt} {worked}'", "sequence_length=60", output="itself").ended()
    groups = read_rollouts(tmp_path / "dumped", 1).groups
    batch, scorer = groups_to_batch(groups, ["letters"]), Imitator(model)
    found: list[Tensor] = []
    columns = (column.split(batch.lengths_B.tolist()) for column in (batch.tokens_T, batch.loss_mask_T))
    for ids, mask in zip(*columns, strict=True):
        text = scorer.tokenizer.decode(ids[~mask])
        (own,) = [each for each in worked if f"<|im_start|>user\n{each['prompt']}<|im_end|>" in text]
        prompt = text.replace(own["prompt"], f"{own['prompt']} {own['worked']}")
        whole = torch.tensor([*scorer.tokenizer.encode(prompt, add_special_tokens=False), *ids[mask].tolist()])
        with torch.no_grad():
            logprobs = scorer.model(whole[None], use_cache=False).logits[0].log_softmax(-1)
        said = int(mask.sum())
        found.append(logprobs[-said - 1 : -1].gather(1, ids[mask][:, None])[:, 0])
    sampled = batch.rollout_logprobs_T[batch.loss_mask_T].double()
    assert run.metrics[1]["teacher/logprob"] == pytest.approx(float(torch.cat(found).mean()), rel=1e-5)
    gap = float((sampled - torch.cat(found)).mean())
    assert run.metrics[1]["teacher/reverse_kl"] == pytest.approx(gap, rel=1e-4) and abs(gap) > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_teacher_with_another_tokenizer(rlvr, model, tmp_path):
    pytest.importorskip("vllm")
    save_foreign_model(tmp_path / "foreign", seed=3)
    aligned = (*TEACHER, *FORMS["advantage"], "align_tokenizers=text")
    served = (*VLLM, f"teacher_pretrain={tmp_path / 'foreign'}")
    refused = rlvr(*TEACHER, *FORMS["advantage"], *served, output="refused")
    assert refused.wait() == 2 and "align_tokenizers: text" in " ".join(refused.output.split()), refused.output
    itself = rlvr(*aligned, f"teacher_pretrain={model}", output="itself").ended()
    assert itself.metrics[1]["teacher/reverse_kl"] == pytest.approx(0, abs=1e-5), "it reads what was sampled"
    assert "teacher/aligned" not in itself.metrics[1]
    run = rlvr(*aligned, *served, output="other").ended()
    assert run.metrics[1]["teacher/aligned"] > 0.3 and run.metrics[1]["teacher/reverse_kl"] > 0.1
    assert run.metrics[1]["actor/advantage_mean"] == pytest.approx(-run.metrics[1]["teacher/reverse_kl"], rel=1e-5)


@pytest.mark.slow  # a run and its replay
def test_a_step_is_taken_again_from_the_data_to_the_bit(distill, replay):
    assert_taken_again(replay, distill("save_steps=2").ended(), 3, "distill")
