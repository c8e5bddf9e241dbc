"""Boxes in responses: how they are read, and scores beside counted pixels, all pairings and a plain definition."""

import itertools
import random
from typing import Any

import pytest

from roll.extras.boxes import MOST, Box, BoxesConfig, BoxesVerifier, average_precision, iou, matched, read_boxes
from roll.rewards.types import Sample

CAT, DOG = (1.0, 2.0, 5.0, 8.0), (0.0, 0.0, 9.0, 9.0)


def random_box(rng: random.Random, side: int = 12) -> Box:
    (left, right), (top, bottom) = (sorted(rng.sample(range(side + 1), 2)) for _ in range(2))
    return Box((left, top, right, bottom))


def cells(box: Box) -> set[tuple[int, int]]:
    left, top, right, bottom = map(int, box.corners)
    return set(itertools.product(range(left, right), range(top, bottom)))


def test_iou_is_that_of_counted_pixels():
    rng = random.Random(0)
    for _ in range(300):
        a, b = random_box(rng), random_box(rng)
        assert iou(a, b) == pytest.approx(len(cells(a) & cells(b)) / len(cells(a) | cells(b)))
    assert iou(Box((1, 1, 1, 5)), Box((1, 1, 1, 5))) == 0.0


def test_pairs_are_the_best_of_all():
    rng = random.Random(1)
    for _ in range(200):
        rows, columns = rng.randint(1, 5), rng.randint(1, 5)
        table = [[rng.choice((0.0, rng.random())) for _ in range(columns)] for _ in range(rows)]
        pairs = matched(table)
        assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)
        wide = table if rows <= columns else list(map(list, zip(*table, strict=True)))
        every = itertools.permutations(range(len(wide[0])), len(wide))
        best = max(sum(row[j] for row, j in zip(wide, order, strict=True)) for order in every)
        assert sum(table[i][j] for i, j in pairs) == pytest.approx(best)
    assert matched([]) == []


def by_definition(overlaps: list[list[float]], threshold: float) -> float:
    """Mean over the recalls 1/n, 2/n, … 1 of the best precision of any beginning that has this recall."""
    hits, left = [], set(range(len(overlaps[0])))
    for row in overlaps:
        best = max((j for j in left if row[j] >= threshold), key=lambda j: row[j], default=None)
        hits.append(best is not None)
        left -= {best} if best is not None else set()
    beginnings = [(sum(hits[:end]), sum(hits[:end]) / end) for end in range(1, len(hits) + 1)]
    n = len(overlaps[0])
    return sum(max((p for found, p in beginnings if found >= k), default=0.0) for k in range(1, n + 1)) / n


def test_average_precision_is_that_of_its_definition():
    rng = random.Random(2)
    for _ in range(300):
        columns = rng.randint(1, 4)
        table = [[rng.random() for _ in range(columns)] for _ in range(rng.randint(1, 6))]
        assert average_precision(table, 0.5) == pytest.approx(by_definition(table, 0.5))


@pytest.mark.parametrize(
    ("said", "boxes"),
    [
        ('[{"bbox_2d": [1, 2, 5, 8], "label": "Cat"}]', [Box(CAT, "cat")]),
        ('```json\n[{"bbox": [1, 2, 5, 8], "category": "cat", "score": 0.5}]\n```', [Box(CAT, "cat", 0.5)]),
        ('{"objects": [[1, 2, 5, 8], {"box": [[0, 0], [9, 9]], "name": "dog"}]}', [Box(CAT), Box(DOG, "dog")]),
        ("[1, 2, 5, 8]", [Box(CAT)]),
        ([[1, 2, 5, 8]], [Box(CAT)]),
        ("[]", []),
        ("There is a cat: [1, 2, 5, 8] and (0,0),(9,9).", [Box(CAT, "there is a cat"), Box(DOG)]),
        ("<|box_start|>(1,2),(5,8)<|box_end|>", [Box(CAT)]),
        ('[{"bbox_2d": [1, 2, 5]}]', None),
        ('[{"bbox_2d": [1, 2, 5, "x"]}, [1, 2, 3, 4]]', None),
        ("[1, 2, 5, 1e999]", None),
        ("none", None),
        ("3", None),
        ("[" * 5000, None),
    ],
)
def test_forms_of_boxes(said, boxes):
    assert read_boxes(said) == boxes


def judge(response: str, truth: Any, **args: Any) -> tuple[float, bool]:
    sample = Sample(prompt="?", response=response, ground_truth=truth, data_source="boxes")
    found = BoxesVerifier(BoxesConfig(**args)).check(sample)
    return round(found.score, 6), found.correct


TRUTH = [{"bbox_2d": [0, 0, 10, 10], "label": "cat"}, {"bbox_2d": [20, 0, 30, 10], "label": "dog"}]
BOTH = (
    '<think>[0,0,1,1]</think><answer>[{"bbox_2d": [20, 0, 30, 10], "label": "Dog"}, '
    '{"bbox_2d": [0, 0, 10, 8], "label": "cat"}]</answer>'
)
SWAPPED = BOTH.replace("cat", "cow").replace("Dog", "cat").replace("cow", "dog")


@pytest.mark.parametrize(
    ("response", "args", "score", "correct"),
    [
        (BOTH, {}, 0.9, True),
        (BOTH, {"min_iou": 0.9}, 0.5, False),
        (SWAPPED, {}, 0.0, False),
        (SWAPPED, {"labels": False}, 0.9, True),
        (BOTH, {"metric": "map"}, 0.85, True),  # the cat is found up to 0.8, at seven of ten thresholds
        (BOTH.replace("]</", ', {"bbox_2d": [0, 0, 1, 1], "label": "cat"}]</'), {}, 0.6, False),
        (BOTH.replace("]</", ', {"bbox_2d": [0, 0, 1, 1], "label": "cow"}]</'), {"metric": "map"}, 0.566667, False),
        ("<answer>[]</answer>", {}, 0.0, False),
        ("I see nothing", {}, 0.0, False),
        (str([[0, 0, 10, 10]] * (MOST + 1)), {"labels": False}, 0.0, False),
        ("box=[0, 0, 10, 10];", {"answer_pattern": "box=(.*);", "labels": False}, 0.5, False),
    ],
)
def test_scores(response, args, score, correct):
    assert judge(response, TRUTH, **args) == (score, correct)


def test_no_boxes_are_right_where_there_are_none_and_a_row_without_any_is_told():
    assert judge("<answer>[]</answer>", "[]") == (1.0, True)
    assert judge("<answer>[[1, 2, 3, 4]]</answer>", []) == (0.0, False)
    for truth in ("cat", [[5, 5, 1, 9]], None):
        with pytest.raises(ValueError, match="ground_truth: got"):
            judge("[]", truth)
