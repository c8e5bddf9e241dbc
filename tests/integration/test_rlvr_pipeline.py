"""Whole RLVR runs as a user starts them, on an untrained model and verifiers that go wrong on request."""

import functools
import json
import signal
import time
from pathlib import Path

import pytest

from roll.__main__ import main as roll
from roll.models.tiny import make_tiny_model, make_tokenizer
from roll.rewards.types import Sample
from roll.tracking.checkpointer import find_damage
from tests.integration.conftest import RayCluster, Run, assert_same_tensors, position, rows
from tests.support.lines import read_lines, write_lines
from tests.support.resuming import stop_and_resume
from tests.support.scoring import Brief, Letters

FILTER = "rewards.letters.query_filter_config={type: std_filter}"
TIED = ["", "", "equal", ""] * 2 + [""] * 2
"""Of ten rows, two whose answers are paid alike."""


def draws(run: Run) -> list[tuple[int, str]]:
    """Number and prompt of the training groups that were started, in order of the numbers; repeats included."""
    return sorted((line["draw"], line["prompt"]) for line in run.logged("played.jsonl") if line["what"] == "train")


@pytest.mark.slow
def test_a_generator_with_other_weights_stops_the_run_and_the_tensor_is_named(rlvr):
    run = rlvr("max_steps=1", "actor_infer.worker_cls=tests.support.faults:DamagedInferWorker").ended(1)
    assert "tensors: model.layers.1.mlp.down_proj.weight is" in run.said
    assert "of version 0 are up to" in run.said


@pytest.mark.slow
def test_runs_with_other_kernels_part_in_a_phase_that_is_named(rlvr, tmp_path, capsys):
    runs = [
        rlvr(
            "max_steps=2",
            f"system_envs.ATEN_CPU_CAPABILITY={kernels}",
            f"rollout_dump_dir={tmp_path / kernels}",
            output=kernels,
        ).ended()
        for kernels in ("avx2", "default")
    ]
    config = runs[1].path / "config.yaml"  # each run is told of its own folder for orders, which must not count
    config.write_text(config.read_text().replace("/faults-1", "/faults-0"))
    assert roll(["compare", *(str(run.path) for run in runs)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "they part in step 1, phase logprobs: mismatch/logprob_diff" in said
    assert "log-probs: those that the generators reported for the same tokens differ from step 1 on" in said
    assert 'nothing but system_envs.ATEN_CPU_CAPABILITY ("avx2" | "default"). That explains it' in said


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_stopped_run_meets_the_data_and_ends_as_an_undisturbed_one_does(rlvr):
    steps = 5
    overrides = (FILTER, f"max_steps={steps}", "eval_steps=2")
    whole = rlvr(*overrides, train=TIED).ended()

    # Ctrl-C in the rollout of step 2: its prompts come again.
    first = rlvr(*overrides, output="disturbed", orders=("hold-train-group-6",))
    first.pid_at("train-group-6")
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == 130, first.output
    assert first.summary["steps"] == 1
    # SIGTERM in its update, which is finished: its prompts are used up.
    resume = (*overrides, "resume_from_checkpoint=true")
    second = rlvr(*resume, output="disturbed", orders=("hold-actor_train-0-train-1",))
    second.pid_at("actor_train-0-train-1")
    second.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    second.release("hold-actor_train-0-train-1")
    assert second.wait() == 143, second.output
    assert second.summary["steps"] == 2
    assert [position(second, step) for step in (1, 2)] == [position(whole, step) for step in (1, 2)]
    # On the way to the end a worker of each kind that rollouts need is killed.
    orders = ("die-train-mid-14", "die-reward_letters-0-score-2", "die-actor_infer-0-generate-4")
    third = rlvr(*resume, "max_worker_restarts=3", output="disturbed", orders=orders).ended()
    assert not any((third.faults / order).exists() for order in orders), "nobody died"
    third.assert_nothing_left()

    assert third.repeatable_metrics() == whole.repeatable_metrics()
    assert third.summary["eval"] == whole.summary["eval"]
    assert_same_tensors(third.tensors(steps), whole.tensors(steps))
    assert position(third, steps) == position(whole, steps)

    # Every epoch has every prompt once, in an order of its own, and no stop repeats or skips one.
    played = draws(whole)
    met = [prompt for _, prompt in played]
    assert [draw for draw, _ in played] == list(range(position(whole, steps)["next_draw"]))
    epochs = [met[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == [f"t{n}" for n in range(10)] for epoch in epochs[:2]) and epochs[0] != epochs[1]
    one, two = position(whole, 1)["next_draw"], position(whole, 2)["next_draw"]
    assert draws(first)[:one] == played[:one]
    assert draws(second) == played[one:two]
    assert sorted(set(draws(third))) == played[two:]

    # Groups of equal scores were dropped and made up for.
    filtered = [whole.metrics[step]["rollout/filtered"] for step in range(1, steps + 1)]
    assert sum(filtered) == len([prompt for prompt in met if prompt in ("t2", "t6")]) >= 4
    assert all(whole.metrics[step]["kept/episodes"] == 16 for step in range(1, steps + 1))
    assert [whole.metrics[step]["rollout/episodes"] for step in range(1, steps + 1)] == [16 + 4 * n for n in filtered]
    taken = [position(whole, step)["next_draw"] for step in range(1, steps + 1)]
    assert [whole.metrics[step]["rollout/epoch"] for step in range(1, steps + 1)] == [n // 10 for n in taken]


@pytest.mark.parametrize("commands", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_domains_are_trained_and_evaluated_to_the_end_and_a_step_is_replayed(
    rlvr, replay, tmp_path, ray_cluster, capsys, commands
):
    write_lines(tmp_path / "train.jsonl", rows("t", [""] * 8) + rows("u", [""] * 8, "digits"))
    write_lines(tmp_path / "val.jsonl", rows("v", ["", "equal", "x"]) + rows("w", [""] * 3, "digits"))
    verifiers = (
        "[{name: 'tests.support.scoring:Letters', weight: 2.0}, {name: 'tests.support.scoring:Brief', weight: -0.5}]"
    )
    run = rlvr(
        f"rewards.digits={{tag_included: [digits], verifiers: {verifiers}}}",
        "validation.generating_args={num_return_sequences: 4, max_new_tokens: 3}",
        "rollout_batch_size=8",
        "val_batch_size=null",
        f"rollout_dump_dir={tmp_path / 'kept'}",
        *another_reference_and_tokenizer(tmp_path),
    ).ended()
    assert run.metrics[1]["reward/kl"] > 0.01, "before the first update the policy is not its reference"
    assert (run.checkpoint(2) / "actor_train" / "chat_template.jinja").read_text() == BANGS
    assert "each step: 8 prompts × 4 answers = 32 samples" in run.said
    assert "training data: 16 prompts (digits 8, letters 8)" in run.said
    assert "held-out data: 6 prompts (digits 3, letters 3)" in run.said
    nothing_waits = {"settled": 0, "again": [], "ready": [], "fell_short": False}
    assert position(run, 2) == {"next_draw": 16, "trained": 16, **nothing_waits}
    for step in (1, 2):
        metrics = run.metrics[step]
        assert metrics["rollout/episodes"] == 32 and metrics["actor/grad_norm"] > 0
        for domain in ("letters", "digits"):
            assert metrics[f"reward/{domain}/errors"] == metrics[f"reward/{domain}/retries"] == 0
            assert 0 <= metrics[f"reward/{domain}/accuracy"] <= 1
        assert metrics["reward/letters/score"] == metrics["reward/letters/Letters/score"]
        weighted = 2 * metrics["reward/digits/Letters/score"] - 0.5 * metrics["reward/digits/Brief/score"]
        assert metrics["reward/digits/score"] == pytest.approx(weighted)
        assert metrics["reward/digits/Letters/letters"] > 0, "the verifier's own number"
    check_evaluations(run)
    assert {"actor/loss", "actor/grad_norm", "reward/kl"} <= replay(run, 1)[1].keys()
    if commands:
        check_commands(run, ray_cluster, tmp_path, capsys)


def check_commands(run: Run, cluster: RayCluster, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``roll eval`` measures what the run has measured, ``roll score`` gives its episodes the same scores."""
    evaluated = cluster.roll(folder, "eval", str(run.path), "num_renders=0")
    again = Run(run.path.with_name("run_eval_2"), run.faults, run.process)
    expected = {name: value for name, value in run.metrics[2].items() if name.startswith("eval")}
    assert {name: again.metrics[2][name] for name in expected} == expected and list(again.metrics) == [2]
    assert again.summary["eval"]["after"] == run.summary["eval"]["after"]
    assert f"eval/maj@4{expected['eval/maj@4']:.4f}" in "".join(evaluated.split())

    episodes = run.path / "trajectories" / "eval-00002.jsonl"
    scored = folder / "scored.jsonl"
    assert roll(["score", str(episodes), "--config", str(run.path), "-o", str(scored)]) == 0
    found = read_lines(scored)
    assert [line["scores"][0]["score"] for line in found] == pytest.approx([line["score"] for line in found])
    out = "".join(capsys.readouterr().out.split())
    for name in ("pass@1", "pass@2", "best@4", "maj@4"):
        assert f"{name}{expected[f'eval/{name}']:.4f}" in out


BANGS = "{% for message in messages %}{{ message['content'] }}{% endfor %}{{ '!' * bangs }}"


def another_reference_and_tokenizer(folder: Path) -> tuple[str, ...]:
    """Keys for a reference of other weights, and for a tokenizer whose chat template writes three more tokens."""
    make_tiny_model(folder / "other", seed=5)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = BANGS
    tokenizer.save_pretrained(folder / "tokenizer")
    return (
        f"tokenizer_path={folder / 'tokenizer'}",
        "actor_train.data_args.chat_template_kwargs={bangs: 3}",
        f"reference_pretrain={folder / 'other'}",
        "add_token_level_kl=true",
    )


def check_evaluations(run: Run) -> None:
    """Before and after: figures in the summary, and answers with scores that a verifier of our own comes to as well."""
    held_out = {row["id"]: row for row in read_lines(run.path.parents[1] / "val.jsonl")}
    for name, step in (("before", 0), ("after", 2)):
        figures = run.summary["eval"][name]
        names = {"mean@4", "pass@1", "pass@2", "pass@4", "best@4", "maj@4", "accuracy", "accuracy_greedy"}
        assert names <= figures.keys()
        assert (figures["prompts"], figures["episodes"]) == (6, 24)
        assert figures["accuracy"] == figures["mean@4"] == pytest.approx(figures["pass@1"])
        assert figures["pass@1"] <= figures["pass@2"] <= figures["pass@4"]
        assert {f"eval/{tag}/maj@4" for tag in ("letters", "digits")} <= run.metrics[step].keys()
        episodes = read_lines(run.path / "trajectories" / f"eval-{step:05d}.jsonl")
        assert len(episodes) == 24
        assert {episode["info"]["prompt_id"] for episode in episodes} == held_out.keys()
        for episode in episodes:
            (turn,) = episode["turns"]
            row = held_out[episode["info"]["prompt_id"]]
            assert turn["prompt_tokens"] == len(row["prompt"]) + 3
            assert episode["info"]["ground_truth"] == row["solution"] and turn["observation"] == row["prompt"]
            assert turn["completion_tokens"] <= 3
            cut_off = turn["finish_reason"] == "length"
            sample = Sample(row["prompt"], turn["text"], row["solution"], row["tag"], truncated=cut_off)
            verdict = Letters(Letters.config_class()).check(sample)
            score = verdict.score
            if row["tag"] == "digits":
                score = 2 * score - 0.5 * Brief(Brief.config_class()).check(sample).score
            assert episode["score"] == pytest.approx(score)
            assert (episode["success"], turn["action"]) == (verdict.correct, verdict.answer)
        assert figures["accuracy"] == pytest.approx(sum(episode["success"] for episode in episodes) / 24)


@pytest.mark.slow
def test_answers_without_a_reward_are_dropped_and_counted_until_they_are_too_many(rlvr):
    orders = ["", "raise-odd", "raise", "hang"] + ["raise"] * 4
    verifiers = "[{name: 'tests.support.scoring:Unbuildable'}]"
    unbuildable = rlvr(f"rewards.letters.verifiers={verifiers}", train=orders, output="unbuildable")
    run = rlvr(
        "actor_train.data_args.shuffle=false",
        "rewards.letters.timeout=1",
        "rewards.letters.max_error_rate=0.75",
        "rollout_workers.world_size=2",
    ).ended(1)
    errors = run.metrics[1]["reward/letters/errors"]
    assert 8 <= errors <= 12 and run.metrics[1]["rollout/episodes"] == 16 - errors
    assert run.metrics[1]["actor/grad_norm"] > 0
    log = (run.path / "logs" / "roll.log").read_text()
    assert "Letters failed after 1 attempt: took longer than 1 s" in log
    told = (
        "rewards.letters: 16 of 16 answers could not be scored, more than max_error_rate=0.75; the last error: letters "
    )
    for text in (run.said, run.summary["error"]):
        assert told in text and "Letters failed after 1 attempt: ArithmeticError: cannot judge letters" in text
    assert run.summary["steps"] == 1 and find_damage(run.checkpoint(1)) is None
    assert position(run, 1)["next_draw"] == 4, "the next run tries the same prompts again"

    assert unbuildable.wait() == 1, unbuildable.output
    assert "a verifier process could not be set up: OSError: there is no word list" in unbuildable.said
    assert not any("Traceback" in failed.output for failed in (run, unbuildable))


SHORT = [*[""] * 4, *["right"] * 6, "", *["right"] * 2, *["right"] * 4, *[""] * 4]
"""Rows of four steps of 4 groups, with at most 3 times as many: 4 are kept, 1 of 9, none of 4, and 4."""


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["[0]", "[0,1]"])
def test_steps_that_find_too_few_groups_train_on_those_and_are_resumed_to_the_bit(rlvr, devices):
    """Stopped in the update of the short step, killed in that behind the step without a group."""
    keys = (FILTER, "max_filtered_batches=3", "actor_train.data_args.shuffle=false", "max_steps=4")
    more = (f"actor_train.device_mapping={devices}", "actor_train.training_args.per_device_train_batch_size=4")
    whole, _ = stop_and_resume(functools.partial(rlvr, *keys, *more, train=SHORT), last_step=4)
    kept = [whole.metrics[step]["kept/groups"] for step in (1, 2, 3, 4)]
    assert kept == [4, 1, 0, 4] and whole.summary["draws"]["trained"] == 9
    assert [whole.metrics[step]["rollout/filtered"] for step in (1, 2, 3, 4)] == [0, 8, 4, 0]
    tokens = [whole.metrics[step].get("actor/num_tokens") for step in (1, 2, 3, 4)]
    assert tokens[2] is None and "actor/loss" not in whole.metrics[3], "no optimizer step"
    before, after = (whole.tensors(step) for step in (2, 3))
    assert_same_tensors(before, after)
    log = (whole.path / "logs" / "roll.log").read_text()
    assert "step 2 trains on 1 of 4 groups" in log and "step 3 takes no optimizer step" in log
    assert whole.metrics[2]["eval/attained"] < 0.9 <= whole.metrics[2]["rollout/attained"], "it looked learned"
    assert "learned" not in whole.summary and whole.summary["status"] == "completed"
    episodes = read_lines(whole.path / "trajectories" / "train-00002.jsonl")
    assert [episode["trained"] for episode in episodes] == [True] * 4 + [False] * 4


@pytest.mark.slow
def test_a_run_that_has_learned_ends_well_before_its_last_step(rlvr, tmp_path):
    write_lines(tmp_path / "val.jsonl", rows("v", ["right"] * 4))
    keys = (FILTER, "actor_train.data_args.shuffle=false", "max_steps=9", "save_steps=9", "val_before_train=false")
    run = rlvr(*keys, train=[""] * 4 + ["right"] * 16).ended()
    assert run.summary["status"] == "completed" and run.summary["steps"] == 2 and list(run.metrics) == [0, 1, 2]
    assert (
        run.summary["learned"].startswith("learned: 100.0% attained in all that step 2 sampled")
        and run.summary["eval"]["after"]
    )
    assert find_damage(run.checkpoint(2)) is None and "Ended as learned: 100.0% attained" in run.said
    assert run.metrics[2]["rollout/episodes"] == 32, "twice the batch"
    again = rlvr(*keys, "resume_from_checkpoint=true")
    assert again.wait() == 0 and "is finished" in again.said


def test_wrong_data_and_unknown_verifiers_are_told_before_ray_starts(rlvr, tmp_path):
    bad = [json.dumps(row) for row in rows("t", [""] * 4)]
    bad[1] = bad[1][:-1]
    bad[2] = bad[2].replace('"prompt"', '"question"')
    bad[3] = bad[3].replace('"letters"', '"chess"')
    (tmp_path / "bad.jsonl").write_text("\n".join(bad) + "\n")
    data = rlvr("actor_train.data_args.file_name=[bad.jsonl,trian.jsonl]", output="data")
    plugin = rlvr("rewards.letters.verifiers=[{name: multiple_choise}]", output="plugin")
    assert (data.wait(), plugin.wait()) == (2, 2), data.output + plugin.output
    told = [line.strip() for line in data.output.splitlines()]
    assert told[0] == "4 problems in the dataset"
    starts = ("trian.jsonl: no such file", "bad.jsonl:2: invalid JSON", "bad.jsonl:3: ", "bad.jsonl:4: ")
    for start in starts:
        assert any(line.startswith(start) for line in told), data.output
    assert "did you mean train.jsonl?" in data.output and "'chess'" in data.output
    assert "did you mean multiple_choice?" in plugin.said
    assert not data.path.exists() and not plugin.path.exists(), "something was started"


@pytest.mark.slow
def test_a_model_can_be_scored_without_training(rlvr):
    greedy = "validation.generating_args={temperature: 0, num_return_sequences: 1}"
    run = rlvr("eval_only=true", "actor_train.data_args.file_name=null", greedy).ended()
    assert run.summary["status"] == "completed" and run.summary["steps"] == 0
    assert run.summary["eval"].keys() == {"before"}
    assert {"mean@1", "pass@1", "maj@1", "accuracy_greedy"} <= run.summary["eval"]["before"].keys()
    assert list(run.metrics) == [0] and "eval/mean@1" in run.metrics[0]
    assert [line["what"] for line in run.logged("played.jsonl")] == ["val"] * 4, "greedy answers are sampled once"
    assert run.summary["eval"]["before"]["accuracy_greedy"] == run.summary["eval"]["before"]["accuracy"]
    assert not list((run.path / "checkpoints").iterdir())
    assert not list(run.faults.glob("at-actor_train-*")), "something was trained or scored"


def engines_by_prompt(run: Run) -> list[set[int]]:
    """The engines that each prompt was sent to."""
    found: dict[str, set[int]] = {}
    for request in run.logged("requests.jsonl"):
        found.setdefault(str(request["prompt"]), set()).add(request["rank"])
    return list(found.values())


TWO_ENGINES = (
    "actor_infer.device_mapping=[0,1]",
    "actor_infer.worker_cls=tests.support.faults:LoggingInferWorker",
    "validation=null",
)


@pytest.mark.slow
def test_the_answers_to_a_prompt_stay_on_one_engine_the_greedy_baseline_included(rlvr):
    run = rlvr(
        *TWO_ENGINES, "adv_estimator=remax", "generate_opt_level=0", "is_num_return_sequences_expand=false"
    ).ended()
    engines = engines_by_prompt(run)
    assert len(engines) == 8 and all(len(used) == 1 for used in engines)
    assert set().union(*engines) == {0, 1}
    assert len(run.logged("requests.jsonl")) == 2 * 4 * (4 + 1)
    for step in (1, 2):
        metrics = run.metrics[step]
        assert metrics["rollout/episodes"] == 16 and metrics["actor/grad_norm"] > 0
        assert 0 <= metrics["rollout/baseline"] <= 1 and metrics["rollout/no_baseline"] == 0


@pytest.mark.slow
def test_answers_spread_over_engines_a_critic_and_the_kl_over_the_vocabulary(rlvr, model):
    from safetensors.torch import load_file

    run = rlvr(
        *TWO_ENGINES,
        "is_num_return_sequences_expand=true",
        "is_use_additional_prompts=true",
        "max_additional_running_prompts=2",
        "adv_estimator=gae",
        "critic_warmup=1",
        "ppo_epochs=2",
        "kl_penalty=full",
        "use_kl_loss=true",
        "kl_loss_coef=0.1",
    ).ended()
    assert all(engines == {0, 1} for engines in engines_by_prompt(run))
    start = load_file(model / "model.safetensors")
    after = [load_file(run.checkpoint(step) / "actor_train" / "model.safetensors") for step in (1, 2)]
    assert all(start[name].equal(after[0][name]) for name in start), "the actor waits for the critic"
    assert not all(start[name].equal(after[1][name]) for name in start)
    assert all(run.metrics[step]["critic/loss"] > 0 for step in (1, 2))
    assert "actor/loss" not in run.metrics[1] and run.metrics[2]["actor/kl_loss"] >= 0
    assert [run.metrics[step]["rollout/episodes"] for step in (1, 2)] == [16, 16]
    at = position(run, 2)
    assert at["next_draw"] - len(at["again"]) == 8, "prompts that were given up come again"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_online_dpo_is_taken_up_again_bit_for_bit(rlvr):
    pairs = ("online_dpo={beta: 0.5}", "adv_estimator=gae", "loss_agg_mode=seq-mean-token-mean", "max_steps=3")
    batch = "actor_train.training_args.per_device_train_batch_size=2"
    whole, _ = stop_and_resume(functools.partial(rlvr, *pairs, batch, train=TIED), last_step=3)
    first = whole.metrics[1]
    fractions = [whole.metrics[step]["dpo/pair_frac"] for step in (1, 2, 3)]
    assert 0 < min(fractions) < 1, "a group is tied"
    assert first["dpo/kl"] < whole.metrics[3]["dpo/kl"], "the reference stays where the policy was"
    assert first["dpo/score_gap"] > 0
