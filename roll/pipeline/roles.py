"""The model roles of a run: their clusters, log-probs and weights, the generating replicas, and recovery."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.algorithms.quantities import BASIC, Divergence, Quantity, asked_of
from roll.configs.engines.card import kind_of, task_of
from roll.configs.pipeline import PipelineConfig
from roll.configs.prompts import REWARD_CLUSTER
from roll.configs.rl import VAL_INFER, RLConfig
from roll.configs.teacher import DivergenceConfig
from roll.configs.worker import ModelArguments, ReplayMode, TrainingArguments
from roll.data.batch import Batch
from roll.data.templates import ChatTemplate
from roll.distributed.cluster.cluster import Cluster, lost_nodes
from roll.distributed.cluster.errors import NodeLostError, WorkerDiedError
from roll.distributed.cluster.hangs import Whereabouts
from roll.distributed.strategy.base import EngineNodes, States, StrategyContext
from roll.distributed.weights.sync import WeightSync, useless_deltas
from roll.models.loading import load_config, resolve_dtype
from roll.models.lora import LoraSpec
from roll.models.tokenizer import policy_tokenizer
from roll.pipeline.model_cluster import BaseModelReference, ModelCluster, OffloadManager, Scorer
from roll.pipeline.teachers import TaggedTeachers, aligned, shared_ids, with_teacher
from roll.utils.hashing import WrittenFile

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)


class RestartBudget:
    """Dead workers that a run may still replace; those that a lost node takes along count as one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spent = 0
        self._nodes: set[str] = set()
        """Lost ones that are counted."""

    def spend(self, dead: Sequence[tuple[Cluster, int, Whereabouts | None]], during: str, error: BaseException) -> None:
        """Counts the dead (cluster, rank, lost process) and says so.

        Raises:
            WorkerDiedError: there are more than may be replaced.
        """
        places = [place for _, _, place in dead]
        gone = lost_nodes() if any(places) else set[str]()
        nodes = {place.node_id for place in places if place is not None and place.node_id in gone}
        alone = sum(place is None or place.node_id not in gone for place in places)
        self._spent += alone + len(nodes - self._nodes)
        self._nodes |= nodes
        if self._spent > self._limit:
            cluster, rank, place = dead[0]
            limit = f"max_worker_restarts={self._limit} {'is' if self._limit else 'allows no restart; it is'} used up"
            reason = f"{f'{place}: ' if place else ''}{limit} ({error})"
            raise WorkerDiedError(cluster.name, rank, during, Cluster.current_step, reason) from error
        for cluster, rank, _ in dead:
            logger.warning("%s rank %d died in %s: %s", cluster.name, rank, during, error)


class Replicas:
    """The generating workers of one role.

    Args:
        on_replaced: called after an update of weights in which some were replaced; they have other handles then.
        beside: clusters whose models score while these generate, and so are on their devices at the same time.
    """

    def __init__(
        self,
        cluster: Cluster,
        actor: Cluster,
        config: PipelineConfig,
        offload_manager: OffloadManager,
        restarts: RestartBudget,
        on_replaced: list[Callable[[], None]],
        beside: Sequence[str] = (),
    ) -> None:
        self.cluster = cluster
        self._actor = actor
        self._config = config
        self._offload_manager = offload_manager
        self._restarts = restarts
        self._on_replaced = on_replaced
        self._beside = dict.fromkeys(beside, States.WEIGHTS)
        self.num_loads = 0
        """Times that a model was loaded, by all or by one that was replaced."""

    def begin_setup(self, context: StrategyContext) -> None:
        """Starts to load the policy and returns at once; called again, it starts over."""
        self._context = context
        self.num_loads += 1
        self._offload_manager.reserve(self.cluster.name)
        self._loading = self._submit_setup(self.cluster.ranks)

    def finish_setup(self, *, trains_between: bool) -> None:
        """Waits for ``begin_setup``; ``trains_between``: see ``WeightSync``."""
        self._gather_setup(self._loading)
        self._weights = WeightSync(
            self._actor,
            self.cluster,
            bucket_bytes=self._config.model_update_buffer_size_mb << 20,
            check=self._config.check_weight_update,
            adapter_only=self._context.lora is not None,
            trains_between=trains_between,
            deltas=self._config.weight_update_deltas,
        )
        if self._config.weight_update_deltas:
            args = self._config.actor_train.model_args
            sizes = load_config(self._context.model_path, trust_remote_code=args.trust_remote_code)
            plan, dtype = self._actor.placement.plan, resolve_dtype(args.dtype, sizes)
            receivers = [self.cluster.slots[rank] for rank in self.cluster.ranks]
            if reason := useless_deltas(plan, self._actor.slots, receivers, dtype):
                logger.warning("weight_update_deltas: true saves nothing for %s: %s", self.cluster.name, reason)

    def take_update_metrics(self) -> dict[str, float]:
        """See ``WeightSync.take_metrics``."""
        return self._weights.take_metrics()

    @property
    def version(self) -> int:
        """Version of the weights that they have; -1: those that they loaded at their start."""
        return self._weights.version

    @property
    def shares_devices(self) -> bool:
        """Tells whether they and the actor take turns on their devices."""
        return self._offload_manager.shares_devices(self._actor.name, self.cluster.name)

    def resend(self) -> None:
        """Sends the same version of the actor's weights again, which must still be its present ones."""
        self._load_both()
        self._weights.sync(self.version)
        self.prepare()

    def sync(self, version: int) -> None:
        """Sends them the actor's weights, see ``WeightSync``; they are then ready to generate.

        One that dies meanwhile is replaced.

        Raises:
            WorkerDiedError: ``max_worker_restarts`` is used up, or another worker died.
        """
        self._load_both()
        try:
            self._weights.sync(version)
        except WorkerDiedError as error:
            self._replace(error)
        self.prepare()

    def drain(self) -> None:
        """Waits until no request is in flight; new ones wait for the next update of weights."""
        self.prepare()
        for rank, ref in zip(self.cluster.ranks, self.cluster.submit("drain"), strict=True):
            with contextlib.suppress(WorkerDiedError):  # the update replaces it
                self.cluster.gather([ref], call="drain", ranks=[rank])

    def prepare(self) -> None:
        """Gives them their devices, and those who score what they generate theirs."""
        self._offload_manager.load({self.cluster.name: States.ALL, **self._beside})

    def restart(self, ranks: Sequence[int]) -> None:
        """Starts dead ones anew with the weights that the others have.

        Those whose devices are gone with their node are left out, if there are others.

        Raises:
            WorkerDiedError: as ``sync``; no generating worker is left.
        """
        self.num_loads += 1
        for rank in ranks:
            try:
                self.cluster.restart(rank)
            except NodeLostError as error:
                self.cluster.go_on_without(error)
        ranks = [rank for rank in ranks if rank not in self.cluster.lost]
        self.prepare()  # a worker that loads its model takes all of its device's room
        self._gather_setup(self._submit_setup(ranks))
        self._load_both()
        try:
            self._weights.restore(*ranks)
        except WorkerDiedError as error:
            self._replace(error)
        self.prepare()

    def _submit_setup(self, ranks: Sequence[int]) -> dict[ObjectRef, int]:
        """Has these ranks, and all parts of their engines, load the model.

        Returns:
            The rank of each call.
        """
        calls: dict[ObjectRef, int] = {}
        for rank in ranks:
            # All parts of an engine have its rank, from which its seed follows: they must sample the same.
            context = self._context.at_rank(rank, self.cluster.world_size)
            parts: list[Any] = [self.cluster.handles[place] for place in self.cluster.parts(rank)]
            meeting = self.cluster.meeting_place(rank) if len(parts) > 1 else None
            for number, part in enumerate(parts):
                nodes = None if meeting is None else EngineNodes(*meeting, number, len(parts))
                others = [] if number else parts[1:]
                calls[part.setup.remote(replace(context, nodes=nodes), self._continuous, others)] = rank
        return calls

    def _gather_setup(self, calls: Mapping[ObjectRef, int]) -> None:
        self.cluster.gather([*calls], call="setup", ranks=[*calls.values()])

    @property
    def _continuous(self) -> bool:
        return self._config.generate_opt_level == 1

    def _replace(self, error: WorkerDiedError) -> None:
        """After an update in which some died."""
        if error.role != self.cluster.name:
            raise error
        dead = {error.rank: self.cluster.whereabouts.get(error.rank)} | self.cluster.dead()
        self._restarts.spend([(self.cluster, *each) for each in sorted(dead.items())], "an update of weights", error)
        self.restart(sorted(dead))
        for tell in self._on_replaced:
            tell()

    def _load_both(self) -> None:
        """Sender and receivers of weights, and nothing more where they share devices: no cache of a generator."""
        self._offload_manager.load({self._actor.name: States.WEIGHTS, self.cluster.name: States.WEIGHTS})


class Roles:
    """``actor_train``; ``actor_infer`` where something is generated; ``critic``, ``reference``, ``teacher`` …"""

    pictures = False
    """There are pictures in the prompts of the run."""

    def __init__(
        self, config: PipelineConfig, clusters: Mapping[str, Cluster], needs: tuple[Quantity, ...] = BASIC
    ) -> None:
        self.config = config
        self.needs = needs
        """What losses take from the trained model, but for the comparison with a teacher."""
        self.clusters = {name: clusters[name] for name in (*config.roles, VAL_INFER) if name in clusters}
        """Of the roles that have a model."""
        self.workers = clusters
        """Of all that the run has, those without a model too."""
        self.scorers = [
            name
            for name, worker in config.clusters.items()
            if name.startswith(REWARD_CLUSTER) and worker.device_mapping and name in clusters
        ]
        """Clusters of rewards whose models have devices."""
        self.offload_manager = OffloadManager({**self.clusters, **{name: clusters[name] for name in self.scorers}})
        by_work = config.balance_ranks_by == "work"
        self.actor = ModelCluster(clusters["actor_train"], self.offload_manager, by_work)
        if isinstance(config, RLConfig):
            self.actor.compare(config.train_infer_correction, by_age=config.overlaps)
        self.restarts = RestartBudget(config.worker_restarts)
        self.on_replaced: list[Callable[[], None]] = []
        """Called after generating workers were replaced in an update of weights; they have other handles then."""
        self.on_synced: list[Callable[[Replicas], None]] = []
        """Called after generating workers have got new weights."""
        replicas = {
            name: Replicas(
                clusters[name],
                self.actor.cluster,
                config,
                self.offload_manager,
                self.restarts,
                self.on_replaced,
                self.scorers,
            )
            for name in ("actor_infer", VAL_INFER)
            if name in clusters
        }
        self.generator = replicas.get("actor_infer")
        self.evaluator = replicas.get(VAL_INFER)
        """Answers in evaluations; ``None``: the generator does."""
        self.critic = ModelCluster(clusters["critic"], self.offload_manager, by_work) if "critic" in clusters else None
        self.reference: ModelCluster | BaseModelReference | None = None
        if "reference" in clusters:
            self.reference = ModelCluster(clusters["reference"], self.offload_manager, by_work)
        elif config.uses_reference and config.uses_lora:
            self.reference = BaseModelReference(self.actor)
        self._teachers = {
            name: ModelCluster(clusters[name], self.offload_manager, by_work)
            for name in self.clusters
            if kind_of(name) == "teacher"
        }
        self.teacher: Scorer | None = None
        """Known from ``setup`` on."""

    @property
    def rollout_replicas(self) -> Replicas:
        """Replicas that answer in rollouts, of a run that generates."""
        assert self.generator is not None, "this run generates nothing"
        return self.generator

    @property
    def evaluation_replicas(self) -> Replicas:
        """Replicas that answer in evaluations, of a run that generates."""
        return self.evaluator or self.rollout_replicas

    @property
    def others_score(self) -> bool:
        """Tells whether models beside the policy say something of each row before it is trained."""
        return any((self.critic, self.reference, self.teacher))

    @property
    def infer(self) -> Cluster:
        """The generating workers of the rollouts."""
        return self.rollout_replicas.cluster

    def setup(self, model_path: str, total_optimizer_steps: int, teacher_path: str | None = None) -> None:
        """Loads the policy everywhere, the same weights in all its roles but those with models of their own."""
        loading = []
        if (divergence := self.config.divergence) is not None:
            trusts, trusts_teacher = self.config.trusts("actor_train"), self.config.trusts("teacher")
            shared = shared_ids((model_path, trusts), (teacher_path, trusts_teacher)) if teacher_path else None
            temperature = self.config.teacher_temperature
            self.needs += (Divergence(divergence, temperature, teacher_path, shared, trusts_teacher),)
        taught: dict[str, Scorer] = {}
        for name, cluster in self._teachers.items():
            context = self._context(name, teacher_path or self.config.model_of(name))
            taught[name] = cluster
            if self.config.aligns_teacher:
                trusts = self.config.trusts("actor_train")
                policy = policy_tokenizer(model_path, self.config.tokenizer_path, trust_remote_code=trusts)
                context, taught[name] = aligned(context, cluster, policy)
            loading.append((cluster, cluster.submit_setup(context)))
        self.teacher = taught.get("teacher") or self._tagged(taught)
        if isinstance(self.reference, ModelCluster):
            loading.append((self.reference, self.reference.submit_setup(self._own_context("reference", model_path))))
        if self.critic is not None:
            own = self._own_context("critic", model_path)
            critic = replace(own, head="value", total_optimizer_steps=total_optimizer_steps)
            loading.append((self.critic, self.critic.submit_setup(critic)))
        lora = _lora(self.config.actor_train.model_args)
        if self.evaluator is not None:
            self.evaluator.begin_setup(replace(self._context(VAL_INFER, model_path), lora=lora))
        self.begin_policy(model_path, total_optimizer_steps, self.config.actor_train.training_args, lora)
        self.finish_policy()
        for role, refs in loading:
            role.gather_setup(refs)
        if self.evaluator is not None:
            self.evaluator.finish_setup(trains_between=False)

    def begin_policy(
        self,
        model_path: str,
        total_optimizer_steps: int,
        training_args: TrainingArguments,
        lora: LoraSpec | None = None,
    ) -> None:
        """Starts to load the policy into the training and the generating workers, with a fresh optimizer."""
        context = self._context("actor_train", model_path)
        worker = context.worker.model_copy(update={"training_args": training_args})
        context = replace(context, worker=worker, lora=lora, total_optimizer_steps=total_optimizer_steps)
        self._loading = self.actor.submit_setup(context)
        if self.generator is not None:
            self.generator.begin_setup(replace(self._context("actor_infer", model_path), lora=lora))

    def finish_policy(self) -> None:
        """Waits for ``begin_policy``."""
        if self.generator is not None:
            self.generator.finish_setup(trains_between=self.config.actor_train.model_update_frequency > 1)
        self.actor.gather_setup(self._loading)

    def preload(self) -> None:
        """Has the roles beside the policy import what their set-up will need, while the policy is at work."""
        for role in (self.critic, self.reference, *self._teachers.values()):
            if isinstance(role, ModelCluster):
                worker = self.config.section_of(role.cluster.name)
                assert worker is not None, "a role that the configuration has"
                role.cluster.submit("preload", worker.strategy_args.strategy_name)

    def sync_weights(self, version: int) -> None:
        """Sends the actor's weights to the generating workers of the rollouts, see ``Replicas.sync``.

        Without such workers there is nothing to do.

        Raises:
            WorkerDiedError: ``max_worker_restarts`` is used up, or another worker died.
        """
        if self.generator is not None:
            self._sync(self.generator, version)

    def _sync(self, replicas: Replicas, version: int) -> None:
        replicas.sync(version)
        for tell in self.on_synced:
            tell(replicas)

    def sync_evaluator(self, version: int) -> None:
        """The same for ``val_infer``. Rollouts that go on beside training go on: they keep their devices.

        Raises:
            WorkerDiedError: as ``sync_weights``.
        """
        assert self.evaluator is not None, "the generator evaluates"
        self._sync(self.evaluator, version)
        if isinstance(self.config, RLConfig) and self.config.overlaps:
            beside = dict.fromkeys(self.scorers, States.WEIGHTS)
            self.offload_manager.load({self.infer.name: States.ALL, self.evaluator.cluster.name: States.ALL, **beside})

    def score(self, batch: Batch, old_rows: Tensor, config: RLConfig) -> Batch:
        """Adds the log-probabilities of the training engine, the reference and the teacher, and the critic's values.

        Roles on different devices work at the same time, but for the KL over the vocabulary the actor needs what the
        reference returns.

        Args:
            old_rows: those that the actor scores.
        """
        if config.actor_train.router_replay.mode == "R3" and vars(batch)["experts_TE"] is None:
            raise ValueError(
                "actor_train.router_replay.mode: R3, but the rollouts contain no experts; expected disable or R2"
            )
        if (most := config.train_infer_correction.replay_kept_sets) and batch.kept_I is None:
            raise ValueError(
                f"train_infer_correction.replay_kept_sets: {most}, but the rollouts contain no kept sets; expected 0"
            )
        batch = self.actor.store(batch)
        if config.bypasses_old_logprobs:
            batch = batch.replace(old_logprobs_T=vars(batch)["rollout_logprobs_T"])
        actor = {"old_logprobs_T": self.actor if len(old_rows) else None}
        others = {"ref_logprobs_T": self.reference, "teacher_logprobs_T": self.teacher, "values_T": self.critic}
        if 0 < len(old_rows) < batch.num_sequences:
            batch = batch.replace(
                on_policy_B=torch.ones(batch.num_sequences, dtype=torch.bool).index_fill(0, old_rows, False)
            )
        kl = config.kl
        if not kl.over_vocabulary:
            return _with_scores(batch, actor | others, old_rows, config.divergence)
        batch = _with_scores(batch, others, old_rows, config.divergence)
        if batch.ref_hidden_TH is None:
            raise ValueError(
                "kl_penalty: 'full', but the reference's strategy returns no hidden states; expected hf_infer or an "
                "fsdp2, deepspeed or megatron strategy, or an estimator such as k3"
            )
        batch = _with_scores(batch, actor, old_rows)
        # Hidden states are large: they travel on to the trainer only if its loss reads them.
        in_loss = kl.loss is not None and kl.loss.penalty == "full"
        return batch if in_loss else batch.replace(ref_hidden_TH=None)

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

    def _tagged(self, teachers: Mapping[str, Scorer]) -> TaggedTeachers | None:
        """Several teachers as one, by the names that they have in ``teachers``."""
        if not isinstance(self.config, RLConfig) or not teachers:
            return None
        own = self.config.teachers
        return TaggedTeachers(
            {name: teachers[f"teachers.{name}"] for name in own},
            {name: [at for at, tag in enumerate(self.config.tags) if each.judges(tag)] for name, each in own.items()},
            {name: self.config.teacher_coefficient(name) for name in own},
        )

    def _own_context(self, role: str, policy: str) -> StrategyContext:
        """Of a role that may start from another model than the policy."""
        own = self.config.model_of(role)
        return self._context(role, policy if own == self.config.pretrain else own)

    def _context(self, role: str, model_path: str) -> StrategyContext:
        config, teaches = self.config, kind_of(role) == "teacher"
        worker = config.clusters[VAL_INFER] if role == VAL_INFER else config.section_of(role)
        assert worker is not None, "a role that the configuration has"
        return StrategyContext(
            worker=worker,
            role=role,
            model_path=model_path,
            tokenizer_path=config.tokenizer_path,
            head="score" if role == "actor_train" and config.trains_scores else "lm",
            needs=self.needs if role == "actor_train" else asked_of(kind_of(role), self.needs),
            timeout=config.rpc_timeout,
            seed=config.seed,
            temperature=config.teacher_temperature if teaches else config.scoring_temperature,
            max_grad_norm=config.max_grad_norm,
            l2=config.l2,
            sequence_length=config.longest_sequence if task_of(role) == "generates" else config.sequence_length,
            max_running_requests=config.max_running_requests,
            template=ChatTemplate.of(config.actor_train.data_args),
            saves=frozenset(config.checkpoint_config.save_contents),
            loads=frozenset(config.checkpoint_config.load_contents),
            router_replay=self._router_replay(role),
            updated_after_offload=updates_after_offload(config, role),
            pictures=self.pictures,
            recompute_kv=isinstance(config, RLConfig) and config.overlaps and config.kv_after_update == "recompute",
        )

    def _router_replay(self, role: str) -> ReplayMode:
        """What a role has to do with the choice of experts."""
        mode = self.config.actor_train.router_replay.mode
        concerned = ("actor_train", "actor_infer") if mode == "R3" else ("actor_train",)
        return mode if role in concerned else "disable"


def updates_after_offload(config: PipelineConfig, role: str) -> bool:
    """Tells whether a role gets all weights each time before it generates, unless they are still on its device.

    A step begins with an update, and so does an evaluation by ``val_infer``; rollouts that go on beside training may
    first end what they have begun, and of an adapter the base stays.
    """
    if not isinstance(config, RLConfig) or config.eval_only or config.uses_lora:
        return False
    every_step = config.actor_train.model_update_frequency == 1 and not config.overlaps
    return role == VAL_INFER or (role == "actor_infer" and every_step)


def _with_scores(
    batch: Batch,
    roles: Mapping[str, Scorer | None],
    old_rows: Tensor,
    divergence: DivergenceConfig | None = None,
) -> Batch:
    """The batch with the columns that each role computes, named by the first of them; the roles work side by side.

    Experts are chosen for the policy that trains alone, whose log-probs alone are compared with the rollout's.
    """
    unrouted = batch.replace(experts_TE=None, rollout_logprobs_T=None)
    pending = {
        name: role.submit_logprobs(*((batch, old_rows) if name == "old_logprobs_T" else (unrouted, None)))
        for name, role in roles.items()
        if role is not None
    }
    columns: dict[str, Any] = {}
    for name, wait in pending.items():
        scores = wait()
        found = scores.as_they_are.get
        if name == "teacher_logprobs_T":
            batch = with_teacher(batch, scores, divergence)
            continue
        columns[name] = found("values_T" if name == "values_T" else "logprobs_T")
        if name == "ref_logprobs_T":
            columns["ref_hidden_TH"] = found("hidden_TH")
        elif name == "old_logprobs_T":
            names = ("kl_T", "prob_square_sum_T", "mismatch_BVK", "importance_T", "rejected_T")
            columns |= {each: found(each) for each in names}
            if "experts_TE" in scores.as_they_are:
                columns["experts_TE"] = found("experts_TE")
    return batch.replace(**columns)


def _lora(args: ModelArguments) -> LoraSpec | None:
    """The actor's adapter, if it trains one."""
    if not args.lora_targets:
        return None
    return LoraSpec(
        args.lora_rank,
        args.adapter_alpha,
        args.lora_targets,
        args.lora_dropout,
        args.lora_excluded,
        None if args.adapter_name_or_path is None else str(Path(args.adapter_name_or_path).expanduser()),
    )
