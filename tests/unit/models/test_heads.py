"""Logits of every family are those of the model's own forward pass, whatever it does after its trunk."""

import pytest
import torch
from torch import nn

from roll.algorithms.quantities import OutputLayer
from roll.data.batch import Batch
from roll.models import scoring
from roll.models.heads import OutputHead, trunk_of
from roll.models.megatron.config import megatron_config
from roll.models.own_forward import in_one_process
from roll.models.scoring import TokenScorer, score_batch
from tests.support.families import FAMILIES, tiny_config, tiny_model, with_factors

CHANGING = (
    "cohere2",
    "falcon_h1",
    "gemma2",
    "gemma3_text",
    "granite",
    "hyperclovax",
    "minicpm3",
    "nanochat",
    "recurrent_gemma",
    "roberta",
    "xlstm",
)
"""Families whose logits are not those of their output layer, each in its own way."""
PLAIN = ("gpt2", "llama4_text", "nemotron", "olmo2", "opt", "phi3", "qwen2", "qwen3_5_text")


def difference(family: str) -> float:
    """From the log-probabilities of the model's own forward pass."""
    model = tiny_model(with_factors(tiny_config(family)))
    ids = torch.randint(3, 90, (1, 25), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = OutputHead(model)(trunk_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0])
        wanted = model(input_ids=ids, use_cache=False).logits[0]
    return float((found.log_softmax(-1) - wanted.float().log_softmax(-1)).abs().max())


@pytest.mark.parametrize("family", CHANGING)
def test_a_head_that_changes_logits_is_run_as_it_is(family):
    model = tiny_model(with_factors(tiny_config(family)))
    assert not OutputHead(model).is_plain
    assert difference(family) < 1e-5


@pytest.mark.parametrize("family", PLAIN)
def test_a_head_that_is_the_output_layer_stays_it(family):
    model = tiny_model(tiny_config(family))
    assert OutputHead(model).is_plain
    assert difference(family) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_is_scored_wrong_without_a_word(family):
    try:
        model = tiny_model(with_factors(tiny_config(family)))
        model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    except Exception as error:
        pytest.skip(f"cannot be built tiny from its configuration alone: {error}")
    try:
        scorer = TokenScorer(model)
        score_batch(scorer, make_batch(), check=in_one_process(scorer))
    except ValueError as error:
        assert "own forward pass" in str(error)
        return
    assert difference(family) < 1e-5


def make_batch(lengths: tuple[int, ...] = (9, 12, 7)) -> Batch:
    tokens = torch.randint(3, 90, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    batch = Batch(torch.tensor(lengths), tokens, torch.zeros(sum(lengths)).bool())
    return batch.replace(loss_mask_T=batch.positions_T > 2)


def test_the_gradient_is_that_of_the_models_own_forward_in_chunks_too(monkeypatch):
    model = tiny_model(with_factors(tiny_config("minicpm3")))
    monkeypatch.setattr(scoring, "MAX_CHUNK_LOGITS", 5 * 96)
    ids = torch.randint(3, 90, (1, 14), generator=torch.Generator().manual_seed(0))
    gradients = []
    for own in (True, False):
        model.zero_grad()
        if own:
            logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            loss = logprobs.gather(1, ids[0, 1:, None]).sum()
        else:
            loss = TokenScorer(model)(ids, None, torch.arange(13), ids[0, 1:])["logprobs_T"].sum()
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for wanted, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["minicpm3", "hyperclovax"])
def test_a_copy_of_the_output_layer_goes_through_its_models_head(family):
    model = tiny_model(with_factors(tiny_config(family)))
    ids = torch.randint(3, 90, (1, 14), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = trunk_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
        wanted = model(input_ids=ids, use_cache=False).logits[0]
        with torch.device("meta"):
            outline = type(model)(model.config)
        weight = model.get_output_embeddings().weight
        torch.testing.assert_close(OutputLayer(weight, None, OutputHead(outline))(hidden), wanted)
        torch.testing.assert_close(OutputHead(model)(hidden, OutputLayer(weight)), wanted)


def test_a_model_without_a_trunk_of_its_own_is_refused():
    class Whole(nn.Module):
        base_model = property(lambda self: self)

        def get_output_embeddings(self) -> nn.Module:
            return nn.Linear(2, 2)

    with pytest.raises(ValueError, match="Whole has no trunk"):
        OutputHead(Whole())  # type: ignore[arg-type]


def test_an_entry_of_that_name_which_the_models_code_does_not_read_changes_nothing():
    config = tiny_config("qwen2", logit_scale=0.5, final_logit_softcapping=2.0)
    scorer, batch = TokenScorer(tiny_model(config)), make_batch()
    plain = score_batch(TokenScorer(tiny_model(tiny_config("qwen2"))), batch).logprobs_T
    assert torch.equal(score_batch(scorer, batch, check=in_one_process(scorer)).logprobs_T, plain)


@pytest.mark.parametrize("family", CHANGING)
def test_megatron_refuses_what_it_would_not_compute(family):
    with pytest.raises(ValueError, match="expected"):
        megatron_config(with_factors(tiny_config(family)))
