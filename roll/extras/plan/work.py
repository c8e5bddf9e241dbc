"""Work of a role, the layout of its weights on its workers, and the seconds that the phases of a step take."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from roll.configs.engines.deepspeed import DeepSpeedConfig
from roll.configs.engines.fsdp2 import Fsdp2Config
from roll.configs.engines.megatron import MegatronConfig
from roll.configs.worker import WorkerConfig
from roll.models.shapes import ModelShape, attention_flops, compute_bytes, forward_flops, samples_flops, training_factor
from roll.utils.gpus import Device


@dataclass(frozen=True)
class Lengths:
    """Of the longest sample, in tokens."""

    sequence: int
    answer: int
    """Tokens that the loss looks at."""
    per_sample: int = 1
    """Sequences of a sample: 2 of a pair."""
    pixels: int = 0
    """Of a sample's pictures."""
    group: int = 1
    """Samples with the same pictures."""


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward pass."""

    rows: int
    tokens: int
    """Padding included."""
    loss_tokens: int
    pixels: int = 0
    """Of the different pictures."""


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
        tower = 0 if self.shape.tower is None else self.shape.tower.parameters
        return tower + (self.shape.parameters if self.head == "lm" else self.shape.trunk + self.shape.hidden + 1)

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
        """Parameters that an optimizer changes. Of parts that are frozen, embeddings, whole layers, the tower and its
        projector are left out."""
        if self.lora is not None:
            return self.adapter
        shape, names = self.shape, set(self.worker.model_args.frozen_prefixes)
        layers = {f"model.layers.{number}" for number in range(shape.layers)}
        frozen = shape.layer * (len(layers) if "model.layers" in names else len(layers & names))
        if "model.embed_tokens" in names or (shape.tied and "lm_head" in names):
            frozen += shape.embedding
        if "lm_head" in names and not shape.tied:
            frozen += shape.embedding
        if shape.tower is not None:
            whole, rest = "model.visual" in names, shape.tower.parameters - shape.tower.projectors
            frozen += rest if whole or "model.vision_tower" in names else 0
            projector = {"model.visual.merger", "model.multi_modal_projector"} & names
            frozen += shape.tower.projectors if whole or projector else 0
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
        worker, pixels = self.worker, lengths.pixels
        each, most = lengths.sequence, getattr(worker, f"max_pixels_per_microbatch_in_{phase}")

        def shown(rows: int) -> float:
            different = math.ceil(rows / lengths.group) if worker.share_prompts else rows
            return max(pixels, min(different * pixels, math.inf if most is None else most))

        if getattr(worker, f"use_dynamic_batching_in_{phase}"):
            budget = getattr(worker, f"max_tokens_per_microbatch_in_{phase}")
            rows = max(1, budget // each // lengths.per_sample)
            if worker.use_sequence_packing:
                tokens = max(each * lengths.per_sample, budget)
                return MicroBatch(rows, tokens, math.ceil(tokens * lengths.answer / each), int(shown(rows)))
        else:
            per_pass = worker.training_args.per_device_train_batch_size
            rows = worker.infer_batch_size if phase == "infer" else per_pass
        step = 1 if worker.use_sequence_packing else getattr(worker, f"sequence_length_round_in_{phase}")
        seen = int(shown(rows))
        rows *= lengths.per_sample
        return MicroBatch(rows, rows * math.ceil(each / step) * step, rows * lengths.answer, seen)


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


MATRIX_SHARE, MATRIX_WIDTH = 0.67, 15_000
"""Of the peak that a GPU's matrix products would reach in a model without end, and the width at which they reach half
of it: the rest of a layer costs in proportion to the width, its matrices to the square."""
ATTENTION_SHARE = 0.75
"""Of the peak that attention kernels reach on a GPU."""
DECODE_SHARE = 0.6
"""Of a device's bandwidth that sampling reaches."""
LAYER_SECONDS = 60e-6
"""Of a layer in a decode step on a GPU, beside what it reads."""
HOP_SECONDS, FAR_HOP_SECONDS = 16e-6, 160e-6
"""The two sums over the devices of a layer in a decode step, within a machine and between machines."""
MACHINE = 8
"""Devices of a machine, for replicas that span several."""
NETWORK_SHARE = 0.4
"""Of the network's rate that a weight update between machines reaches. These constants are fitted to published speeds,
see ``scripts/generate_forecast_docs.py``."""
GATHERED_BYTES, SUMMED_BYTES = 0.45e9, 0.75e9
"""Bytes per second of a whole tensor that two processes of a machine all-gather (or reduce-scatter), and all-reduce,
with gloo: measured on two CPU cores."""
DISK_BYTES = 1e9
"""Bytes per second of the disk that a machine saves to and loads from, an estimate: ``roll doctor`` measures it."""
START_SECONDS = {"cpu": 15.0, "gpu": 90.0}
"""Until all workers are ready, without the reading of models: measured on a CPU, an estimate for engines on GPUs that
compile and capture graphs."""


@dataclass(frozen=True)
class Samples:
    """Samples that a step trains on, each of the maximum length."""

    rows: int
    prompt: int
    answer: int
    group: int = 1
    """Samples that share a prompt."""
    passes: int = 1
    """Times that each is trained on."""
    longest: int = 0
    """Tokens of the longest answer, where ``answer`` is the mean; 0: all are alike."""
    pictures: int = 0
    """Of each sample, in its prompt."""
    pixels: int = 0
    """Of each of them."""

    @property
    def length(self) -> int:
        return self.prompt + self.answer

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class Duration:
    """Of a phase."""

    seconds: float
    why: str


def training_time(role: Role, samples: Samples, device: Device, devices: int) -> Duration:
    """Forward, backward, and where activations are computed again one more forward pass; pipeline stages that wait."""
    share = shared_share(role, samples)
    passes = samples.passes * share * (training_factor(role.lora is not None) + role.recomputes)
    found = _computed(passes, role, samples, device, devices, idle_stages(role, samples, devices))
    if share != 1:
        found = Duration(found.seconds, f"{found.why}; prompts are shared, {share:.0%} is computed")
    layout, steps = layout_of(role), samples.passes * samples.rows / role.worker.global_train_batch_size
    if not layout.gathered:
        return _exchanged(found, role, device, devices, 0, steps)
    micro_batches = _micro_batches(role, "train", replace(samples, rows=role.worker.global_train_batch_size), devices)
    each = 1 if layout.keeps_gathered else 2 + role.updated / role.parameters  # both passes, and the gradients
    return _exchanged(found, role, device, devices, steps * micro_batches * each, 0)


def idle_stages(role: Role, samples: Samples, devices: int) -> float:
    """Time that pipeline stages take together, as a multiple of what they work."""
    layout = layout_of(role)
    if layout.stages == 1:
        return 1.0
    copies = max(1, devices // (layout.stages * layout.tensor * layout.sequence))
    tokens = role.worker.global_train_batch_size * samples.length
    micro_batch = role.micro_batch(
        "train", Lengths(samples.prompt + (samples.longest or samples.answer), samples.answer)
    )
    return 1 + (layout.stages - 1) / max(1, tokens / copies / micro_batch.tokens)


def shared_share(role: Role, samples: Samples) -> float:
    """Operations of a training pass in which samples of a group compute their prompt once, in parts of all.

    Engines that cannot share, and models whose attention is not full, are not told apart from others here.
    """
    if not role.worker.share_prompts or samples.group == 1:
        return 1.0
    from roll.data.packing import MAX_ROW_CELLS, WORTH_SHARING

    length, rows = samples.length, role.micro_batch("train", Lengths(samples.length, samples.answer)).rows
    rows = min(rows, samples.rows)
    own, prompt = samples.answer + 1, samples.prompt - 1  # a prompt's last token predicts the first of the answer
    tokens = math.ceil(rows / samples.group) * prompt + rows * own
    too_long = own * length > MAX_ROW_CELLS or prompt**2 > MAX_ROW_CELLS
    if too_long or tokens > WORTH_SHARING * rows * length:
        return 1.0
    squares = rows * length**2 - (rows - math.ceil(rows / samples.group)) * prompt**2
    whole = forward_flops(role.shape, rows * length, length, rows * samples.answer)
    return samples_flops(role.shape, tokens, squares, rows * samples.answer) / whole


def scoring_time(role: Role, samples: Samples, device: Device, devices: int) -> Duration:
    """One forward pass."""
    found = _computed(1, role, samples, device, devices, idle_stages(role, samples, devices))
    gathers = _micro_batches(role, "infer", samples, devices) if layout_of(role).gathered else 0
    return _exchanged(found, role, device, devices, gathers, 0)


def _micro_batches(role: Role, phase: Literal["train", "infer"], samples: Samples, devices: int) -> int:
    """Of a rank, for these samples."""
    layout = layout_of(role)
    ranks = max(1, devices // (layout.stages * layout.tensor * layout.sequence))
    longest = samples.prompt + (samples.longest or samples.answer)
    return math.ceil(samples.rows / ranks / role.micro_batch(phase, Lengths(longest, samples.answer)).rows)


def _exchanged(found: Duration, role: Role, device: Device, devices: int, gathers: float, sums: float) -> Duration:
    """A pass, and what its ranks send each other on a CPU, where processors that send do not compute meanwhile.

    Args:
        gathers: times that all weights are gathered, or all gradients scattered.
        sums: times that all gradients are summed.
    """
    size = 4 * (role.parameters if gathers else role.updated)
    seconds = size * (gathers / GATHERED_BYTES + sums / SUMMED_BYTES)
    if device.kind != "cpu" or devices == 1 or not seconds:
        return found
    what, times = ("weights or gradients", gathers) if gathers else ("gradients", sums)
    often = "once" if round(times) == 1 else f"{times:,.0f} times"
    return Duration(found.seconds + seconds, f"{found.why}; {seconds:.3g} s for the ranks to exchange {what} {often}")


def rollout_time(role: Role, samples: Samples, device: Device, workers: int, each: int, running: int) -> Duration:
    """Prompts by the rate of products; tokens one after the other by the memory's bandwidth, or products if slower.

    Args:
        workers: replicas.
        each: devices of one.
        running: most requests that one runs at a time.
    """
    shape, c = role.shape, role.compute_bytes
    rows, longest = math.ceil(samples.rows / workers), samples.longest or samples.answer
    at_once = min(rows, running)
    decoding = max(1, round(at_once * samples.answer / longest))  # on average, until the last one ends
    rate = _per_device(device, each) * device.peak(c) * matrix_share(shape, device)
    bandwidth = DECODE_SHARE * device.bandwidth * _share(device, each, workers)
    prompts = math.ceil(rows / samples.group) * samples.prompt
    prefill = forward_flops(shape, prompts, samples.prompt, 0) / rate
    if shape.tower is not None:
        seen = tower_flops(shape, samples, samples.group)
        prefill += seen / (_per_device(device, each) * device.peak(c) * share_at(shape.tower.hidden, device))
    copies = each / (1 if shape.latent else min(each, shape.kv_heads))  # of each key on a replica's devices
    token = shape.kv_bytes(c) * copies
    states = 2 * shape.states.num_bytes(c)  # read and written
    read = c * (shape.touched(decoding) + shape.embedding)
    read += decoding * ((samples.prompt + samples.answer / 2) * token + states)
    computed = forward_flops(shape, decoding, samples.length, decoding) / rate
    step = max(read / bandwidth, computed) + _around(shape, device, each)
    steps = math.ceil(rows / at_once) * longest
    bound = "bandwidth" if read / bandwidth >= computed else "operations"
    why = f"{steps:,} tokens one after the other, {at_once} at once, {step * 1e3:.3g} ms each by {bound}"
    return Duration(prefill + steps * step, why)


def _around(shape: ModelShape, device: Device, each: int) -> float:
    """Seconds of a decode step's kernels and sums, whatever they read."""
    if device.kind == "cpu":
        return 0.0
    hop = 0.0 if each == 1 else HOP_SECONDS if each <= MACHINE else FAR_HOP_SECONDS
    return shape.layers * (LAYER_SECONDS + hop)


def sync_time(role: Role, device: Device, nodes: int = 1) -> Duration:
    """Weights, or an adapter, over the link between two devices, or the network where there are several machines."""
    size = 4 * role.adapter if role.lora else role.compute_bytes * role.parameters
    rate = device.link if nodes == 1 else NETWORK_SHARE * device.network
    return Duration(size / rate, f"{size / 1e9:.3g} GB at {rate / 1e9:.3g} GB/s")


def saved_bytes(role: Role) -> int:
    """Of a role in a checkpoint: weights, moments, and an adapter in place of frozen weights."""
    return 4 * (role.adapter if role.lora else role.parameters) + 8 * role.updated


def matrix_share(shape: ModelShape, device: Device) -> float:
    """Share of the peak that a model's matrix products reach."""
    return share_at(shape.width, device)


def share_at(width: float, device: Device) -> float:
    """The same of matrices of a width."""
    return device.efficiency or MATRIX_SHARE * width / (width + MATRIX_WIDTH)


def _computed(passes: float, role: Role, samples: Samples, device: Device, devices: int, idle: float = 1.0) -> Duration:
    """So many forward passes."""
    shape, peak = role.shape, device.peak(role.compute_bytes) * _per_device(device, devices)
    flops = passes * forward_flops(shape, samples.tokens, samples.length, samples.rows * samples.answer)
    rows = role.micro_batch("train", Lengths(samples.length, samples.answer)).rows
    together = max(1, min(samples.group, rows)) if role.worker.share_prompts else 1
    seen = passes * tower_flops(shape, samples, together)
    attention = passes * attention_flops(shape, samples.tokens * samples.length)
    attention_share = device.efficiency or ATTENTION_SHARE
    work = (flops - attention) / matrix_share(shape, device) + attention / attention_share
    if shape.tower is not None:
        flops, work = flops + seen, work + seen / share_at(shape.tower.hidden, device)
    share = flops / work
    why = f"{flops / 1e12:.3g} TFLOP at {share * peak / 1e12:.3g} TFLOP/s ({share:.0%} of the peak)"
    if idle > 1:
        why += f", {idle:.2f} times for stages that wait"
    return Duration(work * idle / peak, why)


def tower_flops(shape: ModelShape, samples: Samples, group: int = 1) -> float:
    """Operations of a forward pass over the pictures of a step, each once for so many samples of a prompt."""
    if shape.tower is None or not samples.pictures:
        return 0.0
    return math.ceil(samples.rows / group) * samples.pictures * shape.tower.operations(samples.pixels)


def _per_device(device: Device, devices: int) -> int:
    """Devices that work: CPU slots beyond the cores share them."""
    return devices if device.kind == "gpu" else min(devices, max(1, device.cores))


def _share(device: Device, each: int, workers: int) -> float:
    """Bandwidth of a worker in parts of the device's: GPUs have their own, CPU slots share the machine's."""
    return float(each) if device.kind == "gpu" else 1 / workers
