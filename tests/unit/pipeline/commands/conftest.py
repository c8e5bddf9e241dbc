"""A saved model that all tests of these commands share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.contract import save_model
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
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., str]:
    """``rows(name, […])`` writes JSON lines and returns the path."""
    return lambda name, lines: str(write_lines(tmp_path / name, lines))
