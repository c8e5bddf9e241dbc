"""Environments of the package ``verifiers`` as agent programs: their tasks, their rollouts, their rewards.

An environment is played as it is: its harness asks the policy through the episode's address, and its rewards go to
``/v1/reward``. What it is stands in a TOML file of the package's own kind, with the tables ``[env]`` and ``[select]``.

``tasks`` is a ``dataset_cls`` and ``play`` an ``agent.path``. Where the package needs a Python of its own, this file is
a program for that Python, which needs nothing else of ROLL: ``python verifiers_env.py env.toml > tasks.jsonl`` writes
the dataset, and ``agent: {command: [python, verifiers_env.py]}`` plays it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import httpx

from roll.utils.foreign import Fault

if TYPE_CHECKING:
    from roll.configs.data import DataArguments
    from roll.rollout.agents.task import AgentTask

INSTALL = "pip install 'roll-rl[verifiers]'"

_COLUMN = "verifiers"
"""Of a row: the environment's configuration and the task, as the package writes them."""

_serving: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Served]] = WeakKeyDictionary()
"""The environments of an event loop by their configuration; each keeps its servers until the loop ends."""


def tasks(args: DataArguments, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of the environment that ``file_name`` describes (a ``dataset_cls``).

    Raises:
        DataError: the package or the file is missing, or one of them cannot make tasks of it.
    """
    from roll.data.files import DataError

    for name in args.file_names or [""]:
        try:
            if not name:
                raise ValueError("file_name: got nothing, expected a TOML file with a table [env]")
            yield from rows(name)
        except Exception as error:  # the package, its plug-ins and their data have many
            raise DataError([f"{name or 'verifiers'}: {_words(error)}"]) from error


def rows(file: str) -> Iterator[dict[str, Any]]:
    """The tasks of one environment, in the order of the package.

    Raises:
        ValueError: the file has no table ``[env]``, or the tasks never end.
    """
    from verifiers.v1.configs.select import SelectConfig
    from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

    settings = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    if "env" not in settings:
        raise ValueError(f"tables {', '.join(settings) or 'none'}, expected [env]")
    env = resolve_env_config(settings["env"])
    taskset = load_taskset(env.taskset).select(SelectConfig(**settings.get("select", {})))
    if not taskset.bounded:
        raise ValueError(f"the tasks of {env.env_id} never end, expected limit = … in the table [select]")
    described = env.model_dump(mode="json", exclude_unset=True)
    for number, task in enumerate(taskset):
        yield {
            "id": f"{env.env_id}:{number}",
            "tag": env.env_id,
            "prompt": task.data.prompt_text or task.data.name or f"{env.env_id}:{number}",
            _COLUMN: {"env": described, "task": task.data.model_dump(mode="json", exclude_none=True)},
        }


async def play(task: AgentTask) -> None:
    """Plays one task and posts its reward (an ``agent.path``).

    The reward is that of the traces that train the policy, their mean where there are several.

    Raises:
        RuntimeError: the environment failed, or gave no reward.
    """
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig

    given: Mapping[str, Any] = task.extra_info[_COLUMN]
    env = await _environment(given["env"])
    row = env.taskset.task_type().data_type().model_validate(given["task"])
    url = f"{task.base_url.removesuffix('/v1')}/s/{task.api_key}/v1"
    context = ModelContext(model="policy", client=EvalClientConfig(base_url=url, api_key_var="ROLL_NO_KEY"))
    episode = await env.run_episode(env.taskset.task_type()(row, env.config.taskset.task), context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok")
    learnt = [trace for trace in episode.traces if trace.agent.trainable]
    rewards = [trace.reward for trace in learnt if any(reward is not None for reward in trace.rewards.values())]
    if not rewards or len(rewards) < len(learnt):
        raise RuntimeError(f"{len(learnt) - len(rewards)} of {len(learnt)} traces have no reward")
    reward = sum(rewards) / len(rewards)
    if not math.isfinite(reward):
        raise RuntimeError(f"the reward is {reward}, expected a finite number")
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        answer = await client.post("/reward", json={"reward": reward})
    if not answer.is_success:
        raise RuntimeError(f"the reward was refused with status {answer.status_code}: {answer.text}")


class _Served:
    """An environment and its servers, opened and closed in one task, as the package wants it."""

    def __init__(self, described: Mapping[str, Any]) -> None:
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._hold(described))

    async def _hold(self, described: Mapping[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        with Fault() as fault:  # a package's code, raised where it is waited for
            env = load_environment(resolve_env_config(dict(described)))
            async with env.serving():
                self.ready.set_result(env)
                await asyncio.Event().wait()
        if fault.error is not None and not self.ready.done():
            self.ready.set_exception(fault.error)


async def _environment(described: Mapping[str, Any]) -> Any:
    """The environment, with its servers; one that could not be opened is tried again."""
    known = _serving.setdefault(asyncio.get_running_loop(), {})
    key = json.dumps(described, sort_keys=True)
    if key not in known or known[key].task.done():
        known[key] = _Served(described)
    return await asyncio.shield(known[key].ready)


def _words(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "verifiers":
        return f"got no package verifiers, expected it to be installed ({INSTALL})"
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for described in rows(sys.argv[1]):
            print(json.dumps(described))
    else:
        with open(os.environ["ROLL_TASK"], encoding="utf-8") as given:
            asyncio.run(play(SimpleNamespace(**json.load(given), api_key=os.environ["OPENAI_API_KEY"])))  # type: ignore[arg-type]
