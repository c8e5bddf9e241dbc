"""A generator tells the experts that its tokens went through, and a trainer goes through them again."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll.configs.engines import card_of
from roll.data.batch import Batch
from roll.data.requests import Completion, GenerateRequest, SamplingParams
from tests.generators.conftest import ModelPath
from tests.support.batches import batch_of
from tests.support.contract import burst, started
from tests.support.trainers import make_trainer

LAYERS, PER_TOKEN = 2, 2
PARAMS = SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True, seed=5)


@pytest.fixture(scope="module")
def answers(generator: str, model_path: ModelPath) -> Iterator[tuple[list[GenerateRequest], list[Completion]]]:
    """Requests of several lengths, two of them with one prompt, and what became of them."""
    card = card_of(generator)
    if card is None or not card.tells_experts:
        pytest.skip(f"{generator} tells no experts")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(70, 200, length) for length in (1, 9, 33, 5)]
    requests = [GenerateRequest(str(number), prompt, PARAMS) for number, prompt in enumerate([*prompts, prompts[2]])]
    with started(generator, model_path("experts", 0), router_replay="R3") as engine:
        yield requests, asyncio.run(burst(engine, requests))


def batch_from(requests: list[GenerateRequest], completions: list[Completion]) -> Batch:
    rows = [np.concatenate([r.prompt_ids, c.token_ids]) for r, c in zip(requests, completions, strict=True)]
    told = torch.from_numpy(np.concatenate([completion.experts for completion in completions]))
    return batch_of(rows, [len(request.prompt_ids) for request in requests], experts_TE=told)


def preferred(path: str, batch: Batch) -> Tensor:
    """[T, L, K]: the experts that Transformers chooses, ascending in each layer."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    found = []
    for row in range(batch.num_sequences):
        tokens = batch.tokens_T[batch.token_index([row])][None]
        with torch.no_grad():
            logits = model(tokens, use_cache=False, output_router_logits=True).router_logits
        found.append(torch.stack([of_layer.topk(PER_TOKEN).indices.sort(-1).values for of_layer in logits], dim=1))
    return torch.cat(found)


def test_each_token_but_the_last_tells_the_experts_that_it_went_through(answers, model_path):
    batch = batch_from(*answers)
    last_T = batch.positions_T == batch.lengths_B[batch.rows_T] - 1
    assert batch.experts_TE is not None and batch.experts_TE.dtype == torch.int16
    assert bool((batch.experts_TE[last_T] == -1).all())
    told = batch.experts_TE.unflatten(1, (LAYERS, PER_TOKEN)).sort(-1).values
    assert torch.equal(told[~last_T].long(), preferred(model_path("experts", 0), batch)[~last_T])


def test_a_trainer_with_other_routers_goes_through_the_generators_experts(answers, model_path):
    batch = batch_from(*answers)
    sampled = torch.from_numpy(np.concatenate([completion.logprobs for completion in answers[1]]))
    trainer = make_trainer(model_path("experts", 0), "fsdp2_train", router_replay="R3", temperature=1.0)

    def mismatch(some: Batch) -> float:
        return float((trainer.logprobs(some).logprobs_T[batch.loss_mask_T] - sampled).abs().max())

    assert mismatch(batch) < 1e-5, "equal weights"
    # Other routers choose other experts for some tokens, by which scores jump; the weights of given ones move a little.
    with torch.no_grad():
        for layer in trainer.weights.scorer.model.model.layers:
            weight = layer.mlp.gate.weight
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
            weight.add_(0.01 * noise.to(weight.device))
    free = batch.replace(experts_TE=None)
    assert mismatch(free) > 3 * mismatch(batch)
    trainer.logprobs(batch.select([2]))
    used = trainer.weights.scorer.routing.chosen_NE
    assert torch.equal(used[:-1].cpu(), batch.select([2]).experts_TE[:-1])
