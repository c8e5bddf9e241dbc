"""What is found in the records of runs, real broken ones too: whether it learns, why it does not, and alarms."""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.configs.pipeline import WatchesConfig
from roll.configs.rlvr import RLVRConfig
from roll.distributed.cluster.cluster import Cluster
from roll.pipeline.session import StoppedByWatchError
from roll.report.diagnosis import diagnose, slope_in_sigma
from roll.report.record import RunRecord
from roll.report.watches import WATCHES, Watching, alarm_of
from roll.rollout.types import repeated
from tests.support.cli import call, refused
from tests.support.lines import write_lines
from tests.unit.pipeline.test_loop import Counting, run

SOUND = "sound"
RECORDS: dict[str, Any] = json.loads(gzip.decompress(Path(__file__).with_name("recipes.json.gz").read_bytes()))
ALL_SOUND = [name for name, each in RECORDS.items() if each["cause"] is None]


def record(name: str) -> RunRecord:
    return RunRecord(**RECORDS[name]["record"])


def changed(metrics: dict[str, Any], **settings: Any) -> RunRecord:
    """The sound run, but with a low reward and these metrics: one number, or one for each step."""
    sound = record(SOUND)
    steps = []
    for number, step in enumerate(sound.steps):
        values = {name: value[number] if isinstance(value, list) else value for name, value in metrics.items()}
        steps.append({**step, "rollout/reward": 0.3, **values})
    return RunRecord({**sound.config, **settings}, steps)


@pytest.mark.parametrize("name", [name for name in RECORDS if name not in ALL_SOUND])
def test_the_cause_of_a_broken_run_is_first(name):
    found = diagnose(record(name))
    assert not found.learns
    assert found.findings[0].cause == RECORDS[name]["cause"]
    assert found.findings[0].advice in found.text().replace("\n     ", " ")


@pytest.mark.parametrize("name", ALL_SOUND)
def test_a_sound_run_is_never_accused(name):
    """Nor is its beginning, from where a run looks at itself."""
    whole = record(name)
    found = diagnose(whole)
    assert found.learns and not found.findings
    for count in range(10, len(whole.steps)):
        begun = dataclasses.replace(whole, steps=whole.steps[:count], before={}, after={}, groups=())
        assert diagnose(begun).remark is None


@pytest.mark.parametrize(
    ("cause", "metrics", "settings"),
    [
        ("nothing-to-judge", {"rollout/valid_rate": 0.1}, {}),
        ("episodes-fail", {"rollout/dropped": 200.0}, {}),
        ("groups-of-one", {}, {"num_return_sequences_in_group": 1}),
        ("tasks-are-too-easy", {"rollout/no_spread": 0.9, "rollout/all_right": 0.9}, {}),
        ("groups-have-no-spread", {"rollout/no_spread": 0.8, "rollout/all_wrong": 0.6}, {}),
        ("clipping-binds", {"actor/clip_frac": 0.75}, {}),
        ("steps-are-skipped", {"actor/skipped_steps": 1.0}, {}),
        ("generator-has-old-weights", {"mismatch/logprob_diff_mean": 0.4}, {}),
        ("rollouts-are-old", {"async/token_lag": 5.0}, {}),
        ("entropy-collapsed", {"actor/entropy": [0.8 * 0.7**n for n in range(99)]}, {}),
    ],
)
def test_other_causes_are_found(cause, metrics, settings):
    found = diagnose(changed(metrics, **settings))
    assert [each.cause for each in found.findings][:1] == [cause]
    assert all(name in " ".join(found.findings[0].evidence) for name in metrics if name != "rollout/all_wrong")


def test_a_cause_in_one_tag_alone_is_named_with_it():
    good, bad = {"rollout/maths/valid_rate": 0.95}, {"rollout/code/valid_rate": 0.02, "rollout/code/no_spread": 0.9}
    counts = {"rollout/maths/episodes": 64.0, "rollout/code/episodes": 192.0, "rollout/maths/no_spread": 0.1}
    found = {each.cause: each for each in diagnose(changed(counts | good | bad)).findings}
    judged = found["nothing-to-judge"]
    assert judged.text.startswith("of code, 75% of the episodes: in 98% of the responses no answer")
    assert judged.weight == pytest.approx(0.98 * 0.75)
    assert judged.evidence[0].startswith("rollout/code/valid_rate: 0.02")
    assert "groups-have-no-spread" in found and "maths" not in str(list(found.values()))
    judged = diagnose(changed(counts | good | bad | {"rollout/valid_rate": 0.2})).findings[0]
    assert judged.cause == "nothing-to-judge" and judged.evidence[-1].startswith("only in: code (in 98% of")


@pytest.mark.parametrize(("prompt", "cause"), [("user: 1+1=", True), ("<|im_start|>user\n1+1=<|im_end|>\n", False)])
def test_prompts_without_the_models_template_are_found(tmp_path, prompt, cause):
    sound = record(SOUND)
    sampled = [{name: each for name, each in step.items() if not name.startswith("eval")} for step in sound.steps]
    steps = [{**step, "rollout/reward": 0.3, "rollout/cut_off": 0.95} for step in sampled]
    (tmp_path / "config.yaml").write_text(json.dumps({**sound.config, "pretrain": str(tmp_path / "model")}))
    write_lines(tmp_path / "metrics.jsonl", steps)
    for folder in ("model", "trajectories"):
        (tmp_path / folder).mkdir()
    template = "{% for m in messages %}<|im_start|>{{ m }}<|im_end|>{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    row = {"tokens": [prompt, ["2", -1.0], ["<|im_end|>", -1.0], ["3", -1.0]]}
    write_lines(tmp_path / "trajectories" / "tokens-00009.jsonl", [row])
    found = diagnose(RunRecord.read(tmp_path)).findings
    never = next(each for each in found if each.cause == "responses-never-end")
    assert "<|im_end|> is written, but it does not end the response" in never.text
    assert [each.cause for each in found].count("template-is-another") == cause
    if cause:
        assert found[0].cause == "template-is-another" and "a prompt begins with: user: 1+1=" in found[0].evidence


@pytest.mark.parametrize("seed", range(3))
def test_the_slope_in_standard_errors_is_that_of_least_squares(seed):
    values = np.random.default_rng(seed).normal(size=9) + 0.2 * seed * np.arange(9)
    (slope, _), covariance = np.polyfit(np.arange(9), values, 1, cov=True)
    assert slope_in_sigma(values.tolist()) == pytest.approx(slope / np.sqrt(covariance[0, 0]))


def test_the_command_reads_a_folder(tmp_path, capsys):
    broken = record("tiny_learning_rate")
    (tmp_path / "config.yaml").write_text(json.dumps(broken.config))
    write_lines(tmp_path / "metrics.jsonl", broken.steps)
    assert "[learning-rate-is-too-low]" in call(capsys, "diagnose", tmp_path, code=1)[0]
    out, _ = call(capsys, "diagnose", tmp_path, "--json", code=1)
    assert json.loads(out)["findings"][0]["cause"] == "learning-rate-is-too-low"
    assert "expected a run's folder" in refused(capsys, "diagnose", tmp_path / "nothing")


# Watches, which look at a run while it goes on

STEPS = 60
GROUPED = {"adv_estimator": "grpo", "max_steps": 1000}


def ramp(low: float, high: float, begin: int = 0, end: int = STEPS) -> list[float]:
    return np.interp(np.arange(STEPS), [begin, end], [low, high]).tolist()


def flat(value: float) -> list[float]:
    """With a noise that has no slope."""
    return [value * (1 + 0.01 * (-1) ** (step // 2)) for step in range(STEPS)]


def evaluations(*shares: float, every: int = 10) -> list[float | None]:
    found: list[float | None] = [None] * STEPS
    found[every - 1 : len(shares) * every : every] = shares
    return found


SOLVES = {"rollout/reward": ramp(0.2, 0.8), "rollout/success": ramp(0.2, 0.8)}
STALLS = {"rollout/reward": flat(0.3), "rollout/success": flat(0.3)}
HACKS = {"rollout/reward": ramp(0.2, 0.8), "rollout/success": flat(0.2)}
HELD_OUT = {"eval/prompts": [500.0] * STEPS}
FALLING = evaluations(0.4, 0.5, 0.5, 0.2, 0.2, 0.2)
TOKENS, ENTROPY, LOSE = "rollout/response_tokens", "actor/entropy", "rollout/no_spread"
LONGER, FALLS = {TOKENS: ramp(100, 400)}, {ENTROPY: ramp(1.0, 0.05, end=30)}
HOST, FREE = "memory/host_gb", "memory/host_free_gb"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "entropy_collapse": (STALLS | FALLS, SOLVES | FALLS, "from 0.93"),
    "held_out_falls": (SOLVES | HELD_OUT | {"eval/success": FALLING}, STALLS | HELD_OUT | {"eval/success": FALLING},
        "from 50.0% (step 20) to 20.0% and 20.0%"),
    "evaluation_falls": (STALLS | HELD_OUT | {"eval/success": FALLING},
        STALLS | HELD_OUT | {"eval/success": evaluations(0.4, 0.5, 0.45, 0.2, 0.48, 0.43)}, "checkpoint after step 20"),
    "length_gains": (HACKS | LONGER, SOLVES | LONGER, "success did not (20.0%)"),
    "format_gains": (HACKS | {"rollout/valid_rate": ramp(0.2, 0.9)}, SOLVES | {"rollout/valid_rate": ramp(0.2, 0.9)},
        "only the form is learned"),
    "repetition": ({"rollout/repetition": ramp(0.05, 0.9)}, {"rollout/repetition": ramp(0.3, 0.5)},
        "repeats itself (8% at the start)"),
    "kl_blow_up": ({"reward/kl": ramp(0.0, 3.0)}, {"reward/kl": ramp(0.0, 0.5)}, "2.9 nats a token (reward/kl"),
    "ratio_tails": ({"async/truncated_0": flat(0.0), "async/truncated_2": flat(0.4)},
        {"async/truncated_0": flat(0.0), "async/log_ratio_mean_2": flat(0.1)},
        "40% of the tokens that are 2 steps old are truncated"),
    "dead_groups": (STALLS | {LOSE: flat(0.9), "rollout/all_wrong": flat(0.6), "rollout/all_right": flat(0.3)},
        {"rollout/success": flat(0.99), LOSE: flat(0.9)}, "30% all right, 60% all wrong"),
    "duplicate_prompts": ({"rollout/duplicate_prompts": flat(0.5)}, {"rollout/duplicate_prompts": flat(0.1)},
        "50% of a step's prompts"),
    "exploding_lengths": (LONGER | {"rollout/cut_off": ramp(0.0, 0.5)}, LONGER | {"rollout/cut_off": flat(0.0)},
        "from 110 to 385 tokens, and 48% of them are cut off"),
    "host_memory_grows": ({HOST: ramp(4.0, 8.0), FREE: ramp(9.0, 5.0)},
        {HOST: ramp(4.0, 8.0, end=10), FREE: ramp(9.0, 5.0, end=10)},
        "67 MB a step (4.0 → 7.9 GB in 60 steps); 5.1 GB are free, which ends at about step 136 of 1000"),
}  # fmt: skip


def made(series: dict[str, Any]) -> RunRecord:
    steps = [
        {"step": step + 1} | {name: values[step] for name, values in series.items() if values[step] is not None}
        for step in range(STEPS)
    ]
    return RunRecord(GROUPED, steps)


@pytest.mark.parametrize("name", CASES)
def test_a_watch_speaks_where_it_should_and_not_otherwise(name):
    bad, good, words = CASES[name]
    text = alarm_of(name, made(bad))
    assert text is not None and words in text
    assert alarm_of(name, made(good)) is None
    assert alarm_of(name, made({})) is None, "its metrics are missing"
    assert alarm_of(name, made(bad), since=STEPS) is None, "a run that has just been resumed"


@pytest.mark.parametrize("name", ALL_SOUND)
def test_no_watch_speaks_in_a_sound_run(name):
    whole = record(name)
    watching = Watching(whole.config, dict.fromkeys(WATCHES, "stop"))
    watching.look(0, whole.before)
    for step in whole.steps:
        assert not watching.look(int(step["step"] or 0), step)
    texts = [turn for group in whole.groups for each in group for turn in each["text"].split("\n")]
    assert np.mean([repeated(np.array([ord(letter) for letter in text])) for text in texts]) < 0.2


@pytest.mark.parametrize("name", ["entropy_bonus", "too_hard"])
def test_watches_speak_in_broken_runs(name):
    broken = record(name)
    watching = Watching(broken.config, dict.fromkeys(WATCHES, "warn"))
    for step in broken.steps:
        watching.look(int(step["step"] or 0), step)
    assert watching.alarms["dead_groups"].count >= 1


def test_repetition_is_the_share_of_repeated_runs_of_tokens():
    rng = np.random.default_rng(0)
    fresh, loop = rng.integers(0, 50_000, 300), np.tile(np.arange(10), 30)
    runs = {tuple(loop[at : at + 8]) for at in range(len(loop) - 7)}
    assert repeated(fresh) == 0 and repeated(loop) == pytest.approx(1 - len(runs) / 293)
    assert repeated(np.arange(3)) == repeated(np.arange(0)) == 0


def test_every_watch_has_a_key_and_a_key_of_its_own_overrides_the_default():
    assert set(WatchesConfig.model_fields) - {"default"} == set(WATCHES)
    values = RLVRConfig(watches={"default": False, "dead_groups": "stop"}, probe=False)  # a plain off is YAML's false
    config, probe = values.watches, values.probe
    assert probe == "off"
    assert (config.action("repetition"), config.action("dead_groups")) == ("off", "stop")


class Dying(Counting):
    """Groups without any spread from the start."""

    def step(self, step: int) -> None:
        with self.update(step):
            self.unreported = {"rollout/duplicate_prompts": 0.5}


def test_a_watch_stops_a_run_which_can_be_resumed(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(Cluster, "current_step", None)  # as it was, when the runs are over
    keys: dict[str, Any] = {"max_steps": 9, "make": Dying, "watches": {"duplicate_prompts": "stop"}}
    for last, more in ((3, {}), (6, {"resume_from_checkpoint": True})):
        with pytest.raises(StoppedByWatchError, match=f"duplicate_prompts stops the run after step {last}: 50%"):
            run(tmp_path, **keys, **more)
        summary = json.loads((tmp_path / "loop" / "summary.json").read_text())
        assert summary["status"] == "stopped" and summary["steps"] == last
        assert (tmp_path / "loop" / "checkpoints" / f"checkpoint-{last}").is_dir()
        assert summary["watches"]["duplicate_prompts"] | {"text": ""} == {
            **{"watch": "duplicate_prompts", "action": "stop", "text": "", "first": 3, "last": last, "count": last // 3}
        }
    loop = run(tmp_path, **keys | {"watches": {"default": "off"}}, resume_from_checkpoint=True)
    assert loop.done_steps == 9
    assert "step 3: 50% of a step's prompts are there twice" in caplog.text
