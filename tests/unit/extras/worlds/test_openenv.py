"""Environments behind an OpenEnv server: a real one where the package is, and sockets that go wrong."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

import roll.agentic.env as envs
from roll.agentic.env.base import TextEnv
from roll.extras.env_check import assert_env_ok

SERVER = Path(__file__).resolve().parents[3] / "support" / "programs" / "openenv_server.py"
ANSWER = "<answer>(.*?)</answer>"
NUMBERS = [f"<answer>{number}</answer>" for number in range(1, 10)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a real server, which needs ``openenv``, here or in the Python that ``ROLL_OPENENV_PYTHON`` names."""
    python = os.environ.get("ROLL_OPENENV_PYTHON") or (sys.executable if importlib.util.find_spec("openenv") else None)
    if python is None:
        pytest.skip("no package openenv; ROLL_OPENENV_PYTHON names a Python that has it")
    process = subprocess.Popen([python, SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdin is not None and process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()
    assert process.returncode == 0


def guessing(url: str, **keys: Any) -> TextEnv:
    return envs.make("openenv", **{"url": url, "action_key": "number", "success_return": 1.0, **keys})


def play(env: TextEnv, seed: int) -> list[Any]:
    """Halves what is left until the number is found."""
    low, high, told = 1, 9, [env.reset(seed=seed)]
    while True:
        guess = (low + high) // 2
        told.append(env.step(str(guess)))
        text, _, terminated, truncated, _ = told[-1]
        if terminated or truncated:
            return told
        low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)


def test_a_real_server_is_played_and_the_seed_repeats(url):
    env, other = guessing(url), guessing(url)
    lengths = set()
    for seed in range(5):
        told = play(env, seed)
        assert told[0][0] == "hint: guess a number from 1 to 9\nleft: 4\nsolved: False"
        assert told[-1][1] == 1.0 and told[-1][4]["success"] and told[-1][4]["action"] in set("123456789")
        assert [step[1] for step in told[1:-1]] == [0.0] * (len(told) - 2)
        assert told == play(other, seed)
        lengths.add(len(told))
    assert len(lengths) > 1
    env.close()
    other.close()


def test_what_the_server_does_not_understand_is_no_action(url):
    env = guessing(url, action_pattern=ANSWER, max_steps=3)
    first, _ = env.reset(seed=0)
    for said in ("no tags", "<answer>seven</answer>"):
        text, reward, terminated, truncated, info = env.step(said)
        assert (text, reward, info["action"], terminated, truncated) == (first, -0.5, None, False, False)
    assert env.step("<answer>1</answer>")[3], "truncated at the third step"
    env = guessing(url, action_key=None, success_return=None, success_key="solved")
    env.reset(seed=0)
    assert env.step("[1]")[4]["action"] is None and env.step('{"number": 2, "odd": 1}')[4]["action"] is None
    wins = [env.step(json.dumps({"number": number}))[4]["success"] for number in (1, 9)]
    assert wins == [False, False]


@pytest.mark.parametrize(
    ("fault", "error", "told"),
    [
        ("raises", RuntimeError, "answered step with EXECUTION_ERROR: the disk is full"),
        ("hangs", TimeoutError, "timed out"),
    ],
)
def test_a_server_that_fails_is_a_failure(url, fault, error, told):
    env = guessing(url, reset_kwargs={"fault": fault}, timeout=0.5)
    env.reset(seed=0)
    with pytest.raises(error, match=told):
        env.step("1")


def test_an_episode_without_a_reward_is_a_failure(url):
    env = guessing(url, reset_kwargs={"fault": "pays nothing"})
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match="the episode ended, and no step of it said a reward"):
        for number in "5555":
            env.step(number)


def test_it_passes_the_check(url):
    config = {"url": url, "action_key": "number", "action_pattern": ANSWER, "success_return": 1.0}
    assert_env_ok("openenv", config, answers=NUMBERS, episodes=2, allow=["seeds-alike"])


@contextmanager
def socket_that(answer: Callable[[ServerConnection, str], None]) -> Iterator[str]:
    """The address of a websocket that answers each message so."""

    def handle(connection: ServerConnection) -> None:
        for message in connection:
            answer(connection, str(message))

    with serve(handle, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"


def data(**keys: Any) -> str:
    return json.dumps(
        {"type": "observation", "data": {"observation": {"text": "go"}, "reward": 0.0, "done": False} | keys}
    )


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("no json", "Expecting value"),
        ("[]", "list indices"),
        (data(observation=None), "observation\n.*valid dictionary"),
        (data(reward="1.0"), "reward"),
        (data(done="yes"), "done\n.*valid boolean"),
        ('{"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}', "CAPACITY_REACHED: full"),
    ],
)
def test_answers_of_another_kind_are_failures(answer, told):
    with socket_that(lambda connection, _: connection.send(answer)) as address:
        env = envs.make("openenv", url=address, success_return=1)
        with pytest.raises(Exception, match=told):
            env.reset(seed=0)
        env.close()


def test_a_connection_that_breaks_is_a_failure_and_so_is_no_server():
    def once(connection: ServerConnection, message: str) -> None:
        assert json.loads(message) == {"type": "reset", "data": {"level": 2, "seed": 7}}
        connection.send(data())
        connection.close()

    with socket_that(once) as address:
        env = envs.make("openenv", url=address, success_return=1, reset_kwargs={"level": 2})
        assert env.reset(seed=7)[0] == "text: go"
        with pytest.raises(Exception, match="received 1000"):
            env.step("on")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        envs.make("openenv", url=f"ws://127.0.0.1:{port}", success_return=1).reset(seed=0)
