"""A row in another model's tokens: which tokens of both stand for the same text."""

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from roll.algorithms.distillation import NO_CHUNK
from roll.data.batch import Batch
from roll.models.aligned_text import Retokenizer
from roll.models.tiny import make_tokenizer
from tests.support.batches import batch_of
from tests.support.foreign import TEXTS, merging_tokenizer


@pytest.fixture(scope="module")
def merging() -> PreTrainedTokenizerFast:
    return merging_tokenizer()


def rows_of(tokenizer: PreTrainedTokenizerFast) -> Batch:
    prompt = tokenizer.encode("<|im_start|>user\nsay√<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    end = tokenizer.eos_token_id
    answers = [tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) for text in TEXTS]
    return batch_of([[*prompt, *answer, end] for answer in answers], len(prompt))


@pytest.mark.parametrize("backwards", [False, True])
def test_a_chunk_is_the_same_text_on_both_sides(merging, backwards):
    policy, teacher = (merging, make_tokenizer()) if backwards else (make_tokenizer(), merging)
    batch = rows_of(policy)
    theirs, chunk_S, chunk_T = Retokenizer(policy, teacher).batch(batch)
    assert theirs.num_sequences == batch.num_sequences and torch.equal(theirs.loss_mask_T, chunk_S != NO_CHUNK)
    assert torch.equal(chunk_T != NO_CHUNK, batch.loss_mask_T), "every sampled token is in one"
    for row in range(batch.num_sequences):
        own, other = batch.rows_T == row, theirs.rows_T == row
        assert set(chunk_T[own].tolist()) == {NO_CHUNK, *range(int(chunk_S[other].max()) + 1)}
        for chunk in set(chunk_S[other].tolist()) - {NO_CHUNK}:
            said = policy.decode(batch.tokens_T[own & (chunk_T == chunk)].tolist())
            read = teacher.decode(theirs.tokens_T[other & (chunk_S == chunk)].tolist())
            assert said == read or (said, read) == (policy.eos_token, teacher.eos_token), (row, chunk)
    assert theirs.tokens_T[-1] == teacher.eos_token_id
    if not backwards:
        assert theirs.tokens_T[0] == teacher.bos_token_id, "as its texts begin"
        few = Retokenizer(policy, teacher, max_length=int(theirs.lengths_B[0]) - 3).batch(batch)
        assert int(few[0].lengths_B.max()) == int(theirs.lengths_B[0]) - 3
        assert few[2].max() < chunk_T.max(), "what is beyond the length is in no chunk"


def test_the_same_tokenizer_has_a_chunk_for_each_token():
    policy = make_tokenizer()
    batch = rows_of(policy)
    theirs, chunk_S, chunk_T = Retokenizer(policy, make_tokenizer()).batch(batch)
    assert torch.equal(theirs.tokens_T, batch.tokens_T) and torch.equal(theirs.lengths_B, batch.lengths_B)
    within = _within_characters(batch, policy)
    assert torch.equal(chunk_S, chunk_T)
    for row in range(batch.num_sequences):
        of_row = chunk_T[(batch.rows_T == row) & batch.loss_mask_T & ~within]
        assert len(of_row.unique()) == len(of_row)


def _within_characters(batch: Batch, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Tokens that are a part of a character, whose parts are one chunk."""
    return torch.tensor(["\ufffd" in tokenizer.decode([token]) for token in batch.tokens_T.tolist()])


def test_what_is_sampled_against_the_tokenizers_habit(merging):
    policy = make_tokenizer()
    prompt = policy.encode("user\n", add_special_tokens=False)
    half = policy.encode("√", add_special_tokens=False)[:-1]
    spelled = [token for letter in "Up" for token in policy.encode(letter, add_special_tokens=False)]
    batch = batch_of([[*prompt, *spelled, *half], [*prompt, *half, *spelled]], len(prompt))
    theirs, chunk_S, chunk_T = Retokenizer(policy, merging).batch(batch)
    first, second = (chunk_T[batch.rows_T == row][len(prompt) :].tolist() for row in (0, 1))
    assert first[-len(half) :] == [NO_CHUNK] * len(half), "it ends amid a character: the teacher is not asked"
    assert NO_CHUNK not in first[:2]
    assert second[: len(half) + 1] == [NO_CHUNK] * (len(half) + 1) and second[-1] != NO_CHUNK, "and what shows it"
    assert merging.decode(theirs.tokens_T[(theirs.rows_T == 1) & (chunk_S != NO_CHUNK)].tolist()) == "p"
    assert merging.decode(theirs.tokens_T[(theirs.rows_T == 0) & (chunk_S != NO_CHUNK)].tolist()) == "Up"


def test_a_tokenizer_that_does_not_tell_places_is_refused(merging):
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="align_tokenizers: the teacher's tokenizer is a Slow, expected a fast one"):
        Retokenizer(merging, Slow())  # type: ignore[arg-type]
