"""A saved model that all tests of these commands share, and the command line as a user calls it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.contract import save_model

Write = Callable[[str, Sequence[Mapping[str, Any]]], str]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random model with peaked distributions."""
    folder = tmp_path_factory.mktemp("models") / "tied"
    save_model(folder, "tied", 0)
    return str(folder)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Answers do not hang on what is computed beside them, to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rows(tmp_path: Path) -> Write:
    """``rows(name, […])`` writes JSON lines and returns the path."""

    def write(name: str, lines: Sequence[Mapping[str, Any]]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return str(path)

    return write


def read(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
