"""Which tests run: those whose engine is installed; in the quick run some of the parameters, all with ``-m slow``."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from roll.configs.engines import packages


def slow_but(chosen: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """Parameters, texts or tuples for one argument, of which the chosen ones are in the quick run."""
    return [
        pytest.param(one, id=one if isinstance(one, str) else "-".join(map(str, one)), marks=marks)
        for one in every
        for marks in [() if one in chosen else pytest.mark.slow]
    ]


def one_in(number: int, rows: Iterable[Any]) -> list[Any]:
    """Of many rows that are much alike, each a text or a tuple of arguments, every so many is in the quick run."""
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow if place % number else ())
        for place, row in enumerate(rows)
    ]


def installed(strategy: str) -> bool:
    package = packages().get(strategy)
    return package is None or package.installed


def needs(strategy: str) -> None:
    """Skips a test of an engine whose package is not installed."""
    if not installed(strategy):
        package = packages()[strategy]
        pytest.skip(f"{strategy}: {package.module} is not installed (extra {package.extra})")
