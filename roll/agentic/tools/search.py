"""Search in a local corpus: BM25 (Robertson and Zaragoza 2009), by ``bm25s``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from roll.agentic.tools.tool import Tool, ToolError
from roll.agentic.tools.types import ToolSchema

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
            raise ValueError(f"corpus {corpus}: there is no word to look for in it") from error
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
            raise ToolError(f"query: seen {query!r}, expected some words")
        if not isinstance(count, int) or not 1 <= count <= _MAX_RESULTS:
            raise ToolError(f"num_results: seen {count!r}, expected a number from 1 to {_MAX_RESULTS}")
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
        raise ValueError(f"corpus {path}: there is no passage in it")
    return passages
