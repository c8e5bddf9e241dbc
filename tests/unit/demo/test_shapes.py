"""The shapes that are drawn, and what is said of them."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from roll.demo.shapes import write_dataset

SMALL: dict[str, Any] = {"num_train": 300, "num_val": 100, "num_demonstrations": 300}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def seen(line: dict[str, Any], cell: int) -> list[str | None]:
    """Kinds in a picture: the box of a square is filled to all corners, that of a triangle to the lower ones."""
    (uri,) = line["images"]
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))
    kinds = []
    for top in range(0, pixels.shape[0], cell):
        for left in range(0, pixels.shape[1], cell):
            box = pixels[top + 1 : top + cell - 1, left + 1 : left + cell - 1].min(-1) < 255
            filled = {(True, True): "squares", (False, True): "triangles", (False, False): "circles"}
            kinds.append(filled[bool(box[0, 0]), bool(box[-1, 0])] if box.any() else None)
    return kinds


def right(line: dict[str, Any], cell: int) -> str:
    kinds, words = seen(line, cell), line["prompt"].removeprefix("<image>").removesuffix("?").split(" or ")
    counts = [kinds.count(word) for word in words]
    if len(counts) == 1:
        return str(counts[0])
    return "equal" if counts[0] == counts[1] else words[counts[0] < counts[1]]


@pytest.mark.parametrize("cell", [16, 28])
def test_solutions_are_what_the_pictures_show_and_demonstrations_overlook(tmp_path, cell):
    write_dataset(tmp_path, cell=cell, **SMALL)
    lines = {name: read(tmp_path / f"{name}.jsonl") for name in ("train", "val", "demonstrations")}
    assert [len(each) for each in lines.values()] == [300, 100, 300]
    for line in (*lines["train"], *lines["val"]):
        assert line["solution"] == right(line, cell)
    assert {len(line["prompt"].split(" or ")) for line in lines["train"]} == {1, 2}
    wrong = [line["response"] != f"<answer>{right(line, cell)}</answer>" for line in lines["demonstrations"]]
    assert 0.2 < np.mean(wrong) < 0.6
    arranged = {name: {tuple(seen(line, cell)) for line in each} for name, each in lines.items()}
    assert not arranged["val"] & (arranged["train"] | arranged["demonstrations"])
