"""Every trainer and layout takes the same steps as plain Hugging Face in float64."""

from dataclasses import asdict
from pathlib import Path

import pytest

from roll.configs.engines import packages
from tests.support.harness import MEASURES, Figures, Layout, as_row, measure, record
from tests.support.layouts_deepspeed import LAYOUTS as DEEPSPEED
from tests.support.layouts_fsdp2 import LAYOUTS as FSDP2
from tests.support.layouts_megatron import LAYOUTS as MEGATRON

PACKAGES = packages()

LAYOUTS = [*FSDP2, *DEEPSPEED, *MEGATRON]


def group(layout: Layout) -> tuple[str, int, bool]:
    """Layouts that share their processes: engines keep state outside their objects."""
    return layout.strategy, layout.world_size, layout.slow


CASES = [
    pytest.param(layout, id=layout.id, marks=[pytest.mark.slow] if layout.slow else [])
    for layout in sorted(LAYOUTS, key=group)
]


@pytest.fixture(scope="session")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, bool], dict[str, Figures]]:
    return {}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("layout", CASES)
def test_parity(layout, figures, models, tmp_path_factory):
    package = PACKAGES.get(layout.strategy)
    if package is not None and not package.installed:
        pytest.skip(f"{package.module} is not installed (extra {package.extra})")
    key = group(layout)
    if key not in figures:
        members = [other for other in LAYOUTS if group(other) == key]
        figures[key] = measure(members, tmp_path_factory.mktemp("parity"), models_in=models)
    found = figures[key][layout.id]
    assert not found.error, found.error
    record("layout", asdict(layout) | as_row(found))
    for name in MEASURES:
        assert getattr(found, name) <= layout.bound(name), f"{name}: {as_row(found)}"
