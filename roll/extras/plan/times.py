"""Seconds of a step's phases, from counts of operations and bytes and a device's rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roll.extras.plan.work import Lengths, Role
from roll.models.shapes import forward_flops, samples_flops, training_factor
from roll.utils.gpus import Device

DECODE_SHARE = 0.6
"""Of a device's bandwidth that sampling reaches."""


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
    """Forward, backward, and where activations are computed again one more forward pass."""
    one = forward_flops(role.shape, samples.tokens, samples.length, samples.rows * samples.answer)
    share = shared_share(role, samples)
    flops = samples.passes * one * share * (training_factor(role.lora is not None) + role.recomputes)
    found = _computed(flops, role, device, devices)
    return found if share == 1 else Duration(found.seconds, f"{found.why}; prompts are shared, {share:.0%} is computed")


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
    flops = forward_flops(role.shape, samples.tokens, samples.length, samples.rows * samples.answer)
    return _computed(flops, role, device, devices)


def rollout_time(role: Role, samples: Samples, device: Device, workers: int, each: int, running: int) -> Duration:
    """Prompts by the rate of products; tokens one after the other by the memory's bandwidth, or products if slower.

    Args:
        workers: replicas.
        each: devices of one.
        running: most requests that one runs at a time.
    """
    shape, c = role.shape, role.compute_bytes
    rows = math.ceil(samples.rows / workers)
    at_once = min(rows, running)
    rate = _per_device(device, each) * device.rate(c)
    bandwidth = DECODE_SHARE * device.bandwidth * _share(device, each, workers)
    prompts = math.ceil(rows / samples.group) * samples.prompt
    prefill = forward_flops(shape, prompts, samples.prompt, 0) / rate
    read = c * (shape.active + shape.embedding) + at_once * (samples.prompt + samples.answer / 2) * shape.kv_bytes(c)
    computed = forward_flops(shape, at_once, samples.length, at_once) / rate
    step = max(read / bandwidth, computed)
    steps = math.ceil(rows / at_once) * samples.answer
    bound = "bandwidth" if read / bandwidth >= computed else "operations"
    why = f"{steps:,} tokens one after the other, {at_once} at once, {step * 1e3:.3g} ms each by {bound}"
    return Duration(prefill + steps * step, why)


def sync_time(role: Role, device: Device) -> Duration:
    """Weights, or an adapter, over the link between two devices."""
    size = 4 * role.adapter if role.lora else role.compute_bytes * role.parameters
    return Duration(size / device.link, f"{size / 1e9:.3g} GB at {device.link / 1e9:.3g} GB/s")


def _computed(flops: float, role: Role, device: Device, devices: int) -> Duration:
    rate = device.rate(role.compute_bytes) * _per_device(device, devices)
    why = f"{flops / 1e12:.3g} TFLOP at {rate / 1e12:.3g} TFLOP/s ({device.efficiency:.0%} of the peak)"
    return Duration(flops / rate, why)


def _per_device(device: Device, devices: int) -> int:
    """Devices that work: CPU slots beyond the cores share them."""
    return devices if device.kind == "gpu" else min(devices, max(1, device.cores))


def _share(device: Device, each: int, workers: int) -> float:
    """Bandwidth of a worker in parts of the device's: GPUs have their own, CPU slots share the machine's."""
    return float(each) if device.kind == "gpu" else 1 / workers
