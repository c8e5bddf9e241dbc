"""Scores of loss tokens equal those from the model's own full logits, however the batch is cut."""

import copy
import pickle
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, GraniteConfig, PreTrainedModel, Qwen2Config

import roll.models.scoring as scoring
from roll.algorithms import quantities
from roll.algorithms.quantities import (
    BASIC,
    Distribution,
    Divergence,
    Given,
    KlToReference,
    OutputLayer,
    TopTokens,
    WholeVocabulary,
    asked_of,
    hidden_states,
    logprobs,
)
from roll.algorithms.types import TokenScores
from roll.configs.teacher import DivergenceConfig
from roll.data.batch import Batch
from roll.data.kept_sets import kept_item
from roll.data.packing import packed_row, rectangle, row_with_shared_prompts, take_micro_batch
from roll.models.heads import VALUE_HEAD_FILE, ValueHead, load_output_layer, load_value_head
from roll.models.loading import load_causal_lm
from roll.models.routing import expert_sizes
from roll.models.scoring import TokenScorer, score_batch, score_input
from roll.models.tokenizer import load_tokenizer
from tests.support import trainers
from tests.support.families import tiny_config, tiny_model
from tests.support.sizes import sizes

SMALL: dict[str, Any] = {**sizes(37, 16, 24, 2, 2, 1), "initializer_range": 0.3}
CONFIGS = {
    "qwen2": Qwen2Config(**SMALL),
    "gemma2 (soft cap)": Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0),
    "granite (scaled logits)": GraniteConfig(**SMALL, logits_scaling=4.0),
}
CUTTINGS: dict[str, dict[str, Any]] = {
    "one rectangle": {},
    "two rows": {"max_sequences": 2},
    "tokens": {"max_tokens": 20},
    "rounded": {"max_tokens": 32, "round_to": 8},
    "packed": {"packing": True, "max_tokens": 20},
}


def make_model(config: Any = CONFIGS["qwen2"], seed: int = 1) -> PreTrainedModel:
    return tiny_model(config, seed)


def make_batch(num_ids: int = 37) -> Batch:
    batch = trainers.make_batch(7, seed=3)
    return batch.replace(tokens_T=batch.tokens_T % num_ids)


def full_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """In front of each token, in float64, from one sequence at a time; zeros in front of a first one."""
    rows = []
    for row in range(batch.num_sequences):
        logits = model(batch.select([row]).tokens_T[None], use_cache=False).logits[0].double()
        rows += [torch.zeros_like(logits[:1]), logits[:-1]]
    return torch.cat(rows)


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_equal_those_of_the_full_logits(name):
    model, batch = make_model(CONFIGS[name]), make_batch()
    with torch.no_grad():
        expected_TV = (full_logits(model, batch) / 0.7).log_softmax(-1)
    scores = score_batch(TokenScorer(model, temperature=0.7), batch)
    alone = TokenScorer(model, temperature=0.7, needs=(quantities.prob_square_sum,))
    for found_T, expected_T in (
        (scores.logprobs_T, expected_TV.gather(1, batch.tokens_T[:, None])[:, 0]),
        (scores.entropy_T, -(expected_TV.exp() * expected_TV).sum(-1)),
        (score_batch(alone, batch).prob_square_sum_T, expected_TV.exp().square().sum(-1)),
    ):
        torch.testing.assert_close(found_T.double(), expected_T * batch.loss_mask_T, rtol=0, atol=5e-6)
        assert not found_T[~batch.loss_mask_T].any()
    assert scores.prob_square_sum_T is None


@pytest.mark.parametrize("budget", [2**25, 37 * 4])
def test_with_kept_sets_all_quantities_are_among_them(budget, monkeypatch):
    """Oracle: the model's logits in float64, cut to each token's set."""
    monkeypatch.setattr(scoring, "MAX_CHUNK_LOGITS", budget)
    model, batch, rng = make_model(), make_batch(), random.Random(0)
    sets = [sorted({token, *rng.choices(range(37), k=6)}) for token in batch.tokens_T.tolist()]
    rows = [batch.token_index([row])[1:].tolist() for row in range(batch.num_sequences)]
    batch = batch.replace(kept_I=tuple((kept_item(1, [np.array(sets[at]) for at in row]),) for row in rows))
    layer, states_TH = OutputLayer(torch.randn(37, 16)), torch.randn(batch.num_tokens, 16)
    needs = (*BASIC, KlToReference(layer=layer))
    batch = batch.replace(ref_hidden_TH=states_TH)
    scorer = TokenScorer(model, temperature=0.7, needs=needs)
    scores = score_input(scorer, rectangle(batch), batch.num_tokens, Given.of(batch, needs))
    logits_TV = full_logits(model, batch) / 0.7
    for at in batch.loss_mask_T.nonzero().flatten().tolist():
        own = logits_TV[at, sets[at]].log_softmax(-1)
        theirs = (layer.weight_VH[sets[at]].double() @ states_TH[at].double() / 0.7).log_softmax(-1)
        found = [scores.logprobs_T[at], scores.entropy_T[at], scores.kl_T[at]]
        expected = [own[sets[at].index(int(batch.tokens_T[at]))], -(own.exp() * own).sum()]
        expected.append((own.exp() * (own - theirs)).sum())
        torch.testing.assert_close(torch.stack(found).double(), torch.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cutting", CUTTINGS)
def test_scores_do_not_depend_on_the_cutting(cutting):
    scorer, batch = TokenScorer(make_model()), make_batch()
    expected = score_batch(scorer, batch)
    found = score_batch(scorer, batch, **CUTTINGS[cutting])
    torch.testing.assert_close(found.logprobs_T, expected.logprobs_T, rtol=0, atol=2e-6)
    torch.testing.assert_close(found.entropy_T, expected.entropy_T, rtol=0, atol=2e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_sequences_see_only_themselves(attention):
    model, batch = make_model(), make_batch()
    model.set_attn_implementation(attention)
    scorer = TokenScorer(model)
    middle = batch.token_index([3])
    tokens = batch.tokens_T.clone()
    tokens[middle] = (tokens[middle] + 5) % 37
    before, after = (score_input(scorer, packed_row(b), b.num_tokens) for b in (batch, batch.replace(tokens_T=tokens)))
    others = torch.ones(batch.num_tokens).bool()
    others[middle] = False
    assert torch.equal(before.logprobs_T[others], after.logprobs_T[others])
    assert not torch.equal(before.logprobs_T[middle], after.logprobs_T[middle])


def test_temperature_zero_scores_as_temperature_one():
    model, batch = make_model(), make_batch()
    greedy, plain = (score_batch(TokenScorer(model, temperature=t), batch) for t in (0.0, 1.0))
    assert torch.equal(greedy.logprobs_T, plain.logprobs_T)


def test_chunked_output_layer_gives_the_same_scores_and_gradient(monkeypatch):
    batch, results = make_batch(), []
    for budget in (2**25, 37 * 4):
        monkeypatch.setattr(scoring, "MAX_CHUNK_LOGITS", budget)
        model = make_model()
        scores = score_input(TokenScorer(model), rectangle(batch), batch.num_tokens)
        (scores.logprobs_T.sum() - 0.1 * scores.entropy_T.square().sum()).backward()
        results.append([scores.logprobs_T, scores.entropy_T, *(p.grad for p in model.parameters())])
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)


def test_gradient_of_many_chunks_is_as_precise_in_bf16_as_that_of_one(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weight_VH = 0.05 * torch.randn(1024, 64, generator=generator)
    hidden_KH, target_K = torch.randn(1024, 64, generator=generator), torch.randint(0, 1024, (1024,))

    def score(hidden_KH: Tensor, target_K: Tensor, *others: Any) -> dict[str, Tensor]:
        logits_KV = (hidden_KH @ others[-1].T).float()
        return {"logprobs_T": -torch.nn.functional.cross_entropy(logits_KV, target_K, reduction="none")}

    def gradient(dtype: torch.dtype, number: int) -> Tensor:
        monkeypatch.setattr(scoring, "MAX_CHUNK_LOGITS", 1024 * (1024 // number))
        weight = weight_VH.bfloat16().to(dtype).requires_grad_()
        scores = scoring.in_chunks(score, 1024, hidden_KH.bfloat16().to(dtype), target_K, Given(), weight)
        for _ in range(2):  # what was added up is not counted again
            (found,) = torch.autograd.grad(scores["logprobs_T"].mean(), weight, retain_graph=True)
        return found.double()

    exact = gradient(torch.float32, 1)
    for number in (1, 8, 64):
        assert (gradient(torch.bfloat16, number) - exact).norm() < 0.003 * exact.norm()


def test_output_layer_sees_only_positions_that_predict_loss_tokens(monkeypatch):
    model, batch, seen = make_model(), make_batch(), []
    scorer = TokenScorer(model)
    head = scorer.head
    monkeypatch.setattr(scorer, "head", lambda states, layer: seen.append(len(states)) or head(states, layer))
    score_batch(scorer, batch)
    assert seen == [int(batch.loss_mask_T.sum())]


class PeakMemory(TorchDispatchMode):
    """The most bytes of new tensors that were alive at once, as seen after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self.alive:
                self.alive[key] = tensor.untyped_storage().nbytes()
                weakref.finalize(tensor.untyped_storage(), self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


@pytest.mark.parametrize("full_kl", [False, True])
def test_memory_does_not_grow_with_vocabulary_times_tokens(monkeypatch, full_kl):
    vocabulary, budget = 4000, 4000 * 64
    monkeypatch.setattr(scoring, "MAX_CHUNK_LOGITS", budget)
    model = make_model(Qwen2Config(**{**SMALL, "vocab_size": vocabulary}))
    kl = KlToReference(layer=OutputLayer(model.get_output_embeddings().weight.detach().clone()))
    scorer = TokenScorer(model, needs=(*BASIC, *[kl][:full_kl]))
    peaks = []
    for num_tokens in (256, 1024):
        hidden_KH = torch.randn(num_tokens, 16, requires_grad=True)
        given = Given({"ref_hidden_TH": torch.randn(num_tokens, 16)} if full_kl else None)
        with PeakMemory() as memory:
            scores = scorer._score(hidden_KH, torch.zeros(num_tokens, dtype=torch.int64), given)
            sum(column.sum() for column in scores.values()).backward()
        peaks.append(memory.peak)
    # All logits of the larger call would be 16 MB; some copies of one chunk (1 MB each) are held, whatever the number.
    assert peaks[1] - peaks[0] < 0.05 * 4 * vocabulary * (1024 - 256)
    assert peaks[0] < 12 * 4 * budget


def full_kl(model: PreTrainedModel, reference: PreTrainedModel, batch: Batch, temperature: float) -> Tensor:
    """KL over the vocabulary in float64, from all logits; differentiable."""
    p, q = ((full_logits(each, batch) / temperature).log_softmax(-1) for each in (model, reference))
    return (p.exp() * (p - q.detach())).sum(-1) * batch.loss_mask_T


def with_reference(model: PreTrainedModel, reference: PreTrainedModel, batch: Batch) -> tuple[TokenScorer, Batch]:
    """A scorer that knows the reference's output layer, and the batch with the reference's hidden states."""
    hidden_TH = score_batch(TokenScorer(reference, needs=(logprobs, hidden_states)), batch, max_sequences=3).hidden_TH
    layer = reference.get_output_embeddings()
    kl = KlToReference(layer=OutputLayer(layer.weight.detach(), layer.bias))
    scorer = TokenScorer(model, temperature=0.7, needs=(*BASIC, kl))
    return scorer, batch.replace(ref_hidden_TH=hidden_TH)


@pytest.mark.parametrize("name", CONFIGS)
def test_kl_over_the_vocabulary_is_that_of_the_full_logits(name):
    model, reference = make_model(CONFIGS[name]), make_model(CONFIGS[name], seed=2)
    scorer, batch = with_reference(model, reference, make_batch())
    expected = full_kl(model, reference, batch, 0.7)
    assert expected.max() > 0.01
    for cutting in CUTTINGS.values():
        found = score_batch(scorer, batch, **cutting)
        torch.testing.assert_close(found.kl_T.double(), expected.detach(), rtol=0, atol=5e-6)
    scorer, batch = with_reference(model, make_model(CONFIGS[name]), make_batch())
    assert score_batch(scorer, batch).kl_T.abs().max() < 1e-6


@pytest.mark.parametrize("budget", [2**25, 37 * 6])
def test_gradient_of_the_kl_over_the_vocabulary_is_that_of_a_direct_one(monkeypatch, budget):
    monkeypatch.setattr(scoring, "MAX_CHUNK_LOGITS", budget)
    model, reference = make_model(), make_model(seed=2)
    scorer, batch = with_reference(model, reference, make_batch())
    weights = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    scores = score_input(scorer, rectangle(batch), batch.num_tokens, Given.of(batch, scorer.needs))
    (scores.kl_T * weights).sum().backward()
    twin = make_model().double()
    (full_kl(twin, reference, batch, 0.7) * weights).sum().backward()
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert (found.grad.double() - expected.grad).norm() < 3e-5 * expected.grad.norm()


def test_hidden_states_are_kept_for_loss_tokens_alone_and_kl_needs_the_references_output_layer():
    batch = make_batch()
    scorer = TokenScorer(make_model(), needs=(logprobs, hidden_states))
    hidden_TH = score_batch(scorer, batch, packing=True).hidden_TH
    assert hidden_TH.shape == (batch.num_tokens, 16) and hidden_TH.dtype == torch.float32
    assert torch.equal(hidden_TH.any(1), batch.loss_mask_T)
    assert score_batch(scorer, batch.select([])).hidden_TH.shape == (0, 16)
    with pytest.raises(ValueError, match="kl_penalty 'full'"):
        score_batch(TokenScorer(make_model(), needs=(KlToReference(),)), batch.replace(ref_hidden_TH=hidden_TH))


def test_columns_of_any_name_travel_and_are_put_together():
    one, other = (TokenScores.of(logprobs_T=torch.tensor([x]), own_T=torch.tensor([2 * x])) for x in (1.0, 2.0))
    assert one.others.keys() == {"own_T"} and pickle.loads(pickle.dumps(one)).columns == one.columns
    places = [torch.tensor([2]), torch.tensor([0])]
    whole = TokenScores.gathered(3, places, [one, other, one])  # the last is padding
    assert whole.logprobs_T.tolist() == [2.0, 0.0, 1.0] and whole.others["own_T"].tolist() == [4.0, 0.0, 2.0]


def test_without_loss_tokens_scores_are_zero_and_without_an_output_layer_there_are_none():
    scores = score_batch(TokenScorer(make_model()), make_batch().select([]))
    assert scores.logprobs_T.shape == (0,)
    batch = make_batch()
    batch = batch.replace(loss_mask_T=torch.zeros_like(batch.loss_mask_T))
    assert not score_batch(TokenScorer(make_model()), batch).logprobs_T.any()
    with pytest.raises(ValueError, match="no output layer"):
        TokenScorer(make_model().base_model)


def test_value_of_a_token_comes_from_the_state_before_it():
    model, batch = make_model().base_model, make_batch()
    head = ValueHead(16)
    torch.nn.init.normal_(head.linear.weight)
    values = score_batch(TokenScorer(model, value_head=head), batch, max_sequences=3).values_T
    row = batch.token_index([2])
    hidden = model(batch.tokens_T[row][None], use_cache=False).last_hidden_state[0]
    expected = torch.cat([torch.zeros(1), head(hidden[:-1])]) * batch.loss_mask_T[row]
    torch.testing.assert_close(values[row], expected.detach(), rtol=0, atol=2e-6)


def test_fresh_value_head_predicts_zero_and_a_saved_one_is_found(tmp_path):
    from safetensors.torch import save_file

    assert not load_value_head(4, tmp_path)(torch.randn(3, 4)).any()
    save_file({"linear.weight": torch.ones(1, 4), "linear.bias": torch.ones(1)}, tmp_path / VALUE_HEAD_FILE)
    assert load_value_head(4, tmp_path)(torch.ones(1, 4)).item() == 5


def test_trunk_and_causal_lm_load_from_one_folder_with_other_entries_of_the_configuration(tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    loaded, trunk = (load_causal_lm(str(tmp_path), dtype=torch.float32, trunk=trunk) for trunk in (False, True))
    for name, parameter in trunk.named_parameters():
        assert torch.equal(parameter, model.get_parameter(f"model.{name}"))
        assert torch.equal(parameter, loaded.get_parameter(f"model.{name}"))
    make_model().save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), config_kwargs={"rms_norm_eps": 0.5})
    assert model.config.rms_norm_eps == 0.5
    with pytest.raises(ValueError, match="rms_norm_epsilon"):
        load_causal_lm(str(tmp_path), config_kwargs={"rms_norm_epsilon": 0.5})


def test_unusable_model_folders_are_explained(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        load_causal_lm(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_causal_lm(str(tmp_path))
    model = make_model()
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no model\.safetensors in it"):
        load_causal_lm(str(tmp_path))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no model\.safetensors in it"):
        load_causal_lm(str(tmp_path))
    with pytest.raises(ValueError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))


MIXTURES = {
    "qwen3_moe": {},
    "qwen2_moe": {},  # a shared expert
    "mixtral": {},
    "gpt_oss": {},  # weights of the logits
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    "phimoe": {},
}


def make_mixture(family: str = "qwen3_moe") -> PreTrainedModel:
    return tiny_model(tiny_config(family, vocab_size=37, num_hidden_layers=2, **MIXTURES[family]))


def scored(model: Any, batch: Batch, **options: Any) -> TokenScores:
    return score_batch(TokenScorer(copy.deepcopy(model), routes=True), batch, **options)


@pytest.mark.parametrize("family", [family for family in MIXTURES if family != "phimoe"])
def test_a_told_choice_repeats_the_scores_and_another_changes_them(family):
    model, batch = make_mixture(family), make_batch()
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
def test_what_is_told_is_what_the_routers_prefer_however_the_batch_is_cut(cutting):
    model, batch = make_mixture(), make_batch()
    expected = []
    for row in range(batch.num_sequences):
        tokens = batch.tokens_T[batch.token_index([row])][None]
        logits = model(tokens, use_cache=False, output_router_logits=True).router_logits
        expected.append(torch.cat([of_layer.topk(2).indices for of_layer in logits], dim=1))
    told = scored(model, batch, **CUTTINGS[cutting])
    assert torch.equal(told.experts_TE, torch.cat(expected).short())


def test_a_replayed_choice_holds_under_other_routers_and_trains_them():
    model, batch = make_mixture(), make_batch()
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


def test_a_shared_prompt_takes_the_experts_of_a_row_that_has_some():
    tokens = torch.tensor([1, 2, 3, 4, 1, 2, 3, 5])
    experts_TE = torch.tensor([[-1]] * 4 + [[0], [1], [2], [3]], dtype=torch.int16)
    mask_T = torch.tensor([False, False, False, True] * 2)
    batch = Batch(torch.tensor([4, 4]), tokens, mask_T, experts_TE=experts_TE)
    inputs = row_with_shared_prompts(batch)
    found: Tensor = inputs.experts_NE
    assert found[:, 0].tolist() == [0, 1, -1, -1, 2, 3]  # two shared tokens, then what each row has for itself
    assert (take_micro_batch(batch, [], 0).experts_TE == -1).all()


def test_models_and_choices_that_do_not_go_together_are_told():
    batch = make_batch()
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no layers with experts"):
        scored(make_model(), batch)
    with pytest.raises(ValueError, match="6 experts for each token, expected 2 layers x 2"):
        experts_TE = torch.zeros(batch.num_tokens, 6, dtype=torch.int16)
        scored(make_mixture(), batch.replace(experts_TE=experts_TE))
    phimoe = make_mixture("phimoe")
    assert expert_sizes(phimoe.config) == (4, 2)
    with pytest.raises(ValueError, match=r"layer 0 of this model does not choose its experts with torch\.topk"):
        scored(phimoe, batch)


STUDENT, WIDE = CONFIGS["qwen2"], {**SMALL, "hidden_size": 24}
TEACHERS = {
    "same ids": Qwen2Config(**WIDE, tie_word_embeddings=True),
    "more ids": Qwen2Config(**WIDE | {"vocab_size": 40}, tie_word_embeddings=False),
    "fewer ids, soft cap": Gemma2Config(**WIDE | {"vocab_size": 35}, head_dim=8, final_logit_softcapping=2.0),
}
KL = DivergenceConfig(kd_objective="forward_kl")
JSD = DivergenceConfig(kd_objective="js_divergence", jsd_beta=0.3)


@torch.no_grad()
def tempered(student: PreTrainedModel, teacher: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits in front of each loss token, of the student's ids and of those of the teacher that both have."""
    s, t = (full_logits(model, batch)[batch.loss_mask_T] / 0.8 for model in (student, teacher))
    return s, t[:, : s.shape[1]]


def expected(student: PreTrainedModel, teacher: PreTrainedModel, batch: Batch, config: DivergenceConfig) -> Tensor:
    """Over the ids that both have."""
    s, t = tempered(student, teacher, batch)
    s, t = s[:, : t.shape[1]].softmax(1), t.softmax(1)
    m = 0.3 * t + 0.7 * s
    if config is KL:
        return (t * (t / s).log()).sum(1)
    return (0.3 * t * (t / m).log() + 0.7 * s * (s / m).log()).sum(1)


def expected_of_top(student: PreTrainedModel, teacher: PreTrainedModel, batch: Batch, top_k: int) -> Tensor:
    """The forward KL over the teacher's top tokens of those that both have, and all others as one."""
    q, p = (logits.softmax(1) for logits in tempered(student, teacher, batch))
    chosen = p.argsort(descending=True)[:, :top_k]
    top_p, top_q = p.gather(1, chosen), q.gather(1, chosen)
    rest_p, rest_q = (1 - top.sum(1) for top in (top_p, top_q))
    of_rest = torch.where(rest_p > 1e-12, rest_p * (rest_p / rest_q).log(), 0.0)
    return (top_p * (top_p / top_q).log()).sum(1) + of_rest


def assert_expected(found_T: Tensor, batch: Batch, expected: Tensor) -> None:
    torch.testing.assert_close(found_T[batch.loss_mask_T].double(), expected, rtol=0, atol=2e-5)


def asked(teacher: PreTrainedModel, batch: Batch, top_k: int | None) -> Batch:
    needs = (logprobs, hidden_states if top_k is None else TopTokens(top_k, 37))
    said = score_batch(TokenScorer(teacher, temperature=0.8, needs=needs), batch, max_sequences=3)
    return batch.replace(
        teacher_hidden_TH=said.hidden_TH,
        teacher_ids_TK=said.top_ids_TK,
        teacher_top_TK=said.top_logprobs_TK,
        teacher_tail_T=said.tail_T,
    )


def beside(student: PreTrainedModel, teacher: Path | None, config: DivergenceConfig, num_ids: int) -> TokenScorer:
    layer = None if teacher is None else load_output_layer(str(teacher), torch.float32).rows(0, 37)
    divergence = Divergence(config, 0.8, None if teacher is None else str(teacher), num_ids, layer=layer)
    return TokenScorer(student, temperature=1.3, needs=(*BASIC, divergence))


@pytest.mark.parametrize("config", [KL, JSD], ids=["forward_kl", "js_divergence"])
@pytest.mark.parametrize("kind", TEACHERS)
def test_whole_distributions(kind, config, tmp_path):
    student, teacher, batch = make_model(STUDENT, 1), make_model(TEACHERS[kind], 2), make_batch(35)
    teacher.save_pretrained(tmp_path)
    num_ids = min(37, TEACHERS[kind].vocab_size)
    scores = score_batch(beside(student, tmp_path, config, num_ids), asked(teacher, batch, None), max_tokens=30)
    assert_expected(scores.divergence_T, batch, expected(student, teacher, batch, config))
    assert not scores.divergence_T[~batch.loss_mask_T].any()
    alone = score_batch(TokenScorer(student, temperature=1.3), batch, max_tokens=30)
    assert torch.equal(scores.logprobs_T, alone.logprobs_T), "the rest of the scores stays as it is"


@pytest.mark.parametrize("top_k", [1, 5, 37])
@pytest.mark.parametrize("kind", TEACHERS)
def test_top_tokens_and_the_rest(kind, top_k):
    student, teacher, batch = make_model(STUDENT, 1), make_model(TEACHERS[kind], 2), make_batch(35)
    config = DivergenceConfig(kd_objective="forward_kl", logits_topk=top_k)
    with_top = asked(teacher, batch, top_k)
    assert with_top.teacher_ids_TK.shape[1] == min(top_k, 37, TEACHERS[kind].vocab_size)
    mass = with_top.teacher_top_TK.exp().sum(1) + with_top.teacher_tail_T.exp()
    torch.testing.assert_close(mass[batch.loss_mask_T], torch.ones(int(batch.loss_mask_T.sum())))
    found = score_batch(beside(student, None, config, 37), with_top).divergence_T
    assert_expected(found, batch, expected_of_top(student, teacher, batch, top_k))


@pytest.mark.parametrize("top_k", [None, 4])
def test_chunks_and_layouts_give_the_same_divergence_and_gradient(top_k, tmp_path, monkeypatch):
    teacher = make_model(TEACHERS["more ids"], 2)
    teacher.save_pretrained(tmp_path)
    batch, results = asked(teacher, make_batch(35), top_k), []
    config = DivergenceConfig(kd_objective="reverse_kl", logits_topk=top_k)
    for budget, lay_out in ((2**25, rectangle), (37 * 12, rectangle), (2**25, packed_row)):
        monkeypatch.setattr(scoring, "MAX_CHUNK_LOGITS", budget)
        student = make_model(STUDENT, 1)
        scorer = beside(student, None if top_k else tmp_path, config, 37)
        found = score_input(scorer, lay_out(batch), batch.num_tokens, Given.of(batch, scorer.needs))
        found.divergence_T.sum().backward()
        results.append((found.divergence_T.detach(), student.get_input_embeddings().weight.grad))
    for divergence, gradient in results[1:]:
        torch.testing.assert_close(divergence, results[0][0], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("top_k", "columns"),
    [(None, [torch.ones(3, 24)]), (2, [torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2), torch.zeros(3)])],
    ids=["hidden", "top"],
)
def test_what_a_teacher_says_comes_to_where_the_model_runs(top_k, columns):
    """Inputs are placed by the parameters, which FSDP2 keeps in host memory with ``cpu_offload``; it moves no view."""
    config = DivergenceConfig(kd_objective="forward_kl", logits_topk=top_k)
    divergence = Divergence(config, 1.0, "teacher", layer=OutputLayer(torch.empty(37, 24, device="meta")))
    given = Given(dict(zip(divergence.reads, columns, strict=True)))
    nothing, options = torch.empty(3, device="meta"), {"temperature": 1.0, "read": lambda hidden, layer: hidden}
    p = Distribution(torch.empty(3, 37, device="meta"), nothing, nothing, WholeVocabulary(), given=given, **options)
    found = divergence(p)["divergence_T"]
    assert found.device.type == "meta" and found.shape == (3,)


def test_a_model_without_the_teachers_layer_says_so():
    batch = asked(make_model(TEACHERS["same ids"], 2), make_batch(35), None)
    with pytest.raises(ValueError, match="has no copy of its output layer"):
        score_batch(TokenScorer(make_model(STUDENT, 1), needs=(Divergence(KL, 1.0, "teacher"),)), batch)


@pytest.mark.parametrize(("top_k", "asked"), [(None, hidden_states), (8, TopTokens(8, 30))])
def test_a_teacher_computes_what_the_policy_asks_for(top_k, asked):
    config = DivergenceConfig(kd_objective="forward_kl", logits_topk=top_k)
    needs = (*BASIC, KlToReference(), Divergence(config, 1.0, "teacher", 30))
    assert asked_of("teacher", needs) == (logprobs, asked)
    assert asked_of("critic", needs) == (logprobs,)
