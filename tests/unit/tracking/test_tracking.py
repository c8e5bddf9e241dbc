"""Trackers and services, the folder of a run, redaction, timing and the display: what a run leaves and shows."""

import importlib.util
import io
import json
import logging
import math
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from roll.__main__ import main
from roll.pipeline.profiling import PhaseTimer, host_memory
from roll.pipeline.rollouts import answer_row, write_trajectories
from roll.rollout.types import EpisodeEnd
from roll.tracking import display as display_module
from roll.tracking.display import Display, closing_line, difference_interval, sparkline
from roll.tracking.redact import REDACTED, is_secret_name, redact
from roll.tracking.run import RunFolder, read_json_lines
from roll.tracking.trackers import SERVICES, TRACKERS, AnswerRow, MultiTracker, TrackerContext, tracker_options
from roll.utils.registry import UnknownNameError
from tests.support.lines import read_lines
from tests.support.rollouts import make_trajectory, told_turn


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "exp" / "logs" / "trackio"))
    folder = RunFolder(tmp_path, "exp")
    yield folder
    folder.close()


# Trackers


class Recorder:
    """A tracker from outside; fails at the step it is told to. The class knows of the last one what it was told."""

    logged: list[tuple[str, int]] = []  # noqa: RUF012
    finished = 0

    def __init__(self, context: TrackerContext, *, fail_at: int = -1) -> None:
        self.fail_at = fail_at
        self.logged.clear()
        type(self).finished = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step == self.fail_at:
            raise ConnectionError("the service is away")
        self.logged.append((next(iter(metrics)), step))

    def finish(self) -> None:
        type(self).finished += 1


RECORDER = f"{__name__}:Recorder"


def test_tensorboard_shows_what_it_was_told_but_no_secrets_nor_steps_that_a_resumed_run_takes_again(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = {"seed": 7, "pretrain": "tiny", "tracker_kwargs": {"wandb": {"api_key": "hunter2hunter2"}}}
    for resumed_step, shown, steps, value in ((None, config, range(1, 6), 1.0), (3, {}, range(4, 6), 2.0)):
        tracker = MultiTracker(["tensorboard"], {"flush_secs": 5}, TrackerContext(run, shown, resumed_step))
        for step in steps:
            tracker.log({"rollout/reward": value, "time/train": float("nan")}, step)
        tracker.finish()
        time.sleep(1.1)  # a file is named by the second it was opened in
    events = EventAccumulator(str(run.logs / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("rollout/reward")]
    assert found == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]
    assert all(math.isnan(event.value) for event in events.Scalars("time/train"))
    assert events.SummaryMetadata("config").plugin_data.plugin_name == "text"
    (text,) = events.Tensors("config")[0].tensor_proto.string_val
    assert text.decode().startswith("    seed: 7\n    pretrain: tiny\n")
    assert b"hunter2" not in text


def test_options_are_flat_or_keyed_by_name_and_those_that_fit_their_types_pass():
    assert TRACKERS.names() == sorted(("stdout", "tensorboard", *SERVICES))
    assert tracker_options([], None) == {}
    keyed = {"tensorboard": {"log_dir": "x"}}
    assert tracker_options("tensorboard", keyed["tensorboard"]) == tracker_options(["tensorboard"], keyed) == keyed
    both = tracker_options(["stdout", "wandb"], {"wandb": {"project": "p"}})
    assert both == {"stdout": {}, "wandb": {"project": "p"}}
    tracker_options("tensorboard", {"flush_secs": 5, "log_dir": None})
    tracker_options("wandb", {"tags": ["a", "b"], "mode": "offline", "project": "x"})
    tracker_options("trackio", {"gpu_log_interval": 5, "private": None})


def test_a_failing_tracker_is_reported_once_and_the_others_go_on_with_a_plain_line_a_step(run, caplog, capsys):
    tracker = MultiTracker([RECORDER, "stdout"], {RECORDER: {"fail_at": 2}, "stdout": {}}, TrackerContext(run))
    for step in (1, 2, 3):
        tracker.log({"rollout/reward": 0.25, "actor/loss": 1e-7}, step)
    tracker.finish()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "failed at step 2" in caplog.text and "the service is away" in caplog.text
    assert Recorder.logged == [("rollout/reward", 1)] and Recorder.finished == 0
    lines = [f"step={step} actor/loss=1e-07 rollout/reward=0.25\n" for step in (1, 2, 3)]
    assert capsys.readouterr().out == "".join(lines)


UNFIT = [
    *(("tensorboard", "flush_secs", "x"), ("tensorboard", "flush_secs", True), ("tensorboard", "log_dir", 3)),
    *(("wandb", "tags", 5), ("wandb", "mode", "sometimes"), ("mlflow", "tags", ["a"])),
    ("trackio", "gpu_log_interval", [1]),
]


@pytest.mark.parametrize(
    ("names", "kwargs", "message"),
    [
        ("tensorbord", {}, "Did you mean 'tensorboard'"),
        ("tensorboard", {"logdir": "x"}, "'logdir', expected log_dir, flush_secs; did you mean 'log_dir'"),
        ("stdout", {"x": 1}, "expected no options"),
        (["stdout", "wandb"], {"project": "p"}, "expected one section per tracker"),
        (["stdout"], {"wandb": {}}, "tracker_kwargs.wandb: this tracker is not in track_with"),
        (["wandb"], {"wandb": 3}, "tracker_kwargs.wandb: got 3, expected a mapping"),
        # values are those that the tracker declares
        *((name, {key: value}, f"tracker_kwargs: {name}.{key} is ") for name, key, value in UNFIT),
    ],
)
def test_wrong_options_are_clear_errors(names, kwargs, message):
    with pytest.raises((ValueError, UnknownNameError)) as caught:
        tracker_options(names, kwargs)
    assert message in str(caught.value)


# Services

SECRET = "hf_123456789"
CONFIG = {"hf_token": SECRET, "seed": 7, "actor_train": {"model_args": {"dtype": "fp32"}}}
ROWS: list[AnswerRow] = [
    {"tag": "sums", "prompt": "1+1=", "answer": "Two, €2", "score": 0.5, "success": True},
    {"tag": "sums", "prompt": "2+2=", "answer": "5", "score": 0.0, "success": False},
]


def track(name: str, run: RunFolder) -> None:
    """Two steps of a run, the answers of the second."""
    pytest.importorskip(name)
    tracker = MultiTracker(name, {}, TrackerContext(run, CONFIG))
    assert list(tracker._trackers) == [name]
    tracker.log({"rollout/reward": 0.25, "eval/pass@8": 1.0}, 1)
    tracker.log_answers(ROWS, 2)
    tracker.log({"rollout/reward": 0.5, "actor/loss": math.nan}, 2)
    assert list(tracker._trackers) == [name], "none has failed"
    tracker.finish()
    files = [file for file in run.logs.rglob("*") if file.is_file()]
    assert files and not any(SECRET.encode() in file.read_bytes() for file in files)


def test_wandb(run):
    track("wandb", run)
    (folder,) = (run.logs / "wandb").glob("offline-run-*")
    assert len(list(folder.glob("*.wandb"))) == 1
    (table,) = folder.rglob("answers*.table.json")
    assert json.loads(table.read_text())["data"] == [list(row.values()) for row in ROWS]


def test_mlflow(run):
    track("mlflow", run)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.logs / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("roll")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("exp", "FINISHED")
    assert found.data.params["actor_train.model_args.dtype"] == "fp32" and found.data.params["seed"] == "7"
    history = client.get_metric_history(found.info.run_id, "rollout/reward")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5)]
    assert found.data.metrics["eval/pass_8"] == 1.0 and math.isnan(found.data.metrics["actor/loss"])
    table = json.loads((run.logs / "mlflow" / found.info.run_id / "artifacts" / "answers" / "00002.json").read_text())
    assert table["data"] == [list(row.values()) for row in ROWS] and table["columns"][0] == "tag"


def test_swanlab(run):
    track("swanlab", run)
    (file,) = (run.logs / "swanlab").glob("run-*/run-*.swanlab")
    content = file.read_bytes()
    assert b"rollout/reward" in content and b"eval/pass@8" in content and b"answers" in content


def test_trackio(run):
    track("trackio", run)
    (file,) = (run.logs / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        found = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    values = [(name, step, json.loads(metrics)) for name, step, metrics in found]
    rewards = [(name, step, metrics["rollout/reward"]) for name, step, metrics in values if "rollout/reward" in metrics]
    assert rewards == [("exp", 1, 0.25), ("exp", 2, 0.5)]
    assert any("answers" in metrics and step == 2 for _, step, metrics in values)


@pytest.mark.parametrize("name", SERVICES)
def test_a_missing_package_says_how_to_install_it(name, run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"pip install 'roll-rl\[{name}\]'"):
        MultiTracker(name, {}, TrackerContext(run))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else find(wanted))
    assert main(["train", "rlvr_math", f"track_with=[stdout,{name}]"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f'track_with got "{name}"' in said and f"roll-rl[{name}]" in said


def test_an_episode_becomes_a_row():
    turns = [told_turn("Up", "####", "Up", 1.0), told_turn("Down", "##", "Down", 0.5)]
    expected = {"tag": "boxes", "prompt": "####", "answer": "Up\n##\nDown", "score": 1.5, "success": True}
    assert answer_row(make_trajectory(turns, tag="boxes")) == expected


# Redaction


SECRETS = """api_key WANDB_API_KEY hf_token HF_TOKEN token password db-password clientSecret AWS_SECRET_ACCESS_KEY
apiKey private_key auth_token credentials"""
HARMLESS = """max_tokens max_new_tokens pad_token eos_token_id num_tokens tokens_per_s key tokenizer loss_agg_mode
keyboard secretary token_budget stop_token author"""


def test_names_of_secrets_and_names_that_only_look_like_some():
    assert [name for name in SECRETS.split() if not is_secret_name(name)] == []
    assert [name for name in [*HARMLESS.split(), ""] if is_secret_name(name)] == []


def test_redaction_hides_secrets_wherever_they_are_and_nothing_else(monkeypatch):
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "from-the-environment")

    def config(key: str, variable: str, login: str, *own: object) -> dict[str, Any]:
        password, user, nested = own
        return {
            "system_envs": {"WANDB_API_KEY": key, "OMP_NUM_THREADS": "1"},
            "tracker_kwargs": {"wandb": {"api_key": key, "notes": f"key is {key}, ok"}},
            "proxy": f"http://{login}@proxy:3128/",
            "judges": [{"password": password, "url": f"https://judge/?q={variable}"}],
            "credentials": {"user": user, "nested": nested},
            **{"max_tokens": 64, "pad_token": "<pad>", "hf_token": None, "use_auth_token": True},
            "loss_agg_mode": "token-mean",
        }

    given = config("0123456789abcdef", "from-the-environment", "me:hunter2", 12345, "me", ["a", "b"])
    before = json.dumps(given)
    assert redact(given) == config(*[REDACTED] * 5, [REDACTED, REDACTED])
    assert json.dumps(given) == before


# The run's folder


def test_the_folder_has_its_parts_and_a_config_without_secrets(run, tmp_path):
    run.write_config({"seed": 1, "hf_token": "hf_123456789", "path": tmp_path, "modes": ("a", "b"), "text": "schön √"})
    expected = {"seed": 1, "hf_token": REDACTED, "path": str(tmp_path), "modes": ["a", "b"], "text": "schön √"}
    assert yaml.safe_load(run.config_path.read_text(encoding="utf-8")) == expected
    folders = {path.name for path in run.path.iterdir() if path.is_dir()}
    assert run.path == tmp_path / "exp" and folders == {"logs", "checkpoints", "trajectories", "renders"}


def test_metrics_are_strict_json_and_are_cut_back_to_the_resumed_step(run, caplog):
    for step in range(1, 5):
        run.log_metrics(step, {"rollout/reward": np.float32(step), "actor/loss": math.nan, "kl/max": math.inf})
    with run.metrics_path.open("a") as file:
        file.write('{"step": 5, "rollout/rew')  # kill -9 while writing
    run.truncate_metrics(2)
    assert "cut off" in caplog.text
    run.log_metrics(3, {"rollout/reward": 7})
    lines = [json.loads(line, parse_constant=pytest.fail) for line in run.metrics_path.read_text().splitlines()]
    assert [(line["step"], line["rollout/reward"]) for line in lines] == [(1, 1), (2, 2), (3, 7)]
    assert lines[0]["actor/loss"] is None and lines[0]["kl/max"] is None
    run.truncate_metrics(-1)
    assert run.metrics_path.read_text() == ""
    caplog.clear()
    run.log_metrics(1, {"eval/算术/success": 0.5})
    whole = run.metrics_path.read_bytes()
    run.metrics_path.write_bytes(whole + whole[: whole.index("术".encode()) + 1])  # cut within a character
    assert read_json_lines(run.metrics_path) == [{"step": 1, "eval/算术/success": 0.5}]
    assert "cut off" in caplog.text


def test_the_summary_is_replaced_whole_by_what_json_can_hold(run, monkeypatch):
    summary = {"status": "running", "eval": {"before": {"success": 0.28}}, "tokens_per_s": {"rollout": np.float64(9)}}
    run.write_summary(summary)
    assert json.loads(run.summary_path.read_text()) == summary
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        run.write_summary({"status": "completed"})
    assert json.loads(run.summary_path.read_text()) == summary
    assert [path.name for path in run.path.iterdir() if path.is_file()] == ["summary.json"]
    with pytest.raises(TypeError, match="cannot write a object as JSON"):
        run.write_summary({"x": object()})


def test_trajectories_are_written_turn_by_turn(run):
    turn = told_turn("go <b>", "#P_", None, -0.1, -0.5, ids=range(4), prompt=range(9), versions=np.full(4, 2))
    trajectory = make_trajectory([turn], end=EpisodeEnd.TRUNCATED, info={"boxes": np.int64(1)})
    records = read_lines(write_trajectories(run, "step-000003", [trajectory, trajectory]))
    assert len(records) == 2 and records[0]["end"] == "truncated" and records[0]["score"] == pytest.approx(-0.6)
    assert records[0]["info"] == {"boxes": 1}
    expected = {"observation": "#P_", "text": "go <b>", "action": None, "task_reward": -0.1, "penalty": -0.5}
    expected |= {"prompt_tokens": 9, "completion_tokens": 4, "finish_reason": "stop", "weight_version": 2}
    assert records[0]["turns"] == [expected]


def test_close_takes_the_log_handlers_down(run):
    before = list(logging.getLogger().handlers)
    console = logging.StreamHandler(io.StringIO())
    for _ in range(2):  # twice must not log twice
        run.setup_logging(console)
    logging.getLogger("roll.test").info("hello")
    logging.getLogger("roll.test").debug("not this")
    run.close()
    logging.getLogger("roll.test").info("not this either")
    lines = (run.logs / "roll.log").read_text().splitlines()
    assert len(lines) == 1 and lines[0].endswith("INFO    roll.test: hello")
    assert console.stream.getvalue() == "hello\n"
    assert logging.getLogger().handlers == before


# Timing and memory


def test_phases_are_timed_per_step_and_per_run_even_when_they_fail():
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("rollout") as span:
            time.sleep(0.02)
            span.tokens = 10
    with pytest.raises(RuntimeError), timer.phase("train", tokens=5):
        raise RuntimeError
    metrics = timer.step_metrics()
    assert set(metrics) == {"time/rollout", "time/train", "tokens_per_s/rollout", "tokens_per_s/train"}
    assert metrics["time/rollout"] >= 0.04
    assert metrics["tokens_per_s/rollout"] == pytest.approx(20 / metrics["time/rollout"])
    assert timer.step_metrics() == {}
    with timer.phase("rollout"):
        time.sleep(0.02)
    assert timer.seconds_by_phase()["rollout"] > metrics["time/rollout"]
    assert timer.tokens_per_s()["rollout"] < metrics["tokens_per_s/rollout"]


def test_peak_memory_counts_living_children():
    before, figures = host_memory()
    assert before > 10 and 0 < figures["memory/host_gb"] < before / 1000 and figures["memory/host_free_gb"] > 0.1
    code = "x = bytearray(100_000_000); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        peak, later = host_memory()
        assert 100 < peak - before < 200 and 0.09 < later["memory/host_gb"] - figures["memory/host_gb"] < 0.15
        child.kill()


# The display

METRICS = {"rollout/success": 0.5, "rollout/reward": 1.25, "rollout/valid_rate": 0.99, "tokens_per_s/rollout": 1234.5}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def play(display: Display) -> None:
    with display:
        display.phase("warm start")
        display.start(2)
        for step in (1, 2):
            display.phase("rollout")
            display.phase("train")
            display.step(step, METRICS)
        display.note("a \x1b[31mnote\x1b[0m")
        display.finish("Learned it")


def test_off_a_terminal_there_are_plain_lines_only():
    stream = io.StringIO()
    play(Display(stream=stream))
    text = stream.getvalue()
    assert "\x1b" not in text and "\r" not in text
    lines = text.splitlines()
    assert [line.split("] ")[-1] for line in lines[:3]] == ["warm start …", "rollout …", "train …"]
    assert lines[3] == "step 1/2  success 50.0%  reward 1.250  valid 99.0%  tokens/s 1,234  ETA 0s"
    assert lines[4].startswith("step 2/2") and lines[5:] == ["a note", "Learned it"]


def test_on_a_terminal_the_panel_shows_the_figures_and_goes_away_at_the_end(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    display = Display("exp", stream=stream)
    logger = logging.getLogger("roll.test_display")
    handler = display.log_handler()
    logger.addHandler(handler)
    with display:
        display.start(4)
        display.phase("train")
        logger.warning("watch [bold]out[/bold]")
        for step in (1, 2):
            display.step(step, METRICS)
        with display.console.capture() as capture:
            display.console.print(display._render())
        display.finish("Learned it")
    logger.removeHandler(handler)
    panel = capture.get()
    for expected in ("train", "step 2/4", "50.0%", "1.250", "1,234", "ETA", "▅▅", "! watch [bold]out[/bold]"):
        assert expected in panel, panel
    text = stream.getvalue()
    assert "watch [bold]out[/bold]" in text, "log records are shown as they are, above the panel"
    assert "\x1b[?25l" in text and "\x1b[?25h" in text, "the cursor is hidden and shown again"
    assert "Learned it" in text.rsplit("\x1b[?25h", 1)[1]


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["plain", "terminal"])
@pytest.mark.parametrize(
    ("words", "shown"), [(("",), ""), (("\x1b[0m",), ""), (("%d steps", "no"), "%d steps ('no',)"), (("a\nb",), "a")]
)
def test_a_record_that_cannot_be_shown_as_it_is_ends_nothing(words, shown, stream):
    display, logger = Display(stream=stream), logging.Logger("a library's")
    logger.addHandler(display.log_handler())
    logger.warning(*words)
    assert list(display.warnings) == [shown]


def test_an_exception_passes_through_and_the_terminal_is_restored(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    stdout = sys.stdout
    with pytest.raises(KeyboardInterrupt), Display(stream=stream):
        raise KeyboardInterrupt
    assert stream.getvalue().endswith("\x1b[?25h") and sys.stdout is stdout


LONG = """
import os, sys
from roll.tracking.display import Display
display = Display()
display.start(10000)
for step in range(10000):
    display.step(step, {"rollout/success": 0.5})
display.finish("end")
print("finished", end="", file=sys.stderr, flush=True)
os._exit(7)
"""


def test_a_reader_that_goes_away_does_not_stop_the_run():
    with subprocess.Popen([sys.executable, "-c", LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        errors = child.stderr.read().decode()
    assert child.returncode == 7 and errors.endswith("finished")
    assert errors.count("the display's output is gone") == 1


def test_a_terminal_without_unicode_gets_question_marks_and_sparklines_have_a_width():
    raw = io.BytesIO()
    display = Display(stream=io.TextIOWrapper(raw, encoding="ascii", line_buffering=True))
    play(display)
    display.finish("28% → 79%")
    assert raw.getvalue().decode("ascii").splitlines()[-1] == "28% ? 79%"
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([0.0, 0.0, 1.0, 1.0, math.nan], 2) == "▁█"
    assert len(sparkline([0.3] * 1000, 40)) == 40
    assert sparkline([], 10) == ""


def test_the_interval_of_a_difference_is_newcombes():
    """The examples (a) and (h) of his table II, there as the difference of the first to the second."""
    assert difference_interval(48 / 80, 80, 56 / 70, 70) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert difference_interval(0 / 10, 10, 10 / 10, 10) == pytest.approx((0.6075, 1.0), abs=5e-5)


def test_the_time_left_counts_the_last_evaluation_and_the_checkpoints(monkeypatch):
    now = 0.0
    monkeypatch.setattr(display_module.time, "monotonic", lambda: now)
    stream = io.StringIO()
    display = Display(stream=stream)

    def spend(name: str, seconds: float) -> None:
        nonlocal now
        display.phase(name)
        now += seconds

    spend("eval", 20)  # before training
    spend("eval greedy", 10)
    display.start(4, eval_steps=2, save_steps=2)
    left = []
    for step in (1, 2, 3, 4):
        spend("train", 5)
        if step % 2 == 0:
            spend("eval", 20)
        if step == 4:
            spend("eval greedy", 10)
        display.step(step, {})
        left.append(stream.getvalue().splitlines()[-1].rpartition("ETA ")[2])
        if step % 2 == 0:
            spend("checkpoint", 7)
    # Three steps, two evaluations, a greedy one; no checkpoint has been timed yet. At the end, one is still to come.
    assert left == ["1m 05s", "40s", "42s", "7s"]


def measured(*evaluations: dict[str, float]) -> dict[str, Any]:
    """A summary's evaluations: after training, or before and after it."""
    return {"eval": dict(zip(("after",) if len(evaluations) == 1 else ("before", "after"), evaluations, strict=True))}


def success(before: float, after: float, **size: int) -> dict[str, Any]:
    return measured({"success": before, **size}, {"success": after, **size})


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        (success(0.284, 0.792, episodes=512) | {"status": "completed", "steps": 40, "wall_s": 312.4},
         "Learned: success 28.4% → 79.2% (+50.8 points, 95% interval +45.3 to +55.8) on 512 held-out episodes in 40 "
         "steps, 5m 12s; see FOLDER"),
        (success(0.30, 0.38, episodes=560), "Learned: success 30.0% → 38.0%"),
        # what is within noise is not called learning
        (success(0.30, 0.32, episodes=560),
         "No change beyond noise: success 30.0% → 32.0% (+2.0 points, 95% interval -3.4 to +7.4)"),
        (success(0.30, 0.22, episodes=560),
         "Worse than before: success 30.0% → 22.0% (-8.0 points, 95% interval -13.1 to -2.9)"),
        (success(0.0, 0.25, episodes=8), "No change beyond noise: success 0.0% → 25.0% (+25.0 points"),
        (success(0.5, 0.4), "No change beyond noise: success 50.0% → 40.0% (-10.0 points); see FOLDER"),
        ({"eval": {"before": {"success": 0.3}}, "status": "interrupted", "steps": 3},
         "Interrupted. Not evaluated after training; success before was 30.0% in 3 steps"),
        ({}, "No evaluation; "),
        ({"status": "completed", "learned": "learned: 96% attained",
          "eval": {"before": {"accuracy": 0.1, "prompts": 200}, "after": {"accuracy": 0.95, "prompts": 200}}},
         "Ended as learned: 96% attained. Learned: accuracy 10.0% → 95.0%"),
        (measured({"accuracy": 0.0}), "Accuracy after training: 0.0%"),  # val_before_train: false, nothing learned
        # nothing answers there
        ({"steps": 0, "eval": {"before": {"loss": 0.5, "perplexity": 1.6}}},
         "Held-out loss: 0.5000 nats per token in 0 steps;"),
        ({"steps": 3, "eval": {"before": {"loss": 0.5, "perplexity": 1.6}}},
         "Not evaluated after training; held-out loss bef"),
        (measured({"loss": 0.25}) | {"steps": 4}, "Held-out loss after training: 0.2500 in 4 steps"),
        (measured({"loss": 2.3, "perplexity": 9.97, "token_accuracy": 0.5, "success": 0.0, "episodes": 16},
                  {"loss": 1.5, "perplexity": 4.48, "token_accuracy": 0.6, "success": 0.125, "episodes": 16}),
         "Held-out loss 2.3000 → 1.5000 nats per token; accuracy of 16 answers 0.0% → 12.5%;"),
        (measured({"loss": 0.6931, "preference_accuracy": 0.5, "margin": 0.0, "episodes": 0},
                  {"loss": 0.5, "preference_accuracy": 0.75, "margin": 0.1, "episodes": 0}),
         "Held-out preference accuracy 50.0% → 75.0%, loss 0.6931 → 0.5000;"),
        (measured({"loss": 0.7, "pairwise_accuracy": 0.4, "calibration_error": 0.3},
                  {"loss": 0.6, "pairwise_accuracy": 0.9, "calibration_error": 0.2}),
         "Held-out accuracy on pairs 40.0% → 90.0%, loss 0.7000 → 0.6000;"),
        (measured({"loss": 3.0, "divergence": 0.5, "nll": 2.0}, {"loss": 2.0, "divergence": 0.25, "nll": 1.0}),
         "Held-out divergence from the teacher 0.5000 → 0.2500, loss 3.0000 → 2.0000;"),
        (measured({"loss": 0.6, "pairwise_accuracy": 0.9}),
         "Held-out accuracy on pairs after training: 90.0%, loss 0.6000;"),
    ],
)  # fmt: skip
def test_the_closing_line_says_what_was_learned_and_where_to_look(tmp_path, summary, words):
    assert closing_line(summary, tmp_path).startswith(words.replace("FOLDER", str(tmp_path)))
    (tmp_path / "renders").mkdir()
    (tmp_path / "renders" / "index.html").touch()
    assert closing_line(summary, tmp_path).endswith(f"watch {tmp_path / 'renders' / 'index.html'}")


def test_progress_is_silent_off_a_terminal_until_nothing_was_said_for_long(monkeypatch):
    out = io.StringIO()
    display = Display("run", stream=out)
    display.phase("rollout")
    said = out.getvalue()
    display.progress(1, 32, "groups")
    assert out.getvalue() == said
    monkeypatch.setattr(display, "_last_line", display._last_line - 60)
    display.progress(2, 32, "groups")
    assert out.getvalue().endswith("rollout: 2/32 groups\n")


def test_a_fresh_run_moves_what_an_earlier_one_left_aside(tmp_path):
    for number in range(3):
        run = RunFolder(tmp_path, "demo")
        assert run.claim(fresh=True) == (tmp_path / f"demo.{number}" if number else None)
        assert not run.metrics_path.exists()
        run.log_metrics(number, {"rollout/success": 0.5})
        run.write_summary({"status": "completed"})
        run.close()
    assert json.loads((tmp_path / "demo.2/metrics.jsonl").read_text())["step"] == 1


def test_a_resumed_run_stays_in_its_folder_which_no_other_may_hold(run, tmp_path):
    run.claim(fresh=True)
    run.write_summary({"status": "interrupted"})
    other = RunFolder(tmp_path, "exp")
    with pytest.raises(ValueError, match=r"exp is in use by another run"):
        other.claim(fresh=False)
    run.close()
    assert other.claim(fresh=False) is None
    assert json.loads(other.summary_path.read_text()) == {"status": "interrupted"}
    other.close()
