"""Rows as people have them: each form is read as the same conversation in OpenAI's, or refused in words."""

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyarrow import parquet

from roll.configs.data import DataArguments
from roll.configs.preference import MarginColumns, RewardColumns
from roll.data.conversations import Conversations, encode_talk, load_conversations
from roll.data.files import DataError
from roll.data.preferences import load_preferences, load_scored
from roll.data.prompts import load_prompts
from roll.data.renderer import ChatRenderer
from tests.support import talks
from tests.support.chat_families import family_tokenizer
from tests.support.lines import write_lines as write
from tests.support.talks import SYSTEM

RENDERER = ChatRenderer(family_tokenizer("qwen3"))
Row = Mapping[str, Any]

M, PR = {"messages": "m"}, {"prompt": "q", "response": "r"}
PC, TALK = {"prompt": "p", "response": "c"}, {"messages": "p", "response": "c"}
ALPACA = {"prompt": "ask", "query": "input", "response": "output"}


def user(content: Any = "1+1?", **more: Any) -> dict[str, Any]:
    return talks.user(content, **more)


def says(content: Any = "2", **more: Any) -> dict[str, Any]:
    return talks.says(content, **more)


def called(arguments: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"a": 1} if arguments is None else arguments}
    return {"id": "call00000", "type": "function", "function": function, **more}


def result(**more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": "2", **more}


FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
PLAIN = [user(), says()]
TWO = [user(), says(), user("2+2?"), says("4")]
THINKS = [user(), says(reasoning_content="one and one")]
USES = [user(), says("", tool_calls=[called()]), result(), says("two")]
BOTH = (1, 3)
"""Answers of ``TWO`` and ``USES``."""


class Form(NamedTuple):
    """A row that is read as the conversation ``same``."""

    name: str
    row: Row
    keys: dict[str, str] = M
    same: Sequence[Row] = PLAIN
    learned: Sequence[int] = (1,)
    tools: Any = None


def talk(name: str, messages: Any, same: Sequence[Row] = PLAIN, **more: Any) -> Form:
    """A row with nothing but its messages."""
    return Form(name, {"m": messages}, same=same, **more)


def advised(name: str, messages: Sequence[Row]) -> Form:
    """A row that is read as ``PLAIN`` behind a system message."""
    return talk(name, messages, [SYSTEM, *PLAIN], learned=[2])


def uses(name: str, messages: Sequence[Row], **more: Any) -> Form:
    """A row that is read as ``USES``."""
    return talk(name, messages, USES, learned=BOTH, **more)


def told(name: str, keys: Mapping[str, str] = {}, **columns: Any) -> Form:
    """A row of ``USES`` with ``TOOLS``."""
    return Form(name, {"m": USES, **columns}, {**M, **keys}, USES, BOTH, TOOLS)


def answers(name: str, first: Row, second: Row, *learned: int, **of_user: Any) -> Form:
    """A row that is read as ``TWO``."""
    return talk(name, [user(**of_user), first, TWO[2], second], TWO, learned=learned)


def text(words: str, kind: str = "text", **more: Any) -> dict[str, Any]:
    return {"type": kind, "text": words, **more}


def shared(speaker: str, words: str) -> dict[str, str]:
    """A message of ShareGPT."""
    return {"from": speaker, "value": words}


HUMAN, GPT = shared("human", "1+1?"), shared("gpt", "2")
ADDS = shared("function_call", '{"name": "add", "arguments": {"a": 1}}')
THOUGHT = {"type": "thinking", "thinking": "one and one"}
OLDER_CALL = says(None, function_call={"name": "add", "arguments": '{"a": 1}'})
WITHOUT_ARGUMENTS = says("", tool_calls=[{"function": {"name": "add", "arguments": ""}}])

ACCEPTED = [
    talk("openai", PLAIN),
    advised("system", [SYSTEM, *PLAIN]),
    talk("capitals", [{**user(), "role": "User"}, {**says(), "role": "ASSISTANT"}]),
    advised("developer", [{**SYSTEM, "role": "developer"}, *PLAIN]),
    talk("json text", json.dumps(PLAIN)),
    talk("several turns", TWO, TWO, learned=BOTH),
    talk("assistant first", [says("Hi."), *PLAIN], [says("Hi."), *PLAIN], learned=[0, 2]),
    talk("assistant alone", [says()], [says()], learned=[0]),
    talk("sharegpt", [HUMAN, GPT]),
    advised("sharegpt system", [shared("system", "Be brief."), shared("user", "1+1?"), shared("chatgpt", "2")]),
    uses("sharegpt tools", [HUMAN, ADDS, shared("observation", "2"), shared("gpt", "two")]),
    talk("roles of sharegpt", [{"role": "human", "content": "1+1?"}, {"role": "model", "content": "2"}]),
    talk("from beside null role", [{"role": None, **HUMAN}, says()]),
    talk("text parts", [user([text("1+"), text("1?")]), says([text("2")])]),
    talk("parts as strings", [user(["1+", "1?"]), says()]),
    talk("responses parts", [user([text("1+1?", "input_text")]), says([text("2", "output_text")])]),
    talk("parts with nulls", [user([text("1+1?", image_url=None)]), says()]),
    talk("thinking part", [user(), says([THOUGHT, text("2")])], THINKS),
    talk("reasoning_content", THINKS, THINKS),
    talk("reasoning", [user(), says(reasoning="one and one")], THINKS),
    talk("thinking", [user(), says(thinking="one and one")], THINKS),
    talk("null reasoning", [user(), says(reasoning_content=None, thinking="")]),
    talk("inline reasoning", [user(), says("<think>\none and one\n</think>\n\n2")], THINKS),
    uses("tool calls", USES),
    uses("null content", [user(), says(None, tool_calls=[called()]), *USES[2:]]),
    uses("no content", [user(), {"role": "assistant", "tool_calls": [called()]}, *USES[2:]]),
    uses("arguments as text", [user(), says("", tool_calls=[called('{"a": 1}')]), *USES[2:]]),
    talk("no arguments", [user(), WITHOUT_ARGUMENTS], [user(), says("", tool_calls=[called({})])]),
    uses("bare calls", [user(), says("", tool_calls=[{"name": "add", "arguments": {"a": 1}}]), *USES[2:]]),
    uses("calls as text", [user(), says("", tool_calls=json.dumps([called()])), *USES[2:]]),
    uses("function_call", [user(), OLDER_CALL, {"role": "function", "name": "add", "content": "2"}, says("two")]),
    talk("null function_call", [user(), says(function_call=None)]),
    talk("empty tool_calls", [user(), says(tool_calls=[])]),
    talk("null tool_calls", [user(tool_calls=None), says(tool_calls=None)]),
    talk("last says by calls", USES[:2], USES[:2]),
    uses("numbered call", [user(), says("", tool_calls=[called(id=7, index=0)]), result(tool_call_id=7), USES[3]]),
    told("tools", tools=TOOLS),
    told("bare tools", tools=[FUNCTION]),
    told("tools as text", tools=json.dumps(TOOLS)),
    told("tools as texts", tools=[json.dumps(TOOLS[0])]),
    told("parameters as text", tools=[{**FUNCTION, "parameters": json.dumps(FUNCTION["parameters"])}]),
    told("older functions", functions=[FUNCTION]),
    told("tools of another name", {"tools": "f"}, f=TOOLS),
    Form("no tools", {"m": PLAIN, "tools": []}),
    Form("null tools", {"m": PLAIN, "tools": None}),
    Form("empty tools text", {"m": PLAIN, "tools": ""}),
    Form("functions of another kind", {"m": PLAIN, "functions": ["sin", "cos"]}),
    answers("weight", says(weight=0), says("4", weight=1), 3),
    talk("weight 1.0", [user(weight=None), says(weight=1.0)]),
    talk("weight 0 of a user", [user(weight=0), says()]),
    answers("train", says(train=True), says("4", train=False), 1, train=False),
    answers("training", says(training=False), says("4"), 3),
    answers("loss", says(loss=False), says("4", loss=True), 3),
    talk("empty answers", [user(), says(""), *TWO[2:]], [user(), says(""), *TWO[2:]], learned=[3]),
    Form("prompt and response", {"q": "1+1?", "r": "2"}, PR),
    Form("alpaca", {"ask": "1+1?", "input": "", "output": "2"}, ALPACA),
    Form("alpaca with input", {"ask": "Add.", "input": "1+1?", "output": "2"}, ALPACA, [user("Add.\n1+1?"), says()]),
    Form("prompt and completion", {"p": "1+1?", "c": "2"}, PC),
    Form("conversational", {"p": [user()], "c": [says()]}, PC),
    Form("conversational, a message", {"p": [user()], "c": says()}, PC),
    Form("conversation and text", {"p": [SYSTEM, user()], "c": "2"}, PC, [SYSTEM, *PLAIN], [2]),
    Form("text and conversation", {"p": "1+1?", "c": [says()]}, PC),
    Form("messages and completion", {"p": [user()], "c": [says()]}, TALK),
    Form("completion alone is learned", {"p": TWO[:3], "c": "4"}, PC, TWO, [3]),
    Form("completion with tools", {"p": [user()], "c": USES[1:]}, PC, USES, BOTH),
    Form("whole messages beside a response", {"m": PLAIN, "r": "9"}, M | {"response": "r"}),
    Form("system column", {"q": "1+1?", "r": "2", "s": "Be brief."}, PR | {"system": "s"}, [SYSTEM, *PLAIN], [2]),
    Form("null system column", {"q": "1+1?", "r": "2", "s": None}, PR | {"system": "s"}),
    Form("dotted", {"data": {"q": "1+1?", "r": "2"}}, {"prompt": "data.q", "response": "data.r"}),
    Form("null id", {"id": None, "m": PLAIN}),
    Form("float id", {"id": 1.5, "m": PLAIN}),
    Form("nested id", {"id": {"a": 1}, "m": PLAIN}),
    Form("nested column", {"m": PLAIN, "x": {"a": [{"b": None}]}}),
    talk("unknown message keys", [user(score=0.5, at={"x": [1]}), says(model="y")]),
]

SOUND = {"type": "input_audio", "input_audio": {"data": "x"}}
ANSWERS = [
    (says(""), "m[1].content: empty, expected an answer"),
    (says(" "), "m[1].content: empty, expected an answer"),
    (says("", tool_calls=[]), "m[1].content: empty, expected an answer"),
    (says(None), "m[1]: no content, got 'role', 'content'; expected text"),
    ({"role": "critic", "content": "2"}, "m[1].role: 'critic', expected one of system, developer"),
    (says(weight=0), "column 'm': nothing to train on: weight or train or training or loss excludes all assistant"),
    (says(weight=0.5), "m[1].weight: 0.5, expected 0 or 1"),
    (says(weight="1"), "m[1].weight: '1', expected 0 or 1"),
    (says(weight=0, train=True), "m[1]: weight and train differ"),
    (says([{"type": "tool_use", "name": "add", "input": {}}]), "m[1].content[0]: a part of type 'tool_use'"),
    (says(tool_calls=[called("{a: 1}")]), "m[1].tool_calls[0].arguments: '{a: 1}' is not JSON"),
    (says(tool_calls=[called([1])]), "m[1].tool_calls[0].arguments: [1], expected an object"),
    (says(tool_calls=[{"function": {}}]), "m[1].tool_calls[0]: {'function': {}}, expected function"),
    (
        says(tool_calls=[{"function": {"name": "f", "parameters": {}}}]),
        "m[1].tool_calls[0]: unknown key 'parameters' of a call",
    ),
    (says(tool_calls=[called()], function_call={"name": "f"}), "m[1]: tool_calls and function_call, expected one"),
    (says(reasoning="a", thinking="b"), "m[1]: different reasoning in reasoning and thinking"),
]
QUESTIONS = [
    (user(weight=1), "m[0].weight: 1 of the user, expected only of the assistant"),
    (user([SOUND]), "m[0].content[0]: a part of type 'input_audio', expected only text, pictures and videos: sound"),
    (user({"a": 1}), "m[0].content: {'a': 1}, expected text, or a list of parts"),
    (user(tool_calls=[called()]), "m[0]: a call of the user, expected only of the assistant"),
    (user("\ud800"), "m[0].content: a lone surrogate at character 1"),
]
WRONG_TOOLS: list[tuple[Any, str]] = [
    (["add"], "tools[0]: 'add' is not JSON"),
    ([{"type": "code_interpreter"}], "tools[0]: {'type': 'code_interpreter'}, expected {type: function"),
    (3, "column 'tools': 3, expected a list of tools (data_args.tools: null: not read)"),
]
REFUSED: list[tuple[Row, dict[str, str], str]] = [
    *(({"m": [user(), answer]}, M, reason) for answer, reason in ANSWERS),
    *(({"m": [question, says()]}, M, reason) for question, reason in QUESTIONS),
    *(({"m": PLAIN, "tools": tools}, M, reason) for tools, reason in WRONG_TOOLS),
    ({"m": [user()]}, M, "m[0]: the last message is the user's, expected the assistant's; or data_args.response"),
    ({"m": "hello"}, M, "column 'm': text that is not a JSON list of messages"),
    ({"m": {"role": "user"}}, M, "column 'm': {'role': 'user'}, expected a list of messages"),
    ({"x": 1}, M, "no column 'm', the row has 'x'"),
    ({"q": "1+1?", "r": None}, PR, "column 'r': null, expected the text of an answer, or its messages"),
    ({"q": "1+1?", "r": " "}, PR, "column 'r': ' ', expected the text of an answer"),
    ({"p": [user()], "c": [user("2")]}, PC, "c[0]: the last message is the user's, expected the assistant's"),
    ({"p": PLAIN, "c": "3"}, PC, "p[1]: the last message is the assistant's, expected the user's"),
    ({"q": "1+1?", "r": "2", "s": "x"}, PR | {"tools": "f"}, "no column 'f'"),
]


def load(path: Path, keys: Mapping[str, Any]) -> Conversations:
    return load_conversations(DataArguments(file_name=str(path), **keys), renderer=RENDERER, max_tokens=4000)


def rows_of(data: Conversations) -> list[tuple[list[int], list[bool]]]:
    lengths = data.batch.lengths_B.tolist()
    parts = zip(data.batch.tokens_T.split(lengths), data.batch.loss_mask_T.split(lengths), strict=True)
    return as_lists(parts)


def as_lists(rows: Iterable[tuple[Any, Any]]) -> list[tuple[list[int], list[bool]]]:
    return [(ids.tolist(), mask.tolist()) for ids, mask in rows]


@pytest.mark.parametrize("form", ACCEPTED, ids=[form.name for form in ACCEPTED])
def test_a_form_is_read_as_the_same_conversation_in_openais(tmp_path, form):
    data = load(write(tmp_path / "data.jsonl", [form.row]), form.keys)
    assert rows_of(data) == as_lists(RENDERER.rows(form.same, form.learned, form.tools))


@pytest.mark.parametrize("case", REFUSED, ids=[case[2][:60] for case in REFUSED])
def test_what_is_not_understood_is_refused_with_its_line(tmp_path, case):
    row, keys, reason = case
    fine: dict[str, Any] = {"m": PLAIN, "q": "1+1?", "r": "2", "p": [user()], "c": "2", "f": TOOLS}
    path = write(tmp_path / "data.jsonl", [fine, row])
    with pytest.raises(DataError) as caught:
        load(path, keys)
    assert caught.value.count == 1
    assert caught.value.problems[0].startswith(f"{path}:2: {reason}"), caught.value.problems[0]


def test_parquet_gives_every_row_and_message_the_keys_of_all(tmp_path):
    """A struct that is there for others comes as null, and so do keys of arguments and of schemas."""
    parameters = {"type": "object", "properties": {"w": {"type": "string"}}}
    other = {"name": "look", "description": "Looks.", "parameters": parameters}
    looks = called(function={"name": "look", "arguments": {"w": "x"}})
    rows = [
        {"m": PLAIN, "tools": None},
        {"m": USES, "tools": [FUNCTION]},
        {"m": [user(), says(None, tool_calls=[looks])], "tools": [other]},
        {"m": THINKS, "tools": []},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    assert rows_of(load(tmp_path / "data.parquet", M)) == rows_of(load(write(tmp_path / "data.jsonl", rows), M))


def test_columns_that_nobody_reads_never_refuse_a_file(tmp_path):
    twice = pa.array([[("k", 1), ("k", 2)]] * 2, pa.map_(pa.string(), pa.int64()))
    odd = {
        "at": [datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)] * 2,
        "took": [datetime.timedelta(seconds=3)] * 2,
        "picture": [b"\x89PNG"] * 2,
        "nested": [{"a": [{"b": b"x"}]}] * 2,
        "nan": [float("nan")] * 2,
        "huge": pa.array([2**64 - 1] * 2, pa.uint64()),
        "map": twice,
        "ns": pa.array([1, 2], pa.timestamp("ns")),
        "nothing": pa.nulls(2),
        "id": [1.0, None],
    }
    table = pa.table({"m": [PLAIN, PLAIN], **odd})
    parquet.write_table(table, tmp_path / "data.parquet")
    data = load(tmp_path / "data.parquet", M)
    assert len(data.batch.samples) == 2
    assert [question.id for question in data.questions] == ["1", f"{tmp_path / 'data.parquet'}:2"]
    (note,) = data.report.notes
    assert note.endswith("unused columns: at, took, picture, nested, nan, huge, map, ns, nothing")
    rows = [{"m": USES, "functions": [FUNCTION]}]
    assert load(write(tmp_path / "calls.jsonl", rows), M).report.notes == ()
    (note,) = load(write(tmp_path / "others.jsonl", [{"m": PLAIN, "functions": 3}]), M).report.notes
    assert note.endswith("unused columns: functions")


def pairs(path: Path, keys: Mapping[str, Any]) -> Conversations:
    args = DataArguments(file_name=str(path), **keys)
    return load_preferences(args, MarginColumns(), label=None, encode=encode_talk(RENDERER), max_tokens=4000)


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"p": "1+1?", "chosen": "2", "rejected": "3"}, {"prompt": "p"}),
        ({"p": [user()], "chosen": [says()], "rejected": [says("3")]}, {"prompt": "p"}),
        ({"p": [user()], "chosen": says(), "rejected": "3"}, {"messages": "p"}),
        ({"p": "1+1?", "chosen": PLAIN, "rejected": [user(), says("3")]}, {"prompt": "p"}),
        ({"chosen": PLAIN, "rejected": [user(), says("3")]}, {"messages": "chosen"}),
        ({"chosen": [HUMAN, GPT], "rejected": [user(), says([text("3")])]}, {"messages": "chosen"}),
        ({"p": "1+1?", "chosen": "2", "rejected": "3", "id": None, "x": {"a": 1}}, {"prompt": "p"}),
    ],
)
def test_pairs_take_the_same_forms(tmp_path, row, keys):
    data = pairs(write(tmp_path / "data.jsonl", [row]), keys)
    assert rows_of(data) == as_lists(RENDERER.rows([user(), says(text)])[0] for text in ("2", "3"))
    assert data.batch.pair_B.tolist() == [0, 0] and data.batch.preferred_B.tolist() == [True, False]
    assert [question.messages for question in data.questions] == [(user(),)]
    assert str(data.report).startswith("1 pairs, ")


def test_pairs_of_calls_are_compared_with_the_tools_told(tmp_path):
    answers = [says("", tool_calls=[called({"a": number})]) for number in (1, 2)]
    row = {"p": [user()], "chosen": [answers[0]], "rejected": [answers[1]], "tools": TOOLS}
    data = pairs(write(tmp_path / "data.jsonl", [row]), {"messages": "p"})
    assert rows_of(data) == as_lists(RENDERER.rows([user(), answer], None, TOOLS)[0] for answer in answers)
    same = {**row, "rejected": [answers[0]]}
    with pytest.raises(DataError, match="the same answer, expected two"):
        pairs(write(tmp_path / "data.jsonl", [same]), {"messages": "p"})


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"q": "1+1?", "r": "2", "score": 1}, PR),
        ({"m": [HUMAN, GPT], "score": 1}, M),
        ({"q": [user()], "r": [says()], "score": "1", "x": [1]}, PR),
    ],
)
def test_scored_answers_take_the_same_forms(tmp_path, row, keys):
    args = DataArguments(file_name=str(write(tmp_path / "data.jsonl", [row])), **keys)
    data = load_scored(args, RewardColumns(), in_steps=False, renderer=RENDERER, max_tokens=4000)
    whole = RENDERER.history(PLAIN).tolist()
    assert data.batch.tokens_T.tolist() == [*whole, whole[-1]]


@pytest.mark.parametrize(
    ("row", "keys", "messages", "tools"),
    [
        ({"q": "1+1?"}, {"prompt": "q"}, [user()], None),
        ({"q": [SYSTEM, user()]}, {"prompt": "q"}, [SYSTEM, user()], None),
        ({"q": [HUMAN]}, {"messages": "q"}, [user()], None),
        ({"q": [user([text("1+1?")])], "tools": TOOLS}, {"messages": "q"}, [user()], TOOLS),
        ({"q": [*USES, user("so?")], "tools": [FUNCTION]}, {"messages": "q"}, [*USES, user("so?")], TOOLS),
    ],
)
def test_prompts_take_the_same_forms(tmp_path, row, keys, messages, tools):
    path = write(tmp_path / "data.jsonl", [{**row, "tag": "sums", "solution": "2"}])
    args = DataArguments(file_name=str(path), **keys)
    (prompt,) = load_prompts(args, renderer=RENDERER, prompt_length=4000, allowed_tags={"sums"}, seed=0)
    ids = RENDERER.prompt(messages, tools)
    assert RENDERER.prompt(prompt.messages, prompt.tools).tolist() == ids.tolist()
    with pytest.raises(DataError, match=f"{len(ids)} tokens, expected at most"):
        load_prompts(args, renderer=RENDERER, prompt_length=len(ids) - 1, allowed_tags={"sums"}, seed=0)


def test_what_is_left_out_is_told_once_for_a_file(tmp_path):
    rows = [{"m": PLAIN}, {"m": [user(name="Ann"), says()]}, {"m": [user(name="Bob"), says()]}]
    path = write(tmp_path / "data.jsonl", rows)
    report = load(path, M).report
    left_out = "the chat template drops 'name' of messages before an answer"
    assert report.notes == (f"warning: {path}: {left_out}: 2 rows, the first {path}:2",)
    qwen2_5 = ChatRenderer(family_tokenizer("qwen2_5"))
    args = DataArguments(file_name=str(write(path, [{"m": THINKS}])), **M)
    (note,) = load_conversations(args, renderer=qwen2_5, max_tokens=400).report.notes
    assert "drops reasoning_content of answers that are trained on: 1 row, the first" in note


def test_rewritten_turns_make_samples_of_their_own_and_one_question(tmp_path):
    data = load(write(tmp_path / "data.jsonl", [{"m": TWO}, {"m": PLAIN}]), M)
    assert len(data.batch.samples) == 3 and len(data.questions) == 2
    assert str(data.report).startswith("2 conversations as 3 samples, ")
    assert "is a separate sample" in str(data.report)
