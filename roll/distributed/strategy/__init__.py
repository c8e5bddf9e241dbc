"""Strategies by name, as the engines' cards list them (listing imports none), and help where an engine is optional."""

from __future__ import annotations

import warnings
from typing import cast

from roll.configs.engines import cards, strategy_path
from roll.configs.engines.card import EnginePackage
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


def ignore_renamed_collectives() -> None:
    """Silences PyTorch's warning about two old names, which are called by engines and not by who reads the warning."""
    for old in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", f"`torch.distributed.{old}` is deprecated", FutureWarning)


class MissingEngineError(ImportError):
    """The package of a strategy's engine is not installed."""


def require_engine(module: str, *, extra: str, strategy: str) -> None:
    """Checks that an engine can be imported, without importing it.

    Raises:
        MissingEngineError: the package is not there; says which extra to install.
    """
    if not EnginePackage(module, extra).installed:
        raise MissingEngineError(
            f"strategy {strategy}: the package {module!r} is not installed; expected: pip install 'roll-rl[{extra}]'",
            name=module,
        )
