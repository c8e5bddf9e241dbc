"""Search by a retrieval server, of the protocol of Search-R1 (Jin et al. 2025, arXiv:2503.09516)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from roll.agentic.tools.tool import Tool, ToolError
from roll.agentic.tools.types import ToolSchema
from roll.utils.addresses import is_loopback

_MAX_RESULTS = 20


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
            raise ValueError(f"url: seen {url!r}, expected http://… or https://… ({error})") from error
        if address.scheme not in ("http", "https"):
            raise ValueError(f"url: seen {url!r}, expected http://… or https://…")
        if not 1 <= num_results <= _MAX_RESULTS:
            raise ValueError(f"num_results: seen {num_results}, expected 1 to {_MAX_RESULTS}")
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
            raise ToolError(f"query: seen {query!r}, expected some words")
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
