"""The engines' cards. Adding an engine: its folder below ``roll/distributed/strategy``, its card here, and one line."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from roll.configs.engines.card import EngineCard, EnginePackage
from roll.utils.registry import Registry, UnknownNameError, import_path

ENGINES: Registry[EngineCard] = Registry("engine")
ENGINES.register("hf_infer", "roll.configs.engines.hf_infer:CARD")
ENGINES.register("fsdp2", "roll.configs.engines.fsdp2:CARD")
ENGINES.register("deepspeed", "roll.configs.engines.deepspeed:CARD")
ENGINES.register("megatron", "roll.configs.engines.megatron:CARD")
ENGINES.register("vllm", "roll.configs.engines.vllm:CARD")
ENGINES.register("sglang", "roll.configs.engines.sglang:CARD")


def cards() -> Iterator[EngineCard]:
    """All that are registered."""
    return (ENGINES.get(name) for name in ENGINES.names())


def strategy_names(task: str | None = None) -> list[str]:
    """The names that ``strategy_name`` takes: all, or those that do a task (trains, scores, generates)."""
    found = {name: strategy for card in cards() for name, strategy in card.strategies.items()}
    return sorted(name for name, strategy in found.items() if task is None or getattr(strategy, task))


def packages() -> dict[str, EnginePackage]:
    """Packages that must be installed, by ``strategy_name``; the others need PyTorch and Transformers alone."""
    return {name: card.package for card in cards() if card.package for name in card.strategies}


def card_of(strategy_name: str) -> EngineCard | None:
    """The card of a strategy's engine.

    Args:
        strategy_name: a registered name, or the path of a card, or of a strategy class whose attribute ``card`` is one.

    Returns:
        ``None`` for a name that nothing knows and a class without a card.
    """
    registered = next((card for card in cards() if strategy_name in card.strategies), None)
    return registered or (_card_at(strategy_name) if ":" in strategy_name else None)


def strategy_path(strategy_name: str) -> str:
    """``package.module:Class`` of a strategy; a path without a card is one already."""
    card = card_of(strategy_name)
    return card.strategy(strategy_name).path if card else strategy_name


@functools.cache
def _card_at(path: str) -> EngineCard | None:
    try:
        found = import_path(path)
    except UnknownNameError:
        return None  # said by those who check that names exist
    card = getattr(found, "card", found)
    return card if isinstance(card, EngineCard) else None
