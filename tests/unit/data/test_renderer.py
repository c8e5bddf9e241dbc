"""Conversations to token ids, against the tokenizer's own rendering of the whole conversation."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from roll.data.columns import IntArray
from roll.data.renderer import _SENTINEL, ChatRenderer, Message, TooManyTokensError
from roll.data.templates import TEMPLATES, ChatTemplate
from roll.models.tiny import make_tokenizer
from tests.support.chat_families import CORPUS, family_tokenizer
from tests.support.examples import examples
from tests.support.talks import SYSTEM, says, user

TOKENIZERS = {
    "tiny": make_tokenizer(),
    "qwen": family_tokenizer("qwen2_5"),
    "llama": family_tokenizer("llama3"),
}
"""The latter two have real merges, so that re-tokenising sampled ids can change them."""


def test_variables_reach_the_template_wherever_it_is_used():
    thinking, silent = (
        ChatRenderer(family_tokenizer("qwen3"), ChatTemplate("native", {"enable_thinking": value}))
        for value in (True, False)
    )
    asked = [user("left?")]
    plain = ChatRenderer(family_tokenizer("qwen3"))
    assert thinking.text(asked, open_assistant=True) == plain.text(asked, open_assistant=True)
    closed = "<think>\n\n</think>\n\n"
    for text in (
        silent.decode_raw(silent.prompt(asked)),
        silent.decode_raw(silent.prompts([asked])[0]),
        silent.decode_raw(silent.continuation(asked, silent.words("right"))),
    ):
        assert text.endswith(f"assistant\n{closed}")
    assert not plain.decode_raw(plain.prompt(asked)).endswith(closed)
    with pytest.raises(ValueError, match=r"chat_template_kwargs: .* does not use enable_thoughts"):
        ChatRenderer(family_tokenizer("qwen3"), ChatTemplate("native", {"enable_thoughts": True}))


FAMILIES = pytest.mark.parametrize("family", sorted(TOKENIZERS))
# Words whose ends a template does not trim, and which hold no chat marker.
words = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=6)
sentences = st.lists(st.one_of(words, st.sampled_from(CORPUS)), min_size=1, max_size=3).map(" ".join)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> IntArray:
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)


def whole(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> list[int]:
    """The oracle: the whole conversation in one go, tokenised by transformers."""
    return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)


@FAMILIES
@examples(30)
@given(system=st.none() | sentences, question=sentences)
def test_a_prompt_is_what_transformers_makes_of_it(family, system, question):
    tokenizer = TOKENIZERS[family]
    messages = [{"role": "system", "content": system}] if system else []
    messages.append(user(question))
    assert ChatRenderer(tokenizer).prompt(messages).tolist() == whole(tokenizer, messages)


@FAMILIES
def test_many_prompts_are_what_they_are_one_by_one(family):
    tokenizer = TOKENIZERS[family]
    renderer = ChatRenderer(tokenizer)
    conversations = [[user(text * 3)] for text in [*CORPUS, "", "Sokoban é"]]
    # What the tokenizer was last called with must not matter.
    tokenizer(["left right left"], truncation=True, max_length=3)
    many = renderer.prompts(conversations)
    assert [ids.tolist() for ids in many] == [whole(tokenizer, conversation) for conversation in conversations]
    assert all(ids.dtype == np.int64 for ids in many) and renderer.prompts([]) == []


@FAMILIES
@examples(30)
@given(turns=st.lists(st.tuples(sentences, sentences), min_size=1, max_size=4), closed=st.booleans())
def test_a_grown_conversation_is_the_whole_one(family, turns, closed):
    """Whether the answers end with the end-of-turn token or were cut off before it."""
    tokenizer = TOKENIZERS[family]
    renderer = ChatRenderer(tokenizer)
    messages = [{"role": "system", "content": "Play."}, user("Go.")]
    ids = renderer.prompt(messages)
    for answer, observation in turns:
        completion = encode(tokenizer, answer + (tokenizer.eos_token if closed else ""))
        said = [user(observation)]
        ids = np.concatenate([ids, completion, renderer.continuation(said, completion)])
        messages += [says(answer), *said]
    assert ids.tolist() == whole(tokenizer, messages)


@FAMILIES
def test_several_messages_may_follow_an_answer(family):
    tokenizer = TOKENIZERS[family]
    renderer = ChatRenderer(tokenizer)
    messages = [user("a")]
    said = [{"role": "tool", "content": "42"}, user("and now?")]
    completion = encode(tokenizer, "call" + tokenizer.eos_token)
    ids = [*renderer.prompt(messages), *completion, *renderer.continuation(said, completion)]
    assert ids == whole(tokenizer, [*messages, says("call"), *said])


def test_sampled_ids_stay_although_the_tokenizer_would_merge_them():
    tokenizer = TOKENIZERS["llama"]
    renderer = ChatRenderer(tokenizer)
    by_letter = np.concatenate([encode(tokenizer, letter) for letter in "another answer"])
    assert len(by_letter) > len(encode(tokenizer, "another answer"))
    sampled = by_letter.copy()
    history = np.concatenate([renderer.prompt([user("a")]), sampled, renderer.continuation([user("b")], sampled)])
    assert (sampled == by_letter).all()
    # The text is that of the whole conversation, only its tokens differ.
    expected = whole(tokenizer, [user("a"), says("another answer"), user("b")])
    assert tokenizer.decode(history) == tokenizer.decode(expected) and len(history) > len(expected)


def test_nothing_sampled_is_closed_too_and_words_like_the_placeholder_are_ordinary_words():
    tokenizer = TOKENIZERS["tiny"]
    renderer = ChatRenderer(tokenizer)
    added = renderer.continuation([user("b")], np.zeros(0, dtype=np.int64))
    assert tokenizer.decode(added).startswith("<|im_end|>\n<|im_start|>user\n")
    completion, said = encode(tokenizer, _SENTINEL + "!"), [user(_SENTINEL + "?")]
    ids = [*renderer.prompt(said), *completion, *renderer.continuation(said, completion)]
    assert ids == whole(tokenizer, [*said, says(_SENTINEL + "!"), *said])


def test_a_template_may_be_given_as_text_or_file(tmp_path):
    tokenizer = TOKENIZERS["qwen"]
    messages = [user("left or right")]
    inline = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    path = tmp_path / "plain.jinja"
    path.write_text(inline, encoding="utf-8")
    expected = tokenizer.encode("[user] left or right\n[assistant]", add_special_tokens=False)
    assert ChatRenderer(tokenizer, inline).prompt(messages).tolist() == expected
    assert ChatRenderer(tokenizer, str(path)).prompt(messages).tolist() == expected
    assert ChatRenderer(tokenizer).prompt(messages).tolist() == whole(tokenizer, messages)  # it is not changed
    bare = make_tokenizer()
    bare.chat_template = None
    assert bare.decode(ChatRenderer(bare, inline).prompt(messages)) == "[user] left or right\n[assistant]"


ASKED = [SYSTEM, user(" 1+1? ")]
TURNS = [*ASKED[1:], says("2"), user("Sure?")]
CHATML_ASKED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n 1+1? <|im_end|>\n<|im_start|>assistant\n"
CHATML_TURNS = (
    "<|im_start|>user\n 1+1? <|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
)
NAMED = {
    "chatml": (CHATML_ASKED, CHATML_TURNS),
    "chatml_tool_names": (CHATML_ASKED, CHATML_TURNS),
    "qwen2": (CHATML_ASKED, "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + CHATML_TURNS),
    "qwen2_5": (
        CHATML_ASKED,
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        + CHATML_TURNS,
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma": (
        "<bos><start_of_turn>user\nBe brief.\n\n1+1?<end_of_turn>\n<start_of_turn>model\n",
        "<bos><start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n"
        "<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n",
    ),
    "plain": ("Be brief. 1+1? ", " 1+1? 2Sure?"),
}
BEGINNINGS = {"llama3": "<|begin_of_text|>", "gemma": "<bos>"}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_named_template_writes_exactly_this_and_a_conversation_can_grow_under_it(name):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    if name in BEGINNINGS:
        tokenizer.add_special_tokens({"bos_token": BEGINNINGS[name]})
    renderer = ChatRenderer(tokenizer, name)
    for messages, text in zip((ASKED, TURNS), NAMED[name], strict=True):
        assert tokenizer.decode(renderer.prompt(messages)) == text
    # A system message of the conversation's own: where there is none, the family's own stands at the beginning.
    messages = [ASKED[0], *TURNS]
    sampled = encode(tokenizer, "2")
    grown = np.concatenate([renderer.prompt(messages[:2]), sampled, renderer.continuation(messages[3:], sampled)])
    assert grown.tolist() == renderer.prompt(messages).tolist()


def test_a_tokenizer_without_a_first_token_gets_none_and_decode_leaves_out_the_markers():
    tokenizer = make_tokenizer()
    assert tokenizer.bos_token is None
    assert tokenizer.decode(ChatRenderer(tokenizer, "llama3").prompt(TURNS)).startswith("<|start_header_id|>user")
    tokenizer = TOKENIZERS["llama"]
    assert ChatRenderer(tokenizer).decode(encode(tokenizer, " left , right <|eot_id|>")) == " left , right "


def test_a_missing_template_or_one_without_the_assistants_words_is_told_at_once():
    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match=r"data_args.template is 'native', but the tokenizer has no chat template"):
        ChatRenderer(bare)
    with pytest.raises(ValueError, match=r"data_args.template: 'no/such/file' is neither"):
        ChatRenderer(TOKENIZERS["tiny"], "no/such/file")
    with pytest.raises(ValueError, match=r"'qwen3' is neither .* a named template \(chatml, .*did you mean 'qwen2'\?"):
        ChatRenderer(TOKENIZERS["tiny"], "qwen3")
    renderer = ChatRenderer(
        TOKENIZERS["tiny"], "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="drops the assistant's text"):
        renderer.continuation([user("b")], np.zeros(0, dtype=np.int64))


def test_a_rendered_prompt_is_remembered_and_cannot_be_changed():
    renderer = ChatRenderer(TOKENIZERS["tiny"])
    first, second = (renderer.prompt([user("a")]) for _ in range(2))
    assert first is second
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 0


DIALOGUE = [SYSTEM, user("left"), says("another move"), user("right"), says("walks")]
# What the assistant says of DIALOGUE is in brackets.
WITH_ANSWERS = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nleft<|im_end|>\n<|im_start|>assistant\n"
    "[another move<|im_end|>]\n<|im_start|>user\nright<|im_end|>\n<|im_start|>assistant\n[walks<|im_end|>]"
)


def bracketed(renderer: ChatRenderer, ids: IntArray, mask: np.ndarray) -> str:
    """The text of the ids, what the mask is 1 on in brackets."""
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1), len(ids)]
    parts = [(renderer.tokenizer.decode(ids[a:b]), mask[a]) for a, b in itertools.pairwise(borders)]
    return "".join(f"[{text}]" if said else text for text, said in parts)


def test_what_the_assistant_says_is_marked_and_nothing_else():
    renderer = ChatRenderer(TOKENIZERS["tiny"])
    assert bracketed(renderer, *renderer.conversation(DIALOGUE)) == WITH_ANSWERS
    first, last = WITH_ANSWERS.split("[another")[0], WITH_ANSWERS.rpartition("[")[2]
    only = bracketed(renderer, *renderer.conversation(DIALOGUE, last_only=True))
    assert only.startswith(first) and only.endswith(f"[{last}") and only.count("[") == 1


def test_without_a_mark_in_the_template_an_answer_ends_with_the_end_of_the_sequence():
    """The template has no such token between turns, so neither has a row: each answer has one of its own."""
    renderer = ChatRenderer(TOKENIZERS["tiny"], "plain")
    rows = renderer.rows(DIALOGUE)
    assert [bracketed(renderer, *row) for row in rows] == [
        "Be brief.left[another move<|im_end|>]",
        "Be brief.leftanother moveright[walks<|im_end|>]",
    ]


def test_a_template_that_rewrites_earlier_turns_makes_a_row_for_each():
    forgetful = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ m.content if loop.last or m.role != 'assistant' else '…' }}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    renderer = ChatRenderer(TOKENIZERS["tiny"], forgetful)
    first, second = (bracketed(renderer, *row) for row in renderer.rows(DIALOGUE))
    assert first.endswith("<|im_start|>assistant\n[another move<|im_end|>]")
    assert "assistant\n…<|im_end|>" in second and second.endswith("<|im_start|>assistant\n[walks<|im_end|>]")
    with pytest.raises(ValueError, match="rewrites earlier turns, so the answers make 2 rows"):
        renderer.conversation(DIALOGUE)
    assert bracketed(renderer, *renderer.conversation(DIALOGUE, last_only=True)) == second


@pytest.mark.parametrize("said", ["left right ", "<|im_end|>"])
def test_a_text_of_far_too_many_tokens_is_counted_as_far_as_it_takes(said):
    renderer = ChatRenderer(TOKENIZERS["qwen"])
    messages = [user(said * 200_000)]
    with pytest.raises(TooManyTokensError) as raised:
        renderer.prompt(messages, most=10_000)
    assert 15_000 < raised.value.count < 200_000
    short = [user(said * 40)]
    ids = renderer.prompt(short).tolist()
    # Too long, but not by so much that the text need not be tokenised.
    assert ChatRenderer(TOKENIZERS["qwen"]).prompt(short, most=len(ids) - 1).tolist() == ids
