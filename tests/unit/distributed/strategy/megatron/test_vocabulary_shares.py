"""A vocabulary that lies on two ranks, the last row of the second being padding."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from roll.configs.divergence import DivergenceConfig
from roll.distributed.strategy.megatron.scores import TokenScorer, VocabularyShare
from roll.models.comparison import Comparison, ComparisonSpec, OutputLayer, TeacherView, WholeVocabulary, top_tokens
from roll.models.scoring import TOP_COLUMNS
from tests.support.ranks import enter_rank, leave_rank, run_ranks

IDS, ROWS, WIDTH, TOKENS = 7, 4, 5, 6
SPEC = ComparisonSpec(DivergenceConfig(kd_objective="forward_kl"), 1.0, num_ids=IDS)


def made(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer() -> OutputLayer:
    return OutputLayer(made(IDS + 2, WIDTH, seed=3), None)


def scores(shared: int) -> dict[str, Tensor]:
    """On one device: the ``shared`` first ids' two likeliest and their tail, and the divergence from a teacher."""
    logprobs = (made(TOKENS, WIDTH, seed=1) @ made(IDS, WIDTH, seed=2).T).log_softmax(-1)
    told = dict(zip(TOP_COLUMNS, top_tokens(logprobs, 2, shared, WholeVocabulary()), strict=True))
    compared = Comparison(SPEC, WholeVocabulary(), 1.0, layer().rows(0, IDS))
    divergence = compared(logprobs, TeacherView(made(TOKENS, WIDTH, seed=4), None, None, None))
    return told | {"divergence_T": divergence}


def rank_main(rank: int, port: int, folder: Path) -> None:
    enter_rank(port)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=30))
    group = dist.group.WORLD
    share = VocabularyShare(IDS, rank * ROWS, group)
    weight = torch.nn.functional.pad(made(IDS, WIDTH, seed=2), (0, 0, 0, 1))[rank * ROWS : (rank + 1) * ROWS]
    found = {}
    for shared in (IDS, IDS - 2):
        scorer = TokenScorer(share, 1.0, top_k=2, num_ids=shared)
        scorer.comparison = Comparison(SPEC, share, 1.0, layer().rows(rank * ROWS, ROWS))
        teacher = TeacherView(made(TOKENS, WIDTH, seed=4), None, None, None)
        told = scorer(weight, made(TOKENS, WIDTH, seed=1), torch.zeros(TOKENS, dtype=torch.int64), teacher=teacher)
        found[shared] = {name: tensor.clone() for name, tensor in told.items()}
    torch.save(found, folder / f"{rank}.pt")
    leave_rank()


@pytest.mark.timeout(120)
def test_ranks_with_and_without_padding_tell_the_same(tmp_path: Path) -> None:
    run_ranks(rank_main, 2, tmp_path)
    for rank in range(2):
        for shared, found in torch.load(tmp_path / f"{rank}.pt").items():
            expected = scores(shared)
            for name in (*TOP_COLUMNS, "divergence_T"):
                torch.testing.assert_close(found[name], expected[name])
