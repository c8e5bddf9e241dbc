"""Edges of sampling parameters, which mean the same in every generator."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from roll.data.requests import GenerateRequest, SamplingParams
from tests.support.contract import assert_greedy, burst, forward_logprobs, load, prompts


@pytest.fixture(scope="module")
def oracle(model_path: Any) -> PreTrainedModel:
    return load(model_path("tied", 0))


def test_a_greedy_request_has_no_hot_first_token(engine: Any, oracle: PreTrainedModel) -> None:
    """Whoever is in the batch: agents may ask for temperature 0 where a run begins its answers hot."""
    prompt_list = prompts(8, seed=9)
    fire = {"first_token_temperature": 30.0, "first_token_top_k": 8, "max_new_tokens": 6, "seed": 5}
    sampling = [SamplingParams(temperature=float(i % 2), **fire) for i in range(8)]
    for requests in (range(8), range(0, 8, 2)):
        asked = [GenerateRequest(str(i), prompt_list[i], sampling[i]) for i in requests]
        greedy = [(i, c) for i, c in zip(requests, asyncio.run(burst(engine, asked)), strict=True) if i % 2 == 0]
        assert_greedy([c for _, c in greedy], oracle, [prompt_list[i] for i, _ in greedy], 6)
        for i, completion in greedy:
            expected = forward_logprobs(oracle, prompt_list[i], completion.token_ids, 1.0)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_a_top_k_beyond_the_vocabulary_keeps_everything(engine: Any) -> None:
    (prompt,) = prompts(1, seed=9)
    for most in (837, 838, 2**31, 2**70):
        kept = [{"top_k": most}, {"first_token_top_k": most}, {"top_k": 2, "first_token_top_k": most}]
        sampling = [SamplingParams(max_new_tokens=1, seed=3, **each) for each in kept]
        requests = [GenerateRequest(str(i), prompt, params) for i, params in enumerate(sampling)]
        assert len({int(c.token_ids[0]) for c in asyncio.run(burst(engine, requests))}) == 1
