"""Boxes around things in a picture: read from a response, compared with those of the row by IoU or mean precision."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem
from roll.rewards.answers import ANSWER_TAG, AnswerConfig, after_thoughts, last_group
from roll.rewards.types import ANSWER_CPU_S, RewardResult, RuleVerifier, Sample

MOST = 200
"""Boxes of an answer; one with more is wrong."""
_CORNERS = ("bbox_2d", "bbox", "box", "box_2d", "coordinates")
_LABELS = ("label", "category", "class", "name")
_SCORES = ("score", "confidence")
_LISTS = ("boxes", "bboxes", "objects", "detections")
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_NUMBER = r"\s{0,5}(-?\d{1,9}(?:\.\d{1,9})?)\s{0,5}"
_WRITTEN = re.compile(
    r"(?:(?P<label>[^\W\d_][\w \-]{0,60}?)\s{0,3}[:=]\s{0,3})?"
    rf"[\[(]{_NUMBER},{_NUMBER}[)\]]?\s{{0,3}},\s{{0,3}}[\[(]?{_NUMBER},{_NUMBER}[\])]"
)
"""``[1, 2, 3, 4]`` or ``(1,2),(3,4)``, perhaps behind ``cat:``."""


@dataclass(frozen=True)
class Box:
    """A box of positive area, or of none."""

    corners: tuple[float, float, float, float]
    """Left, top, right, bottom."""
    label: str | None = None
    score: float | None = None
    """How sure of it the response is."""

    @property
    def area(self) -> float:
        left, top, right, bottom = self.corners
        return max(0.0, right - left) * max(0.0, bottom - top)


def iou(a: Box, b: Box) -> float:
    """Intersection over union."""
    (a_left, a_top, a_right, a_bottom), (b_left, b_top, b_right, b_bottom) = a.corners, b.corners
    wide, high = min(a_right, b_right) - max(a_left, b_left), min(a_bottom, b_bottom) - max(a_top, b_top)
    shared = max(0.0, wide) * max(0.0, high)
    whole = a.area + b.area - shared
    return shared / whole if whole > 0 else 0.0


def read_boxes(said: Any) -> list[Box] | None:
    """The boxes of JSON, or of a text that is JSON or has them in brackets; ``None``: it says none, not even ``[]``."""
    if isinstance(said, str):
        fenced = _FENCED.findall(said)
        try:
            return read_boxes(json.loads(fenced[-1] if fenced else said))
        except (ValueError, RecursionError):
            written = [_box(found.groups()[1:], found["label"]) for found in _WRITTEN.finditer(said)]
            return [box for box in written if box is not None] or None
    if isinstance(said, Mapping):
        listed = next((said[key] for key in _LISTS if isinstance(said.get(key), list)), None)
        return read_boxes([said] if listed is None else listed)
    if not isinstance(said, list):
        return None
    if said and all(_is_number(each) for each in said):
        said = [said]
    boxes = [_entry(each) for each in said]
    return None if None in boxes else [box for box in boxes if box is not None]


def _entry(value: Any) -> Box | None:
    if isinstance(value, list):
        return _box(value, None)
    if not isinstance(value, Mapping):
        return None
    corners = next((value[key] for key in _CORNERS if isinstance(value.get(key), list)), ())
    label = next((value[key] for key in _LABELS if isinstance(value.get(key), str)), None)
    score = next((value[key] for key in _SCORES if _is_number(value.get(key))), None)
    return _box(corners, label, score)


def _box(corners: Sequence[Any], label: str | None, score: float | None = None) -> Box | None:
    if len(corners) == 2 and all(isinstance(each, list) for each in corners):
        corners = [*corners[0], *corners[1]]
    try:
        left, top, right, bottom = map(float, corners)
    except (TypeError, ValueError, OverflowError):
        return None
    if not all(map(math.isfinite, (left, top, right, bottom))):
        return None
    return Box((left, top, right, bottom), None if label is None else label.strip().casefold(), score)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def matched(overlaps: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """The pairs of rows and columns, each once, whose sum is largest; those of 0 are left out.

    By shortest augmenting paths (Jonker and Volgenant 1987).
    """
    size = max(len(overlaps), len(overlaps[0]) if overlaps else 0)
    cost = [[0.0] * (size + 1) for _ in range(size + 1)]
    for i, row in enumerate(overlaps, 1):
        for j, value in enumerate(row, 1):
            cost[i][j] = -value
    rows, columns, owner = [0.0] * (size + 1), [0.0] * (size + 1), [0] * (size + 1)
    for row_number in range(1, size + 1):
        owner[0], at = row_number, 0
        least, used, way = [math.inf] * (size + 1), [False] * (size + 1), [0] * (size + 1)
        while owner[at]:
            used[at] = True
            i, step, following = owner[at], math.inf, 0
            for j in range(1, size + 1):
                if used[j]:
                    continue
                reduced = cost[i][j] - rows[i] - columns[j]
                if reduced < least[j]:
                    least[j], way[j] = reduced, at
                if least[j] < step:
                    step, following = least[j], j
            for j in range(size + 1):
                if used[j]:
                    rows[owner[j]] += step
                    columns[j] -= step
                else:
                    least[j] -= step
            at = following
        while at:
            owner[at] = owner[way[at]]
            at = way[at]
    pairs = [(owner[j] - 1, j - 1) for j in range(1, size + 1)]
    return [(i, j) for i, j in pairs if i < len(overlaps) and j < len(overlaps[0]) and overlaps[i][j] > 0]


def average_precision(overlaps: Sequence[Sequence[float]], threshold: float) -> float:
    """Area below precision over recall, precision as the largest at this recall or behind it.

    Args:
        overlaps: IoU of each box of the answer, the surest first, with each of the row's (at least one).
        threshold: least IoU of a box that is found.
    """
    total, taken, hits = len(overlaps[0]) if overlaps else 1, set[int](), list[bool]()
    for row in overlaps:
        free = [(value, -j) for j, value in enumerate(row) if j not in taken and value >= threshold]
        hits.append(bool(free))
        if free:
            taken.add(-max(free)[1])
    precisions, found = [], 0
    for number, hit in enumerate(hits, 1):
        found += hit
        precisions.append(found / number)
    return sum(max(precisions[at:]) for at, hit in enumerate(hits) if hit) / total


class BoxesConfig(AnswerConfig):
    """``args`` of ``boxes``."""

    metric: Literal["iou", "map"] = Field(
        default="iou",
        description="`iou`: the IoUs of the best pairs, over the larger number of boxes. `map`: average precision, "
        "mean over labels and thresholds; the order of the boxes, or their `score`, says which is surest.",
    )
    min_iou: float = Field(
        default=0.5, gt=0, le=1, description="Pairs that overlap less count nothing (`iou`), and are not correct."
    )
    thresholds: list[float] = Field(
        default_factory=lambda: [number / 100 for number in range(50, 100, 5)],
        min_length=1,
        description="Least IoUs of a box that is found (`map`).",
    )
    labels: bool = Field(
        default=True, description="Boxes match those of their label alone, where the row has labels. false: any."
    )

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if not all(0 < each <= 1 for each in self.thresholds):
            yield self.problem("thresholds", "numbers above 0, at most 1")


class BoxesVerifier(RuleVerifier):
    """Boxes around things in a picture, as JSON or in brackets, by their overlap with those of the row."""

    config_class: ClassVar[type[Config]] = BoxesConfig
    config: BoxesConfig
    cpu_seconds = ANSWER_CPU_S
    best = 1.0

    @classmethod
    def check_row(cls, config: Config, sample: Sample) -> None:
        truth = read_boxes(sample.ground_truth)
        if truth is None or not all(box.area > 0 for box in truth) or len(truth) > MOST:
            expected = f'at most {MOST} boxes such as [{{"bbox_2d": [left, top, right, bottom], "label": "cat"}}]'
            raise ValueError(
                f"ground_truth: got {sample.ground_truth!r:.80}, expected {expected}, right > left, bottom > top"
            )

    def check(self, sample: Sample) -> RewardResult:
        """Raises ``ValueError`` when the ground truth are no boxes."""
        self.check_row(self.config, sample)
        truth = read_boxes(sample.ground_truth)
        assert truth is not None
        answer = self._marked(sample.response)
        said = None if answer is None else read_boxes(answer)
        if said is None or len(said) > MOST:
            return RewardResult(0.0, correct=False, answer=None)
        overlaps = [[self._overlap(box, other) for other in truth] for box in said]
        close = [[value if value >= self.config.min_iou else 0.0 for value in row] for row in overlaps]
        pairs = matched(close)
        largest = max(len(said), len(truth))
        right = len(pairs) == largest
        if not truth or not said:
            score = float(not said and not truth)
        elif self.config.metric == "iou":
            score = sum(close[i][j] for i, j in pairs) / largest
        else:
            score = self._mean_precision(said, truth)
        return RewardResult(score, correct=right, answer=answer)

    def _marked(self, response: str) -> str | None:
        if self.config.answer_pattern is not None:
            return last_group(re.compile(self.config.answer_pattern, re.DOTALL), response)
        said = after_thoughts(response)
        marked = ANSWER_TAG.findall(said)
        return (marked[-1] if marked else said).strip()

    def _overlap(self, box: Box, other: Box) -> float:
        apart = self.config.labels and other.label is not None and box.label != other.label
        return 0.0 if apart else iou(box, other)

    def _mean_precision(self, said: Sequence[Box], truth: Sequence[Box]) -> float:
        by_label = self.config.labels and any(box.label is not None for box in truth)
        labels = {box.label if by_label else None for box in (*said, *truth)}
        sure = sorted(said, key=lambda box: -math.inf if box.score is None else -box.score)
        total = 0.0
        for label in labels:
            own = [box for box in truth if not by_label or box.label == label]
            if own:  # else there are boxes of things that are not there
                rows = [[iou(box, other) for other in own] for box in sure if not by_label or box.label == label]
                total += sum(average_precision(rows, each) for each in self.config.thresholds)
        return total / len(labels) / len(self.config.thresholds)
