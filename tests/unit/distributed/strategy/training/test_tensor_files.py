"""Safetensors files that several ranks write: readable by the library, hashed as written, whole or an error."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from roll.distributed.strategy.training import tensor_files
from roll.distributed.strategy.training.checkpoint import BackgroundSaves, Contents, Snapshots
from roll.distributed.strategy.training.exchange import ShardLayout, Slice, WeightShard, everywhere, weight_shard
from roll.distributed.strategy.training.tensor_files import (
    BackgroundWriter,
    StoredTensors,
    cut_at_ranks,
    plan_files,
    write_index,
)
from roll.distributed.strategy.training.trainer import export, plan_buckets
from roll.distributed.weights.buckets import pack_buckets, unpack_bucket
from roll.utils.hashing import WrittenFile, checksum_of


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (5, 3), "vector": (7,), "number": (), "nothing": (0, 4), "last": (2, 2, 2)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    kinds = torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool
    return tensors | {str(dtype): torch.arange(6).to(dtype) for dtype in kinds}


def spread(tensor: Tensor, regions: Sequence[Slice] | None = None) -> ShardLayout:
    """What is on all ranks, or in regions of which a rank, here all at once, has one."""
    regions = regions or everywhere(tensor.shape)
    return ShardLayout(tuple(tensor.shape), tensor.dtype, tensor.device, regions, lambda: tensor)


def pieces_of(tensors: dict[str, Tensor], ranks: int) -> list[WeightShard]:
    """Tensors that all ranks have."""
    everyone = tuple(range(ranks))
    return [
        weight_shard(name, spread(tensor, [Slice((0,) * tensor.ndim, tuple(tensor.shape), everyone)]))
        for name, tensor in tensors.items()
    ]


def write(folder: Path, tensors: dict[str, Tensor], ranks: int, single: bool = False) -> list[WrittenFile]:
    """What all ranks write."""
    files = plan_files("model", pieces_of(tensors, ranks), ranks, single=single)
    written = []
    for rank in range(ranks):
        writer = BackgroundWriter(max_waiting=64)
        for file in (file for file in files if file.rank == rank):
            writer.begin(folder / file.name, file.header())
            for name in file.outline:
                writer.add(folder / file.name, tensors[name])
        written += writer.close().result(30)
    write_index(folder, "model", files)
    return written


@pytest.mark.parametrize(
    ("ranks", "limits", "single", "names"),
    [
        (1, {}, False, ["model.safetensors"]),
        (4, {}, False, ["model.safetensors"]),  # too little to share
        (2, {"MIN_SHARE_BYTES": 1}, False, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
        (1, {"MAX_FILE_BYTES": 60}, False, None),
        (3, {"MAX_FILE_BYTES": 40, "MIN_SHARE_BYTES": 1}, False, None),
        (3, {"MAX_FILE_BYTES": 40, "MIN_SHARE_BYTES": 1}, True, ["model.safetensors"]),
    ],
)
def test_the_library_reads_what_any_number_of_ranks_has_written(tmp_path, monkeypatch, ranks, limits, single, names):
    for limit, value in limits.items():
        monkeypatch.setattr(tensor_files, limit, value)
    tensors = some_tensors()
    written = write(tmp_path, tensors, ranks, single)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert names is None or [file.name for file in files] == names
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name
        assert StoredTensors(tmp_path).get(name).equal(tensor)
    assert sorted(file.path for file in written) == [str(file) for file in files]
    for file in written:
        assert (file.size, file.checksum) == (Path(file.path).stat().st_size, checksum_of(Path(file.path)))
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == tensors.keys()
        assert all(name in load_file(tmp_path / file) for name, file in index["weight_map"].items())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_ranks_get_nearly_equal_shares(monkeypatch):
    monkeypatch.setattr(tensor_files, "MIN_SHARE_BYTES", 1)
    tensors = {str(number): torch.zeros(100 + 7 * (number % 5)) for number in range(40)}
    files = plan_files("model", pieces_of(tensors, 4), 4)
    shares = [file.num_bytes for file in files]
    assert [file.rank for file in files] == [0, 1, 2, 3]
    assert sum(shares) == sum(tensor.nbytes for tensor in tensors.values())
    assert max(shares) < 1.1 * min(shares)


ROWS = (Slice((0, 0), (4, 3), (0, 2)), Slice((4, 0), (1, 3), (1, 3)))
COLUMNS = (Slice((0, 0), (5, 2), (0, 1)), Slice((0, 2), (5, 1), (2, 3)))


def test_rows_are_written_by_a_rank_that_has_them(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "MIN_SHARE_BYTES", 1)
    tensor = torch.randn(5, 3)
    pieces = cut_at_ranks([weight_shard("w", spread(tensor, ROWS))], 4)
    files = plan_files("state", pieces, 4)
    assert [file.rank for file in files] == [0, 1]
    for file, rows in zip(files, (tensor[:4], tensor[4:]), strict=True):
        writer = BackgroundWriter()
        writer.begin(tmp_path / file.name, file.header())
        writer.add(tmp_path / file.name, rows)
        writer.close().result()
    stored = StoredTensors(tmp_path)
    assert stored.get("w").equal(tensor) and stored.kinds == {"w"}
    (tmp_path / files[1].name).unlink()
    with pytest.raises(ValueError, match=r"w: 12 elements in .*, expected 15"):
        StoredTensors(tmp_path).get("w")


def test_what_is_no_block_of_rows_or_too_little_is_gathered():
    columns, rows = (weight_shard("w", spread(torch.randn(5, 3), regions)) for regions in (COLUMNS, ROWS))
    assert cut_at_ranks([rows], 4) == [rows]
    (whole,) = pieces_of({"w": torch.zeros(2**27, 1, device="meta")}, 4)
    assert cut_at_ranks([whole, columns], 4) == [whole, columns]


def test_what_cannot_be_written_is_an_error_and_blocks_nobody(tmp_path):
    (tmp_path / "occupied").write_text("a file, not a folder")
    with pytest.raises(OSError, match="occupied"):
        write(tmp_path / "occupied", {str(number): torch.zeros(1000) for number in range(8)}, 1)


def contents(path: Path, tensors: dict[str, Tensor], go: threading.Event | None = None) -> Contents:
    """Nothing is written before ``go``."""

    def write_rest() -> None:
        assert go is None or go.wait(30)

    return Contents(path, {"state": [plain(name, tensor) for name, tensor in tensors.items()]}, write_rest)


def test_a_change_after_the_start_is_not_in_the_files(tmp_path):
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


def test_a_save_waits_for_the_copies_of_the_one_before(tmp_path):
    tensors, go, saves = {"a": torch.ones(1000)}, threading.Event(), BackgroundSaves()
    first = saves.start([contents(tmp_path / "first", tensors, go)])
    tensors["a"].zero_()
    threading.Timer(0.2, go.set).start()
    saves.start([contents(tmp_path / "second", tensors)]).result(30)
    assert first.done()
    assert StoredTensors(tmp_path / "first").get("a").eq(1).all()
    assert StoredTensors(tmp_path / "second").get("a").eq(0).all()


def test_a_failure_is_the_results_and_the_next_save_goes_on(tmp_path):
    (tmp_path / "occupied").write_text("a file, not a folder")
    saves = BackgroundSaves()
    with pytest.raises(OSError, match="occupied"):
        saves.start([contents(tmp_path / "occupied", {"a": torch.ones(3)})]).result(30)
    saves.start([contents(tmp_path / "free", {"a": torch.ones(3)})]).result(30)
    assert StoredTensors(tmp_path / "free").get("a").equal(torch.ones(3))


def test_memory_of_snapshots_is_kept_and_shared():
    snapshots, tensor = Snapshots(), torch.arange(6.0)
    first, same, turned = snapshots.take([tensor, tensor.detach(), tensor.view(2, 3).T])
    assert first.data_ptr() == same.data_ptr() != turned.data_ptr() and first.data_ptr() != tensor.data_ptr()
    assert first.equal(tensor) and turned.equal(tensor.view(2, 3).T)
    (again,) = snapshots.take([tensor + 1])
    assert again.data_ptr() == first.data_ptr() and again.equal(tensor + 1)
    assert snapshots.take([torch.ones(7)])[0].equal(torch.ones(7))


def plain(name: str, tensor: Tensor) -> WeightShard:
    return weight_shard(name, spread(tensor))


def split(name: str, tensor: Tensor) -> WeightShard:
    """A fused parameter: a tensor of a checkpoint for each row."""
    return WeightShard([spread(tensor)], lambda whole: {f"{name}.{i}": row for i, row in enumerate(whole[0])})


@pytest.mark.parametrize("check", [True, False])
def test_an_export_is_what_packing_the_tensors_gives(check):
    torch.manual_seed(0)
    a, b, fused = torch.randn(7, 3), torch.randn(50).to(torch.bfloat16), torch.randn(40, 16)
    named = {"a": a, **{f"f.{i}": row for i, row in enumerate(fused)}, "b": b}
    planned = plan_buckets([plain("a", a), split("f", fused), plain("b", b)], 512)
    expected = list(pack_buckets(named.items(), 512))
    assert [bucket.outline for bucket in planned] == [bucket.outline for bucket in expected]
    for _ in range(2):
        buckets = list(export(planned, [0], check=check))
        assert [bucket.checksum for bucket in buckets] == [one.checksum if check else None for one in expected]
        found = {name: tensor for bucket in buckets for name, tensor in unpack_bucket(bucket)}
        assert found.keys() == named.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in named.items())
        for tensor in (a, b, fused):
            tensor.add_(1)
        expected = list(pack_buckets(named.items(), 512))


def test_a_fused_parameter_is_gathered_for_the_bucket_in_which_it_begins():
    planned = plan_buckets([plain("a", torch.ones(16)), split("f", torch.ones(5, 16))], 128)
    assert [bucket.outline.names for bucket in planned] == [("a", "f.0"), ("f.1", "f.2"), ("f.3", "f.4")]
    assert [len(bucket.pieces) for bucket in planned] == [2, 0, 0]
    with pytest.raises(ValueError, match="bucket_bytes: 0"):
        plan_buckets([], 0)


def test_a_rank_that_serves_nobody_reads_nothing_that_nobody_needs():
    def own() -> Tensor:
        raise AssertionError("read")

    everyones = ShardLayout((3,), torch.float32, torch.device("cpu"), [Slice((0,), (3,), (0, 1))], own)
    assert list(export(plan_buckets([weight_shard("a", everyones)], 64), [1], check=True)) == []
