"""What tests of rollouts share: a tokenizer on disk, a renderer that sees, a gate for threads."""

import threading
from collections.abc import Iterator

import pytest

from roll.data.pictures import Pictures
from roll.data.renderer import ChatRenderer
from roll.models.tiny import make_tiny_model, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(path, seed=1)
    return str(path)


@pytest.fixture(scope="session")
def sees(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """A renderer of a tiny model that takes pictures."""
    path, tokenizer = tmp_path_factory.mktemp("tiny") / "vl", make_tokenizer(pictures=True)
    make_tiny_model(path, 0, pictures=True)
    return ChatRenderer(tokenizer, pictures=Pictures(path, tokenizer=tokenizer))


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a test's threads may wait for; open at its end."""
    gate = threading.Event()
    yield gate
    gate.set()
