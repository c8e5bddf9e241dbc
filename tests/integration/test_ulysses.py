"""Sequences shared by several ranks: the scores and the gradient of one process, whatever the layout and the model."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from roll.algorithms.quantities import BASIC, hidden_states
from roll.data.batch import Batch
from roll.models import planned_attention, ulysses
from roll.models.heads import ValueHead
from roll.models.scoring import TokenScorer, layout, score_input
from tests.support.ranks import run_ranks
from tests.support.sizes import sizes

WORLD = 4
RECTANGLE: dict[str, Any] = {"round_to": 3}
PACKED = {"packing": True}
SHARED = {"sharing": True}
CASES: dict[str, dict[str, Any]] = {
    "rectangle": {"layout": RECTANGLE},
    "packed": {"layout": PACKED},
    "shared prompts": {"layout": SHARED},
    "each key-value head for two ranks": {"layout": PACKED, "size": 4},
    "columns do not divide": {"layout": RECTANGLE, "size": 4},
    "sliding window": {"layout": RECTANGLE, "kind": "Mistral"},
    "sliding window, packed": {"layout": PACKED, "kind": "Mistral"},
    "layers of two kinds": {"layout": PACKED, "kind": "Gemma2"},
    "critic": {"layout": RECTANGLE, "value": True},
    "recomputed": {"layout": PACKED, "recompute": True},
    "hidden states": {"layout": PACKED, "hidden": True},
    "one rank has all loss tokens": {"layout": PACKED, "last": True},
    "no loss tokens": {"layout": PACKED, "last": False},
}


def make_model(kind: str = "Qwen2", value: bool = False, **kwargs: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        **sizes(37, 32, 48, 2, 4, 2),
        head_dim=8,
        initializer_range=0.2,
        sliding_window=4 if kind != "Qwen2" else None,
        **kwargs,
    )
    torch.manual_seed(1)
    suffix = "Model" if value else "ForCausalLM"
    return getattr(transformers, kind + suffix)._from_config(config, attn_implementation="sdpa").eval()


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([11, 9, 5, 14, 2])
    tokens = torch.randint(0, 37, (int(lengths.sum()),), generator=generator)
    tokens[11:16] = tokens[:5]
    batch = Batch(lengths, tokens, torch.zeros(len(tokens)).bool())
    mask = (torch.rand(len(tokens), generator=generator) < 0.5) & (batch.positions_T > 4)
    return batch.replace(loss_mask_T=mask, advantages_T=torch.randn(len(tokens), generator=generator))


def case_batch(case: dict[str, Any]) -> Batch:
    batch = make_batch()
    if "last" not in case:
        return batch
    mask = torch.zeros_like(batch.loss_mask_T)
    mask[-1] = case["last"]
    return batch.replace(loss_mask_T=mask)


def make_scorer(case: dict[str, Any]) -> TokenScorer:
    value = case.get("value", False)
    model = make_model(case.get("kind", "Qwen2"), value)
    head = ValueHead(32) if value else None
    if head is not None:
        torch.nn.init.normal_(head.linear.weight)
    if "sharing" in case["layout"]:
        assert planned_attention.enable_sharing(model)
    if case.get("recompute"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    needs = (*BASIC, *[hidden_states][: case.get("hidden", False)])
    return TokenScorer(model, temperature=0.8, value_head=head, needs=needs)


def result_of(scorer: TokenScorer, batch: Batch, scores: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Scores and gradient; the loss looks at all of them."""
    columns = scores.columns
    loss = torch.zeros(())
    for values in columns.values():
        weighted = values * (batch.advantages_T if values.ndim == 1 else batch.advantages_T[:, None])
        loss = loss + (weighted.square() + weighted).sum() / (10 * values.numel())
    loss.backward()
    gradient = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in scorer.named_parameters()}
    return {name: values.detach() for name, values in columns.items()}, gradient


def rank_main(rank: int) -> dict[str, Any]:
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    groups = {size: ulysses.make_group(size) for size in (2, 4)}
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        batch, scorer = case_batch(case), make_scorer(case)
        inputs = layout(batch, **case["layout"])
        expected, expected_gradient = result_of(scorer, batch, score_input(scorer, inputs, batch.num_tokens))
        scorer.zero_grad()
        group = groups[case.get("size", 2)]
        ulysses.enable(scorer.model, group.size)
        scores, gradient = result_of(scorer, batch, ulysses.score_shared_input(scorer, inputs, batch.num_tokens, group))
        for total in gradient.values():
            dist.all_reduce(total)
            total.mul_(group.size / WORLD)  # the other groups did the same work
        found[name] = {
            "scores": max(float((scores[n] - expected[n]).abs().max()) for n in expected),
            "gradient": max(float((gradient[n] - g).abs().max()) for n, g in expected_gradient.items()),
            "largest gradient": max(float(g.abs().max()) for g in expected_gradient.values()),
            "whole sequences": _whole_again(scorer, inputs, batch, expected),
        }
    found["bf16"] = _bf16(groups[2])
    found["neighbour"] = _neighbour(groups[2])
    return found


@torch.no_grad()
def _whole_again(scorer: TokenScorer, inputs: Any, batch: Batch, expected: dict[str, Tensor]) -> float:
    """A prepared model given whole sequences."""
    scores = score_input(scorer, inputs, batch.num_tokens)
    return max(float((getattr(scores, n) - values).abs().max()) for n, values in expected.items())


@torch.no_grad()
def _bf16(group: ulysses.SequenceGroup) -> float:
    batch, scorer = make_batch(), make_scorer({"layout": PACKED})
    inputs = layout(batch, packing=True)
    exact = score_input(scorer, inputs, batch.num_tokens).logprobs_T
    scorer.to(torch.bfloat16)
    ulysses.enable(scorer.model, group.size)
    found = ulysses.score_shared_input(scorer, inputs, batch.num_tokens, group).logprobs_T
    return float((found - exact).abs().max())


@torch.no_grad()
def _neighbour(group: ulysses.SequenceGroup) -> float:
    """How far a sequence's scores move when another one in its packed row changes, over the two ranks' border."""
    batch, scorer = make_batch(), make_scorer({"layout": PACKED})
    ulysses.enable(scorer.model, group.size)
    other = batch.replace(tokens_T=torch.where(batch.rows_T == 1, (batch.tokens_T + 1) % 37, batch.tokens_T))
    found = [
        ulysses.score_shared_input(scorer, layout(each, packing=True), each.num_tokens, group).logprobs_T
        for each in (batch, other)
    ]
    assert (found[0] - found[1])[batch.rows_T == 1].abs().max() > 0.01
    return float((found[0] - found[1])[batch.rows_T != 1].abs().max())


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(rank_main, WORLD)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_sequences_score_and_learn_like_one(found, name):
    for rank in found:
        assert rank[name]["scores"] <= 5e-6, rank[name]
        assert rank[name]["gradient"] <= 1e-6, rank[name]
        assert rank[name]["whole sequences"] == 0, rank[name]
    assert (found[0][name]["largest gradient"] > 0.001) == (name != "no loss tokens")


def test_sequences_of_a_packed_row_see_themselves_only_and_bf16_is_near_fp32(found):
    assert 0 < found[0]["bf16"] < 0.2
    assert [rank["neighbour"] for rank in found] == [0.0] * WORLD


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        ({}, 3, "divisor of the 4 attention heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "divisor or a multiple of the 6 key-value heads"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 2, "of the kind dynamic"),
    ],
)
def test_what_cannot_be_shared_is_refused(model, size, message):
    import transformers

    config = transformers.LlamaConfig(**({"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1} | model))
    with torch.device("meta"):
        made = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=f"ulysses_size.*{message}"):
        ulysses.enable(made, size)


def test_other_kernels_are_refused():
    model = make_model()
    model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="'eager', expected sdpa or fa2"):
        ulysses.enable(model, 2)
