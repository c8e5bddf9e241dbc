"""Trackers of metrics: TensorBoard, plain lines, services (an extra each, offline unless asked); several at once."""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from roll.tracking.redact import redact
from roll.tracking.run import RunFolder, to_plain
from roll.utils.foreign import Fault
from roll.utils.registry import Registry

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

logger = logging.getLogger(__name__)


class AnswerRow(TypedDict):
    """An episode of an evaluation, as a row of a table."""

    tag: str
    prompt: str
    answer: str
    """Text that the policy has written, and between its turns what it has read."""
    score: float
    success: bool


class Tracker(Protocol):
    """Takes the metrics of a step. Names are ``area/what``: ``rollout/reward``, ``time/train``.

    One that has tables also takes the answers of an evaluation: ``log_answers(rows, step)``.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def finish(self) -> None: ...


@dataclass(frozen=True)
class TrackerContext:
    """Facts about the run that every tracker gets; its own options are keyword arguments."""

    run: RunFolder
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration, for services that show it; secrets are removed before it is sent."""
    resumed_step: int | None = None
    """The step of the checkpoint that the run goes on from; records after it are void."""


class TrackerFactory(Protocol):
    """A tracker class: the context first, then its options as keywords."""

    def __call__(self, context: TrackerContext, /, **options: Any) -> Tracker: ...


TRACKERS: Registry[TrackerFactory] = Registry("tracker")
"""Names for ``track_with``; outside code is reached as ``package.module:Class``."""

TRACKERS.register("tensorboard", "roll.tracking.trackers:TensorboardTracker")
TRACKERS.register("wandb", "roll.tracking.trackers:WandbTracker")
TRACKERS.register("mlflow", "roll.tracking.trackers:MlflowTracker")
TRACKERS.register("swanlab", "roll.tracking.trackers:SwanlabTracker")
TRACKERS.register("trackio", "roll.tracking.trackers:TrackioTracker")
TRACKERS.register("stdout", "roll.tracking.trackers:StdoutTracker")

SERVICES = ("wandb", "mlflow", "swanlab", "trackio")
"""Trackers whose packages are extras of the same names."""


class MultiTracker:
    """Passes every step's metrics to several trackers. One that fails is reported once, then disabled."""

    def __init__(self, names: str | Sequence[str], kwargs: Mapping[str, Any] | None, context: TrackerContext) -> None:
        """Makes the trackers that ``track_with`` names.

        Raises:
            UnknownNameError: no such tracker.
            ValueError: an option that a tracker does not take.
            ImportError: a tracker's package is missing; the message says how to install it.
        """
        self._trackers: dict[str, Tracker] = {}
        for name, options in tracker_options(names, kwargs).items():
            self._trackers[name] = TRACKERS.get(name)(context, **options)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._tell("log", metrics, step)

    def log_answers(self, rows: Sequence[AnswerRow], step: int) -> None:
        """Hands the answers of an evaluation to those that have tables, before the step's metrics."""
        self._tell("log_answers", rows, step)

    def _tell(self, method: str, what: object, step: int) -> None:
        for name, tracker in list(self._trackers.items()):
            if (take := getattr(tracker, method, None)) is None:
                continue
            with Fault() as fault:  # a network or a disk behind it must not end the training that it watches
                take(what, step)
            if fault.error is not None:
                words = "tracker %s failed at step %d and is off for the rest of the run"
                logger.error(words, name, step, exc_info=fault.error)
                del self._trackers[name]

    def finish(self) -> None:
        for name, tracker in self._trackers.items():
            with Fault() as fault:  # as above: the run is over and its results are safe elsewhere
                tracker.finish()
            if fault.error is not None:
                logger.error("tracker %s failed to finish", name, exc_info=fault.error)
        self._trackers = {}


def tracker_options(names: str | Sequence[str], kwargs: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Splits ``tracker_kwargs`` into each tracker's options, in the order of ``track_with``, and checks them.

    ``tracker_kwargs`` is either keyed by tracker (``{wandb: {project: x}}``) or, with a single tracker, flat
    (``{project: x}``). Making no tracker, it can be asked before a run starts.

    Raises:
        UnknownNameError: no such tracker.
        ValueError: all options that trackers do not take, or a flat mapping with several trackers.
    """
    chosen = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    for name in chosen:
        TRACKERS.check(name)
    given, wrong = dict(kwargs or {}), list[str]()
    if given and all(key in chosen or key in TRACKERS for key in given):
        text = "this tracker is not in track_with, which is"
        wrong += [f"tracker_kwargs.{key}: {text} {chosen}" for key in given if key not in chosen]
        by_name = {name: given.get(name) or {} for name in chosen}
    elif given and len(chosen) != 1:
        raise ValueError(
            f"tracker_kwargs: got keys {sorted(given)}, expected one section per tracker, keyed by {chosen}"
        )
    else:
        by_name = dict.fromkeys(chosen, given)
    wrong += [each for name, options in by_name.items() for each in _option_errors(name, options)]
    if wrong:
        raise ValueError("; ".join(wrong))
    return {name: dict(options) for name, options in by_name.items()}


def _option_errors(name: str, options: Any) -> Iterator[str]:
    """Names of a tracker's options, and their values where its signature says a type."""
    if not isinstance(options, Mapping):
        yield f"tracker_kwargs.{name}: got {options!r}, expected a mapping of options"
        return
    tracker = TRACKERS.get(name)
    parameters = list(inspect.signature(tracker).parameters.values())[1:]
    yield from _value_errors(name, options, _types_of(tracker))
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            expected = ", ".join(known) or "no options"
            yield f"tracker_kwargs: {name} does not know {key!r}, expected {expected}{hint}"


def _types_of(tracker: Any) -> dict[str, Any]:
    try:
        return get_type_hints(tracker.__init__ if inspect.isclass(tracker) else tracker)
    except (AttributeError, NameError, TypeError):  # a module that imports the types for a type checker alone
        return {}


def _value_errors(name: str, options: Mapping[str, Any], types: Mapping[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        if key not in types:
            continue
        try:
            TypeAdapter(types[key]).validate_python(value, strict=True)
        except ValidationError as error:
            told = "; ".join(dict.fromkeys(each["msg"] for each in error.errors(include_input=False)))
            yield f"tracker_kwargs: {name}.{key} is {type(value).__name__}: {told}"
        except PydanticSchemaGenerationError:  # a class of the user's, which pydantic has no rule for
            continue


class TensorboardTracker:
    """Scalars as TensorBoard event files; needs the ``tensorboard`` package only, not torch."""

    def __init__(self, context: TrackerContext, *, log_dir: str | None = None, flush_secs: int = 30) -> None:
        """``log_dir`` defaults to ``logs/tensorboard`` in the run's folder."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        folder = log_dir or str(context.run.logs / "tensorboard")
        self._writer = EventFileWriter(folder, flush_secs=flush_secs)
        if context.resumed_step is not None:  # makes TensorBoard forget the steps that are taken again
            restart = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=context.resumed_step + 1, session_log=restart))
        if context.config:
            self._writer.add_event(_config_event(context))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        event = self._event(wall_time=time.time(), step=step)
        for name, value in metrics.items():
            event.summary.value.add(tag=name, simple_value=float(value))
        self._writer.add_event(event)

    def finish(self) -> None:
        self._writer.close()


def _config_event(context: TrackerContext) -> Event:
    """The configuration for the page of texts, as a Markdown block of code."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.plugins.text.metadata import create_summary_metadata

    text = yaml.safe_dump(to_plain(redact(context.config)), sort_keys=False, allow_unicode=True)
    event = Event(wall_time=time.time(), step=context.resumed_step or 0)
    tensor = TensorProto(dtype="DT_STRING", string_val=[textwrap.indent(text, " " * 4).encode()])
    event.summary.value.add(tag="config", tensor=tensor, metadata=create_summary_metadata("config", ""))
    return event


class StdoutTracker:
    """One plain line per step on standard output."""

    def __init__(self, context: TrackerContext) -> None:
        del context

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = " ".join(f"{name}={value:.6g}" for name, value in sorted(metrics.items()))
        sys.stdout.write(f"step={step} {values}\n")  # looked up at each call: the live display replaces sys.stdout
        sys.stdout.flush()

    def finish(self) -> None:
        sys.stdout.flush()


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
