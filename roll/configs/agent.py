"""``agent``: a program that runs the episodes through an endpoint with the APIs of model providers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.tools import AUTO_DIALECT, placed_files
from roll.configs.worker import EnvironmentVariables

_NEEDED = {"process": "command", "python": "path", "url": "url"}
_OF_COMMANDS = ("env", "cwd", "template", "sandbox", "verify")


class AgentSandboxConfig(Config):
    """Limits of a command in the sandbox."""

    memory_mb: int = Field(default=2048, ge=64, description="Memory of all its processes together.")
    cpu_seconds: int = Field(default=600, ge=1, description="CPU time of each process.")
    processes: int = Field(default=128, ge=1, description="Processes and threads at the same time.")
    open_files: int = Field(default=1024, ge=16, description="Open files of each process.")
    file_mb: int = Field(default=256, ge=1, description="Size of one file.")
    folder_mb: int = Field(default=1024, ge=1, description="Size of all files in the working folder.")
    temp_mb: int = Field(
        default=256, ge=1, description="Size of /tmp, which is also the home folder and is kept in memory."
    )
    readable: list[str] = Field(
        default_factory=list,
        description="Files and folders that it can read, in addition to the system's, Python's and those named in its "
        "arguments.",
    )


class AgentConfig(Config):
    """The agent program, its limits, and the source of its reward."""

    type: Literal["process", "python", "url"] = Field(
        default="process",
        description="`process` starts a command for each episode, `python` calls a function, `url` posts the task to "
        "a service on the machine of the rollout workers.",
    )
    command: list[str] = Field(
        default_factory=list,
        description="Program and arguments (type process). Relative paths are resolved from the folder in which the "
        "run starts; python is the run's.",
    )
    path: str | None = Field(
        default=None,
        description="package.module:function or folder/file.py:function, plain or async; called with an AgentTask "
        "(type python).",
    )
    url: str | None = Field(default=None, description="Address that receives the task by POST (type url).")
    env: EnvironmentVariables = Field(
        default_factory=dict,
        description="Environment variables of the command. From the run's environment it gets PATH, HOME, LANG and "
        "the like, never credentials.",
    )
    cwd: str | None = Field(
        default=None,
        description="Folder in which the command starts. null: one per episode, deleted after it.",
    )
    template: str | None = Field(
        default=None, description="Folder whose files are copied into an episode's folder. null: it is empty."
    )
    sandbox: AgentSandboxConfig | None = Field(
        default=None,
        description="Isolates the command (and `verify`); {} uses the defaults. null: it has the run's permissions.",
    )
    timeout: float = Field(
        default=300.0,
        gt=0,
        description="Seconds for an episode, not counting generation; a longer one has failed.",
    )
    retries: int = Field(
        default=1,
        ge=0,
        description="Retries of a failed episode before it is dropped. Environments have env_retries.",
    )
    max_calls: int = Field(default=64, ge=1, description="Most responses that an episode can request from the policy.")
    max_parallel_requests: int = Field(
        default=8, ge=1, description="Most responses of one episode generated at the same time."
    )
    sampling: Literal["run", "request"] = Field(
        default="run",
        description="`run`: temperature and top_p are those of generating_args, whatever requests say, so that "
        "training computes log-probs under the same. `request`: requests choose.",
    )
    dialect: str = Field(
        default=AUTO_DIALECT,
        min_length=1,
        description="How the model writes tool calls: auto for its chat template's dialect (hermes if unknown), the "
        "name of a dialect, or package.module:Class.",
    )
    reward: Literal["task", "verify", "call"] = Field(
        default="task",
        description="`task`: the same as without an agent, the reward domain of the prompt's tag or the environment. "
        "`verify`: a command, after the program. `call`: the program posts it to /v1/reward.",
    )
    verify: list[str] = Field(
        default_factory=list,
        description="Program and arguments that judge an episode in its folder after its program has ended, and write "
        "the reward to the file ROLL_REWARD (reward verify).",
    )
    verify_timeout: float = Field(default=60.0, gt=0, description="Seconds for `verify`.")
    pictures: bool = Field(
        default=False,
        description="Requests may have pictures, and the program gets those of its prompt or environment, as data "
        "URIs. Needs a policy that takes pictures.",
    )
    port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port of the endpoint on 127.0.0.1 for the first rollout worker; the others take the next ones. "
        "0: any free port.",
    )

    def placed(self) -> AgentConfig:
        """The section with paths that are the same in every folder, where files lie in this one."""
        sandbox = self.sandbox and self.sandbox.model_copy(
            update={"readable": [os.path.abspath(path) for path in self.sandbox.readable]}
        )
        return self.model_copy(
            update={
                "command": placed_files(self.command),
                "verify": placed_files(self.verify),
                "cwd": self.cwd and os.path.abspath(self.cwd),
                "template": self.template and os.path.abspath(self.template),
                "sandbox": sandbox,
            }
        )

    def problems(self) -> Iterator[ConfigProblem]:
        for kind, key in _NEEDED.items():
            given = bool(getattr(self, key))
            if kind == self.type and not given:
                expected = f"a value, since type is {kind}"
                yield self.problem(key, expected, "type", got=NOTHING)
            elif kind != self.type and given:
                yield self.problem(key, f"no such key with type {self.type}; it is read with type {kind}", "type")
        for key in _OF_COMMANDS if self.type != "process" else ():
            if (got := getattr(self, key)) not in (None, {}, []):
                expected = f"no such key with type {self.type}, which starts no command"
                yield self.problem(key, expected, "type", got="a section" if key == "sandbox" else got)
        if self.url and not self.url.startswith(("http://", "https://")):
            yield self.problem("url", "an address that begins with http:// or https://")
        yield from self._judge_problems()
        beside = {"template": self.template, "sandbox": self.sandbox, "verify": self.verify or None}
        for key, value in beside.items() if self.cwd is not None and self.type == "process" else ():
            if value is not None:
                yield self.problem("cwd", f"null with {key}, which needs a separate folder per episode", key)

    def _judge_problems(self) -> Iterator[ConfigProblem]:
        if self.reward == "verify" and self.type != "process":
            expected = f"task or call with type {self.type}: verify judges the folder of a command"
            yield self.problem("reward", expected, "type")
        elif self.reward == "verify" and not self.verify:
            yield self.problem("verify", "a command that writes the reward, with reward verify", "reward", got=NOTHING)
        elif self.reward != "verify" and self.verify and self.type == "process":
            expected = f"no such key with reward {self.reward}; it is read with reward verify"
            yield self.problem("verify", expected, "reward")
