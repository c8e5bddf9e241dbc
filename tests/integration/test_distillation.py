"""Whole runs in which a teacher judges the policy's own samples."""

from typing import Any

import pytest
import torch
from torch import Tensor

from roll.data.batch import Batch
from roll.pipeline.rollouts import read_rollouts
from roll.rollout.rows import groups_to_batch
from tests.integration.conftest import rows
from tests.support.foreign import save_foreign_model
from tests.support.imitation import Imitator
from tests.support.lines import write_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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


@torch.no_grad()
def sampled(model: Any, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
    """Logits in front of each token that was sampled in a row, and these tokens."""
    one = batch.select([row])
    mask = one.loss_mask_T[1:]
    return model(one.tokens_T[None], use_cache=False).logits[0, :-1][mask], one.tokens_T[1:][mask]


def logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]


@pytest.mark.parametrize("form", FORMS)
def test_on_the_policys_own_samples(rlvr, model, teacher, form):
    itself = rlvr(*TEACHER, *FORMS[form], f"teacher_pretrain={model}", output="itself")
    run = rlvr(*TEACHER, *FORMS[form], f"teacher_pretrain={teacher}", output="other")
    itself.ended()
    assert itself.metrics[1]["teacher/reverse_kl"] == pytest.approx(0, abs=1e-5), "it is what it learns from"
    metrics = run.ended().metrics
    assert metrics[1]["teacher/reverse_kl"] > 0.1
    if form == "loss":
        assert metrics[3]["actor/distill_loss"] < metrics[1]["actor/distill_loss"]
        assert itself.metrics[1]["actor/distill_loss"] == pytest.approx(0, abs=1e-5)
    if form == "advantage":
        assert metrics[1]["actor/advantage_mean"] == pytest.approx(-metrics[1]["teacher/reverse_kl"], rel=1e-5)


@pytest.mark.parametrize("top", [(), ("logits_topk=10000",)], ids=["hidden states", "top tokens"])
def test_a_divergence_at_a_temperature_of_its_own(rlvr, model, teacher, tmp_path, top):
    form = (*FORMS["loss"][:3], "kd_temperature=2", "actor_infer.generating_args.temperature=0.8")
    words = (*TEACHER[:1], *TEACHER[2:4], *form, *top, "max_steps=1", "rollout_dump_dir=dumped")
    run = rlvr(*words, f"teacher_pretrain={teacher}").ended()
    batch = groups_to_batch(read_rollouts(tmp_path / "dumped", 1).groups, ["letters"])
    judge, policy = (Imitator(path).model for path in (teacher, model))
    found: list[Tensor] = []
    for row in range(batch.num_sequences):
        s, t = ((sampled(each, batch, row)[0] / 2).softmax(-1) for each in (policy, judge))
        found.append((s * (s / t).log()).sum(-1))
    assert run.metrics[1]["actor/distill_loss"] == pytest.approx(float(torch.cat(found).mean()), rel=1e-4)
    assert "teacher/reverse_kl" not in run.metrics[1]


def test_two_teachers_judge_rows_of_their_own_tags(rlvr, model, teacher, tmp_path):
    section = "strategy_args: {strategy_name: hf_infer}, device_mapping: [0]"
    owners = {"letters": ("itself", model), "digits": ("other", teacher)}
    several = ", ".join(
        f"{name}: {{pretrain: '{path}', tag_included: [{tag}], {section}}}" for tag, (name, path) in owners.items()
    )
    verifiers = "[{name: tests.support.scoring:Letters}]"
    write_lines(tmp_path / "train.jsonl", rows("t", [""] * 4) + rows("u", [""] * 4, "digits"))
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
        found = [logprobs(*sampled(scorer, batch, row)) for row in (batch.tag_B == number).nonzero()[:, 0].tolist()]
        assert found, "both tags were played"
        assert run.metrics[1][f"teacher/{name}/logprob"] == pytest.approx(float(torch.cat(found).mean()), rel=1e-5)
    assert run.metrics[1]["teacher/itself/reverse_kl"] == pytest.approx(0, abs=1e-5)
    assert run.metrics[1]["teacher/other/reverse_kl"] > 0.1


def test_the_policy_teaches_itself_with_the_solution(rlvr, model, tmp_path):
    worked = [each | {"worked": "Up" * (1 + number % 3)} for number, each in enumerate(rows("t", [""] * 8))]
    write_lines(tmp_path / "train.jsonl", worked)
    itself = (*TEACHER[:2], "max_steps=1", "is_pure_opd=true", f"teacher_pretrain={model}", "rollout_dump_dir=dumped")
    missing = rlvr(*itself, "teacher_prompt='{prompt} {solved}'", output="missing").ended(2)
    assert "teacher_prompt: no column 'solved'" in missing.said
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
            logits = scorer.model(whole[None], use_cache=False).logits[0]
        found.append(logprobs(logits[-int(mask.sum()) - 1 : -1], ids[mask]))
    own_T = batch.rollout_logprobs_T[batch.loss_mask_T].double()
    assert run.metrics[1]["teacher/logprob"] == pytest.approx(float(torch.cat(found).mean()), rel=1e-5)
    gap = float((own_T - torch.cat(found)).mean())
    assert run.metrics[1]["teacher/reverse_kl"] == pytest.approx(gap, rel=1e-4) and abs(gap) > 1e-3


def test_a_teacher_with_another_tokenizer(rlvr, model, tmp_path):
    pytest.importorskip("vllm")
    save_foreign_model(tmp_path / "foreign", seed=3)
    aligned = (*TEACHER, *FORMS["advantage"], "align_tokenizers=text")
    vllm = ("teacher.strategy_args={strategy_name: vllm}", "teacher.device_mapping=[1]")
    served = (*vllm, f"teacher_pretrain={tmp_path / 'foreign'}")
    refused = rlvr(*TEACHER, *FORMS["advantage"], *served, output="refused").ended(2)
    assert "align_tokenizers: text" in refused.said, refused.output
    itself = rlvr(*aligned, f"teacher_pretrain={model}", output="itself").ended()
    assert itself.metrics[1]["teacher/reverse_kl"] == pytest.approx(0, abs=1e-5), "it reads what was sampled"
    assert "teacher/aligned" not in itself.metrics[1]
    run = rlvr(*aligned, *served, output="other").ended()
    assert run.metrics[1]["teacher/aligned"] > 0.3 and run.metrics[1]["teacher/reverse_kl"] > 0.1
    assert run.metrics[1]["actor/advantage_mean"] == pytest.approx(-run.metrics[1]["teacher/reverse_kl"], rel=1e-5)
