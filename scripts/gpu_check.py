#!/usr/bin/env python3
"""Everything that only a GPU can show, the most telling first: each step with a time limit, its result written at once.

    scripts/gpu_check.py OUT --kit KIT --minutes 9     on a machine with one CUDA GPU, torch >= 2.11 and Transformers
    scripts/gpu_check.py OUT --minutes 30              the same where all packages are installed
    scripts/gpu_check.py OUT --rehearse                on a CPU: each step in its smallest form, or why it cannot run

KIT is what scripts/make_gpu_kit.sh or make_vllm_kit.py made; no network is needed. OUT gets check.json (versions, what
is missing, every step with its result and seconds, the figures), check.md (the same as tables) and a log for each step.
A step that fails or takes too long does not keep the next from running; one that the minutes have no room for is named.
The exit code is 1 if a step failed. What a kit is installed into stays in --environment and is used again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INTERRUPTED_SECONDS = 12.0
"""That a step has to show its results after it is interrupted, before it is killed."""
LARGEST_FILE = 16 << 20
"""In bytes, of what is kept of a run."""
LEAST_SECONDS = 10.0
"""With less time left no step begins."""
OPTIONAL = {
    "pytest": "tests are not run (pip install pytest pytest-timeout)",
    "ray": "weight updates, tests of roles and the demonstration do not run (pip install ray)",
    "deepspeed": "deepspeed_train is not run (pip install deepspeed)",
    "megatron": "megatron_train is not run (pip install megatron-core)",
    "transformer_engine": "Megatron runs without its fused kernels and fp8 (pip install transformer-engine[pytorch])",
    "vllm": "vLLM's weight routes, sleep levels, batched tokens and log-prob gap are not measured (pip install vllm)",
    "sglang": "the contract of sglang is not tested (an environment of its own, ROLL_SGLANG_PYTHON)",
    "flash_attn": "no row for FlashAttention 2 (pip install flash-attn, which needs nvcc)",
    "flash_attn_interface": "no row for FlashAttention 3 (built from its sources, for Hopper alone)",
    "liger_kernel": "no row for Liger's kernels (pip install liger-kernel)",
    "peft": "no tests of adapters (pip install peft)",
}
"""Packages that steps use where they are, and what is lost without each."""


@dataclass(frozen=True)
class Step:
    """One command with a time limit."""

    name: str
    shows: str
    seconds: float
    command: Sequence[str] = ()
    rehearsal: Sequence[str] = ()
    """The smallest form, for a CPU; none: it needs a GPU."""
    needs: Sequence[str] = ()
    """Packages without which it is left out."""


def bench(name: str, shows: str, seconds: float, row: int, *needs: str) -> Step:
    """A part of ``benchmarks/gpu.py``, whose rows may take so many seconds each."""
    command = ("{python}", "benchmarks/gpu.py", "--parts", name, "--json", "{out}/figures-" + f"{name}.json")
    rehearsal = (*command, "--rehearse", "--rounds", "1", "--seconds", "300")
    return Step(name, shows, seconds, (*command, "--seconds", str(row)), rehearsal, needs)


def tests(
    name: str, shows: str, seconds: float, *arguments: str, needs: Sequence[str] = (), together: bool = True
) -> Step:
    """Tests for GPUs.

    Args:
        together: several processes at a time, as most of their time is a process's start. vLLM does not start while
            another process gives memory of the device back.
    """
    command = ("{python}", "-m", "pytest", "-q", "-rsfE", "-m", "gpu", "-p", "no:cacheprovider")
    workers = ("{workers}",) if together else ()
    return Step(name, shows, seconds, (*command, *workers, *arguments), (), ("pytest", *needs))


def run_of(
    config: str,
    shows: str,
    seconds: float,
    on_gpu: Sequence[str],
    small: Sequence[str] = (),
    name: str = "",
    needs: Sequence[str] = (),
) -> Step:
    """Some steps of a demonstration, whose configuration's name begins with its pipeline's.

    Args:
        on_gpu: its settings on one GPU.
        small: its settings in a rehearsal; none: it needs a GPU.
        name: of the step, if it is not the configuration's.
    """
    pipeline, name = config.partition("_")[0], name or config
    command = (
        *("{python}", f"examples/start_{pipeline}_pipeline.py", "--config_name", config),
        *("output_dir={scratch}/output", f"exp_name={name}"),
    )
    rehearsal = (*command, *small) if small else ()
    return Step(name, shows, seconds, (*command, "num_gpus_per_node=1", *on_gpu), rehearsal, ("ray", *needs))


SOKOBAN = run_of(
    "agentic_sokoban",
    "ten steps with an actor, a critic and a generator on one device, the ninth profiled",
    150,
    (
        *(f"{role}.device_mapping=[0]" for role in ("actor_train", "actor_infer", "critic")),
        *("max_steps=10", "save_steps=10", "profiler.steps=[9]", "profiler.memory=true"),
    ),
    (
        *("max_steps=1", "save_steps=1", "eval_steps=0", "val_before_train=false", "rollout_batch_size=64"),
        *("train_env_manager.env_groups=64", "val_batch_size=32", "val_env_manager.env_groups=32"),
        *("warm_start.max_steps=20", "warm_start.eval_steps=20", "warm_start.eval_episodes=32"),
        *("warm_start.demonstrations=640", "warm_start.min_success=0.0", "warm_start.min_valid=0.0"),
    ),
)
SOKOBAN_VLLM = run_of(
    "agentic_sokoban",
    "five steps in which vLLM sleeps while the trainers work, and gets their weights on the device",
    300,
    (
        *(f"{role}.device_mapping=[0]" for role in ("actor_train", "actor_infer", "critic")),
        *("infer=vllm", "+actor_infer.strategy_args.strategy_config.gpu_memory_utilization=0.3"),
        *("max_steps=5", "save_steps=5"),
    ),
    name="agentic_sokoban_vllm",
    needs=("vllm",),
)
SHAPES = run_of(
    "rlvr_shapes",
    "ten steps of a model that takes pictures, its tower trained",
    300,
    (
        *("actor_train.device_mapping=[0]", "actor_infer.device_mapping=[0]"),
        *("actor_train.training_args.gradient_accumulation_steps=8", "max_steps=10", "save_steps=10"),
    ),
    (
        *("max_steps=1", "save_steps=1", "eval_steps=0", "val_before_train=false"),
        *("warm_start.max_steps=10", "warm_start.eval_steps=10", "warm_start.eval_episodes=32"),
        *("warm_start.min_success=0.0", "warm_start.max_success=1.0"),
    ),
)


STEPS = (
    bench("ipc", "50 buckets to a plain process by CUDA IPC, each checked", 60, 50),
    tests(
        "cuda",
        "log-probs, packed rows in one call, shards of a lone rank, a group made of NCCL itself, Liger",
        150,
        *("tests/gpu/test_cuda.py", "--timeout", "100"),
    ),
    bench("attention", "a packed row of 16k tokens: one call, per sequence, FlashAttention, mask", 180, 60),
    bench("output_layer", "logits at a time: 2^25, 2^28, the default", 100, 60),
    bench("leaving", "ZeRO 2 and the others leave the device and come back", 120, 60),
    bench("train", "tokens per second of every trainer, FSDP2's shards and Liger", 200, 60),
    bench("vllm", "a start of vLLM: log-prob gap in bf16, tokens per second, sleep levels", 330, 200, "vllm"),
    SOKOBAN_VLLM,
    bench("weights", "weight updates to hf_infer and vllm on the same device", 150, 120, "ray"),
    SOKOBAN,
    tests("families", "every model family: fp32, packed, bf16, pictures; hf_infer", 200, "tests/gpu/test_families.py"),
    SHAPES,
    tests(
        "offload",
        "memory that trainers give back: alone, ZeRO 2 and 3, bf16",
        200,
        *("tests/gpu/test_offload.py", "-k", "alone or zero2 or zero3 or bf16", "--timeout", "150"),
    ),
    bench("generate", "new tokens per second of hf_infer", 200, 150),
    tests(
        "vllm_tests",
        "sleep and weight routes of vllm",
        400,
        *("tests/gpu/test_generators.py", "tests/gpu/test_weight_routes.py", "-k", "vllm and not contract"),
        needs=("vllm", "ray"),
        together=False,
    ),
    tests(
        "vllm_contract",
        "the contract of generators, for which vllm starts again and again",
        3600,
        *("tests/gpu/test_generators.py", "-k", "vllm and contract"),
        needs=("vllm", "ray"),
        together=False,
    ),
    tests(
        "all_tests",
        "every test for GPUs but those of vLLM",
        900,
        *("tests/gpu", "tests/integration/test_colocation.py", "-k", "not vllm"),
        needs=("ray",),
    ),
)
"""In their order."""


def look() -> dict[str, Any]:
    """This machine: the GPU, versions, and what is not installed."""
    import platform
    from importlib import metadata

    import torch
    import transformers

    has_gpu = torch.cuda.is_available()
    found = {
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if has_gpu else None,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_gpu else None,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    names = {"megatron": "megatron-core", "flash_attn_interface": "flash-attn-3"}
    installed = {}
    for module in (*OPTIONAL, "xdist"):
        if importlib.util.find_spec(module) is not None:
            try:
                installed[module] = metadata.version(names.get(module, module))
            except metadata.PackageNotFoundError:
                installed[module] = "unknown version"
    missing = [f"{module}: {lost}" for module, lost in OPTIONAL.items() if module not in installed]
    return {"machine": found, "packages": installed, "missing": missing}


def install(kit: Path, environment: Path) -> None:
    """Unpacks a kit beside the packages of this machine's Python, among them its torch, and those of other kits.

    Raises:
        ValueError: a piece is damaged or absent.
    """
    sums = (kit / "SHA256SUMS").read_bytes()
    done = environment / hashlib.sha256(sums).hexdigest()
    if done.exists():
        return
    (environment / "site").mkdir(parents=True, exist_ok=True)
    names = []
    for line in sums.decode().splitlines():
        expected, name = line.split()
        names.append(name)
        piece = kit / name
        if not piece.exists() or hashlib.sha256(piece.read_bytes()).hexdigest() != expected:
            raise ValueError(f"{piece}: damaged or absent, expected SHA-256 {expected}")
    whole = environment / "kit.tar.xz"
    with whole.open("wb") as file:
        for name in sorted(names):
            file.write((kit / name).read_bytes())
    with tarfile.open(whole, mode="r:xz") as archive:
        archive.extractall(environment / "site", filter="data")
    whole.unlink()
    done.touch()


def run(command: Sequence[str], log: Path, seconds: float, environment: Mapping[str, str]) -> int | None:
    """Exit code of a command; ``None``: it took too long, and was interrupted as by Ctrl-C, then killed."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=dict(environment), start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPTED_SECONDS)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and left behind
            process.wait()


class Check:
    """The steps so far, written anew after each."""

    def __init__(self, out: Path, scratch: Path, minutes: float) -> None:
        self.out, self.scratch = out, scratch
        self.end = time.monotonic() + 60 * minutes
        self.facts: dict[str, Any] = {}
        self.steps: dict[str, dict[str, Any]] = {}

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    @property
    def failed(self) -> bool:
        return any(step["result"] in ("failed", "too slow") for step in self.steps.values())

    def note(self, name: str, shows: str, result: str, seconds: float = 0.0, why: str = "") -> None:
        self.steps[name] = {"result": result, "seconds": round(seconds, 1), "shows": shows} | (
            {"why": why} if why else {}
        )
        print(f"{name:<16}{result:<12}{seconds:6.0f} s  {why}", flush=True)
        self.write()

    def take(
        self, step: Step, words: Mapping[str, str | Sequence[str]], rehearse: bool, environment: Mapping[str, str]
    ) -> None:
        """Runs a step, or notes why not."""
        command = step.rehearsal if rehearse else step.command
        absent = [name for name in step.needs if name not in self.facts["packages"]]
        if rehearse and not command:
            return self.note(step.name, step.shows, "needs a GPU")
        if absent:
            return self.note(step.name, step.shows, "left out", why=f"needs the package {absent[0]}")
        limit = min(step.seconds, self.left - INTERRUPTED_SECONDS) if not rehearse else self.left
        if limit < LEAST_SECONDS:
            return self.note(step.name, step.shows, "not begun", why="no time left")
        start = time.monotonic()
        code = run(filled(command, words), self.out / f"{step.name}.log", limit, environment)
        result = "too slow" if code is None else "failed" if code else "ok"
        why = (
            f"stopped after {limit:.0f} s" if code is None else f"exit code {code}, see {step.name}.log" if code else ""
        )
        self.keep_runs()
        self.note(step.name, step.shows, result, time.monotonic() - start, why)

    def keep_runs(self) -> None:
        """Takes what is small of a run's folder: its summary, metrics, timeline and profile."""
        for folder in self.scratch.glob("output/*"):
            for path in (*folder.glob("*.json*"), *folder.glob("profile/*")):
                if path.is_file() and path.stat().st_size < LARGEST_FILE:
                    (self.out / folder.name).mkdir(exist_ok=True)
                    shutil.move(path, self.out / folder.name / path.name)

    def write(self) -> None:
        figures: dict[str, Any] = {}
        for path in sorted(self.out.glob("figures-*.json")):
            figures |= read(path) or {}
        logs = [path.read_text(errors="replace") for path in self.out.glob("*.log")]
        failed = sorted(
            {name for log in logs for name in re.findall(r"^(?:FAILED|ERROR) (tests/\S+)", log, re.MULTILINE)}
        )
        summaries = {path.parent.name: read(path) or {} for path in sorted(self.out.glob("*/summary.json"))}
        kept = (
            "status",
            "steps",
            "wall_s",
            "first_rollout_s",
            "eval",
            "tokens_per_s",
            "seconds",
            "peak_memory_mb",
            "error",
        )
        check = self.facts | {
            "steps": self.steps,
            "failed_tests": failed,
            "runs": {name: {key: found[key] for key in kept if key in found} for name, found in summaries.items()},
            "figures": figures,
        }
        (self.out / "check.json").write_text(json.dumps(check, indent=2) + "\n")
        (self.out / "check.md").write_text("\n".join(page(check)) + "\n")


def read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # not there, or a step was ended while it wrote
        return None


def filled(command: Sequence[str], words: Mapping[str, str | Sequence[str]]) -> list[str]:
    """The command with what is known of this run in place of names in braces; a list replaces a whole part."""
    found: list[str] = []
    for part in command:
        whole = words.get(part[1:-1]) if part.startswith("{") else None
        if whole is not None and not isinstance(whole, str):
            found += whole
            continue
        for name, text in words.items():
            part = part.replace("{" + name + "}", str(text))
        found.append(part)
    return found


def page(check: Mapping[str, Any]) -> Iterable[str]:
    """The report as Markdown."""
    machine = check.get("machine", {})
    yield "# What the GPU check found\n"
    yield ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None) + "\n"
    yield from (f"- missing: {line}" for line in check.get("missing", ()))
    yield "\n" + "\n".join(table(("Step", "Shows", "Result", "Seconds"), step_rows(check["steps"])))
    if check["failed_tests"]:
        yield "\n" + "\n".join(f"- failed: `{name}`" for name in check["failed_tests"])
    by_part: dict[str, dict[str, Any]] = {}
    for name, found in check["figures"].items():
        part, _, row = name.partition("/")
        by_part.setdefault(part, {})[row] = found
    for part, rows in by_part.items():
        keys = list(dict.fromkeys(key for found in rows.values() for key in found))
        cells = [(row, *(shown(found.get(key, "")) for key in keys)) for row, found in rows.items()]
        yield "\n" + "\n".join(table((part, *keys), cells))
    for name, found in check["runs"].items():
        yield f"\n{name}: `{json.dumps(found)}`"


def step_rows(steps: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (name, step["shows"], " ".join(filter(None, (step["result"], step.get("why")))), f"{step['seconds']:.0f}")
        for name, step in steps.items()
    ]


def shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value).replace("|", "/").replace("\n", " ")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def checked(check: Check, arguments: argparse.Namespace) -> int:
    """Installs, looks, and takes the steps."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    paths = [str(ROOT)]
    if arguments.kit:
        start = time.monotonic()
        try:
            for kit in arguments.kit:
                install(kit.resolve(), arguments.environment)
        except (OSError, ValueError, tarfile.TarError) as error:
            check.note("install", "the kit's packages", "failed", time.monotonic() - start, str(error))
            return 1
        check.note("install", "the kit's packages", "ok", time.monotonic() - start)
        paths.insert(0, str(arguments.environment / "site"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))
    facts = check.scratch / "facts.json"
    command, start = [sys.executable, __file__, "--look", str(facts)], time.monotonic()
    code = run(command, check.out / "versions.log", 120, environment)
    check.facts = read(facts) or {"machine": {}, "packages": {}, "missing": []}
    if code != 0:
        check.note("versions", "torch and Transformers", "failed", time.monotonic() - start, "see versions.log")
        return 1
    check.note("versions", "torch and Transformers", "ok", time.monotonic() - start)
    for line in check.facts["missing"]:
        print(f"  missing: {line}")
    if not arguments.rehearse and check.facts["machine"]["gpu"] is None:
        check.note("gpu", "a GPU that torch sees", "failed", why="there is none: --rehearse runs the small forms")
        return 1
    workers = ["-n", "6", "--dist", "loadgroup"] if "xdist" in check.facts["packages"] else []
    words = {"python": sys.executable, "out": str(check.out), "scratch": str(check.scratch), "workers": workers}
    for step in STEPS:
        if not arguments.only or step.name in arguments.only.split(","):
            check.take(step, words, arguments.rehearse, environment)
    return int(check.failed)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the results")
    parser.add_argument(
        "--kit", type=Path, action="append", help="folder with the pieces of a kit; can be given several times"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="of all steps together (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="the small forms, on a CPU")
    parser.add_argument("--only", help=f"some of {','.join(step.name for step in STEPS)}")
    parser.add_argument("--environment", type=Path, default=Path("/tmp/roll-gpu-check"), help="default: %(default)s")
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.look:
        arguments.out.write_text(json.dumps(look()))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        return checked(Check(arguments.out.resolve(), Path(scratch), arguments.minutes), arguments)


if __name__ == "__main__":
    sys.exit(main())
