"""Devices to plan for: by name, changed on the command line, or those of this machine."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from roll.extras.doctor import cores, memory_bytes
from roll.utils.gpus import GB, GIB, GPUS, TERA, Device, known_gpu

CPU = "CPU"
BUSY, STEADY = 0.5, 0.7
"""A machine is busy where its load is more than this part of its cores, or tries are this far apart."""
_FIELDS = {"memory": GIB, "tflops": TERA, "bandwidth": GB, "link": GB, "network": GB, "efficiency": 1}
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
        raise ValueError(f"--devices: got {kind!r}, expected one of {CPU}, {', '.join(GPUS)}")
    for change in changes:
        key, _, value = change.partition("=")
        try:
            number = float(value) * _FIELDS[key]
        except (KeyError, ValueError):
            expected = f"{', '.join(_FIELDS)}, each with a number"
            raise ValueError(f"--devices: got {change!r}, expected {expected}") from None
        if not 0 < number < math.inf:
            raise ValueError(f"--devices: got {change!r}, expected a positive, finite number")
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


@cache
def this_cpu() -> Device:
    """The machine that this process is on; its rates are tried out once, which takes half a second of a processor."""
    load = os.getloadavg()[0]  # before this adds to it
    # In a process of its own: the number of threads that NumPy works with is settled when it is imported.
    command = [sys.executable, "-c", f"from {__name__} import print_rates; print_rates()"]
    environment = os.environ | dict.fromkeys(THREADS, "1")
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
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
        words += f"; load {load:.1f} on {count} cores: the machine is busy, and a run is slower than planned"
    rates = (flops, flops, bandwidth, bandwidth / 2, bandwidth / 2)
    return Device(CPU, "cpu", memory_bytes(), *rates, efficiency=0.5, cores=count, tried=words)


TRIES, SECONDS = 5, 0.08
"""Seconds of the processor that a try takes."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def rates() -> list[tuple[float, float]]:
    """What one core did in each try: operations per second of float32 products, and bytes per second of a copy.

    Time is that of the processor, which other programs on a busy machine do not add to.
    """
    import numpy as np

    size = 512
    matrix = np.ones((size, size), dtype=np.float32)
    block = np.ones(2**23, dtype=np.float32)
    target = np.ones_like(block)
    found = []
    for _ in range(TRIES):
        best_product = best_copy = float("inf")
        end = time.thread_time() + SECONDS
        while time.thread_time() < end:
            start = time.thread_time()
            matrix @ matrix
            middle = time.thread_time()
            target[:] = block
            best_product = min(best_product, middle - start)
            best_copy = min(best_copy, time.thread_time() - middle)
        found.append((2 * size**3 / best_product, 2 * block.nbytes / best_copy))
    return found


def print_rates() -> None:
    """A line for each of ``rates``."""
    for flops, bandwidth in rates():
        sys.stdout.write(f"{flops} {bandwidth}\n")
