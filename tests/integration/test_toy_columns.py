"""A column is added in a few places, whatever its axis: per token, per row, or bytes that rows refer to.

``roll`` is copied with the fields below; ``tests.support.toy_columns`` then takes them from a generator through
rollout, checkpoint, packing and a trainer's micro-batches to the loss.
"""

import os
import shutil
import sys
from pathlib import Path

import roll
from tests.integration.conftest import done

PLACES = [  # file, the line in front of which it stands, and what is added
    ("roll/data/requests.py", "from roll.data.columns import", "from roll.data.columns import Item\n"),
    (
        "roll/data/requests.py",
        "    @property\n    def runs",
        '    surprise: Annotated[FloatArray | None, Column(Axis.SAMPLED, np.float32, batch="surprise_T")] = None\n'
        '    grade: Annotated[float, Column(Axis.ROW, np.float32, batch="grade_B")] = 0.0\n'
        '    pictures: Annotated[tuple[Item, ...], Column(Axis.ITEM, batch="pictures_I")] = ()\n\n',
    ),
    ("roll/data/batch.py", "from roll.data.columns import", "from roll.data.columns import Item\n"),
    (
        "roll/data/batch.py",
        "    def __post_init__",
        "    surprise_T: Tensor | None = None\n"
        "    grade_B: Tensor | None = None\n"
        "    pictures_I: tuple[tuple[Item, ...], ...] | None = None\n\n",
    ),
]
OTHER_PLACES = ["# place: the generator", "# place: the loss"]
"""Marks in ``tests/support/toy_columns.py``."""


def test_three_columns_take_six_places(tmp_path):
    root = Path(roll.__file__).parents[1]
    shutil.copytree(root / "roll", tmp_path / "roll", symlinks=True)  # with its bytecode
    for name, before, added in PLACES:
        file = tmp_path / name
        text = file.read_text(encoding="utf-8")
        assert before in text, f"{name} has changed: {before!r}"
        file.write_text(text.replace(before, added + before, 1), encoding="utf-8")
    toy = (root / "tests/support/toy_columns.py").read_text(encoding="utf-8")
    assert all(toy.count(place) == 1 for place in OTHER_PLACES)
    assert len(PLACES) + len(OTHER_PLACES) <= 6
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    said, _ = done(sys.executable, "-m", "tests.support.toy_columns", tmp_path / "run", env=environment, cwd=tmp_path)
    assert said.strip().endswith("arrived")
