"""Ten steps of the six demonstrations as digests, to show that a change of the code changes no result.

    python scripts/demonstration_digests.py write before.json     # on the commit before
    python scripts/demonstration_digests.py compare before.json   # on the commit after, on the same machine

A digest covers every metric of every step (``metrics.jsonl``) but those of time, speed and memory, and every file of
weights of the last checkpoint. Runs are made in a temporary folder, one after the other. Which kernels a processor has
changes results, so digests are compared on one machine only. ``compare`` exits with 1 and names what differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["max_steps=10", "save_steps=10", "eval_steps=5"]
WARM = ["warm_start.max_steps=20", "warm_start.min_success=0.0", "warm_start.min_valid=0.0"]
RUNS: dict[str, tuple[str, list[str]]] = {
    "agentic_sokoban": ("agentic", [*WARM, "warm_start.demonstrations=640", "val_batch_size=32"]),
    "rlvr_math": ("rlvr", ["warm_start.max_steps=300", "warm_start.min_success=0.0"]),
    "sft_math": ("sft", []),
    "dpo_math": ("dpo", ["warm_start.max_steps=100", "warm_start.min_success=0.0"]),
    "rm_math": ("rm", []),
    "distill_math": (
        "distill",
        [
            f"{section}.{key}"
            for section in ("warm_start", "teacher_warm_start")
            for key in ("max_steps=20", "min_success=0.0")
        ],
    ),
}
"""Configuration, its pipeline's start script, and what makes it short."""
MEASURED = ("time/", "tokens_per_s", "tflops", "mfu", "memory", "system/", "seconds")
"""Parts of the names of metrics that differ from run to run."""


def metrics_of(folder: Path) -> dict[str, str]:
    """By metric, the digest of its values at all steps."""
    columns: dict[str, list[object]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if not any(part in name for part in MEASURED):
                columns.setdefault(name, []).append((row.get("step"), value))
    return {name: _digest(json.dumps(values).encode()) for name, values in sorted(columns.items())}


def weights_of(folder: Path) -> dict[str, str]:
    """By file of the last checkpoint, its digest."""
    last = max((folder / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[-1]))
    files = sorted(last.rglob("*.safetensors"))
    return {file.relative_to(last).as_posix(): _digest(file.read_bytes()) for file in files}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def run(name: str, output: Path) -> dict[str, dict[str, str]]:
    """Digests of one demonstration."""
    pipeline, options = RUNS[name]
    script = ROOT / "examples" / f"start_{pipeline}_pipeline.py"
    command = [sys.executable, str(script), "--config_name", name, f"output_dir={output}", f"exp_name={name}"]
    log = output / f"{name}.log"
    with log.open("w") as out:
        done = subprocess.run([*command, *SHORT, *options], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.exit(f"{name}: exit code {done.returncode}\n" + "\n".join(log.read_text().splitlines()[-20:]))
    return {"metrics": metrics_of(output / name), "weights": weights_of(output / name)}


def differences(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> list[str]:
    """Names of metrics and files that are not the same, or that are gone; a new metric changes no result."""
    found = []
    for kind in ("metrics", "weights"):
        names = before[kind].keys() | (after[kind].keys() if kind == "weights" else set())
        found += [f"{kind}: {name}" for name in sorted(names) if before[kind].get(name) != after[kind].get(name)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["write", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", help="these demonstrations, separated by commas")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(RUNS)
    before = json.loads(args.file.read_text()) if args.action == "compare" else {}
    found: dict[str, dict[str, dict[str, str]]] = {}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found[name] = run(name, Path(folder))
            counts = " and ".join(f"{len(found[name][kind])} {kind}" for kind in ("metrics", "weights"))
            changed = differences(before[name], found[name]) if before else []
            failed |= bool(changed)
            print(f"{name}: {counts}" + (f", {len(changed)} differ" if before else ""), *changed[:20], sep="\n  ")
            if not before:
                args.file.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
