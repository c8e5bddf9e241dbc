"""Strategies by name, as the engines' cards list them (listing imports none), and help where an engine is optional."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any, cast

from roll.configs.engines import cards, strategy_path
from roll.configs.engines.card import EnginePackage
from roll.utils.registry import Registry

if TYPE_CHECKING:
    from roll.distributed.strategy.base import StrategyContext

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


def make_strategy(context: StrategyContext) -> Any:
    """The role's strategy, not set up yet, in a process that has the variables that its engine's library counts on.

    What the user has set, by ``system_envs`` or before the start, stays as it is.
    """
    chosen = context.worker.strategy_args
    if chosen.card is not None:
        for name, value in chosen.card.environment(chosen.typed()).items():
            os.environ.setdefault(name, value)
    return strategy_class(chosen.strategy_name)(context)


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
