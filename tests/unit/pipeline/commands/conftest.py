"""A saved model that all tests of these commands share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.contract import save_model, threads
from tests.support.lines import write_lines


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random model with peaked distributions."""
    folder = tmp_path_factory.mktemp("models") / "tied"
    save_model(folder, "tied", 0)
    return str(folder)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Answers do not hang on what is computed beside them, to the last bit."""
    with threads(1):
        yield


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., str]:
    """``rows(name, […])`` writes JSON lines and returns the path."""
    return lambda name, lines: str(write_lines(tmp_path / name, lines))
