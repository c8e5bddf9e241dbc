"""Tools in processes of their own: whatever a call does, it is answered, counted, and gone."""

import asyncio
import contextlib
import itertools
import os
import select
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll.agentic.tools.tool import AssistantTurn, ToolCall
from roll.configs.tools import ToolsConfig
from roll.rollout import tool_process
from roll.rollout.call_threads import CallThreads
from roll.rollout.tool_box import Answers, ToolBox
from tests.support.rollouts import RENDERER

SUPPORT = "tests.support.acting_tool"
IN_PROCESSES = {"act": "act", "wait": "wait", "remember": "Remembering"}


class Box:
    """Calls tools of one box, each of which is an episode's unless ``states`` are given."""

    def __init__(self, **keys: Any) -> None:
        limits = {key: keys.pop(key) for key in ("max_tool_response_tokens", "max_parallel_calls") if key in keys}
        entry = {"isolation": "process", "timeout": 30, "memory_mb": 256, **keys}
        use = {name: {"tool": f"{SUPPORT}:{target}", **entry} for name, target in IN_PROCESSES.items()}
        self.box = ToolBox(ToolsConfig(use=use, **limits), RENDERER, CallThreads())

    async def calls(self, name: str, *calls: dict[str, Any], states: dict[str, Any] | None = None) -> Answers:
        await self.box.schemas("sums")
        turn = AssistantTurn("", tuple(ToolCall(f"call0000{n}", name, each) for n, each in enumerate(calls)))
        return await self.box.answer(turn, list(IN_PROCESSES), {} if states is None else states)

    async def call(self, name: str, states: dict[str, Any] | None = None, **arguments: Any) -> tuple[str, Counter[str]]:
        answers = await self.calls(name, arguments, states=states)
        return answers.messages[0]["content"], +answers.counts


@contextlib.asynccontextmanager
async def opened(**keys: Any) -> AsyncIterator[Box]:
    box = Box(**keys)
    try:
        yield box
    finally:
        await box.box.close()


def are_gone(pids: list[int], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}/stat").exists()]:
        states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in left]
        if set(states) == {"Z"}:
            break
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


FAILED = {
    "exit": "error: its process died (exit code 3)",
    "leave a thread of the pipe": "error: its process died (exit code 4)",
    "segfault": "error: its process died (SIGABRT)",
    "sys.exit": "error: SystemExit: 3",
    "memory": "error: MemoryError: ",
    "raise": "error: OSError: no disk",
    "refuse": "error: not today ?",
}
ANSWERED = {
    "bytes": "\ufffd\ufffd\x00ok",
    "half": "half ? of it",
    "print": "print",
    "fork": "fork",
    "count": "1",  # what a call changes is gone with it
}


async def test_whatever_a_call_does_is_answered_and_counted_and_the_next_one_works(tmp_path):
    async with opened(processes=1) as box:
        found = {what: await box.call("act", what=what, path=str(tmp_path / what)) for what in (*FAILED, *ANSWERED)}
    assert {what: text for what, (text, _) in found.items()} == FAILED | ANSWERED
    for what, (_, counts) in found.items():
        assert counts == ({"tool_calls": 1, "failed_calls": 1} if what in FAILED else {"tool_calls": 1})
    assert are_gone([int(pid) for pid in (tmp_path / "fork").read_text().split()])


async def test_a_call_that_hangs_is_killed_with_all_that_it_has_started(tmp_path):
    async with opened(timeout=1.0, processes=1) as box:
        hung = await box.call("act", what="hang", path=str(tmp_path / "pids"))
        gone = are_gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])
        waited, counted = await box.call("wait", seconds=600), await box.call("act", what="count")
    late = {"tool_calls": 1, "failed_calls": 1, "call_timeouts": 1}
    assert hung == ("error: act took longer than 1 s", late) and gone
    assert waited == ("error: wait took longer than 1 s", late)
    assert counted == ("1", {"tool_calls": 1})


async def test_waiting_for_a_free_process_is_no_part_of_a_call():
    async with opened(timeout=1.0, processes=1, max_parallel_calls=8) as box:
        answers = await box.calls("act", *({"what": "sleep"} for _ in range(8)))
        assert [message["content"] for message in answers.messages] == ["sleep"] * 8


async def test_state_is_an_episodes_own_and_must_be_json():
    async with opened() as box:
        mine: dict[str, Any] = {}
        yours: dict[str, Any] = {}
        said = [
            await box.call("remember", states, word=word)
            for states, word in ((mine, "a"), (yours, "b"), (mine, "c"), (mine, "object"), (mine, "d"))
        ]
        assert mine == {"remember": {"words": ["a", "c", "d"]}} and yours == {"remember": {"words": ["b"]}}
    assert [text for text, _ in said[:3]] == ["a", "b", "a c"]
    assert said[3][0].startswith("error: its state is not JSON, which isolation: process needs: ")
    assert said[4] == ("a c d", {"tool_calls": 1})


@pytest.mark.parametrize("size", [2 * 64 * 8 - 1, 2 * 64 * 8, 2 * 64 * 8 + 1, 10_000_000])
async def test_long_results_are_cut_as_they_are_without_a_process(size):
    cut = []
    for isolation in ("process", "none"):
        async with opened(isolation=isolation, max_tool_response_tokens=8) as box:
            cut.append((await box.call("act", what=str(size)))[0])
    in_process, here = cut
    assert in_process == here and "left out" in here


async def test_a_call_that_is_given_up_leaves_nothing(tmp_path):
    async with opened(processes=1) as box:
        path = tmp_path / "pids"
        task = asyncio.create_task(box.call("act", what="hang", path=str(path)))
        while not (path.exists() and len(path.read_text().split()) == 2):
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        first, _ = map(int, path.read_text().split())
        assert (are_gone([first]), (await box.call("act", what="count"))[0]) == (True, "1")


def test_a_reply_that_comes_between_the_looks_at_the_pipe_and_at_the_process_counts(monkeypatch):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, b'{"text": "done"}\n')
        os._exit(1)
    os.close(writing)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    pipe, first = select.poll(), itertools.chain([True], itertools.repeat(False))
    pipe.register(reading, select.POLLIN)
    nothing_yet = SimpleNamespace(register=lambda *_: None, poll=lambda wait: [] if next(first) else pipe.poll(wait))
    monkeypatch.setattr(tool_process.select, "poll", lambda: nothing_yet)
    line, status = tool_process._wait(pid, reading, time.monotonic() + 10)
    os.close(reading)
    assert line == b'{"text": "done"}\n' and status is not None
