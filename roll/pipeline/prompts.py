"""The prompts of a run: their datasets, the workers that generate and score responses, and statistics."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from roll.configs.data import DataArguments
from roll.configs.pipeline import TINY_VL
from roll.configs.prompts import REWARD_CLUSTER, ROLLOUT_CLUSTER, DataGeneratorConfig, PromptsConfig
from roll.configs.resuming import Rows
from roll.configs.rlvr import RLVRConfig
from roll.data.conversations import Conversations
from roll.data.prompts import Prompt, PromptDataset, PromptSampler, load_prompts
from roll.data.renderer import ChatRenderer, Tool
from roll.data.requests import sampling_params
from roll.data.templates import ChatTemplate
from roll.distributed.cluster.cluster import Cluster, Worker
from roll.distributed.cluster.errors import WorkerDiedError
from roll.models.tokenizer import policy_pictures
from roll.pipeline.launch import MODEL_WORKERS
from roll.pipeline.rollout_workers import RolloutWorkers
from roll.pipeline.session import RunFailedError
from roll.pipeline.start import RunContext
from roll.pipeline.teachers import teacher_prompts
from roll.preflight.models import media_refused
from roll.preflight.templates import tag_renderers
from roll.rewards.accuracy import Judged, figures_at_k
from roll.rewards.scorer import sees
from roll.rewards.scoring import References
from roll.rollout.env_manager import LengthLimits
from roll.rollout.metrics import mean
from roll.rollout.prompt_worker import PromptPlan, PromptWorker, PromptWorkerContext
from roll.rollout.reward_worker import RewardWorker
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.tool_box import told_tools
from roll.rollout.types import OVER_BUDGET, RolloutGroup
from roll.utils.foreign import describe_error
from roll.utils.registry import import_path


class PromptRolloutWorkers(RolloutWorkers):
    """Rollout workers and reward domains.

    Args:
        train: the prompts to train on; ``None`` with ``eval_only``, and where prompts are not trained on.
    """

    def __init__(
        self, config: PromptsConfig, run: RunContext, train: Sequence[Prompt] | None, val: Sequence[Prompt] | None
    ) -> None:
        self._rewards = {name: run.clusters[f"{REWARD_CLUSTER}{name}"] for name in config.rewards}
        contexts: dict[str, tuple[Any, ...]] = {ROLLOUT_CLUSTER: (_worker_context(config, run.start.model_path),)}
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
        rollout.call("set_engines", self._roles.infer.present, None if evaluator is None else evaluator.cluster.present)
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


def _worker_context(config: PromptsConfig, model_path: str) -> PromptWorkerContext:
    tokenizer_path = config.tokenizer_path or model_path
    model = model_path if config.pretrain == TINY_VL else config.pretrain
    params = {"val": sampling_params(config.val_sampling)}
    if isinstance(config, RLVRConfig):
        params["train"] = sampling_params(config.train_sampling, config.train_infer_correction.replay_kept_sets)
    return PromptWorkerContext(
        tokenizer_path=tokenizer_path,
        pictures=policy_pictures(model, config.actor_train.data_args.picture_bounds),
        template=ChatTemplate.of(config.actor_train.data_args),
        params=params,
        limits={use: LengthLimits(*config.lengths(held_out=use == "val")) for use in params},
        domains=config.domains,
        seeing=frozenset(name for name, reward in config.rewards.items() if sees(reward)),
        spread=config.is_num_return_sequences_expand,
        tools=config.tools.placed() if isinstance(config, RLVRConfig) and config.tools else None,
        token_check=config.tokenization_sanity_check if isinstance(config, RLVRConfig) else "disable",
        agent=config.agent.placed() if isinstance(config, RLVRConfig) and config.agent else None,
        user=config.user and config.user.placed() if isinstance(config, RLVRConfig) else None,
        trust_remote_code=config.trusts("actor_train"),
    )


_RECIPE = "made_from.json"
TRIAL_SECONDS = 30.0
"""For the reference answers of a dataset."""


DataT = TypeVar("DataT", PromptDataset, Conversations)


@dataclass(frozen=True)
class Datasets(Generic[DataT]):
    """Data that is trained on and data that is held out."""

    train: DataT | None
    """``None`` with ``eval_only``."""
    val: DataT | None

    def describe(self) -> list[str]:
        """Account of what was read: a line for each dataset, and for what of it is left out or not read."""
        return [*_lines("training data", self.train), *_lines("held-out data", self.val)]

    @property
    def have_pictures(self) -> bool:
        """Tells whether the policy gets pictures."""
        return any(data is not None and data.has_pictures for data in (self.train, self.val))

    def identities(self) -> dict[str, Rows]:
        """What tells the datasets from others, by the section that names them."""
        read = {"actor_train.data_args": self.train, "validation.data_args": self.val}
        reports = {section: data.report.identity for section, data in read.items() if data is not None}
        return {section: identity for section, identity in reports.items() if identity is not None}


def _lines(name: str, data: PromptDataset | Conversations | None) -> list[str]:
    if data is None:
        return []
    return [f"{name}: {data.report}", *data.report.notes]


def make_data(generator: DataGeneratorConfig) -> None:
    """Calls the generator, unless its folder holds what the same call has made before.

    Raises:
        OSError: of the generator.
        ValueError: of the generator, or of what else it raises.
    """
    folder = Path(generator.folder).expanduser()
    recipe = {"path": generator.path, "args": generator.args}
    note = folder / _RECIPE
    if note.is_file() and json.loads(note.read_text(encoding="utf-8")) == recipe:
        return
    make = cast("Callable[..., Any]", import_path(generator.path, "data_generator.path"))
    folder.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)  # nothing half made must look finished
    try:
        make(folder, **generator.args)
    except (OSError, ValueError):
        raise
    except Exception as error:  # whatever a user's function raises
        raise ValueError(f"data_generator: {generator.path}: {describe_error(error)}") from error
    note.write_text(json.dumps(recipe) + "\n", encoding="utf-8")


def load_datasets(config: RLVRConfig, renderer: ChatRenderer) -> Datasets[PromptDataset]:
    """The prompts that the run needs.

    Raises:
        DataError: everything that is wrong in the files, by file and line.
        ValueError: ``domain_interleave_probs`` does not fit the training data, or a tool cannot be made.
    """
    tools = told_tools(config.tools, list(config.domains))
    train = None if config.eval_only else _load(config, config.actor_train.data_args, renderer, tools)
    if train is not None:
        if (writer := teacher_prompts(config, renderer)) is not None:
            writer.check(train, config.sequence_length - (config.train_sampling.max_new_tokens or 0))
        train_sampler(config, train)  # what is wrong with the shares is told before Ray starts
    val = _load(config, config.validation.data_args, renderer, tools, held_out=True) if config.validation else None
    return Datasets(train, val)


def tell(line: str) -> None:
    """Writes a line for the person who waits for a run to begin."""
    sys.stderr.write(f"{line}\n")


def _load(
    config: RLVRConfig,
    data: DataArguments,
    renderer: ChatRenderer,
    tools: Mapping[str, Sequence[Tool]],
    *,
    held_out: bool = False,
) -> PromptDataset:
    return load_prompts(
        data,
        renderer=renderer,
        prompt_length=config.lengths(held_out=held_out)[0],
        allowed_tags=config.domains,
        seed=config.seed,
        tools=tools,
        tag_renderers=tag_renderers(config, renderer),
        check=References(config.rewards, TRIAL_SECONDS, tell, tell),
        refused=media_refused(config),
    )


class RewardFailureError(RunFailedError):
    """Too many responses could not be scored."""


def accuracy_metrics(groups: Sequence[RolloutGroup], num_samples: int, prefix: str) -> dict[str, float]:
    """``figures_at_k`` over prompts, for all and, with several tags, for each.

    Prompts of which no answer could be scored are left out; one with fewer than n counts with those it has.
    """
    answered = [group for group in groups if group.trajectories]
    if not answered:
        return {}
    metrics = _accuracy(answered, num_samples, prefix)
    tags = sorted({group.tag for group in answered})
    if len(tags) > 1:
        for tag in tags:
            metrics |= _accuracy([group for group in answered if group.tag == tag], num_samples, f"{prefix}/{tag}")
    return metrics


def _accuracy(groups: Sequence[RolloutGroup], n: int, prefix: str) -> dict[str, float]:
    prompts = [
        [Judged(t.score, t.success, t.turns[-1].action, t.knows_actions) for t in group.trajectories]
        for group in groups
    ]
    return {f"{prefix}/{name}": value for name, value in figures_at_k(prompts, n).items()}


def reward_metrics(groups: Sequence[RolloutGroup], config: PromptsConfig) -> dict[str, float]:
    """Per domain: ``score``, ``accuracy``, ``errors`` (answers without a reward), and the verifiers' own numbers.

    ``over_budget``, per domain and in all, are answers that count as wrong because they cost too much to judge.
    """
    metrics: dict[str, float] = {"reward/over_budget": 0.0}
    for name, of_domain in _by_domain(groups, config).items():
        trajectories = [trajectory for group in of_domain for trajectory in group.trajectories]
        metrics[f"reward/{name}/errors"] = float(sum(group.dropped for group in of_domain))
        over = float(sum(OVER_BUDGET in trajectory.info for trajectory in trajectories))
        metrics[f"reward/{name}/over_budget"] = over
        metrics["reward/over_budget"] += over
        if not trajectories:
            continue
        metrics[f"reward/{name}/score"] = mean(trajectory.score for trajectory in trajectories)
        metrics[f"reward/{name}/accuracy"] = mean(trajectory.success for trajectory in trajectories)
        parts: defaultdict[str, list[float]] = defaultdict(list)
        for trajectory in trajectories:
            for part, value in trajectory.info.items():
                if "/" in part and isinstance(value, int | float):
                    parts[part].append(float(value))
        metrics |= {f"reward/{name}/{part}": mean(values) for part, values in parts.items()}
    return metrics


def check_error_rates(groups: Sequence[RolloutGroup], config: PromptsConfig) -> None:
    """Stops the run where too many answers of a domain could not be scored.

    Raises:
        RewardFailureError: the share is above the domain's ``max_error_rate``.
    """
    for name, of_domain in _by_domain(groups, config).items():
        failed = sum(group.dropped for group in of_domain)
        total = failed + sum(len(group.trajectories) for group in of_domain)
        limit = config.rewards[name].max_error_rate
        if total and failed / total > limit:
            last = next(group.errors[-1] for group in reversed(of_domain) if group.errors)
            raise RewardFailureError(
                f"rewards.{name}: {failed} of {total} answers could not be scored, more than max_error_rate={limit:g}; "
                f"the last error: {last}"
            )


def _by_domain(groups: Iterable[RolloutGroup], config: PromptsConfig) -> dict[str, list[RolloutGroup]]:
    domains = config.domains
    found: defaultdict[str, list[RolloutGroup]] = defaultdict(list)
    for group in groups:
        found[domains[group.tag]].append(group)
    return dict(sorted(found.items()))
