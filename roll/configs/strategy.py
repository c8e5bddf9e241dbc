"""``strategy_args``: which engine a role runs on, and the engine's own options."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from roll.configs.base import Config
from roll.configs.engines import card_of, strategy_names
from roll.configs.engines.card import EngineCard, EngineOptions


def _names(task: str) -> str:
    return f"{task.capitalize()}: {', '.join(strategy_names(task))}. "


class StrategyArguments(Config):
    """The engine and its options."""

    strategy_name: str = Field(
        default="fsdp2_train",
        min_length=1,
        description=f"{_names('trains')}{_names('generates')}{_names('scores')}Or package.module:Name of a strategy's "
        "class or of an engine's card.",
    )
    strategy_config: dict[str, Any] = Field(
        default_factory=dict, description="Options of that engine, see the engine options."
    )

    @property
    def card(self) -> EngineCard | None:
        """The engine's; ``None`` for a strategy of another package that has none."""
        return card_of(self.strategy_name)

    def typed(self) -> EngineOptions:
        """The options as the engine's own class; those of an engine without a card are its own to check.

        Raises:
            pydantic.ValidationError: a key or value that the engine does not know.
        """
        if self.card is None:
            return EngineOptions()
        return self.card.options.model_validate(self.strategy_config, strict=True)
