"""Figures in words."""

from __future__ import annotations

from collections.abc import Mapping


def page(figures: Mapping[str, float | None]) -> str:
    """The figures as text, a standard error beside its mean."""
    width = max(map(len, figures))
    lines = []
    for name, value in figures.items():
        if name.endswith("_error") or value is None:
            continue
        beside = figures.get(f"{name}_error")
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
        lines.append(f"{name:<{width}}  {shown}{'' if beside is None else f' ± {beside:.4f}'}\n")
    return "".join(lines)
