"""The model roles of a run: their clusters, the way weights travel between them, and what to do when one dies."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from roll.configs.model import ModelArguments
from roll.configs.pipeline import PipelineConfig
from roll.configs.rl import RLConfig
from roll.configs.training import TrainingArguments
from roll.distributed.cluster.cluster import Cluster
from roll.distributed.cluster.errors import WorkerDiedError
from roll.distributed.strategy.base import States, StrategyContext
from roll.distributed.weights.sync import WeightSync
from roll.models.lora import LoraSpec
from roll.pipeline.model_cluster import ModelCluster, WithoutAdapter
from roll.pipeline.offload_manager import OffloadManager
from roll.utils.checksums import WrittenFile

logger = logging.getLogger(__name__)


class RestartBudget:
    """Dead workers that a run may still replace.

    Args:
        limit: ``max_worker_restarts``.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spent = 0

    def spend(self, dead: Sequence[tuple[Cluster, int]], during: str, error: BaseException) -> None:
        """Counts the dead (cluster, rank) and says so.

        Raises:
            WorkerDiedError: there are more than may be replaced.
        """
        self._spent += len(dead)
        if self._spent > self._limit:
            cluster, rank = dead[0]
            limit = f"max_worker_restarts={self._limit} {'is' if self._limit else 'allows no restart; it is'} used up"
            raise WorkerDiedError(cluster.name, rank, during, Cluster.current_step, f"{limit} ({error})") from error
        for cluster, rank in dead:
            logger.warning("%s rank %d died in %s and is replaced: %s", cluster.name, rank, during, error)


class Roles:
    """``actor_train``; ``actor_infer`` where something is generated; ``critic`` and ``reference`` where needed.

    Args:
        config: the run's configuration.
        clusters: started clusters by role name.
    """

    def __init__(self, config: PipelineConfig, clusters: Mapping[str, Cluster]) -> None:
        self.config = config
        self.offload_manager = OffloadManager({role: clusters[role] for role in config.roles if role in clusters})
        self.actor = ModelCluster(clusters["actor_train"], self.offload_manager)
        self.generator = clusters.get("actor_infer")
        self.restarts = RestartBudget(config.worker_restarts)
        self.on_replaced: list[Callable[[], None]] = []
        """Called after generating workers were replaced in an update of weights; they have other handles then."""
        self.critic = ModelCluster(clusters["critic"], self.offload_manager) if "critic" in clusters else None
        self.reference: ModelCluster | WithoutAdapter | None = None
        if "reference" in clusters:
            self.reference = ModelCluster(clusters["reference"], self.offload_manager)
        elif isinstance(config, RLConfig) and config.uses_reference and config.uses_lora:
            self.reference = WithoutAdapter(self.actor)

    @property
    def infer(self) -> Cluster:
        """The generating workers, of a run that has some."""
        assert self.generator is not None, "this run generates nothing"
        return self.generator

    def setup(self, model_path: str, critic_path: str, total_optimizer_steps: int) -> None:
        """Loads the policy everywhere, the same weights in all its roles.

        Args:
            model_path: Hugging Face folder of the policy and the reference.
            critic_path: Hugging Face folder whose trunk the critic starts from.
            total_optimizer_steps: horizon of the learning-rate schedules.
        """
        loading = []
        if isinstance(self.reference, ModelCluster):
            loading.append((self.reference, self.reference.submit_setup(self._context("reference", model_path))))
        if self.critic is not None:
            critic = replace(self._context("critic", critic_path), head="value")
            critic = replace(critic, total_optimizer_steps=total_optimizer_steps)
            loading.append((self.critic, self.critic.submit_setup(critic)))
        lora = _lora(self.config.actor_train.model_args)
        self.begin_policy(model_path, total_optimizer_steps, self.config.actor_train.training_args, lora)
        self.finish_policy()
        for role, refs in loading:
            role.gather_setup(refs)

    def begin_policy(
        self,
        model_path: str,
        total_optimizer_steps: int,
        training_args: TrainingArguments,
        lora: LoraSpec | None = None,
    ) -> None:
        """Starts to load the policy into the training and the generating workers, with a fresh optimizer."""
        context = replace(self._context("actor_train", model_path), lora=lora)
        worker = context.worker.model_copy(update={"training_args": training_args})
        context = replace(context, worker=worker, total_optimizer_steps=total_optimizer_steps)
        self._loading = {self.actor.cluster.name: self.actor.submit_setup(context)}
        if self.generator is not None:
            self._infer_context = replace(self._context("actor_infer", model_path), lora=lora)
            self.offload_manager.reserve(self.infer.name)
            continuous = self.config.generate_opt_level == 1
            self._loading[self.infer.name] = self.infer.submit("setup", self._infer_context, continuous)

    def finish_policy(self) -> None:
        """Waits for ``begin_policy``."""
        if self.generator is not None:
            self.infer.gather(self._loading.pop(self.infer.name), call="setup")
        self.actor.gather_setup(self._loading.pop(self.actor.cluster.name))
        if self.generator is not None:
            self._weights = WeightSync(
                self.actor.cluster,
                self.infer,
                bucket_bytes=self.config.model_update_buffer_size_mb << 20,
                check=self.config.check_weight_update,
                adapter_only=self._infer_context.lora is not None,
                trains_between=self.config.actor_train.model_update_frequency > 1,
            )

    def preload(self) -> None:
        """Has the roles beside the policy import what their set-up will need, while the policy is at work."""
        for role in (self.critic, self.reference):
            if isinstance(role, ModelCluster):
                role.cluster.submit("preload", getattr(self.config, role.cluster.name).strategy_args.strategy_name)

    @property
    def version(self) -> int:
        """What the generating workers have; -1: what they loaded at their start."""
        return self._weights.version

    def sync_weights(self, version: int) -> None:
        """Sends the actor's weights to the generating workers, see ``WeightSync``; they are then ready to generate.

        Without such workers there is nothing to do; one that dies meanwhile is replaced.

        Raises:
            WorkerDiedError: ``max_worker_restarts`` is used up, or another worker died.
        """
        if self.generator is None:
            return
        self._load_both()
        try:
            self._weights.sync(version)
        except WorkerDiedError as error:
            self._replace_generators(error)
        self.prepare_rollout()

    def drain(self) -> None:
        """Waits until no request is in flight; new ones wait for the next update of weights."""
        self.prepare_rollout()
        for rank, ref in enumerate(self.infer.submit("drain")):
            with contextlib.suppress(WorkerDiedError):  # the update replaces it
                self.infer.gather([ref], call="drain", ranks=[rank])

    def prepare_rollout(self) -> None:
        """Gives the generating workers their devices."""
        self.offload_manager.load({self.infer.name: States.ALL})

    def restart_generators(self, ranks: Sequence[int]) -> None:
        """Starts dead generating workers anew with the weights that the others have.

        Raises:
            WorkerDiedError: as ``sync_weights``.
        """
        for rank in ranks:
            self.infer.restart(rank)
        self.prepare_rollout()  # a worker that loads its model takes all of its device's room
        for rank in ranks:
            self.infer.call_rank(rank, "setup", self._infer_context, self.config.generate_opt_level == 1)
        self._load_both()
        try:
            self._weights.restore(*ranks)
        except WorkerDiedError as error:
            self._replace_generators(error)
        self.prepare_rollout()

    def _replace_generators(self, error: WorkerDiedError) -> None:
        """After an update in which generating workers died."""
        if error.role != self.infer.name:
            raise error
        dead = {error.rank, *(rank for rank, alive in enumerate(self.infer.alive()) if not alive)}
        self.restarts.spend([(self.infer, rank) for rank in sorted(dead)], "an update of weights", error)
        self.restart_generators(sorted(dead))
        for tell in self.on_replaced:
            tell()

    def _load_both(self) -> None:
        """Sender and receivers of weights, and nothing more where they share devices: no cache of a generator."""
        self.offload_manager.load({self.actor.cluster.name: States.WEIGHTS, self.infer.name: States.WEIGHTS})

    def save(self, path: Path) -> Callable[[], list[WrittenFile]]:
        """Writes what a resumed run needs of every trained role.

        Returns:
            Waits for the end of the writing: with ``async_save`` it goes on beside the steps that follow.
        """
        trained = [self.actor] if self.critic is None else [self.actor, self.critic]
        if self.config.async_save:
            waits = [role.start_save(path) for role in trained]
            return lambda: [file for wait in waits for file in wait()]
        files = [file for role in trained for file in role.save(path)]
        return lambda: files

    def load(self, path: Path) -> None:
        self.actor.load(path)
        if self.critic is not None:
            self.critic.load(path)

    def _context(self, role: str, model_path: str) -> StrategyContext:
        config = self.config
        return StrategyContext(
            worker=getattr(config, role),
            role=role,
            model_path=model_path,
            returns_hidden=role == "reference" and config.uses_full_kl,
            marks_hits=role == "actor_train" and config.marks_hits,
            keeps_output_layer=role == "actor_train" and config.uses_full_kl,
            seed=config.seed,
            temperature=config.scoring_temperature,
            max_grad_norm=config.max_grad_norm,
            l2=config.l2,
            sequence_length=config.sequence_length,
            max_running_requests=config.max_running_requests,
            recompute_kv=isinstance(config, RLConfig) and config.overlaps and config.kv_after_update == "recompute",
        )


def _lora(args: ModelArguments) -> LoraSpec | None:
    """The actor's adapter, if it trains one."""
    if not args.lora_targets:
        return None
    return LoraSpec(args.lora_rank, args.lora_alpha or 2 * args.lora_rank, args.lora_targets, args.lora_dropout)
