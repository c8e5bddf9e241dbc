"""Rewards of agent programs that a command judges: no program can say them, and no failure is one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from roll.rollout.agents.task import AgentError
from roll.rollout.types import EpisodeEnd
from tests.support.said_engine import ASK, GOOD, Engine, marked, play, script

LEAVES = ASK + "open('found', 'w').write(task['prompt'] + str(sorted(os.listdir('..'))))\n"
JUDGE = """
import json, os
task = json.load(open(os.environ["ROLL_TASK"]))
answer = open(os.environ["ROLL_ANSWER"]).read()
seen = [task["ground_truth"], open("found").read(), answer, "OPENAI_API_KEY" in os.environ]
json.dump({"reward": 0.25, "success": True}, open(os.environ["ROLL_REWARD"], "w"))
"""


def judged(program: str, verify: str, **keys: Any) -> Any:
    return play(Engine([GOOD, "no"]), command=script(program), reward="verify", verify=script(verify), **keys)


@pytest.mark.parametrize("sandbox", [None, {}])
def test_a_command_judges_the_folder_that_the_program_has_left(sandbox: Any, tmp_path: Path) -> None:
    told = tmp_path / "told"
    tell = f"json.dump(seen, open({str(told)!r}, 'w'))" if sandbox is None else "open(os.environ['ROLL_REWARD'])"
    episode = judged(LEAVES, JUDGE + tell, sandbox=sandbox)
    assert (episode.score, episode.success, episode.end) == (0.25, True, EpisodeEnd.TERMINATED)
    if sandbox is None:
        assert json.loads(told.read_text()) == ["51", "17*3=['task.json', 'work']", GOOD, False]


def test_a_program_that_is_cut_off_is_judged_too() -> None:
    again = "ask('/chat/completions', model='m', messages=task['messages'])\n"
    episode = judged(LEAVES + again * 2, "import os; open(os.environ['ROLL_REWARD'], 'w').write('1')", max_calls=2)
    assert (episode.score, episode.success, episode.end, len(episode.turns)) == (1.0, True, EpisodeEnd.TRUNCATED, 2)
    assert [turn.task_reward for turn in episode.turns] == [0.0, 1.0]


def test_what_the_program_writes_or_leaves_running_is_no_reward() -> None:
    mark = f"agent-mark-{time.time_ns()}"
    cheats = (
        LEAVES
        + f"""
for name in ("reward", "../reward", os.environ["ROLL_TASK"] + "/../reward"):
    try:
        open(name, "w").write("1000")
    except OSError:
        pass
if os.fork() == 0:
    os.setsid()
    import glob
    while True:  # {mark}
        for folder in glob.glob("/tmp/roll-verify-*"):
            open(folder + "/reward", "w").write("1000")
"""
    )
    look = f"import os; open(os.environ['ROLL_REWARD'], 'w').write(str(len(os.listdir('.'))))\n# {mark}"
    assert judged(cheats, look).score == 2, "found and reward lie in its folder"
    assert marked(mark) == []


@pytest.mark.parametrize(
    ("verify", "told"),
    [
        ("raise SystemExit('tests are broken')", r"agent.verify: python ended with exit code 1: tests are broken"),
        ("pass", "agent.verify wrote no ROLL_REWARD"),
        ("import time; time.sleep(60)", r"agent.verify took longer than agent.verify_timeout=0.5 s"),
        ("import os; open(os.environ['ROLL_REWARD'], 'w').write('NaN')", "ROLL_REWARD: got b'NaN', expected a finite"),
        ("import os; open(os.environ['ROLL_REWARD'], 'w').write('\"1\"')", "ROLL_REWARD: got"),
        ("import os; open(os.environ['ROLL_REWARD'], 'wb').write(b'\\xff')", "ROLL_REWARD: got"),
        ("import os; os.symlink('/etc/passwd', os.environ['ROLL_REWARD'])", "ROLL_REWARD cannot be read"),
    ],
)
def test_a_judgement_that_fails_is_a_failure_and_no_reward(verify: str, told: str) -> None:
    keys = {"verify_timeout": 0.5} if "sleep" in verify else {}
    with pytest.raises(AgentError, match=told):
        judged(ASK, verify, **keys)
