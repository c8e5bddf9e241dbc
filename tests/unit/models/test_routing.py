"""Routers of Transformers' mixtures of experts tell their choice and take another's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from roll.algorithms.types import TokenScores
from roll.data.batch import Batch
from roll.data.packing import row_with_shared_prompts, take_micro_batch
from roll.models.routing import expert_sizes
from roll.models.scoring import TokenScorer, score_batch
from tests.unit.models.test_scoring import CUTTINGS, SMALL, make_batch, make_model

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT: dict[str, Any] = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
GROUPED: dict[str, Any] = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
FAMILIES: dict[str, Any] = {
    "qwen3_moe": transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=8),
    "qwen2_moe (shared expert)": transformers.Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=8),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss (weights of the logits)": transformers.GptOssConfig(
        **{**SMALL, "eos_token_id": 1}, num_local_experts=4, num_experts_per_tok=2, head_dim=8
    ),
    "deepseek_v3 (groups of experts)": transformers.DeepseekV3Config(
        **{**SMALL, **EXPERTS, **LATENT, **GROUPED, "num_key_value_heads": 2}, v_head_dim=8, n_shared_experts=1
    ),
}


def scored(model: Any, batch: Batch, **options: Any) -> TokenScores:
    return score_batch(TokenScorer(copy.deepcopy(model), routes=True), batch, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_told_choice_repeats_the_scores_and_another_changes_them(family: str) -> None:
    model, batch = make_model(FAMILIES[family]), make_batch()
    plain = score_batch(TokenScorer(copy.deepcopy(model)), batch)
    told = scored(model, batch)
    assert told.experts_TE is not None and torch.equal(plain.logprobs_T, told.logprobs_T)
    again = scored(model, batch.replace(experts_TE=told.experts_TE))
    free = scored(model, batch.replace(experts_TE=torch.full_like(told.experts_TE, -1)))
    other = scored(model, batch.replace(experts_TE=(told.experts_TE + 1) % 4))
    assert torch.equal(again.logprobs_T, told.logprobs_T) and again.experts_TE is None
    assert torch.equal(free.logprobs_T, told.logprobs_T)
    assert (other.logprobs_T - told.logprobs_T).abs().max() > 0.1


@pytest.mark.parametrize("cutting", CUTTINGS)
def test_what_is_told_is_what_the_routers_prefer_however_the_batch_is_cut(cutting: str) -> None:
    model, batch = make_model(FAMILIES["qwen3_moe"]), make_batch()
    expected = []
    for row in range(batch.num_sequences):
        tokens = batch.tokens_T[batch.token_index([row])][None]
        logits = model(tokens, use_cache=False, output_router_logits=True).router_logits
        expected.append(torch.cat([of_layer.topk(2).indices for of_layer in logits], dim=1))
    told = scored(model, batch, **CUTTINGS[cutting])
    assert torch.equal(told.experts_TE, torch.cat(expected).short())


def test_a_replayed_choice_holds_under_other_routers_and_trains_them() -> None:
    model, batch = make_model(FAMILIES["qwen3_moe"]), make_batch()
    told = scored(model, batch).experts_TE
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.neg_()  # what was last is first
    assert not torch.equal(scored(model, batch).experts_TE, told)
    scorer = TokenScorer(model, routes=True)
    score_batch(scorer, batch.replace(experts_TE=told), packing=True)
    assert scorer.routing is not None and torch.equal(scorer.routing.chosen_NE.sort(0).values, told.sort(0).values)
    with torch.enable_grad():
        gate = model.model.layers[0].mlp.gate.weight
        inputs = row_with_shared_prompts(batch.replace(experts_TE=told))
        scores = scorer(
            inputs.input_ids_RC, inputs.position_ids_RC, inputs.source_K, inputs.target_K, experts_NE=inputs.experts_NE
        )
        (gradient,) = torch.autograd.grad(scores["logprobs_T"].sum(), gate)
    assert gradient.abs().max() > 0


def test_a_shared_prompt_takes_the_experts_of_a_row_that_has_some() -> None:
    tokens = torch.tensor([1, 2, 3, 4, 1, 2, 3, 5])
    experts_TE = torch.tensor([[-1]] * 4 + [[0], [1], [2], [3]], dtype=torch.int16)
    mask_T = torch.tensor([False, False, False, True] * 2)
    batch = Batch(torch.tensor([4, 4]), tokens, mask_T, experts_TE=experts_TE)
    inputs = row_with_shared_prompts(batch)
    found: Tensor = inputs.experts_NE
    assert found[:, 0].tolist() == [0, 1, -1, -1, 2, 3]  # two shared tokens, then what each row has for itself
    assert (take_micro_batch(batch, [], 0).experts_TE == -1).all()


def test_models_and_choices_that_do_not_go_together_are_told() -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no layers with experts"):
        scored(make_model(), batch)
    with pytest.raises(ValueError, match="6 experts for each token, expected 2 layers x 2"):
        experts_TE = torch.zeros(batch.num_tokens, 6, dtype=torch.int16)
        scored(make_model(FAMILIES["qwen3_moe"]), batch.replace(experts_TE=experts_TE))
    phimoe = transformers.PhimoeConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    assert expert_sizes(phimoe) == (4, 2)
    with pytest.raises(ValueError, match=r"layer 0 of this model chooses its experts by other means than torch\.topk"):
        scored(make_model(phimoe), batch)
