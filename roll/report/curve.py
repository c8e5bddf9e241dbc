"""The learning curve as a small hand-made SVG: no plotting library at run time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TypeAlias

Points: TypeAlias = Sequence[tuple[float, float]]

_COLORS = ("#2563c9", "#d9574a", "#1f8a4d", "#b0762b", "#7c4dbd", "#2a8c99")
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 18, 44, 46
_NARROW = 520
"""Below this width there are fewer numbers and smaller margins."""

_LETTER, _TITLE_LETTER = 7.4, 9.6
"""Mean width of a letter, in pixels."""
_FEW = 12
"""Up to so many points are marked one by one and not smoothed."""


def learning_curve_svg(
    points: Mapping[str, Points],
    *,
    title: str = "Success by training step",
    x_label: str = "step",
    y_range: tuple[float, float] = (0.0, 1.0),
    percent: bool = True,
    width: int = 760,
    height: int = 380,
) -> str:
    """Draws named curves; long ones get a running mean over the faint raw line.

    Args:
        points: name → (step, value) pairs. Values that are not finite are left out.
        y_range: lower and upper end of the vertical axis; values beyond are clipped.
        percent: label the vertical axis in percent (values are fractions).
        width: of the drawing. Letters are 13 pixels high in it, so it should be about as wide as it is shown.
    """
    series = {
        name: sorted((float(x), float(y)) for x, y in pairs if math.isfinite(y)) for name, pairs in points.items()
    }
    steps = [x for pairs in series.values() for x, _ in pairs] or [0.0]
    labels = list(series)
    room = width - _LEFT - _RIGHT - _TITLE_LETTER * len(title)
    below = width < _NARROW or room < _legend_width(labels)
    frame = _Frame(min(0.0, *steps), max(1.0, *steps), *y_range, width, height, below)
    size = 14 if frame.narrow else 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" rx="12" fill="#ffffff"/>',
        f'<text x="{frame.title}" y="26" font-size="{size}" font-weight="600" fill="#20242c">{escape(title)}</text>',
        _axes(frame, x_label, percent),
    ]
    for index, (name, pairs) in enumerate(series.items()):
        color = _COLORS[index % len(_COLORS)]
        parts.append(_curve(frame, pairs, color))
        parts.append(_legend(frame, labels, name, color))
    return "".join(parts) + "</svg>"


def round_above(value: float) -> float:
    """A number not below ``value`` whose quarters have few digits."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(power * factor for factor in (1, 2, 4, 6, 8, 10) if value <= power * factor)


def chart_svg(line: Points, dots: Points = (), width: int = 220, height: int = 64) -> str:
    """A small chart without axes, in the colours of the page: a line, and dots such as evaluations."""
    points = [(x, y) for x, y in (*line, *dots) if math.isfinite(y)]
    xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]
    spread = max(ys) - min(ys)
    frame = _Frame(
        min(xs), max(max(xs), min(xs) + 1), min(ys), max(ys) if spread else min(ys) + 1, width, height, False
    )
    frame.left, frame.right, frame.top, frame.bottom = 4, width - 4, 5, height - 5
    places = [[(frame.x(x), frame.y(y)) for x, y in each if math.isfinite(y)] for each in (line, dots)]
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places[0])
    marks = "".join(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in places[1])
    only = "".join(
        f'<circle class="only" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in places[0][: len(places[0]) == 1]
    )
    return f'<svg viewBox="0 0 {width} {height}" role="img"><polyline points="{drawn}"/>{only}{marks}</svg>'


def stacked_svg(bars: Mapping[str, Sequence[float]], labels: Sequence[int], width: int = 960, height: int = 220) -> str:
    """Bars of parts that are piled up, with a legend: a bar for each label, which is a step."""
    tops = [sum(parts) for parts in zip(*bars.values(), strict=True)]
    left, bottom, top, wide = 52, height - 22, 28, (width - 60) / len(labels)
    scale = (bottom - top) / max(tops)
    out = [f'<svg viewBox="0 0 {width} {height}" role="img" font-size="12">']
    for value in (0.0, max(tops) / 2, max(tops)):
        out.append(f'<text x="{left - 6}" y="{bottom - value * scale + 4:.1f}" text-anchor="end">{value:.3g} s</text>')
    piled = [0.0] * len(labels)
    x = float(left)
    for index, (name, values) in enumerate(bars.items()):
        color = _COLORS[index % len(_COLORS)]
        opacity = 1.0 if index < len(_COLORS) else 0.5
        out.append(f'<g fill="{color}" fill-opacity="{opacity}"><rect x="{x:.0f}" y="6" width="12" height="8"/>')
        for place, value in enumerate(values):
            if value * scale >= 0.05:
                y = bottom - (piled[place] + value) * scale
                out.append(
                    f'<rect x="{left + place * wide:.1f}" y="{y:.1f}" width="{max(1.0, wide - 1):.1f}" '
                    f'height="{value * scale:.1f}"/>'
                )
            piled[place] += value
        out.append(f'</g><text x="{x + 16:.0f}" y="14">{escape(name)}</text>')
        x += 26 + _LETTER * len(name)
    for place in range(0, len(labels), -(-len(labels) // 10)):
        out.append(f'<text x="{left + place * wide:.1f}" y="{height - 6}">{labels[place]}</text>')
    return "".join(out) + "</svg>"


def timeline_svg(
    phases: Sequence[tuple[str, float, float]],
    rows: Mapping[str, Sequence[tuple[float, float]]],
    width: int = 960,
    left: int = 150,
) -> str:
    """When each row was at work, below the phases of the step.

    Args:
        phases: names, begins and ends in seconds.
        rows: begins and ends of a worker's work, by its name.
        width: pixels of the drawing.
        left: pixels of these for the names of rows.
    """
    start, end = min(begin for _, begin, _ in phases), max(end for _, _, end in phases)
    scale = (width - left - 8) / max(end - start, 1e-9)
    height, high = 46 + 20 * len(rows), 16
    out = [f'<svg viewBox="0 0 {width} {height}" role="img" font-size="12">']
    names = list(dict.fromkeys(name for name, _, _ in phases))
    for name, begin, until in phases:
        color = _COLORS[names.index(name) % len(_COLORS)]
        x, wide = left + (begin - start) * scale, (until - begin) * scale
        out.append(
            f'<g><title>{escape(name)}: {until - begin:.3g} s</title><rect x="{x:.1f}" y="4" '
            f'width="{max(1.0, wide):.1f}" height="{height - 26}" fill="{color}" fill-opacity="0.14"/></g>'
        )
        if wide > _LETTER * len(name):
            out.append(f'<text x="{x + 2:.1f}" y="16">{escape(name)}</text>')
    for number, (name, spans) in enumerate(rows.items()):
        y = 24 + 20 * number
        out.append(f'<text x="{left - 6}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        for begin, until in spans:
            x = left + (max(begin, start) - start) * scale
            wide = max(0.7, (min(until, end) - max(begin, start)) * scale)
            out.append(f'<rect class="busy" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{high}"/>')
    for part in range(5):
        x, seconds = left + part * (width - left - 8) / 4, part * (end - start) / 4
        anchor = "end" if part == 4 else "middle"
        out.append(f'<text x="{x:.1f}" y="{height - 4}" text-anchor="{anchor}">{seconds:.3g} s</text>')
    return "".join(out) + "</svg>"


class _Frame:
    """Maps data to pixels."""

    def __init__(self, x0: float, x1: float, y0: float, y1: float, width: int, height: int, legend_below: bool) -> None:
        self.x0, self.x1, self.y0, self.y1 = x0, x1, y0, y1
        self.narrow, self.legend_below = width < _NARROW, legend_below
        self.left, self.right, self.bottom = (46 if self.narrow else _LEFT), width - _RIGHT, height - _BOTTOM
        self.top = _TOP + 20 if legend_below else _TOP
        self.title = 14 if self.narrow else _LEFT

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        inside = min(self.y1, max(self.y0, value))
        return self.bottom - (self.bottom - self.top) * (inside - self.y0) / (self.y1 - self.y0)


def _axes(frame: _Frame, x_label: str, percent: bool) -> str:
    parts = []
    for i in range(5):
        value = frame.y0 + (frame.y1 - frame.y0) * i / 4
        y = frame.y(value)
        text = f"{value:.0%}" if percent else f"{value:g}"
        stroke = "#c9c4b8" if i == 0 else "#ece8df"
        parts.append(f'<line x1="{frame.left}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{stroke}"/>')
        parts.append(f'<text x="{frame.left - 9}" y="{y + 4.5:.1f}" text-anchor="end" fill="#727a88">{text}</text>')
    for value in _ticks(frame.x0, frame.x1, 4 if frame.narrow else 6):
        x = frame.x(value)
        parts.append(f'<text x="{x:.1f}" y="{frame.bottom + 20}" text-anchor="middle" fill="#727a88">{value:g}</text>')
    middle = (frame.left + frame.right) / 2
    parts.append(
        f'<text x="{middle:.1f}" y="{frame.bottom + 38}" text-anchor="middle" fill="#727a88">{escape(x_label)}</text>'
    )
    return "".join(parts)


def _curve(frame: _Frame, pairs: list[tuple[float, float]], color: str) -> str:
    if len(pairs) <= _FEW:
        dots = "".join(f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4" fill="{color}"/>' for x, y in pairs)
        return _polyline(frame, pairs, color, 2.5, 1.0) + dots
    span = max(1, len(pairs) // 20)
    smooth = []
    for i, (x, _) in enumerate(pairs):
        window = [y for _, y in pairs[max(0, i - span) : i + span + 1]]
        smooth.append((x, sum(window) / len(window)))
    return _polyline(frame, pairs, color, 1.2, 0.28) + _polyline(frame, smooth, color, 2.6, 1.0)


def _polyline(frame: _Frame, pairs: list[tuple[float, float]], color: str, width: float, opacity: float) -> str:
    points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in pairs)
    return (
        f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}" stroke-opacity="{opacity}" '
        'stroke-linejoin="round" stroke-linecap="round"/>'
    )


def _legend(frame: _Frame, labels: list[str], name: str, color: str) -> str:
    """Entries from the right edge leftwards, in a row with the title; below it where both have no room in one."""
    index = labels.index(name)
    span = _legend_width(labels[:index] if frame.legend_below else labels[index:])
    x, y = (frame.title + span, 48) if frame.legend_below else (frame.right - span, 24)
    return (
        f'<rect x="{x:.1f}" y="{y - 7}" width="14" height="5" rx="2.5" fill="{color}"/>'
        f'<text x="{x + 19:.1f}" y="{y}" fill="#4a505c">{escape(name)}</text>'
    )


def _legend_width(labels: list[str]) -> float:
    return sum(30 + _LETTER * len(label) for label in labels)


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers between ``low`` and ``high``."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(power * factor for factor in (1, 2, 5, 10) if raw <= power * factor)
    size = max(1.0, size)
    first = math.ceil(low / size)
    return [size * i for i in range(first, math.floor(high / size) + 1)]
