"""The generator of a command: a section like ``actor_infer``, from options and ``key=value`` words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from roll.configs.compose import apply_override, parse_overrides
from roll.configs.engines import card_of, strategy_names
from roll.configs.parsing import section_problems
from roll.configs.problems import ConfigErrors, ConfigProblem
from roll.configs.worker import WorkerConfig

MAX_NEW_TOKENS = 512
"""Of an answer, where nobody says."""


def generator_section(engine: str, sampling: Mapping[str, Any], words: Sequence[str] = ()) -> WorkerConfig:
    """The section of the generator.

    Args:
        engine: ``strategy_name``.
        sampling: keys of ``generating_args`` that are given; ``None`` is not given.
        words: ``key=value``, keys of the section: ``model_args.dtype=bf16``, ``strategy_args.strategy_config.…``.

    Raises:
        ConfigErrors: everything that is wrong.
    """
    given = {key: value for key, value in sampling.items() if value is not None}
    generating = {"max_new_tokens": MAX_NEW_TOKENS} | given
    tree = OmegaConf.create({"strategy_args": {"strategy_name": engine}, "generating_args": generating})
    overrides, problems = parse_overrides(words)
    for override in overrides:
        problems += apply_override(tree, override)
    values: Any = OmegaConf.to_container(tree, resolve=False)
    problems += section_problems(WorkerConfig, values)
    problems += _engine_problems(values["strategy_args"])
    if problems:
        raise ConfigErrors(problems)
    return WorkerConfig.model_validate(values)


def _engine_problems(strategy: Mapping[str, Any]) -> list[ConfigProblem]:
    name, options = strategy.get("strategy_name"), strategy.get("strategy_config", {})
    card = card_of(name) if isinstance(name, str) else None
    if card is None:
        if isinstance(name, str) and ":" in name:
            return []
        return [ConfigProblem("strategy_args.strategy_name", name, f"one of {', '.join(strategy_names('generates'))}")]
    if not card.strategy(str(name)).generates:
        return [ConfigProblem("strategy_args.strategy_name", name, f"one of {', '.join(strategy_names('generates'))}")]
    found = [*section_problems(card.options, options), *card.option_problems(options)]
    return [problem.under("strategy_args.strategy_config") for problem in found]
