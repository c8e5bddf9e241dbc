"""Tool calls in every family's notation: written and read back, as models write them, malformed, cut off, garbage."""

import json
import keyword
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from roll.agentic.tools.dialects import DIALECTS, dialect
from roll.agentic.tools.dialects.base import check_json
from roll.agentic.tools.dialects.tagged import read_bare
from roll.agentic.tools.tool import AssistantTurn, CallError, ToolCall, ToolSchema, call_id
from roll.utils.registry import UnknownNameError
from tests.support.examples import examples

EACH = pytest.mark.parametrize("name", DIALECTS.names())

letters = st.characters(exclude_categories=["Cs"])
# Python cannot call what it keeps for itself, as ``as``.
names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
identifiers = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True) | st.sampled_from(["from", "class"])
# Strings that look like something else, and pieces of notations.
odd = st.sampled_from(
    ["", " ", "42", "true", "null", '"a"', "[1]", "\n", "a\nb", "<b>", "{}", "'", "\\", "é😀", "</think>"]
)
markers = st.sampled_from(
    ["</tool_call>", "<tool_call>", "</parameter>", "</arg_value>", "<|call|>", "[ARGS]", "```", "]"]
)
strings = st.one_of(st.text(letters, max_size=8), odd, markers)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), strings)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(strings, inner, max_size=2), max_leaves=4
)
# Words hold no notation: what a model means by them then is anybody's guess.
words = st.text("abc é.,!?\n", max_size=20).map(str.strip)


@st.composite
def turns(draw: st.DrawFn) -> AssistantTurn:
    calls = draw(st.lists(st.tuples(names, st.dictionaries(identifiers, values, max_size=3)), max_size=3))
    return AssistantTurn(
        content=draw(words),
        calls=tuple(ToolCall(call_id(index), name, arguments) for index, (name, arguments) in enumerate(calls)),
        reasoning=draw(st.none() | words.filter(bool)),
    )


@EACH
@examples(50)
@given(turn=turns())
def test_what_is_written_reads_as_it_was_meant(name, turn):
    speaks = dialect(name)
    assert speaks.parse(speaks.format(turn)) == turn


@EACH
@examples(50)
@given(turn=turns(), data=st.data())
def test_a_turn_cut_off_anywhere_makes_no_call_up(name, turn, data):
    speaks = dialect(name)
    text = speaks.format(turn)
    cut = speaks.parse(text[: data.draw(st.integers(0, len(text)))])
    assert cut.calls == turn.calls[: len(cut.calls)]


@EACH
@examples(50)
@given(turn=turns(), data=st.data())
def test_damaged_text_never_raises(name, turn, data):
    speaks = dialect(name)
    text = speaks.format(turn)
    for _ in range(data.draw(st.integers(1, 4))):
        start, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 12))
        text = text[:start] + data.draw(st.one_of(strings, st.just('"'), st.just("{"))) + text[start + length :]
    check_turn(speaks.parse(text), text)


NOTATION = """
    <tool_call> </tool_call> <function=f> <function= </function> <parameter=a> </parameter> <arg_key> </arg_key>
    <arg_value> </arg_value> <|python_tag|> <|python_start|> <|python_end|> [TOOL_CALLS] [ARGS] [CALL_ID] <|channel|>
    analysis <|constrain|>json <|message|> <|call|> <|end|> <|start|>assistant <|start|>user <｜tool▁calls▁begin｜>
    <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜> ``` <think> </think>
    [f(a=1)] [f(1)] [f(a=[f()])] [ ] { } ; , f \\ NaN 1e999 "\\ud800"
"""
CALLS = ['{"name": "f", "arguments": {"a": 1}}', '{"name": "f"}', '{"name": "f", "parameters": {}}', "f(**{1: 2})"]
PIECES = [*NOTATION.split(), *CALLS, "commentary to=functions.f", "```json\n", "\n", " ", "\x00"]


@EACH
@examples(50)
@given(pieces=st.lists(st.one_of(st.sampled_from(PIECES), strings), max_size=12))
@example(["[" * 5000])
@example(["<tool_call>", "[" * 200_000])
@example(['<tool_call>{"name": "f", "arguments": ' + '{"a":' * 900 + "1" + "}" * 901 + "</tool_call>"])
@example(['<tool_call>{"name": "f", "arguments": ' + "[" * 950 + "]" * 950 + "}</tool_call>"])
@example(['[TOOL_CALLS][{"name": "f", "arguments": ' + "[" * 950 + "]" * 950 + "}]"])
@example(["[f" + ".g" * 2500 + "(a=1)]"])
@example(["[f(a=1)(b=2), (lambda: 1)(), 'f'(a=1)]"])
@example(["<tool_call>" * 20_000])
@example(["<tool_call>" + " " * 20_000 + "!<</tool_call>"])
@example(["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>" + " \n" * 20_000])
@example(["[f(a=" + "-" * 5000 + "1)]"])
@example(["[f(a=", "(" * 300, ")" * 300, ")]"])
@example(["[f(a=[0b" + "1" * 20_000 + "])]"])
@example(['<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>"])
def test_any_text_reads_as_some_turn(name, pieces):
    text = "".join(pieces)
    check_turn(dialect(name).parse(text), text)


def check_turn(turn: AssistantTurn, text: str) -> None:
    """What holds for every turn that was read."""
    ids = [call.id for call in turn.calls]
    assert len(set(ids)) == len(ids)
    for call in turn.calls:
        assert call.name.strip() and isinstance(call.arguments, dict)
        check_json(call.arguments)
        json.dumps(call.arguments)
    for error in turn.errors:
        assert error.reason.startswith("expected")
    assert turn.content == turn.content.strip()


def say(text: str, name: str, tools: tuple[ToolSchema, ...] = ()) -> tuple[str, list[tuple[str, Any]]]:
    """Words and calls of a text without errors."""
    turn = dialect(name).parse(text, tools)
    assert not turn.errors
    return turn.content, [(call.name, call.arguments) for call in turn.calls]


ADD = ("add", {"a": 1, "b": 2})
ONE_AND_TWO = '{"a": 1, "b": 2}'
ADD_ARGUMENTS = f'{{"name": "add", "arguments": {ONE_AND_TWO}}}'
ADD_PARAMETERS = f'{{"name": "add", "parameters": {ONE_AND_TWO}}}'
DEEPSEEK_ADD = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{ONE_AND_TWO}\n```<｜tool▁call▁end｜>"
AS_MODELS_WRITE = [
    ("hermes", f"<tool_call>\n{ADD_ARGUMENTS}\n</tool_call>", "", 1),
    ("hermes", 'Let me see.\n<tool_call>{"arguments": {"a": 1, "b": 2}, "name": "add"}</tool_call>', "Let me see.", 1),
    ("hermes", f"<tool_call>{ADD_ARGUMENTS}</tool_call>\n" * 3, "", 3),
    (
        "qwen3_coder",
        "I add.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "I add.",
        1,
    ),
    ("llama3_json", ADD_PARAMETERS, "", 1),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', "", 1),
    ("llama3_json", f"{ADD_PARAMETERS}; {ADD_ARGUMENTS}", "", 2),
    ("llama_pythonic", "[add(a=1, b=2), add(b=2, a=1)]", "", 2),
    ("llama_pythonic", "I add.<|python_start|>[add(a=1, b=2)]<|python_end|>", "I add.", 1),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdef123"}]', "", 1),
    ("mistral", f"So.[TOOL_CALLS]add[ARGS]{ONE_AND_TWO}[TOOL_CALLS]add[CALL_ID]abcdef123[ARGS]{ONE_AND_TWO}", "So.", 2),
    (
        "harmony",
        "<|channel|>analysis<|message|>Sum.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>',
        "",
        1,
    ),
    ("harmony", f" to=functions.add<|channel|>commentary json<|message|>{ONE_AND_TWO}", "", 1),
    ("deepseek", f"So.<｜tool▁calls▁begin｜>{DEEPSEEK_ADD}\n{DEEPSEEK_ADD}<｜tool▁calls▁end｜>", "So.", 2),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
        f"{ONE_AND_TWO}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        1,
    ),
    (
        "glm",
        "So.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        "So.",
        1,
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "count"), AS_MODELS_WRITE)
def test_calls_as_models_write_them(name, text, content, count):
    assert say(text, name) == (content, [ADD] * count)


NOT_CALLS = [
    ("hermes", "Use <tools> and </tool_call>."),
    ("llama3_json", '{"answer": 4}'),
    ("llama3_json", "{x: 1} is a set."),
    ("llama_pythonic", "[1, 2, 3]"),
    ("llama_pythonic", "f(x) is 3"),
    ("mistral", "[INST] is a marker."),
    ("harmony", "plain words"),
]


@pytest.mark.parametrize(("name", "text"), NOT_CALLS)
def test_words_are_not_taken_for_calls(name, text):
    assert dialect(name).parse(text) == AssistantTurn(text)


MALFORMED = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', "expected JSON, got '}}</tool_call>'"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "it was cut off"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "got the end: it was cut off"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "expected the key 'name', got 'arguments'"),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "expected the key 'arguments' once"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "arguments as an object, got list [1]"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "arguments as an object, got str"),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', "expected the name of a tool"),
    ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>', "expected the name of a tool, got int 1"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "why": 1}</tool_call>', "got 'why' too"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "got NaN"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "got inf"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "a lone surrogate"),
    ("llama_pythonic", "[f(a=0x" + "f" * 4000 + ")]", "expected numbers, got one with 16000 bits"),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}} and so</tool_call>',
        "expected </tool_call> after the object",
    ),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>", "expected <function=name>"),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter></tool_call>", "expected <function=name>"),
    ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "expected <function=name>"),
    ("qwen3_coder", "<tool_call><function=f>", "it was cut off"),
    ("qwen3_coder", "<tool_call><function=></function></tool_call>", "expected the name of a tool"),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        "'a' twice",
    ),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>", "expected a name, then <arg_key>"),
    ("glm", "<tool_call>\n</tool_call>", "expected the name of a tool"),
    ("glm", "<tool_call>f", "it was cut off"),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}', "it was cut off"),
    ("llama3_json", '{"parameters": {"a": 1}}', "expected the key 'name'"),
    ("llama3_json", '{"name": "f", "parameters": {}} so', "expected ';' and another call, got 'so'"),
    ("llama3_json", "<|python_tag|>print(1)", "expected JSON, got 'print(1)'"),
    ("llama_pythonic", "[f(1)]", "expected every argument by name"),
    ("llama_pythonic", "[f(a=open('x'))]", "expected literals"),
    ("llama_pythonic", "[f(a=__import__('os').system('true'))]", "expected literals"),
    ("llama_pythonic", "[f(a={1, 2})]", "expected JSON values, got set"),
    ("llama_pythonic", "[f(a=b'x')]", "expected JSON values, got bytes"),
    ("llama_pythonic", "[f(a={1: 2})]", "expected text keys, got 1"),
    ("llama_pythonic", "[f(a=1, **{'a': 2})]", "expected every argument once"),
    ("llama_pythonic", "[f(a=1", "expected a Python list of calls"),
    ("llama_pythonic", "[f(a=1), 3]", "expected a call, got 3"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}', "it was cut off"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}] so', "expected nothing after the array"),
    ("mistral", "[TOOL_CALLS]f {}", "expected a name and [ARGS]"),
    ("mistral", "[TOOL_CALLS]f[ARGS]{", "it was cut off"),
    ("mistral", "[TOOL_CALLS]", "it was cut off"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc"}]', "expected an id of 9 letters or digits"),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}", "expected an id of 9 letters or digits, got 'abc'"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>a=1<|call|>", "expected JSON, got 'a=1'"),
    ("harmony", "<|channel|>commentary to=functions.<|message|>{}", "expected the name of a tool"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>[]", "arguments as an object"),
    ("harmony", "<|message|>a<|end|><|start|>user<|message|>b", "expected assistant to speak"),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "expected <｜tool▁sep｜>",
    ),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{", "it was cut off"),
    ("deepseek", "<｜tool▁calls▁begin｜>f", "expected <｜tool▁call▁begin｜> or"),
]


@pytest.mark.parametrize(("name", "text", "reason"), MALFORMED)
def test_a_malformed_call_says_what_was_expected(name, text, reason):
    speaks = dialect(name)
    (error,) = speaks.parse(text).errors
    assert reason in error.reason
    answer = speaks.error_text(error)
    assert error.reason in answer and answer.endswith(speaks.example)


def test_a_malformed_call_leaves_its_neighbours_alone():
    good = f"<tool_call>{ADD_ARGUMENTS}</tool_call>"
    for bad in ("<tool_call>{</tool_call>", "<tool_call>{", "<tool_call></tool_call>"):
        turn = dialect("hermes").parse(f"{good}{bad}{good}")
        assert [(call.name, call.arguments) for call in turn.calls] == [ADD] * 2 and len(turn.errors) == 1
    one = "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    turn = dialect("deepseek").parse(f"<｜tool▁calls▁begin｜>{one}<｜tool▁call▁begin｜>x{one}<｜tool▁calls▁end｜>")
    assert len(turn.calls) == 2 and len(turn.errors) == 1


def test_an_id_that_comes_twice_is_an_error_and_no_id_of_the_models_own_is_given_again():
    call = {"name": "f", "arguments": {}, "id": "abcdef123"}
    turn = dialect("mistral").parse("[TOOL_CALLS]" + json.dumps([call, call, {"name": "g", "arguments": {}}]))
    assert [call.id for call in turn.calls] == ["abcdef123", "call00001"]
    assert "got 'abcdef123' twice" in turn.errors[0].reason
    taken = {"name": "f", "arguments": {}, "id": call_id(1)}
    turn = dialect("mistral").parse("[TOOL_CALLS]" + json.dumps([taken, {"name": "g", "arguments": {}}]))
    assert [call.id for call in turn.calls] == ["call00001", "call00002"] and not turn.errors


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
def test_a_schema_says_what_bare_words_are(name):
    bare = {"code": "42", "times": "3", "loud": "True", "list": "[1, 2]", "free": "x = 1"}
    if name == "glm":
        pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in bare.items())
        text = f"<tool_call>run\n{pairs}</tool_call>"
    else:
        pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in bare.items())
        text = f"<tool_call>\n<function=run>\n{pairs}</function>\n</tool_call>"
    kinds = {"code": "string", "times": "integer", "loud": "boolean", "list": "array", "free": "string"}
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in kinds.items()}}
    typed = {"code": "42", "times": 3, "loud": True, "list": [1, 2], "free": "x = 1"}
    assert say(text, name, (ToolSchema("run", "", schema),)) == ("", [("run", typed)])
    assert say(text, name) == ("", [("run", typed | {"code": 42, "loud": "True"})])


@pytest.mark.parametrize(
    ("schema", "words", "value"),
    [
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "42", "42"),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "42", 42),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "maybe", "maybe"),
        ({"enum": ["a"]}, "a", "a"),
        (None, "null", None),
    ],
)
def test_a_schema_may_allow_several_types(schema, words, value):
    assert read_bare(words, schema) == value


def test_reasoning_stands_apart_from_words():
    parse = dialect("hermes").parse
    assert parse("<think>\nhm\n</think>\n\n4") == AssistantTurn("4", reasoning="hm")
    assert parse("hm\n</think>\n\n4") == AssistantTurn("4", reasoning="hm")  # the prompt opened the tag
    assert parse("<think>\n\n</think>\n\n4") == AssistantTurn("4")
    assert parse("<think>\nhm") == AssistantTurn("", reasoning="hm")
    inside = "I could <tool_call>{}</tool_call></think>4"
    assert parse(inside) == AssistantTurn("4", reasoning="I could <tool_call>{}</tool_call>")


def test_what_a_dialect_cannot_write_and_an_unknown_dialect_are_refused():
    turn = AssistantTurn("", (ToolCall("call00000", "get-weather", {}),))
    assert dialect("hermes").parse(dialect("hermes").format(turn)) == turn
    with pytest.raises(ValueError, match="llama_pythonic cannot write"):
        dialect("llama_pythonic").format(turn)
    with pytest.raises(ValueError, match="llama_pythonic cannot write"):
        dialect("llama_pythonic").format(AssistantTurn("", (ToolCall("call00000", "as", {}),)))
    with pytest.raises(ValueError, match="hermes cannot write"):
        dialect("hermes").format(AssistantTurn("<tool_call>"))
    with pytest.raises(UnknownNameError, match=r"unknown tool dialect 'hermess'\. Did you mean 'hermes'"):
        dialect("hermess")


def test_errors_and_foreign_ids_are_not_written():
    turn = AssistantTurn("", (ToolCall("call_of_an_api", "f", {}),), (CallError("x", "expected y"),))
    kept = replace(turn, calls=(ToolCall("call00000", "f", {}),), errors=())
    assert dialect("hermes").parse(dialect("hermes").format(turn)) == kept
    assert dialect("mistral").parse(dialect("mistral").format(turn)) == kept
    its_own = AssistantTurn("", (ToolCall("abcdef123", "f", {}),))
    assert dialect("mistral").parse(dialect("mistral").format(its_own)) == its_own


def test_a_long_call_is_shortened_in_its_answer():
    speaks = dialect("hermes")
    (error,) = speaks.parse('<tool_call>{"name": "' + "x" * 10_000).errors
    assert len(speaks.error_text(error)) < 500


def test_turns_and_schemas_as_messages():
    turn = AssistantTurn("So.", (ToolCall("call00000", "f", {"a": 1}),), reasoning="hm")
    function = {"name": "f", "arguments": {"a": 1}}
    assert turn.as_openai() == {
        "role": "assistant",
        "content": "So.",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }
    assert AssistantTurn("So.").as_openai() == {"role": "assistant", "content": "So."}
    assert ToolSchema("f", "does").as_openai() == {
        "type": "function",
        "function": {"name": "f", "description": "does", "parameters": {"type": "object", "properties": {}}},
    }
