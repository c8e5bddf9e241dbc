"""A model beside a teacher of another size and width equals what the full logits of both say in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, PreTrainedModel, Qwen2Config

import roll.models.scoring as scoring
from roll.algorithms.quantities import (
    BASIC,
    Distribution,
    Divergence,
    Given,
    KlToReference,
    OutputLayer,
    Quantity,
    TopTokens,
    WholeVocabulary,
    asked_of,
    hidden_states,
    logprobs,
)
from roll.configs.divergence import DivergenceConfig
from roll.data.batch import Batch
from roll.data.packing import packed_row, rectangle
from roll.models.heads import load_teacher_layer
from roll.models.scoring import TokenScorer, score_batch, score_input

SIZES: dict[str, Any] = {
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}
STUDENT = Qwen2Config(**SIZES, vocab_size=37, hidden_size=16)
TEACHERS = {
    "same ids": Qwen2Config(**SIZES, vocab_size=37, hidden_size=24, tie_word_embeddings=True),
    "more ids": Qwen2Config(**SIZES, vocab_size=40, hidden_size=24, tie_word_embeddings=False),
    "fewer ids, soft cap": Gemma2Config(
        **SIZES, vocab_size=35, hidden_size=24, head_dim=8, final_logit_softcapping=2.0
    ),
}
KL = DivergenceConfig(kd_objective="forward_kl")
JSD = DivergenceConfig(kd_objective="js_divergence", jsd_beta=0.3)


def make(config: Any, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 12, (7,), generator=generator)
    num_tokens = int(lengths.sum())
    batch = Batch(lengths, torch.randint(0, 35, (num_tokens,), generator=generator), torch.zeros(num_tokens).bool())
    return batch.replace(loss_mask_T=(torch.rand(num_tokens, generator=generator) < 0.6) & (batch.positions_T > 0))


def logits(model: PreTrainedModel, batch: Batch) -> list[Tensor]:
    """In front of each loss token, in float64."""
    found = []
    for row in range(batch.num_sequences):
        one = batch.select([row])
        whole = model(one.tokens_T[None], use_cache=False).logits[0].double()
        found += [whole[position - 1] for position in one.loss_mask_T.nonzero().flatten().tolist()]
    return found


def by_hand(teacher: Tensor, student: Tensor, config: DivergenceConfig) -> float:
    total = 0.0
    for t, s in zip(teacher.tolist(), student.tolist(), strict=True):
        m = 0.3 * t + 0.7 * s
        if config is KL:
            total += t * math.log(t / s)
        else:
            total += 0.3 * t * math.log(t / m) + 0.7 * s * math.log(s / m)
    return total


@torch.no_grad()
def expected(student: PreTrainedModel, teacher: PreTrainedModel, batch: Batch, config: DivergenceConfig) -> list[float]:
    """Over the ids that both have."""
    found = []
    for s, t in zip(logits(student, batch), logits(teacher, batch), strict=True):
        shared = min(len(s), len(t))
        found.append(by_hand((t[:shared] / 0.8).softmax(0), (s[:shared] / 0.8).softmax(0), config))
    return found


@torch.no_grad()
def expected_of_top(student: PreTrainedModel, teacher: PreTrainedModel, batch: Batch, top_k: int) -> list[float]:
    """The forward KL over the teacher's top tokens of those that both have, and all others as one."""
    found = []
    for s, t in zip(logits(student, batch), logits(teacher, batch), strict=True):
        shared = min(len(s), len(t))
        p, q = (t[:shared] / 0.8).softmax(0), (s / 0.8).softmax(0)
        chosen = p.argsort(descending=True)[:top_k]
        total = sum(float(p[i]) * float((p[i] / q[i]).log()) for i in chosen)
        rest_p, rest_q = (float(x.sum() - x[chosen].sum()) for x in (p, q))
        if rest_p > 1e-12:
            total += rest_p * math.log(rest_p / rest_q)
        found.append(total)
    return found


def asked(teacher: PreTrainedModel, batch: Batch, top_k: int | None) -> Batch:
    scorer = TokenScorer(
        teacher, temperature=0.8, needs=(logprobs, hidden_states if top_k is None else TopTokens(top_k, 37))
    )
    said = score_batch(scorer, batch, max_sequences=3)
    return batch.replace(
        teacher_hidden_TH=said.hidden_TH,
        teacher_ids_TK=said.top_ids_TK,
        teacher_top_TK=said.top_logprobs_TK,
        teacher_tail_T=said.tail_T,
    )


def beside(student: PreTrainedModel, teacher: Path | None, config: DivergenceConfig, num_ids: int) -> TokenScorer:
    layer = None if teacher is None else load_teacher_layer(str(teacher), torch.float32).rows(0, 37)
    divergence = Divergence(config, 0.8, None if teacher is None else str(teacher), num_ids, layer=layer)
    return TokenScorer(student, temperature=1.3, needs=(*BASIC, divergence))


@pytest.mark.parametrize("config", [KL, JSD], ids=["forward_kl", "js_divergence"])
@pytest.mark.parametrize("kind", TEACHERS)
def test_whole_distributions(kind: str, config: DivergenceConfig, tmp_path: Path) -> None:
    student, teacher, batch = make(STUDENT, 1), make(TEACHERS[kind], 2), make_batch()
    teacher.save_pretrained(tmp_path)
    num_ids = min(37, TEACHERS[kind].vocab_size)
    scores = score_batch(beside(student, tmp_path, config, num_ids), asked(teacher, batch, None), max_tokens=30)
    found = scores.divergence_T
    assert found[batch.loss_mask_T].tolist() == pytest.approx(expected(student, teacher, batch, config), abs=2e-5)
    assert not found[~batch.loss_mask_T].any()
    alone = score_batch(TokenScorer(student, temperature=1.3), batch, max_tokens=30)
    assert torch.equal(scores.logprobs_T, alone.logprobs_T), "the rest of the scores stays as it is"


@pytest.mark.parametrize("top_k", [1, 5, 37])
@pytest.mark.parametrize("kind", TEACHERS)
def test_top_tokens_and_the_rest(kind: str, top_k: int) -> None:
    student, teacher, batch = make(STUDENT, 1), make(TEACHERS[kind], 2), make_batch()
    config = DivergenceConfig(kd_objective="forward_kl", logits_topk=top_k)
    with_top = asked(teacher, batch, top_k)
    assert with_top.teacher_ids_TK.shape[1] == min(top_k, 37, TEACHERS[kind].vocab_size)
    mass = with_top.teacher_top_TK.exp().sum(1) + with_top.teacher_tail_T.exp()
    torch.testing.assert_close(mass[batch.loss_mask_T], torch.ones(int(batch.loss_mask_T.sum())))
    found = score_batch(beside(student, None, config, 37), with_top).divergence_T
    want = expected_of_top(student, teacher, batch, top_k)
    assert found[batch.loss_mask_T].tolist() == pytest.approx(want, abs=2e-5)


@pytest.mark.parametrize("top_k", [None, 4])
def test_chunks_and_layouts_give_the_same_divergence_and_gradient(
    top_k: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = make(TEACHERS["more ids"], 2)
    teacher.save_pretrained(tmp_path)
    batch, results = asked(teacher, make_batch(), top_k), []
    config = DivergenceConfig(kd_objective="reverse_kl", logits_topk=top_k)
    for budget, lay_out in ((2**25, rectangle), (37 * 12, rectangle), (2**25, packed_row)):
        monkeypatch.setattr(scoring, "MAX_CHUNK_LOGITS", budget)
        student = make(STUDENT, 1)
        scorer = beside(student, None if top_k else tmp_path, config, 37)
        found = score_input(scorer, lay_out(batch), batch.num_tokens, Given.of(batch, scorer.needs))
        found.divergence_T.sum().backward()
        results.append((found.divergence_T.detach(), student.get_input_embeddings().weight.grad))
    for divergence, gradient in results[1:]:
        torch.testing.assert_close(divergence, results[0][0], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("top_k", "columns"),
    [
        (None, [torch.ones(3, 24)]),
        (2, [torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2), torch.zeros(3)]),
    ],
    ids=["hidden", "top"],
)
def test_what_a_teacher_says_comes_to_where_the_model_runs(top_k: int | None, columns: list[Tensor]) -> None:
    """Inputs are placed by the parameters, which FSDP2 keeps in host memory with ``cpu_offload``; it moves no view."""
    config = DivergenceConfig(kd_objective="forward_kl", logits_topk=top_k)
    divergence = Divergence(config, 1.0, "teacher", layer=OutputLayer(torch.empty(37, 24, device="meta")))
    given = Given(dict(zip(divergence.reads, columns, strict=True)))
    nothing = torch.empty(3, device="meta")
    p = Distribution(
        torch.empty(3, 37, device="meta"),
        nothing,
        nothing,
        WholeVocabulary(),
        temperature=1.0,
        read=lambda hidden, layer: hidden,
        given=given,
    )
    found = divergence(p)["divergence_T"]
    assert found.device.type == "meta" and found.shape == (3,)


def test_a_model_without_the_teachers_layer_says_so() -> None:
    batch = asked(make(TEACHERS["same ids"], 2), make_batch(), None)
    with pytest.raises(ValueError, match="holds no output layer of it"):
        score_batch(TokenScorer(make(STUDENT, 1), needs=(Divergence(KL, 1.0, "teacher"),)), batch)


@pytest.mark.parametrize(("top_k", "asked"), [(None, hidden_states), (8, TopTokens(8, 30))])
def test_a_teacher_computes_what_the_policy_asks_for(top_k: int | None, asked: Quantity) -> None:
    config = DivergenceConfig(kd_objective="forward_kl", logits_topk=top_k)
    needs = (*BASIC, KlToReference(), Divergence(config, 1.0, "teacher", 30))
    assert asked_of("teacher", needs) == (logprobs, asked)
    assert asked_of("critic", needs) == (logprobs,)
