"""Every generator gives the same completions: transformers' greedy tokens and scores, whatever runs beside them.

And after an update of weights it is the new model, and nothing of the old one shows. Both are in one file, for which
vLLM starts once.
"""

import asyncio
import contextlib
import gc
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from roll.data.requests import FinishReason, GenerateRequest, SamplingParams
from roll.distributed.strategy.base import States
from roll.distributed.weights.buckets import (
    WeightBucket,
    WeightChecksumError,
    WeightMismatchError,
    host_bytes,
    pack_buckets,
    packing_into,
)
from roll.distributed.weights.segments import SegmentPool, SegmentReader
from roll.models.tiny import make_tokenizer
from tests.support.contract import (
    MAX_RUNNING,
    SEQUENCE_LENGTH,
    assert_greedy,
    assert_scored,
    buckets_of,
    burst,
    first_token,
    forward_logprobs,
    greedy,
    greedy_oracle,
    likeliest,
    load,
    pause,
    prompts,
    requests_of,
    resume,
    staggered,
    weights_of,
)
from tests.support.probe_pair import Pair

LONG = 600  # tokens: more than an engine samples within the pauses below


@pytest.fixture(scope="module")
def oracle(model_path: Any) -> PreTrainedModel:
    return load(model_path("tied", 0))


@pytest.fixture(scope="module")
def endless(oracle: PreTrainedModel) -> np.ndarray:
    """A prompt whose greedy completion goes on for ``LONG`` tokens."""
    for prompt in prompts(40, seed=7, low=4, high=12):
        if len(greedy_oracle(oracle, prompt, 80)) == 80 and len(greedy_oracle(oracle, prompt, LONG)) == LONG:
            return prompt
    raise AssertionError("no prompt whose completion is long")


@pytest.mark.parametrize("arrive", [burst, staggered])
def test_greedy_tokens_are_those_of_transformers(engine, oracle, arrive):
    prompt_list = prompts(24, seed=1)
    completions = asyncio.run(arrive(engine, requests_of(prompt_list, temperature=0.0, max_new_tokens=24)))
    assert_greedy(completions, oracle, prompt_list, 24)
    assert_scored(completions, oracle, prompt_list)
    assert {c.finish_reason for c in completions} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.4, "top_p": 0.8},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
    ],
    ids=["plain", "cold", "nucleus", "everything"],
)
def test_logprobs_are_those_of_the_whole_distribution(engine, oracle, params):
    """Temperature counts; penalties and truncation, which a trainer does not compute again, do not."""
    prompt_list = prompts(12, seed=2)
    completions = asyncio.run(burst(engine, requests_of(prompt_list, max_new_tokens=24, seed=5, **params)))
    assert {(c.logprobs.dtype, c.token_ids.dtype) for c in completions} == {(np.dtype("float32"), np.dtype("int64"))}
    assert_scored(completions, oracle, prompt_list, params["temperature"])


def test_requests_with_different_parameters_do_not_disturb_each_other(engine, oracle):
    prompt_list = prompts(12, seed=3)
    kinds = [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3}]
    requests = [
        GenerateRequest(str(i), prompt, SamplingParams(max_new_tokens=16, seed=i, **kinds[i % 3]))
        for i, prompt in enumerate(prompt_list)
    ]
    completions = asyncio.run(burst(engine, requests))
    assert_greedy(completions[::3], oracle, prompt_list[::3], 16)
    for i, kind in enumerate(kinds):
        assert_scored(completions[i::3], oracle, prompt_list[i::3], kind["temperature"] or 1.0)


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=["top_k", "top_p", "min_p"])
def test_truncation_to_one_token_is_greedy(engine, oracle, params):
    prompt_list = prompts(6, seed=4)
    completions = asyncio.run(burst(engine, requests_of(prompt_list, max_new_tokens=12, temperature=1.0, **params)))
    assert_greedy(completions, oracle, prompt_list, 12)


def test_the_repetition_penalty_is_that_of_transformers(engine, oracle):
    prompt_list = prompts(6, seed=5)
    requests = requests_of(prompt_list, max_new_tokens=24, temperature=0.0, repetition_penalty=1.5)
    for completion, prompt in zip(asyncio.run(burst(engine, requests)), prompt_list, strict=True):
        assert completion.token_ids.tolist() == greedy_oracle(oracle, prompt, 24, repetition_penalty=1.5)


@pytest.mark.parametrize(
    ("presence", "frequency"), [(1.5, 0.0), (0.0, 1.1), (0.6, -0.3)], ids=["presence", "frequency", "both"]
)
def test_presence_and_frequency_mean_the_same_everywhere(engine, oracle, presence, frequency):
    """Oracle: transformers, with the penalties on the logits of the tokens behind the prompt."""
    prompt_list, changed = prompts(6, seed=5), 0
    sampling = {"presence_penalty": presence, "frequency_penalty": frequency}
    requests = requests_of(prompt_list, max_new_tokens=24, temperature=0.0, **sampling)
    for completion, prompt in zip(asyncio.run(burst(engine, requests)), prompt_list, strict=True):

        def penalised(ids_BT: Tensor, logits_BV: Tensor, start: int = len(prompt)) -> Tensor:
            count_V = ids_BT[0, start:].bincount(minlength=logits_BV.shape[1]).double()
            return logits_BV.double() - frequency * count_V - presence * (count_V > 0)

        expected = greedy_oracle(oracle, prompt, 24, logits_processor=LogitsProcessorList([penalised]))
        assert completion.token_ids.tolist() == expected
        changed += expected != greedy_oracle(oracle, prompt, 24)
    assert changed > 0


def test_a_first_token_is_drawn_hot_among_a_few(engine, oracle):
    """FIRE: the temperature of the first token is reported for it alone, and its own top-k bounds it alone."""
    (prompt,) = prompts(1, seed=9)
    plain = {"temperature": 0.3, "top_k": 2, "max_new_tokens": 6}
    fire = plain | {"first_token_temperature": 30.0, "first_token_top_k": 8}
    requests = [
        GenerateRequest(str(i), prompt, SamplingParams(seed=i, **(fire if i < 48 else plain))) for i in range(96)
    ]
    completions = asyncio.run(burst(engine, requests))
    found = [set(), set()]
    with torch.no_grad():
        likeliest = oracle(torch.from_numpy(prompt)[None]).logits[0, -1].topk(8).indices.tolist()
    for i, completion in enumerate(completions):
        warm, hot = (forward_logprobs(oracle, prompt, completion.token_ids, t) for t in (0.3, 30.0))
        warm[0] = hot[0] if i < 48 else warm[0]
        np.testing.assert_allclose(completion.logprobs, warm, atol=1e-4)
        found[i >= 48].add(int(completion.token_ids[0]))
    assert found[0] == set(likeliest)  # of nearly the same probability
    assert found[1] <= set(likeliest[:2])


def test_a_seed_gives_the_same_tokens_whenever_the_request_arrives(engine):
    prompt_list = prompts(16, seed=6)
    requests = requests_of(prompt_list, first_seed=100, max_new_tokens=32)
    together = asyncio.run(burst(engine, requests))
    one_by_one = asyncio.run(staggered(engine, requests))
    for left, right in zip(together, one_by_one, strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist()
    same_prompt = asyncio.run(burst(engine, requests_of(prompt_list[:1] * 4, first_seed=0)))
    assert len({tuple(c.token_ids) for c in same_prompt}) == 4


def test_equal_prompts_differ_with_the_largest_seeds_and_without_one(engine, oracle):
    (prompt,) = prompts(1, seed=8)
    several = asyncio.run(burst(engine, requests_of([prompt] * 5, first_seed=2**64 - 5, max_new_tokens=20)))
    assert len({tuple(c.token_ids) for c in several}) == 5
    assert_scored(several, oracle, [prompt] * 5)
    completions = asyncio.run(burst(engine, requests_of([prompts(1, seed=9)[0]] * 4, max_new_tokens=20)))
    assert len({tuple(c.token_ids) for c in completions}) == 4


def test_stop_strings_end_a_completion_and_stay_in_it(engine, oracle):
    tokenizer = make_tokenizer()
    found = 0
    for random_prompt in prompts(12, seed=10):
        # As text ends: vllm decodes on from the prompt, and half a character there would bring old text with it.
        prompt = np.append(random_prompt, tokenizer.convert_tokens_to_ids("assistant\n"))
        tokens = greedy_oracle(oracle, prompt, 24)
        for last in range(4, len(tokens) - 1):
            text = tokenizer.decode(tokens[last : last + 1])
            before = tokenizer.decode(tokens[:last])
            if "�" not in text and text.strip() == text and text and text not in before:
                break
        else:
            continue
        found += 1
        request = GenerateRequest("s", prompt, SamplingParams(max_new_tokens=24, temperature=0.0, stop=("∞∞", text)))
        completion = asyncio.run(engine.generate(request))
        assert completion.token_ids.tolist() == tokens[: last + 1]
        assert len(completion.logprobs) == last + 1
        assert completion.finish_reason is FinishReason.STOP
    assert found >= 3


def test_a_special_token_can_be_a_stop_string(engine, oracle):
    tokenizer = make_tokenizer()
    specials = {i: tokenizer.decode([i]) for i in tokenizer.all_special_ids if i != tokenizer.eos_token_id}
    stop = tuple(specials.values())
    requests = requests_of(prompts(64, seed=11), max_new_tokens=64, temperature=2.0, seed=1, stop=stop)
    for completion in asyncio.run(burst(engine, requests)):
        tokens = completion.token_ids.tolist()
        assert not specials.keys() & set(tokens[:-1])
        if tokens[-1] in specials:
            assert completion.finish_reason is FinishReason.STOP


def test_no_token_ends_an_answer_that_ignores_the_end(engine, oracle):
    prompt_list = prompts(12, seed=1)
    usual, on = (
        asyncio.run(burst(engine, requests_of(prompt_list, temperature=0.0, max_new_tokens=24, ignore_eos=ignores)))
        for ignores in (False, True)
    )
    assert any(completion.finish_reason is FinishReason.STOP for completion in usual)
    assert_scored(on, oracle, prompt_list)
    for short, long in zip(usual, on, strict=True):
        assert (len(long.token_ids), long.finish_reason) == (24, FinishReason.LENGTH)
        assert long.token_ids[: len(short.token_ids)].tolist() == short.token_ids.tolist()


def test_the_context_bounds_a_completion(engine, oracle, endless):
    tail = np.array(greedy_oracle(oracle, endless, 1))
    prompt = np.concatenate([np.resize(endless, SEQUENCE_LENGTH - 4), tail])
    completion = asyncio.run(engine.generate(GenerateRequest("c", prompt, SamplingParams(temperature=0.0, seed=1))))
    assert completion.token_ids.tolist() == greedy_oracle(oracle, prompt, 3)


async def test_abort_gives_the_tokens_so_far(engine, oracle, endless):
    request = GenerateRequest("a", endless, SamplingParams(max_new_tokens=LONG, temperature=0.0))
    other = requests_of(prompts(3, seed=12), max_new_tokens=40, temperature=0.0)
    task, others = asyncio.create_task(engine.generate(request)), asyncio.create_task(burst(engine, other))
    await asyncio.sleep(0.15)
    await engine.abort("a")
    await engine.abort("unknown")
    completion = await asyncio.wait_for(task, 10)
    assert completion.finish_reason is FinishReason.ABORT
    assert 0 < len(completion.token_ids) < LONG
    assert len(completion.logprobs) == len(completion.token_ids)
    assert completion.token_ids.tolist() == likeliest(oracle, endless, completion.token_ids)
    assert_greedy(await others, oracle, [r.prompt_ids for r in other], 40)


async def test_abort_ends_a_request_even_before_its_first_token(engine, endless):
    await pause(engine)
    task = asyncio.create_task(engine.generate(GenerateRequest("a", endless)))
    await asyncio.sleep(0)
    await engine.abort("a")
    try:
        completion = await asyncio.wait_for(task, 10)
    finally:
        await resume(engine)
    assert completion.finish_reason is FinishReason.ABORT
    assert len(completion.token_ids) == len(completion.logprobs) == 0


async def test_a_cancelled_caller_aborts_its_request(engine, endless):
    request = GenerateRequest("x", endless, SamplingParams(max_new_tokens=LONG, temperature=0.0))
    task = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0.1)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    for _ in range(50):  # the engine gets to know of it a little later
        with contextlib.suppress(ValueError):
            await engine.generate(GenerateRequest("x", endless, SamplingParams(max_new_tokens=2)))
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the request's id is still in flight")


async def test_requests_in_flight_wait_while_paused(engine, oracle, endless):
    prompt_list = [endless, *prompts(3, seed=13)]
    requests = requests_of(prompt_list, max_new_tokens=200, temperature=0.0)

    tasks = [asyncio.create_task(engine.generate(request)) for request in requests[:1]]
    await asyncio.sleep(0.05)
    await pause(engine)
    await pause(engine)  # twice is as good as once
    tasks += [asyncio.create_task(engine.generate(request)) for request in requests[1:]]
    await asyncio.sleep(0.4)
    done = [task.done() for task in tasks]
    await resume(engine)
    completions = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert not any(done)
    assert_greedy(completions, oracle, prompt_list, 200)


BAD = {
    "an empty prompt": (np.array([], dtype=np.int64), {}),
    "a prompt in two dimensions": (np.zeros((1, 3), dtype=np.int64), {}),
    "a prompt as long as the context": (np.zeros(SEQUENCE_LENGTH, dtype=np.int64), {}),
    "a token outside the vocabulary": (np.array([10**6]), {}),
    "a negative token": (np.array([-1]), {}),
    "no token wanted": (np.array([1]), {"max_new_tokens": 0}),
    "a presence penalty beyond 2": (np.array([1]), {"presence_penalty": 2.5}),
    "a negative temperature": (np.array([1]), {"temperature": -0.1}),
    "a temperature that float32 does not have": (np.array([1]), {"temperature": 1e-46}),
    "one that logits are too large for": (np.array([1]), {"temperature": 1e-40}),
    "a first token's": (np.array([1]), {"first_token_temperature": 1e-46}),
    "top_p of zero": (np.array([1]), {"top_p": 0.0}),
    "a min_p above 1": (np.array([1]), {"min_p": 1.1}),
    "a penalty of zero": (np.array([1]), {"repetition_penalty": 0.0}),
    "an empty stop string": (np.array([1]), {"stop": ("",)}),
}


async def test_bad_requests_are_refused_and_hurt_nobody(engine, oracle):
    prompt_list = prompts(4, seed=14)
    good = asyncio.create_task(burst(engine, requests_of(prompt_list, max_new_tokens=40, temperature=0.0)))
    await asyncio.sleep(0.01)
    for what, (prompt, params) in BAD.items():
        with pytest.raises(ValueError, match=r"request 'bad': .*expected"):
            await engine.generate(GenerateRequest("bad", prompt, SamplingParams(**params)))
            pytest.fail(what)
    assert_greedy(await good, oracle, prompt_list, 40)


async def test_a_request_id_is_unique_among_those_in_flight(engine, endless):
    request = GenerateRequest("twin", endless, SamplingParams(max_new_tokens=LONG, temperature=0.0))

    first = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0.05)
    with pytest.raises(ValueError, match="'twin' is in flight"):
        await engine.generate(request)
    await engine.abort("twin")
    await first


async def test_requests_wait_while_the_weights_are_away(engine, oracle, endless):
    prompt_list = [endless, *prompts(2, seed=15)]
    requests = requests_of(prompt_list, max_new_tokens=150, temperature=0.0)

    tasks = [asyncio.create_task(engine.generate(requests[0]))]
    await asyncio.sleep(0.05)
    engine.offload(States.OPTIMIZER)  # a generator has none
    engine.offload(States.ALL)
    tasks += [asyncio.create_task(engine.generate(request)) for request in requests[1:]]
    await asyncio.sleep(0.3)
    done = [task.done() for task in tasks]
    engine.onload(States.WEIGHTS)  # enough for an update, not for a request
    await asyncio.sleep(0.2)
    done += [task.done() for task in tasks]
    engine.onload(States.ALL)
    engine.offload(States.CACHE)
    done += [task.done() for task in tasks[:1]]
    engine.onload(States.CACHE)
    completions = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert not any(done)
    assert_greedy(completions, oracle, prompt_list, 150)


def test_stats_count_tokens_and_requests(engine):
    before = engine.stats()
    prompt_list = prompts(5, seed=16, low=70, high=90)
    completions = asyncio.run(burst(engine, requests_of([*prompt_list, *prompt_list], max_new_tokens=8)))
    gained = {name: value - before[name] for name, value in engine.stats().items()}
    assert gained["finished"] == 10
    assert gained["generated_tokens"] == sum(len(c.token_ids) for c in completions)
    computed = gained["prefill_tokens"] + gained["shared_tokens"]
    assert 0.9 * 2 * sum(map(len, prompt_list)) < computed <= 2 * sum(map(len, prompt_list))
    assert all(isinstance(value, float) for value in engine.stats().values())


def test_seeded_prompts_beyond_one_steps_budget_all_finish(engine):
    prompt_list = prompts(40, seed=31, low=200, high=300)  # 10,000 tokens at once
    completions = asyncio.run(burst(engine, requests_of(prompt_list, first_seed=0, max_new_tokens=2)))
    assert all(len(completion.token_ids) > 0 for completion in completions)


def test_a_greedy_request_has_no_hot_first_token(engine, oracle):
    """Whoever is in the batch: agents may ask for temperature 0 where a run begins its answers hot."""
    prompt_list = prompts(8, seed=9)
    fire = {"first_token_temperature": 30.0, "first_token_top_k": 8, "max_new_tokens": 6, "seed": 5}
    sampling = [SamplingParams(temperature=float(i % 2), **fire) for i in range(8)]
    for requests in (range(8), range(0, 8, 2)):
        asked = [GenerateRequest(str(i), prompt_list[i], sampling[i]) for i in requests]
        found = dict(zip(requests, asyncio.run(burst(engine, asked)), strict=True))
        cold = [found[i] for i in range(0, 8, 2)]
        assert_greedy(cold, oracle, prompt_list[::2], 6)
        assert_scored(cold, oracle, prompt_list[::2])


def test_a_top_k_beyond_the_vocabulary_keeps_everything(engine):
    (prompt,) = prompts(1, seed=9)
    for most in (837, 838, 2**31, 2**70):
        kept = [{"top_k": most}, {"first_token_top_k": most}, {"top_k": 2, "first_token_top_k": most}]
        sampling = [SamplingParams(max_new_tokens=1, seed=3, **each) for each in kept]
        requests = [GenerateRequest(str(i), prompt, params) for i, params in enumerate(sampling)]
        assert len({int(c.token_ids[0]) for c in asyncio.run(burst(engine, requests))}) == 1


# ---- updates of weights


@pytest.fixture(scope="module")
def new(model_path: Any) -> PreTrainedModel:
    return load(model_path("tied", 1))


@pytest.fixture
def fresh(engine: Any, oracle: PreTrainedModel) -> Iterator[Any]:
    """The engine with its first weights, before and after."""
    yield engine
    asyncio.run(resume(engine))
    asyncio.run(engine.update_weights(buckets_of(weights_of(oracle)), 0))


@pytest.mark.parametrize("bucket_bytes", [1 << 10, 1 << 24], ids=["a bucket each", "one bucket"])
def test_an_update_makes_the_engine_the_new_model(fresh, oracle, new, bucket_bytes):
    prompt_list = prompts(12, seed=20, low=40, high=100)  # long enough for blocks of a prefix cache
    assert_greedy(greedy(fresh, prompt_list), oracle, prompt_list, 16)
    asyncio.run(fresh.update_weights(buckets_of(weights_of(new), bucket_bytes), 3))
    for _ in range(2):  # the second time from the cache
        completions = greedy(fresh, prompt_list)
        assert_greedy(completions, new, prompt_list, 16)
        assert {c.weight_version for c in completions} == {3} == {fresh.weight_version}
    assert_scored(completions, new, prompt_list)


def test_shared_memory_is_read_where_it_lies_and_given_back(fresh, oracle, new):
    """What is free is overwritten, so that an engine that still needs it shows."""
    prompt_list = prompts(6, seed=24, low=40, high=80)
    pool, reader = SegmentPool(), SegmentReader()

    async def shared(model: PreTrainedModel) -> AsyncIterator[WeightBucket]:
        with packing_into(pool.allocate):
            buckets = list(pack_buckets(weights_of(model).items(), 1 << 16))
        for bucket in buckets:
            segment = pool.find(bucket.data)
            pool.hand_over(segment, ["it"])
            yield replace(bucket, data=reader.read(segment.place, len(bucket.data)), place=segment.place)

    for version, model in enumerate([new, oracle, new], start=1):
        asyncio.run(fresh.update_weights(shared(model), version))
        gc.collect()
        pool.release(reader.take_released(), "it")
        lives_there = fresh.name == "hf_infer" and not torch.cuda.is_available()
        assert bool(reader.holding) is lives_there, "on a CPU its weights are what it is sent"
        size = len(pool.ids)
        while len(pool.ids) == size:
            pool.find(pool.allocate(1)).array.fill(255)
        pool.abandon_unwritten()
        assert_greedy(greedy(fresh, prompt_list), model, prompt_list, 16)


def test_weights_are_cast_to_the_engines_dtype(fresh, new):
    prompt_list = prompts(4, seed=22)
    weights = {name: tensor.bfloat16() for name, tensor in weights_of(new).items()}
    asyncio.run(fresh.update_weights(buckets_of(weights), 1))
    rounded = load(new.name_or_path).bfloat16().float()
    assert_greedy(greedy(fresh, prompt_list), rounded, prompt_list, 16)


@pytest.mark.parametrize("recompute", [False, True], ids=["stale", "recomputed"])
async def test_requests_in_flight_go_on(fresh, oracle, new, recompute):
    prompt_list = prompts(30, seed=23, low=40, high=60)
    running = [*itertools.islice((p for p in prompt_list if len(greedy_oracle(oracle, p, 100)) == 100), 2)]
    assert running

    requests = requests_of(running, temperature=0.0, max_new_tokens=400)
    tasks = [asyncio.create_task(fresh.generate(request)) for request in requests]
    await first_token(fresh)
    await fresh.update_weights(buckets_of(weights_of(new)), 5, recompute_kv=recompute)
    later = await fresh.generate(
        GenerateRequest("later", running[0], SamplingParams(temperature=0.0, max_new_tokens=16))
    )
    completions = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert_greedy([later], new, running[:1], 16)
    assert later.weight_version == 5
    for completion, prompt in zip(completions, running, strict=True):
        tokens, versions = completion.token_ids.tolist(), completion.versions.tolist()
        switch = versions.count(0)
        assert 0 < switch < len(tokens), "begun with the old weights, ended with the new ones"
        assert versions == [0] * switch + [5] * (len(tokens) - switch)
        assert tokens[:switch] == likeliest(oracle, prompt, tokens[:switch])
        if recompute:  # from there on, exactly the new model's continuation
            history = np.concatenate([prompt, completion.token_ids[:switch]])
            assert tokens[switch:] == likeliest(new, history, tokens[switch:])
            expected = forward_logprobs(new, history, completion.token_ids[switch:], 1.0)
            np.testing.assert_allclose(completion.logprobs[switch:], expected, atol=1e-5)


async def test_a_prompt_that_waited_for_a_slot_is_computed_with_the_new_weights(fresh, new):
    prompt, *others = prompts(1 + MAX_RUNNING, seed=25, low=150, high=200)

    await burst(fresh, requests_of([prompt], max_new_tokens=1))  # its keys and values may be found again
    busy = requests_of(others, max_new_tokens=250, ignore_eos=True, seed=1)
    running = asyncio.create_task(burst(fresh, busy))
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(fresh.generate(GenerateRequest("waits", prompt, SamplingParams(seed=1))))
    await asyncio.sleep(0.05)
    await fresh.update_weights(buckets_of(weights_of(new)), 7)
    assert [len(completion.token_ids) for completion in await running] == [250] * MAX_RUNNING
    completion = await waiting
    assert set(completion.versions.tolist()) == {7}
    assert_scored([completion], new, [prompt])


async def test_a_request_that_an_update_lets_begin_anew_can_be_ended(fresh, new):
    prompt_list = prompts(3, seed=26, low=40)
    requests = requests_of(prompt_list, temperature=0.0, max_new_tokens=16)

    await pause(fresh)
    task = asyncio.create_task(burst(fresh, requests))
    await asyncio.sleep(0.05)
    await fresh.update_weights(buckets_of(weights_of(new)), 2)
    await fresh.abort("0")
    await fresh.update_weights(buckets_of(weights_of(new)), 3)
    await fresh.abort("1")
    await resume(fresh)
    *ended, whole = await asyncio.wait_for(task, 60)
    assert [(len(c.token_ids), c.finish_reason) for c in ended] == [(0, FinishReason.ABORT)] * 2
    assert_greedy([whole], new, prompt_list[2:], 16)
    assert set(whole.versions.tolist()) == {3}


async def test_an_update_while_paused_leaves_the_engine_paused(fresh, new):
    prompt_list = prompts(2, seed=24, low=40)

    await pause(fresh)
    task = asyncio.create_task(burst(fresh, requests_of(prompt_list, temperature=0.0, max_new_tokens=16)))
    await asyncio.sleep(0.02)
    await fresh.update_weights(buckets_of(weights_of(new)), 2)
    await asyncio.sleep(0.2)
    done = task.done()
    await resume(fresh)
    completions = await task
    assert not done
    assert_greedy(completions, new, prompt_list, 16)
    assert {c.weight_version for c in completions} == {2}


async def damaged(weights: dict[str, Tensor]) -> AsyncIterator[WeightBucket]:
    for index, bucket in enumerate(pack_buckets(weights.items(), 40_000)):
        if index == 3:
            data = host_bytes(bucket).copy()
            data[100] ^= 1
            bucket = replace(bucket, data=data)
        yield bucket


async def broken(weights: dict[str, Tensor]) -> AsyncIterator[WeightBucket]:
    async for bucket in buckets_of(weights):
        yield bucket
        raise ConnectionError("the trainer died")


NAME, UNKNOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.9.mlp.up_proj.weight"
WRONG = {
    "a missing name": (WeightMismatchError, lambda weights: buckets_of({n: weights[n] for n in weights if n != NAME})),
    "an unknown name": (WeightMismatchError, lambda weights: buckets_of(weights | {UNKNOWN: weights[NAME]})),
    "a wrong shape": (WeightMismatchError, lambda weights: buckets_of({**weights, NAME: weights[NAME].T})),
    "nothing": (WeightMismatchError, lambda weights: buckets_of({})),
    "a damaged bucket": (WeightChecksumError, damaged),
    "a sender that fails": (ConnectionError, broken),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_update_that_goes_wrong_changes_nothing(fresh, oracle, new, kind):
    error, send = WRONG[kind]
    prompt_list = prompts(4, seed=25, low=40)
    with pytest.raises(error) as raised:
        asyncio.run(fresh.update_weights(send(weights_of(new)), 9))
    assert error is not WeightMismatchError or "the old weights stay" in str(raised.value)
    assert fresh.weight_version == 0
    assert_greedy(greedy(fresh, prompt_list), oracle, prompt_list, 16)


def test_a_probe_names_what_differs_from_the_trainer(fresh, oracle, model_path, monkeypatch):
    pair = Pair(model_path("tied", 0), fresh, temperature=1.0)
    assert not pair.causes()
    wrong = {name: weight.clone() for name, weight in weights_of(oracle).items()}
    wrong["model.layers.1.self_attn.q_proj.weight"] *= 1.2

    def has_wrong_weights():
        asyncio.run(fresh.update_weights(buckets_of(wrong), 1))
        return pair.causes()

    causes = has_wrong_weights()
    if fresh.name != "vllm":
        assert causes[0].startswith("tensors: model.layers.1.self_attn.q_proj.weight is 0.2")
    else:
        assert "since the same weights were sent again" in causes[0]
        monkeypatch.setattr(pair, "resend", lambda: None)
        causes = has_wrong_weights()
    assert "they part in model.layers.1" in causes[-1]
    pair.update()
    assert not pair.causes()
    monkeypatch.setattr(pair.trainer.weights.scorer, "temperature", 1.3)
    assert any("generator is asked for 1.3 in place of 1" in cause for cause in pair.causes())
