"""All checks of one machine, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from roll.extras.doctor import accelerators, limits, packages, services, storage
from roll.extras.doctor.findings import Check, Finding, examine


def machine_findings(output_dir: Path, more: Mapping[str, Check] | None = None) -> list[Finding]:
    """Findings on the machine that this process runs on.

    Args:
        more: further checks by name.
    """
    checks: dict[str, Check] = {
        "packages": packages.check_packages,
        "gpus": accelerators.check_accelerators,
        "limits": limits.check_limits,
        "disk": partial(storage.check_disk, output_dir),
        "sandbox": services.check_sandbox,
        **(more or {}),
    }
    with ThreadPoolExecutor(len(checks)) as pool:
        return [finding for found in pool.map(examine, checks, checks.values()) for finding in found]
