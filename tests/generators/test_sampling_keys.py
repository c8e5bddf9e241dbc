"""Keys of ``generating_args`` in YAML, from there to a request's parameters and to the arguments that engines get."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll.configs.loader import load_config
from roll.configs.rlvr import RLVRConfig
from roll.configs.worker import GeneratingArguments
from roll.data.requests import GenerateRequest, SamplingParams, sampling_params
from roll.distributed.strategy.sglang.strategy import Prompts as SglangPrompts
from roll.distributed.strategy.sglang.strategy import SglangStrategy
from roll.distributed.strategy.vllm.strategy import FIRST_TEMPERATURE, FIRST_TOP_K, VllmStrategy

VOCABULARY, STOPS = 99, [7, 8]
ENGINE = SimpleNamespace(
    vocab_size=VOCABULARY,
    _outline=SimpleNamespace(stop_ids=STOPS),
    _prompts=SglangPrompts(None),
    seed_of=lambda request: request.params.seed,
)
"""What the strategies read of themselves to write a request for their engine."""

BASE = """
pretrain: org/model
adv_estimator: grpo
response_length: 50
eval_only: true
val_batch_size: 1
validation: {data_args: {file_name: b.jsonl, prompt: q}}
rewards: {maths: {tag_included: [a], verifiers: [{name: gsm8k}]}}
actor_train: {training_args: {learning_rate: 1e-3}, data_args: {file_name: a.jsonl, prompt: q}}
actor_infer:
  strategy_args: {strategy_name: hf_infer}
  generating_args:
"""

CASES = {
    # The YAML; what changes of the request, of vLLM's SamplingParams, of SGLang's arguments.
    "max_new_tokens": ("20", {"max_new_tokens": 20}, {}, {}),
    "temperature": ("0.5", {"temperature": 0.5}, {"temperature": 0.5}, {"temperature": 0.5}),
    "do_sample": ("false", {"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.0}),
    "top_p": ("0.9", {"top_p": 0.9}, {"top_p": 0.9}, {"top_p": 0.9}),
    "top_k": ("5", {"top_k": 5}, {"top_k": 5}, {"top_k": 5}),
    "min_p": ("0.1", {"min_p": 0.1}, {"min_p": 0.1}, {"min_p": 0.1}),
    "first_token_temperature": (
        "9",
        {"first_token_temperature": 9.0},
        {"extra_args": {FIRST_TEMPERATURE: 9.0, FIRST_TOP_K: None}},
        {"first_token_temperature": 9.0},
    ),
    "first_token_top_k": (
        "-1",
        {"first_token_top_k": -1},
        {"extra_args": {FIRST_TEMPERATURE: None, FIRST_TOP_K: VOCABULARY}},
        {"first_token_top_k": -1},
    ),
    "ignore_eos": (
        "true",
        {"ignore_eos": True},
        {"stop_token_ids": []},  # vLLM's own ignore_eos is always on: stop_token_ids are all that end an answer
        {"ignore_eos": True, "stop_token_ids": None},
    ),
    **{f"{name}_penalty": ("1.5", *[{f"{name}_penalty": 1.5}] * 3) for name in ("repetition", "presence", "frequency")},
    "stop_strings": ("[end]", {"stop": ("end",)}, {"stop": ["end"], "detokenize": True}, {"stop": ["end"]}),
}
NO_PARAMETER = {"num_beams", "num_return_sequences"}
"""Keys that say how many answers there are."""


def request_of(folder: Path, written: str) -> GenerateRequest:
    (folder / "run.yaml").write_text(f"{BASE}    {written}\n")
    config = load_config(RLVRConfig, "run", folder)
    params = sampling_params(config.train_sampling)
    assert params == sampling_params(config.val_sampling), "held-out prompts are answered alike"
    return GenerateRequest("r", np.array([1, 2]), SamplingParams(**{**vars(params), "seed": 3}))


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in after.items() if before[key] != value}


def for_vllm(request: GenerateRequest) -> dict[str, Any]:
    sampling = VllmStrategy._sampling(ENGINE, request, 50)
    return {key: getattr(sampling, key) for key in sampling.__struct_fields__ if not key.startswith("_")}


def for_sglang(request: GenerateRequest) -> dict[str, Any]:
    _, _, _, sampling = SglangStrategy._call(ENGINE, request, "rid", 50)
    return {**sampling.pop("custom_params"), **sampling}


def test_every_key_has_a_case():
    assert CASES.keys() == GeneratingArguments.model_fields.keys() - NO_PARAMETER


@pytest.mark.parametrize("key", CASES)
def test_a_key_reaches_the_request_and_sglang(key, tmp_path):
    value, ours, _, theirs = CASES[key]
    plain, keyed = request_of(tmp_path, "{}"), request_of(tmp_path, f"{key}: {value}")
    assert changed(vars(plain.params), vars(keyed.params)) == ours
    assert changed(for_sglang(plain), for_sglang(keyed)) == theirs


def test_keys_reach_vllm(tmp_path):
    pytest.importorskip("vllm")
    plain = for_vllm(request_of(tmp_path, "{}"))
    assert plain["stop_token_ids"] == STOPS and plain["ignore_eos"]
    for key, (value, _, theirs, _) in CASES.items():
        found = changed(plain, for_vllm(request_of(tmp_path, f"{key}: {value}")))
        assert theirs.items() <= found.items() and bool(theirs) == bool(found), key
