"""Columns that are kept on disk: computed once, and only for what they were made for."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from roll.data.batch import Batch
from roll.pipeline.column_cache import cached_columns, check_writable, digest_of, read_cached, weight_files

BATCH = Batch(torch.tensor([2, 1]), torch.tensor([5, 6, 7]), torch.tensor([False, True, False]))


def test_two_runs_that_keep_the_same_at_the_same_time_do_not_disturb_each_other(tmp_path, monkeypatch):
    file, processes = tmp_path / "x.safetensors", iter([1, 2])
    monkeypatch.setattr("os.getpid", lambda: process)

    def keep() -> Mapping[str, torch.Tensor]:
        nonlocal process
        process = next(processes)
        return cached_columns(file, ["a"], "numbers", lambda: {"a": torch.full((2,), float(process))})

    def save_beside_another(*args: Any, **options: Any) -> None:
        save_file(*args, **options)
        if process == 1:
            assert keep()["a"].tolist() == [2.0, 2.0], "the other one ends in between"

    process = 0
    monkeypatch.setattr("safetensors.torch.save_file", save_beside_another)
    assert keep()["a"].tolist() == [1.0, 1.0]
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_file_that_cannot_be_written_is_told_with_its_name(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=r"a.safetensors: the log-probabilities cannot be kept .*No space left"):
        cached_columns(tmp_path / "a.safetensors", ["x"], "log-probabilities", lambda: {"x": torch.zeros(2)})
    assert not list(tmp_path.iterdir())


def test_they_are_computed_once(tmp_path):
    file, calls = tmp_path / "new" / "x.safetensors", []

    def compute() -> dict[str, torch.Tensor]:
        calls.append(1)
        return {"a": torch.tensor([1.5, 2.5])}

    found = [cached_columns(file, ["a"], "numbers", compute, {"by": "me"}) for _ in range(2)]
    assert torch.equal(found[0]["a"], found[1]["a"]) and len(calls) == 1
    assert [path.name for path in file.parent.iterdir()] == ["x.safetensors"]
    assert read_cached(tmp_path / "y.safetensors", ["a"], "numbers") is None
    with pytest.raises(ValueError, match="by: got 'me', expected 'you'"):
        cached_columns(file, ["a"], "numbers", compute, {"by": "you"})
    with pytest.raises(ValueError, match="no numbers"):
        read_cached(file, ["b"], "numbers")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="delete it"):
        read_cached(file, ["a"], "numbers")


def test_a_folder_that_cannot_be_written_is_told_with_its_key(tmp_path):
    check_writable(str(tmp_path / "new" / "folder"), "reference_dir")
    assert not list((tmp_path / "new" / "folder").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"reference_dir: got .*file, expected a folder that can be written"):
        check_writable(str(tmp_path / "file"), "reference_dir")


def test_their_names_say_what_they_depend_on(tmp_path):
    digests = {
        digest_of(BATCH),
        digest_of(BATCH, ["top 5"]),
        digest_of(BATCH.replace(tokens_T=BATCH.tokens_T + 1)),
        digest_of(BATCH.replace(loss_mask_T=~BATCH.loss_mask_T)),
        digest_of(BATCH.replace(lengths_B=torch.tensor([1, 2]))),
    }
    assert len(digests) == 5 and digest_of(BATCH.replace(scores_B=torch.zeros(2))) in digests
    (tmp_path / "model.safetensors").write_bytes(b"x")
    first = weight_files(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"xy")
    assert len(first) == 1 and weight_files(tmp_path) != first
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert len(weight_files(tmp_path)) == 2, "PyTorch's own format holds weights too"
