"""Columns that are kept on disk, as the reference's log-probs: computed once, and only for what they were made for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from roll.data.batch import Batch
from roll.models.scoring import TokenScores
from roll.pipeline.column_cache import cached_columns, check_writable, digest_of, read_cached, weight_files
from roll.pipeline.offline.dpo import ReferenceScores, cross
from tests.support.batches import batch_of

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


@dataclass
class Scorer:
    """Scores by a constant, and counts how often it is asked."""

    value: float
    asked: int = 0

    def submit_logprobs(self, batch: Batch) -> Callable[[], TokenScores]:
        self.asked += 1
        return lambda: TokenScores(logprobs_T=torch.full((batch.num_tokens,), self.value))


def test_what_is_kept_of_one_model_and_number_format_is_not_taken_for_another(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    models = [("org/one", "bf16"), ("org/two", "bf16"), ("~/one", "bf16"), ("~/two", "bf16"), ("~/two", "fp32")]
    scorers = {asked: Scorer(-number) for number, asked in enumerate(models, 1)}
    for role, other in (("reference", "actor"), ("actor", "reference")):  # what one has scored the other takes
        for (model, dtype), scorer in scorers.items():
            roles: Any = SimpleNamespace(**{role: scorer, other: None})
            batch = ReferenceScores(roles, model, dtype, tmp_path / "kept").ahead(BATCH)
            assert float(batch.ref_logprobs_T[0]) == scorer.value
    assert [scorer.asked for scorer in scorers.values()] == [1, 1, 1, 1, 1]


def crossed(rows: list[tuple[list[int], list[int]]], max_tokens: int = 9) -> list[tuple[list[int], list[bool]]]:
    batch = batch_of([[*question, *answer] for question, answer in rows], [len(question) for question, _ in rows])
    found = cross(batch, max_tokens)
    sizes = found.lengths_B.tolist()
    pairs = zip(found.tokens_T.split(sizes), found.loss_mask_T.split(sizes), strict=True)
    return [(ids.tolist(), said.tolist()) for ids, said in pairs]


def test_a_question_gets_the_next_answer_to_another_one_cut_at_the_end(caplog):
    rows = [([1], [10, 11]), ([2, 2], [20]), ([2, 2], [21]), ([3], [30, 31, 32]), ([1], [12])]
    found = crossed(rows)
    assert [ids for ids, _ in found] == [[1, 20], [2, 2, 30, 31, 32], [2, 2, 30, 31, 32], [3, 12], [1, 20]]
    assert found[1][1] == [False, False, True, True, True]
    assert crossed([([1, 1], [10]), ([2], [20, 21])], max_tokens=3) == [
        ([1, 1, 20], [False, False, True]),
        ([2, 10], [False, True]),
    ]
    assert not caplog.records
    assert all(ids[0] == 1 and len(ids) == 2 for ids, _ in crossed([([1], [10]), ([1], [11])]))
    assert "got 2 responses to one question, expected several questions" in caplog.text
