"""A vocabulary that lies on two ranks, the last row of the second being padding."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from roll.algorithms.quantities import (
    Distribution,
    Divergence,
    Given,
    OutputLayer,
    Quantity,
    TopTokens,
    WholeVocabulary,
    entropy,
    logprobs,
    prob_square_sum,
    top1,
)
from roll.configs.divergence import DivergenceConfig
from roll.distributed.strategy.megatron.scores import VocabularyScorer, VocabularyShare
from tests.support.ranks import enter_rank, leave_rank, run_ranks

IDS, ROWS, WIDTH, TOKENS = 7, 4, 5, 6
KL = DivergenceConfig(kd_objective="forward_kl")
GIVEN = Given({"teacher_hidden_TH": torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(4))})


def made(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def divergence(start: int, count: int) -> Divergence:
    layer = OutputLayer(made(IDS + 2, WIDTH, seed=3)).rows(start, count)
    return Divergence(KL, 1.0, "teacher", IDS, layer=layer)


def needs(shared: int, start: int, count: int) -> list[Quantity]:
    return [logprobs, entropy, top1, prob_square_sum, TopTokens(2, shared), divergence(start, count)]


def scores(shared: int) -> dict[str, Tensor]:
    """On one device; of top tokens those of the ``shared`` first ids."""
    hidden, target = made(TOKENS, WIDTH, seed=1), torch.zeros(TOKENS, dtype=torch.int64)
    all_logprobs = (hidden @ made(IDS, WIDTH, seed=2).T).log_softmax(-1)
    options: dict[str, Any] = {"temperature": 1.0, "read": None, "given": GIVEN}
    p = Distribution(all_logprobs, target, hidden, WholeVocabulary(), **options)
    return {name: column for quantity in needs(shared, 0, IDS) for name, column in quantity(p).items()}


def rank_main(rank: int, port: int, folder: Path) -> None:
    enter_rank(port)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=30))
    group = dist.group.WORLD
    share = VocabularyShare(IDS, rank * ROWS, group)
    weight = torch.nn.functional.pad(made(IDS, WIDTH, seed=2), (0, 0, 0, 1))[rank * ROWS : (rank + 1) * ROWS]
    found = {}
    for shared in (IDS, IDS - 2):
        scorer = VocabularyScorer(share, 1.0, needs(shared, rank * ROWS, ROWS))
        told = scorer(weight, made(TOKENS, WIDTH, seed=1), torch.zeros(TOKENS, dtype=torch.int64), GIVEN)
        found[shared] = {name: tensor.clone() for name, tensor in told.items()}
    torch.save(found, folder / f"{rank}.pt")
    leave_rank()


@pytest.mark.timeout(120)
def test_ranks_with_and_without_padding_tell_the_same(tmp_path: Path) -> None:
    run_ranks(rank_main, 2, tmp_path)
    for rank in range(2):
        for shared, found in torch.load(tmp_path / f"{rank}.pt").items():
            expected = scores(shared)
            assert len(expected) == 8 and found.keys() == expected.keys()
            for name, column in expected.items():
                torch.testing.assert_close(found[name], column)
