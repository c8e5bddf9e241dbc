"""What holds for all tests."""

import asyncio
import atexit
import functools
import gc
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from roll.utils.start import quick_start

quick_start()

# Runs start hundreds of processes; where bytecode is not kept, each compiles what it imports of roll, half a second.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A machine with other work draws and runs examples slowly, which says nothing of the code.
settings.register_profile("thorough", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("roll", settings.get_profile("thorough"), max_examples=25)
settings.register_profile("quick", settings.get_profile("thorough"), max_examples=8)  # --hypothesis-profile=quick
settings.load_profile("roll")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine has an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


LOGS = pytest.StashKey[object]()
"""pytest's plugin that catches logs."""


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """Deals out files to processes; those that need the same processes or imports share one, which has them once."""

    def _split_scope(self, nodeid: str) -> str:
        return lane_of(nodeid.partition("::")[0])


LANES = {
    "Ray": re.compile(r"\b(ray_cluster|ray_session|launch|rlvr|offline|warm_workers|local_clusters)\b"),
    "ranks": re.compile(r"\b(run|start)_ranks\b|import .*\bmeasure\b"),
    "generators": re.compile(r"\btests.support.contract\b"),
}
"""What stands in files that need Ray's cluster, the ranks of trainers, or vLLM."""


@functools.cache
def lane_of(file: str) -> str:
    """One of ``LANES``, or the file itself; what the files of tests/unit need is soon there."""
    if file.startswith("tests/unit/"):
        return file
    text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
    return next((lane for lane, words in LANES.items() if words.search(text)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes | None:
    return Lanes(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Processes begin with the lanes, which are longer than any file."""
    if hasattr(config, "workerinput"):
        first = [*LANES]
        lanes = [lane_of(item.nodeid.partition("::")[0]) for item in items]
        order = sorted(range(len(items)), key=lambda n: first.index(lanes[n]) if lanes[n] in first else len(first))
        items[:] = [items[n] for n in order]


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Takes out the plugin that catches logs: six times a test, it looks through all loggers that there are."""
    session.stash[LOGS] = session.config.pluginmanager.unregister(name="logging-plugin")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Puts it back for a test that asks for logs."""
    catching = item.session.stash[LOGS] if "caplog" in getattr(item, "fixturenames", ()) else None
    if catching:
        item.config.pluginmanager.register(catching, "logging-plugin")
    result = yield
    if catching:
        item.config.pluginmanager.unregister(catching)
    return result


def pytest_collection_finish() -> None:
    """Who looks for garbage, as engines often do, need not look among all that tests have imported: seconds each."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries complain of what is still there at the very end


@pytest.fixture(scope="module", autouse=True)
def process_groups_end_with_their_file() -> Iterator[None]:
    """Leaves no process group behind: which file comes next in this process is up to the scheduler of the tests."""
    yield
    if state := sys.modules.get("megatron.core.parallel_state"):
        state.destroy_model_parallel()
    if groups := sys.modules.get("deepspeed.utils.groups"):
        importlib.reload(groups)  # it keeps the groups in its globals
    if (dist := sys.modules.get("torch.distributed")) and dist.is_initialized():
        dist.destroy_process_group()
