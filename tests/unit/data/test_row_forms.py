"""Rows as people have them: each form is read as the same conversation in OpenAI's, or refused in words."""

import datetime
import json
from collections.abc import Mapping, Sequence
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
from tests.support.chat_families import family_tokenizer

RENDERER = ChatRenderer(family_tokenizer("qwen3"))
Row = Mapping[str, Any]

M, PR = {"messages": "m"}, {"prompt": "q", "response": "r"}
PC, TALK = {"prompt": "p", "response": "c"}, {"messages": "p", "response": "c"}
ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}


def user(text: str = "1+1?", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def says(text: str | None = "2", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def called(arguments: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"a": 1} if arguments is None else arguments}
    return {"id": "call00000", "type": "function", "function": function, **more}


def result(**more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": "2", **more}


FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
SYSTEM = {"role": "system", "content": "Be brief."}
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


def talk(name: str, messages: Any, **more: Any) -> Form:
    """A row with nothing but its messages."""
    return Form(name, {"m": messages}, **more)


ACCEPTED = [
    talk("openai", PLAIN),
    talk("system", [SYSTEM, *PLAIN], same=[SYSTEM, *PLAIN], learned=[2]),
    talk("capitals", [{**user(), "role": "User"}, {**says(), "role": "ASSISTANT"}]),
    talk("developer", [{**SYSTEM, "role": "developer"}, *PLAIN], same=[SYSTEM, *PLAIN], learned=[2]),
    talk("json text", json.dumps(PLAIN)),
    talk("several turns", TWO, same=TWO, learned=BOTH),
    talk("assistant first", [says("Hi."), *PLAIN], same=[says("Hi."), *PLAIN], learned=[0, 2]),
    talk("assistant alone", [says()], same=[says()], learned=[0]),
    talk("sharegpt", [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]),
    talk(
        "sharegpt system",
        [
            {"from": "system", "value": "Be brief."},
            {"from": "user", "value": "1+1?"},
            {"from": "chatgpt", "value": "2"},
        ],
        same=[SYSTEM, *PLAIN],
        learned=[2],
    ),
    talk(
        "sharegpt tools",
        [
            {"from": "human", "value": "1+1?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "two"},
        ],
        same=USES,
        learned=BOTH,
    ),
    talk("roles of sharegpt", [{"role": "human", "content": "1+1?"}, {"role": "model", "content": "2"}]),
    talk("from beside null role", [{"role": None, "from": "human", "value": "1+1?"}, says()]),
    talk(
        "text parts",
        [user([{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]), says([{"type": "text", "text": "2"}])],
    ),
    talk("parts as strings", [user(["1+", "1?"]), says()]),
    talk(
        "responses parts",
        [user([{"type": "input_text", "text": "1+1?"}]), says([{"type": "output_text", "text": "2"}])],
    ),
    talk("parts with nulls", [user([{"type": "text", "text": "1+1?", "image_url": None}]), says()]),
    talk(
        "thinking part",
        [user(), says([{"type": "thinking", "thinking": "one and one"}, {"type": "text", "text": "2"}])],
        same=THINKS,
    ),
    talk("reasoning_content", THINKS, same=THINKS),
    talk("reasoning", [user(), says(reasoning="one and one")], same=THINKS),
    talk("thinking", [user(), says(thinking="one and one")], same=THINKS),
    talk("null reasoning", [user(), says(reasoning_content=None, thinking="")]),
    talk("inline reasoning", [user(), says("<think>\none and one\n</think>\n\n2")], same=THINKS),
    talk("tool calls", USES, same=USES, learned=BOTH),
    talk("null content", [user(), says(None, tool_calls=[called()]), *USES[2:]], same=USES, learned=BOTH),
    talk("no content", [user(), {"role": "assistant", "tool_calls": [called()]}, *USES[2:]], same=USES, learned=BOTH),
    talk("arguments as text", [user(), says("", tool_calls=[called('{"a": 1}')]), *USES[2:]], same=USES, learned=BOTH),
    talk(
        "no arguments",
        [user(), says("", tool_calls=[{"function": {"name": "add", "arguments": ""}}])],
        same=[user(), says("", tool_calls=[called({})])],
    ),
    talk(
        "bare calls",
        [user(), says("", tool_calls=[{"name": "add", "arguments": {"a": 1}}]), *USES[2:]],
        same=USES,
        learned=BOTH,
    ),
    talk("calls as text", [user(), says("", tool_calls=json.dumps([called()])), *USES[2:]], same=USES, learned=BOTH),
    talk(
        "function_call",
        [
            user(),
            says(None, function_call={"name": "add", "arguments": '{"a": 1}'}),
            {"role": "function", "name": "add", "content": "2"},
            says("two"),
        ],
        same=USES,
        learned=BOTH,
    ),
    talk("null function_call", [user(), says(function_call=None)]),
    talk("empty tool_calls", [user(), says(tool_calls=[])]),
    talk("null tool_calls", [user(tool_calls=None), says(tool_calls=None)]),
    talk("last says by calls", USES[:2], same=USES[:2]),
    talk(
        "numbered call",
        [user(), says("", tool_calls=[called(id=7, index=0)]), result(tool_call_id=7), says("two")],
        same=USES,
        learned=BOTH,
    ),
    Form("tools", {"m": USES, "tools": TOOLS}, same=USES, learned=BOTH, tools=TOOLS),
    Form("bare tools", {"m": USES, "tools": [FUNCTION]}, same=USES, learned=BOTH, tools=TOOLS),
    Form("tools as text", {"m": USES, "tools": json.dumps(TOOLS)}, same=USES, learned=BOTH, tools=TOOLS),
    Form("tools as texts", {"m": USES, "tools": [json.dumps(TOOLS[0])]}, same=USES, learned=BOTH, tools=TOOLS),
    Form(
        "parameters as text",
        {"m": USES, "tools": [{**FUNCTION, "parameters": json.dumps(FUNCTION["parameters"])}]},
        same=USES,
        learned=BOTH,
        tools=TOOLS,
    ),
    Form("older functions", {"m": USES, "functions": [FUNCTION]}, same=USES, learned=BOTH, tools=TOOLS),
    Form(
        "tools of another name", {"m": USES, "f": TOOLS}, keys=M | {"tools": "f"}, same=USES, learned=BOTH, tools=TOOLS
    ),
    Form("no tools", {"m": PLAIN, "tools": []}),
    Form("null tools", {"m": PLAIN, "tools": None}),
    Form("empty tools text", {"m": PLAIN, "tools": ""}),
    Form("functions of another kind", {"m": PLAIN, "functions": ["sin", "cos"]}),
    talk("weight", [user(), says(weight=0), user("2+2?"), says("4", weight=1)], same=TWO, learned=[3]),
    talk("weight 1.0", [user(weight=None), says(weight=1.0)]),
    talk("weight 0 of a user", [user(weight=0), says()]),
    talk("train", [user(train=False), says(train=True), user("2+2?"), says("4", train=False)], same=TWO),
    talk("training", [user(), says(training=False), user("2+2?"), says("4")], same=TWO, learned=[3]),
    talk("loss", [user(), says(loss=False), user("2+2?"), says("4", loss=True)], same=TWO, learned=[3]),
    talk("empty answers", [user(), says(""), user("2+2?"), says("4")], same=[user(), says(""), *TWO[2:]], learned=[3]),
    Form("prompt and response", {"q": "1+1?", "r": "2"}, keys=PR),
    Form("alpaca", {"instruction": "1+1?", "input": "", "output": "2"}, keys=ALPACA),
    Form(
        "alpaca with input",
        {"instruction": "Add.", "input": "1+1?", "output": "2"},
        keys=ALPACA,
        same=[user("Add.\n1+1?"), says()],
    ),
    Form("prompt and completion", {"p": "1+1?", "c": "2"}, keys=PC),
    Form("conversational", {"p": [user()], "c": [says()]}, keys=PC),
    Form("conversational, a message", {"p": [user()], "c": says()}, keys=PC),
    Form("conversation and text", {"p": [SYSTEM, user()], "c": "2"}, keys=PC, same=[SYSTEM, *PLAIN], learned=[2]),
    Form("text and conversation", {"p": "1+1?", "c": [says()]}, keys=PC),
    Form("messages and completion", {"p": [user()], "c": [says()]}, keys=TALK),
    Form("completion alone is learned", {"p": TWO[:3], "c": "4"}, keys=PC, same=TWO, learned=[3]),
    Form("completion with tools", {"p": [user()], "c": USES[1:]}, keys=PC, same=USES, learned=BOTH),
    Form("whole messages beside a response", {"m": PLAIN, "r": "9"}, keys=M | {"response": "r"}),
    Form(
        "system column",
        {"q": "1+1?", "r": "2", "s": "Be brief."},
        keys=PR | {"system": "s"},
        same=[SYSTEM, *PLAIN],
        learned=[2],
    ),
    Form("null system column", {"q": "1+1?", "r": "2", "s": None}, keys=PR | {"system": "s"}),
    Form("dotted", {"data": {"q": "1+1?", "r": "2"}}, keys={"prompt": "data.q", "response": "data.r"}),
    Form("null id", {"id": None, "m": PLAIN}),
    Form("float id", {"id": 1.5, "m": PLAIN}),
    Form("nested id", {"id": {"a": 1}, "m": PLAIN}),
    Form("nested column", {"m": PLAIN, "x": {"a": [{"b": None}]}}),
    talk("unknown message keys", [user(score=0.5, at={"x": [1]}), says(model="y")]),
]

REFUSED: list[tuple[Row, dict[str, str], str]] = [
    ({"m": [user()]}, M, "m[0]: the last message is the user's, expected the assistant's; or data_args.response"),
    ({"m": [user(), says("")]}, M, "m[1].content: empty, expected an answer"),
    ({"m": [user(), says("", tool_calls=[])]}, M, "m[1].content: empty, expected an answer"),
    ({"m": [user(), says(None)]}, M, "m[1]: no content, got 'role', 'content'; expected text"),
    ({"m": [user(), {"role": "critic", "content": "2"}]}, M, "m[1].role: 'critic', expected one of system, developer"),
    ({"m": [user(), says(weight=0)]}, M, "column 'm': nothing to train on: weight or train"),
    ({"m": [user(), says(weight=0.5)]}, M, "m[1].weight: 0.5, expected 0 or 1"),
    ({"m": [user(), says(weight="1")]}, M, "m[1].weight: '1', expected 0 or 1"),
    ({"m": [user(weight=1), says()]}, M, "m[0].weight: 1 of the user, expected only of the assistant"),
    ({"m": [user(), says(weight=0, train=True)]}, M, "m[1]: weight and train differ"),
    (
        {"m": [user([{"type": "video_url", "video_url": {"url": "x"}}]), says()]},
        M,
        "m[0].content[0]: a part of type 'video_url', expected only text and pictures: videos",
    ),
    (
        {"m": [user(), says([{"type": "tool_use", "name": "add", "input": {}}])]},
        M,
        "m[1].content[0]: a part of type 'tool_use'",
    ),
    ({"m": [user({"a": 1}), says()]}, M, "m[0].content: {'a': 1}, expected text, or a list of parts"),
    ({"m": [user(tool_calls=[called()]), says()]}, M, "m[0]: a call of the user, expected only of the assistant"),
    ({"m": [user(), says(tool_calls=[called("{a: 1}")])]}, M, "m[1].tool_calls[0].arguments: '{a: 1}' is not JSON"),
    ({"m": [user(), says(tool_calls=[called([1])])]}, M, "m[1].tool_calls[0].arguments: [1], expected an object"),
    (
        {"m": [user(), says(tool_calls=[{"function": {"arguments": {}}}])]},
        M,
        "m[1].tool_calls[0]: {'function': {'arguments': {}}}, expected function",
    ),
    (
        {"m": [user(), says(tool_calls=[{"function": {"name": "f", "parameters": {}}}])]},
        M,
        "m[1].tool_calls[0]: unknown key 'parameters' of a call",
    ),
    (
        {"m": [user(), says(tool_calls=[called()], function_call={"name": "f"})]},
        M,
        "m[1]: tool_calls and function_call, expected one",
    ),
    ({"m": [user(), says(reasoning="a", thinking="b")]}, M, "m[1]: different reasoning in reasoning and thinking"),
    ({"m": PLAIN, "tools": ["add"]}, M, "tools[0]: 'add' is not JSON"),
    (
        {"m": PLAIN, "tools": [{"type": "code_interpreter"}]},
        M,
        "tools[0]: {'type': 'code_interpreter'}, expected {type: function",
    ),
    ({"m": PLAIN, "tools": 3}, M, "column 'tools': 3, expected a list of tools (data_args.tools: null: not read)"),
    ({"m": "hello"}, M, "column 'm': text that is not a JSON list of messages"),
    ({"m": {"role": "user"}}, M, "column 'm': {'role': 'user'}, expected a list of messages"),
    ({"x": 1}, M, "no column 'm', the row has 'x'"),
    ({"m": [user("\ud800"), says()]}, M, "m[0].content: a lone surrogate at character 1"),
    ({"q": "1+1?", "r": None}, PR, "column 'r': null, expected the text of an answer, or its messages"),
    ({"q": "1+1?", "r": " "}, PR, "column 'r': ' ', expected the text of an answer"),
    ({"p": [user()], "c": [user("2")]}, PC, "c[0]: the last message is the user's, expected the assistant's"),
    ({"p": PLAIN, "c": "3"}, PC, "p[1]: the last message is the assistant's, expected the user's"),
    ({"q": "1+1?", "r": "2", "s": "x"}, PR | {"tools": "f"}, "no column 'f'"),
]


def write(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, keys: Mapping[str, Any]) -> Conversations:
    return load_conversations(DataArguments(file_name=str(path), **keys), renderer=RENDERER, max_tokens=4000)


def rows_of(data: Conversations) -> list[tuple[list[int], list[bool]]]:
    lengths = data.batch.lengths_B.tolist()
    parts = zip(data.batch.tokens_T.split(lengths), data.batch.loss_mask_T.split(lengths), strict=True)
    return [(tokens.tolist(), mask.tolist()) for tokens, mask in parts]


@pytest.mark.parametrize("form", ACCEPTED, ids=[form.name for form in ACCEPTED])
def test_a_form_is_read_as_the_same_conversation_in_openais(tmp_path, form):
    data = load(write(tmp_path / "data.jsonl", [form.row]), form.keys)
    expected = RENDERER.rows(form.same, form.learned, form.tools)
    assert rows_of(data) == [(ids.tolist(), mask.tolist()) for ids, mask in expected]


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
    other = {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"w": {"type": "string"}}},
    }
    rows = [
        {"m": PLAIN, "tools": None},
        {"m": USES, "tools": [FUNCTION]},
        {
            "m": [
                user(),
                says(
                    None,
                    tool_calls=[
                        {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"w": "x"}}}
                    ],
                ),
            ],
            "tools": [other],
        },
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


def test_marks_blank_lines_and_other_line_ends_are_no_rows(tmp_path):
    lines = [json.dumps({"m": PLAIN, "n": number}) for number in range(2)]
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode() + b"\r\n \r\n")
    assert len(load(path, M).batch.samples) == 2
    path.write_text(f'{{"m": {json.dumps(PLAIN)}, "n": NaN, "huge": {"9" * 5000}}}\n')
    assert len(load(path, M).batch.samples) == 1
    assert len(ACCEPTED) + len(REFUSED) >= 100


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
        (
            {
                "chosen": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}],
                "rejected": [user(), says([{"type": "text", "text": "3"}])],
            },
            {"messages": "chosen"},
        ),
        ({"p": "1+1?", "chosen": "2", "rejected": "3", "id": None, "x": {"a": 1}}, {"prompt": "p"}),
    ],
)
def test_pairs_take_the_same_forms(tmp_path, row, keys):
    data = pairs(write(tmp_path / "data.jsonl", [row]), keys)
    expected = [RENDERER.rows([user(), says(text)])[0] for text in ("2", "3")]
    assert rows_of(data) == [(ids.tolist(), mask.tolist()) for ids, mask in expected]


def test_pairs_of_calls_are_compared_with_the_tools_told(tmp_path):
    answers = [says("", tool_calls=[called({"a": number})]) for number in (1, 2)]
    row = {"p": [user()], "chosen": [answers[0]], "rejected": [answers[1]], "tools": TOOLS}
    data = pairs(write(tmp_path / "data.jsonl", [row]), {"messages": "p"})
    expected = [RENDERER.rows([user(), answer], None, TOOLS)[0] for answer in answers]
    assert rows_of(data) == [(ids.tolist(), mask.tolist()) for ids, mask in expected]
    same = {**row, "rejected": [answers[0]]}
    with pytest.raises(DataError, match="the same answer, expected two"):
        pairs(write(tmp_path / "data.jsonl", [same]), {"messages": "p"})


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"q": "1+1?", "r": "2", "score": 1}, PR),
        ({"m": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}], "score": 1}, M),
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
        ({"q": [{"from": "human", "value": "1+1?"}]}, {"messages": "q"}, [user()], None),
        ({"q": [user([{"type": "text", "text": "1+1?"}])], "tools": TOOLS}, {"messages": "q"}, [user()], TOOLS),
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
