"""A vocabulary that lies on two ranks, the last row of the second being padding."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GptOssConfig, LlamaConfig, MixtralConfig

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
from roll.configs.engines.megatron import CARD, MegatronConfig
from roll.configs.teacher import DivergenceConfig
from roll.distributed.strategy.megatron import model
from roll.distributed.strategy.megatron.input import Rounding, grid_shape, lay_out
from roll.distributed.strategy.megatron.scores import VocabularyScorer, VocabularyShare
from roll.distributed.strategy.megatron.substitutes import CoreAttention
from roll.models.megatron.config import megatron_config
from tests.support.harness import make_batch, make_groups
from tests.support.ranks import run_ranks

IDS, ROWS, WIDTH, TOKENS = 7, 4, 5, 6
KL = DivergenceConfig(kd_objective="forward_kl")


def made(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


GIVEN = Given({"teacher_hidden_TH": made(TOKENS, WIDTH, seed=4)})


def needs(shared: int, start: int, count: int) -> list[Quantity]:
    layer = OutputLayer(made(IDS + 2, WIDTH, seed=3)).rows(start, count)
    divergence = Divergence(KL, 1.0, "teacher", IDS, layer=layer)
    return [logprobs, entropy, top1, prob_square_sum, TopTokens(2, shared), divergence]


def scores(shared: int) -> dict[str, Tensor]:
    """On one device; of top tokens those of the ``shared`` first ids."""
    hidden, target = made(TOKENS, WIDTH, seed=1), torch.zeros(TOKENS, dtype=torch.int64)
    all_logprobs = (hidden @ made(IDS, WIDTH, seed=2).T).log_softmax(-1)
    options: dict[str, Any] = {"temperature": 1.0, "read": None, "given": GIVEN}
    p = Distribution(all_logprobs, target, hidden, WholeVocabulary(), **options)
    return {name: column for quantity in needs(shared, 0, IDS) for name, column in quantity(p).items()}


def rank_main(rank: int) -> dict[int, dict[str, Tensor]]:
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=30))
    group = dist.group.WORLD
    share = VocabularyShare(IDS, rank * ROWS, group)
    weight = torch.nn.functional.pad(made(IDS, WIDTH, seed=2), (0, 0, 0, 1))[rank * ROWS : (rank + 1) * ROWS]
    found = {}
    for shared in (IDS, IDS - 2):
        scorer = VocabularyScorer(share, 1.0, needs(shared, rank * ROWS, ROWS))
        told = scorer(weight, made(TOKENS, WIDTH, seed=1), torch.zeros(TOKENS, dtype=torch.int64), GIVEN)
        found[shared] = {name: tensor.clone() for name, tensor in told.items()}
    return found


@pytest.mark.timeout(120)
def test_ranks_with_and_without_padding_tell_the_same():
    for told in run_ranks(rank_main, 2):
        for shared, found in told.items():
            expected = scores(shared)
            assert len(expected) == 8 and found.keys() == expected.keys()
            for name, column in expected.items():
                torch.testing.assert_close(found[name], column)


HEADS, KEY_HEADS, HIDDEN_WIDTH = 4, 2, 8


@pytest.mark.parametrize("packing", [False, True])
def test_a_row_is_shorter_than_its_sequences_and_padded_for_tensor_parallel_ranks(packing):
    groups = make_groups(0)
    found = lay_out(groups, rounding := Rounding(1, packing, 8, 0, 1, sharing=True))
    rows, columns = found.input_ids_RS.shape
    assert (rows, columns) == grid_shape(groups, rounding)
    assert rows == 1 and columns % 8 == 0 and columns < 0.8 * groups.num_tokens
    assert found.input_ids_RS[0, found.source_K].equal(groups.tokens_T[found.token_K - 1])
    assert found.planned is not None
    assert found.planned.positions_C[found.source_K].equal(groups.positions_T[found.token_K - 1])
    wider = lay_out(groups, rounding, (1, columns + 16))
    assert wider.input_ids_RS.shape == (1, columns + 16)
    assert wider.input_ids_RS[0, wider.source_K].equal(found.input_ids_RS[0, found.source_K])


def test_what_does_not_share_enough_stays_a_rectangle():
    batch = make_batch(0)
    assert lay_out(batch, Rounding(1, False, 1, 0, 1, sharing=True)).planned is None


def test_attention_by_the_plan_is_that_of_the_sequences():
    groups = make_groups(0)
    config = SimpleNamespace(window_size=None, window_attn_skip_freq=None, softmax_type="vanilla")
    attention = CoreAttention(config, 1, SimpleNamespace(cp=SimpleNamespace(size=lambda: 1)))
    plain, shared = (lay_out(groups, Rounding(1, False, 4, 0, 1, sharing=sharing)) for sharing in (False, True))
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(2, 61, heads, HIDDEN_WIDTH, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]

    def attended(ids_RS: Tensor, positions_RS: Tensor, source_K: Tensor, params: object) -> Tensor:
        states = [token[ids_RS.T] + place[positions_RS.T % 61] for token, place in tables]
        found: Tensor = attention(*states, packed_seq_params=params).flatten(0, 1).index_select(0, source_K)
        return found

    rows, columns = plain.input_ids_RS.shape
    expected = attended(plain.input_ids_RS, torch.arange(columns).expand(rows, -1), plain.source_K, None)
    assert shared.planned is not None
    found = attended(shared.input_ids_RS, shared.planned.positions_C[None], shared.source_K, shared.packed_seq_params())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "blockwise"])
def test_each_rank_has_as_many_tokens_as_products_in_fp8_want(recipe, tensor, context, packing):
    batch = make_batch(0)
    rows_wanted = MegatronConfig(fp8="hybrid", fp8_recipe=recipe).gemm_rows
    assert rows_wanted == {"delayed": 16, "mxfp8": 32, "blockwise": 128}[recipe]
    seen = torch.zeros(batch.num_tokens, dtype=torch.int64)
    for rank in range(context):
        rounding = Rounding(1, packing, tensor, rank, context, gemm_rows=rows_wanted)
        found = lay_out(batch, rounding)
        held = found.input_ids_RS.numel()
        assert held % tensor == 0 and held // tensor % rows_wanted == 0
        here_T = found.place_T >= 0
        grid = found.input_ids_RS.T.flatten()
        assert grid[found.place_T[here_T]].equal(batch.tokens_T[here_T])
        seen += here_T
        if packing:
            bounds = found.cumulative_lengths
            assert bounds is not None and int(bounds[-1]) == held * context
            assert bool((bounds.diff() % rounding.unit == 0).all())
    assert bool((seen == 1).all())


MIXTRAL = MixtralConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, num_key_value_heads=1)
GPT_OSS = GptOssConfig(num_hidden_layers=2, layer_types=["full_attention", "full_attention"])
DENSE = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, num_key_value_heads=1)


@pytest.mark.parametrize(
    ("config", "packages", "lora", "dtype", "groups", "lacks"),
    [
        (MIXTRAL, ["transformer_engine"], False, torch.bfloat16, True, False),
        (MIXTRAL, ["grouped_gemm"], False, torch.bfloat16, True, True),
        (MIXTRAL, [], False, torch.bfloat16, False, True),
        (MIXTRAL, [], False, torch.float32, False, False),
        (MIXTRAL, ["transformer_engine"], True, torch.bfloat16, False, False),
        (GPT_OSS, ["transformer_engine", "grouped_gemm"], False, torch.bfloat16, False, False),
        (DENSE, ["transformer_engine"], False, torch.bfloat16, False, False),
    ],
)
def test_experts_are_grouped_where_they_can_be_and_a_missing_engine_is_named(
    config, packages, lora, dtype, groups, lacks, monkeypatch
):
    """On a machine that looks like one with a GPU and some packages."""
    converted = megatron_config(config)
    context: Any = SimpleNamespace(role="actor_train", lora=object() if lora else None)
    assert not model.groups_experts(context, converted, MegatronConfig(), dtype), "not on a CPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(model, "_has", lambda package: package in packages)
    assert model.groups_experts(context, converted, MegatronConfig(), dtype) == groups
    assert not model.groups_experts(context, converted, MegatronConfig(moe_grouped_gemm=False), dtype)
    words = model.without_transformer_engine(context, converted, dtype) or ""
    assert ("actor_train: TransformerEngine is not installed" in words) == lacks
    asked = MegatronConfig(moe_grouped_gemm=True, fp8="hybrid", attention_backend="fused")
    refused = {problem.path for problem in model._machine_problems(context, converted, asked, dtype)}
    if "transformer_engine" in packages and not lora and config is not GPT_OSS:
        assert not refused
    else:
        assert refused - {"moe_grouped_gemm"} == {"fp8", "attention_backend"}
        assert ("moe_grouped_gemm" in refused) == (not groups and not packages[1:])
    assert [key for key, _ in CARD.untested(asked)] == ["fp8", "moe_grouped_gemm"]
    assert not list(CARD.untested(MegatronConfig()))
