"""Files that start a planned run elsewhere: a batch file for Slurm, a manifest for KubeRay."""

from __future__ import annotations

import importlib.metadata
import math
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from roll.extras.plan.plan import Plan

GIB = 2**30
GRACE_SECONDS = 600
"""How long before its time limit a run gets the signal to save and stop."""
LONGEST_HOURS = 24
SPARE = 1.25
"""Room that is asked for, in parts of what the plan says."""
RAY_PORT = 6379


def launcher(kind: str, plan: Plan, command: Sequence[str]) -> str:
    """The text of a launcher.

    Args:
        kind: ``slurm`` or ``kuberay``.
        plan: of the run.
        command: that runs it.
    """
    resumed = [*command, *(() if any(_is_resume(word) for word in command) else ("resume_from_checkpoint=true",))]
    return {"slurm": slurm, "kuberay": kuberay}[kind](plan, resumed)


def hours(plan: Plan) -> int:
    """Time to ask for: twice the planned steps, and an hour to start; at most a day, as a run goes on where it was."""
    planned = 2 * (plan.run_seconds or plan.config.max_steps * plan.step_seconds) / 3600 + 1
    return min(LONGEST_HOURS, math.ceil(planned))


def slurm(plan: Plan, command: Sequence[str]) -> str:
    """A batch file: Ray on all nodes, the run on the first, SIGTERM passed on, and a new start where it was stopped."""
    config = plan.config
    gpus = f"#SBATCH --gpus-per-node={config.num_gpus_per_node}\n" if plan.device.kind == "gpu" else ""
    directives = f"""\
#!/bin/bash
#SBATCH --job-name={config.exp_name}
#SBATCH --nodes={config.num_nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --mem={_gib(plan)}G
#SBATCH --time={hours(plan)}:00:00
#SBATCH --signal=B:TERM@{GRACE_SECONDS}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
"""
    start = _SLURM_RAY.replace("PORT", str(RAY_PORT)) if config.num_nodes > 1 else ""
    return f"{directives}{_SLURM_HEAD}{start}{_SLURM_RUN.replace('COMMAND', shlex.join(command))}"


_SLURM_HEAD = """\
# Written by `roll plan --write slurm`. Load the environment here: modules, `source …/bin/activate`.
# output_dir must be a folder that all nodes see.
set -euo pipefail
"""
_SLURM_RAY = """\

first=$(hostname)
address=$(hostname --ip-address | awk '{print $1}')
export RAY_ADDRESS="$address:PORT"
srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" \\
    ray start --head --node-ip-address="$address" --port=PORT --disable-usage-stats --block &
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# The head first: workers give up on one that is not there.
for _ in $(seq 60); do
    ray status --address="$RAY_ADDRESS" >/dev/null 2>&1 && break
    sleep 2
done
others=$((SLURM_JOB_NUM_NODES - 1))
srun --overlap --nodes="$others" --ntasks="$others" --exclude="$first" \\
    ray start --address="$RAY_ADDRESS" --block &

# The run starts when all nodes have joined.
python - "$SLURM_JOB_NUM_NODES" <<'PYTHON'
import sys
import time

import ray

ray.init(address="auto", log_to_driver=False)
end = time.monotonic() + 300
while (alive := sum(node["Alive"] for node in ray.nodes())) < int(sys.argv[1]):
    if time.monotonic() > end:
        sys.exit(f"{alive} of {sys.argv[1]} nodes joined Ray within 300 s")
    time.sleep(2)
PYTHON
"""
_SLURM_RUN = """\

COMMAND &
run=$! stopping=0 code=0
trap 'stopping=1; kill -TERM "$run" 2>/dev/null || true' TERM
wait "$run" || code=$?
if [ "$stopping" -eq 1 ]; then # the signal ended the wait; the run saves and ends later
    code=0
    wait "$run" || code=$?
fi
if [ "$code" -eq 143 ]; then # stopped and saved: continues when the job is scheduled again
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def kuberay(plan: Plan, command: Sequence[str]) -> str:
    """A RayJob: a cluster of the plan's machines for this run alone, removed when it is over."""
    config = plan.config
    workers: dict[str, Any] = {}
    if config.num_nodes > 1:
        count = config.num_nodes - 1
        sizes = {"replicas": count, "minReplicas": count, "maxReplicas": count}
        group = {"groupName": "workers", **sizes, "rayStartParams": {}, "template": _pod(plan, "ray-worker")}
        workers = {"workerGroupSpecs": [group]}
    head = {"rayStartParams": {"dashboard-host": "0.0.0.0"}, "template": _pod(plan, "ray-head")}
    manifest = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": _kubernetes_name(config.exp_name)},
        "spec": {
            "entrypoint": shlex.join([*command, f"output_dir={_OUTPUT}"]),
            "submissionMode": "K8sJobMode",
            "backoffLimit": 3,
            "activeDeadlineSeconds": hours(plan) * 3600,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": GRACE_SECONDS,
            "rayClusterSpec": {
                "rayVersion": importlib.metadata.version("ray"),
                "headGroupSpec": head,
                **workers,
            },
        },
    }
    return _KUBERAY_HEAD + yaml.safe_dump(manifest, sort_keys=False, width=110)


_OUTPUT, _IMAGE, _CLAIM = "/output", "roll:latest", "roll-output"
_KUBERAY_HEAD = f"""\
# Written by `roll plan --write kuberay`. To be replaced: the image {_IMAGE} by one that holds this library and
# the same Ray, the claim {_CLAIM} by a volume that all machines can write to. A new attempt resumes from the newest
# checkpoint.
"""


def _pod(plan: Plan, name: str) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": plan.config.num_gpus_per_node} if plan.device.kind == "gpu" else {}
    memory = _gib(plan)
    cores = max(2, plan.config.num_gpus_per_node)
    shared = max(1, memory // 4)
    resources = {"cpu": str(cores), "memory": f"{memory + shared}Gi", **{key: str(n) for key, n in gpus.items()}}
    container = {
        "name": name,
        "image": _IMAGE,
        # What a stopped run gets to save in, where three seconds are usual.
        "env": [{"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(GRACE_SECONDS)}],
        "resources": {"requests": resources, "limits": dict(resources)},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "output", "mountPath": _OUTPUT}],
    }
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shared}Gi"}},
        {"name": "output", "persistentVolumeClaim": {"claimName": _CLAIM}},
    ]
    spec = {"terminationGracePeriodSeconds": GRACE_SECONDS, "containers": [container], "volumes": volumes}
    return {"spec": spec}


def _gib(plan: Plan) -> int:
    """Memory of the machine that needs the most, with room to spare, in GiB."""
    needed = max(plan.host_memory(node) for node, _ in enumerate(plan.placement.nodes))
    return math.ceil(SPARE * needed / GIB) + 1


def _kubernetes_name(name: str) -> str:
    """Letters, digits and hyphens, as Kubernetes takes names; at most 47, since it adds its own to them."""
    plain = "".join(char if char.isascii() and char.isalnum() else "-" for char in name.lower())
    return plain.strip("-")[:47].rstrip("-") or "roll"


def _is_resume(word: str) -> bool:
    return word.lstrip("+").startswith("resume_from_checkpoint=")
