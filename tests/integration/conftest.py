"""Runs of the real pipeline as a user starts them: a process with a command line, a folder, an exit code.

Runs join one Ray cluster that lives as long as the tests, which saves its start; ``local=True`` lets a run start and
end its own. Their processes are forks of one that has imported what they need (``tests/support/warm``), but for the
driver of a local run. Every process of a run carries its ``ROLL_FAULTS`` variable, so one that stays behind is found.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from roll.report.parting import MEASURED
from tests.support.lines import read_lines, write_lines
from tests.support.processes import happens
from tests.support.sizes import tiny_folder
from tests.support.warm.start import warm_environment

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "examples" / "start_agentic_pipeline.py"
RLVR_LAUNCHER = ROOT / "examples" / "start_rlvr_pipeline.py"
CONFIGS = Path(__file__).parent / "config"
FAULTS = "ROLL_FAULTS"
START_S = 400.0
"""How long a run may take to get somewhere, on a machine that others use too."""

CLUSTER = """
import json, sys
import ray
from roll.distributed.cluster.ray_session import ray_session
with ray_session({"address": "local", "num_cpus": 8, "object_store_memory": 2**28}) as session:
    print(session.address, flush=True)
    for _ in sys.stdin:
        groups = ray.util.placement_group_table().values()
        print(json.dumps([group["state"] for group in groups if group["state"] != "REMOVED"]), flush=True)
"""

AUTHENTICATED = {"RAY_AUTH_MODE": "token"}
"""Ray protects a local cluster with a token; whoever joins it by address has to say so too."""

VOLATILE = re.compile(r"time/|tokens_per_s/|tokens_per_s_per_device/|tflops_per_device/|mfu/|mismatch/|probe/|memory/")
"""Metrics that time, other load or the composition of batches may change."""


@dataclass
class Run:
    """One launch of the pipeline."""

    path: Path
    """The run's folder."""
    faults: Path
    """Where the processes of the run take their orders from, see ``tests/support/faults.py``."""
    process: subprocess.Popen[str]
    output: str = field(default="", init=False)

    def wait(self) -> int:
        """The exit code; the output is then in ``output``."""
        self.output, _ = self.process.communicate(timeout=START_S)
        return self.process.returncode

    def ended(self, code: int = 0) -> "Run":
        """Waits for its end, which is with this exit code."""
        assert self.wait() == code, self.output
        return self

    @property
    def said(self) -> str:
        """The output without its line breaks."""
        return " ".join(self.output.split())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.assert_nothing_left()

    def until(self, condition: Callable[[], Any], what: str = "it") -> None:
        """Waits in a run that goes on."""
        deadline = time.monotonic() + START_S
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.process.communicate()[0]}"
            assert time.monotonic() < deadline, f"nothing came to {what}"
            time.sleep(0.05)

    def pid_at(self, gate: str) -> int:
        """Waits until a process has come to the gate, and returns its id."""
        file = self.faults / f"at-{gate}"
        self.until(lambda: file.exists() and file.read_text(), gate)
        return int(file.read_text())

    def order(self, name: str) -> None:
        (self.faults / name).touch()

    def release(self, name: str) -> None:
        (self.faults / name).unlink()

    def logged(self, file: str) -> list[dict[str, Any]]:
        """What the workers of ``tests/support/faults.py`` have logged in a file."""
        path = self.faults / file
        return read_lines(path) if path.exists() else []

    def processes(self) -> list[int]:
        """Ids of the processes that belong to the run, its driver and Ray's own included."""
        mark = f"{FAULTS}={self.faults}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in entry.read_bytes().split(b"\0"):
                    found.append(int(entry.parent.name))
            except OSError:  # ended in between
                continue
        return found

    def assert_nothing_left(self, seconds: float = 60.0) -> None:
        ended = happens(lambda: not self.processes(), seconds)
        assert ended, [Path(f"/proc/{pid}/cmdline").read_text()[:200] for pid in self.processes()]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.path / "summary.json").read_text())

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """``metrics.jsonl`` by step, each step once."""
        records = read_lines(self.path / "metrics.jsonl")
        steps = [record["step"] for record in records]
        assert steps == sorted(set(steps)), f"steps reported twice or out of order: {steps}"
        return {record.pop("step"): record for record in records}

    def repeatable_metrics(self) -> dict[int, dict[str, float]]:
        return {
            step: {name: value for name, value in record.items() if not VOLATILE.match(name)}
            for step, record in self.metrics.items()
        }

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"checkpoint-{step}"

    def tensors(self, step: int) -> dict[str, Tensor]:
        """Everything trained in a checkpoint: weights and optimizer states of all roles."""
        from safetensors.torch import load_file

        folder = self.checkpoint(step)
        files = [file for file in sorted(folder.rglob("*.safetensors")) if file.name != "rng.safetensors"]
        assert files
        return {
            f"{file.relative_to(folder)}:{name}": value for file in files for name, value in load_file(file).items()
        }


def assert_same_tensors(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = {
        name: float((left[name] - right[name]).abs().max()) for name in left if not left[name].equal(right[name])
    }
    assert not different


def done(*command: object, code: int = 0, env: Mapping[str, str] | None = None, **options: Any) -> tuple[str, str]:
    """What a command writes to its output and to the terminal that ends with this code, with ``env`` set besides."""
    options = {"timeout": 300, "env": {**os.environ, **(env or {})}, **options}
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert ended.returncode == code, f"{ended.stdout[-20_000:]}\n{ended.stderr[-20_000:]}"
    return ended.stdout, ended.stderr


class Script:
    """A program that answers each line of its input with one of its output, the first without being asked."""

    def __init__(self, text: str, **environment: str) -> None:
        every = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=every | warm_environment() | environment,
        )
        self.first = self.answer()

    def answer(self, line: str | None = None) -> str:
        assert self.process.stdin and self.process.stdout
        if line is not None:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate(timeout=180)


@dataclass
class RayCluster:
    """A Ray cluster of its own, that runs join."""

    script: Script

    @property
    def address(self) -> str:
        return self.script.first

    def placement_groups(self) -> list[str]:
        """States of those that runs have left behind; also shows that the cluster is alive."""
        return json.loads(self.script.answer(""))

    def roll(self, folder: Path, *words: str) -> str:
        """What a command of ``roll`` prints that joins it, started in a folder."""
        environment = {**AUTHENTICATED, "RAY_ADDRESS": self.address, "PYTHONPATH": str(ROOT)}
        return done(sys.executable, "-m", "roll", *words, env=environment, cwd=folder, timeout=None)[0]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    script = Script(CLUSTER, **AUTHENTICATED)
    yield RayCluster(script)
    script.end()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained tiny model in Hugging Face format."""
    return tiny_folder(tmp_path_factory, seed=1)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another untrained model."""
    return tiny_folder(tmp_path_factory, seed=2, num_heads=2)


Launch = Callable[..., Run]


@pytest.fixture
def launch(tmp_path: Path, model: Path, request: pytest.FixtureRequest) -> Iterator[Launch]:
    """``launch(*overrides, local=False, address="", …)`` starts a run, in another cluster if an address is given.

    What is still there at the end of the test is killed.
    """
    runs: list[Run] = []

    def start(
        *overrides: str,
        config: str = "small",
        local: bool = False,
        output: str = "out",
        orders: tuple[str, ...] = (),
        address: str = "",
        script: Path = LAUNCHER,
        folder: Path = CONFIGS,
    ) -> Run:
        faults = tmp_path / f"faults-{len(runs)}"
        faults.mkdir()
        environment = {**os.environ, **warm_environment(scripts=not local), FAULTS: str(faults)}
        environment.pop("RAY_ADDRESS", None)
        if address:
            environment["RAY_ADDRESS"] = address
        elif not local:
            environment |= {"RAY_ADDRESS": request.getfixturevalue("ray_cluster").address, **AUTHENTICATED}
        for name in orders:
            (faults / name).touch()
        # The last of two values for a key wins, so a test may replace any of these.
        arguments = {
            "pretrain": str(model),
            "output_dir": str(tmp_path / output),
            "system_envs": f"{{{FAULTS}: '{faults}', OMP_NUM_THREADS: '1'}}",
        }
        taken_back = [override for override in overrides if override.startswith("~")]
        arguments |= dict(override.split("=", 1) for override in overrides if override not in taken_back)
        arguments.setdefault("exp_name", "run")
        process = subprocess.Popen(
            [sys.executable, str(script), "--config_path", str(folder), "--config_name", config]
            + [f"{key}={value}" for key, value in arguments.items()]
            + taken_back,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=tmp_path,
            start_new_session=True,
        )
        runs.append(Run(tmp_path / output / "run", faults, process))
        return runs[-1]

    yield start
    for run in runs:
        for pid in run.processes():
            os.kill(pid, signal.SIGKILL)
        run.process.wait()


Rlvr = Callable[..., Run]
Offline = Callable[..., Callable[..., Run]]


def rows(name: str, orders: Sequence[str], tag: str = "letters") -> list[dict[str, str]]:
    """Questions named ``<name>0``, ``<name>1`` …, with orders for the verifier (``tests/support/scoring.py``)."""
    return [
        {"id": f"{name}{n}", "tag": tag, "prompt": f"{name} {n}", "solution": order} for n, order in enumerate(orders)
    ]


@pytest.fixture
def offline(launch: Launch, tmp_path: Path) -> Offline:
    """Makes ``launch`` of ``config/<name>.yaml``, with 10 rows to learn from and 4 held out."""

    def made(name: str, row: Callable[[int], str], *always: str) -> Callable[..., Run]:
        for file, numbers in (("train", range(10)), ("val", range(10, 14))):
            (tmp_path / f"{file}.jsonl").write_text("".join(map(row, numbers)))
        script = ROOT / "examples" / f"start_{name}_pipeline.py"

        def start(*overrides: str, **options: Any) -> Run:
            return launch(*always, *overrides, config=name, script=script, **options)

        return start

    return made


@pytest.fixture
def rlvr(launch: Launch, tmp_path: Path) -> Rlvr:
    """``launch`` of ``config/rlvr.yaml``, with 20 rows to train on and 4 held out unless a test writes its own.

    ``train``: the orders of other rows to train on, from this run on.
    """
    write_lines(tmp_path / "train.jsonl", rows("t", [""] * 20))
    write_lines(tmp_path / "val.jsonl", rows("v", [""] * 4))

    def start(*overrides: str, train: Sequence[str] = (), **options: Any) -> Run:
        if train and rows("t", train) != read_lines(tmp_path / "train.jsonl"):  # another run may be reading it
            write_lines(tmp_path / "train.jsonl", rows("t", train))
        return launch(*overrides, **{"config": "rlvr", "script": RLVR_LAUNCHER, **options})

    return start


def counting(tag: str, more: str = "", **config: object) -> str:
    """The key of an environment ``CountingEnv`` of ``tests/support/faults.py``, with other keys of its own."""
    given = ", ".join(f"{key}: {value}" for key, value in config.items())
    fixed = "env_type: 'tests.support.faults:CountingEnv', max_steps: 3, agent_system_template: ''"
    return f"custom_envs.{tag}={{{fixed}, env_config: {{{given}}}{more}}}"


def position(run: Run, step: int) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((run.checkpoint(step) / "pipeline_state.json").read_text())["rollouts"]
    return data


Replay = Callable[..., tuple[str, dict[str, float]]]


@pytest.fixture
def replay(ray_cluster: RayCluster, tmp_path: Path) -> Replay:
    """``roll replay`` of a step of a run, maybe with changes: what it prints, and the step's metrics but for figures
    of speed; without changes they are those of the run, to the bit."""

    def start(run: Run, step: int, *words: str) -> tuple[str, dict[str, float]]:
        said = ray_cluster.roll(tmp_path, "replay", str(run.path), "--step", str(step), *words)
        again = Run(run.path.with_name(f"run_replay_{step}"), run.faults, run.process).metrics[step]
        again = {name: value for name, value in again.items() if not name.startswith(MEASURED)}
        if not words:
            assert again == {name: run.metrics[step][name] for name in again}
            assert f"all {len(again)} are equal to the bit" in said
        return said, again

    return start
