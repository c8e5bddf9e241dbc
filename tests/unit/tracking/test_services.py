"""Each service with its real package, offline: metrics, the configuration without secrets, tables of answers."""

import importlib.util
import json
import math
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from roll.__main__ import main
from roll.data.requests import Completion, FinishReason
from roll.pipeline.rollouts import answer_row
from roll.rollout.types import EpisodeEnd, Trajectory, Turn
from roll.tracking.run import RunFolder
from roll.tracking.trackers import SERVICES, AnswerRow, MultiTracker, TrackerContext

SECRET = "hf_123456789"
CONFIG = {"hf_token": SECRET, "seed": 7, "actor_train": {"model_args": {"dtype": "fp32"}}}
ROWS: list[AnswerRow] = [
    {"tag": "sums", "prompt": "1+1=", "answer": "Two, €2", "score": 0.5, "success": True},
    {"tag": "sums", "prompt": "2+2=", "answer": "5", "score": 0.0, "success": False},
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "exp" / "logs" / "trackio"))
    folder = RunFolder(tmp_path, "exp")
    yield folder
    folder.close()


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


def test_options_of_a_service_are_checked_before_the_start(capsys):
    assert main(["validate", "rlvr_math", "track_with=mlflow", "tracker_kwargs={experiment: x}"]) == 2
    assert "did you mean 'experiment_name'" in " ".join(capsys.readouterr().err.split())


def test_an_episode_becomes_a_row():
    completion, ids = Completion("r", [5], [-0.5], FinishReason.STOP, 0), np.array([1, 2], dtype=np.int32)
    said = (("####", "Up", 1.0), ("##", "Down", 0.5))
    turns = tuple(Turn(ids, completion, text, seen, text, reward, 0.0, "k") for seen, text, reward in said)
    trajectory = Trajectory("boxes", 1, 0, 5, turns, EpisodeEnd.TERMINATED, True, "", True)
    expected = {"tag": "boxes", "prompt": "####", "answer": "Up\n##\nDown", "score": 1.5, "success": True}
    assert answer_row(trajectory) == expected
