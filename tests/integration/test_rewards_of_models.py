"""Runs in which other models judge: rewards of models on their own devices or divided, users, and teachers."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.data.batch import Batch
from roll.pipeline.rollouts import read_rollouts
from roll.rollout.rows import groups_to_batch
from tests.integration.conftest import Run, rows
from tests.support.foreign import save_foreign_model
from tests.support.imitation import Imitator
from tests.support.judged_env import question, score
from tests.support.judges import WORDS, digit_model, greedy_words
from tests.support.lines import read_lines, write_lines
from tests.unit.rewards.test_sharded_reward_model import make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_rewards_are_what_the_judge_says_and_its_failures_are_none(launch, tmp_path):
    judge, episodes, die = digit_model(tmp_path / "judge"), tmp_path / "episodes", tmp_path / "die"
    die.touch()
    env = "{env_type: tests.support.judged_env:JudgedEnv, max_steps: 2, agent_system_template: '', env_config: %s}"
    run = launch(
        f"judge={{model: {judge}, max_tokens: {WORDS}, device_mapping: [0], system_envs: {{DIE_ONCE: {die}}}}}",
        "judge.worker_cls=tests.support.judged_env:DyingJudge",
        f"custom_envs.Judged={env % '{}'}",
        f"custom_envs.TooLong={env % '{padding: 300, catches: true}'}",
        "train_env_manager.tags=[Judged,TooLong]",
        "train_env_manager.worker_cls=null",
        "max_steps=1",
        f"rollout_dump_dir={episodes}",
    ).ended()
    played = read_lines(episodes / "step-00001" / "episodes.jsonl")
    turns = [turn for episode in played for turn in episode["turns"]]
    assert {episode["tag"] for episode in played} == {"Judged"} and len(turns) == 8
    for turn in turns:
        words = greedy_words(judge, [{"role": "user", "content": question(turn["text"])}])
        assert turn["task_reward"] == pytest.approx(score(words))
    assert run.metrics[1]["rollout/dropped"] == 4 and run.metrics[1]["rollout/env_errors"] == 8
    assert "environment step asked the judge: judge: " in run.output
    assert not die.exists() and "reward_judge rank 0 died" in run.output
    run.assert_nothing_left()


def test_a_conversation_is_a_row_that_turns_and_answer_are_paid_in(rlvr, tmp_path):
    run = rlvr(
        "user={path: tests.support.users:Counting, max_turns: 2}",
        "sequence_length=120",
        "max_steps=1",
        "rewards.letters.verifiers.0.weight=0",
        f"rollout_dump_dir={tmp_path / 'episodes'}",
    ).ended()
    played = read_lines(tmp_path / "episodes" / "step-00001" / "episodes.jsonl")
    assert len(played) == 16
    for episode in played:
        first, second, last = episode["turns"]
        assert second["observation"] == f"{len(first['text'])} of letters"
        assert last["observation"] == f"{len(second['text'])} of letters"
        paid = [len(first["text"]) / 100, len(second["text"]) / 100, 0.0]
        assert [turn["task_reward"] for turn in episode["turns"]] == pytest.approx(paid)
        assert second["prompt_tokens"] > first["prompt_tokens"] + first["completion_tokens"]
    assert run.metrics[1]["rollout/dropped"] == 0 and "append-only" in run.output
    run.assert_nothing_left()


def ranks(run: Run) -> list[int]:
    """Process ids of the parts of its reward model."""
    own = ((pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in run.processes())
    return [pid for pid, command in own if b"roll.rewards.reward_model" in command.split(b"\0")]


def test_a_run_scores_as_with_the_whole_model_and_outlives_a_part_of_it(rlvr, tmp_path):
    folder = make("Qwen2Config", tmp_path)

    def launched(devices: str, size: int, *orders: str) -> Run:
        verifier = f"{{name: reward_model, args: {{model_path: {folder}, tensor_parallel_size: {size}}}}}"
        return rlvr(
            f"rewards.letters.verifiers=[{verifier}]",
            f"rewards.letters.device_mapping={devices}",
            "rewards.letters.worker_cls=null",
            "rewards.letters.retries=1",
            output=f"of-{size}",
            orders=orders,
        )

    whole = launched("[0]", 1).ended()
    divided = launched("[0,1]", 2, "hold-train-group-6")
    divided.pid_at("train-group-6")
    first = ranks(divided)
    assert len(first) == 2
    os.kill(first[1], signal.SIGKILL)
    divided.release("hold-train-group-6")
    one, two = whole.metrics, divided.ended().metrics
    for step in (1, 2):
        assert two[step]["reward/letters/score"] == pytest.approx(one[step]["reward/letters/score"], abs=1e-4)
        assert two[step]["reward/letters/errors"] == 0
    assert sum(two[step]["reward/letters/retries"] for step in (1, 2)) > 0
    divided.assert_nothing_left()


# ---- a teacher judges the policy's own samples

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
