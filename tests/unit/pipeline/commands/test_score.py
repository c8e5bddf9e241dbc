"""``roll score``: any answers, any verifiers, nothing heavy for rules, and no failure that looks like a 0."""

import json
from pathlib import Path

import pytest

from roll.pipeline.commands.scoring import _written
from roll.pipeline.rollouts import trajectory_record
from roll.rewards import VERIFIERS
from roll.utils.registry import PLUGINS
from tests.support.cli import call, refused
from tests.support.lines import read_lines as read
from tests.unit.pipeline.rlvr.test_metrics import answer

LETTERS = "tests.support.scoring:Letters"
SUMS = [
    {"id": 1, "prompt": "1+1", "solution": "2", "answers": [{"text": r"\boxed{2}"}, {"text": r"so \boxed{2.0}"}]},
    {"id": 2, "prompt": "2+2", "solution": "4", "answers": [{"text": r"\boxed{5}"}, {"text": r"\boxed{4}"}]},
    {"id": 3, "prompt": "3+3", "solution": "6", "answers": [{"text": "I do not know."}, {"error": "too long"}]},
]


def test_answers_are_scored_by_a_rule_and_failures_are_told(rows, tmp_path, capsys):
    out, figures = tmp_path / "scores" / "scores.jsonl", tmp_path / "figures" / "figures.json"  # they are made
    command = ["score", rows("sums.jsonl", SUMS), "--verifier", "math", "-o", out, "--summary", figures]
    printed, err = call(capsys, *command, code=1)  # an answer has no score
    assert "sums.jsonl:3: there is no answer" in err
    lines = read(out)
    assert [{key: line[key] for key in SUMS[0]} for line in lines] == SUMS
    scores = [[each.get("score") for each in line["scores"]] for line in lines]
    assert scores == [[1.0, 1.0], [0.0, 1.0], [0.0, None]]
    assert lines[0]["scores"][1]["answer"] == "2" and "error" in lines[2]["scores"][1]
    found = json.loads(figures.read_text())
    # Prompts have means 1, 1/2 and 0: their standard error is 0.5 / sqrt(3).
    assert (found["prompts"], found["answers"], found["failed"]) == (3, 6, 1)
    assert found["accuracy"] == found["score"] == 0.5
    assert found["score_error"] == pytest.approx(0.5 / 3**0.5)
    assert (found["pass@1"], found["pass@2"], found["found"]) == (0.5, pytest.approx(2 / 3), 0.8)
    assert "accuracy        0.5000 ± 0.2887" in printed and "failed          1\n" in printed


def test_texts_and_several_rows_of_one_prompt_are_answers_too(rows, capsys):
    question = [{"role": "user", "content": "1+1"}]
    lines = [{"messages": question, "truth": {"value": "2"}, "said": rf"\boxed{{{n}}}"} for n in (2, 3)]
    command = ["score", rows("a.jsonl", lines), "--verifier", "math", "--answer-key", "said"]
    out = figures(capsys, *command, "--truth-key", "truth.value")
    assert "prompts 1 answers 2" in out and "pass@2 1.0" in out
    command = ["score", rows("b.jsonl", [{"said": ["no tag"]}]), "--verifier", "format", "--answer-key", "said"]
    assert "score 3.0" in figures(capsys, *command, "--no-truth", "score=3", "pattern=no.*")


def figures(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    return " ".join(call(capsys, *words)[0].split())


def test_a_runs_episodes_are_scored_with_their_reference_answers(rows, capsys):
    episodes = [trajectory_record(answer(text=rf"\boxed{{{n}}}", ground_truth="7")) for n in (7, 8)]
    out = figures(capsys, "score", rows("eval-00003.jsonl", episodes), "--verifier", "math")
    assert "prompts 1 answers 2 failed 0 score 0.5000" in out


def test_the_rewards_of_a_configuration_score_by_tag(rows, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(
        "rewards:\n"
        "  sums:\n"
        "    tag_included: [sum]\n"
        "    verifiers: [{name: math}, {name: format, weight: 0.5, args: {pattern: 'so.*'}}]\n"
        f"  words: {{tag_included: [word], retries: 0, timeout: 1.0, verifiers: [{{name: '{LETTERS}'}}]}}\n"
    )
    config = ["--config", str(tmp_path / "mine.yaml")]
    tagged = [{**line, "tag": "sum"} for line in SUMS[:2]]
    words = [{"tag": "word", "solution": order, "answers": ["word"]} for order in ("", "raise", "hang")]
    out = tmp_path / "out.jsonl"
    call(capsys, "score", rows("a.jsonl", [*tagged, *words]), *config, "-o", out, code=1)
    lines = read(out)
    parts = {"math/score": 1.0, "format/score": 1.0}
    assert lines[0]["scores"][1] == {"score": 1.5, "correct": True, "answer": "2", "parts": parts}
    assert lines[2]["scores"][0]["parts"] == {"Letters/score": sum(map(ord, "word")) % 64 / 64, "Letters/letters": 4.0}
    assert "ArithmeticError" in lines[3]["scores"][0]["error"] and "took longer" in lines[4]["scores"][0]["error"]
    call(capsys, "score", rows("b.jsonl", tagged), *config, "rewards.sums.verifiers.1.weight=5", "-o", out)
    assert read(out)[0]["scores"][1]["score"] == 6.0
    assert "tag None, expected one of sum, word" in refused(capsys, "score", rows("c.jsonl", SUMS), *config)


def test_everything_that_is_wrong_is_told_at_once(rows, tmp_path, capsys):
    file = rows("a.jsonl", [{"answers": ["x"]}, {"solution": 1}, {"solution": 1, "answers": [3]}])
    told = refused(capsys, "score", file, "--verifier", "math")
    assert "3 problems" in told and "--no-truth" in told and "--answer-key" in told and "'3', expected a text" in told
    wrong = "{a: {tag_included: [a], verifiers: [{name: maths}], retry: 3}, b: 3}"
    (tmp_path / "bad.yaml").write_text(f"rewards: {wrong}\n")
    told = refused(capsys, "score", file, "--config", tmp_path / "bad.yaml")
    assert "did you mean retries?" in told and "rewards.b" in told
    (tmp_path / "none.yaml").write_text("seed: 3\n")
    assert "domains with verifiers" in refused(capsys, "score", file, "--config", tmp_path / "none.yaml")
    refused(capsys, "score", file)
    refused(capsys, "score", rows("empty.jsonl", []), "--verifier", "math")


def test_references_that_no_answer_can_equal_are_told(rows, capsys):
    wrong = [{**SUMS[0], "id": number, "solution": "about six"} for number in range(9)]
    path = rows("sums.jsonl", [SUMS[0], *wrong])
    _, err = call(capsys, "score", path, "--verifier", "gsm8k", code=1)
    told = [line for line in err.splitlines() if "no answer can be right" in line or "more" in line]
    assert told[0].startswith(f"no answer can be right: {path}:2: rewards.gsm8k.verifiers.0 (gsm8k): ")
    assert "… and 6 more rows to which no answer can be right" in told


def test_scores_and_figures_take_the_place_of_no_other_file(rows, capsys, tmp_path):
    file = rows("a.jsonl", SUMS)
    command = ["score", file, "--verifier", "math", "-o"]
    assert "--output: got" in refused(capsys, *command, file)
    out = tmp_path / "scores.jsonl"
    for path, why in ((file, "a file of answers"), (out, "that of --output"), (tmp_path, "a folder")):
        told = refused(capsys, *command, out, "--summary", path)
        assert f"--summary: got {path}, {why}, expected another file" in told
    assert read(file) == SUMS and not out.exists()
    assert "--output: got ., a folder" in refused(capsys, *command, "")


def test_figures_that_cannot_be_written_are_printed(rows, monkeypatch, capsys):
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("roll.pipeline.commands.scoring.write_atomic", full)
    command = ["score", rows("a.jsonl", SUMS[:2]), "--verifier", "math", "--summary", "figures.json"]
    printed, err = call(capsys, *command, code=2)
    assert "prompts         2" in printed and err == "roll score: [Errno 28] No space left on device\n"


def test_scores_that_are_not_all_there_leave_no_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), _written(tmp_path / "scores.jsonl") as file:
        assert file is not None
        file.write("{}")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("verifier", "reason"),
    [
        (["reward_model", "model_path={model}"], "expected a model with a trained classification head"),
        (["judge", "judge_model_type=inference", "judge_model_name=./absent"], "'./absent': no such folder"),
    ],
)
def test_a_model_that_cannot_score_is_told_without_a_traceback(rows, model, capsys, verifier, reason):
    words = [word.format(model=model) for word in verifier]
    assert reason in refused(capsys, "score", rows("a.jsonl", SUMS[:1]), "--verifier", *words)


MINE = """
from roll.rewards import RuleVerifier, VERIFIERS, RewardResult


def lengths(data_sources, solution_strs, ground_truths, extra_infos, unit=1.0):
    sizes = [len(text) for text in solution_strs]
    scores = [unit * size + info["level"] for size, info in zip(sizes, extra_infos)]
    return [{"score": score, "size": size, "why": f"{size} long"} for score, size in zip(scores, sizes)]


class Backwards(RuleVerifier):
    def check(self, sample):
        right = sample.response[::-1] == sample.ground_truth
        return RewardResult(float(right), right, sample.response[::-1])


VERIFIERS.register("from_mine", f"{__file__}:Backwards")
"""


def test_a_file_of_ones_own_has_functions_classes_and_plugins_beside_the_configuration(
    rows, tmp_path, monkeypatch, capsys
):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "run.yaml").write_text(
        "plugins: [mine.py]\n"
        "rewards:\n"
        "  own:\n"
        "    tag_included: [a]\n"
        "    verifiers:\n"
        "    - {name: custom, args: {path: 'mine.py:lengths', batch: true, batch_size: 2, kwargs: {unit: 0.25}}}\n"
        "    - {name: 'mine.py:Backwards', weight: 10, decides: true}\n"
        "    - {name: from_mine, weight: 100}\n"
    )
    monkeypatch.setattr(VERIFIERS, "_entries", dict(VERIFIERS._entries))
    monkeypatch.setenv(PLUGINS, "")
    monkeypatch.chdir(tmp_path)
    asked = [{"tag": "a", "level": 2, "solution": "ba", "answers": ["ab", "ba", "abcd"]}]
    call(capsys, "score", rows("answers.jsonl", asked), "--config", "./run.yaml", "-o", "scores.jsonl")
    found = read("scores.jsonl")[0]["scores"]
    told = [(each["score"], each["correct"], each["answer"]) for each in found]
    assert told == [(112.5, True, "ba"), (2.5, False, "ab"), (3.0, False, "dcba")]
    assert found[0]["parts"]["custom/size"] == 2.0 and found[0]["notes"] == {"custom/why": "2 long"}
