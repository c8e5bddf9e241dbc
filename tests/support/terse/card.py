"""The card of a toy engine, as a package of its own would bring it: it answers with a few tokens at most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from roll.configs.engines.card import EngineCard, EngineOptions, Strategy
from roll.configs.problems import ConfigProblem

if TYPE_CHECKING:
    from roll.configs.rl import RLConfig
    from roll.configs.worker import WorkerConfig


class TerseConfig(EngineOptions):
    """Options of the toy engine."""

    max_answer_tokens: int = Field(default=1, ge=1, description="Tokens after which it falls silent.")


class TerseCard(EngineCard):
    """Generates, and does nothing else."""

    name = "terse"
    strategies: ClassVar[Mapping[str, Strategy]] = {
        "terse": Strategy("tests.support.terse.strategy:Terse", generates=True)
    }
    options = TerseConfig

    def rules(self, role: str, worker: WorkerConfig, config: RLConfig) -> Iterator[ConfigProblem]:
        options = worker.strategy_args.typed()
        assert isinstance(options, TerseConfig)
        if options.max_answer_tokens > config.response_length:
            key = f"{role}.strategy_args.strategy_config.max_answer_tokens"
            expected = f"at most response_length = {config.response_length}"
            yield ConfigProblem(key, options.max_answer_tokens, expected, involves=("response_length",))


CARD = TerseCard()
