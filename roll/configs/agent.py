"""``agent``: a program that plays the episodes through an endpoint which speaks the APIs of model providers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.worker import EnvironmentVariables

_NEEDED = {"process": "command", "python": "path", "url": "url"}


class AgentConfig(Config):
    """The agent program, what it may ask of the policy, and where its reward comes from."""

    type: Literal["process", "python", "url"] = Field(
        default="process",
        description="`process` starts a command for each episode, `python` calls a function, `url` posts the task to a "
        "service that runs on the machine of the rollout workers.",
    )
    command: list[str] = Field(
        default_factory=list,
        description="Program and arguments (type process). Files by relative paths are looked for in the folder that "
        "the run is started in; python is the run's own.",
    )
    path: str | None = Field(
        default=None,
        description="package.module:function or folder/file.py:function, plain or async; it is called with an "
        "AgentTask (type python).",
    )
    url: str | None = Field(default=None, description="Where the task is posted to (type url).")
    env: EnvironmentVariables = Field(
        default_factory=dict,
        description="Environment variables of the command. Of the run's own it gets PATH, HOME, LANG and the like, "
        "never credentials.",
    )
    cwd: str | None = Field(
        default=None,
        description="Folder that the command starts in. null: an empty one for each episode, removed after it.",
    )
    timeout: float = Field(
        default=300.0,
        gt=0,
        description="Seconds that an episode may take, the policy's answers not included; then it has failed.",
    )
    retries: int = Field(default=1, ge=0, description="New attempts at an episode that failed, before it is dropped.")
    max_calls: int = Field(default=64, ge=1, description="Most answers that an episode may ask of the policy.")
    max_parallel_requests: int = Field(
        default=8, ge=1, description="Most answers of one episode that are generated at the same time."
    )
    sampling: Literal["run", "request"] = Field(
        default="run",
        description="`run`: temperature and top_p are those of generating_args whatever requests say, so that training "
        "scores what was sampled. `request`: requests choose.",
    )
    dialect: str = Field(
        default="hermes",
        min_length=1,
        description="How the model writes tool calls: the name of a dialect, or package.module:Class.",
    )
    reward: Literal["verifiers", "call"] = Field(
        default="verifiers",
        description="`verifiers`: the reward domain of the prompt's tag judges the answer. `call`: the program posts "
        "its reward to /v1/reward.",
    )
    port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port of the endpoint on 127.0.0.1, of the first rollout worker; the others take the next ones. "
        "0: any that is free.",
    )

    def problems(self) -> list[ConfigProblem]:
        found = []
        for kind, key in _NEEDED.items():
            given = bool(getattr(self, key))
            if kind == self.type and not given:
                expected = f"what type {kind} runs: give agent.{key}"
                found.append(self.problem(key, expected, "type", seen=NOTHING))
            elif kind != self.type and given:
                found.append(self.problem(key, f"nothing with type {self.type}; it is read with type {kind}", "type"))
        for key in ("env", "cwd") if self.type != "process" else ():
            if getattr(self, key):
                found.append(self.problem(key, f"nothing with type {self.type}, which starts no command", "type"))
        if self.url and not self.url.startswith(("http://", "https://")):
            found.append(self.problem("url", "an address that begins with http:// or https://"))
        return found
