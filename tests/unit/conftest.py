"""What holds for the tests of the parts."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig

from roll.configs import SHIPPED, compose

_compose = compose._compose
_composed: dict[tuple[str, str], DictConfig] = {}


def _compose_once(name: str, folder: Path) -> DictConfig:
    """The tree of a file that includes no other, or of a shipped one, is made once: Hydra takes 65 ms for it."""
    text = (folder / f"{name}.yaml").read_text(encoding="utf-8", errors="replace")
    if "defaults" in text and folder.resolve() != SHIPPED.resolve():
        return _compose(name, folder)
    key = name, text
    if key not in _composed:
        _composed[key] = _compose(name, folder)
    return copy.deepcopy(_composed[key])


@pytest.fixture(scope="session", autouse=True)
def files_are_composed_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_compose", _compose_once)
        yield
