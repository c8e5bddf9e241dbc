"""The dialect of a run: the one that is named, or the one that its chat template speaks."""

from __future__ import annotations

from roll.agentic.tools.dialects import DIALECTS, BaseDialect, dialect, parsers
from roll.configs.tools import AUTO_DIALECT
from roll.data.renderer import ChatRenderer
from roll.data.template_check import check_renderer


def dialect_for(name: str, renderer: ChatRenderer, default: str | None = None) -> BaseDialect:
    """A dialect by its name; for ``auto`` that in which the chat template writes calls (some 50 ms).

    Args:
        name: ``auto``, the name of a dialect, or ``package.module:Class``.
        default: the dialect's name where the template speaks none that is known.

    Raises:
        UnknownNameError: there is none of that name.
        ValueError: the template speaks none that is known, and there is no default.
    """
    if name != AUTO_DIALECT:
        return dialect(name)
    report = check_renderer(renderer, parsers())
    spoken = report.dialect or default
    if spoken is None:
        known = ", ".join(DIALECTS.names())
        raise ValueError(f"tools.dialect: got auto, expected one of {known}: {report.why_no_dialect}")
    return dialect(spoken)
