"""Agent programs as processes, functions and services: started, judged, ended with all they started."""

import asyncio
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from roll.rollout.agents.task import AgentError, AgentTask
from roll.rollout.router import EngineUnavailableError
from roll.rollout.types import EpisodeEnd
from tests.support.processes import happens
from tests.support.rollouts import RENDERER, Engine
from tests.support.said_engine import ASK, GOOD, PROMPT, Dying, marked, play, play_with, player_of, script
from tests.support.web import Reply, in_json, serving

HERE = "tests.unit.rollout.agents.test_programs"
CLIENT = """
import json, os, openai
task = json.load(open(os.environ["ROLL_TASK"]))
policy = openai.OpenAI(max_retries=0)
answer = policy.chat.completions.create(model="gpt-5", messages=task["messages"])
"""


@pytest.fixture
def mark() -> str:
    """What tells the processes of a test."""
    return f"agent-mark-{time.time_ns()}"


def test_an_unmodified_client_script_plays_an_episode():
    engine = Engine(f"<think>hm</think>{GOOD}")
    episode = play(engine, command=script(CLIENT))
    assert (episode.success, episode.score, episode.end) == (True, 1.0, EpisodeEnd.TERMINATED)
    assert episode.history and episode.turns[0].prompt_ids.tolist() == RENDERER.prompt(PROMPT.messages).tolist()
    assert episode.info["agent_calls"] == episode.info["agent_rows"] == 1 and episode.info["prompt_id"] == "p1"
    assert episode.turns[0].action == f"<think>hm</think>{GOOD}", "the answer that the verifier found"


def test_an_agent_of_a_published_framework_calls_its_tool_in_one_row():
    pytest.importorskip("agents", reason="openai-agents is not installed")
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 17, "b": 3}}</tool_call>'
    engine = Engine(call, "<answer>51</answer>")
    program = Path(__file__).parents[3] / "support" / "programs" / "agents_sdk.py"
    episode = play(engine, command=["python", str(program)], env={"OPENAI_AGENTS_DISABLE_TRACING": "1"}, timeout=120)
    assert (episode.success, episode.info["agent_rows"], episode.info["agent_rewritten"]) == (True, 1, 0)
    assert (episode.info["agent_calls"], episode.info["agent_tool_calls"]) == (2, 1)
    told = RENDERER.decode(episode.turns[1].prompt_ids)
    assert "multiply" in told and "51" in told


def test_a_program_may_say_what_its_answer_is_and_knows_nothing_that_it_should_not(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    program = f"""{ASK}
open(os.environ["ROLL_ANSWER"], "w").write("<answer>51</answer>")
json.dump([task, dict(os.environ), os.getcwd(), os.listdir()], open({str(tmp_path / "seen")!r}, "w"))
"""
    episode = play(Engine("no idea"), command=script(program), env={"COLOUR": "blue"})
    assert episode.success and episode.turns[0].task_reward == 1.0 and episode.final_observation == GOOD
    task, environment, folder, files = json.loads((tmp_path / "seen").read_text())
    assert task.keys() == {"id", "tag", "prompt", "messages", "extra_info", "base_url"}
    assert task["extra_info"] == {"level": 2} and "51" not in json.dumps(task).replace(task["base_url"], "")
    assert environment["COLOUR"] == "blue" and "WANDB_API_KEY" not in environment
    assert environment["ANTHROPIC_BASE_URL"] + "/v1" == environment["OPENAI_BASE_URL"] == task["base_url"]
    assert files == [] and not Path(folder).exists(), "an empty folder, removed at the end"


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import sys; print('no luck', file=sys.stderr); sys.exit(3)", "ended with exit code 3: no luck"),
        ("import os; os.kill(os.getpid(), 9)", "ended with signal 9"),
        ("import os; os.write(1, b'\\xff\\xfe\\xed\\xa0\\x80 odd'); raise SystemExit(1)", "exit code 1: \ufffd+ odd$"),
        ("pass", "sent no request to the policy"),
        ("import os; print(os.environ['OPENAI_API_KEY']); raise SystemExit(1)", r"exit code 1: \*\*\*$"),
        (ASK + "open(os.environ['ROLL_ANSWER'], 'wb').write(b'\\xff')", "ROLL_ANSWER is no UTF-8"),
        (ASK + "os.symlink('/etc/passwd', os.environ['ROLL_ANSWER'])", "ROLL_ANSWER cannot be read"),
        ("import os; os.kill(os.getppid(), 9); os.pause()", "ended with its supervisor killed"),
        (
            ASK.replace('messages=task["messages"]', 'messages=[{"role": "user", "content": "x" * 3000}]'),
            "first prompt does not fit in sequence_length 2000",
        ),
        (ASK + "\nfor _ in range(160):\n    os.write(1, b'x' * 65536)\nraise SystemExit('the end')\n", "the end$"),
    ],
)
def test_a_program_that_fails_is_a_failure_and_no_reward(program, told):
    with pytest.raises(AgentError, match=told) as caught:
        play(Engine(GOOD), command=script(program))
    assert len(str(caught.value)) < 1000


def test_a_command_that_is_not_there_is_named():
    with pytest.raises(AgentError, match=r"exit code 127: no_such_agent: No such file or directory"):
        play(Engine(GOOD), command=["no_such_agent"])
    with pytest.raises(AgentError, match=r"agent.cwd: cannot start in '/no/where'"):
        play(Engine(GOOD), command=["true"], cwd="/no/where")


def test_a_program_that_never_ends_is_ended_with_all_that_it_has_started(mark):
    program = f"""
        import os, subprocess, sys, time
        for _ in range(2):
            if os.fork() == 0:  # a daemon: a session of its own, and no parent
                os.setsid()
                if os.fork() == 0:
                    os.execvpe("sleep", ["sleep", "1000"], {{"MARK": "{mark}", "PATH": os.environ["PATH"]}})
                os._exit(0)
        subprocess.Popen(["sleep", "1000"], env={{"MARK": "{mark}", "PATH": os.environ["PATH"]}})
        import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    """
    with pytest.raises(AgentError, match=r"took longer than agent.timeout=3 s"):
        play(Engine(GOOD), command=script(program), timeout=3)
    assert marked(mark) == []


LET_GO = threading.Event()


async def stubborn(task: AgentTask) -> None:
    while not LET_GO.is_set():
        with suppress(BaseException):  # as a bare ``except:`` around a retry does
            await asyncio.sleep(0.05)


def test_a_coroutine_that_ignores_its_end_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr("roll.rollout.agents.episode._PATIENCE_S", 0.2)
    threading.Timer(3.0, LET_GO.set).start()  # the end of the event loop waits for it too
    with pytest.raises(AgentError, match=r"took longer than agent.timeout=0.3 s"):
        play(Engine(GOOD), type="python", path=f"{HERE}:stubborn", timeout=0.3)
    assert "did not end when cancelled" in caplog.text


def test_time_in_which_the_policy_answers_is_not_the_programs():
    episode = play(Engine(GOOD, seconds=3), type="python", path=f"{HERE}:coroutine", timeout=2.5)
    assert episode.success and len(episode.turns) == 4


def test_daemons_of_a_program_that_ended_are_gone_before_its_answer_is_judged(mark):
    daemon = f"""
if os.fork() == 0:
    os.setsid()
    while True:  # a fork bomb of one at a time
        if os.fork():
            os._exit(0)
        {mark!r}
os._exit(0)
"""
    episode = play(Engine(GOOD), command=script(ASK + daemon))
    assert episode.success and marked(mark) == []


async def test_calls_after_the_end_are_refused(tmp_path):
    keys = tmp_path / "keys"

    tell = ASK + f"open({str(keys)!r}, 'w').write(os.environ['OPENAI_API_KEY'])"
    async with player_of(command=script(tell)) as player:
        await play_with(player, Engine(GOOD))
        async with openai.AsyncOpenAI(base_url=player.endpoint.url, api_key=keys.read_text(), max_retries=0) as late:
            with pytest.raises(openai.APIStatusError) as caught:
                await late.models.list()
        assert caught.value.status_code == 410
        following = await play_with(player, Engine(GOOD))
    assert following.info["agent_turned_away"] == 1 and following.info["agent_refused"] == 0


async def test_cancelling_an_episode_ends_its_program(mark):
    engine = Engine(GOOD, seconds=1000)
    async with player_of(command=script(ASK + f"{mark!r}")) as player:
        playing = asyncio.create_task(play_with(player, engine))
        while not engine.requests:
            await asyncio.sleep(0.02)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert engine.given_up == 1 and marked(mark) == []


def test_what_the_engine_raises_ends_the_program_and_is_no_fault_of_it(mark):
    program = f"{ASK.replace('answer =', 'asked = lambda:')}\nwhile True:  # {mark}"
    program += "\n    try:\n        asked()\n    except OSError:\n        pass"
    with pytest.raises(EngineUnavailableError, match="worker 0 died"):
        play(Dying([GOOD]), command=script(program))
    assert marked(mark) == []


def test_a_program_that_meets_a_limit_is_judged_by_what_it_has():
    more = "ask('/chat/completions', messages=task['messages'])\n"
    episode = play(Engine(GOOD, "no"), command=script(ASK + more * 3), max_calls=2)
    assert (episode.end, episode.success, len(episode.turns)) == (EpisodeEnd.TRUNCATED, False, 2)
    long = "task['messages'].append({'role': 'user', 'content': 'x' * 3000})\n" + more
    episode = play(Engine(GOOD), command=script(ASK + long))
    assert (episode.end, episode.success) == (EpisodeEnd.CONTEXT_FULL, True)
    assert episode.info["agent_refused"] == 1
    cut = "raise SystemExit('an incomplete answer')"
    episode = play(Engine(GOOD + "x" * 400), command=script(ASK + cut))
    assert (episode.end, episode.success) == (EpisodeEnd.TERMINATED, True)
    with pytest.raises(AgentError, match="an incomplete answer"):
        play(Engine(GOOD), command=script(ASK + cut))


def test_rewards_of_the_program_itself_count_where_it_is_allowed_to_say_them():
    post = """
def status(reward):
    try:
        return ask("/reward", reward=reward)["object"]
    except urllib.error.HTTPError as error:
        return error.code
said = [status(reward) for reward in (0.25, 0.75, float("nan"))]
open(os.environ["ROLL_ANSWER"], "w").write(f"{said[1]} {said[2]}")
"""
    allowed = play(Engine("x"), command=script(ASK + post), reward="call")
    assert (allowed.score, allowed.success, allowed.final_observation) == (0.75, True, "reward 400")
    refused = play(Engine("x"), command=script(ASK + post))
    assert (refused.score, refused.success, refused.final_observation) == (0.0, False, "403 400")
    with pytest.raises(AgentError, match="posted no reward"):
        play(Engine("x"), command=script(ASK), reward="call")


def plain(task: AgentTask) -> str | None:
    """Asks twice, in a thread."""
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as policy:
        messages: Any = list(task.messages)
        first = policy.chat.completions.create(model="m", messages=messages).choices[0].message
        policy.chat.completions.create(model="m", messages=[*messages, first, {"role": "user", "content": "sure?"}])
        return first.content if task.extra_info["level"] == 2 else None


async def coroutine(task: AgentTask) -> None:
    """Asks side by side, in the worker's event loop."""
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as policy:
        messages: Any = list(task.messages)
        asks = [policy.chat.completions.create(model="m", messages=messages) for _ in range(4)]
        await asyncio.gather(*asks)


ENDED = threading.Event()


def hanging(task: AgentTask) -> None:
    try:
        while True:
            time.sleep(0.01)
    finally:
        ENDED.set()


def raising(task: AgentTask) -> None:
    raise ValueError(f"bad key {task.api_key}")


async def leaving(task: AgentTask) -> None:
    raise SystemExit(0)


async def cancelled(task: AgentTask) -> None:
    raise asyncio.CancelledError


def number(task: AgentTask) -> Any:
    return 51


def test_functions_are_programs_too():
    once = play(Engine(GOOD, "no"), type="python", path=f"{HERE}:plain")
    assert once.success and len(once.turns) == 2 and {turn.row for turn in once.turns} == {0}
    many = play(Engine("x", "y", "z", GOOD, seconds=0.05), type="python", path=f"{HERE}:coroutine")
    assert len(many.turns) == 4 and sorted(turn.row for turn in many.turns) == [0, 1, 2, 3]
    for name, told in (
        ("hanging", "took longer than agent.timeout=0.5 s"),
        ("raising", re.escape("ValueError: bad key ***")),
        ("leaving", "raised RuntimeError: SystemExit: 0"),
        ("cancelled", "raised RuntimeError: CancelledError"),
        ("number", "returned 51 .int., expected a text or nothing"),
    ):
        with pytest.raises(AgentError, match=told):
            play(Engine(GOOD), type="python", path=f"{HERE}:{name}", timeout=0.5)
    assert ENDED.wait(10), "its thread has been ended"


async def test_a_running_service_is_a_program_too():
    def solve(_: str, task: Any) -> Reply:
        with openai.OpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0) as policy:
            answer = policy.chat.completions.create(model="m", messages=task["messages"])
        if answer.choices[0].message.content == "fail":
            return Reply(502, f"upstream {task['api_key']}")
        return in_json({"answer": answer.choices[0].message.content})

    with serving(solve) as server:
        url = f"{server.url}/solve"
        async with player_of(type="url", url=url) as player:
            assert (await play_with(player, Engine(GOOD))).success
            with pytest.raises(AgentError, match=r"status 502: upstream \*\*\*"):
                await play_with(player, Engine("fail"))
    assert set(server.paths) == {"/solve"}
    async with player_of(type="url", url=url) as player:
        with pytest.raises(AgentError, match="ConnectError"):
            await play_with(player, Engine(GOOD))


def test_a_worker_that_is_killed_leaves_nothing_of_its_programs_but_in_its_sessions_folder(tmp_path, mark):
    program = f"""
        import asyncio
        from {HERE} import *
        play(Engine("x"), command=["sleep", "1000"], env={{"MARK": "{mark}"}})
    """
    environment = os.environ | {"ROLL_RAY_SESSION": str(tmp_path)}
    worker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], env=environment)
    assert happens(lambda: any(line.startswith("sleep") for line in marked(mark)))
    worker.kill()
    worker.wait()
    assert happens(lambda: marked(mark) == [], 20)
    (place,) = tmp_path.iterdir()  # the reaper removes the folder with what is in it
    assert place.name.startswith("roll-agent-")


LEAVES = ASK + "open('found', 'w').write(task['prompt'] + str(sorted(os.listdir('..'))))\n"
JUDGE = """
import json, os
task = json.load(open(os.environ["ROLL_TASK"]))
answer = open(os.environ["ROLL_ANSWER"]).read()
seen = [task["ground_truth"], open("found").read(), answer, "OPENAI_API_KEY" in os.environ]
json.dump({"reward": 0.25, "success": True}, open(os.environ["ROLL_REWARD"], "w"))
"""


def judged(program: str, verify: str, **keys: Any) -> Any:
    return play(Engine(GOOD, "no"), command=script(program), reward="verify", verify=script(verify), **keys)


@pytest.mark.parametrize("sandbox", [None, {}])
def test_a_command_judges_the_folder_that_the_program_has_left(sandbox, tmp_path):
    told = tmp_path / "told"
    tell = f"json.dump(seen, open({str(told)!r}, 'w'))" if sandbox is None else "open(os.environ['ROLL_REWARD'])"
    episode = judged(LEAVES, JUDGE + tell, sandbox=sandbox)
    assert (episode.score, episode.success, episode.end) == (0.25, True, EpisodeEnd.TERMINATED)
    if sandbox is None:
        assert json.loads(told.read_text()) == ["51", "17*3=['task.json', 'work']", GOOD, False]


def test_a_program_that_is_cut_off_is_judged_too():
    again = "ask('/chat/completions', model='m', messages=task['messages'])\n"
    episode = judged(LEAVES + again * 2, "import os; open(os.environ['ROLL_REWARD'], 'w').write('1')", max_calls=2)
    assert (episode.score, episode.success, episode.end, len(episode.turns)) == (1.0, True, EpisodeEnd.TRUNCATED, 2)
    assert [turn.task_reward for turn in episode.turns] == [0.0, 1.0]


def test_what_the_program_writes_or_leaves_running_is_no_reward(mark):
    cheats = f"""
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
    look = f"import os; open(os.environ['ROLL_REWARD'], 'w').write(str(len(os.listdir('.'))))\n# {mark}"
    assert judged(LEAVES + cheats, look).score == 2, "found and reward lie in its folder"
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
def test_a_judgement_that_fails_is_a_failure_and_no_reward(verify, told):
    keys = {"verify_timeout": 0.5} if "sleep" in verify else {}
    with pytest.raises(AgentError, match=told):
        judged(ASK, verify, **keys)
