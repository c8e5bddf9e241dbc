"""What is saved in the background is what was there at the start."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from roll.distributed.strategy.training.checkpoint import BackgroundSaves, Contents, Snapshots
from roll.distributed.strategy.training.pieces import ShardLayout, everywhere, weight_shard
from roll.distributed.strategy.training.tensor_files import StoredTensors


def contents(path: Path, tensors: dict[str, Tensor], go: threading.Event | None = None) -> Contents:
    """Nothing is written before ``go``."""

    def write_rest() -> None:
        assert go is None or go.wait(30)

    def spread(tensor: Tensor) -> ShardLayout:
        return ShardLayout(tuple(tensor.shape), tensor.dtype, tensor.device, everywhere(tensor.shape), lambda: tensor)

    return Contents(
        path, {"state": [weight_shard(name, spread(tensor)) for name, tensor in tensors.items()]}, write_rest
    )


def test_a_change_after_the_start_is_not_in_the_files(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(1000), "b": torch.ones(10, 3)}
    saves = BackgroundSaves()
    for number in (1, 2):
        go = threading.Event()
        saving = saves.start([contents(tmp_path / str(number), tensors, go)])
        for tensor in tensors.values():
            tensor.add_(1)
        assert not saving.done() and not list(tmp_path.glob(f"{number}/*"))
        go.set()
        (written,) = saving.result(30)
        assert Path(written.path) == tmp_path / str(number) / "state.safetensors"
        stored = StoredTensors(tmp_path / str(number))
        assert all(stored.get(name).equal(torch.full_like(tensor, number)) for name, tensor in tensors.items())


def test_a_save_waits_for_the_copies_of_the_one_before(tmp_path: Path) -> None:
    tensors, go, saves = {"a": torch.ones(1000)}, threading.Event(), BackgroundSaves()
    first = saves.start([contents(tmp_path / "first", tensors, go)])
    tensors["a"].zero_()
    threading.Timer(0.2, go.set).start()
    saves.start([contents(tmp_path / "second", tensors)]).result(30)
    assert first.done()
    assert StoredTensors(tmp_path / "first").get("a").eq(1).all()
    assert StoredTensors(tmp_path / "second").get("a").eq(0).all()


def test_a_failure_is_the_results_and_the_next_save_goes_on(tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file, not a folder")
    saves = BackgroundSaves()
    with pytest.raises(OSError, match="occupied"):
        saves.start([contents(tmp_path / "occupied", {"a": torch.ones(3)})]).result(30)
    saves.start([contents(tmp_path / "free", {"a": torch.ones(3)})]).result(30)
    assert StoredTensors(tmp_path / "free").get("a").equal(torch.ones(3))


def test_memory_of_snapshots_is_kept_and_shared() -> None:
    snapshots, tensor = Snapshots(), torch.arange(6.0)
    first, same, turned = snapshots.take([tensor, tensor.detach(), tensor.view(2, 3).T])
    assert first.data_ptr() == same.data_ptr() != turned.data_ptr() and first.data_ptr() != tensor.data_ptr()
    assert first.equal(tensor) and turned.equal(tensor.view(2, 3).T)
    (again,) = snapshots.take([tensor + 1])
    assert again.data_ptr() == first.data_ptr() and again.equal(tensor + 1)
    assert snapshots.take([torch.ones(7)])[0].equal(torch.ones(7))
