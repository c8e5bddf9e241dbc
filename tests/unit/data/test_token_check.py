"""Rows that grew by samples beside the same conversations tokenised at once."""

from __future__ import annotations

import numpy as np
import pytest

from roll.agentic.tools.dialects import dialect
from roll.agentic.tools.types import AssistantTurn, ToolSchema, call_id
from roll.data.columns import IntArray
from roll.data.renderer import ChatRenderer, Message, Tool
from roll.rollout.tokenization_audit import compare_tokens, first_difference
from tests.support.chat_families import FAMILIES, family_tokenizer

ADD = ToolSchema("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}}).as_openai()
ASKED: list[Message] = [{"role": "user", "content": "left or right?"}]


def encode(renderer: ChatRenderer, text: str) -> IntArray:
    return np.asarray(renderer.tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)


def grow(renderer: ChatRenderer, samples: list[str], tools: list[Tool] | None = None) -> tuple[IntArray, list[Message]]:
    """A row of samples, with a result behind each call and a question behind other words, and its messages."""
    ids, messages = renderer.prompt(ASKED, tools), list(ASKED)
    for number, sample in enumerate(samples):
        sampled = encode(renderer, sample)
        ids = np.concatenate([ids, sampled])
        turn = dialect("hermes").parse(renderer.decode_raw(sampled))
        said = turn.as_openai() if turn.calls else AssistantTurn(sample.removesuffix("<|im_end|>")).as_openai()
        messages.append(said)
        if number == len(samples) - 1:
            break
        after: Message = {"role": "user", "content": "and then?"}
        if turn.calls:
            after = {"role": "tool", "content": "3", "tool_call_id": turn.calls[0].id, "name": "add"}
        messages.append(after)
        ids = np.concatenate([ids, renderer.continuation([after], sampled, tools)])
    return ids, messages


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CASES = [
    ("qwen2_5", ["left<|im_end|>", "right<|im_end|>"], None),
    ("qwen2_5", ["left<|im_end|>", "right"], None),  # cut off
    ("qwen2_5", [CALL + "<|im_end|>", "right<|im_end|>"], None),
    ("qwen2_5", [CALL.replace('{"a": 1}', '{"a":1}') + "<|im_end|>", "right<|im_end|>"], "white space"),
    ("qwen2_5", [CALL.replace('"a": 1', '"a": 1.0e0') + "<|im_end|>", "right<|im_end|>"], "rewritten"),
    (
        "qwen3",
        ["<think>\nleft\n</think>\n\nright<|im_end|>", "<think>\nleft\n</think>\n\nright<|im_end|>"],
        "reasoning",
    ),
    ("qwen3", ["<think>\nleft\n</think>\n\nright<|im_end|>"], None),
    ("qwen3", ["right<|im_end|>"], "reasoning"),  # the template gives the answer an empty one
]


@pytest.mark.parametrize(("family", "samples", "reason"), CASES)
def test_a_difference_has_a_reason(family: str, samples: list[str], reason: str | None) -> None:
    renderer = ChatRenderer(family_tokenizer(family))
    tools = [ADD] if "<tool_call>" in samples[0] else None
    ids, messages = grow(renderer, samples, tools)
    assert compare_tokens(renderer, messages, ids, tools) == reason
    lenient = compare_tokens(renderer, messages, ids, tools, "ignore_strippable")
    assert lenient == (None if reason == "white space" else reason)
    assert compare_tokens(renderer, messages, ids, tools, "disable") is None


def test_reasoning_that_was_cut_off_is_lacking_as_any_other() -> None:
    renderer = ChatRenderer(family_tokenizer("qwen2_5"))
    after: Message = {"role": "user", "content": "and then?"}
    messages = [*ASKED]
    ids = renderer.prompt(ASKED)
    for sample, thought, words in (("<think>le", "le", ""), ("<think>up</think>right<|im_end|>", "up", "right")):
        sampled = encode(renderer, sample)
        ids = np.concatenate([ids, sampled, renderer.continuation([after], sampled)])
        messages += [{"role": "assistant", "content": words, "reasoning_content": thought}, after]
    last: Message = {"role": "assistant", "content": "", "reasoning_content": "do"}
    ids = np.concatenate([ids, encode(renderer, "<think>do")])
    assert compare_tokens(renderer, [*messages, last], ids) == "reasoning"
    messages[1] = {**messages[1], "content": "left"}
    assert compare_tokens(renderer, [*messages, last], ids) == "rewritten"


def test_the_same_text_in_other_tokens() -> None:
    renderer = ChatRenderer(family_tokenizer("qwen2_5"))
    letters = np.concatenate([encode(renderer, letter) for letter in "another answer"])
    ids = np.concatenate([renderer.prompt(ASKED), letters])
    messages = [*ASKED, {"role": "assistant", "content": "another answer"}]
    assert compare_tokens(renderer, messages, ids) == "other tokens"


@pytest.mark.parametrize("family", ["llama3_1", "mistral_nemo", "gpt_oss"])
def test_a_conversation_that_the_template_refuses_is_a_reason_too(family: str) -> None:
    renderer = ChatRenderer(family_tokenizer(family))
    results: list[Message] = [{"role": "tool", "content": text, "name": "add"} for text in ("3", "4")]
    sampled = encode(renderer, "left")
    ids = np.concatenate([renderer.prompt(ASKED, [ADD]), sampled, renderer.continuation(results, sampled, [ADD])])
    calls = [{"id": call_id(index), "function": {"name": "add", "arguments": {}}} for index in range(2)]
    said: Message = {"role": "assistant", "content": "left"} | ({"tool_calls": calls} if family == "llama3_1" else {})
    messages = [*ASKED, said, *results, {"role": "assistant", "content": "right"}]
    for check in ("strict", "ignore_strippable"):
        assert compare_tokens(renderer, messages, ids, [ADD], check) == "refused"
    trained, why = first_difference(renderer, messages, ids, [ADD])
    assert trained and why.startswith("(refused: ")


@pytest.mark.parametrize("family", FAMILIES)
def test_words_as_the_tokenizer_writes_them_differ_where_the_template_says_so(family: str) -> None:
    renderer = ChatRenderer(family_tokenizer(family))
    ids = np.concatenate([renderer.prompt(ASKED), encode(renderer, "left then right")])
    messages = [*ASKED, {"role": "assistant", "content": "left then right"}]
    reasons = {"qwen3": "reasoning", "deepseek_v3": "rewritten", "glm4_5": "reasoning", "gpt_oss": "rewritten"}
    assert compare_tokens(renderer, messages, ids) == reasons.get(family)
