"""What the terminal shows while a run starts, and the exit code of one that a watch stops."""

import io
import json
import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from roll.configs.agentic import AgenticConfig
from roll.configs.engines.card import kind_of
from roll.configs.loader import load_config
from roll.distributed.cluster.cluster import Worker
from roll.distributed.cluster.resources import plan_placement, pretend_nodes
from roll.pipeline import launch
from roll.pipeline.cli import EXIT_STOPPED
from roll.pipeline.programs import AGENTIC
from roll.pipeline.session import StoppedByWatchError
from roll.preflight.choices import role_requests
from roll.tracking.display import Display


class Stop(Exception):
    """Ends a start."""


def test_the_table_of_roles_is_whole_on_a_terminal_of_80_columns_and_in_the_log_file(monkeypatch, tmp_path):
    def stop(plan: Any) -> None:
        raise Stop

    nodes = pretend_nodes(2, 1)
    monkeypatch.setattr(launch, "discover_nodes", lambda: nodes)
    monkeypatch.setattr(launch, "create_placement", stop)
    monkeypatch.setattr(out := io.StringIO(), "isatty", lambda: True)
    display = Display(stream=out)
    display.console = Console(file=out, width=80, force_terminal=True, color_system=None, highlight=False)
    config = load_config(AgenticConfig, "agentic_sokoban")
    session: Any = SimpleNamespace(display=display)
    monkeypatch.setattr(root := logging.getLogger("roll"), "level", logging.INFO)
    monkeypatch.setattr(root, "handlers", [display.log_handler(), logging.FileHandler(tmp_path / "roll.log")])
    with pytest.raises(Stop), launch.start_clusters(config, session, {}):
        pass
    table = plan_placement(role_requests(config), nodes).describe()
    assert [line.rstrip() for line in out.getvalue().splitlines()] == table
    assert (tmp_path / "roll.log").read_text().splitlines() == table


@pytest.mark.parametrize("dead", [[], ["gcs_server"]], ids=["alive", "dead"])
def test_ray_is_asked_to_end_workers_only_while_its_daemons_are_there(monkeypatch, dead):
    """Without its head each such call waits for a minute, after which Ray ends the process, and no reason is left."""
    calls: list[str] = []

    def part(name: str) -> Any:
        ends = dict.fromkeys(("shutdown", "remove"), lambda: calls.append(name))
        return SimpleNamespace(launch=lambda: None, wait_ready=lambda: None, **ends)

    monkeypatch.setattr(launch, "discover_nodes", lambda: pretend_nodes(1, 2))
    monkeypatch.setattr(launch, "create_placement", lambda plan: part("placement"))
    monkeypatch.setattr(launch, "_cluster", lambda config, name, *_: part(name))
    monkeypatch.setattr(launch, "dead_daemons", lambda: dead)
    config = load_config(AgenticConfig, "agentic_sokoban")
    session: Any = SimpleNamespace(display=Display(stream=io.StringIO()), phase=lambda name: nullcontext())
    session.folder = SimpleNamespace(logs=Path("logs"), profile=Path("profile"))
    workers = dict.fromkeys(map(kind_of, config.clusters), Worker)
    with pytest.raises(Stop), launch.start_clusters(config, session, workers):
        raise Stop
    assert calls == ([] if dead else [*config.clusters, "placement"])


def test_a_run_that_a_watch_stops_has_an_exit_code_and_a_status_of_its_own(monkeypatch, tmp_path):
    for name in ("start_of", "describe_template", "relax_gc", "keep_freed_memory", "Roles", "RunContext"):
        monkeypatch.setattr(launch, name, lambda *_: ())
    for name in ("ray_session", "start_clusters", "StallWatch"):
        monkeypatch.setattr(launch, name, lambda *_, **__: nullcontext({}))

    def stopped(*_: object) -> None:
        raise StoppedByWatchError("dead_groups")

    config: Any = AgenticConfig(output_dir=str(tmp_path), exp_name="run", track_with=[])
    assert launch.launch(config, AGENTIC, stopped, {}, needs=()) == EXIT_STOPPED == 3
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "stopped"
    assert not (tmp_path / "run" / "logs" / "traceback.txt").exists()
