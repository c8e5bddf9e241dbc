"""Rows that share prompts: every token once, everybody sees what it would see alone, and the scores are the same."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3MoeConfig

import roll.data.packing as shared_prompts
from roll.data.batch import Batch
from roll.data.packing import (
    SharedPrompts,
    make_shared_batches,
    rectangle,
    row_with_shared_prompts,
    shared_row,
    worth_sharing,
)
from roll.models import planned_attention
from roll.models.heads import ValueHead
from roll.models.scoring import TokenScorer, score_batch, score_input
from tests.support.batches import batch_of
from tests.support.examples import examples
from tests.support.families import tiny_model
from tests.support.sizes import sizes

SMALL: dict[str, Any] = {**sizes(37, 16, 24, 2, 2, 1), "initializer_range": 0.3}


def make_batch(groups: list[tuple[int, list[int]]], seed: int = 0) -> Batch:
    """Per group a prompt's length and those of the answers to it; rows are shuffled."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for prompt_length, answers in groups:
        prompt = torch.randint(0, 37, (prompt_length,), generator=generator)
        for length in answers:
            rows.append((torch.cat([prompt, torch.randint(0, 37, (length,), generator=generator)]), prompt_length))
    order = torch.randperm(len(rows), generator=generator).tolist()
    return batch_of(*zip(*[rows[i] for i in order], strict=True))


GROUPS = [(9, [3, 1, 6, 2]), (5, [4, 12]), (1, [2, 2, 2]), (7, [0, 3])]

batches = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=5)), min_size=1).map(
    make_batch
)


def visible_pairs(batch: Batch) -> set[tuple[int, int]]:
    """(query, key) cells of the row, by the plan."""
    plan = shared_row(batch)[3]
    owner = torch.full((sum(block.query_RQ.numel() for block in plan.blocks),), -1)
    owner[plan.result_N] = torch.arange(len(plan.result_N))
    pairs, start = set(), 0
    for block in plan.blocks:
        rows, queries = block.query_RQ.shape
        causal = torch.ones(queries, block.key_RJ.shape[1], dtype=torch.bool).tril().expand(rows, -1, -1)
        seen = causal if block.visible_RQJ is None else block.visible_RQJ
        for r, q, j in seen.nonzero().tolist():
            cell = int(owner[start + r * queries + q])
            if cell >= 0:
                assert cell == int(block.query_RQ[r, q])
                pairs.add((cell, int(block.key_RJ[r, j])))
        start += block.query_RQ.numel()
    return pairs


@examples(60)
@given(batches)
def test_a_token_sees_itself_and_what_stands_before_it_in_its_sequences(batch):
    ids, positions, cell_T, _ = shared_row(batch)
    assert torch.equal(ids[cell_T], batch.tokens_T) and torch.equal(positions[cell_T], batch.positions_T)
    assert sorted(set(cell_T.tolist())) == list(range(len(ids))), "every cell holds a token of some sequence"
    expected = set()
    for cells in cell_T.split(batch.lengths_B.tolist()):
        expected |= {(int(cells[i]), int(cells[j])) for i in range(len(cells)) for j in range(i + 1)}
    assert visible_pairs(batch) == expected


@examples(60)
@given(batches)
def test_prompts_are_known_by_their_groups_and_states_without_the_tokens(batch):
    found = SharedPrompts.find(batch)
    state_B = found.prompt_B % 3
    known = batch.replace(group_B=found.prompt_B, state_B=state_B, tokens_T=torch.zeros_like(batch.tokens_T))
    by_state = SharedPrompts.expected(known)
    assert by_state.num_tokens(known) == found.num_tokens(batch)
    assert torch.equal(by_state.lengths_G[by_state.prompt_B], found.lengths_G[found.prompt_B])
    assert torch.equal(by_state.prompt_B[by_state.first_row_G], torch.arange(len(by_state.lengths_G)))
    assert torch.equal(SharedPrompts.expected(batch.replace(state_B=None)).prompt_B, found.prompt_B)


@examples(60)
@given(batches)
def test_only_equal_prompts_up_to_the_token_that_predicts_are_shared(batch):
    shared = SharedPrompts.find(batch)
    tokens, masks = (column.split(batch.lengths_B.tolist()) for column in (batch.tokens_T, batch.loss_mask_T))
    prompts = []
    for row, mask in zip(tokens, masks, strict=True):
        cut = max(0, int(mask.nonzero()[0]) - 1) if mask.any() else 0
        prompts.append(tuple(row[:cut].tolist()))
    assert len(shared.lengths_G) == len(set(prompts))
    for row, prompt in enumerate(prompts):
        first = int(shared.first_row_G[shared.prompt_B[row]])
        assert prompts[first] == prompt and int(shared.lengths_G[shared.prompt_B[row]]) == len(prompt)
    assert shared.num_tokens(batch) == sum(map(len, set(prompts))) + sum(
        len(row) - len(prompt) for row, prompt in zip(tokens, prompts, strict=True)
    )


@examples(60)
@given(batches, st.integers(1, 6), st.integers(1, 40))
def test_micro_batches_hold_every_sequence_once_within_the_limits(batch, max_sequences, max_tokens):
    groups = make_shared_batches(batch, max_sequences=max_sequences, max_tokens=max_tokens)
    assert sorted(row for rows in groups for row in rows.tolist()) == list(range(batch.num_sequences))
    for rows in groups:
        part = batch.select(rows)
        assert len(rows) <= max_sequences
        assert len(rows) == 1 or SharedPrompts.find(part).num_tokens(part) <= max_tokens


def test_members_of_a_group_stay_together_and_blocks_are_cut_to_size_and_by_length(monkeypatch):
    batch = make_batch([(8, [2] * 4), (9, [3] * 4), (7, [4] * 4)])
    groups = make_shared_batches(batch, max_sequences=4)
    assert all(len(SharedPrompts.find(batch.select(rows)).lengths_G) == 1 for rows in groups)
    batch = make_batch([(9, [30, 30, 30, 3, 3])])
    for most, shapes in ((None, [(1, 8), (3, 31), (2, 4)]), (2 * 31 * 39, [(1, 8), (2, 31), (1, 31), (2, 4)])):
        if most is not None:
            monkeypatch.setattr(shared_prompts, "MAX_BLOCK_CELLS", most)
        assert [tuple(block.query_RQ.shape) for block in shared_row(batch)[3].blocks] == shapes


def test_sharing_must_save_and_must_not_need_large_masks(monkeypatch):
    assert worth_sharing(make_batch([(20, [4] * 4)]))
    assert not worth_sharing(make_batch([(20, [4])] * 4, seed=1)), "four prompts"
    assert not worth_sharing(make_batch([(2, [30] * 4)])), "next to nothing to share"
    assert not worth_sharing(make_batch([(20, [4])])), "one sequence"
    assert not worth_sharing(make_batch([(20, [4] * 4)]).select([])), "none"
    monkeypatch.setattr(shared_prompts, "MAX_ROW_CELLS", 19 * 19 - 1)
    assert not worth_sharing(make_batch([(20, [4] * 4)]))


CONFIGS = {
    "qwen2": Qwen2Config(**SMALL),
    "llama": LlamaConfig(**SMALL),
    "qwen3 moe": Qwen3MoeConfig(**SMALL, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, head_dim=8),
}


def scores_and_gradient(model: PreTrainedModel, batch: Batch, make_input: Any) -> list[Tensor]:
    scores = score_input(TokenScorer(model, temperature=0.7), make_input(batch), batch.num_tokens)
    model.zero_grad()
    (scores.logprobs_T.sum() - 0.1 * scores.entropy_T.square().sum()).backward()
    return [scores.logprobs_T, scores.entropy_T, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_and_gradient_are_those_of_separate_rows(name):
    model, batch = tiny_model(CONFIGS[name], 1, attn_implementation="sdpa"), make_batch(GROUPS)
    expected = scores_and_gradient(model, batch, rectangle)
    assert planned_attention.enable_sharing(model)
    for found, wanted in zip(scores_and_gradient(model, batch, row_with_shared_prompts), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)


def test_a_pair_shares_what_its_rows_begin_with_though_only_their_ends_are_scored():
    model = tiny_model(CONFIGS["qwen2"], 1, attn_implementation="sdpa")
    assert planned_attention.enable_sharing(model)
    whole = make_batch([(12, [5, 3]), (9, [6, 2])])
    ends_T = torch.zeros(whole.num_tokens, dtype=torch.bool)
    ends_T[whole.lengths_B.cumsum(0) - 1] = True
    twin_B = SharedPrompts.find(whole).prompt_B  # the rows of a question
    batch = whole.replace(loss_mask_T=ends_T)
    assert SharedPrompts.find(batch).num_tokens(batch) == batch.num_tokens, "rows alone differ before their ends"
    pairs = batch.replace(pair_B=twin_B, preferred_B=torch.tensor([True, False, True, False]))
    shared = SharedPrompts.find(pairs)
    assert sorted(shared.lengths_G.tolist()) == [9, 12] and worth_sharing(pairs)
    head = ValueHead(SMALL["hidden_size"])
    torch.nn.init.normal_(head.linear.weight)

    def values_and_gradient(make_input: Any) -> list[Tensor]:
        scores = score_input(TokenScorer(model.base_model, value_head=head), make_input(pairs), pairs.num_tokens)
        model.zero_grad()
        scores.values_T.square().sum().backward()
        return [scores.values_T, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    for found, wanted in zip(values_and_gradient(row_with_shared_prompts), values_and_gradient(rectangle), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)


def test_a_model_that_takes_plans_computes_other_rows_as_before_and_recomputes_activations_for_the_same_gradient():
    model, batch = tiny_model(CONFIGS["qwen2"], 1, attn_implementation="sdpa"), make_batch(GROUPS)
    before = [score_batch(TokenScorer(model), batch, packing=packing) for packing in (False, True)]
    assert planned_attention.enable_sharing(model)
    after = [score_batch(TokenScorer(model), batch, packing=packing) for packing in (False, True)]
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.logprobs_T, other.logprobs_T)
    expected = scores_and_gradient(model, batch, row_with_shared_prompts)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for found, wanted in zip(scores_and_gradient(model, batch, row_with_shared_prompts), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        (Qwen2Config(**SMALL), "eager"),
        (Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=1), "sdpa"),
        (Gemma2Config(**SMALL, head_dim=8), "sdpa"),
    ],
    ids=["eager", "sliding window", "capped attention"],
)
def test_models_with_another_attention_take_no_plans(config, attention):
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    assert not planned_attention.enable_sharing(model)
    assert model.config._attn_implementation == attention
