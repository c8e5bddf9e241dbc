"""What rows that are measured in pytest's own process need."""

from pathlib import Path

import pytest
import torch

from tests.support.ranks import unused_port


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a process group of its own."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(unused_port()))
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For folders by the name of a model, each made when it is needed."""
    return tmp_path_factory.mktemp("models")
