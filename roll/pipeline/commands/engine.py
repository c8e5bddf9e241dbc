"""The generator of a command, configured by options and ``key=value`` words for ``actor_infer``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from pydantic import Field

from roll.configs.base import Config
from roll.configs.compose import apply_override
from roll.configs.data import PICTURE_BOUNDS, DataArguments
from roll.configs.engines import strategy_names
from roll.configs.overrides import parse_overrides
from roll.configs.parsing import section_problems
from roll.configs.problems import ConfigErrors, ConfigProblem
from roll.configs.worker import DEFAULT_GENERATOR, GeneratingArguments, ModelArguments, StrategyArguments, WorkerConfig

MAX_NEW_TOKENS = 512
"""Of an answer, where nobody says."""


class GeneratorSection(Config):
    """Keys that a generator outside of a run reads."""

    model_args: ModelArguments = Field(default_factory=ModelArguments, description="How the model is loaded.")
    generating_args: GeneratingArguments = Field(default_factory=GeneratingArguments, description="How it samples.")
    strategy_args: StrategyArguments = Field(default_factory=StrategyArguments, description="The engine.")
    template: str = Field(default="native", min_length=1, description="Chat template, as data_args.template.")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Variables that it reads.")
    image_min_pixels: int | None = Field(default=None, ge=1, description="As data_args.image_min_pixels.")
    image_max_pixels: int | None = Field(default=None, ge=1, description="As data_args.image_max_pixels.")
    image_decode_limit: int = Field(default=2**26, ge=1, description="As data_args.image_decode_limit.")

    def problems(self) -> Iterator[ConfigProblem]:
        if self.generating_args.num_return_sequences > 1:
            yield self.problem("generating_args.num_return_sequences", "-n, which says how many answers")
        strategy, key = self.strategy_args, "strategy_args.strategy_name"
        card = strategy.card
        if card is None and ":" in strategy.strategy_name:
            return
        if card is None or not card.strategy(strategy.strategy_name).generates:
            yield self.problem(key, f"one of {', '.join(strategy_names('generates'))}")
            return
        options = strategy.strategy_config
        wrong = [*section_problems(card.options, options), *card.option_problems(options)]
        yield from [problem.under("strategy_args.strategy_config") for problem in wrong]


def generator_section(engine: str | None, sampling: Mapping[str, Any], words: Sequence[str] = ()) -> WorkerConfig:
    """The section of the generator.

    Args:
        engine: ``strategy_name``; ``None``: that of a run that does not say.
        sampling: keys of ``generating_args``; ``None`` is not given.
        words: ``key=value``, keys of ``GeneratorSection``.

    Raises:
        ConfigErrors: everything that is wrong.
    """
    given = {key: value for key, value in sampling.items() if value is not None}
    generating = {"max_new_tokens": MAX_NEW_TOKENS} | given
    tree = OmegaConf.create(
        {"strategy_args": {"strategy_name": engine or DEFAULT_GENERATOR}, "generating_args": generating}
    )
    overrides, problems = parse_overrides(words)
    for override in overrides:
        problems += apply_override(tree, override)
    values: Any = OmegaConf.to_container(tree, resolve=False)
    problems += section_problems(GeneratorSection, values)
    if problems:
        raise ConfigErrors(problems)
    section = GeneratorSection.model_validate(values)
    bounds = {key: getattr(section, key) for key in PICTURE_BOUNDS}
    return WorkerConfig(
        model_args=section.model_args,
        generating_args=section.generating_args,
        strategy_args=section.strategy_args,
        data_args=DataArguments(template=section.template, chat_template_kwargs=section.chat_template_kwargs, **bounds),
    )
