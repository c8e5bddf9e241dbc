"""KTO's point of comparison: questions with answers to other questions."""

from __future__ import annotations

import pytest
import torch

from roll.data.batch import Batch
from roll.pipeline.offline.dpo import cross


def crossed(rows: list[tuple[list[int], list[int]]], max_tokens: int = 9) -> list[tuple[list[int], list[bool]]]:
    lengths = torch.tensor([len(question) + len(answer) for question, answer in rows])
    tokens = torch.tensor([token for question, answer in rows for token in (*question, *answer)])
    mask = torch.tensor([said for question, answer in rows for said in [False] * len(question) + [True] * len(answer)])
    found = cross(Batch(lengths, tokens, mask), max_tokens)
    sizes = found.lengths_B.tolist()
    pairs = zip(found.tokens_T.split(sizes), found.loss_mask_T.split(sizes), strict=True)
    return [(ids.tolist(), said.tolist()) for ids, said in pairs]


def test_a_question_gets_the_next_answer_to_another_one_cut_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
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
    assert "got 2 answers to one question, expected answers to several" in caplog.text
