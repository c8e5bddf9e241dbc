"""Environments of the package verifiers, played as they are through an episode's endpoint."""

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll.data.prompts import DataError, Prompt
from roll.rollout.agents import verifiers_env
from roll.rollout.agents.task import AgentTask
from roll.rollout.endpoint.session import Session
from tests.support.absence import hide
from tests.support.rollouts import Engine
from tests.support.said_engine import new_session, rows_of, serving, tasks

ENVS = Path(__file__).resolve().parents[3] / "support" / "verifiers_envs"
PROGRAM = Path(verifiers_env.__file__)

needs_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None,
    reason="no package verifiers, which asks for openai<3 and mcp==2.0.0: pip install 'roll-rl[verifiers]'",
)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment's module can be imported here and by its tool servers, whose files are under ``tmp_path``."""
    monkeypatch.syspath_prepend(str(ENVS))
    monkeypatch.setenv("PYTHONPATH", str(ENVS), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))


def toml(folder: Path, more: str = "", **task: str) -> Path:
    lines = ["[env.taskset]", 'id = "vf_sums"', "num_tasks = 4", "[env.taskset.task]"]
    path = folder / "env.toml"
    path.write_text("\n".join([*lines, *(f'{key} = "{value}"' for key, value in task.items()), more]))
    return path


def prompts(path: Path | str | None) -> Sequence[Prompt]:
    return tasks(dataset_cls="roll.rollout.agents.verifiers_env:tasks", file_name=path and str(path))


def play(engine: Engine, prompt: Prompt, **keys: Any) -> Session:
    """Plays a task, with the reward that its environment posts."""

    async def run() -> Session:
        session = new_session(engine, reward="call", **keys)
        async with serving() as endpoint:
            with endpoint.open(session) as key:
                await verifiers_env.play(AgentTask.of(prompt, endpoint.url, key))
        return session

    return asyncio.run(run())


@needs_verifiers
def test_the_tasks_are_a_dataset(tmp_path):
    rows = prompts(toml(tmp_path, "[select]\nskip = 1\nlimit = 2"))
    assert [(row.id, row.tag, row.messages[-1]["content"]) for row in rows] == [
        ("vf_sums:0", "vf_sums", "1+2="),
        ("vf_sums:1", "vf_sums", "2+3="),
    ]
    json.dumps(rows[0].extra_info)


ADD = '<tool_call>{"name": "add", "arguments": {"left": 0, "right": 1}}</tool_call>'


@needs_verifiers
@pytest.mark.parametrize(
    ("kind", "more", "answers", "reward"),
    [
        ("single", "", ["it is 1"], 1.5),
        ("single", "", ["nine hundred and ninety-nine"], 0.0),
        ("single", "", ["2"], 0.5),
        ("multi", "", ["7", "1"], 1.5),
        ("multi", "[env.solver]\nmax_turns = 1", ["7"], 0.5),
        ("tool", "", [ADD, "1"], 1.5),
    ],
)
def test_an_episode_is_one_row_of_what_was_sampled_and_its_rewards_are_summed(tmp_path, kind, more, answers, reward):
    engine = Engine(*answers)
    session = play(engine, prompts(toml(tmp_path, more, kind=kind))[0])
    prompt, ids = engine.log[-1]
    assert (session.reward, len(session.turns), rows_of(session)) == (reward, len(answers), [prompt + ids])
    assert session.counts | {"rewritten": 0, "malformed_calls": 0, "refused": 0} == session.counts


@needs_verifiers
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("reward raises", "the grader is away"),
        ("no reward", "1 of 1 traces have no reward"),
        ("not a number", "the reward is nan, expected a finite number"),
    ],
)
def test_a_reward_that_fails_is_a_failure(tmp_path, fault, told):
    with pytest.raises(RuntimeError, match=told):
        play(Engine("1"), prompts(toml(tmp_path, fault=fault))[0])


@needs_verifiers
def test_an_engine_that_fails_is_a_failure(tmp_path):
    with pytest.raises(RuntimeError, match=r"max_calls_exceeded|ProviderError"):
        play(Engine("7", "1"), prompts(toml(tmp_path, kind="multi"))[0], max_calls=1)


@needs_verifiers
async def test_another_python_writes_the_dataset_and_plays_it(tmp_path):
    command = [sys.executable, PROGRAM, toml(tmp_path)]
    written = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    (tmp_path / "tasks.jsonl").write_text(written)
    (row, *_) = tasks(file_name=str(tmp_path / "tasks.jsonl"))
    assert row == prompts(toml(tmp_path))[0]

    session = new_session(Engine("1"), reward="call")
    async with serving() as endpoint:
        with endpoint.open(session) as key:
            (tmp_path / "task.json").write_text(json.dumps(AgentTask.of(row, endpoint.url, key).public()))
            told = {"ROLL_TASK": str(tmp_path / "task.json"), "OPENAI_API_KEY": key, "PATH": "/usr/bin:/bin"}
            told |= {"PYTHONPATH": str(ENVS), "HOME": str(tmp_path)}
            program = await asyncio.create_subprocess_exec(sys.executable, PROGRAM, env=told, cwd=tmp_path)
            assert await program.wait() == 0
    assert session.reward == 1.5


@needs_verifiers
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[taskset]\nid = 'vf_sums'", r"tables taskset, expected \[env\]"),
        ("[env.taskset]\nid = 'vf_sum'", "vf_sum"),
        ("[env.taskset]\nid = 'vf_sums'\nnum_task = 3", "num_task"),
        ("[env", "TOMLDecodeError"),
    ],
)
def test_wrong_files_are_named(tmp_path, text, told):
    path = tmp_path / "env.toml"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"env\.toml: (?s:.*){told}"):
        prompts(path)
    with pytest.raises(DataError, match=r"file_name: got nothing, expected a TOML file with a table \[env\]"):
        prompts(None)


def test_the_package_that_is_missing_is_named(tmp_path, monkeypatch):
    hide(monkeypatch, ["verifiers"])
    path = toml(tmp_path)
    with pytest.raises(DataError, match=r"env\.toml: got no package verifiers.*pip install 'roll-rl\[verifiers\]'"):
        prompts(path)
    task = SimpleNamespace(extra_info={"verifiers": {"env": {}, "task": {}}}, base_url="http://x/v1", api_key="-")
    with pytest.raises(ModuleNotFoundError, match="verifiers"):
        asyncio.run(verifiers_env.play(task))  # type: ignore[arg-type]
