"""Agent programs in the sandbox: what they see, what they reach, and what ends them."""

import json
import socket
import sys
import time
from pathlib import Path

import pytest

from roll.configs.agent import AgentSandboxConfig
from roll.extras.sandbox import cell
from roll.rewards.types import SandboxUnavailableError
from roll.rollout.agents.task import AgentError
from tests.support.rollouts import Engine
from tests.support.said_engine import ASK, GOOD, marked, play, script


def setup_module() -> None:
    try:
        cell.Cell(AgentSandboxConfig(), [])
    except SandboxUnavailableError as error:
        pytest.skip(f"no sandbox: {error}", allow_module_level=True)


def test_a_program_in_the_sandbox_sees_its_folder_and_reaches_the_endpoint_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    (tmp_path / "metrics.jsonl").write_text("the run's own")
    (tmp_path / "template" / "src").mkdir(parents=True)
    (tmp_path / "template" / "src" / "a.py").write_text("1")
    program = tmp_path / "agent.py"
    program.write_text(
        ASK
        + """
import socket, sys
def tried(action):
    try:
        return repr(action())
    except OSError as error:
        return error.strerror
open("src/b.py", "w").write("2")
seen = {
    "files": sorted(os.listdir("src")),
    "run": tried(lambda: os.listdir(os.path.dirname(__file__))),
    "own": tried(lambda: open(__file__, "a")),
    "etc": os.listdir("/etc"),
    "home": os.environ["HOME"],
    "secret": "WANDB_API_KEY" in os.environ,
    "colour": os.environ["COLOUR"],
    "other": tried(lambda: socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5)),
    "world": tried(lambda: socket.create_connection(("192.0.2.1", 80), 5)),
    "raw": tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
    "vsock": tried(lambda: socket.socket(40, socket.SOCK_STREAM)),
}
open(os.environ["ROLL_ANSWER"], "w").write(json.dumps(seen) + answer)
"""
    )
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        command = ["python", str(program), str(other.getsockname()[1])]
        more = {"template": str(tmp_path / "template"), "env": {"COLOUR": "blue"}}
        episode = play(Engine(GOOD), command=command, sandbox={}, **more)
    assert episode.success
    seen = json.loads(episode.final_observation.removesuffix(GOOD))
    assert seen["files"] == ["a.py", "b.py"] and not (tmp_path / "template" / "src" / "b.py").exists()
    assert seen["run"] == "['agent.py']" and seen["own"] in ("Read-only file system", "Permission denied")
    assert seen["home"] == "/tmp" and seen["etc"] == ["ld.so.cache"] * Path("/etc/ld.so.cache").exists()
    assert (seen["secret"], seen["colour"]) == (False, "blue")
    assert seen["other"] == "Connection refused" and seen["world"] == "Network is unreachable"
    assert seen["raw"] == seen["vsock"] == "Operation not permitted"


# No process uses too much; together they do.
TOGETHER = "import os, time\nfor _ in range(3):\n  os.fork()\nx = b'1' * (60 << 20)\ntime.sleep(60)"
FILES = "import time\nfor i in range(4): open(f'{i}', 'wb').write(bytes(1 << 20))\ntime.sleep(60)"


@pytest.mark.parametrize(
    ("program", "limits", "told"),
    [
        ("bytearray(1 << 28)", {"memory_mb": 100}, "exit code 1: (?s:.*)MemoryError"),
        (TOGETHER, {"memory_mb": 100}, "used more than agent.sandbox.memory_mb=100"),
        ("open('big', 'wb').write(bytes(2 << 20))", {"file_mb": 1}, "File too large|exit code 153"),
        (FILES, {"folder_mb": 1}, "wrote more than agent.sandbox.folder_mb=1"),
        ("while True: pass", {"cpu_seconds": 1}, "exit code 137|exit code 152"),
    ],
)
def test_what_is_more_than_a_command_may_use_ends_it(program, limits, told, monkeypatch):
    monkeypatch.setattr(cell, "_LOOK_S", 0.05)
    with pytest.raises(AgentError, match=told):
        play(Engine(GOOD), command=script(program), sandbox=limits, timeout=60)


def test_a_program_that_forks_and_stays_is_ended_with_its_sandbox():
    mark = f"agent-mark-{time.time_ns()}"
    forks = f"""
        import os
        {mark!r}
        while True:
            try:
                os.fork()
            except OSError:
                pass
    """
    with pytest.raises(AgentError, match=r"took longer than agent.timeout=2 s"):
        play(Engine(GOOD), command=script(forks), sandbox={"processes": 20}, timeout=2)
    assert marked(mark) == []


def test_a_sandbox_that_cannot_be_set_up_is_named(monkeypatch, tmp_path):
    broken = tmp_path / "inner.py"
    broken.write_text("raise SystemExit('no namespaces today')")
    monkeypatch.setattr(cell, "INNER", broken)
    with pytest.raises(AgentError, match=r"agent.sandbox: the isolation failed: no namespaces today"):
        play(Engine(GOOD), command=script(ASK), sandbox={})
    with pytest.raises(ValueError, match="expected an absolute path that exists"):
        play(Engine(GOOD), command=[sys.executable], sandbox={"readable": ["/no/where"]})
