"""Environments: one entry of ``custom_envs``, and the managers that run them."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import ceil, floor
from typing import Annotated, Any

from pydantic import Field, model_validator

from roll.configs.agent import AgentConfig
from roll.configs.base import Config
from roll.configs.problems import ConfigProblem
from roll.configs.rewards import RewardFilterConfig
from roll.configs.schema import nearest
from roll.configs.worker import EnvironmentVariables, GeneratingArguments, WorkerConfig


class Mixture:
    """Order of kinds, one at each index: of the first ``n``, each kind has its share of ``n`` to within one.

    The j-th of a kind with share s belongs to the indices from ⌊j/s⌋ to ⌈(j+1)/s⌉ − 1. Whichever kind may come and must
    come first is taken, which keeps to all of these windows (earliest deadline first; Tijdeman 1980 has the bound).

    Args:
        weights: of the kinds, above zero, in any unit.
        seed: decides where several kinds are equally urgent.
    """

    def __init__(self, weights: Sequence[float], seed: int = 0) -> None:
        exact = [Fraction(str(weight)) for weight in weights]  # 0.1 is meant as a tenth
        self._shares = [weight / sum(exact) for weight in exact]
        self._counts = [0] * len(exact)
        self._rng = random.Random(seed)
        self._order: list[int] = []

    def __getitem__(self, index: int) -> int:
        """The kind at an index from 0, as its place in ``weights``."""
        while len(self._order) <= index:
            self._order.append(self._next(len(self._order)))
        return self._order[index]

    def _next(self, index: int) -> int:
        urgency = {
            kind: (ceil((count + 1) / share), self._rng.random())
            for kind, (count, share) in enumerate(zip(self._counts, self._shares, strict=True))
            if floor(count / share) <= index
        }
        kind = min(urgency, key=urgency.__getitem__)
        self._counts[kind] += 1
        return kind


PLACEHOLDERS = (
    "observation",
    "turn",
    "max_turns",
    "turns_left",
    "history",
    "env_instruction",
    "max_response_length",
    "turn_idx",
    "actions_left",
    "current_observation",
    "current_step",
    "step_count",
    "history_length",
)
"""Placeholders of ``agent_template`` and ``agent_system_template``."""
_PLACEHOLDER = re.compile(r"(?<![\w\\{])\{(\w+)\}(?!\})")  # not the braces of \boxed{answer}

ALIASES = {"num_env_groups": "env_groups", "num_groups_partition": "n_groups"}
"""Newer spellings of an environment manager's keys, by the name used here."""


Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CustomEnvConfig(Config):
    """One environment tag: which environment, its length, and the policy's prompts."""

    env_type: str = Field(
        min_length=1,
        description="Registered environment (sokoban, frozen_lake …), package.module:Class or folder/file.py:Class.",
    )
    max_steps: int = Field(default=10, ge=1, description="Most turns of an episode.")
    max_tokens_per_step: int | None = Field(
        default=None, ge=1, description="Most tokens sampled in one turn. null: generating_args.max_new_tokens."
    )
    env_manager_cls: str = Field(
        default="step",
        min_length=1,
        description="step: each turn is a sample of its own. traj: the episode is one growing conversation and one "
        "sample. Or package.module:Class.",
    )
    use_thread_lock: bool = Field(
        default=False,
        description="Run only one episode of the tag at a time (for libraries that are not thread-safe).",
    )
    history_length: int = Field(
        default=0, ge=0, description="Earlier turns that the prompt repeats as text (step managers only)."
    )
    agent_system_template: str | None = Field(
        default=None,
        description="System message; {env_instruction} and the placeholders below. null: the environment's.",
    )
    agent_template: str | None = Field(
        default=None,
        description="User message of a turn; {observation} (or {current_observation}), {turn} (or {turn_idx}, "
        "{current_step}), {step_count}: turns before it, {max_turns}, {turns_left} (or {actions_left}), "
        "{history}, {history_length}: turns in it, {max_response_length}: most tokens of the response. null: only "
        "the observation.",
    )
    step_timeout: float = Field(default=30.0, gt=0, description="Seconds for one reset or step.")
    env_config: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the environment's constructor."
    )
    agent: AgentConfig | None = Field(
        default=None,
        description="A program that runs the episode through an endpoint. null: the policy acts turn by turn.",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        if self.history_length and self.env_manager_cls == "traj":
            expected = "0 with env_manager_cls traj, whose conversation already holds every turn"
            yield self.problem("history_length", expected, "env_manager_cls")
        if self.agent is not None:
            yield from self._agent_problems(self.agent)
        for key in ("agent_template", "agent_system_template"):
            for name in _PLACEHOLDER.findall(getattr(self, key) or ""):
                if name not in PLACEHOLDERS:
                    known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
                    near = nearest(name, PLACEHOLDERS)
                    hint = f"did you mean {{{near}}}?" if near else ""
                    yield self.problem(key, f"placeholders among {known}", got=f"{{{name}}}", hint=hint)

    def _agent_problems(self, agent: AgentConfig) -> Iterator[ConfigProblem]:
        if self.history_length:
            yield self.problem("history_length", "0 with agent, whose program keeps its own history", "agent")
        if self.env_manager_cls not in ("step", "traj"):
            yield self.problem("env_manager_cls", "step or traj with agent, which replaces it", "agent")
        if "retries" in agent.model_fields_set:
            expected = "nothing: env_retries of the environment managers sets the retries"
            yield self.problem("agent.retries", expected, "agent")
        if agent.port:
            expected = "0: the processes of train_env_manager and val_env_manager cannot share a port"
            yield self.problem("agent.port", expected, "agent")


class EnvManagerConfig(Config):
    """Number and kinds of the environments that run at once."""

    env_groups: int = Field(
        default=8, ge=1, description="Groups of environments that run at the same time (alias: num_env_groups)."
    )
    group_size: int = Field(
        default=1, ge=1, description="Environments of a group: same configuration, same seed, so the same start state."
    )
    group_size_redundancy: int = Field(
        default=0,
        ge=0,
        description="Extra members started in each group, so that the group need not wait for slow or failed ones.",
    )
    tags: list[str] = Field(
        default_factory=lambda: ["SimpleSokoban"], min_length=1, description="Keys of custom_envs to use."
    )
    n_groups: list[int] | None = Field(
        default=None,
        description="Groups of each tag, in the order of tags (alias: num_groups_partition). null: spread evenly.",
    )
    tag_weights: list[Weight] | None = Field(
        default=None,
        description="Instead of n_groups: how often each tag is drawn, in the order of tags, in any unit; at any "
        "point each tag's share of the groups is right to within one group.",
    )
    max_traj_per_env: int = Field(
        default=-1, ge=-1, description="Most episodes of one environment per step; -1: no limit."
    )
    format_penalty: float = Field(
        default=0.0,
        le=0,
        description="Added to the reward of a turn without a valid action, unless env_config sets its own.",
    )
    worker_cls: str | None = Field(
        default=None,
        description="package.module:Class of the process that runs environments. null: the default class.",
    )
    max_env_num_per_worker: int = Field(
        default=0, ge=0, description="Environments of one process; 0 puts all of them into one."
    )
    env_retries: int = Field(
        default=1,
        ge=0,
        description="Retries of an episode whose environment failed, before it is dropped and counted.",
    )
    query_filter_config: RewardFilterConfig = Field(
        default_factory=RewardFilterConfig,
        description="Dynamic sampling: groups worth training on, by their rewards; the others are replaced "
        "(train_env_manager).",
    )
    generating_args: GeneratingArguments | None = Field(
        default=None, description="Sampling of these episodes. null: actor_infer.generating_args."
    )
    system_envs: EnvironmentVariables = Field(
        default_factory=dict, description="Environment variables of these processes, over the global ones."
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_aliases(cls, data: Any) -> Any:
        """Renames newer spellings. Both spellings at once are left as they are, so the second is an unknown key."""
        if not isinstance(data, dict):
            return data
        return {
            ALIASES[key] if key in ALIASES and ALIASES[key] not in data else key: value for key, value in data.items()
        }

    @property
    def num_envs(self) -> int:
        """Environments that run at the same time, redundant ones included."""
        return self.env_groups * (self.group_size + self.group_size_redundancy)

    @property
    def num_workers(self) -> int:
        """Processes that play them."""
        return math.ceil(self.env_groups * self.group_size / (self.max_env_num_per_worker or self.num_envs))

    @property
    def groups_per_tag(self) -> dict[str, int]:
        """Groups of each tag: ``n_groups``, or an even spread with the remainder going to the first tags.

        With ``tag_weights`` environments belong to no tag; these are the tags of the first groups.
        """
        if self.n_groups is not None:
            return dict(zip(self.tags, self.n_groups, strict=True))
        if self.tag_weights is not None:
            mixture = Mixture(self.tag_weights)
            first = Counter(mixture[index] for index in range(self.env_groups))
            return {tag: first[i] for i, tag in enumerate(self.tags)}
        share, rest = divmod(self.env_groups, len(self.tags))
        return {tag: share + (i < rest) for i, tag in enumerate(self.tags)}

    def worker_config(self) -> WorkerConfig:
        """The processes as a cluster of CPU workers."""
        return WorkerConfig(world_size=self.num_workers, worker_cls=self.worker_cls, system_envs=self.system_envs)

    def problems(self) -> Iterator[ConfigProblem]:
        if self.max_traj_per_env == 0:
            yield self.problem("max_traj_per_env", "-1 or at least 1")
        if len(set(self.tags)) != len(self.tags):
            yield self.problem("tags", "every tag once; n_groups or tag_weights set their shares")
        if self.tag_weights is not None:
            if len(self.tag_weights) != len(self.tags):
                yield self.problem("tag_weights", f"{len(self.tags)} numbers, one for each of tags", "tags")
            if self.n_groups is not None:
                yield self.problem("tag_weights", "null with n_groups, one of the two", "n_groups")
            return
        if self.n_groups is None:
            if len(self.tags) > self.env_groups:
                expected = f"at most env_groups = {self.env_groups} tags, not {len(self.tags)}"
                yield self.problem("tags", expected, "env_groups")
            return
        if len(self.n_groups) != len(self.tags):
            yield self.problem("n_groups", f"{len(self.tags)} numbers, one for each of tags", "tags")
        if any(groups < 1 for groups in self.n_groups):
            yield self.problem("n_groups", "at least 1 group for each tag")
        if sum(self.n_groups) != self.env_groups:
            expected = f"a sum of env_groups = {self.env_groups}, not {sum(self.n_groups)}"
            yield self.problem("n_groups", expected, "env_groups")
