"""Seconds of a step's phases from counts of operations and bytes, and the rates of a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roll.preflight.plan.devices import Device
from roll.preflight.plan.shapes import ModelShape
from roll.preflight.plan.work import Role

DECODE_SHARE = 0.6
"""Of a device's bandwidth that sampling reaches."""
FORWARD, BACKWARD = 2, 4
"""Operations per parameter and token: a product and a sum forward, twice as many backward."""


@dataclass(frozen=True)
class Samples:
    """Samples that a step trains on, each as long as it may be."""

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


def forward_flops(shape: ModelShape, tokens: int, length: int, loss_tokens: int) -> float:
    """Operations of a forward pass over samples of one length."""
    return samples_flops(shape, tokens, tokens * length, loss_tokens)


def samples_flops(shape: ModelShape, tokens: int, squares: float, loss_tokens: int) -> float:
    """Operations of a forward pass: matrices, causal attention (half of all pairs), and the output layer.

    Args:
        tokens: of all samples.
        squares: sum of the squares of their lengths.
        loss_tokens: for which the output layer is computed.
    """
    attention = FORWARD * 2 * shape.layers * shape.query * squares / 2
    return FORWARD * tokens * shape.active + attention + FORWARD * loss_tokens * shape.embedding


def training_factor(role: Role) -> int:
    """Operations of forward and backward pass as a multiple of the forward pass's, without recomputation."""
    times = FORWARD + BACKWARD
    if role.lora is not None:  # no gradients of the frozen matrices
        times -= FORWARD
    return times // FORWARD


def training_time(role: Role, samples: Samples, device: Device, devices: int) -> Duration:
    """Forward, backward, and where activations are computed again one more forward pass."""
    one = forward_flops(role.shape, samples.tokens, samples.length, samples.rows * samples.answer)
    flops = samples.passes * one * (training_factor(role) + role.recomputes)
    return _computed(flops, role, device, devices)


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
