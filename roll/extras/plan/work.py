"""Work of a role at a time, and the layout of its weights on its workers: read from a role's section."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from roll.configs.engines.deepspeed import DeepSpeedConfig
from roll.configs.engines.fsdp2 import Fsdp2Config
from roll.configs.engines.megatron import MegatronConfig
from roll.configs.worker import WorkerConfig
from roll.models.shapes import ModelShape, compute_bytes


@dataclass(frozen=True)
class Lengths:
    """Of the longest sample, in tokens."""

    sequence: int
    answer: int
    """Tokens that the loss looks at."""
    per_sample: int = 1
    """Sequences of a sample: 2 of a pair."""


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward pass."""

    rows: int
    tokens: int
    """Padding included."""
    loss_tokens: int


@dataclass(frozen=True)
class Role:
    """A model role."""

    name: str
    worker: WorkerConfig
    shape: ModelShape
    head: Literal["lm", "value", "score"] = "lm"
    trained: bool = True
    lora: tuple[int, tuple[str, ...]] | None = None
    """Rank and targets of an adapter."""
    ranks: int = 1
    """Processes that share each layer of a reward model; the rest is whole in each."""

    @property
    def parameters(self) -> int:
        """Of the whole model, without an adapter."""
        return self.shape.parameters if self.head == "lm" else self.shape.trunk + self.shape.hidden + 1

    @property
    def held(self) -> int:
        """Parameters of one rank's part, where an engine has not dealt them out."""
        layers = self.shape.layer * self.shape.layers
        return self.parameters - layers + layers // self.ranks

    @property
    def adapter(self) -> int:
        """Parameters of an adapter, and of the head that is trained beside it."""
        head = 0 if self.head == "lm" else self.shape.hidden
        return self.shape.adapter(*self.lora) + head if self.lora else 0

    @property
    def frozen(self) -> bool:
        """The model's own weights are not trained."""
        return not self.trained or self.lora is not None

    @property
    def updated(self) -> int:
        """Parameters that an optimizer changes. Of parts that are frozen, embeddings and whole layers are left out."""
        if self.lora is not None:
            return self.adapter
        shape, names = self.shape, set(self.worker.model_args.frozen_prefixes)
        layers = {f"model.layers.{number}" for number in range(shape.layers)}
        frozen = shape.layer * (len(layers) if "model.layers" in names else len(layers & names))
        if "model.embed_tokens" in names or (shape.tied and "lm_head" in names):
            frozen += shape.embedding
        if "lm_head" in names and not shape.tied:
            frozen += shape.embedding
        return max(0, self.parameters - frozen)

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number that the model computes with."""
        return compute_bytes(self.worker, self.shape)

    @property
    def recomputes(self) -> bool:
        """Activations are computed again in the backward pass."""
        return not self.worker.model_args.disable_gradient_checkpointing

    def micro_batch(self, phase: Literal["train", "infer"], lengths: Lengths) -> MicroBatch:
        """The largest that the role's limits allow, of samples that are as long as they may be."""
        worker = self.worker
        each = lengths.sequence
        if getattr(worker, f"use_dynamic_batching_in_{phase}"):
            budget = getattr(worker, f"max_tokens_per_microbatch_in_{phase}")
            rows = max(1, budget // each // lengths.per_sample)
            if worker.use_sequence_packing:
                tokens = max(each * lengths.per_sample, budget)
                return MicroBatch(rows, tokens, math.ceil(tokens * lengths.answer / each))
        else:
            per_pass = worker.training_args.per_device_train_batch_size
            rows = worker.infer_batch_size if phase == "infer" else per_pass
        step = 1 if worker.use_sequence_packing else getattr(worker, f"sequence_length_round_in_{phase}")
        rows *= lengths.per_sample
        return MicroBatch(rows, rows * math.ceil(each / step) * step, rows * lengths.answer)


@dataclass(frozen=True)
class Layout:
    """Ranks that each kind of state is dealt out to; 1 is a whole copy on every rank."""

    weights: int = 1
    gradients: int = 1
    moments: int = 1
    tensor: int = 1
    """Ranks that split each layer."""
    stages: int = 1
    """Ranks that the layers are dealt out to."""
    sequence: int = 1
    """Ranks that share the tokens of a sample."""
    gathered: bool = False
    """Weights are gathered layer by layer while they are used."""
    keeps_gathered: bool = False
    autocast: bool = False
    """fp32 weights, and matrix products in another format by ``torch.autocast``."""
    low_weights: bool = False
    """Weights in the format of computation beside fp32 copies that the optimizer has."""
    host_states: bool = False
    """Weights and moments wait in host memory."""


def layout_of(role: Role) -> Layout:
    """Layout of a model in an engine. An engine without a rule here is taken to hold whole copies."""
    worker, options = role.worker, role.worker.strategy_args.typed()
    world, ulysses, low = worker.num_workers, worker.model_args.ulysses_size, role.compute_bytes < 4
    if isinstance(options, Fsdp2Config):
        tensor = options.tensor_parallel_size
        groups = world // tensor
        shards = groups if options.fsdp_size == -1 else options.fsdp_size
        if options.replicated or (world == 1 and not options.cpu_offload):
            return Layout(sequence=ulysses, autocast=low and role.trained)
        split = shards * tensor
        kept = not options.reshard_after_forward
        return Layout(split, split, split, tensor, 1, ulysses, True, kept, host_states=options.cpu_offload)
    if isinstance(options, DeepSpeedConfig):
        stage, offload = options.stage, "offload_optimizer" in options.zero_optimization
        if not role.trained and stage < 3:
            return Layout(sequence=ulysses)
        return Layout(
            weights=world if stage == 3 else 1,
            gradients=world if stage >= 2 else 1,
            moments=world if stage >= 1 else 1,
            sequence=ulysses,
            gathered=stage == 3,
            autocast=stage == 0 and low,
            low_weights=stage > 0 and low,
            host_states=offload,
        )
    if isinstance(options, MegatronConfig):
        tensor, stages = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
        model = tensor * stages
        copies = world // model if options.use_distributed_optimizer else 1
        return Layout(
            model, model, model * copies, tensor, stages, options.context_parallel_size, low_weights=role.trained
        )
    return Layout(tensor=role.ranks, sequence=ulysses)
