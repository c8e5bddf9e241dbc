"""Functions and classes as tools, and those that are built in."""

import asyncio
import functools
import json
import math
import time
import tracemalloc
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from roll.agentic.tools.builtin import RetrievalTool, SearchTool, calculator
from roll.agentic.tools.tool import TOOLS, FunctionTool, Tool, ToolError, ToolSchema, check_tool, make_tool, text_of
from tests.support.lines import write_lines
from tests.support.web import Reply, in_json, serving


def convert(
    amount: Annotated[float, Field(description="Of Swiss francs.", ge=0)], to: Literal["EUR", "USD"] = "EUR"
) -> dict[str, Any]:
    """Converts an amount.

    By a fixed rate.
    """
    return {"amount": amount * 2, "currency": to}


async def wait(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "done"


def positional(x: int, /) -> int:
    return x


def in_pieces(n: int) -> Iterator[int]:
    yield from range(n)


later = functools.partial(wait, seconds=1)


class Counter(Tool):
    """Counts the calls of an episode."""

    schema = ToolSchema("counter", "Counts.")

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> int:
        state["n"] = state.get("n", self.start) + 1
        return int(state["n"])


def test_a_function_is_described_by_its_signature_and_docstring():
    tool = make_tool("money", f"{__name__}:convert", {})
    assert tool.schema.as_openai() == {
        "type": "function",
        "function": {
            "name": "money",
            "description": "Converts an amount.\n\nBy a fixed rate.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "amount": {"type": "number", "description": "Of Swiss francs.", "minimum": 0},
                    "to": {"type": "string", "enum": ["EUR", "USD"], "default": "EUR"},
                },
                "required": ["amount"],
            },
        },
    }
    assert tool.call({"amount": "3"}, {}) == {"amount": 6.0, "currency": "EUR"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "amount: Missing required argument"),
        ({"amount": "many"}, "amount: Input should be a valid number"),
        ({"amount": -1}, "amount: Input should be greater than or equal to 0"),
        ({"amount": 1, "to": "GBP"}, "to: Input should be 'EUR' or 'USD'"),
        ({"amount": 1, "form": "GBP"}, "form: Unexpected keyword argument"),
    ],
)
def test_wrong_arguments_are_told_to_the_policy(arguments, expected):
    with pytest.raises(ToolError, match=expected):
        make_tool("money", f"{__name__}:convert", {}).call(arguments, {})


def test_coroutine_functions_are_awaited():
    result = FunctionTool(wait).call({"seconds": 0}, {})
    assert asyncio.run(result) == "done"  # type: ignore[arg-type]


def test_a_class_is_made_with_its_arguments_and_keeps_what_it_likes_in_an_episode():
    tool, state = make_tool("count", f"{__name__}:Counter", {"start": 5}), {}
    assert [tool.call({}, state), tool.call({}, state), tool.call({}, {})] == [6, 7, 6]
    assert tool.schema.name == "count"


@pytest.mark.parametrize(
    ("target", "args", "key", "words"),
    [
        ("calcualtor", {}, "tool", "Did you mean 'calculator'?"),
        ("no.such:thing", {}, "tool", "cannot import module"),
        (f"{__name__}:SHORT", {}, "tool", "expected a function or a subclass of Tool"),
        (f"{__name__}:positional", {}, "tool", "positional-only"),
        (f"{__name__}:in_pieces", {}, "tool", "it is a generator, expected a function that returns"),
        (f"{__name__}:later", {}, "tool", "is a partial, expected a function or a subclass of Tool"),
        (f"{__name__}:Counter", {"strat": 1}, "args", "unexpected keyword argument 'strat'"),
        (f"{__name__}:convert", {"a": 1}, "args", "has no constructor"),
        ("search", {}, "args", "missing a required argument: 'corpus'"),
    ],
)
def test_what_is_no_tool_says_why(target, args, key, words):
    (problem,) = check_tool(target, args)
    assert problem.path == key and words in str(problem)


def test_a_file_that_cannot_be_imported_says_why(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("RATES = rates()\n", encoding="utf-8")
    (problem,) = check_tool(f"{file}:convert", {})
    assert problem.path == "tool" and "importing it raised NameError: name 'rates' is not defined" in str(problem)


def test_good_tools_have_no_problem():
    good: list[tuple[str, dict[str, Any]]] = [("calculator", {}), ("python", {}), ("search", {"corpus": "x"})]
    assert [check_tool(target, args) for target, args in good] == [[], [], []]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("a", "a"),
        (b"\xff\xfea", "\ufffd\ufffda"),
        ("\ud800", "?"),
        ({"ä": [1, None]}, '{"ä": [1, null]}'),
        (["half \ud83d"], '["half ?"]'),
        (math.pi, "3.141592653589793"),
        (object, "<class 'object'>"),
    ],
)
def test_any_result_becomes_text(result, expected):
    assert text_of(result) == expected


numbers = st.integers(0, 999)


@given(a=numbers, b=numbers, c=st.integers(1, 99))
def test_the_calculator_calculates(a, b, c):
    assert calculator(f"{a}+{b}*{c}-({a}-{b})") == str(a + b * c - (a - b))
    assert float(calculator(f"{a}/{c}")) == pytest.approx(a / c, rel=1e-11)
    assert calculator(f"{a}//{c}") == str(a // c)


SHORT = "1/0 2**10**10 9**9**9 'a'*10**9 ().__class__ x [1] 1==1 10**5000 sqrt(-1) 4000000**400000 'a'.zfill(10**8)"
OTHERS = ["", "__import__('os').system('true')", "round(5, -10**6)", "'%50000000d' % 1", "f'{1:9999999}'", "\x00"]
LONG = ["(" * 150, "1" * 201, "*".join(["9**3000"] * 24)]


@pytest.mark.parametrize("expression", [*SHORT.split(), *OTHERS, *LONG])
def test_what_the_calculator_cannot_do_is_an_answer_in_no_time(expression):
    """It runs in the event loop that plays all episodes, on what a policy has written."""
    assert calculator("1") == "1", "whose import takes its time"
    tracemalloc.start()
    start = time.thread_time()
    with pytest.raises(ToolError, match=r"cannot be computed|is not a number|characters, expected|too long to write"):
        calculator(expression)
    seconds, (_, most) = time.thread_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 0.1 and most < 1 << 22


@pytest.mark.parametrize(
    ("expression", "value"),
    [("(-1)**99999", "-1"), ("2**-2", "0.25"), ("2**64*3", str(2**64 * 3)), ("round(7/3, 2)", "2.33"), ("1<<9", "512")],
)
def test_the_calculator_takes_large_and_small_powers(expression, value):
    assert calculator(expression) == value


def test_a_passage_may_hold_line_breaks_that_json_does_not_escape(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    texts = ["high\u2028Alps", "long\x85Nile"]
    corpus.write_text("\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts), encoding="utf-8")
    assert SearchTool(str(corpus)).passages == texts


def test_search_finds_the_passage_and_says_when_there_is_none(tmp_path):
    rows = [
        {"title": "Alps", "text": "Mountains in the middle of Europe."},
        {"text": "The Nile is a river in Africa."},
        {"text": "Rivers of Europe: Danube, Rhine."},
    ]
    tool = SearchTool(str(write_lines(tmp_path / "corpus.jsonl", rows)), num_results=1)
    assert tool.call({"query": "river Africa"}, {}) == "1. The Nile is a river in Africa."
    assert tool.call({"query": "mountains"}, {}) == "1. Alps: Mountains in the middle of Europe."
    assert tool.call({"query": "Europe", "num_results": 3}, {}).count("Europe") == 2
    assert tool.call({"query": "quantum"}, {}) == "nothing found"


@pytest.mark.parametrize("arguments", [{}, {"query": 3}, {"query": " "}, {"query": "a", "num_results": 0}])
def test_search_says_what_it_expects(arguments, tmp_path):
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"text": "rivers"}])
    with pytest.raises(ToolError, match="expected"):
        SearchTool(str(corpus)).call(arguments, {})


@pytest.mark.parametrize("content", ["", '{"text": "a"}\n', "no json\n", '{"words": 1}\n', None])
def test_a_corpus_that_is_none_says_so(content, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    if content is not None:
        corpus.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"corpus .*corpus\.jsonl"):
        SearchTool(str(corpus))


def test_passages_are_numbered_in_their_order():
    found = [{"document": {"contents": "Nile\nA river."}, "score": 2.5}, {"title": "Rhine", "text": "Another."}]
    with serving(in_json({"result": [found]}), in_json({"result": [[]]})) as server:
        tool = RetrievalTool(f"{server.url}/retrieve", num_results=2)
        assert tool.call({"query": "rivers"}, {}) == "1. Nile\nA river.\n\n2. Rhine: Another."
        assert tool.call({"query": "rivers"}, {}) == "nothing found"
    assert server.paths == ["/retrieve"] * 2
    assert server.bodies[0] == {"queries": ["rivers"], "topk": 2, "return_scores": True}
    assert TOOLS.get("retrieval") is RetrievalTool


@pytest.mark.parametrize("answer", [[], {"result": []}, {"result": [[{"document": {"words": 3}}]]}, "text"])
def test_an_answer_of_another_shape_says_so(answer):
    with serving(in_json(answer)) as server, pytest.raises(ValueError, match="the server answered"):
        RetrievalTool(server.url).call({"query": "rivers"}, {})


def test_a_server_that_fails_is_no_empty_answer_and_senseless_arguments_are_refused():
    with serving(Reply(503)) as server, pytest.raises(httpx.HTTPStatusError):
        RetrievalTool(server.url).call({"query": "rivers"}, {})
    with pytest.raises(ToolError, match="expected some words"):
        RetrievalTool(server.url).call({"query": " "}, {})
    with pytest.raises(ValueError, match="expected http"):
        RetrievalTool("ftp://a/b")
    with pytest.raises(ValueError, match="1 to 20"):
        RetrievalTool("http://a/b", num_results=0)
