"""A prompt as an environment, of one turn or with a simulated user, and the Ray worker that runs its episodes.

The reward comes from a verifier in another process.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from roll.agentic.env.base import Observation, StepResult, step_result
from roll.configs.agent import AgentConfig
from roll.configs.env import CustomEnvConfig
from roll.configs.rlvr import UserConfig
from roll.configs.tools import ToolsConfig
from roll.data.columns import IntArray, Item
from roll.data.pictures import PictureError, Pictures
from roll.data.prompts import Prompt, PromptSampler
from roll.data.questions import CONVERSATION
from roll.data.renderer import ChatRenderer, Message, items_of
from roll.data.requests import Completion, FinishReason, GenerateFn, GenerateRequest, SamplingParams
from roll.data.row_pictures import read_sources, sources_in, with_items
from roll.data.stored import leave
from roll.data.templates import ChatTemplate
from roll.data.tool_messages import in_words, text_of
from roll.distributed.cluster.cluster import RayBlock
from roll.rewards.types import RewardError, RewardResult, Sample
from roll.rollout.call_threads import CallThreads
from roll.rollout.env_manager import TOOL_TURNS, EnvManager, EpisodeSpec, LengthLimits
from roll.rollout.errors import EnvError, contained
from roll.rollout.plans import GroupSpec
from roll.rollout.reward_worker import WorkerClient
from roll.rollout.router import GenerationClient
from roll.rollout.tokenization_audit import TokenCheck, TokenizationAudit
from roll.rollout.tool_box import ToolBox
from roll.rollout.types import OVER_BUDGET, VALID_UNKNOWN, RolloutGroup, Trajectory, Turn
from roll.rollout.workers import RolloutWorker
from roll.utils.foreign import clean_text, describe_error
from roll.utils.hashing import derive_seed
from roll.utils.memory import relax_gc
from roll.utils.registry import import_path

if TYPE_CHECKING:
    from roll.rollout.agents.episode import AgentPlayer


ScoreFn = Callable[[Sample], Awaitable[RewardResult]]

_DECODERS = 4
"""Most threads that decode pictures in a worker: each keeps some memory of what it has decoded."""


class PromptEnv:
    """One prompt with one response (an ``AsyncEnv``).

    Args:
        score: judges the answer; what it raises ends the episode.
    """

    def __init__(self, prompt: Prompt, score: ScoreFn) -> None:
        self.prompt = prompt
        self._score = score
        truth = "" if prompt.ground_truth is None else str(prompt.ground_truth)
        self._known: dict[str, Any] = {"prompt_id": prompt.id, "ground_truth": truth}
        """Of every ``info``: an episode that is cut short is of this prompt too."""
        if len(prompt.messages) > 1:  # the observation is the last alone
            self._known[CONVERSATION] = json.dumps([dict(message) for message in in_words(prompt.messages)])
        if prompt.tools:
            self._known["tools"] = list(prompt.tools)
        self._completion: Completion | None = None
        self.heard = in_words(prompt.messages)
        """The conversation that the answer ends, with ``<image>`` for a picture."""
        self._pictures = tuple(cast("list[Item]", sources_in(prompt.messages)))

    def watch(self, generate: GenerateFn) -> GenerateFn:
        """The same ``generate``, noting how long the answer was and why it ended."""

        async def watched(request: GenerateRequest) -> Completion:
            self._completion = await generate(request)
            return self._completion

        return watched

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return self.question, {"prompt": self.prompt, "state_key": self.prompt.id, **self._known}

    async def step(self, text: str) -> StepResult:
        """Scores the answer; ``action`` is what the verifier found in it."""
        completion = self._completion
        verdict = await self._score(
            Sample(
                prompt=self.question,
                response=text,
                ground_truth=self.prompt.ground_truth,
                data_source=self.prompt.tag,
                extra_info=self.prompt.extra_info,
                messages=self.heard,
                num_tokens=0 if completion is None else len(completion.token_ids),
                truncated=completion is not None and completion.finish_reason is FinishReason.LENGTH,
                pictures=self._pictures,
            )
        )
        observation, reward, terminated, truncated, info = step_result(
            "",
            task_reward=verdict.score,
            penalty=0.0,
            terminated=True,
            truncated=False,
            action=verdict.answer,
            action_is_effective=True,
            success=verdict.correct,
            state_key=self.prompt.id,
        )
        info |= {**self._known, **verdict.parts, **verdict.notes}
        if verdict.over_budget:
            info[OVER_BUDGET] = verdict.over_budget
        if verdict.valid is None:
            info[VALID_UNKNOWN] = True
        return observation, reward, terminated, truncated, info

    async def render(self) -> None:
        """Nothing changes: the prompt is all there is to see."""

    @property
    def question(self) -> str:
        """Text of the last message."""
        return text_of(self.prompt.messages[-1]["content"])


class PromptManager(EnvManager):
    """Runs ``PromptEnv``s: the policy gets the dataset's messages unchanged."""

    history = True

    def __init__(self, renderer: ChatRenderer, params: SamplingParams, limits: LengthLimits) -> None:
        super().__init__(CustomEnvConfig(env_type="prompt", max_steps=1), renderer, params, limits)

    def prompt(self, observation: Observation, info: Mapping[str, Any], turns: list[Turn]) -> IntArray:
        if turns:
            return self.continued(turns[-1], info["messages"], info)
        prompt: Prompt = info["prompt"]
        if prompt.prompt_ids is None:
            return self.renderer.prompt(prompt.messages, info.get("tools"))
        return prompt.prompt_ids

    def said(self, observation: Observation, info: Mapping[str, Any], turns: list[Turn]) -> Sequence[Message] | None:
        if turns:
            messages: Sequence[Message] = info["messages"]
            return messages
        prompt: Prompt = info["prompt"]
        return prompt.messages if prompt.prompt_ids is None else None


class UserError(EnvError):
    """The user raised, took too long or returned something invalid."""


class User(Protocol):
    """A user-defined class; one object serves all conversations of a rollout worker, so it keeps no state of one."""

    async def respond(self, messages: Sequence[Mapping[str, str]], prompt: Prompt) -> tuple[str, float, bool]:
        """Words of the user, the reward of the policy's last turn, and whether the conversation is over.

        Args:
            messages: all that has been said, the policy's turn last.
            prompt: the row.
        """


def load_user(config: UserConfig) -> User:
    """The user of a configuration.

    Raises:
        ValueError: it cannot be made, or has no ``async respond``.
    """
    expected = "a class with async respond(messages, prompt) that takes user.args"
    try:
        made: Any = import_path(config.path, "user.path")
        user: User = made(**config.args)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"{describe_error(error)}; expected {expected}") from error
    if not inspect.iscoroutinefunction(getattr(user, "respond", None)):
        raise ValueError(f"{config.path} has no such method; expected {expected}")
    return user


class UserEnv:
    """A prompt with a user (an ``AsyncEnv``), for one episode. The last response is scored."""

    def __init__(self, env: PromptEnv, user: User, config: UserConfig) -> None:
        self._env = env
        self._user = user
        self._config = config
        self._messages: list[Mapping[str, str]] = list(env.heard)
        self._turns = 0
        self._info: dict[str, Any] = {}

    async def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        observation, self._info = await self._env.reset(seed)
        return observation, self._info

    async def step(self, text: str) -> StepResult:
        """Has the user answer, or the answer scored where the conversation is over.

        Raises:
            UserError: see there.
        """
        told, self._messages = tuple(self._messages), [*self._messages, {"role": "assistant", "content": text}]
        reward = 0.0
        if self._turns < self._config.max_turns:
            words, reward, is_over = await self._respond()
            if not is_over:
                self._turns += 1
                said = {"role": "user", "content": words}
                self._messages.append(said)
                parts = {"task_reward": reward, "penalty": 0.0, "action": text, "success": False}
                more = {"messages": [said], TOOL_TURNS: self._turns, **parts}
                return words, reward, False, False, {**self._info, **more}
        self._env.heard = told
        observation, score, terminated, truncated, info = await self._env.step(text)
        info = {**info, "task_reward": float(info["task_reward"]) + reward, "user_turns": self._turns}
        return observation, float(score) + reward, terminated, truncated, info

    async def render(self) -> None:
        """No picture."""

    async def _respond(self) -> tuple[str, float, bool]:
        try:
            async with asyncio.timeout(self._config.timeout) as limit:
                answer: Any = await self._asked()
        except Exception as error:  # a user's class may raise anything
            if limit.expired():
                raise UserError(f"the user took longer than user.timeout={self._config.timeout:g}s") from error
            raise UserError(f"the user raised {describe_error(error)}") from error
        words: Any
        reward: Any
        is_over: Any
        words, reward, is_over = answer if isinstance(answer, tuple) and len(answer) == 3 else (None,) * 3
        right = isinstance(words, str) and isinstance(is_over, bool) and isinstance(reward, int | float)
        if not right or not math.isfinite(reward):
            raise UserError(f"the user answered {answer!r:.200}, expected (text, finite number, true or false)")
        return clean_text(words), float(reward), bool(is_over)

    async def _asked(self) -> Any:
        with contained():
            return await self._user.respond(tuple(self._messages), self._env.prompt)


class UnscoredAnswerError(EnvError):
    """The verifiers could not judge a response; it has no reward and must not count."""


@dataclass(frozen=True, kw_only=True)
class PromptSpec(GroupSpec):
    """The responses to one prompt."""

    prompt: Prompt
    sampling: str
    """Name of the worker's sampling parameters to use: ``train`` or ``val``."""


@dataclass(frozen=True)
class PromptPlan:
    """Group ``i`` has the ``i``-th prompt of the sampler (a ``RolloutPlan``)."""

    prompts: PromptSampler
    group_size: int
    num_slots: int
    seed: int
    sampling: str
    greedy: bool = False
    baseline: bool = False

    def spec(self, group_id: int) -> PromptSpec:
        prompt = self.prompts[group_id]
        if prompt.has_pictures:
            prompt = replace(prompt, messages=read_sources(prompt.messages))
        return PromptSpec(
            group_id,
            prompt.tag,
            derive_seed(self.seed, self.sampling, group_id),
            self.group_size,
            greedy=self.greedy,
            baseline=self.baseline,
            prompt=prompt,
            sampling=self.sampling,
        )


@dataclass(frozen=True)
class PromptWorkerContext:
    """Everything that a rollout worker needs, as plain data."""

    tokenizer_path: str
    template: str | ChatTemplate
    params: Mapping[str, SamplingParams]
    """By what answers are for, ``train`` or ``val``; so are ``limits``."""
    limits: Mapping[str, LengthLimits]
    domains: Mapping[str, str]
    """The reward domain of each tag; answers to prompts of other tags are not scored."""
    spread: bool
    """True: the answers to one prompt may come from different engines."""
    tools: ToolsConfig | None = None
    """Tools that the policy may call while it answers."""
    token_check: TokenCheck = "disable"
    """Mode of comparing trained rows with their conversations."""
    agent: AgentConfig | None = None
    """The program that runs the prompts, if the policy does not respond directly."""
    user: UserConfig | None = None
    """User that answers the policy, if the prompts are conversations."""
    trust_remote_code: bool = False
    """True if Python files that come with the tokenizer may run."""
    pictures: Pictures | None = None
    """The picture processor of the policy; ``None``: it takes none."""
    seeing: frozenset[str] = frozenset()
    """Reward domains that get the pictures of prompts."""


class PromptWorker(RolloutWorker):
    """Generates and scores responses. ``rollout_workers.worker_cls`` may name a subclass."""

    val_client: GenerationClient | None = None
    """The way to the engines that answer held-out prompts, if others than those of the rollouts do."""

    def setup(self, context: PromptWorkerContext) -> None:
        from roll.models.tokenizer import load_tokenizer  # brings transformers

        self.context = context
        trusts = context.trust_remote_code
        tokenizer = load_tokenizer(context.tokenizer_path, alone=True, trust_remote_code=trusts)
        self._pictures = context.pictures and context.pictures.with_tokenizer(tokenizer)
        self._decoders = ThreadPoolExecutor(min(_DECODERS, os.cpu_count() or 1), thread_name_prefix="pictures")
        renderer = ChatRenderer(tokenizer, context.template, self._pictures)
        self.managers = {
            name: PromptManager(renderer, params, context.limits[name]) for name, params in context.params.items()
        }
        watch = TokenizationAudit(renderer, context.token_check)
        if "train" in self.managers:
            self.managers["train"].watch = watch
        self._tools: ToolBox | None = None
        if context.tools is not None:
            self._tools = ToolBox(context.tools, renderer, CallThreads())
        self._user: User | None = None
        if context.user is not None:
            self.retries = context.user.retries
            self._user = load_user(context.user)
        self._agent: AgentPlayer | None = None
        if context.agent is not None:
            from roll.rollout.agents.episode import AgentPlayer  # brings the HTTP server

            self.retries = context.agent.retries
            self._agent = AgentPlayer(context.agent, renderer, self.rank, watch)
        relax_gc()

    async def set_engines(self, engines: Sequence[Any], evaluators: Sequence[Any] | None = None) -> None:
        """See ``RolloutWorker``; ``evaluators`` answer the held-out prompts, if others than ``engines`` do."""
        await super().set_engines(engines)
        self.val_client = None if evaluators is None else GenerationClient(evaluators, (self.rank, self.world_size))

    async def set_rewards(self, domains: Mapping[str, Sequence[Any]]) -> None:
        """Sets where answers are scored from now on: handles of the workers of each domain."""
        share = self.rank, self.world_size
        self.rewards: dict[str, ScoreFn] = {
            name: WorkerClient[Sample, RewardResult](f"the rewards {name!r}", handles, "score", share).send
            for name, handles in domains.items()
        }

    def generate_fn(self, spec: GroupSpec) -> GenerateFn:
        assert isinstance(spec, PromptSpec)
        client = self.client if self.val_client is None or spec.sampling != "val" else self.val_client
        return client.generate if self.context.spread else client.pinned()

    async def run_group(self, spec: GroupSpec) -> RolloutGroup:
        """See ``RolloutWorker``; the pictures of the prompt are decoded once.

        Raises:
            PictureError: one cannot be used.
        """
        assert isinstance(spec, PromptSpec)
        if spec.prompt.has_pictures:
            loop = asyncio.get_running_loop()
            spec = replace(spec, prompt=await loop.run_in_executor(self._decoders, self._shown, spec.prompt))
        return await super().run_group(spec)

    def _shown(self, prompt: Prompt) -> Prompt:
        try:
            messages = with_items(prompt.messages, self._pictures)
        except PictureError as error:
            raise PictureError(f"prompt {prompt.id}: {error}") from error
        leave(items_of(messages), RayBlock.put)
        return replace(prompt, messages=messages)

    async def play(self, spec: GroupSpec, episode: EpisodeSpec, generate: GenerateFn) -> Trajectory:
        assert isinstance(spec, PromptSpec)
        env = PromptEnv(spec.prompt, self._score)
        generate = env.watch(generate)
        manager = self.managers[spec.sampling]
        if self._agent is not None:
            params, limits, trains = manager.params, manager.limits, spec.sampling == "train"
            return await self._agent.play(env, spec.prompt, generate, params, limits, episode, trains=trains)
        if self._user is not None:
            assert self.context.user is not None
            return await manager.run_episode(UserEnv(env, self._user, self.context.user), generate, episode)
        if self._tools is not None:
            partner, generate = await self._tools.equip(env, spec.prompt.tag, generate)
            return await manager.run_episode(partner, generate, episode)
        return await manager.run_episode(env, generate, episode)

    async def _score(self, sample: Sample) -> RewardResult:
        domain = self.context.domains.get(sample.data_source)
        if domain is None:
            return RewardResult(0.0, correct=False)
        if domain not in self.context.seeing:
            sample = replace(sample, pictures=())
        try:
            return await self.rewards[domain](sample)
        except RewardError as error:
            raise UnscoredAnswerError(str(error)) from error
