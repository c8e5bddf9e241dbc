"""Where generation stops: what a turn of each model family ends with, with calls and without."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from roll.data.renderer import ChatRenderer, Message
from roll.data.requests import FinishReason, GenerateRequest, SamplingParams
from roll.distributed.strategy.generation.model_outline import ModelOutline, stop_token_ids
from tests.support.chat_families import ADD_CALL, ADD_RESULT, ADD_TOOL, FAMILIES, MARKS, family_tokenizer
from tests.support.contract import burst, context_of, requests_of, started
from tests.support.families import tiny_config

# Besides the mark of a turn and the tokenizer's end, a token with which a call ends or the next turn begins.
MORE = {"glm4_5": {"<|observation|>"}, "gpt_oss": {"<|call|>"}}  # <|end|> stands between a thought and an answer
STOPS = {name: {MARKS[name], family.eos, *MORE.get(name, ())} for name, family in FAMILIES.items()}
ASKED: list[Message] = [{"role": "user", "content": "1+1?"}]
CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [ADD_CALL]}
SAID: Message = {"role": "assistant", "content": "left", "reasoning_content": "right", "thinking": "right"}


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_stops_where_the_template_ends_a_turn_and_where_the_generation_configuration_says(family):
    tokenizer, ends = family_tokenizer(family), FAMILIES[family].ends.split()
    stated = GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids(ends))
    for defaults, more in ((None, []), (stated, ends)):
        found = stop_token_ids(defaults, tokenizer, "native")
        assert set(tokenizer.convert_ids_to_tokens(found)) == {*more, *STOPS[family]}


@pytest.mark.parametrize("family", ["llama3_1", "qwen2_5", "phi3"])
def test_vllm_and_sglang_get_them_from_the_folder(family, tmp_path):
    random_model(tmp_path, family, states=True)
    tokenizer, ends = family_tokenizer(family), FAMILIES[family].ends.split()
    outline = ModelOutline(context_of("vllm", str(tmp_path), sequence_length=256))
    assert set(tokenizer.convert_ids_to_tokens(outline.stop_ids)) == {*ends, *STOPS[family]}


@pytest.mark.parametrize("kind", ["call", "answer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_as_the_template_writes_it_has_its_first_stop_at_its_end(family, kind):
    renderer = ChatRenderer(family_tokenizer(family))
    turn, after, tools, word = (
        (CALLED, ADD_RESULT, [ADD_TOOL], "add") if kind == "call" else (SAID, ASKED[0], None, "left")
    )
    prompt, whole = renderer.prompt(ASKED, tools).tolist(), renderer.history([*ASKED, turn], tools)
    same = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    said = [*whole[same:].tolist(), *renderer.continuation([after], whole, tools).tolist()]
    first = next(index for index, token in enumerate(said) if token in renderer.stops)
    assert word in renderer.tokenizer.decode(said[:first]), "the turn is whole"
    assert word not in renderer.tokenizer.decode(said[first:]).replace("functions.add", ""), "and behind it is none"


def random_model(path: Path, family: str, *, states: bool) -> None:
    """A model whose generation configuration may state the family's ends."""
    tokenizer = family_tokenizer(family)
    torch.manual_seed(0)
    config = tiny_config("qwen2", vocab_size=len(tokenizer), num_hidden_layers=1, eos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    if states:
        ends = tokenizer.convert_tokens_to_ids(FAMILIES[family].ends.split())
        GenerationConfig(eos_token_id=ends).save_pretrained(path)


@pytest.mark.parametrize(("family", "states"), [("glm4_5", False), ("gpt_oss", False), ("llama3_1", True)])
async def test_an_engine_stops_there_without_being_told(family, states, tmp_path):
    random_model(tmp_path, family, states=states)
    tokenizer = family_tokenizer(family)
    ends = STOPS[family] | (set(FAMILIES[family].ends.split()) if states else set())
    stops = set(tokenizer.convert_tokens_to_ids(sorted(ends)))
    requests = requests_of([np.array([n]) for n in range(24)], first_seed=0, max_new_tokens=200)
    endless = SamplingParams(max_new_tokens=200, seed=0, ignore_eos=True)
    with started("hf_infer", tmp_path, sequence_length=256) as engine:
        *completions, on_and_on = await burst(engine, [*requests, GenerateRequest("endless", np.array([0]), endless)])
    ended_by = set()
    for completion in completions:
        ids = completion.token_ids.tolist()
        assert not stops.intersection(ids[:-1])
        if completion.finish_reason is FinishReason.STOP:
            ended_by.add(ids[-1])
    assert ended_by == stops
    assert len(on_and_on.token_ids) == 200 and on_and_on.finish_reason is FinishReason.LENGTH
