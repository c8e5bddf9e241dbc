"""The reference's log-probabilities on disk, and what tells one file from another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from roll.data.batch import Batch
from roll.models.scoring import TokenScores
from roll.pipeline.offline.dpo import ReferenceScores
from roll.pipeline.roles import Roles


@dataclass
class Scorer:
    """Scores by a constant, and counts how often it is asked."""

    value: float
    asked: int = field(default=0)

    def submit_logprobs(self, batch: Batch) -> Callable[[], TokenScores]:
        self.asked += 1
        return lambda: TokenScores(logprobs_T=torch.full((batch.num_tokens,), self.value))


def test_what_is_kept_is_taken_by_who_scores_in_the_same_number_format(tmp_path: Path) -> None:
    batch = Batch(torch.tensor([3]), torch.arange(3), torch.tensor([False, True, True]))
    scorers = {"fp32": Scorer(-1.0), "bf16": Scorer(-2.0)}

    def ahead(dtype: str) -> float:
        roles = cast(Roles, SimpleNamespace(reference=None, actor=scorers[dtype]))
        scored = ReferenceScores(roles, str(tmp_path), dtype, tmp_path / "kept").ahead(batch)
        assert scored.ref_logprobs_T is not None
        return float(scored.ref_logprobs_T[0])

    assert [ahead("fp32"), ahead("bf16"), ahead("fp32")] == [-1.0, -2.0, -1.0]
    assert [scorer.asked for scorer in scorers.values()] == [1, 1]


def test_what_is_kept_of_one_model_is_not_taken_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
