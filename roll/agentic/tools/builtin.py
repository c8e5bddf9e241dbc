"""Tools that come with ROLL: a calculator; search in a corpus by BM25 (Robertson and Zaragoza 2009), or by a server.

The calculator uses ``simpleeval``, which walks the syntax tree and runs no code.
"""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from roll.agentic.tools.tool import Tool, ToolError, ToolSchema
from roll.data.addresses import is_loopback

_MAX_BITS = 1 << 15
"""Of a product or power of integers: more digits than Python writes, few enough to be there at once."""
_MAX_PLACES = 400
_TEXTS = (ast.Attribute, ast.Subscript, ast.Slice, ast.JoinedStr, ast.FormattedValue)
"""Syntax that a number has no use for; a text can be made as long as there is memory."""


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and (base.bit_length() - 1) * exponent > _MAX_BITS:
        raise OverflowError("the power is too large")
    return base**exponent


def _product(one: Any, other: Any) -> Any:
    if isinstance(one, int) and isinstance(other, int) and one.bit_length() + other.bit_length() > _MAX_BITS:
        raise OverflowError("the product is too large")
    return one * other


def _round(number: Any, ndigits: int | None = None) -> Any:
    if ndigits is not None and abs(ndigits) > _MAX_PLACES:
        raise OverflowError(f"the number of places is above {_MAX_PLACES}")
    return round(number, ndigits)


def _constant(node: ast.Constant) -> int | float:
    if not isinstance(node.value, int | float):
        raise TypeError(f"{node.value!r:.40} is not a number")
    return node.value


_FUNCTIONS: dict[str, Any] = {
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
    "sqrt": math.sqrt,
    "floor": math.floor,
    "ceil": math.ceil,
    "log": math.log,
    "exp": math.exp,
    "gcd": math.gcd,
}
_MAX_CHARS = 200


def calculator(
    expression: Annotated[str, Field(description="For example 12*(3+4), 7//2, 2**10 or sqrt(2).")],
) -> str:
    """Computes an arithmetic expression."""
    from simpleeval import DEFAULT_OPERATORS, SimpleEval

    if len(expression) > _MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters, expected at most {_MAX_CHARS}")
    operators = {**DEFAULT_OPERATORS, ast.Pow: _power, ast.Mult: _product}
    evaluator = SimpleEval(operators, _FUNCTIONS, {"pi": math.pi, "e": math.e})
    evaluator.nodes = {kind: read for kind, read in evaluator.nodes.items() if kind not in _TEXTS}
    evaluator.nodes[ast.Constant] = _constant
    try:
        value = evaluator.eval(expression)
    except Exception as error:  # it has many, and arithmetic adds its own
        raise ToolError(f"{expression!r} cannot be computed: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ToolError(f"{expression!r} is not a number")
    try:
        return f"{value:.12g}" if isinstance(value, float) else str(value)
    except ValueError as error:  # Python writes no integer of more than some thousand digits
        raise ToolError(f"the value of {expression!r} is too long to write") from error


calculator.instant = True  # type: ignore[attr-defined]


_MAX_RESULTS = 20


class SearchTool(Tool):
    """Finds the passages of a corpus that fit a query best.

    Args:
        corpus: JSON lines with a ``text`` each and, if there is one, a ``title``.
        num_results: passages of an answer, unless the policy asks for another number, at most 20.

    Raises:
        ValueError: the file cannot be read, or holds no passage.
    """

    reads_files = True

    def __init__(self, corpus: str, num_results: Annotated[int, Field(ge=1, le=_MAX_RESULTS)] = 3) -> None:
        import bm25s

        self.passages = _read(Path(corpus).expanduser())
        self._num_results = num_results
        self._bm25s = bm25s
        self._index = bm25s.BM25()
        try:
            self._index.index(bm25s.tokenize(self.passages, show_progress=False), show_progress=False)
        except ValueError as error:
            raise ValueError(f"corpus {corpus}: it contains no words") from error
        self.schema = ToolSchema(
            "search",
            "Searches a collection of texts for words and returns the passages that fit best.",
            {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "Words to look for."},
                    "num_results": {"type": "integer", "minimum": 1, "maximum": _MAX_RESULTS},
                },
                "required": ["query"],
            },
        )

    def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        query, count = arguments.get("query"), arguments.get("num_results", self._num_results)
        if not isinstance(query, str) or not query.strip():
            raise ToolError(f"query: got {query!r}, expected some words")
        if not isinstance(count, int) or not 1 <= count <= _MAX_RESULTS:
            raise ToolError(f"num_results: got {count!r}, expected a number from 1 to {_MAX_RESULTS}")
        words = self._bm25s.tokenize([query], show_progress=False)
        found, scores = self._index.retrieve(words, k=min(count, len(self.passages)), show_progress=False)
        passages = [self.passages[i] for i, score in zip(found[0], scores[0], strict=True) if score > 0]
        return "\n\n".join(f"{rank}. {text}" for rank, text in enumerate(passages, 1)) or "nothing found"


def _read(path: Path) -> list[str]:
    passages = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            row = json.loads(line) if line.strip() else None
            if row is None:
                continue
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise ValueError(f"line {number}: expected an object with a text")
            passages.append(f"{row['title']}: {row['text']}" if row.get("title") else row["text"])
    except (OSError, ValueError) as error:
        raise ValueError(f"corpus {path}: {error}") from error
    if not passages:
        raise ValueError(f"corpus {path}: it contains no passages")
    return passages


class RetrievalTool(Tool):
    """Asks a server for the passages that fit a query best.

    It is sent ``{"queries": [query], "topk": n, "return_scores": true}`` and answers ``{"result": [[passage, …]]}``; a
    passage is an object with ``document`` or the document itself, whose text is ``contents`` or ``text``, perhaps with
    a ``title``.

    Args:
        url: address of the server, with its path.
        num_results: passages of an answer, 1 to 20.
        seconds: patience with the server.

    Raises:
        ValueError: an argument is none that is possible.
    """

    def __init__(self, url: str, num_results: int = 3, seconds: Annotated[float, Field(gt=0)] = 30.0) -> None:
        import httpx

        try:
            address = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"url: got {url!r}, expected http://… or https://… ({error})") from error
        if address.scheme not in ("http", "https"):
            raise ValueError(f"url: got {url!r}, expected http://… or https://…")
        if not 1 <= num_results <= _MAX_RESULTS:
            raise ValueError(f"num_results: got {num_results}, expected 1 to {_MAX_RESULTS}")
        self._url, self._num_results = url, num_results
        self._client = httpx.Client(timeout=seconds, trust_env=not is_loopback(address.host))
        self.schema = ToolSchema(
            "search",
            "Searches a collection of texts and returns the passages that fit the query best.",
            {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "What to look for."}},
                "required": ["query"],
            },
        )

    def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        """Raises ``httpx.HTTPError`` or ``ValueError`` when the server gives no usable answer."""
        query = arguments.get("query")
        if not isinstance(query, str) or not query.strip():
            raise ToolError(f"query: got {query!r}, expected some words")
        asked = {"queries": [query], "topk": self._num_results, "return_scores": True}
        response = self._client.post(self._url, json=asked)
        response.raise_for_status()
        passages = [_passage(each) for each in _results(response.json())]
        return "\n\n".join(f"{rank}. {text}" for rank, text in enumerate(passages, 1)) or "nothing found"


def _results(answer: Any) -> list[Any]:
    found = answer.get("result") if isinstance(answer, dict) else None
    if not (isinstance(found, list) and len(found) == 1 and isinstance(found[0], list)):
        raise ValueError(f"the server answered {answer!s:.200}, expected a result with one list of passages")
    return found[0]


def _passage(given: Any) -> str:
    document = given.get("document", given) if isinstance(given, dict) else given
    if isinstance(document, str):
        return document
    text = document.get("contents", document.get("text")) if isinstance(document, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"the server answered a passage {given!s:.200}, expected one with contents or text")
    title = document.get("title")
    return f"{title}: {text}" if title else text
