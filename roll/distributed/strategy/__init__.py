"""Strategies by name, as the engines' cards list them. Listing them imports none."""

from __future__ import annotations

from typing import cast

from roll.configs.engines import cards, strategy_path
from roll.utils.registry import Registry

STRATEGIES: Registry[type] = Registry("strategy")
for _card in cards():
    for _name, _strategy in _card.strategies.items():
        STRATEGIES.register(_name, _strategy.path)


def strategy_class(name: str) -> type:
    """The class that a ``strategy_name`` means: a registered one, or that of a path (of the class, or of a card).

    Raises:
        UnknownNameError: no such name, module or attribute.
    """
    return cast(type, STRATEGIES.get(strategy_path(name)))
