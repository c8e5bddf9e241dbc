"""Task folders of Harbor: read, refused with all reasons, played and judged where their scripts expect to be."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from roll.data.prompts import DataError, Prompt
from roll.rollout.agents import harbor_task
from roll.rollout.agents.harbor_task import TaskError
from tests.support.rollouts import Engine
from tests.support.said_engine import ASK, play, script, tasks

TEST = """#!/bin/bash
if [ "$(cat /app/out/sum.txt)" = "$EXPECTED" ] && [ "$(pwd)" = /app ] && [ -f /tests/words.txt ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0.25 > /logs/verifier/reward.txt
fi
"""

DOCKERFILE = """FROM ubuntu:24.04
WORKDIR /app
# numbers
COPY numbers.txt data/ ./in/
ENV GREETING='good day'
"""

needs_namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"], capture_output=True).returncode != 0,
    reason="this machine lets nobody make mount namespaces",
)


def folder_of(
    parent: Path, *, name: str = "sums", toml: str = "", dockerfile: str = DOCKERFILE, test: str | None = TEST
) -> Path:
    folder = parent / name
    for part in ("environment/data", "tests"):
        (folder / part).mkdir(parents=True)
    (folder / "task.toml").write_text('schema_version = "1.4"\n[verifier.env]\nEXPECTED = "42"\n' + toml)
    (folder / "instruction.md").write_text("Write the sum of /app/in/numbers.txt to /app/out/sum.txt.\n")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "environment" / "numbers.txt").write_text("40 2")
    (folder / "environment" / "data" / "more.txt").write_text("more")
    (folder / "tests" / "words.txt").write_text("secret")
    if test is not None:
        (folder / "tests" / "test.sh").write_text(test)
    return folder


def load(*folders: Path) -> Sequence[Prompt]:
    names = [str(folder) for folder in folders]
    return tasks(dataset_cls="roll.rollout.agents.harbor_task:tasks", file_name=names, default_tag="harbor")


def test_folders_of_tasks_are_a_dataset(tmp_path):
    with pytest.raises(DataError, match=r"no task\.toml in it"):
        load(tmp_path)
    folder_of(tmp_path, name="b", toml='[task]\nname = "org/second"\n')
    folder_of(tmp_path, name="a")
    first, second = load(tmp_path)
    assert (first.id, second.id, first.tag) == ("a", "org/second", "harbor")
    assert first.messages[-1]["content"].startswith("Write the sum")
    assert "secret" not in json.dumps(first.extra_info)
    assert list(load(tmp_path / "a")) == [first]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"dockerfile": "FROM x\nRUN apt-get update \\\n && true"},
            "Dockerfile:2: RUN: nothing is built without Docker",
        ),
        ({"dockerfile": "FROM x\nRUN echo it's"}, "Dockerfile:2: RUN: nothing is built without Docker"),
        ({"dockerfile": "FROM x\nCOPY --from=y /a /b"}, "Dockerfile:2: COPY: nothing is built"),
        ({"dockerfile": "FROM x\nCOPY a /etc/a"}, "COPY to /etc/a: expected a place in /app"),
        ({"dockerfile": "FROM x\nCOPY nothing ."}, "COPY nothing: no such file"),
        ({"dockerfile": "FROM x\nWORKDIR /root/work"}, "the working folder /root/work is the system's"),
        ({"toml": "[[steps]]\nname = 'one'"}, "steps: tasks of several steps are not supported"),
        ({"toml": "[environment]\ndocker_image = 'x'\ngpus = 1"}, "docker_image: needs Docker; environment.gpus"),
        ({"toml": "[agent]\nnetwork_mode = 'no-network'"}, "agent.network_mode: the network cannot be kept away"),
        ({"toml": "[environment.env]\nKEY = '${KEY}'"}, "values of the host are not passed on"),
        ({"test": None}, "tests/test.sh: there is none"),
        ({"toml": "[environment"}, "Expected ']'"),
    ],
)
def test_tasks_that_need_more_are_refused_with_the_reason(tmp_path, keys, told):
    folder_of(tmp_path, name="good")
    folder_of(tmp_path, name="bad", **keys)
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    assert told in str(caught.value) and "/bad: " in str(caught.value) and "/good: " not in str(caught.value)


def episode(prompt: Prompt, tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Path, Path]:
    """Runs the module as the section ``agent`` does; also the working folder and the file of the reward."""
    work, files = tmp_path / "episode" / "work", tmp_path / "-".join(["files", *arguments[:1]])
    work.mkdir(parents=True, exist_ok=True)
    files.mkdir()
    (files / "task.json").write_text(json.dumps({"extra_info": dict(prompt.extra_info)}))
    env = {"PATH": "/usr/bin:/bin", "ROLL_TASK": str(files / "task.json"), "ROLL_REWARD": str(files / "reward")}
    command = [sys.executable, harbor_task.__file__, *arguments]
    return subprocess.run(command, env=env, cwd=work, capture_output=True, text=True), work, files / "reward"


@needs_namespaces
def test_a_task_is_played_in_its_place_and_judged_by_its_verifier(tmp_path):
    (prompt,) = load(folder_of(tmp_path))
    program = (
        "import os; numbers = open('/app/in/numbers.txt').read().split(); os.mkdir('/app/out'); "
        "open('out/sum.txt', 'w').write(str(sum(map(int, numbers)))); "
        "print(os.getcwd(), os.environ['GREETING'], sorted(os.listdir('in'))); "
        "print(*map(os.path.exists, ('/tests', '/logs')))"
    )
    played, work, _ = episode(prompt, tmp_path, "play", "python3", "-c", program)
    assert played.returncode == 0, played.stderr
    assert played.stdout == "/app good day ['more.txt', 'numbers.txt']\nFalse False\n", (
        "tests and logs are not there yet"
    )
    assert (work / "out" / "sum.txt").read_text() == "42" and not Path("/app").exists()
    judged, _, reward = episode(prompt, tmp_path, "verify")
    assert judged.returncode == 0, judged.stderr
    assert json.loads(reward.read_text()) == {"reward": 1.0, "success": True}
    (work / "out" / "sum.txt").write_text("41")
    assert harbor_task.verify(prompt.extra_info["harbor"], work) == 0.25


@needs_namespaces
def test_an_agent_program_plays_it_as_an_episode(tmp_path):
    (prompt,) = load(folder_of(tmp_path))
    module = ["python", "-m", "roll.rollout.agents.harbor_task"]
    program = ASK + "os.mkdir('/app/out'); open('/app/out/sum.txt', 'w').write(answer)"
    keys = {"command": [*module, "play", *script(program)], "reward": "verify", "verify": [*module, "verify"]}
    right, wrong = (play(Engine(answer), prompt, **keys) for answer in ("42", "41"))
    assert (right.score, right.success, wrong.score, wrong.success) == (1.0, True, 0.25, False)
    assert not Path("/app").exists()


@needs_namespaces
@pytest.mark.parametrize(
    ("test", "told"),
    [
        ("echo no luck; exit 3", "wrote no /logs/verifier/reward.txt: no luck"),
        ("echo yes > /logs/verifier/reward.txt", "is not a number: could not convert string to float: 'yes"),
        ("echo nan > /logs/verifier/reward.txt", "is nan, expected a finite number"),
        ("echo '[1]' > /logs/verifier/reward.json", "is not a number"),
        ("echo '{}' > /logs/verifier/reward.json", "is not a number"),
        ("sleep 60", "took longer than 0.5 s"),
    ],
)
def test_a_verifier_that_gives_no_reward_is_a_failure(tmp_path, test, told):
    (prompt,) = load(folder_of(tmp_path, test=test))
    task = {**prompt.extra_info["harbor"], "verifier_timeout": 0.5 if "sleep" in test else 60}
    with pytest.raises(TaskError, match=told):
        harbor_task.verify(task, tmp_path)


@needs_namespaces
def test_rewards_by_name_are_their_mean_unless_one_is_called_so(tmp_path):
    text = """cat > /logs/verifier/reward.json << END
{"style": 0.5, "tests": 1%s}
END"""
    for more, reward in (("", 0.75), (', "reward": 0.1', 0.1)):
        (prompt,) = load(folder_of(tmp_path, name=f"task{reward}", test=text % more))
        assert harbor_task.verify(prompt.extra_info["harbor"], tmp_path) == reward
