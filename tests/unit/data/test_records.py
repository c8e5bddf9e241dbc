"""Requests and completions as flat arrays: what arrives is what was sent."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data.columns import Compact, Records, compact, expand
from roll.data.requests import Completion, FinishReason, GenerateRequest, SamplingParams

PARAMS = SamplingParams(max_new_tokens=8, temperature=0.7, stop=("</answer>", "\n"))


REQUESTS = [
    GenerateRequest("a", np.array([5, 6, 7]), replace(PARAMS, seed=2**62 + 1)),
    GenerateRequest("b", np.array([], dtype=np.int64), replace(PARAMS, seed=3)),
    GenerateRequest("c", np.array([8]), replace(PARAMS, max_new_tokens=2, seed=4), ((1, 2), (3, 1))),
    GenerateRequest("d", np.array([9, 1]), PARAMS),
]
COMPLETIONS = [
    Completion(name, np.arange(n), np.linspace(-1, 0, n, dtype=np.float32), reason, np.full(n, 4))
    for name, n, reason in (("a", 3, FinishReason.STOP), ("b", 0, FinishReason.ABORT), ("c", 1, FinishReason.LENGTH))
]


def test_requests_arrive_as_they_were_also_none():
    flat = pickle.loads(pickle.dumps(Records.of(GenerateRequest, REQUESTS)))
    assert len(flat.values["params"].values) == 2, "what differs in the seed alone is sent once"
    for sent, got in zip(REQUESTS, flat, strict=True):
        np.testing.assert_array_equal(got.prompt_ids, sent.prompt_ids)
        assert got.prompt_ids.dtype == np.int64
        assert replace(got, prompt_ids=None) == replace(sent, prompt_ids=None)  # type: ignore[arg-type]
    assert list(Records.of(GenerateRequest, [])) == [] and list(Records.of(Completion, [])) == []


def test_completions_arrive_as_they_were_beside_an_empty_one_of_another_kind():
    flat = pickle.loads(pickle.dumps(Records.of(Completion, COMPLETIONS)))
    for sent, got in zip(COMPLETIONS, flat, strict=True):
        assert (got.request_id, got.finish_reason) == (sent.request_id, sent.finish_reason)
        for name in ("token_ids", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
            assert getattr(got, name).dtype == getattr(sent, name).dtype
            assert getattr(got, name).base is None, "one that is kept does not keep the others"
    strange = Completion("s", np.array([]), np.array([]), FinishReason.ABORT, np.array([]))
    first, second = Records.of(Completion, [strange, COMPLETIONS[0]])
    assert len(first.token_ids) == 0
    assert (second.token_ids.dtype, second.logprobs.dtype, second.versions.dtype) == (np.int64, np.float32, np.int64)


@pytest.mark.parametrize(
    ("least", "most", "kind"),
    [
        (-128, 127, np.int8),
        (0, 128, np.int16),
        (0, 151_935, np.int32),
        (-(2**31) - 1, 0, np.int64),
        (0, 2**31, np.int64),
    ],
)
def test_many_integers_travel_in_the_fewest_bytes_that_hold_them(least, most, kind):
    values = np.array([least, most] * 1024)
    got = pickle.loads(pickle.dumps(compact(values)))
    assert getattr(got, "values", got).dtype == kind and expand(got).dtype == np.int64
    np.testing.assert_array_equal(expand(got), values)
    assert compact(values[:9]).dtype == np.int64, "few are not worth the time"
    long = Completion("long", values, np.zeros(2048, dtype=np.float32), FinishReason.STOP, np.full(2048, 7))
    sent = Records.of(Completion, [long, *COMPLETIONS])
    assert len(sent.values["versions"].values) == 2, "equal neighbours once"
    got = next(iter(pickle.loads(pickle.dumps(sent))))
    assert got.token_ids.dtype == got.versions.dtype == np.int64
    np.testing.assert_array_equal(got.token_ids, values)


@given(st.sampled_from([np.float32, np.float64, np.int64, np.int16]), st.binary(min_size=24, max_size=24), st.data())
def test_equal_neighbours_travel_once_and_come_back_to_the_bit(kind, raw, data):
    few = np.frombuffer(raw, kind)  # NaNs and zeros of all kinds
    counts = data.draw(st.lists(st.integers(2048, 5000), min_size=len(few), max_size=len(few)))
    for values in (np.repeat(few, counts), np.repeat(few, counts) > 0):
        sent = pickle.loads(pickle.dumps(compact(values)))
        assert isinstance(sent, Compact) and len(sent.values) <= len(few)
        assert expand(sent).dtype == values.dtype and expand(sent).tobytes() == values.tobytes()


def test_what_has_no_equal_neighbours_travels_as_it_is():
    values = np.random.default_rng(0).random(4096, dtype=np.float32)
    assert compact(values) is values
