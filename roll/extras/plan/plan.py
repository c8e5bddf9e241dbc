"""Plans a configuration on a kind of device: what every role needs, by phase, and the time of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from roll.configs.agentic import JUDGE_CLUSTER, AgenticConfig
from roll.configs.distill import DistillConfig
from roll.configs.engines.card import kind_of, task_of
from roll.configs.engines.sglang import SglangConfig
from roll.configs.engines.vllm import VllmConfig
from roll.configs.offline import OfflineConfig
from roll.configs.pipeline import PipelineConfig
from roll.configs.preference import DPOConfig
from roll.configs.prompts import REWARD_CLUSTER, PromptsConfig
from roll.configs.rewards import AskedModelConfig
from roll.configs.rl import VAL_INFER, RLConfig
from roll.configs.rlvr import RLVRConfig
from roll.configs.worker import ModelArguments, StrategyArguments, WorkerConfig
from roll.distributed.cluster.resources import PlacementPlan, plan_placement, pretend_nodes
from roll.extras.plan.devices import Device
from roll.extras.plan.memory import (
    CONTEXT_BYTES,
    LIGHT_BYTES,
    PHASES,
    WORKER_BYTES,
    RoleMemory,
    Surroundings,
    external_generator_memory,
    hf_generator_memory,
    trainer_memory,
)
from roll.extras.plan.work import (
    DISK_BYTES,
    START_SECONDS,
    Duration,
    Lengths,
    Role,
    Samples,
    rollout_time,
    saved_bytes,
    scoring_time,
    sync_time,
    training_time,
)
from roll.models.shapes import ModelShape, TowerShape
from roll.preflight.choices import role_requests
from roll.rewards.classifiers import Adapter, RewardModelConfig
from roll.rewards.judge import JudgeConfig


@dataclass(frozen=True)
class Hosted:
    """A model that each worker of a cluster has."""

    cluster: str
    key: str
    """Unique in the run, and the configuration key that names the model."""
    model: str
    worker: WorkerConfig
    """Section with those of the role keys that it has."""
    num_workers: int
    trust_remote_code: bool = False
    judge: JudgeConfig | AskedModelConfig | None = None
    """Settings for asking it, if it generates."""
    longest: int | None = None
    """Tokens that it reads at most, if its configuration says so."""
    ranks: int = 1
    """Processes that a reward model is divided over, each with a device."""

    def role(self, shape: ModelShape) -> Role:
        head = "lm" if self.judge else "score"
        return Role(self.cluster, self.worker, shape, head, trained=False, ranks=self.ranks)  # type: ignore[arg-type]


def hosted_models(config: PipelineConfig) -> Iterator[Hosted]:
    """The models in the workers of all domains, or the one that environments ask; not those that others serve."""
    if isinstance(config, AgenticConfig) and config.judge is not None:
        yield _asked("judge.model", config.judge.model, config.judge, JUDGE_CLUSTER, config.judge.worker_config())
    if not isinstance(config, PromptsConfig):
        return
    for name, domain in config.rewards.items():
        cluster, workers = f"{REWARD_CLUSTER}{name}", domain.worker_config()
        for number, verifier in enumerate(domain.verifiers):
            key = f"rewards.{name}.verifiers.{number}.args"
            try:
                if verifier.name == "reward_model":
                    found = _reward_model(RewardModelConfig.model_validate(verifier.args), cluster, key, workers)
                elif verifier.name == "judge":
                    args = JudgeConfig.model_validate(verifier.args)
                    model_key, hosted = f"{key}.judge_model_name", args.judge_model_type == "inference"
                    found = _asked(model_key, args.judge_model_name, args, cluster, workers) if hosted else None
                else:
                    continue
            except ValidationError:
                continue  # told of elsewhere
            if found is not None:
                yield found


def _reward_model(args: RewardModelConfig, cluster: str, key: str, workers: WorkerConfig) -> Hosted | None:
    """``None``: others serve it."""
    if args.remote is not None:
        return None
    model = args.model_path
    worker = WorkerConfig.model_validate({"model_args": {"dtype": args.dtype}, "infer_batch_size": args.batch_size})
    worker = worker.model_copy(update={"strategy_args": StrategyArguments(strategy_name="hf_infer")})
    return Hosted(
        cluster,
        f"{key}.model_path",
        model if (adapter := Adapter.of(Path(model).expanduser())) is None else adapter.base,
        worker,
        workers.num_workers,
        args.trust_remote_code,
        longest=args.max_length,
        ranks=args.tensor_parallel_size,
    )


def _asked(key: str, model: str, args: JudgeConfig | AskedModelConfig, cluster: str, workers: WorkerConfig) -> Hosted:
    worker = args.engine.worker(workers.num_gpus_per_worker)
    return Hosted(
        cluster,
        key,
        model,
        worker,
        workers.num_workers,
        worker.model_args.trust_remote_code,
        judge=args,
        longest=args.engine.max_length,
    )


def together(one: RoleMemory, other: RoleMemory) -> RoleMemory:
    """Two models of one worker: the process counts once."""

    def added(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
        parts = {part: left.get(part, 0) + right.get(part, 0) for part in {**left, **right}}
        return parts | {"process": left.get("process", 0)}

    phases = [phase for phase in PHASES if phase in one.phases or phase in other.phases]
    return replace(
        one,
        resident=added(one.resident, other.resident),
        phases={
            phase: added(one.phases.get(phase, one.resident), other.phases.get(phase, other.resident))
            for phase in phases
        },
    )


ACTIVE = {
    "load": ("actor_train", "actor_infer", "critic", "reference", "teacher", VAL_INFER),
    "sync": ("actor_train", "actor_infer", VAL_INFER),
    "rollout": ("actor_infer", VAL_INFER),
    "logprobs": ("actor_train", "critic", "reference", "teacher"),
    "train": ("actor_train", "critic"),
}
"""Roles that work in a phase."""
MAX_SAID = 512
"""Tokens of a judge that has no bound."""
BESIDE = ("load", "rollout")
"""Phases in which the models of rewards are there."""
TOGETHER = ("sync", "rollout")
"""Phases in which roles that share a GPU are on it at the same time; in the others they take turns."""
_NOTHING = RoleMemory({}, {})
LONGEST_STEP, LONGEST_RUN = 1800.0, 14 * 86_400.0
"""Seconds beyond which a time is not reasonable."""
RAY_PROCESSES = 3
"""Of a machine: the scheduler with its object store, the agent, and on the first one the control service."""


@dataclass(frozen=True)
class Place:
    """A GPU, or a machine whose devices are CPU slots, in the phase in which it is fullest."""

    name: str
    capacity: int
    needed: int
    phase: str

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity


@dataclass(frozen=True)
class Plan:
    """Of a configuration."""

    config: PipelineConfig
    device: Device
    roles: Mapping[str, Role]
    memory: Mapping[str, RoleMemory]
    """Of one worker."""
    placement: PlacementPlan
    samples: Samples
    times: Mapping[str, Duration]
    beside: Mapping[str, Duration]
    """Of the whole run, beside its steps: the start, evaluations, checkpoints."""

    @property
    def phases(self) -> list[str]:
        """Those that the run has, in order."""
        return [phase for phase in PHASES if any(phase in memory.phases for memory in self.memory.values())]

    @cached_property
    def places(self) -> list[Place]:
        """All places that the roles use."""
        on_cpu = self.device.kind == "cpu"
        return list(self._machines() if on_cpu else self._gpus())

    @property
    def fits(self) -> bool:
        return all(place.fits for place in self.places)

    @property
    def step_seconds(self) -> float:
        """Of a step: roles apart work side by side where rollouts go on beside training, else one after the other."""
        seconds = {phase: duration.seconds for phase, duration in self.times.items()}
        rest = sum(seconds.values()) - seconds.get("rollout", 0.0)
        overlaps = isinstance(self.config, RLConfig) and self.config.overlaps
        return max(seconds.get("rollout", 0.0), rest) if overlaps else sum(seconds.values())

    @property
    def run_seconds(self) -> float | None:
        """Of all steps and what is beside them; ``None`` where passes over the data say how many there are."""
        if _counts_passes(self.config):
            return None
        return self.config.max_steps * self.step_seconds + sum(each.seconds for each in self.beside.values())

    @property
    def is_practical(self) -> bool:
        """Tells whether somebody would wait for it."""
        return self.step_seconds <= LONGEST_STEP and (self.run_seconds or 0.0) <= LONGEST_RUN

    @property
    def tower(self) -> TowerShape | None:
        """Of the policy's model, in a run with pictures."""
        return self.roles["actor_train"].shape.tower

    @property
    def stored_pictures(self) -> int:
        """Bytes of a step's pictures in the object store of a machine."""
        samples = self.samples
        return 3 * samples.pixels * samples.pictures * -(-samples.rows // samples.group)

    def host_memory(self, node: int) -> int:
        """Bytes of a machine's own memory that the run takes: processes, and on GPUs what waits there for its turn."""
        if self.device.kind == "cpu":
            return next((place.needed for place in self.places if place.name == f"node {node}"), 0)
        slots = self.placement.slots_on(node)
        light = LIGHT_BYTES * (RAY_PROCESSES + sum(slot.role not in self.roles for slot in slots))
        total = light + self.stored_pictures
        for slot in slots:
            if (role := self.roles.get(slot.role)) is None:
                continue
            kept = self.memory[slot.role].resident
            shared = any(self.placement.shares_devices(slot.role, other) for other in self.roles if other != slot.role)
            waiting = sum(size for part, size in kept.items() if part in ("weights", "moments")) if shared else 0
            read = 4 * role.parameters if slot.rank == 0 else 0  # one rank reads the checkpoint as float32
            total += WORKER_BYTES + max(waiting * len(slot.devices), read)
        return total + self._kept_updates(node)

    def _kept_updates(self, node: int) -> int:
        """Bytes of the last weight update that workers of a machine keep, see ``weight_update_deltas``."""
        if not self.config.weight_update_deltas:
            return 0
        trainers, actor, kept = self.placement.workers("actor_train"), self.roles["actor_train"], 0
        for name in {"actor_infer", VAL_INFER} & self.roles.keys():
            nodes = [slot.node for slot in self.placement.workers(name) if slot.engine == slot.rank]
            far = set(nodes) - {slot.node for slot in trainers}
            sender = next((slot.node for slot in trainers if slot.node in nodes), trainers[0].node)
            external = isinstance(self.roles[name].worker.strategy_args.typed(), VllmConfig | SglangConfig)
            holders = nodes.count(node) if node in far and (external or self.device.kind == "gpu") else 0
            kept += holders + bool(far and node == sender)
        return kept * actor.compute_bytes * actor.parameters

    def _active(self, phase: str) -> list[str]:
        rewards = [name for name in self.roles if name.startswith(REWARD_CLUSTER)] if phase in BESIDE else []
        working = [name for name in self.roles if kind_of(name) in ACTIVE[phase]]
        return [name for name in (*working, *rewards) if phase in self.memory.get(name, _NOTHING).phases]

    def _machines(self) -> Iterator[Place]:
        """On a CPU nothing moves: what a role keeps stays beside what others do."""
        for node, _ in enumerate(self.placement.nodes):
            workers = Counter(slot.role for slot in self.placement.slots_on(node))
            light = LIGHT_BYTES * (RAY_PROCESSES + sum(n for role, n in workers.items() if role not in self.roles))
            kept = light + self._kept_updates(node) + self.stored_pictures
            totals = {
                phase: kept + sum(number * self._on_cpu(role, phase) for role, number in workers.items())
                for phase in self.phases
            }
            if totals:
                phase = max(totals, key=totals.__getitem__)
                yield Place(f"node {node}", self.device.memory, totals[phase], phase)

    def _on_cpu(self, role: str, phase: str) -> int:
        if role not in self.roles:
            return 0
        active = role in self._active(phase)
        memory = self.memory[role]
        return memory.total(phase) if active else sum(memory.resident.values())

    def _gpus(self) -> Iterator[Place]:
        """On GPUs, what another role needs the room of waits in host memory."""
        for node, _ in enumerate(self.placement.nodes):
            for device in self.placement.devices_on(node):
                here = [name for name in self.roles if device in self.placement.devices(name)]
                contexts = CONTEXT_BYTES * len(here)
                totals = dict[str, int]()
                for phase in self.phases:
                    own = [
                        self.memory[name].total(phase) - CONTEXT_BYTES for name in self._active(phase) if name in here
                    ]
                    if own:
                        totals[phase] = contexts + (sum(own) if phase in TOGETHER else max(own))
                if totals:
                    phase = max(totals, key=totals.__getitem__)
                    yield Place(f"GPU {device}", self.device.memory, totals[phase], phase)


def make_plan(
    config: PipelineConfig, device: Device, shapes: Mapping[str, ModelShape], pictures: int = 0, most: int | None = None
) -> Plan:
    """Computes a plan.

    Args:
        config: that has been checked.
        device: kind of all devices.
        shapes: of the models, by role; those of rewards by ``Hosted.key``. In a run with pictures with their towers.
        pictures: of each sample.
        most: pixels that a picture has at most; ``None``: as many as its prompt has room for.
    """
    samples = _samples(config)
    if pictures and (tower := shapes["actor_train"].tower) is not None:
        room = samples.length if isinstance(config, OfflineConfig) else samples.prompt
        held = room // pictures * (tower.patch * tower.merged) ** 2
        samples = replace(samples, pictures=pictures, pixels=held if most is None else min(most, held))
    workers = model_workers(config)
    roles = {name: _role(config, name, worker, shapes[name]) for name, worker in workers.items()}
    memory = {name: _memory(config, role, device, samples) for name, role in roles.items()}
    for hosted in hosted_models(config):
        role = hosted.role(shapes[hosted.key])
        found = _hosted_memory(config, hosted, role, device, samples)
        name = hosted.cluster
        if name not in roles or role.parameters > roles[name].parameters:
            roles[name] = role
        memory[name] = together(memory[name], found) if name in memory else found
    nodes = pretend_nodes(config.num_nodes, config.num_gpus_per_node)
    placement = plan_placement(role_requests(config), nodes)
    times = dict(_times(config, roles, device, samples))
    beside = {} if _counts_passes(config) else dict(_beside(config, roles, device, samples))
    return Plan(config, device, roles, memory, placement, samples, times, beside)


def _counts_passes(config: PipelineConfig) -> bool:
    return bool(getattr(config, "total_epochs", None) or getattr(config, "num_train_epochs", None))


def _beside(
    config: PipelineConfig, roles: Mapping[str, Role], device: Device, samples: Samples
) -> Iterator[tuple[str, Duration]]:
    """What a run does beside its steps."""
    read = max(role.shape.stored_bytes * role.parameters for role in roles.values())
    yield "start", Duration(START_SECONDS[device.kind] + read / DISK_BYTES, f"processes, {read / 1e9:.3g} GB to read")
    steps, every = config.max_steps, config.eval_steps
    evaluations = config.val_before_train + (steps // every if every else 0)
    evaluations += bool(config.val_after_train and (not every or steps % every))
    if evaluations and (one := _evaluation(config, roles, device, samples)) is not None:
        yield "evaluations", Duration(evaluations * one.seconds, f"{evaluations} times {one.seconds:.3g} s: {one.why}")
    if config.save_steps is not None:
        saves = max(1, -(-steps // config.save_steps) if config.save_steps else 1)
        size = sum(saved_bytes(role) for role in roles.values() if role.trained)
        rate = device.link if config.async_save else DISK_BYTES * config.num_nodes
        why = f"{saves} times {size / 1e9:.3g} GB at {rate / 1e9:.3g} GB/s"
        yield "checkpoints", Duration(saves * size / rate, f"{why}, to host memory" if config.async_save else why)


def _evaluation(config: PipelineConfig, roles: Mapping[str, Role], device: Device, samples: Samples) -> Duration | None:
    """One evaluation; ``None``: nobody waits for it, or the data say how large it is."""
    rows = config.val_batch_size
    if rows is None or VAL_INFER in roles:
        return None
    if isinstance(config, AgenticConfig):
        rows = rows * samples.rows // max(1, config.rollout_batch_size)
    elif isinstance(config, PromptsConfig):
        rows *= config.num_val_samples
    held_out = replace(samples, rows=rows, group=1)
    generator = roles.get("actor_infer")
    if generator is None:
        actor = roles["actor_train"]
        return scoring_time(actor, held_out, device, actor.worker.num_devices)
    worker = generator.worker
    return rollout_time(
        generator, held_out, device, worker.num_workers, worker.num_gpus_per_worker, config.max_running_requests
    )


def model_workers(config: PipelineConfig) -> dict[str, WorkerConfig]:
    """The sections of all roles that hold a model; those of rewards are ``hosted_models``."""
    evaluator = {name: worker for name, worker in config.clusters.items() if name == VAL_INFER}
    return {**config.roles, **evaluator}


def _role(config: PipelineConfig, name: str, worker: WorkerConfig, shape: ModelShape) -> Role:
    args = config.actor_train.model_args
    adapted = config.uses_lora and name in ("actor_train", "actor_infer", VAL_INFER)
    lora = (args.lora_rank, _adapted_layers(args, shape)) if adapted else None
    head = "value" if name == "critic" else "score" if config.trains_scores and name == "actor_train" else "lm"
    return Role(name, worker, shape, head, task_of(name) == "trains", lora)  # type: ignore[arg-type]


def _adapted_layers(args: ModelArguments, shape: ModelShape) -> tuple[str, ...]:
    """Names of the linear maps that get an adapter."""
    if not args.lora_excluded:
        return args.lora_targets
    return tuple(name for name in shape.linear_sizes if name not in args.lora_excluded)


def _samples(config: PipelineConfig) -> Samples:
    """Samples of a step, each as long as it may be."""
    if isinstance(config, OfflineConfig):
        rows = config.actor_train.global_train_batch_size * config.sequences_per_sample
        return Samples(rows, 1, config.sequence_length - 1)
    assert isinstance(config, RLConfig)
    if isinstance(config, RLVRConfig):
        answer = config.train_sampling.max_new_tokens or config.response_length
        prompt = min(config.prompt_length, config.sequence_length - answer)
        if config.tools is not None:  # every turn may be as long, up to the whole
            answer = config.sequence_length - prompt
        group = config.num_return_sequences_in_group
        return Samples(config.samples_per_step, prompt, answer, group, config.ppo_epochs)
    assert isinstance(config, AgenticConfig)
    envs = list(config.played_envs(config.train_env_manager).values())
    turns = max((env.max_steps for env in envs), default=1)
    grow = any(env.env_manager_cls != "step" for env in envs)
    answer = min(config.sequence_length - 1, config.response_length * (turns if grow else 1))
    prompt = max(1, min(config.prompt_length, config.sequence_length - answer))
    rows = config.rollout_batch_size * (1 if grow else turns)
    return Samples(rows, prompt, answer, 1, config.ppo_epochs)


def _read_by(config: PipelineConfig, role: str, samples: Samples) -> Samples:
    """Samples as a role reads them: a teacher with prompts of its own reads longer rows, one of several those of its
    tags, which are taken to be equally frequent."""
    if isinstance(config, RLVRConfig) and config.teacher_prompt is not None and role == "teacher":
        return replace(samples, prompt=config.sequence_length - samples.answer)
    if isinstance(config, RLConfig) and role.startswith("teachers."):
        teacher = config.teachers[role.removeprefix("teachers.")]
        own = [tag for tag in config.trained_tags if teacher.judges(tag)]
        return replace(samples, rows=-(-samples.rows * len(own) // len(config.trained_tags)))
    return samples


def _memory(config: PipelineConfig, role: Role, device: Device, samples: Samples) -> RoleMemory:
    on_cpu, samples = device.kind == "cpu", _read_by(config, role.name, samples)
    per_sample = config.sequences_per_sample if isinstance(config, OfflineConfig | RLConfig) else 1
    lengths = Lengths(samples.length, samples.answer, per_sample, samples.pictures * samples.pixels, samples.group)
    generators = config.actor_infer.num_workers if config.actor_infer else 1
    sampling = role.worker.generating_args
    around = Surroundings(
        process=WORKER_BYTES if on_cpu else CONTEXT_BYTES,
        lengths=lengths,
        on_cpu=on_cpu,
        bucket_bytes=config.model_update_buffer_size_mb * 2**20,
        max_running=config.max_running_requests,
        requests=max(1, -(-samples.rows // generators)),
        group=samples.group,
        entropy=isinstance(config, RLConfig) and config.entropy_loss_coef > 0,
        exports=role.name == "actor_train" and config.actor_infer is not None,
        scores=not isinstance(config, OfflineConfig) or task_of(role.name) == "scores",
        truncates=sampling.top_p < 1 or sampling.top_k > 0,
        device_bytes=device.memory,
    )
    if task_of(role.name) == "generates":
        return _generator_memory(role, around)
    if isinstance(role.worker.strategy_args.typed(), VllmConfig | SglangConfig):
        return _generator_memory(role, around).that_works_in("logprobs", as_in="rollout")
    return trainer_memory(role, around)


def _hosted_memory(config: PipelineConfig, hosted: Hosted, role: Role, device: Device, samples: Samples) -> RoleMemory:
    """One model of one worker of rewards. It reads conversations as long as the policy's, in tokens of its own."""
    on_cpu, judge = device.kind == "cpu", hosted.judge
    said = 0 if judge is None else judge.max_tokens or MAX_SAID
    longest = min(hosted.longest or samples.length + said, samples.length + said)
    around = Surroundings(
        process=WORKER_BYTES if on_cpu else CONTEXT_BYTES,
        lengths=Lengths(longest, min(said, longest - 1), pixels=samples.pictures * samples.pixels),
        on_cpu=on_cpu,
        max_running=judge.max_concurrency if judge else 1,
        requests=max(1, -(-samples.rows // hosted.num_workers)),
        device_bytes=device.memory,
    )
    if judge is None:
        memory = trainer_memory(role, around).that_works_in("rollout", as_in="logprobs")
        return memory.of_ranks(hosted.ranks) if on_cpu and hosted.ranks > 1 else memory  # on GPUs, of each
    return _generator_memory(role, around).that_works_in("rollout", as_in="rollout")


def _generator_memory(role: Role, around: Surroundings) -> RoleMemory:
    options = role.worker.strategy_args.typed()
    if isinstance(options, VllmConfig):
        return external_generator_memory(role, around, options.gpu_memory_utilization)
    if isinstance(options, SglangConfig):
        return external_generator_memory(role, around, options.mem_fraction_static)
    return hf_generator_memory(role, around)


def _times(
    config: PipelineConfig, roles: Mapping[str, Role], device: Device, samples: Samples
) -> Iterator[tuple[str, Duration]]:
    actor, generator = roles["actor_train"], roles.get("actor_infer")
    if isinstance(config, RLConfig) and generator is not None:
        yield "sync", sync_time(actor, device, config.num_nodes)
        worker = generator.worker
        yield (
            "rollout",
            rollout_time(
                generator, samples, device, worker.num_workers, worker.num_gpus_per_worker, config.max_running_requests
            ),
        )
    for name in _scoring_roles(config, roles):
        role = roles[name]
        read = _read_by(config, name, samples)
        yield f"logprobs of {name}", scoring_time(role, read, device, role.worker.num_devices)
    for name in ("actor_train", "critic"):
        if name in roles:
            role = roles[name]
            yield f"train {name}", training_time(role, samples, device, role.worker.num_devices)


def _scoring_roles(config: PipelineConfig, roles: Mapping[str, Role]) -> list[str]:
    """Roles that score a step's samples; the actor does where its old log-probabilities are needed."""
    if not isinstance(config, RLConfig):
        ahead = isinstance(config, DPOConfig) and config.precompute_reference
        ahead |= isinstance(config, DistillConfig) and config.teacher_logprobs is not None
        return [] if ahead else [name for name in roles if task_of(name) == "scores"]
    several = config.optimizer_steps_per_epoch * config.ppo_epochs > 1
    needs_old = not config.leaves_rollouts_unscored and (several or config.wants_old_logprobs)
    return [name for name in roles if kind_of(name) in ACTIVE["logprobs"] and (name != "actor_train" or needs_old)]
