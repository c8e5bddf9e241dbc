"""Edges of sampling parameters, which mean the same in every generator."""

from __future__ import annotations

import asyncio
from typing import Any

from roll.data.requests import GenerateRequest, SamplingParams
from tests.support.contract import burst, prompts


def test_a_top_k_beyond_the_vocabulary_keeps_everything(engine: Any) -> None:
    (prompt,) = prompts(1, seed=9)
    for most in (837, 838, 2**31, 2**70):
        kept = [{"top_k": most}, {"first_token_top_k": most}, {"top_k": 2, "first_token_top_k": most}]
        sampling = [SamplingParams(max_new_tokens=1, seed=3, **each) for each in kept]
        requests = [GenerateRequest(str(i), prompt, params) for i, params in enumerate(sampling)]
        assert len({int(c.token_ids[0]) for c in asyncio.run(burst(engine, requests))}) == 1
