"""The reference's log-probabilities on disk, and what tells one file from another."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import torch

from roll.data.batch import Batch
from roll.models.scoring import TokenScores
from roll.pipeline.offline.dpo import ReferenceScores, cross
from roll.pipeline.roles import Roles


@dataclass
class Scorer:
    """Scores by a constant, and counts how often it is asked."""

    value: float
    asked: int = field(default=0)

    def submit_logprobs(self, batch: Batch) -> Callable[[], TokenScores]:
        self.asked += 1
        return lambda: TokenScores(logprobs_T=torch.full((batch.num_tokens,), self.value))


def test_what_is_kept_is_taken_by_who_scores_in_the_same_number_format(tmp_path):
    batch = Batch(torch.tensor([3]), torch.arange(3), torch.tensor([False, True, True]))
    scorers = {"fp32": Scorer(-1.0), "bf16": Scorer(-2.0)}

    def ahead(dtype: str) -> float:
        roles = cast(Roles, SimpleNamespace(reference=None, actor=scorers[dtype]))
        scored = ReferenceScores(roles, str(tmp_path), dtype, tmp_path / "kept").ahead(batch)
        assert scored.ref_logprobs_T is not None
        return float(scored.ref_logprobs_T[0])

    assert [ahead("fp32"), ahead("bf16"), ahead("fp32")] == [-1.0, -2.0, -1.0]
    assert [scorer.asked for scorer in scorers.values()] == [1, 1]


def test_what_is_kept_of_one_model_is_not_taken_for_another(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    batch = Batch(torch.tensor([3]), torch.arange(3), torch.tensor([False, True, True]))
    scorers = {path: Scorer(-number) for number, path in enumerate(("org/one", "org/two", "~/one", "~/two"), 1)}

    def ahead(path: str) -> float:
        roles = cast(Roles, SimpleNamespace(reference=scorers[path], actor=None))
        scored = ReferenceScores(roles, path, "bf16", tmp_path / "kept").ahead(batch)
        assert scored.ref_logprobs_T is not None
        return float(scored.ref_logprobs_T[0])

    assert [ahead(path) for path in [*scorers, *scorers]] == [-1.0, -2.0, -3.0, -4.0] * 2
    assert [scorer.asked for scorer in scorers.values()] == [1, 1, 1, 1]


def crossed(rows: list[tuple[list[int], list[int]]], max_tokens: int = 9) -> list[tuple[list[int], list[bool]]]:
    lengths = torch.tensor([len(question) + len(answer) for question, answer in rows])
    tokens = torch.tensor([token for question, answer in rows for token in (*question, *answer)])
    mask = torch.tensor([said for question, answer in rows for said in [False] * len(question) + [True] * len(answer)])
    found = cross(Batch(lengths, tokens, mask), max_tokens)
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
