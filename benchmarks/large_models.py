"""Memory of ranks that load, export and checkpoint a large model on a CPU, and the time of loading.

Four ranks share a random model in bf16. They load and export it frozen; a smaller one they train, save and load again.
What counts is a rank's anonymous memory (of ``/proc/self/statm``, resident without shared pages, which are those of
mapped files and belong to the system's cache), less what it had with a tiny model. It may have its part, the largest
tensor in the format in which it travels, and 0.5 GiB. Loading is compared with a plain read of the files: each rank
reads its share of their bytes into memory, right after they were written.

    python benchmarks/large_models.py [--parameters 3e9] [--trained 0.5e9] [--ranks 4] [--only fsdp2,deepspeed,megatron]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import mmap
import multiprocessing
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 2**20
SLACK = 512 * MIB
ENGINES: dict[str, Callable[[int], dict[str, Any]]] = {
    "fsdp2": lambda ranks: {},
    "deepspeed": lambda ranks: {"zero_optimization": {"stage": 3}},
    "megatron": lambda ranks: {"tensor_model_parallel_size": ranks},
}


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


class Peak(threading.Thread):
    """The most anonymous memory of this process while it is entered, looked at every millisecond."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._done = threading.Event()
        self.bytes = 0

    def run(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, anonymous_bytes())

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self.join()
        self.bytes = max(self.bytes, anonymous_bytes())


def write_model(folder: Path, parameters: float) -> None:
    """Writes a random Qwen2 with about so many parameters in bf16, one layer a file."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    layers = 8 if parameters < 1e9 else 32
    hidden = max(64, round(math.sqrt(parameters / layers / 12) / 64) * 64)  # 3 h² of attention, 9 h² behind it
    config = Qwen2Config(
        vocab_size=8000, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, dtype="bfloat16",
    )  # fmt: skip
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        forms = {name: tensor.shape for name, tensor in Qwen2ForCausalLM(config).state_dict().items()}
    groups: dict[str, list[str]] = {}
    for name in forms:
        groups.setdefault(name.split(".")[2] if ".layers." in name else "rest", []).append(name)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups.values(), start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {name: torch.empty(forms[name], dtype=torch.bfloat16).normal_(0, 0.02) for name in names}
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def make_strategy(engine: str, role: str, folder: Path, rank: int, ranks: int) -> Any:
    from roll.configs.worker import WorkerConfig
    from roll.distributed.strategy import STRATEGIES
    from roll.distributed.strategy.base import StrategyContext

    options = {"strategy_name": f"{engine}_{role}", "strategy_config": ENGINES[engine](ranks)}
    worker = WorkerConfig.model_validate(
        {"model_args": {"dtype": "bf16"}, "strategy_args": options, "world_size": ranks}
    )
    name = "actor_train" if role == "train" else "reference"
    return STRATEGIES.get(f"{engine}_{role}")(
        StrategyContext(worker, name, str(folder), rank=rank, world_size=ranks, sequence_length=64)
    )


def frozen_pieces(engine: str, strategy: Any) -> Any:
    """The weights of a model without an optimizer, as a saved model has them."""
    import torch

    if engine != "megatron":
        from roll.distributed.strategy.training.module_weights import hf_pieces

        return hf_pieces(strategy.weights, torch.bfloat16)
    from types import SimpleNamespace

    from roll.distributed.strategy.megatron.weights import WeightGatherer

    no_optimizer: Any = SimpleNamespace(place=lambda parameter: (0, parameter.numel()))
    return WeightGatherer(strategy.model, no_optimizer).pieces("trunk", torch.bfloat16)


def steps_of(engine: str, folder: Path, rank: int, ranks: int, *, trains: bool) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    from roll.distributed.strategy.training.checkpoint import MODEL, Contents, write_contents

    strategy = make_strategy(engine, "train" if trains else "infer", folder / "model", rank, ranks)
    target = folder / f"{engine}-saved"
    if trains:
        return {
            "start": strategy.setup,
            "save": lambda: strategy.save(target),
            "resume": lambda: strategy.load(target),
        }

    def export() -> None:
        write_contents([Contents(target, {MODEL: frozen_pieces(engine, strategy)}, lambda: None)]).result()

    share = [(file, rank * file.stat().st_size // ranks) for file in (folder / "model").glob("*.safetensors")]

    def read() -> None:
        """The rank's share of the files."""
        kept = []
        for file, start in share:
            with file.open("rb", buffering=0) as opened:
                opened.seek(start)
                kept.append(bytearray(file.stat().st_size // ranks))
                opened.readinto(kept[-1])

    return {"read": read, "load": strategy.setup, "export": export}


def rank_main(rank: int, ranks: int, port: int, engine: str, folder: Path, trains: bool, told: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    import torch

    torch.set_num_threads(1)
    warm = make_strategy(engine, "train" if trains else "infer", folder / "tiny", rank, ranks)
    warm.setup()  # imports and first calls cost memory and time of their own
    before, found = anonymous_bytes(), []
    for name, step in steps_of(engine, folder, rank, ranks, trains=trains).items():
        torch.distributed.barrier()
        with Peak() as peak:
            started, busy = time.perf_counter(), time.process_time()
            step()
            busy = time.process_time() - busy
            torch.distributed.barrier()
            seconds = time.perf_counter() - started
        held, most = anonymous_bytes() - before, peak.bytes - before
        found.append({"phase": name, "held": held, "peak": most, "seconds": seconds, "cpu": busy})
    told.put(found)
    told.close()
    told.join_thread()
    torch.distributed.barrier()
    os._exit(0)


def measure(engine: str, folder: Path, ranks: int, *, trains: bool) -> list[dict[str, Any]]:
    """For each phase the figures of the rank that had most."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "transformers.models.auto.modeling_auto"])
    context = multiprocessing.get_context("forkserver")  # a GPU is not used
    told = context.Queue()
    processes = [
        context.Process(target=rank_main, args=(rank, ranks, port, engine, folder, trains, told))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    answers: list[Any] = []
    while len(answers) < ranks:
        with contextlib.suppress(queue.Empty):
            answers.append(told.get(timeout=1))
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
            raise RuntimeError(f"{engine}: a rank has died")
    for process in processes:
        process.join()
    shutil.rmtree(folder / f"{engine}-saved", ignore_errors=True)
    return [max(same, key=lambda one: one["peak"]) for same in zip(*answers, strict=True)]


def sizes(folder: Path) -> tuple[int, int]:
    """Bytes of a model's files, and of their largest tensor."""
    from roll.models.weight_files import WeightFiles

    files = WeightFiles(str(folder))
    tensors = [2 * math.prod(files.form(name)[0]) for name in files.names]
    return sum(tensors), max(tensors)


def report(engine: str, folder: Path, ranks: int, *, trains: bool) -> list[dict[str, Any]]:
    """Measures and prints; a row for each phase."""
    total, largest = sizes(folder / "model")
    rows = measure(engine, folder, ranks, trains=trains)
    plain = rows[0]
    for row in rows[0 if trains else 1 :]:
        # What training holds is the engine's affair; a checkpoint's tensors are float32.
        part = row["held"] if trains else total // ranks
        tensor = 2 * largest if trains else largest
        row |= {"engine": engine, "part": part, "tensor": tensor, "over": row["peak"] - part - tensor}
        said = {key: f"{row[key] / MIB:,.0f}" for key in ("part", "tensor", "held", "peak", "over")}
        ratio = "{:.2f} of a plain read's, CPU {:.2f}".format(*(row[key] / plain[key] for key in ("seconds", "cpu")))
        beside = f" ({ratio})" if row["phase"] == "load" else ""
        verdict = "" if row["over"] <= SLACK else f"  MORE THAN {SLACK // MIB} MiB"
        words = "part {part}, tensor {tensor}, held {held}, peak {peak}, over {over} MiB".format(**said)
        print(f"{engine:9} {row['phase']:6} {words}, {row['seconds']:.1f} s{beside}{verdict}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=2e8, help="of the frozen model; 0: none")
    parser.add_argument("--trained", type=float, default=5e7, help="of the trained model; 0: none")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", default=",".join(ENGINES))
    args = parser.parse_args()
    missed = False
    for parameters, trains in ((args.parameters, False), (args.trained, True)):
        if not parameters:
            continue
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            write_model(Path(folder) / "tiny", 2e6)
            write_model(Path(folder) / "model", parameters)
            for engine in args.only.split(","):
                rows = report(engine, Path(folder), args.ranks, trains=trains)
                missed |= any(row.get("over", 0) > SLACK for row in rows)
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
