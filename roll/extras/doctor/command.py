"""The command ``roll doctor``: all checks in parallel, a page or JSON, and the exit code."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from roll.extras.doctor import machine
from roll.extras.doctor.findings import Check, Finding, as_json, examine, exit_code, page
from roll.extras.doctor.machine import machine_findings
from roll.tracking.redact import redact


def doctor(
    address: str | None, model: str | None, output_dir: Path, *, json: bool = False, trusts: bool = False
) -> int:
    """Examines this machine, and what is asked for beside it; writes what was found.

    Args:
        address: of a running Ray cluster whose machines are examined too.
        model: folder or hub name whose chat template is tried.
        json: machine-readable.
        trusts: whether Python files that come with the model may run.

    Returns:
        1 where something would make a run fail, else 0.
    """
    checks: dict[str, Check] = {"hub": machine.check_hub}
    if model is not None:
        checks["template"] = partial(machine.check_chat_template, model, trusts)
    findings = machine_findings(output_dir, checks)
    if address is not None:
        from roll.extras.doctor.nodes import check_cluster

        findings += examine("cluster", partial(check_cluster, address, output_dir))
    findings = [Finding(**redact(asdict(finding))) for finding in findings]
    sys.stdout.write(as_json(findings) if json else page(findings))
    return exit_code(findings)
