"""GPUs as PyTorch sees them, their driver and NCCL."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

from roll.extras.doctor.findings import Finding, judged

GIB = 2**30
_QUERY = ("--query-gpu=name,driver_version", "--format=csv,noheader")


def check_accelerators() -> Iterator[Finding]:
    """Checks what PyTorch and the driver say, and whether they agree."""
    import torch

    drivers = driver_lines()
    count = torch.cuda.device_count()
    build = f"PyTorch {torch.__version__}, built for {_built_for()}"
    if not count:
        seen = f"PyTorch sees none, the driver lists {len(drivers)}; {build}" if drivers else f"none; {build}"
        fix = "Install the PyTorch of this driver's CUDA (pytorch.org/get-started), or unset CUDA_VISIBLE_DEVICES."
        yield judged("gpus", f"{seen}; devices are CPU slots", error=bool(drivers), fix=fix)
        return
    names = [torch.cuda.get_device_name(device) for device in range(count)]
    yield Finding("ok", "gpus", f"{count}: {', '.join(sorted(set(names)))}; {build}")
    if drivers:
        yield Finding("ok", "driver", drivers[0].rpartition(",")[2].strip())
    fix = "Give a run GPUs of one kind: ranks wait for the slowest."
    yield judged("kinds of gpus", str(len(set(names))), warning=len(set(names)) > 1, fix=fix)
    yield from _check_memory(count)
    if not torch.distributed.is_nccl_available():
        fix = "Install a PyTorch with NCCL; without it, weights and gradients of several GPUs cannot travel."
        yield judged("nccl", "not in this PyTorch", error=count > 1, warning=True, fix=fix)
    else:
        yield Finding("ok", "nccl", ".".join(map(str, torch.cuda.nccl.version())))
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("warning", "bf16", "not in hardware", "actor_train.model_args.dtype=fp32, and so for every role")


def driver_lines() -> list[str]:
    """Name and driver version of every GPU that the driver lists; none without ``nvidia-smi``."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        told = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in told.splitlines() if line.strip()]


def _check_memory(count: int) -> Iterator[Finding]:
    from torch import cuda

    shares = [cuda.mem_get_info(device) for device in range(count)]
    busy = [str(device) for device, (free, total) in enumerate(shares) if free < 0.9 * total]
    seen = f"{min(free for free, _ in shares) / GIB:.1f} of {shares[0][1] / GIB:.1f} GiB free at least"
    fix = f"End the other processes on GPU {', '.join(busy)} (nvidia-smi), or leave it out by CUDA_VISIBLE_DEVICES."
    yield judged("gpu memory", seen, warning=bool(busy), fix=fix)


def _built_for() -> str:
    from torch import version

    return f"CUDA {version.cuda}" if version.cuda else f"ROCm {version.hip}" if version.hip else "CPUs alone"
