"""The Ray worker that generates and scores responses to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.configs.agent import AgentConfig
from roll.configs.rlvr import UserConfig
from roll.configs.tools import ToolsConfig
from roll.data.prompt_sampler import PromptSampler
from roll.data.prompts import Prompt
from roll.data.renderer import ChatRenderer
from roll.data.requests import GenerateFn, SamplingParams
from roll.data.templates import ChatTemplate
from roll.rewards.types import RewardError, RewardResult, Sample
from roll.rollout.call_threads import CallThreads
from roll.rollout.env_manager import EpisodeSpec, LengthLimits
from roll.rollout.errors import EnvError
from roll.rollout.plans import GroupSpec
from roll.rollout.prompt_env import PromptEnv, PromptManager, ScoreFn, User, UserEnv, load_user
from roll.rollout.reward_worker import WorkerClient
from roll.rollout.router import GenerationClient
from roll.rollout.tokenization_audit import TokenCheck, TokenizationAudit
from roll.rollout.tool_box import ToolBox, with_tools
from roll.rollout.types import Trajectory
from roll.rollout.worker import RolloutWorker
from roll.utils.memory import relax_gc
from roll.utils.seeding import derive_seed

if TYPE_CHECKING:
    from roll.rollout.agents.episode import AgentPlayer


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
    """The program that plays the prompts, if the policy does not answer them itself."""
    user: UserConfig | None = None
    """User that answers the policy, if the prompts are conversations."""
    trust_remote_code: bool = False
    """True if Python files that come with the tokenizer may run."""


class PromptWorker(RolloutWorker):
    """Generates and scores responses. ``rollout_workers.worker_cls`` may name a subclass."""

    val_client: GenerationClient | None = None
    """The way to the engines that answer held-out prompts, if others than those of the rollouts do."""

    def setup(self, context: PromptWorkerContext) -> None:
        from roll.models.tokenizer import load_tokenizer  # brings transformers

        self.context = context
        trusts = context.trust_remote_code
        tokenizer = load_tokenizer(context.tokenizer_path, alone=True, trust_remote_code=trusts)
        renderer = ChatRenderer(tokenizer, context.template)
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
        self.val_client = None if evaluators is None else GenerationClient(evaluators)

    async def set_rewards(self, domains: Mapping[str, Sequence[Any]]) -> None:
        """Sets where answers are scored from now on: handles of the workers of each domain."""
        self.rewards: dict[str, ScoreFn] = {
            name: WorkerClient[Sample, RewardResult](f"the rewards {name!r}", handles, "score").send
            for name, handles in domains.items()
        }

    def generate_fn(self, spec: GroupSpec) -> GenerateFn:
        assert isinstance(spec, PromptSpec)
        client = self.client if self.val_client is None or spec.sampling != "val" else self.val_client
        return client.generate if self.context.spread else client.pinned()

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
        partner, generate = await with_tools(env, spec.prompt.tag, self._tools, generate)
        return await manager.run_episode(partner, generate, episode)

    async def _score(self, sample: Sample) -> RewardResult:
        domain = self.context.domains.get(sample.data_source)
        if domain is None:
            return RewardResult(0.0, correct=False)
        try:
            return await self.rewards[domain](sample)
        except RewardError as error:
            raise UnscoredAnswerError(str(error)) from error
