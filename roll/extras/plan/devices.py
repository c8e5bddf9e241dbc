"""Kinds of devices that a plan may be made for: their memory and their rates, by name or as found on this machine."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll.extras.doctor.limits import cores, memory_bytes
from roll.extras.plan import probe

GB, GIB, TERA = 1e9, 2**30, 1e12


@dataclass(frozen=True)
class Device:
    """One GPU, or the whole machine where devices are CPU slots."""

    name: str
    kind: str
    """``gpu`` or ``cpu``."""
    memory: int
    """Bytes of a GPU; of a machine, for all of its CPU slots together."""
    flops: float
    """Multiplications and additions per second in 16 bits (``gpu``), in float32 by one core (``cpu``)."""
    fp32_flops: float
    bandwidth: float
    """Bytes per second that its memory gives; of a machine, to one core, which is taken to be all of it."""
    link: float
    """Bytes per second to another device of its machine, in one direction."""
    efficiency: float = 0.4
    """Share of ``flops`` that training and scoring reach: the model FLOPs utilisation."""
    cores: int = 0
    """Of a machine with CPU slots."""
    tried: str = ""
    """How its rates were found, where they were tried out."""

    def rate(self, number_bytes: int) -> float:
        """Operations per second that matrix products in this format reach."""
        return self.efficiency * (self.flops if number_bytes == 2 else self.fp32_flops)


def _gpu(name: str, memory_gb: float, tflops: float, fp32: float, bandwidth_gb: float, link_gb: float) -> Device:
    sizes = (int(memory_gb * GB), tflops * TERA, fp32 * TERA, bandwidth_gb * GB, link_gb * GB)
    return Device(name, "gpu", *sizes)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100", 80, 312, 19.5, 2039, 300),
        _gpu("A100-40GB", 40, 312, 19.5, 1555, 300),
        _gpu("H100", 80, 989, 67, 3350, 450),
        _gpu("A800", 80, 312, 19.5, 2039, 200),
        _gpu("H800", 80, 989, 67, 3350, 200),
        _gpu("H100-PCIe", 80, 756, 51, 2000, 32),
        _gpu("H20", 96, 148, 44, 4000, 450),
        _gpu("H200", 141, 989, 67, 4800, 450),
        _gpu("B200", 180, 2250, 75, 8000, 900),
        _gpu("L4", 24, 121, 30.3, 300, 32),
        _gpu("L40S", 48, 362, 91.6, 864, 32),
        _gpu("RTX4090", 24, 165, 82.6, 1008, 32),
        _gpu("MI300X", 192, 1307, 163.4, 5300, 448),
    )
}
"""Dense rates in bfloat16 and float32, memory and links as the vendors' data sheets state them."""
_OTHER_KINDS = {"nvl", "laptop", "max", "mig"}
"""Words of names whose devices have other rates than those of ``GPUS``."""
CPU = "CPU"
BUSY, STEADY = 0.5, 0.7
"""A machine is busy where its load is more than this part of its cores, or tries are this far apart."""
_FIELDS = {"memory": GIB, "tflops": TERA, "bandwidth": GB, "link": GB, "efficiency": 1}
"""Keys that ``--devices NAME,key=value`` may change, and their units: GiB, TFLOP/s, GB/s, GB/s, a share."""


def parse_devices(text: str) -> Device:
    """A kind of device, such as ``H100`` or ``H100,memory=94,efficiency=0.5``.

    Raises:
        ValueError: no such name, key or number.
    """
    kind, *changes = (part.strip() for part in text.split(","))
    known = {each.lower(): device for each, device in GPUS.items()}
    if kind.upper() == CPU:
        device = this_cpu()
    elif kind.lower() in known:
        device = known[kind.lower()]
    else:
        raise ValueError(f"--devices: seen {kind!r}, expected one of {CPU}, {', '.join(GPUS)}")
    for change in changes:
        key, _, value = change.partition("=")
        try:
            number = float(value) * _FIELDS[key]
        except (KeyError, ValueError):
            expected = f"{', '.join(_FIELDS)}, each with a number"
            raise ValueError(f"--devices: seen {change!r}, expected {expected}") from None
        if not 0 < number < math.inf:
            raise ValueError(f"--devices: seen {change!r}, expected a positive, finite number")
        name = "flops" if key == "tflops" else key
        changed: dict[str, Any] = {name: int(number) if key == "memory" else number}
        if key == "tflops" and device.kind == "cpu":
            changed["fp32_flops"] = number
        device = replace(device, **changed)
    return device


def this_device() -> Device:
    """Device of this machine: its first GPU, if PyTorch sees one, else its cores."""
    import torch

    if not torch.cuda.is_available():
        return this_cpu()
    seen = torch.cuda.get_device_properties(0)
    return replace(known_gpu(seen.name) or GPUS["A100"], name=seen.name, memory=seen.total_memory)


def known_gpu(name: str) -> Device | None:
    """The kind of a device that PyTorch names, such as ``NVIDIA A100-SXM4-40GB``; ``None``: not one of ``GPUS``."""
    words = set(re.split(r"[\s-]+", re.sub(r"\bRTX ", "RTX", name).lower()))
    parts = {kind: set(kind.lower().split("-")) for kind in GPUS}
    found = [kind for kind in GPUS if parts[kind] <= words]
    if not found or words & _OTHER_KINDS:
        return None
    return GPUS[max(found, key=lambda kind: len(parts[kind]))]


def this_cpu() -> Device:
    """The machine that this process is on; its rates are tried out, which takes half a second of a processor."""
    load = os.getloadavg()[0]  # before this adds to it
    told = subprocess.run([sys.executable, probe.__file__], capture_output=True, text=True, check=True).stdout
    return cpu_of([tuple(map(float, line.split())) for line in told.splitlines()], load, cores())


def cpu_of(tries: Sequence[Sequence[float]], load: float, count: int) -> Device:
    """A machine by what was tried out on it: the best counts, since all that disturbs makes it slower.

    Args:
        tries: operations and bytes per second.
        load: of the machine meanwhile: processes that want to run.
        count: cores.
    """
    (least, flops), (_, bandwidth) = ((min(column), max(column)) for column in zip(*tries, strict=True))
    words = f"the best of {len(tries)} tries, {least / 1e9:.0f} to {flops / 1e9:.0f} GFLOP/s"
    if load > BUSY * count or least < STEADY * flops:
        words += f"; load {load:.1f} on {count} cores: others work here, and a run beside them is slower than planned"
    rates = (flops, flops, bandwidth, bandwidth / 2)
    return Device(CPU, "cpu", memory_bytes(), *rates, efficiency=0.5, cores=count, tried=words)
