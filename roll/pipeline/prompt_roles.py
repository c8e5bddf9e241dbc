"""The prompts of a run, and the workers that have them answered and scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roll.configs.prompts import REWARD_CLUSTER, ROLLOUT_CLUSTER, PromptsConfig
from roll.configs.rlvr import RLVRConfig
from roll.data.prompt_sampler import PromptSampler
from roll.data.prompts import Prompt
from roll.data.requests import sampling_params
from roll.data.templates import ChatTemplate
from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.errors import WorkerDiedError
from roll.distributed.cluster.worker import Worker
from roll.pipeline.launch import MODEL_WORKERS
from roll.pipeline.rollout_roles import RolloutRoles
from roll.pipeline.start import Launched
from roll.rollout.env_manager import LengthLimits
from roll.rollout.prompt_worker import PromptPlan, PromptWorker, PromptWorkerContext
from roll.rollout.reward_worker import RewardWorker
from roll.rollout.scheduler import RolloutScheduler


class PromptRoles(RolloutRoles):
    """Rollout workers and reward domains.

    Args:
        train: the prompts to train on; ``None`` with ``eval_only``, and where prompts are not trained on.
    """

    def __init__(
        self, config: PromptsConfig, run: Launched, train: Sequence[Prompt] | None, val: Sequence[Prompt] | None
    ) -> None:
        tokenizer_path = config.tokenizer_path or run.start.model_path
        self._rewards = {name: run.clusters[f"{REWARD_CLUSTER}{name}"] for name in config.rewards}
        contexts: dict[str, tuple[Any, ...]] = {ROLLOUT_CLUSTER: (_worker_context(config, tokenizer_path),)}
        contexts |= {f"{REWARD_CLUSTER}{name}": (name, reward) for name, reward in config.rewards.items()}
        super().__init__(config, run, contexts)
        self.tags = list(config.domains)
        """All tags; a batch's ``tag_B`` indexes into it."""
        self._prompts = train or val
        self._train_prompts: PromptSampler | None = None
        if train is not None:
            assert isinstance(config, RLVRConfig)
            self._train_prompts = train_sampler(config, train)
            plan = PromptPlan(
                self._train_prompts,
                group_size=config.num_return_sequences_in_group,
                num_slots=config.groups_per_step + config.groups_ahead,
                seed=config.seed,
                sampling="train",
                baseline=config.estimator.greedy_baseline,
            )
            self.train = self.make_scheduler(plan, ROLLOUT_CLUSTER, trains=True)
        self.num_val_prompts = 0
        self.val: RolloutScheduler | None = None
        self.val_greedy: RolloutScheduler | None = None
        if val is not None:
            self.num_val_prompts = min(config.val_batch_size or len(val), len(val))
            held_out = PromptSampler(val, seed=config.seed, shuffle=False)
            self.val = self._val_scheduler(held_out, config.num_val_samples, greedy=False)
            self.val_greedy = self._val_scheduler(held_out, 1, greedy=True)

    def measuring(self, num_slots: int, seed: int) -> RolloutScheduler:
        """A scheduler over one sampled answer to each of some training prompts, drawn by a seed of its own.

        Where there are none, they are held-out ones, sampled as at an evaluation where nothing says how to train.
        """
        assert self._prompts is not None, "RLVRConfig.problems"
        sampling = "train" if isinstance(self._config, RLVRConfig) else "val"
        plan = PromptPlan(PromptSampler(self._prompts, seed), 1, num_slots, seed, sampling)
        return self.make_scheduler(plan, ROLLOUT_CLUSTER)

    def drawn(self, draw: int) -> Prompt:
        """The training prompt of a draw, which is a rollout group's number."""
        assert self._train_prompts is not None
        return self._train_prompts[draw]

    def epoch_of(self, draw: int) -> float:
        """Number of times that the training data has been met when the run comes to this draw."""
        assert self._train_prompts is not None
        return float(self._train_prompts.epoch_of(draw))

    def take_retries(self) -> dict[str, float]:
        """``reward/<domain>/retries``: new attempts of verifiers since the last call."""
        return {f"reward/{name}/retries": float(_retries(cluster)) for name, cluster in self._rewards.items()}

    def connect(self) -> None:
        """Tells the rollout workers where the engines and the rewards are."""
        rollout = self._clusters[ROLLOUT_CLUSTER]
        evaluator = self._roles.evaluator
        rollout.call("set_engines", self._roles.infer.handles, None if evaluator is None else evaluator.cluster.handles)
        rollout.call("set_rewards", {name: cluster.handles for name, cluster in self._rewards.items()})

    def _val_scheduler(self, prompts: PromptSampler, group_size: int, *, greedy: bool) -> RolloutScheduler:
        plan = PromptPlan(prompts, group_size, self.num_val_prompts, self._config.seed, "val", greedy)
        return self.make_scheduler(plan, ROLLOUT_CLUSTER, evaluates=True)


def prompt_workers(config: PromptsConfig) -> dict[str, type[Worker]]:
    """The process classes of all that answers and scores prompts."""
    rewards = {f"{REWARD_CLUSTER}{name}": RewardWorker for name in config.rewards}
    return {**MODEL_WORKERS, ROLLOUT_CLUSTER: PromptWorker, **rewards}


def train_sampler(config: RLVRConfig, dataset: Sequence[Prompt]) -> PromptSampler:
    """The order in which a run meets its training prompts.

    Raises:
        ValueError: ``domain_interleave_probs`` does not fit the dataset.
    """
    data = config.actor_train.data_args
    return PromptSampler(dataset, config.seed, data.shuffle, data.domain_interleave_probs, config.domains)


def _retries(rewards: Cluster) -> int:
    try:
        return sum(rewards.call("take_retries"))
    except WorkerDiedError:  # after its last answer; the next rollout brings it back
        return 0


def _worker_context(config: PromptsConfig, tokenizer_path: str) -> PromptWorkerContext:
    params = {"val": sampling_params(config.val_sampling)}
    if isinstance(config, RLVRConfig):
        params["train"] = sampling_params(config.train_sampling)
    return PromptWorkerContext(
        tokenizer_path=tokenizer_path,
        template=ChatTemplate.of(config.actor_train.data_args),
        params=params,
        limits={use: LengthLimits(*config.lengths(held_out=use == "val")) for use in params},
        domains=config.domains,
        spread=config.is_num_return_sequences_expand,
        tools=config.tools.placed() if isinstance(config, RLVRConfig) and config.tools else None,
        token_check=config.tokenization_sanity_check if isinstance(config, RLVRConfig) else "disable",
        agent=config.agent.placed() if isinstance(config, RLVRConfig) and config.agent else None,
        user=config.user and config.user.placed() if isinstance(config, RLVRConfig) else None,
        trust_remote_code=config.trusts("actor_train"),
    )
