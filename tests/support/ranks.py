"""Groups of processes as the tests of trainers start them, the files that they leave for the tests, and comparisons."""

import contextlib
import gc
import json
import multiprocessing
import os
import random
import socket
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.multiprocessing
from safetensors.torch import load_file, save_file
from torch import Tensor

from roll.distributed.strategy.base import Metrics
from roll.distributed.strategy.training import tensor_files
from roll.distributed.strategy.training.exchange import ShardLayout, gather, weight_shard, world_size
from roll.distributed.weights.buckets import WeightBucket, unpack_bucket

IMPORTED = [
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "tests.support.engines_preload",
    "tests.support.harness",
    __name__,
]
"""What every rank needs: imported once, in a process of which ranks are forked."""


def start_ranks(
    main: Callable[..., Any], world_size: int, *args: Any, on_gpus: bool = False, results: Path | None = None
) -> torch.multiprocessing.ProcessContext:
    """Starts ``main(rank, *args)`` in a group of processes and returns at once; ``results``: for what they return."""
    method = "spawn" if torch.cuda.is_available() else "forkserver"  # CUDA does not outlive a fork
    multiprocessing.set_forkserver_preload(IMPORTED)
    return torch.multiprocessing.start_processes(
        _rank, (unused_port(), on_gpus, results, main, args), nprocs=world_size, join=False, start_method=method
    )


def _rank(
    rank: int, port: int, on_gpus: bool, results: Path | None, main: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Runs on CPUs, wherever it is, unless told otherwise; ends, its results being on disk, when all ranks are there.

    Without the interpreter's own end, in which torch's threads sometimes abort the process ("terminate called without
    an active exception", once in some ten runs of torch 2.13 with gloo).
    """
    gc.freeze()  # engines look for garbage often: a second each time, where that is among all that is imported
    torch.set_num_threads(1)
    tensor_files.MIN_SHARE_BYTES = 1  # both ranks write a share of what they save, however small it is
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if not on_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    found = main(rank, *args)
    if results is not None:
        torch.save(found, results / f"{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)


def unused_port() -> int:
    """A port that no connection is given by chance meanwhile: below those that the system hands out."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def run_ranks(main: Callable[..., Any], world_size: int, *args: Any, on_gpus: bool = False) -> list[Any]:
    """The same, to the end of all processes; where this one is interrupted, it ends them. What each has returned."""
    with TemporaryDirectory() as name:
        processes = start_ranks(main, world_size, *args, on_gpus=on_gpus, results=(folder := Path(name)))
        try:
            while not processes.join():
                pass
        except BaseException:
            for process in processes.processes:
                process.kill()
            raise
        files = [folder / f"{rank}.pt" for rank in range(world_size)]
        return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def wanted(request: pytest.FixtureRequest, argument: str) -> list[Any]:
    """The values of an argument that the tests of this file are to run with: the ranks need not do the others' work."""
    here = [item for item in request.session.items if item.path == request.path]
    calls = [item.callspec.params for item in here if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    return list(dict.fromkeys(params[argument] for params in calls if argument in params))


@contextlib.contextmanager
def recorded_warnings(file: Path) -> Iterator[None]:
    """Leaves in ``file`` the warnings that a run would print, one in a line."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    preload = sys.modules.get("tests.support.engines_preload")
    told = [*caught, *(preload.WARNINGS if preload else ())]
    file.write_text("".join(f"{warning.filename}: {warning.message}\n" for warning in told))


def assert_same_files(found: Path, expected: Path) -> None:
    """Both folders hold the same files, to the last byte."""
    contents = [
        {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in (found, expected)
    ]
    assert contents[0].keys() == contents[1].keys() and contents[0]
    assert not [name for name, content in contents[0].items() if content != contents[1][name]]


def write(folder: Path, name: str, tensors: dict[str, Tensor], metrics: Metrics | None = None) -> None:
    """Leaves what ``tensors_of`` and ``metrics_of`` read."""
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(metrics or {}))


def tensors_of(folder: Path, name: str) -> dict[str, Tensor]:
    return load_file(folder / f"{name}.safetensors")


def metrics_of(folder: Path, name: str) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder / f"{name}.json").read_text())
    return found


def unpacked(buckets: Iterable[WeightBucket]) -> dict[str, Tensor]:
    """Copies of the tensors in weight buckets."""
    return {name: tensor.cpu().clone() for bucket in buckets for name, tensor in unpack_bucket(bucket)}


def whole(weights: Any, name: str, kind: str) -> Tensor:
    """A trained parameter's weights, or one of its moments, on all ranks (collective)."""
    return gathered(weights, name, weights.spread(name, kind, torch.float32))


def gathered(weights: Any, name: str, spread: ShardLayout) -> Tensor:
    """A tensor like a parameter on all ranks (collective)."""
    return gather([weight_shard(name, spread, weights.shape(name))], range(world_size()))[name].detach().clone()


def exported(trainer: Any) -> dict[str, Tensor]:
    return unpacked(trainer.export_weights(10_000))


def exported_adapter(trainer: Any) -> dict[str, Tensor]:
    return unpacked(trainer.export_adapter(10_000))


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    worst = max(((found[name].double() - expected[name].double()).abs().max().item(), name) for name in expected)
    assert worst[0] <= tolerance, worst
