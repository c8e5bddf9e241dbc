"""What is learned of conversations, for each family of chat templates, against Transformers' own rendering.

The oracle knows nothing of the renderer: it renders the conversation up to each answer, with the answer and without, by
``apply_chat_template``, and looks at ids alone.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from jinja2 import TemplateError

from roll.data.prompt_rows import read_messages
from roll.data.renderer import ChatRenderer, Message
from roll.data.template_check import LeftOut
from roll.data.templates import ChatTemplate
from tests.support.chat_families import ADD_CALL as CALL
from tests.support.chat_families import ADD_RESULT as RESULT
from tests.support.chat_families import ADD_TOOL, FAMILIES, MARKS, family_tokenizer
from tests.support.talks import SYSTEM, says
from tests.support.talks import user as asks


def thinks(number: int, *, beside: bool) -> Message:
    thought, answer = f"reason {number}", f"left {number}"
    if beside:
        return says(answer, reasoning_content=thought)
    return says(f"<think>\n{thought}\n</think>\n\n{answer}")


CASES: dict[str, list[Message]] = {
    "single turn": [asks("where?"), says("left")],
    "several turns": [SYSTEM, asks("where?"), says("left"), asks("and then?"), says("right"), asks("?"), says("up")],
    "without a system": [asks("where?"), says("left"), asks("and then?"), says("right")],
    "inline reasoning": [asks("where?"), thinks(1, beside=False), asks("and then?"), thinks(2, beside=False)],
    "reasoning beside": [asks("where?"), thinks(1, beside=True), asks("and then?"), thinks(2, beside=True)],
    "tools": [asks("1+1?"), says("", tool_calls=[CALL]), RESULT, says("two"), asks("thanks"), says("welcome")],
    "assistant first": [says("hello"), asks("where?"), says("left")],
    "assistant alone": [says("hello")],
    "empty question": [asks(""), says("left")],
    "words with spaces": [asks(" where? "), says(" left \n"), asks("and?\n"), says("\n\nright")],
}
CALL_MARKS = {**MARKS, "glm4_5": "<|observation|>", "gpt_oss": "<|call|>"}
THINKING = "deepseek_v3_1 thinking"
NAMES = [*FAMILIES, THINKING]
"""The families, and one with a variable of its template."""


def family_of(name: str) -> str:
    return name.partition(" ")[0]


def renderer_of(name: str) -> ChatRenderer:
    return ChatRenderer(family_tokenizer(family_of(name)), ChatTemplate("native", variables(name)))


def variables(name: str) -> dict[str, bool]:
    return {"thinking": True} if name == THINKING else {}


def rendered(name: str, messages: Sequence[Message], *, opens: bool, tools: bool) -> list[int]:
    """The conversation as the family's template wants it, by what its authors document."""
    renamed = {"reasoning_content": "thinking"} if name == "gpt_oss" else {}
    return family_tokenizer(family_of(name)).apply_chat_template(
        [{renamed.get(key, key): value for key, value in message.items()} for message in messages],
        tools=[ADD_TOOL] if tools else None,
        add_generation_prompt=opens,
        tokenize=True,
        return_dict=False,
        **variables(name),
    )


def turns(name: str, messages: Sequence[Message], tools: bool) -> Iterator[tuple[list[int], list[int], int]]:
    """The prompt of each answer, the conversation with it up to its mark, and the mark."""
    tokenizer = family_tokenizer(family_of(name))
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        mark = tokenizer.convert_tokens_to_ids((CALL_MARKS if message.get("tool_calls") else MARKS)[family_of(name)])
        whole = rendered(name, messages[: index + 1], opens=False, tools=tools)
        if family_of(name) == "glm4_5":
            whole = [*whole, mark]  # what the next turn begins with
        end = len(whole) - whole[::-1].index(mark)
        prompt = rendered(name, messages[:index], opens=True, tools=tools) if index else []
        yield prompt, whole[:end], mark


def unread(name: str, case: str) -> bool:
    """Tells whether the template refuses the conversation, or knows no tools."""
    family = family_of(name)
    alternates = {"mistral_v0_3", "mistral_nemo", "mistral_small_3_2", "mixtral", "gemma2", "gemma3"}
    refuses = {"several turns": {"gemma2"}, "assistant first": {*alternates, "qwen3_5"}}
    refuses["assistant alone"] = refuses["assistant first"]
    no_calls = {name for name in FAMILIES if FAMILIES[name].dialect is None} | {"smollm3", "falcon_h1"}
    return family in refuses.get(case, ()) or (case == "tools" and family in no_calls)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_what_is_learned_is_what_the_template_writes_behind_the_prompt(name, case):
    """Ids and mask of every row equal those of the oracle, whose answers are learned once each, and in order."""
    messages, tools, renderer = CASES[case], case == "tools", renderer_of(name)
    if unread(name, case):
        if case != "tools":
            with pytest.raises(TemplateError, match=r"alternate|System role|No user query"):
                renderer.rows(messages)
        return
    opened = None
    if "<think>" in renderer.opening and "</think>" not in renderer.opening:
        opened = "<think>" if name == THINKING else "<think>\n"
    expected = list(turns(name, messages, tools))
    made = renderer.rows(messages, tools=[ADD_TOOL] if tools else None)
    spans = []
    for ids, mask in made:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
        spans += [(ids.tolist(), int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
        assert mask[-1], "a row ends with its last answer"
    assert len(spans) == len(expected)
    for (ids, start, stop), (prompt, whole, mark) in zip(spans, expected, strict=True):
        assert ids[stop - 1] == mark and mark in renderer.stops
        text = renderer.tokenizer.decode(ids[start:stop])
        if opened and prompt:  # the template writes no reasoning: see the next test
            assert ids[:start] == prompt and renderer.tokenizer.decode(prompt).endswith(opened) and "</think>" in text
            _, _, answer = renderer.tokenizer.decode(whole).rpartition(renderer.opening.removesuffix(opened))
            answer = answer.removeprefix(opened)
            assert text.rpartition("</think>")[2].lstrip() == answer.rpartition("</think>")[2].lstrip()
            continue
        if name in ("mistral_nemo", "mistral_v0_3") and case == "several turns":
            # They write the system message before the last question.
            assert ids[:start] == prompt and whole[-(stop - start) :] == ids[start:stop]
            continue
        assert ids[:stop] == whole
        assert start == len(prompt) or not prompt


OPENERS = ["qwen3_thinking_2507", "qwen3_5", "deepseek_r1", "deepseek_r1_distill", "nemotron_nano_2", "nemotron_3_nano"]
BEHIND = {(THINKING, True): "", ("nemotron_3_nano", True): "\n"}
"""White space between reasoning and answer that are given apart, where it is no empty line."""


@pytest.mark.parametrize("name", [*OPENERS, THINKING])
@pytest.mark.parametrize("beside", [False, True])
def test_behind_a_prompt_that_opens_reasoning_the_reasoning_is_learned(name, beside):
    """As the model would sample it: nothing of it is lost, though the template may have no place for it."""
    space = "" if name == THINKING else "\n"
    end = ("\n" if name == "nemotron_nano_2" else "") + MARKS[family_of(name)]
    messages = [asks("where?"), thinks(1, beside=beside), asks("and then?"), thinks(2, beside=beside)]
    renderer = renderer_of(name)
    for number, (ids, mask) in enumerate(renderer.rows(messages), 1):
        behind = BEHIND.get((name, beside), "\n\n")
        assert renderer.tokenizer.decode(ids[mask]) == f"reason {number}{space}</think>{behind}left {number}{end}"
        assert renderer.tokenizer.decode(ids[~mask]).endswith(f"<think>{space}")
    (plain,) = renderer.rows([asks("where?"), says("left")])
    space = "" if name == "nemotron_3_nano" else space  # which writes <think></think> itself
    assert renderer.tokenizer.decode(plain[0][plain[1]]) == f"{space}</think>{space * 2}left{end}"


@pytest.mark.parametrize("family", ["qwen3", "glm4_5"])
@pytest.mark.parametrize("beside", [False, True])
def test_behind_a_prompt_that_has_closed_reasoning_the_answer_alone_is_learned(family, beside):
    renderer = ChatRenderer(family_tokenizer(family), ChatTemplate("native", {"enable_thinking": False}))
    messages = [asks("where?"), thinks(1, beside=beside)]
    ((ids, mask),) = renderer.rows(messages)
    prompt = renderer.prompt(messages[:1])
    answer = "left 1<|im_end|>" if family == "qwen3" else "\nleft 1<|user|>"
    assert ids[~mask].tolist() == prompt.tolist() and renderer.tokenizer.decode(ids[mask]) == answer
    assert renderer.rows([messages[0], says("left 1")])[0][0].tolist() == ids.tolist()
    (told,) = LeftOut(renderer).of(messages, (1,), None)
    assert told.endswith(" of answers that are trained on")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_goes_on_as_a_rollout_does(family):
    """Where turns share a row it has the ids of one that was sampled and continued."""
    renderer = renderer_of(family)
    messages = [asks("where?"), says("left"), asks("and then?"), says("right")]
    rows = renderer.rows(messages)
    if len(rows) > 1:
        assert family in ("qwen3", "gpt_oss") or "<think>" in renderer.opening
        return
    (ids, mask), prompt = rows[0], renderer.prompt(messages[:1])
    first = ids[len(prompt) : len(prompt) + int(np.argmin(np.append(mask[len(prompt) :], False)))]
    grown = np.concatenate([prompt, first, renderer.continuation(messages[2:3], first)])
    assert ids[: len(grown)].tolist() == grown.tolist() and mask[len(grown) :].all()


KEYS = ("<think>…</think>", "reasoning_content")
EXPECTED = {
    **{name: {"reasoning_content"} for name in FAMILIES},
    **{name: {f"{key} before" for key in KEYS} for name in ["qwen3", "glm4_5", *OPENERS, THINKING]},
    "deepseek_v3_1": {"<think>…</think>", "<think>…</think> before", "reasoning_content"},
    "gpt_oss": {"reasoning_content before"},
}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_leaves_out_is_told(name):
    """Reasoning of answers that are trained on, and of earlier ones; where an answer lacks it, so does what follows."""
    left_out, drops = LeftOut(renderer_of(name)), "the chat template drops "
    told = [
        what for case in ("inline reasoning", "reasoning beside") for what in left_out.of(CASES[case], (1, 3), None)
    ]
    found = {what.removeprefix(drops) for what in told if what.startswith(drops)}
    short = {
        what.replace(" of answers that are trained on", "").replace(" of messages before an answer", " before")
        for what in found
    }
    answers = {what for what in short if not what.endswith("before")}
    assert {what for what in short if what.removesuffix(" before") not in answers} | answers == EXPECTED[name] - {
        f"{what} before" for what in answers
    }


@pytest.mark.parametrize(
    ("family", "messages", "told"),
    [
        ("mistral_nemo", [asks("?"), says("So.", tool_calls=[CALL]), RESULT, says("2")], "text of the assistant"),
        ("gpt_oss", [asks("?"), says("", tool_calls=[CALL, CALL]), RESULT, RESULT, says("2")], "tool calls"),
        ("gpt_oss", [asks("?"), says("<think>b</think>a")], "expected under the key 'thinking'"),
        ("qwen2_5", [{**asks("?"), "name": "Ann"}, says("a")], "drops 'name' of messages before"),
        ("qwen2_5", [asks("?"), says("a", prefix=True)], "ignores 'prefix' of a message"),
    ],
)
def test_other_parts_that_are_left_out_are_told(family, messages, told):
    learned = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    found = LeftOut(renderer_of(family)).of(messages, learned, None)
    assert any(told in what for what in found), found


def test_a_template_without_a_place_for_systems_or_tools_says_so():
    forgets = "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    renderer = ChatRenderer(family_tokenizer("qwen2_5"), forgets)
    found = LeftOut(renderer).of([SYSTEM, asks("?"), says("a")], [2], None)
    assert found == ("the chat template drops the system message of messages before an answer",)
    whole = LeftOut(renderer, "whole").of([SYSTEM, asks("?")], (), None)
    assert whole == found and LeftOut(renderer, "prompt").of([asks("?")], (), None) == ()


def test_templates_that_write_nothing_of_an_answer_or_fail_are_refused():
    mute = (
        "{% for m in messages %}<|im_start|>{{ m.content if not m.mute else '' }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    renderer = ChatRenderer(family_tokenizer("qwen2_5"), mute)
    assert len(renderer.rows([asks("?"), says("a")])) == 1
    with pytest.raises(ValueError, match="drops the whole answer"):
        renderer.rows([asks("?"), says("a", mute=True)])
    careless = "{% for m in messages %}{{ m.role + m.note }}{% endfor %}"
    with pytest.raises(TemplateError, match=r"TypeError: can only concatenate str"):
        ChatRenderer(family_tokenizer("qwen2_5"), careless).history([{**asks("?"), "note": 3}])


def test_a_developer_speaks_as_the_system_where_the_template_has_no_such_role():
    for family in ("qwen2_5", "gpt_oss"):
        renderer = renderer_of(family)
        developer, system = (
            renderer.rows([{**SYSTEM, "role": role}, asks("?"), says("a")])[0][0].tolist()
            for role in ("developer", "system")
        )
        assert developer == system
    own = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}{# developer #}"
    text = ChatRenderer(family_tokenizer("qwen2_5"), own).text([{**SYSTEM, "role": "developer"}], open_assistant=False)
    assert text.startswith("<|im_start|>developer")


LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def test_white_space_before_the_mark_is_the_templates():
    """Llama 2 writes a space there: it is learned, and a mark that was sampled is not written twice."""
    tokenizer = family_tokenizer("mistral_nemo")
    renderer = ChatRenderer(tokenizer, LLAMA2)
    messages = [asks("a"), says("left"), asks("b"), says("right")]
    ((ids, mask),) = renderer.rows(messages)
    assert ids.tolist() == tokenizer.apply_chat_template(messages, chat_template=LLAMA2, return_dict=False)
    assert tokenizer.decode(ids[mask]) == " left </s> right </s>"
    said = np.asarray(tokenizer.encode(" left </s>", add_special_tokens=False))
    grown = np.concatenate([renderer.prompt(messages[:1]), said, renderer.continuation(messages[2:3], said)])
    assert grown.tolist() == ids[: len(grown)].tolist()


def test_a_part_of_a_conversation_alone_can_be_learned_of_messages_as_they_are_read():
    renderer = renderer_of("qwen2_5")
    messages = CASES["several turns"]
    ((ids, mask),) = renderer.rows(messages, learned=[4])
    assert renderer.tokenizer.decode(ids[mask]) == "right<|im_end|>"
    assert renderer.tokenizer.decode(ids).endswith("right<|im_end|>")  # nothing behind it is of use
    heard = read_messages([{"from": "human", "value": "?"}, {"from": "gpt", "value": "a"}], "talk")
    made = renderer.rows([one.message for one in heard])
    assert made[0][0].tolist() == renderer.rows([asks("?"), says("a")])[0][0].tolist()
