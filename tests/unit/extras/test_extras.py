"""Extras: each is found by its entry and has its page."""

from pathlib import Path

import pytest

from roll.utils.registry import EXTRAS, extra

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", EXTRAS)
def test_each_extra_is_found_by_its_entry_and_has_its_page(name):
    assert extra(name).__name__.startswith(f"roll.extras.{name}")
    assert f"roll/extras/{name}" in (DOCS / EXTRAS[name].page).read_text()


def test_every_folder_of_extras_has_an_entry():
    folders = {path.parent.name for path in (DOCS.parent / "roll" / "extras").glob("*/__init__.py")}
    assert folders == set(EXTRAS)
