"""Tracking services: Weights & Biases, MLflow, SwanLab, Trackio; an extra each, offline unless asked."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from roll.tracking.files import to_plain
from roll.tracking.redact import redact
from roll.tracking.trackers import AnswerRow, TrackerContext

ANSWERS = "answers"
"""Name of the table of held-out answers."""
_COLUMNS = list(AnswerRow.__annotations__)
_MLFLOW_PARAMS, _MLFLOW_VALUE = 100, 6000
"""Parameters of a request and characters of a value, at most, as MLflow's servers take them."""


def service_package(name: str) -> Any:
    """A service's package, which is the name of its tracker and of its extra.

    Raises:
        ImportError: it is not installed; the message says how it is.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"track_with: {name} is not installed; run: pip install 'roll-rl[{name}]'") from error


class _RunTracker:
    """Common part of the services whose run takes a step's metrics as they are."""

    _run: Any

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._run.finish()


class WandbTracker(_RunTracker):
    """Weights & Biases. Without ``WANDB_API_KEY`` (or ``api_key``) it works offline, to be sent by ``wandb sync``."""

    def __init__(
        self,
        context: TrackerContext,
        *,
        project: str = "roll",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
        id: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        api_key: str | None = None,
        log_dir: str | None = None,
    ) -> None:
        """Options are those of ``wandb.init``; ``log_dir`` defaults to ``logs`` in the run's folder."""
        wandb = self._wandb = service_package("wandb")
        if api_key:
            wandb.login(key=api_key)
        if mode is None and "WANDB_MODE" not in os.environ:  # with neither, wandb would ask at the terminal
            mode = "online" if api_key or os.environ.get("WANDB_API_KEY") else "offline"
        self._run = wandb.init(
            project=project,
            name=name or context.run.path.name,
            entity=entity,
            group=group,
            job_type=job_type,
            tags=tags,
            notes=notes,
            id=id,
            resume="allow" if id else None,
            mode=mode,
            dir=log_dir or str(context.run.logs),
            config=_shown(context),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log_answers(self, rows: Sequence[AnswerRow], step: int) -> None:
        self._run.log({ANSWERS: self._wandb.Table(columns=_COLUMNS, data=_cells(rows))}, step=step)


class MlflowTracker:
    """MLflow. Without ``MLFLOW_TRACKING_URI`` (or ``tracking_uri``) a database in the run's folder, for ``mlflow ui``.

    A resumed run is a new one there, unless ``run_id`` names that which goes on.
    """

    def __init__(
        self,
        context: TrackerContext,
        *,
        tracking_uri: str | None = None,
        experiment_name: str = "roll",
        run_name: str | None = None,
        run_id: str | None = None,
        description: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        service_package("mlflow")
        from mlflow import MlflowClient

        folder = context.run.logs.absolute()
        given = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=given or f"sqlite:///{folder / 'mlflow.db'}")
        if run_id is None:
            experiment = self._client.get_experiment_by_name(experiment_name)
            store = None if given else (folder / "mlflow").as_uri()  # else ./mlruns
            number = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(experiment_name, artifact_location=store)
            )
            described = {"mlflow.note.content": description} if description else {}
            name = run_name or context.run.path.name
            run_id = self._client.create_run(number, run_name=name, tags={**(tags or {}), **described}).info.run_id
            self._log_config(run_id, _shown(context))
        self._run_id = run_id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        found = [Metric(_mlflow_name(name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=found)

    def log_answers(self, rows: Sequence[AnswerRow], step: int) -> None:
        columns: dict[str, Any] = {name: [row[name] for row in rows] for name in _COLUMNS}  # type: ignore[literal-required]
        self._client.log_table(self._run_id, columns, f"{ANSWERS}/{step:05d}.json")

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)

    def _log_config(self, run_id: str, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(_mlflow_name(key), str(value)[:_MLFLOW_VALUE]) for key, value in _leaves(config)]
        for start in range(0, len(params), _MLFLOW_PARAMS):
            self._client.log_batch(run_id, params=params[start : start + _MLFLOW_PARAMS])


class SwanlabTracker(_RunTracker):
    """SwanLab. Without ``SWANLAB_API_KEY`` (or ``api_key``) it works offline, to be sent by ``swanlab sync``."""

    def __init__(
        self,
        context: TrackerContext,
        *,
        project: str = "roll",
        name: str | None = None,
        workspace: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: Sequence[str] | None = None,
        description: str | None = None,
        id: str | None = None,
        mode: Literal["online", "local", "offline", "disabled"] | None = None,
        api_key: str | None = None,
        log_dir: str | None = None,
    ) -> None:
        """Options are those of ``swanlab.init``; ``log_dir`` defaults to ``logs/swanlab`` in the run's folder."""
        swanlab = self._swanlab = service_package("swanlab")
        if api_key:
            swanlab.login(api_key=api_key)
        if mode is None and "SWANLAB_MODE" not in os.environ:
            mode = "online" if api_key or os.environ.get("SWANLAB_API_KEY") else "offline"
        self._run = swanlab.init(
            project=project,
            name=name or context.run.path.name,
            workspace=workspace,
            group=group,
            job_type=job_type,
            tags=None if tags is None else list(tags),
            description=description,
            id=id,
            resume="allow" if id else None,
            mode=mode,
            log_dir=log_dir or str(context.run.logs / "swanlab"),
            config=_shown(context),
            settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
        )

    def log_answers(self, rows: Sequence[AnswerRow], step: int) -> None:
        table = self._swanlab.echarts.Table()
        table.add(_COLUMNS, _cells(rows))
        self._run.log({ANSWERS: table}, step=step)


class TrackioTracker(_RunTracker):
    """Trackio. Without ``space_id`` or ``server_url`` a database in the run's folder, for ``trackio show``."""

    def __init__(
        self,
        context: TrackerContext,
        *,
        project: str = "roll",
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        dataset_id: str | None = None,
        bucket_id: str | None = None,
        server_url: str | None = None,
        private: bool | None = None,
        auto_log_gpu: bool | None = False,
        gpu_log_interval: float = 10.0,
        log_dir: str | None = None,
    ) -> None:
        """Options are those of ``trackio.init``; ``log_dir`` is ``TRACKIO_DIR``, or ``logs/trackio`` of the run."""
        folder = log_dir or os.environ.get("TRACKIO_DIR") or str(context.run.logs / "trackio")
        os.environ["TRACKIO_DIR"] = str(Path(folder).absolute())  # read when it is imported
        self._trackio = service_package("trackio")
        self._run = self._trackio.init(
            project=project,
            name=name or context.run.path.name,
            group=group,
            space_id=space_id,
            dataset_id=dataset_id,
            bucket_id=bucket_id,
            server_url=server_url,
            private=private,
            config=_shown(context),
            resume="never" if context.resumed_step is None else "allow",
            embed=False,
            auto_log_gpu=auto_log_gpu,
            gpu_log_interval=gpu_log_interval,
            auto_log_cpu=False,
        )

    def log_answers(self, rows: Sequence[AnswerRow], step: int) -> None:
        self._run.log({ANSWERS: self._trackio.Table(columns=_COLUMNS, data=_cells(rows))}, step=step)


def _shown(context: TrackerContext) -> Any:
    """The configuration without its secrets, as plain values."""
    return to_plain(redact(context.config))


def _cells(rows: Sequence[AnswerRow]) -> list[list[Any]]:
    return [[row[name] for name in _COLUMNS] for row in rows]  # type: ignore[literal-required]


def _leaves(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _mlflow_name(name: str) -> str:
    """A name of the characters that MLflow knows: ``pass@8`` is ``pass_8``."""
    return re.sub(r"[^\w\-. /]", "_", name)
