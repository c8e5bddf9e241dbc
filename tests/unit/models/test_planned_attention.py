"""A packed row's attention is that of its sequences alone: exactly, in every kind of head, window and model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, MistralConfig, Qwen2Config, Qwen3MoeConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from roll.data.batch import Batch
from roll.data.packing import PackedSequences, packed_row
from roll.models import planned_attention
from roll.models.scoring import TokenScorer, score_input
from tests.support.sizes import sizes

LENGTHS = (7, 1, 12, 3)
SMALL: dict[str, Any] = {
    **sizes(37, 16, 24, 2, 4, 2),
    "initializer_range": 0.3,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SMALL),
    "qwen2, one layer with a window": Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "mistral, a window without kinds of layers": MistralConfig(**SMALL, sliding_window=4),
    "gemma2, every second layer with a window": Gemma2Config(
        **SMALL, head_dim=8, sliding_window=4, attn_logit_softcapping=None
    ),
    "qwen3-moe": Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True
    ),
    "gpt2, positions that are learned": GPT2Config(vocab_size=37, n_embd=16, n_layer=2, n_head=2, n_positions=64),
}


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    num_tokens = sum(LENGTHS)
    tokens = torch.randint(0, 37, (num_tokens,), generator=generator)
    batch = Batch(torch.tensor(LENGTHS), tokens, torch.zeros(num_tokens).bool())
    return batch.replace(loss_mask_T=batch.positions_T > 1)


def dense(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Block-diagonal attention over the whole row, written out in float64; the result is [1, T, heads, size]."""
    rows = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(len(rows))
    distance = place[:, None] - place
    visible = (rows[:, None] == rows) & (distance >= 0) & (distance < (window or len(rows)))
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_and_its_gradient_are_block_diagonal(heads: int, kv_heads: int, window: int | None) -> None:
    assert planned_attention.enable(AutoModelForCausalLM.from_config(CONFIGS["qwen2"]))
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, n, sum(LENGTHS), 8) for n in (heads, kv_heads, kv_heads)]
    exact = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    states = [each.detach().float().requires_grad_() for each in exact]
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)
    attend = ALL_ATTENTION_FUNCTIONS[planned_attention.NAME]
    found, _ = attend(module, *states, None, attention_plan=PackedSequences(LENGTHS), sliding_window=window)
    wanted = dense(*exact, window)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-6)
    weights = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    (wanted * weights).sum().backward()
    (found * weights.float()).sum().backward()
    for state, each in zip(states, exact, strict=True):
        assert state.grad is not None and each.grad is not None
        torch.testing.assert_close(state.grad.double(), each.grad, rtol=0, atol=5e-6)


def scores_and_gradient(name: str, attention: str) -> list[Tensor]:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention).eval()
    batch = make_batch()
    scores = score_input(TokenScorer(model), packed_row(batch), batch.num_tokens)
    assert scores.logprobs_T is not None and scores.entropy_T is not None
    (scores.logprobs_T.sum() - 0.1 * scores.entropy_T.square().sum()).backward()
    return [scores.logprobs_T, scores.entropy_T, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_score_and_learn_as_under_a_mask_over_the_whole_row(name: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa")
    assert planned_attention.enable(model)
    for found, wanted in zip(scores_and_gradient(name, "sdpa"), scores_and_gradient(name, "eager"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)


def test_a_model_whose_layers_drop_arguments_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen2"], attn_implementation="sdpa")
    layer: type[nn.Module] = type(model.model.layers[0])
    monkeypatch.setattr(layer, "forward", lambda self, hidden_states: hidden_states)
    assert not planned_attention.enable(model)
    assert model.config._attn_implementation == "sdpa"
