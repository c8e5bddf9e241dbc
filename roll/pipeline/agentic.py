"""The agentic pipeline: rollouts come from environments, run by environment workers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from roll.agentic.env import path_of
from roll.algorithms.losses import policy_needs
from roll.configs.agentic import JUDGE_CLUSTER, MANAGERS, AgenticConfig
from roll.configs.batches import describe_batches
from roll.configs.env import EnvManagerConfig
from roll.configs.pipeline import TINY_VL
from roll.data.pictures import Pictures
from roll.data.requests import sampling_params
from roll.data.templates import ChatTemplate
from roll.distributed.strategy.base import Metrics
from roll.models.tokenizer import policy_pictures
from roll.pipeline.launch import MODEL_WORKERS, WorkerClasses, launch
from roll.pipeline.programs import AGENTIC
from roll.pipeline.rl import RLPipeline, set_losses
from roll.pipeline.rollout_workers import RolloutWorkers
from roll.pipeline.rollouts import keep_episodes, passes_filter, play_held_out
from roll.pipeline.session import RunFailedError
from roll.pipeline.start import RunContext
from roll.preflight.models import pictures_refused
from roll.report.render import save_renders
from roll.rollout.env_manager import LengthLimits
from roll.rollout.env_worker import EnvironmentWorker, EnvWorkerContext, Probed
from roll.rollout.plans import GroupPlan
from roll.rollout.reward_worker import JudgeWorker
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.types import RolloutGroup
from roll.utils.hashing import derive_seed


class AgenticRolloutWorkers(RolloutWorkers):
    """Training and validation environments, and their judge."""

    def __init__(self, config: AgenticConfig, run: RunContext) -> None:
        tokenizer_path = config.tokenizer_path or run.start.model_path
        self._managers = {name: getattr(config, name) for name in MANAGERS}
        model = run.start.model_path if config.pretrain == TINY_VL else config.pretrain
        self._pictures = policy_pictures(model, config.actor_train.data_args.picture_bounds)
        self._shown = bool(config.showing)
        contexts: dict[str, tuple[Any, ...]] = {
            name: (_worker_context(config, manager, tokenizer_path, self._pictures),)
            for name, manager in self._managers.items()
        }
        if config.judge is not None:
            contexts[JUDGE_CLUSTER] = (config.judge,)
        super().__init__(config, run, contexts)
        baseline = config.estimator.greedy_baseline
        self.train = self.scheduler("train_env_manager", "train", trains=True, baseline=baseline)
        # Twice as many as are shown, so that there are solved and unsolved ones to choose from.
        self.val = self.scheduler("val_env_manager", "val", num_recorded=2 * config.num_renders)
        self.val_greedy = self.scheduler("val_env_manager", "val", greedy=True)

    def connect(self) -> None:
        self._clusters["train_env_manager"].call("set_engines", self._roles.infer.present)
        self._clusters["val_env_manager"].call("set_engines", self._roles.evaluation_replicas.cluster.present)
        if (judge := self._clusters.get(JUDGE_CLUSTER)) is not None:
            for name in MANAGERS:
                self._clusters[name].call("set_judge", judge.handles)

    def probe(self) -> None:
        """Resets one environment of each tag, so that one that never starts ends the run before models are loaded.

        Raises:
            RunFailedError: an environment cannot be reset, or shows pictures to a policy that gets none; a line for
                each.
        """
        refs = {
            name: self._clusters[name].submit(
                "probe", context.envs, context.retries, derive_seed(self._config.seed, name)
            )
            for name in MANAGERS
            for (context,) in [self._contexts[name]]
        }
        answers = [each for name, ref in refs.items() for each in self._clusters[name].gather(ref, call="probe")]
        probed = [each for found in answers for each in found]
        problems = [each.problem or self._unseen(each) for each in probed]
        if found := dict.fromkeys(filter(None, problems)):
            raise RunFailedError("\n".join(found))
        self._roles.pictures = self._shown or any(each.shows_pictures for each in probed)

    def _unseen(self, probed: Probed) -> str:
        """Why an environment's pictures would not reach the policy, in a line; empty: they do, or there are none."""
        if not probed.shows_pictures:
            return ""
        why = pictures_refused(self._config)
        if self._pictures is None:
            why = f"the model {self._config.pretrain} takes none"
        return why and f"custom_envs.{probed.tag}: its observations have pictures, but {why}"

    def scheduler(self, name: str, seed_name: str, *, trains: bool = False, **plan: Any) -> RolloutScheduler:
        """A scheduler over one manager's workers, with the arguments of ``plan`` and ``make_scheduler``."""
        evaluates = name == "val_env_manager"
        return self.make_scheduler(self.plan(name, seed_name, **plan), name, trains=trains, evaluates=evaluates)

    def plan(self, name: str, seed_name: str, **fields: Any) -> GroupPlan:
        """The groups of one manager; ``seed_name`` separates their episodes from everybody else's.

        Args:
            **fields: of ``GroupPlan``, where they differ from the manager's configuration.
        """
        manager = self._managers[name]
        plan = GroupPlan(
            tags=tuple(manager.tags),
            slots_per_tag=tuple(manager.groups_per_tag.values()),
            weights=None if manager.tag_weights is None else tuple(manager.tag_weights),
            group_size=manager.group_size,
            redundancy=manager.group_size_redundancy,
            seed=self._config.seed,
            name=seed_name,
        )
        return replace(plan, **fields)


def _worker_context(
    config: AgenticConfig, manager: EnvManagerConfig, tokenizer_path: str, pictures: Pictures | None
) -> EnvWorkerContext:
    trains = manager is config.train_env_manager
    return EnvWorkerContext(
        # Registered names are known in this process only.
        envs={
            tag: env.model_copy(update={"env_type": path_of(env.env_type), "agent": env.agent and env.agent.placed()})
            for tag, env in config.played_envs(manager).items()
        },
        tokenizer_path=tokenizer_path,
        template=ChatTemplate.of(config.actor_train.data_args),
        params=sampling_params(
            config.sampling(manager), config.train_infer_correction.replay_kept_sets if trains else 0
        ),
        limits=LengthLimits(*config.lengths(held_out=not trains)),
        retries=manager.env_retries,
        tools=config.tools and config.tools.placed(),
        token_check=config.tokenization_sanity_check if trains else "disable",
        trust_remote_code=config.trusts("actor_train"),
        pictures=pictures,
    )


class AgenticPipeline(RLPipeline):
    """Trains a policy on environments (see ``RLPipeline``)."""

    config: AgenticConfig
    rollout_workers: AgenticRolloutWorkers
    filter_hint = (
        "the environments are too easy or too hard for the policy: loosen train_env_manager.query_filter_config, or "
        "change them"
    )

    def wants(self, group: RolloutGroup) -> bool:
        return passes_filter(group, self.config.train_env_manager.query_filter_config)

    def most_tokens(self, tag: str) -> int:
        sampled = self.config.sampling(self.config.train_env_manager).max_new_tokens or self.config.response_length
        return min(sampled, self.config.custom_envs[tag].max_tokens_per_step or sampled)

    def evaluate(self, name: str, step: int) -> Metrics:
        """Plays the validation episodes, see ``play_held_out``."""
        manager, envs = self.config.val_env_manager, self.rollout_workers
        greedy = None if self.config.sampling(manager).is_greedy else envs.val_greedy
        num_groups = self.config.val_batch_size // manager.group_size
        groups, metrics = play_held_out(self.session, name, step, num_groups, envs.val, greedy, self.check_groups)
        metrics["eval/attained"] = self.attained(groups)
        if name != "step":
            self.session.summary["eval"][name] = {
                "success": metrics["eval/success"],
                "success_greedy": metrics["eval_greedy/success"],
                "valid_rate": metrics.get("eval/valid_rate"),
                "reward": metrics["eval/reward"],
                "episodes": int(metrics["eval/episodes"]),
                "distinct_starts": len({t.turns[0].state_key for group in groups for t in group.trajectories}),
            }
        episodes = keep_episodes(self.session, step, groups)
        self.session.aside(partial(save_renders, episodes, self.session.renders, step, self.config.num_renders))
        valid = metrics.get("eval/valid_rate")  # of agent programs nobody knows
        self.session.display.note(
            f"evaluation {name} (step {step}): success {metrics['eval/success']:.1%}, "
            + ("" if valid is None else f"valid actions {valid:.1%} ")
            + f"on {metrics['eval/episodes']:.0f} held-out episodes"
        )
        return metrics


def run_agentic(config: AgenticConfig, started: float | None = None) -> int:
    """Runs the agentic pipeline to its end and returns the exit code, see ``launch``."""
    rollout_workers = dict.fromkeys(MANAGERS, EnvironmentWorker)
    workers: WorkerClasses = {**MODEL_WORKERS, **rollout_workers, JUDGE_CLUSTER: JudgeWorker}
    needs, notes = policy_needs(config), describe_batches(config)
    return launch(config, AGENTIC, _run, workers, needs=needs, notes=notes, started=started)


def _run(config: AgenticConfig, run: RunContext) -> None:
    envs = AgenticRolloutWorkers(config, run)
    envs.probe()
    envs.begin_setup()
    with run.set_up(config, envs):
        set_losses(run.roles, config)
    AgenticPipeline(config, run, envs).run()
