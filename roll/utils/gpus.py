"""GPUs by the names that PyTorch gives them: memory and rates, as the vendors' data sheets state them."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    network: float = 0.0
    """Bytes per second of each GPU to another machine, in one direction."""
    efficiency: float = 0.0
    """Share of ``flops`` that training and scoring reach; 0: by the width of the model's matrices."""
    cores: int = 0
    """Of a machine with CPU slots."""
    tried: str = ""
    """How its rates were found, where they were tried out."""

    def peak(self, number_bytes: int) -> float:
        """Operations per second of matrix products in this format."""
        return self.flops if number_bytes == 2 else self.fp32_flops


def _gpu(
    name: str, memory_gb: float, tflops: float, fp32: float, bandwidth_gb: float, link_gb: float, network_gb: float = 25
) -> Device:
    sizes = (int(memory_gb * GB), tflops * TERA, fp32 * TERA, bandwidth_gb * GB, link_gb * GB, network_gb * GB)
    return Device(name, "gpu", *sizes)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100", 80, 312, 19.5, 2039, 300),
        _gpu("A100-40GB", 40, 312, 19.5, 1555, 300),
        _gpu("H100", 80, 989, 67, 3350, 450, 50),
        _gpu("A800", 80, 312, 19.5, 2039, 200),
        _gpu("H800", 80, 989, 67, 3350, 200, 50),
        _gpu("H100-PCIe", 80, 756, 51, 2000, 32),
        _gpu("H20", 96, 148, 44, 4000, 450, 50),
        _gpu("H200", 141, 989, 67, 4800, 450, 50),
        _gpu("B200", 180, 2250, 75, 8000, 900, 50),
        _gpu("L4", 24, 121, 30.3, 300, 32),
        _gpu("L40S", 48, 362, 91.6, 864, 32),
        _gpu("RTX4090", 24, 165, 82.6, 1008, 32),
        _gpu("MI300X", 192, 1307, 163.4, 5300, 448, 50),
    )
}
"""Dense rates in bfloat16 and float32, memory and links as the vendors' data sheets state them. The network is that of
their machines: 400 Gbit/s for each GPU of DGX H100, H200 and B200 and of MI300X platforms, 200 of DGX A100; 200 where
the vendor has no machine of eight."""
_OTHER_KINDS = {"nvl", "laptop", "max", "mig"}
"""Words of names whose devices have other rates than those of ``GPUS``."""


def known_gpu(name: str) -> Device | None:
    """The kind of a device that PyTorch names, such as ``NVIDIA A100-SXM4-40GB``; ``None``: not one of ``GPUS``."""
    words = set(re.split(r"[\s-]+", re.sub(r"\bRTX ", "RTX", name).lower()))
    parts = {kind: set(kind.lower().split("-")) for kind in GPUS}
    found = [kind for kind in GPUS if parts[kind] <= words]
    if not found or words & _OTHER_KINDS:
        return None
    return GPUS[max(found, key=lambda kind: len(parts[kind]))]
