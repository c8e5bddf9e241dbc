"""An engine in its own process: calls, their errors, and its death, with a small engine of the tests' own."""

import os
import pickle
import signal
import socket
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.distributed.strategy.generation import engine_process
from roll.distributed.strategy.generation.engine_process import EngineCallError, EngineProcess, EngineStoppedError
from tests.support.processes import gone

SERVER = Path(engine_process.__file__).parent
"""Both sides import the standard library alone; an engine may do without the package's other imports."""

ENGINE = """
    import asyncio, os, pickle, subprocess, sys
    sys.path.insert(0, SERVER)
    from engine_process import EngineServer

    class Engine:
        def __init__(self, server):
            self.server, self.event = server, asyncio.Event()

        async def add(self, a, b):
            return {"sum": a + b}

        async def wait(self):
            await self.event.wait()
            return "woken"

        async def wake(self):
            self.event.set()

        async def refuse(self):
            raise ValueError("got 3, expected 4")

        async def fail(self):
            raise OSError("no disk")

        async def spawn(self):
            return subprocess.Popen(["sleep", "600"]).pid

        async def die(self):
            self.server.say("out of memory")
            os._exit(3)

        async def die_while_answering(self):
            self.server._socket.sendall(pickle.dumps((0, True, "x" * 1000))[:500])
            os._exit(3)

    server = EngineServer(int(sys.argv[1]))
    asyncio.run(server.serve(Engine(server)))
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    script = tmp_path / "engine.py"
    script.write_text(f"SERVER = {str(SERVER)!r}\n{textwrap.dedent(ENGINE)}")
    process = EngineProcess([sys.executable, str(script)], dict(os.environ), "the engine")
    yield process
    process.close()


def test_calls_run_side_by_side_and_bring_their_results(engine):
    waiting = engine.submit("wait")
    assert engine.submit("add", 2, 3).result(20) == {"sum": 5}
    assert not waiting.done()
    engine.submit("wake")
    assert waiting.result(20) == "woken"


def test_an_error_belongs_to_its_call(engine):
    with pytest.raises(ValueError, match="got 3, expected 4"):
        engine.submit("refuse").result(20)
    with pytest.raises(EngineCallError, match="OSError: no disk"):
        engine.submit("fail").result(20)
    assert engine.submit("add", 1, 1).result(20) == {"sum": 2}


@pytest.mark.parametrize(
    ("death", "words"), [("die", "the engine died: out of memory"), ("die_while_answering", "exit code 3")]
)
def test_the_last_words_of_an_engine_reach_all_who_wait(engine, death, words):
    waiting = engine.submit("wait")
    engine.submit(death)
    with pytest.raises(EngineStoppedError, match=words):
        waiting.result(20)
    with pytest.raises(EngineStoppedError, match=words):
        engine.submit("add", 1, 1)


def test_an_engine_ends_when_its_caller_dies_within_a_call(engine):
    assert engine.submit("add", 1, 1).result(20) == {"sum": 2}
    engine._socket.sendall(pickle.dumps((1, "add", (2, 3)))[:-5])
    engine._socket.shutdown(socket.SHUT_WR)
    assert gone(engine._process.pid)


def test_a_killed_engine_fails_its_callers_and_takes_its_processes_along(engine):
    child = engine.submit("spawn").result(20)
    waiting = engine.submit("wait")
    os.kill(engine._process.pid, signal.SIGKILL)
    with pytest.raises(EngineStoppedError, match="exit code -9"):
        waiting.result(20)
    assert gone(child)


def test_close_stops_the_engine_with_its_processes(engine):
    child = engine.submit("spawn").result(20)
    waiting = engine.submit("wait")
    engine.close()
    with pytest.raises(EngineStoppedError, match="the engine was shut down"):
        waiting.result(20)
    assert gone(child) and gone(engine._process.pid)
    engine.close()  # twice is as good as once
