"""What holds for the tests of the parts: what a process does once is not done again for each of them."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra._internal import config_loader_impl
from omegaconf import DictConfig

from roll.configs import SHIPPED, compose
from roll.utils import memory

_compose = compose._compose
_composed: dict[tuple[str, str], DictConfig] = {}


def _compose_once(name: str, folder: Path) -> DictConfig:
    """The tree of a file that includes no other, or of a shipped one, is made once."""
    text = (folder / f"{name}.yaml").read_text(encoding="utf-8", errors="replace")
    if "defaults" in text and folder.resolve() != SHIPPED.resolve():
        return _compose(name, folder)
    key = name, text
    if key not in _composed:
        _composed[key] = _compose(name, folder)
    return copy.deepcopy(_composed[key])


def _load_without_hydras_own(
    loader: config_loader_impl.ConfigLoaderImpl, config_name: str | None, overrides: list[str], **_: Any
) -> DictConfig:
    """All that Hydra does but for its own settings, which take most of the time and which ``compose`` throws away."""
    _, files = loader._parse_overrides_and_create_caching_repo(config_name, overrides)
    found = config_loader_impl.create_defaults_list(files, config_name, [], prepend_hydra=False, skip_missing=False)
    return loader._compose_config_from_defaults_list(found.defaults, files)


@pytest.fixture(scope="session", autouse=True)
def files_are_composed_once_and_old_objects_stay_unsearched() -> Iterator[None]:
    """A worker that is set up would look for garbage among all that the tests before have imported: a second each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_compose", _compose_once)
        patch.setattr(config_loader_impl.ConfigLoaderImpl, "_load_configuration_impl", _load_without_hydras_own)
        patch.setattr(memory, "_spare_what_is_here", lambda: None)
        yield
