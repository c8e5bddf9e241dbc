"""The symbols that draw a grid world, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll.configs.problems import ConfigErrors, ConfigProblem


@dataclass(frozen=True)
class Vocabulary:
    """One symbol per kind of cell."""

    symbols: tuple[str, ...]
    """In the order of the kinds (the codes of ``grid_lookup``)."""
    legend: str
    """``#: wall, _: floor, …`` for the instruction."""


def build_vocabulary(
    defaults: Mapping[str, str], grid_lookup: Mapping[int, str] | None, grid_vocab: Mapping[str, str] | None
) -> Vocabulary:
    """Resolves the two configuration keys that change symbols.

    Args:
        defaults: kind of cell -> symbol, in the order of the codes.
        grid_lookup: code -> symbol; codes left out keep their default.
        grid_vocab: symbol -> meaning. Beside ``grid_lookup`` it only words the legend; alone it also chooses the
            symbols, and then each meaning must be one of ``defaults``'s kinds (``empty`` is understood as ``floor``).

    Raises:
        ConfigErrors: an unknown code, kind or symbol, or symbols that are not distinct single characters.
    """
    kinds = list(defaults)
    symbols = dict(defaults)
    for code, symbol in (grid_lookup or {}).items():
        if not 0 <= code < len(kinds):
            raise _refused("grid_lookup", code, f"codes from 0 to {len(kinds) - 1} ({', '.join(kinds)})")
        symbols[kinds[code]] = symbol
    if grid_vocab and not grid_lookup:
        for symbol, meaning in grid_vocab.items():
            symbols[_kind(meaning, kinds)] = symbol
    if len(set(symbols.values())) < len(kinds) or any(len(s) != 1 or s.isspace() for s in symbols.values()):
        key = "grid_lookup" if grid_lookup else "grid_vocab"
        raise _refused(key, list(symbols.values()), "distinct single visible characters")
    foreign = set(grid_vocab or {}) - set(symbols.values())
    if foreign:
        raise _refused("grid_vocab", sorted(foreign), f"only symbols of {list(symbols.values())}")
    meanings = {symbol: kind for kind, symbol in symbols.items()} | dict(grid_vocab or {})
    return Vocabulary(tuple(symbols.values()), ", ".join(f"{symbol}: {text}" for symbol, text in meanings.items()))


def vocabulary_problems(
    defaults: Mapping[str, str], grid_lookup: Mapping[int, str] | None, grid_vocab: Mapping[str, str] | None
) -> Sequence[ConfigProblem]:
    """Reasons why ``build_vocabulary`` would refuse."""
    try:
        build_vocabulary(defaults, grid_lookup, grid_vocab)
    except ConfigErrors as errors:
        return errors.problems
    return ()


def _refused(key: str, seen: object, expected: str) -> ConfigErrors:
    return ConfigErrors([ConfigProblem(key, seen, expected)])


def _kind(meaning: str, kinds: list[str]) -> str:
    kind = "floor" if meaning == "empty" else meaning
    if kind not in kinds:
        raise _refused("grid_vocab", meaning, f"one of {', '.join(kinds)}")
    return kind
