"""What every generator says of tokens that it is given, as a teacher or a reference: that of ``TokenScorer``."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from roll.algorithms.quantities import Quantity, TopTokens, logprobs
from roll.algorithms.types import TokenScores
from roll.data.batch import Batch
from roll.distributed.strategy.base import States
from roll.models.scoring import TokenScorer, score_batch
from tests.support.batches import batch_of
from tests.support.contract import MAX_RUNNING, load, prompts, started

LONGEST = 96
NUM_IDS = 60
"""Fewer than the model has: those of a policy with a smaller vocabulary."""
TEMPERATURE = 0.7


def needs(top_k: int) -> tuple[Quantity, ...]:
    return (logprobs, *[TopTokens(top_k, NUM_IDS)][: top_k > 0])


@pytest.fixture(params=[8, *(pytest.param(number, marks=pytest.mark.slow) for number in (0, 5000))])
def top_k(request: pytest.FixtureRequest) -> int:
    """5000: more than there are."""
    return request.param


@pytest.fixture
def scorer(generator: str, model_path: Callable[..., str], top_k: int) -> Iterator[Any]:
    options = {"sequence_length": LONGEST, "temperature": TEMPERATURE, "needs": needs(top_k)}
    with started(generator, model_path("tied", 0), role="teacher", **options) as engine:
        yield engine


def test_scores_are_those_of_the_model(scorer, model_path, top_k):
    batch = given_rows()
    model = TokenScorer(load(model_path("tied", 0)), temperature=TEMPERATURE, needs=needs(top_k))
    assert_same(scorer.logprobs(batch), score_batch(model, batch), batch)
    scorer.offload(States.WEIGHTS)
    scorer.onload(States.WEIGHTS)
    other = given_rows(seed=1)
    assert_same(scorer.logprobs(other), score_batch(model, other), other)
    if type(scorer).__name__ == "HfInfer":
        return
    with pytest.raises(ValueError, match=f"teacher: a row of {LONGEST + 1} tokens, expected at most sequence_length"):
        scorer.logprobs(given_rows(longest=LONGEST + 1))
    with pytest.raises(ValueError, match=f"teacher: token {scorer.vocab_size}, expected less than"):
        scorer.logprobs(batch.replace(tokens_T=batch.tokens_T.index_fill(0, torch.tensor([3]), scorer.vocab_size)))


def given_rows(seed: int = 0, longest: int = LONGEST) -> Batch:
    """Rows of one token up to the longest, more than run at once; one has no token to score."""
    rows = prompts(MAX_RUNNING + 6, seed=seed)
    (rows[0],) = prompts(1, seed=9, low=longest, high=longest)
    rows[1] = rows[1][:1]
    batch = batch_of(rows, prompts=1)
    mask_T = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.6
    return batch.replace(loss_mask_T=mask_T & batch.loss_mask_T & (batch.rows_T != 2))


def assert_same(seen: TokenScores, expected: TokenScores, batch: Batch) -> None:
    torch.testing.assert_close(seen.logprobs_T, expected.logprobs_T, atol=1e-4, rtol=0)
    for name in ("top_logprobs_TK", "tail_T"):
        found, wanted = getattr(seen, name), getattr(expected, name)
        assert (found is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    if expected.top_ids_TK is not None:
        assert seen.top_ids_TK.shape == expected.top_ids_TK.shape
        same = (seen.top_ids_TK == expected.top_ids_TK)[batch.loss_mask_T].float().mean()
        assert same > 0.999, "but for ties"
