"""A role's section: ``actor_train``, ``actor_infer``, ``critic``, ``reference``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import BeforeValidator, Field

from roll.configs.base import Config
from roll.configs.data import DataArguments
from roll.configs.devices import DeviceMapping
from roll.configs.generating import GeneratingArguments
from roll.configs.model import ModelArguments
from roll.configs.problems import ConfigProblem
from roll.configs.router_replay import RouterReplayConfig
from roll.configs.schema import Described
from roll.configs.strategy import StrategyArguments
from roll.configs.training import TrainingArguments


def _number_to_text(value: object) -> object:
    return str(value) if type(value) is int else value


EnvironmentVariables = Annotated[
    dict[str, Annotated[str, BeforeValidator(_number_to_text)]], Described("mapping of str to str")
]


class WorkerConfig(Config):
    """A cluster: worker processes of one role, each holding one strategy."""

    model_args: ModelArguments = Field(default_factory=ModelArguments, description="How the model is loaded.")
    training_args: TrainingArguments = Field(
        default_factory=TrainingArguments, description="Optimizer and schedule; read by trained roles."
    )
    data_args: DataArguments = Field(default_factory=DataArguments, description="How messages become prompts.")
    generating_args: GeneratingArguments = Field(
        default_factory=GeneratingArguments, description="How responses are sampled; read from actor_infer."
    )
    strategy_args: StrategyArguments = Field(
        default_factory=StrategyArguments, description="The engine and its options."
    )
    world_size: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="Number of workers. null: devices / num_gpus_per_worker, or 1 without device_mapping.",
    )
    device_mapping: DeviceMapping = Field(
        default=None,
        description="Devices of the role, counted over all nodes: GPUs, or CPU slots if there is none. Roles whose "
        "mappings overlap share devices. null: one CPU process per worker, outside the device plan.",
    )
    num_gpus_per_worker: int = Field(
        default=1,
        ge=1,
        description="Devices of one worker; more than 1 only for engines that split one model themselves. null or "
        "missing: the tensor-parallel size of vllm or sglang.",
    )
    model_update_frequency: int = Field(
        default=1, ge=1, description="Steps between two weight updates (read from actor_train)."
    )
    infer_batch_size: int = Field(
        default=16, ge=1, description="Sequences per forward pass when only log-probs are computed."
    )
    worker_cls: str | None = Field(
        default=None, description="package.module:Class of the worker process. null: the role's own class."
    )
    system_envs: EnvironmentVariables = Field(
        default_factory=dict, description="Environment variables of the role's processes, over the global ones."
    )
    use_dynamic_batching_in_train: bool = Field(
        default=False, description="Form micro-batches by token count instead of per_device_train_batch_size."
    )
    max_tokens_per_microbatch_in_train: int = Field(
        default=0, ge=0, description="Token budget of a training micro-batch; needed with dynamic batching."
    )
    sequence_length_round_in_train: int = Field(
        default=1, ge=1, description="Padded lengths of training micro-batches are rounded up to a multiple of this."
    )
    use_dynamic_batching_in_infer: bool = Field(
        default=False, description="Form micro-batches by token count instead of infer_batch_size."
    )
    max_tokens_per_microbatch_in_infer: int = Field(
        default=0, ge=0, description="Token budget of a micro-batch for log-probs; needed with dynamic batching."
    )
    sequence_length_round_in_infer: int = Field(
        default=1,
        ge=1,
        description="Padded lengths of micro-batches for log-probs are rounded up to a multiple of this.",
    )
    use_sequence_packing: bool = Field(
        default=False,
        description="Concatenate the sequences of a micro-batch in one row instead of padding them; for models that "
        "are known to keep them separate.",
    )
    router_replay: RouterReplayConfig = Field(
        default_factory=RouterReplayConfig,
        description="Replays the experts of a mixture of experts (read from actor_train).",
    )
    share_prompts: bool = Field(
        default=True,
        description="Sequences that begin with the same prompt compute it once, if that leaves at most 90% of the "
        "tokens: with full attention, in fsdp2 and deepspeed strategies with sdpa, and in megatron strategies "
        "without TransformerEngine, context parallelism and moe_aux_loss_coeff. Off, with a warning, for models "
        "that are not known to keep sequences separate. The gradient is the same.",
    )

    @property
    def num_devices(self) -> int:
        """Devices of the role: those of the mapping, else one CPU slot per worker."""
        return len(self.device_mapping) if self.device_mapping else self.world_size or 1

    @property
    def num_workers(self) -> int:
        """Processes of the role."""
        if self.device_mapping:
            return len(self.device_mapping) // self.num_gpus_per_worker
        return self.world_size or 1

    @property
    def devices_per_copy(self) -> int:
        """Devices that work on the same sequences: tensor × pipeline × context parallel size, times ulysses_size."""
        return self.strategy_args.typed().model_parallel_size * self.model_args.ulysses_size

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model that share a batch."""
        return self.num_devices // self.devices_per_copy

    @property
    def global_train_batch_size(self) -> int:
        """Episodes of one optimizer step."""
        arguments = self.training_args
        return arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * self.data_parallel_size

    def problems(self) -> Iterator[ConfigProblem]:
        yield from self._placement_problems()
        for phase in ("train", "infer"):
            key, switch = f"max_tokens_per_microbatch_in_{phase}", f"use_dynamic_batching_in_{phase}"
            budget, dynamic = getattr(self, key), getattr(self, switch)
            if dynamic and not budget:
                yield self.problem(key, f"at least 1 with {switch}", switch)
            if budget and not dynamic:
                yield self.problem(key, f"{switch}=true, or no budget", switch)

    def _placement_problems(self) -> Iterator[ConfigProblem]:
        per_worker, devices = self.num_gpus_per_worker, len(self.device_mapping or ())
        if not devices and per_worker > 1:
            yield self.problem("num_gpus_per_worker", "1, or a device_mapping", "device_mapping")
        elif devices % per_worker:
            expected = f"a divisor of {devices}, the devices of device_mapping"
            yield self.problem("num_gpus_per_worker", expected, "device_mapping")
        elif devices and self.world_size is not None and self.world_size * per_worker != devices:
            expected = f"{devices // per_worker} or null: {devices} devices, num_gpus_per_worker {per_worker}"
            yield self.problem("world_size", expected, "num_gpus_per_worker", "device_mapping")
