"""The HTML pages of a run, from the templates beside this file: no outside resource, all foreign text escaped."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

MAX_SHOWN = 20_000
"""Characters of one text on a page: a browser shows them at once, and nobody reads more."""


def render_page(template: str, **values: Any) -> str:
    """A whole page. Every value is plain text, escaped where it is put; ``title`` is the browser's."""
    return _templates().get_template(template).render(**values)


def shortened(text: str) -> str:
    """The beginning of a very long text, and how much is left out."""
    left_out = len(text) - MAX_SHOWN
    return text if left_out <= 0 else f"{text[:MAX_SHOWN]}… ({left_out:,} more characters)"


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("roll.report"), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    environment.filters["shortened"] = shortened
    return environment
